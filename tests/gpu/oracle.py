"""Expected results of one rank, computed there from the inputs of all ranks: nothing is sent, and no code is shared
with ep_ops. For any number of ranks; tests/cpu compares the reference backend, which defines the results, with plain
loops."""

from __future__ import annotations

import dataclasses

import torch
from cases import RouteCase
from torch import Tensor


@dataclasses.dataclass
class World:
    """Tokens, weights and rows of all ranks, drawn from a seed."""

    case: RouteCase
    hidden: int
    dtype: torch.dtype
    seed: int

    def draw(self, rank: int, what: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1009 + rank * 13 + what)
        return torch.randn(*shape, generator=generator)

    def x(self, rank: int) -> Tensor:
        return self.draw(rank, 0, self.case.topk_idx[rank].shape[0], self.hidden).to(self.dtype)

    def weights(self, rank: int) -> Tensor:
        return self.draw(rank, 1, *self.case.topk_idx[rank].shape)

    def y(self, rank: int, rows: int) -> Tensor:
        return self.draw(rank, 2, rows, self.hidden).to(self.dtype)

    def row_weights(self, rank: int, rows: int) -> Tensor:
        return self.draw(rank, 3, rows)


class Oracle:
    """Expected results of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        case = world.case
        self.ids = torch.full((case.world_size, case.max_tokens, case.top_k), -1)
        for source, idx in enumerate(case.topk_idx):
            self.ids[source, : idx.shape[0]] = idx
        held = torch.tensor(case.experts_per_rank)
        first = held.cumsum(0) - held
        self.holder = torch.where(self.ids >= 0, torch.bucketize(self.ids, held.cumsum(0), right=True), -1)
        asked = torch.bincount(self.ids[self.ids >= 0], minlength=case.num_experts)
        begin, limit = torch.empty_like(asked), torch.empty_like(asked)
        for owner, count in enumerate(case.experts_per_rank):
            of = slice(int(first[owner]), int(first[owner]) + count)
            padded = -(-asked[of] // case.alignment) * case.alignment
            begin[of] = padded.cumsum(0) - padded
            limit[of] = case.capacity[owner]
            if case.slots[owner]:
                begin[of] = torch.arange(count) * case.slots[owner]
                limit[of] = begin[of] + case.slots[owner]
        self.rows = torch.full_like(self.ids, -1)
        for expert in range(case.num_experts):
            row = begin[expert] + torch.arange(int(asked[expert]))
            self.rows[self.ids == expert] = torch.where(row < limit[expert], row, -1)
        mine = slice(int(first[rank]), int(first[rank]) + case.experts_per_rank[rank])
        self.counts = torch.minimum(asked[mine], (limit[mine] - begin[mine]).clamp(min=0))
        self.dropped = asked[mine] - self.counts
        end = begin[mine] + -(-asked[mine] // case.alignment) * case.alignment
        if case.slots[rank]:
            end = begin[mine] + -(-self.counts // case.alignment) * case.alignment
        self.offs = end.clamp(max=case.capacity[rank])
        self.here = torch.where(self.holder == rank, self.rows, -1)  # [W, max_tokens, K]
        self.tokens = case.topk_idx[rank].shape[0]
        self.used = [max(self.rows[self.holder == r].tolist(), default=-1) + 1 for r in range(case.world_size)]

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Rows and row weights of all ranks, no further than rows with an owner go."""
        world = self.world
        rows = [world.y(r, used) for r, used in enumerate(self.used)]
        return rows, [world.row_weights(r, used) for r, used in enumerate(self.used)]

    @property
    def send_rows(self) -> Tensor:
        return self.rows[self.rank, : self.tokens]

    def copy_lists(self, max_tokens: int) -> tuple[Tensor, Tensor]:
        """Copies [n, 2], and the owned rows with who asked for each [m, 2], in the order of askers."""
        case = self.world.case
        asker = (self.here >= 0).nonzero()  # source, token, k
        entries = (asker[:, 0] * max_tokens + asker[:, 1]) * case.top_k + asker[:, 2]
        owned = torch.stack([self.here[self.here >= 0], entries], 1)
        came = (self.here >= 0).any(2).nonzero()  # source, token
        count = (self.here >= 0).sum(2)[came[:, 0], came[:, 1]]
        named = torch.zeros(came.shape[0], case.world_size + 1, dtype=torch.bool)
        named.scatter_(1, self.holder[came[:, 0], came[:, 1]] + 1, True)  # column 0: no expert
        number = named[:, 1 : self.rank + 1].sum(1)
        home = (came[:, 0] * max_tokens + came[:, 1]) * min(case.top_k, case.world_size) + number
        return torch.stack([count.cumsum(0) - count, home], 1), owned

    def sources(self) -> Tensor:
        came = (self.here >= 0).any(2).sum(1)
        return torch.cat([torch.zeros(1, dtype=came.dtype), came.cumsum(0)])

    def covered(self) -> tuple[Tensor, Tensor]:
        """Masks of this rank's rows: those that have an owner, and padding."""
        owned = torch.zeros(self.world.case.capacity[self.rank], dtype=torch.bool)
        owned[self.here[self.here >= 0]] = True
        padding = torch.zeros_like(owned)
        for end, count in zip(self.offs.tolist(), self.counts.tolist(), strict=True):
            padding[max(0, end - (-count) % self.world.case.alignment) : end] = True
        return owned, padding & ~owned

    def recv(self, of_token: list[Tensor]) -> Tensor:
        """Rows here that hold something of their token, NaN elsewhere but for zeros in the padding."""
        owned, padding = self.covered()
        hidden = of_token[0].shape[1:]
        out = torch.full((owned.numel(), *hidden), float("nan"), dtype=of_token[0].dtype)
        out[padding] = 0
        for source, values in enumerate(of_token):
            rows = self.here[source, : values.shape[0]]
            token, _ = (rows >= 0).nonzero(as_tuple=True)
            out[rows[rows >= 0]] = values[token]
        return out

    def recv_scalars(self, of_entry: list[Tensor]) -> Tensor:
        owned, padding = self.covered()
        out = torch.full((owned.numel(),), float("nan"))
        out[padding] = 0
        for source, values in enumerate(of_entry):
            rows = self.here[source, : values.shape[0]]
            out[rows[rows >= 0]] = values[rows >= 0]
        return out

    def combined(self, y: list[Tensor], weights: list[Tensor] | None, residual: Tensor | None = None) -> Tensor:
        """This rank's tokens."""
        holder, rows = self.holder[self.rank, : self.tokens], self.send_rows
        out = torch.zeros(self.tokens, self.world.hidden)
        for owner in range(self.world.case.world_size):
            partial = torch.zeros_like(out)
            for k in range(rows.shape[1]):
                there = (holder[:, k] == owner) & (rows[:, k] >= 0)
                row = rows[there, k]
                summand = y[owner][row].float()
                if weights is not None:
                    summand = summand * weights[owner][row][:, None]
                partial[there] += summand
            out += partial.to(self.world.dtype).float()
        return (out if residual is None else out + residual.float()).to(self.world.dtype)

    def returned(self, of_row: list[Tensor]) -> Tensor:
        """A scalar of each row, at its (token, k)."""
        holder, rows = self.holder[self.rank, : self.tokens], self.send_rows
        out = torch.zeros(rows.shape)
        for owner in range(self.world.case.world_size):
            there = (holder == owner) & (rows >= 0)
            out[there] = of_row[owner][rows[there]]
        return out
