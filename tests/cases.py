"""Routes that every implementation must handle, and what must come out, in plain loops straight from the definition.

Nothing here uses ep_ops: a test compares the two.

    case = route_cases(world_size, seed)["over_capacity"]
    tokens = random_tokens(case, hidden_size=64, dtype=torch.bfloat16, seed=seed)
    plans = expected_plan(case)                       # one Plan for each rank
    rows = expected_dispatch(case, plans, tokens)     # one Rows for each rank; compare rows.covered only
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def fresh_seed() -> int:
    """A new seed in every run (EP_OPS_TEST_SEED repeats one); printed, so that pytest shows it with a failure."""
    seed = int(os.environ.get("EP_OPS_TEST_SEED", secrets.randbits(31)))
    print(f"EP_OPS_TEST_SEED={seed}")
    return seed


# ---------------------------------------------------------------------- routes


def room(capacity: int | None, slots: int) -> dict[str, Any]:
    """Arguments of a dispatch: padded rows where there are slots."""
    return {"layout": "padded", "slots": slots} if slots else {"capacity": capacity}


@dataclasses.dataclass(frozen=True)
class RouteCase:
    """The expert ids of all ranks, and the sizes of their receive buffers."""

    name: str
    experts_per_rank: tuple[int, ...]
    max_tokens: int
    alignment: int
    topk_idx: tuple[Tensor, ...]  # of each rank: int32 [T, K]
    capacity: tuple[int, ...]  # of each rank
    slots: tuple[int, ...]  # of each rank, 0 in the flat layout

    def layout(self, rank: int) -> str:
        """Return the layout of a rank's rows."""
        return "padded" if self.slots[rank] else "grouped"

    def room(self, rank: int) -> dict[str, Any]:
        """Arguments of a dispatch."""
        return room(self.capacity[rank], self.slots[rank])

    @property
    def world_size(self) -> int:
        return len(self.experts_per_rank)

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    @property
    def top_k(self) -> int:
        return self.topk_idx[0].shape[1]

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of a communicator."""
        return dict(
            num_experts=self.num_experts, experts_per_rank=self.experts_per_rank, top_k=self.top_k,
            max_tokens_per_rank=max(self.max_tokens, 1), alignment=self.alignment,
        )  # fmt: skip

    def holder(self, expert: int) -> tuple[int, int]:
        """(rank, local expert) of a global expert id."""
        for rank, held in enumerate(self.experts_per_rank):
            if expert < held:
                return rank, expert
            expert -= held
        raise ValueError(expert)


def _up(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment


def route_cases(world_size: int, seed: int) -> dict[str, RouteCase]:
    """All kinds of routes by name, drawn from ``seed``: the same on every rank."""
    draw = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, shape: Sequence[int] = ()) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=draw)

    def case(
        name: str,
        experts: Sequence[int],
        tokens: Sequence[int],
        top_k: int,
        *,
        alignment: int = 4,
        none: float = 0.0,
        share: float | None = None,
        slots: Sequence[int] | None = None,
        to: tuple[int, int] | None = None,
        distinct: bool = False,
        max_tokens: int | None = None,
    ) -> RouteCase:
        """``to``: range of experts used; ``share``: of the room that everything would take; ``none``: rate of -1."""
        low, high = to or (0, sum(experts))
        idx = []
        for count in tokens:
            if distinct:
                noise = torch.rand(count, high - low, generator=draw)
                chosen = low + noise.argsort(1)[:, :top_k]
            else:
                chosen = ints(low, high, (count, top_k))
            chosen[torch.rand(count, top_k, generator=draw) < none] = -1
            idx.append(chosen.int())
        bound = max(*tokens, 1) + int(ints(0, 3)) if max_tokens is None else max_tokens
        if slots is not None:
            capacity = tuple(held * each for held, each in zip(experts, slots, strict=True))
        else:
            worst = [sum(tokens) * top_k + held * (alignment - 1) for held in experts]
            if share is not None:
                worst = [int(rows * share) for rows in worst]
            capacity = tuple(_up(rows, alignment) for rows in worst)
        slots = tuple(slots) if slots is not None else (0,) * len(experts)
        return RouteCase(name, tuple(experts), bound, alignment, tuple(idx), capacity, slots)

    ranks = range(world_size)
    total = 4 * world_size
    even = [4] * world_size
    uneven = [(6, 1, 4, 2, 5, 3)[rank % 6] for rank in ranks]  # the same for every seed: kernels are compiled for it
    some = [int(n) for n in ints(1, 20, (world_size,))]
    hole = [0 if rank == world_size - 1 else n for rank, n in enumerate(some)]
    last = total - 4  # first expert of the last rank
    cases = [
        case("random", even, some, 3, distinct=True),
        case("random_with_none", even, some, 3, none=0.4, alignment=8),
        case("uneven_experts", uneven, some, 3, alignment=3),
        case("top_1", even, some, 1, alignment=1),
        case("top_8_wide", [8] * world_size, [40 - 3 * (rank % 8) for rank in ranks], 8, distinct=True, alignment=16),
        case("all_to_one_expert", even, some, 3, to=(last + 1, last + 2), alignment=5),
        case("all_to_one_rank", even, some, 3, to=(last, total)),
        case("nothing_to_last_rank", even, some, 3, to=(0, max(last, 1))),
        case("repeated_experts", [max(2, -(-6 // world_size))] * world_size, some, 6, alignment=2),
        case("no_tokens_on_last_rank", even, hole, 3),
        case("no_tokens_anywhere", even, [0] * world_size, 3),
        case("no_tokens_allowed", even, [0] * world_size, 3, max_tokens=0),
        case("only_none", even, some, 3, none=1.1),
        case("one_expert", [1] + [0] * (world_size - 1), some, 1),
        case("over_capacity", even, some, 3, share=0.12),
        case("no_capacity", even, some, 3, share=0.0),
        case("padded", even, some, 3, slots=[_up(3 * sum(some), 4)] * world_size),
        case("padded_over", uneven, some, 3, alignment=2, slots=[2 + 2 * (rank % 3) for rank in ranks]),
        case("padded_skewed", even, some, 3, alignment=8, slots=[8] * world_size, to=(last, last + 1)),
    ]
    return {made.name: made for made in cases}


CASE_NAMES = tuple(route_cases(1, 0))


# ---------------------------------------------------------------------- the definition, in loops


@dataclasses.dataclass
class Plan:
    """The result of planning on one rank."""

    send_rows: Tensor  # [T, K]
    arrivals: Tensor  # [4 R + W + 3], -1 where it is undefined
    offs: Tensor  # [El]
    counts: Tensor  # [El]
    dropped: Tensor  # [El]
    table: Tensor  # [W, max_tokens, K] row here of (source rank, token, k), -1 where none; not returned


@dataclasses.dataclass
class Rows:
    """The rows that a dispatch delivers to one rank; rows outside ``covered`` are undefined."""

    x: Tensor  # [R, H]
    weights: Tensor  # [R]
    covered: Tensor  # bool [R]: kept rows and padding
    padding: Tensor  # bool [R]


@dataclasses.dataclass
class Tokens:
    """Inputs of one rank."""

    x: Tensor  # [T, H]
    weights: Tensor  # [T, K]


def random_tokens(case: RouteCase, hidden_size: int, dtype: torch.dtype, seed: int) -> list[Tokens]:
    """Fresh tokens and weights of every rank."""
    draw = torch.Generator().manual_seed(seed + 1)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        Tokens(
            torch.randn(idx.shape[0], hidden_size, generator=draw).to(dtype),
            torch.rand(idx.shape, generator=draw, dtype=exact) * 2 - 0.5,
        )
        for idx in case.topk_idx
    ]


def named(case: RouteCase) -> Iterator[tuple[int, int, int, int]]:
    """(source rank, token, k, expert) of everything that is not -1, in order."""
    for source, idx in enumerate(case.topk_idx):
        for token, experts in enumerate(idx.tolist()):
            for k, expert in enumerate(experts):
                if expert != -1:
                    yield source, token, k, expert


def expected_plan(case: RouteCase, exact: bool = False) -> list[Plan]:
    """The plan of each rank. ``exact``: nothing is dropped, as in dispatch_dynamic."""
    shape = (case.world_size, case.max_tokens, case.top_k)
    send = [torch.full(tuple(idx.shape), -1, dtype=torch.int32) for idx in case.topk_idx]
    plans = []
    first = 0
    for rank, held in enumerate(case.experts_per_rank):
        capacity, slots = (1 << 40, 0) if exact else (case.capacity[rank], case.slots[rank])
        recv = torch.full(shape, -1, dtype=torch.int32)
        offs, counts, dropped = [], [], []
        begin = 0
        for local in range(held):
            if slots:
                begin = local * slots
            limit = begin + slots if slots else capacity
            row = begin
            kept = 0
            for source, token, k, expert in named(case):
                if expert != first + local:
                    continue
                if row < limit:
                    send[source][token, k] = recv[source, token, k] = row
                    kept += 1
                row += 1
            counts.append(kept)
            dropped.append(row - begin - kept)
            if slots:
                offs.append(begin + _up(kept, case.alignment))
            else:
                begin = min(begin + _up(row - begin, case.alignment), capacity)
                offs.append(begin)
        first += held
        ints = [torch.tensor(values, dtype=torch.int32) for values in (offs, counts, dropped)]
        num_rows = (offs[-1] if offs else 0) if exact else capacity
        plans.append(Plan(send[rank], expected_arrivals(case, rank, recv, num_rows), *ints, recv))
    return plans


def expected_arrivals(case: RouteCase, rank: int, table: Tensor, num_rows: int) -> Tensor:
    """Copies, owned and sources of one rank, one after the other."""
    copies, owned, sources = [], [], []
    for source, idx in enumerate(case.topk_idx):
        sources.append(len(copies))
        for token, experts in enumerate(idx.tolist()):
            flat = source * case.max_tokens + token
            rows = [(k, row) for k, row in enumerate(table[source, token].tolist()) if row >= 0]
            if rows:
                home = flat * min(case.top_k, case.world_size) + copy_number(case, experts, rank)
                copies.append((len(owned), home))
            owned += [(row, flat * case.top_k + k) for k, row in rows]
    sources.append(len(copies))
    copies.append((len(owned), -1))
    copies += [(-1, -1)] * (num_rows + 1 - len(copies))
    owned += [(-1, -1)] * (num_rows - len(owned))
    pairs = [number for pair in copies + owned for number in pair]
    return torch.tensor(pairs + sources, dtype=torch.int32)


def copy_number(case: RouteCase, experts: Sequence[int], rank: int) -> int:
    """Return the number of the copy at ``rank`` of a token that names ``experts``."""
    return sorted({case.holder(expert)[0] for expert in experts if expert != -1}).index(rank)


def blank_rows(case: RouteCase, plan: Plan, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Rows:
    """NaN everywhere but in the padding."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    padding = torch.zeros(num_rows, dtype=torch.bool)
    for end, kept in zip(plan.offs.tolist(), plan.counts.tolist(), strict=True):
        padding[end - (-kept) % case.alignment : end] = True
    rows = Rows(
        torch.full((num_rows, hidden_size), float("nan"), dtype=dtype),
        torch.full((num_rows,), float("nan"), dtype=exact),
        padding.clone(),
        padding,
    )
    rows.x[padding] = 0
    rows.weights[padding] = 0
    return rows


