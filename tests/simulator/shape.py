"""Sizes of a run, and what is passed to an operation."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

Ids = tuple[tuple[int, ...], ...]

REJECTED = "rejected"
"""What a hello says of a rank that rejects."""

ANOTHER = {
    "dispatch": "few_dispatch", "few_dispatch": "dispatch", "combine": "dispatch_planned",
    "few_combine": "few_dispatch", "dispatch_planned": "combine",
}  # fmt: skip
"""What a rank runs that differs from others; or it is in the same one with other terms."""


@dataclasses.dataclass(frozen=True)
class Shape:
    domains: tuple[tuple[int, ...], ...]  # ranks of each, ascending; ordered by the lowest
    experts: int  # of each rank
    top_k: int
    tokens: int  # of a rank, at most
    batch: int  # consecutive tokens whose rows are one put, throughput
    tiles: int = 1  # into which a rank cuts its route
    blocks: int = 1  # of a combine, that add up what others have pushed
    rows: int = 1  # the most rows of few tokens for one rank of another domain that are one put

    @cached_property
    def world_size(self) -> int:
        return sum(map(len, self.domains))

    @cached_property
    def domain_of(self) -> dict[int, int]:
        return {rank: d for d, ranks in enumerate(self.domains) for rank in ranks}

    @cached_property
    def index_of(self) -> dict[int, int]:
        """A rank's index in its domain."""
        return {rank: i for ranks in self.domains for i, rank in enumerate(ranks)}

    @property
    def batches(self) -> int:
        return -(-self.tokens // self.batch)

    def tile(self, number: int) -> range:
        """Tokens of a tile."""
        each = -(-self.tokens // self.tiles)
        return range(number * each, min(self.tokens, (number + 1) * each))

    def stager(self, source: int, domain: int) -> int:
        """The rank of that domain which stands for `source` there: the one on its rail."""
        return self.domains[domain][self.index_of[source]]

    def rank_of(self, expert: int) -> int:
        return expert // self.experts

    def named(self, ids: tuple[int, ...]) -> list[int]:
        """The ranks that a token's ids name, ascending: by copy number."""
        return sorted({self.rank_of(e) for e in ids if e >= 0})


class Operation(NamedTuple):
    """One run of an operator on all ranks. Lists go by rank."""

    number: int
    kind: str  # dispatch, dispatch_planned, combine, few_dispatch, few_combine
    ids: tuple[Ids, ...]  # of each token, -1 for none
    capacity: tuple[int, ...]  # rows that each rank has room for
    along: int = -1  # number of the dispatch whose route is gone along
    rejected_by: int = -1
    differs: tuple[int, ...] = ()  # ranks that run another one instead
    instead: str = ""  # of which kind


class Route(NamedTuple):
    """A rank's knowledge after a dispatch."""

    ids: Ids
    send_rows: tuple[tuple[int, ...], ...]  # the row of each (token, k), -1 where there is none
    copies: tuple[Copy, ...]  # that have rows here, by (source, token)
    rows: int  # of this rank


class Copy(NamedTuple):
    source: int
    token: int
    number: int  # which of the token's copies
    rows: tuple[tuple[int, int], ...]  # (k, row)


# Numbers are written down instead of worked out, so that every order of adding, and every rounding, is another value.


def x_of(operation: int, rank: int, token: int) -> Any:
    return ("x", operation, rank, token)


def weight_of(operation: int, rank: int, token: int, k: int) -> Any:
    return ("w", operation, rank, token, k)


def y_of(operation: int, rank: int, row: int) -> Any:
    return ("y", operation, rank, row)


def scalar_of(operation: int, rank: int, row: int) -> Any:
    return ("g", operation, rank, row)


def add(one: Any, other: Any) -> Any:
    return other if one is None else ("+", one, other)


def rounded(value: Any) -> Any:
    """Return a number rounded; one that is rounded already is unchanged."""
    return value if value is None or value[0] == "rounded" else ("rounded", value)
