"""Barriers of some warps of a block, whose counts follow from the numbers of warps, and what is checked of them while a
kernel is traced: a wrong number of warps fails the compilation instead of hanging a GPU.

A kernel is launched with a number of threads (`options`). Code that is written for a whole block says for how many
threads (`whole_block`), and a barrier says how many warps arrive at it and how many of them wait.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutlass import Int32
from cutlass.cute import arch

WARP = 32
MOST_BARRIERS = 16
"""Number of barriers of a block; number 0 is that of `arch.sync_threads`."""


class Block:
    """The block of the kernel that is being traced."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.used: dict[int, WarpBarrier | TeamBarriers] = {}  # by number
        self.sites: set[tuple[int, str]] = set()  # number of a barrier, and what warps do there


_traced: list[Block] = []
"""The block of the kernel that is being traced; empty outside of a trace."""


@contextlib.contextmanager
def traced_block(threads: int) -> Iterator[None]:
    """Check the barriers of a kernel that is traced within this `with` block, and whose blocks have so many threads.

    Raise ValueError if warps wait at a barrier that the others never arrive at.
    """
    block = Block(threads)
    _traced.append(block)
    try:
        yield
    finally:
        _traced.pop()
    for number, barrier in block.used.items():
        if isinstance(barrier, WarpBarrier):
            for what, warps in (("arrive", barrier.arriving), ("wait", barrier.waiting)):
                _check(warps == 0 or (number, what) in block.sites, f"no warps {what} at {barrier}")


def whole_block(threads: int) -> int:
    """Return the number of threads that code is written for. Raise ValueError if blocks of the traced kernel have
    another number."""
    if _traced:
        _check(threads == _traced[0].threads, f"code for {threads} threads in a block of {_traced[0].threads}")
    return threads


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _use(barrier: Any, numbers: range, warps: int) -> None:
    """Note that the traced kernel uses a barrier, which has these numbers and belongs to so many warps of a block."""
    _check(
        0 < numbers[0] and numbers[-1] < MOST_BARRIERS, f"{barrier} has a number that is not in [1, {MOST_BARRIERS})"
    )
    if _traced:
        block = _traced[0]
        _check(WARP * warps == block.threads, f"{barrier} in a block of {block.threads} threads")
        for number in numbers:
            other = block.used.setdefault(number, barrier)
            _check(other == barrier, f"{other} and {barrier} have the same number")


@dataclass(frozen=True)
class WarpBarrier:
    """A barrier of a whole block. The first `arriving` warps arrive and go on, and the other `waiting` ones wait."""

    number: int
    arriving: int
    waiting: int

    @property
    def threads(self) -> int:
        return WARP * (self.arriving + self.waiting)

    def arrive(self) -> None:
        """By each of the first `arriving` warps, once."""
        self._note("arrive")
        arch.barrier_arrive(barrier_id=self.number, number_of_threads=self.threads)

    def wait(self) -> None:
        """By each of the other warps, once: wait until all of the block's warps have come."""
        self._note("wait")
        arch.barrier(barrier_id=self.number, number_of_threads=self.threads)

    def _note(self, what: str) -> None:
        _use(self, range(self.number, self.number + 1), self.arriving + self.waiting)
        if _traced:
            _traced[0].sites.add((self.number, what))


@dataclass(frozen=True)
class TeamBarriers:
    """Barriers of a block that is divided into `teams` of `warps` warps each, from barrier `first` on."""

    first: int
    teams: int
    warps: int

    def wait(self, team: Int32) -> None:
        """By all warps of a team."""
        _use(self, range(self.first, self.first + self.teams), self.teams * self.warps)
        if self.warps > 1:
            arch.barrier(barrier_id=self.first + team, number_of_threads=WARP * self.warps)
        else:
            arch.sync_warp()