def expected_dispatch(
    case: RouteCase, plans: list[Plan], tokens: list[Tokens], num_rows: Sequence[int] | None = None
) -> list[Rows]:
    """The rows of each rank."""
    sizes = case.capacity if num_rows is None else num_rows
    hidden, dtype = tokens[0].x.shape[1], tokens[0].x.dtype
    received = [blank_rows(case, plan, size, hidden, dtype) for plan, size in zip(plans, sizes, strict=True)]
    for source, token, k, expert in named(case):
        row = int(plans[source].send_rows[token, k])
        if row >= 0:
            rank, _ = case.holder(expert)
            received[rank].x[row] = tokens[source].x[token]
            received[rank].weights[row] = tokens[source].weights[token, k]
            received[rank].covered[row] = True
    return received


def expected_combine(
    case: RouteCase,
    plans: list[Plan],
    y: list[Tensor],
    weights: list[Tensor] | None,
    residual: list[Tensor] | None = None,
    domains: Sequence[Sequence[int]] | None = None,
    sent: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """The combined tokens of each rank, to the bit. ``domains``: ranks of each; all are in one if none are given.
    ``sent``: what arrives of a sum [H] of fp32 (fp64); without it the sum rounded to y's dtype."""
    wire = y[0].dtype
    exact = torch.float64 if wire == torch.float64 else torch.float32
    arrives = sent or (lambda summed: summed.to(wire).to(exact))
    outs = []
    for source, idx in enumerate(case.topk_idx):
        out = torch.zeros(idx.shape[0], y[0].shape[1], dtype=exact)
        for token, experts in enumerate(idx.tolist()):
            for domain in [range(case.world_size)] if domains is None else domains:
                summed = torch.zeros(y[0].shape[1], dtype=exact)
                for rank in domain:
                    partial = torch.zeros(y[0].shape[1], dtype=exact)
                    for k, expert in enumerate(experts):
                        row = int(plans[source].send_rows[token, k])
                        if row < 0 or case.holder(expert)[0] != rank:
                            continue
                        summand = y[rank][row].to(exact)
                        if weights is not None:
                            summand = weights[rank][row].to(exact) * summand
                        partial = partial + summand
                    summed = summed + arrives(partial)
                out[token] = out[token] + (summed if source in domain else arrives(summed))
            if residual is not None:
                out[token] = out[token] + residual[source][token].to(exact)
        outs.append(out.to(wire))
    return outs


def expected_weight_grads(case: RouteCase, plans: list[Plan], row_grads: list[Tensor]) -> list[Tensor]:
    """Gradients [T, K] of each rank's weights from gradients [R] of each rank's received weights."""
    grads = [torch.zeros(tuple(idx.shape), dtype=row_grads[0].dtype) for idx in case.topk_idx]
    for source, token, k, expert in named(case):
        row = int(plans[source].send_rows[token, k])
        if row >= 0:
            grads[source][token, k] = row_grads[case.holder(expert)[0]][row]
    return grads


def dense_moe(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, up: Tensor, down: Tensor, kept: Tensor) -> Tensor:
    """A mixture of experts on one rank that holds all of them: ``tanh(x @ up[e]) @ down[e]``, weighted and added.

    x [T, H], topk_idx and topk_weights [T, K], up [E, H, F], down [E, F, H], kept bool [T, K]: naming that counts.
    """
    out = torch.zeros_like(x)
    for k in range(topk_idx.shape[1]):
        for expert in range(up.shape[0]):
            at = (topk_idx[:, k] == expert) & kept[:, k]
            out[at] += topk_weights[at, k, None] * (torch.tanh(x[at] @ up[expert]) @ down[expert])
    return out
