"""Small routes, and whether what a dispatch or a combine wrote is what the definition of tests/cases.py says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from cases import RouteCase, expected_arrivals, expected_combine, expected_dispatch, expected_plan, random_tokens
from torch import Tensor

from .ranks import Ranks, same

DEPTH = 20
"""How many puts an adversary may hold."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes for which routes are drawn. `slots`: of the padded layout, drawn for each rank; 0: the flat one. `share`:
    of the room that everything would take. `skewed`: most tokens want rank 0. `domains`: the ranks of each NVLink
    domain, if there are several, and the `wire` between them, with the most `rows` of few tokens in a put.
    `counts_waits`: waits for each rank are added up."""

    experts: tuple[int, ...]
    top_k: int
    max_tokens: int
    hidden: int = 32
    alignment: int = 1
    slots: tuple[int, ...] = (0,)
    share: float = 1.0
    skewed: bool = False
    domains: tuple[tuple[int, ...], ...] = ()
    wire: str = ""
    rows: int = 1
    counts_waits: bool = False


def wire_of(shape: Shape) -> Any:
    from courier import Adversary

    from cute_kernels.internode import wire

    more = {"rows": shape.rows}
    made = {
        "": None, "nvlink": wire.Nvlink(**more), "nvshmem": wire.Nvshmem("library", **more),
        "adversary": Adversary(DEPTH, **more),
    }  # fmt: skip
    return made[shape.wire]


def drawn(shape: Shape, draw: random.Random) -> RouteCase:
    """Tokens that name no expert, distinct ones, or any, some of them -1 and some the same."""
    total, k = sum(shape.experts), shape.top_k

    def experts() -> list[int]:
        kind = draw.random()
        if kind < 0.15:
            return [-1] * k
        if shape.skewed and kind < 0.8:
            return [draw.randrange(shape.experts[0]) for _ in range(k)]
        if kind < 0.5 or k > total:
            return [draw.randrange(-1, total) for _ in range(k)]
        return draw.sample(range(total), k)

    counts = [draw.randint(0, shape.max_tokens) for _ in shape.experts]
    idx = [torch.tensor([experts() for _ in range(n)], dtype=torch.int32).view(n, k) for n in counts]
    slots, capacity = [], []
    for held in shape.experts:
        slots.append(draw.choice(shape.slots) // shape.alignment * shape.alignment)
        rows = int((sum(counts) * k + held * shape.alignment) * shape.share)
        capacity.append(slots[-1] * held or rows // shape.alignment * shape.alignment)
    return RouteCase(
        "drawn", shape.experts, shape.max_tokens, shape.alignment, tuple(idx), tuple(capacity), tuple(slots)
    )


def untell(ranks: Ranks, case: RouteCase, at: Sequence[dict[str, int]]) -> None:
    """Makes `send_rows` that of a route of places: of rows at other ranks, that they are there and no more."""
    ends = torch.tensor(case.experts_per_rank).cumsum(0)
    for rank, idx in enumerate(case.topk_idx):
        holder = torch.searchsorted(ends, idx.flatten(), right=True)
        rows = ranks.view(at[rank]["send_rows"], idx.numel())
        rows[(rows >= 0) & (holder != rank)] = 2**31 - 1


class Truth:
    """Inputs of all ranks and what must come out."""

    def __init__(self, case: RouteCase, hidden: int, seed: int, domains: tuple[tuple[int, ...], ...] = ()) -> None:
        self.case, self.hidden, self.domains = case, hidden, domains
        self.plans = expected_plan(case)
        self.tokens = random_tokens(case, hidden, torch.float32, seed)
        self.rows = expected_dispatch(case, self.plans, self.tokens)
        noise = torch.Generator().manual_seed(seed)
        self.y = [torch.randn(rows, hidden, generator=noise) for rows in case.capacity]
        self.weights = [torch.rand(rows, generator=noise) for rows in case.capacity]

    def check_plan(self, ranks: Ranks, outputs: Sequence[dict[str, int]]) -> None:
        """`outputs`: addresses of each rank's by name."""
        for rank, (plan, at) in enumerate(zip(self.plans, outputs, strict=True)):
            for name in ("send_rows", "offs", "counts", "dropped"):
                want = getattr(plan, name)
                same(ranks.view(at[name], *want.shape), want, f"{name} of rank {rank}")
            got = ranks.view(at["arrivals"], plan.arrivals.numel())
            same(got, plan.arrivals, f"arrivals of rank {rank}", loose=True)
            assert torch.equal(expected_arrivals(self.case, rank, plan.table, self.case.capacity[rank]), plan.arrivals)

    def check_rows(
        self, ranks: Ranks, x: Sequence[int], weights: Sequence[int] | None, only: int | None = None
    ) -> None:
        """At these addresses, of each rank, or of `only` one."""
        for rank, want in enumerate(self.rows):
            if only not in (None, rank):
                continue
            covered = want.covered
            got = ranks.floats(x[rank], *want.x.shape)
            same(got[covered], want.x[covered], f"rows of rank {rank}")
            if weights is not None:
                got = ranks.floats(weights[rank], *want.weights.shape)
                same(got[covered], want.weights[covered], f"weights of rank {rank}")

    def check_combined(
        self, ranks: Ranks, out: Sequence[int], weighted: bool, residual: bool = False, only: int | None = None
    ) -> None:
        """Check the sums of `y`, to the bit, for each rank or for `only` one. The residual is x."""
        added = [tokens.x for tokens in self.tokens] if residual else None
        wants = expected_combine(
            self.case, self.plans, self.y, self.weights if weighted else None, added, self.domains or None
        )
        for rank, want in enumerate(wants):
            if only not in (None, rank):
                continue
            same(ranks.floats(out[rank], *want.shape), want, f"sums of rank {rank}")

    def owned(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(row, source rank, token, k) of every row of a rank that has an owner."""
        places = (self.plans[rank].table >= 0).nonzero().tolist()
        return [(int(self.plans[rank].table[s, t, k]), s, t, k) for s, t, k in places]

    def scaled(self, rank: int) -> tuple[list[int], Tensor, Tensor]:
        """Rows of a rank with an owner, and their gradients if x is that of the combined tokens: of y, of weights."""
        owned = self.owned(rank)
        rows = [row for row, *_ in owned]
        x = torch.stack([self.tokens[s].x[t] for _, s, t, _ in owned]) if owned else torch.empty(0, self.hidden)
        return rows, x * self.weights[rank][rows][:, None], (x.double() * self.y[rank][rows].double()).sum(1).float()
