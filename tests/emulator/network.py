"""NVSHMEM's calls, as kernels import them, and the network behind them: it reads and writes in pieces, whenever it
likes, in any order, across the ends of kernels, and keeps one promise: a word comes behind the bytes of its own put."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from . import machine
from .numbers import Int32
from .threads import TICK, WARP, Barrier, collective, me, wait

SIGNAL_SET, CMP_EQ = 9, 0


@dataclasses.dataclass
class Put:
    """On its way from one heap to another. `pieces`: (from, to, bytes) that have not been moved."""

    warp: Any  # that put it: its block and its number
    pieces: list[tuple[int, int, int]]
    word: int
    value: int
    late: int  # so long nothing else moves before the last of its pieces does, and its word

    @property
    def held(self) -> bool:
        return self.late > 0 and len(self.pieces) < 2


LATE = 1000
"""The most rounds that a put is late: kernels that do not wait for it end before."""


class Network:
    """Between heaps of so many bytes at these addresses; there is one for each memory. `late`: which part of all puts
    is late. All of such a put arrives as others do, but for one piece of it, and its word: these are behind everything
    else that is under way, so that only who waits for them waits."""

    late = 0.0

    def __init__(self, heaps: list[int], nbytes: int) -> None:
        self.heaps, self.nbytes = heaps, nbytes
        self.puts: list[Put] = []
        self.moved = 0  # when something was last under way that is not late
        self.rate = machine.draw.choice((1.0, 0.3, 0.05))  # how often it moves anything: ranks may be far ahead of it

    def rank_of(self, address: int) -> int:
        """Whose heap it lies in."""
        return next(r for r, heap in enumerate(self.heaps) if heap <= address < heap + self.nbytes)

    def put(self, warp: Any, there: int, here: int, nbytes: int, word: int, value: int, pe: int) -> None:
        """`there`, `here` and `word` lie in the sender's heap."""
        source = self.rank_of(word)
        away = self.heaps[pe] - self.heaps[source]
        pieces, at = [], 0
        while at < nbytes:
            assert self.rank_of(there) == self.rank_of(here) == source, "both ends of a put lie in the heap"
            size = min(nbytes - at, 4 * machine.draw.randint(1, 24))
            pieces.append((here + at, there + away + at, size))
            at += size
        late = machine.draw.randint(0, LATE) * TICK if machine.draw.random() < self.late else 0
        self.puts.append(Put(warp, pieces, word + away, value, late))

    def unread(self, warp: Any) -> bool:
        """Whether something that the warp has put has not left."""
        return any(put.pieces for put in self.puts if put.warp == warp)

    def step(self, draw: random.Random) -> bool:
        """Moves some pieces and words; returns whether there was anything to move."""
        busy = bool(self.puts)
        if not all(put.held for put in self.puts):
            self.moved = machine.clock
        for _ in range(draw.randint(0, 2 + len(self.puts) // 4) * (draw.random() < self.rate)):
            if self.puts:
                put = draw.choice(self.puts)
                if not put.held or machine.clock >= self.moved + put.late:
                    self.move(put, draw)
        return busy

    def move(self, put: Put, draw: random.Random) -> None:
        """One of its pieces, or its word if none is left."""
        memory = machine.memory()
        if put.pieces:
            here, there, size = put.pieces.pop(draw.randrange(len(put.pieces)))
            memory.store_words(there, memory.load_words(here, size // 4, 4), 4)
        else:
            memory.store_long(put.word, put.value)
            self.puts.remove(put)


def network() -> Network:
    return machine.networks[0]


# ---------------------------------------------------------------------- what kernels call


def warp_of() -> tuple[Any, int]:
    return me().block, me().index // WARP


@collective
def put_by_warp(lanes: list[tuple[Any, ...]]) -> list[None]:
    assert len(set(lanes)) == 1, "lanes of a warp put different things"
    warp, there, here, nbytes, word, value, operation, pe = lanes[0]
    assert operation == SIGNAL_SET
    network().put(warp, int(there), int(here), int(nbytes), int(word), int(value), int(pe))
    return [None] * WARP


def put_signal_warp(*values: Any) -> None:
    put_by_warp(warp_of(), *values)


def put_signal_block(there: Any, here: Any, nbytes: Any, word: Any, value: Any, operation: Any, pe: Any) -> None:
    """All threads of a block come here, with the same; the first of them puts."""
    assert operation == SIGNAL_SET
    wait(Barrier(0, 0, True))
    if me().index == 0:
        network().put(warp_of(), int(there), int(here), int(nbytes), int(word), int(value), int(pe))
    wait(Barrier(0, 0, True))


def put_word(word: Any, value: Any, pe: Any) -> None:
    network().put(warp_of(), 0, 0, 0, int(word), int(value), int(pe))


def test_word(word: Any, comparison: Any, value: Any) -> Int32:
    assert comparison == CMP_EQ
    return Int32(int(machine.memory().load_long(word)) == int(value))


CALLS: dict[str, Callable[..., Any]] = {
    "nvshmemx_putmem_signal_nbi_warp": put_signal_warp,
    "nvshmemx_putmem_signal_nbi_block": put_signal_block,
    "nvshmem_uint64_p": put_word,
    "nvshmem_uint64_test": test_word,
}
"""By the names that kernels ask for."""


def extern(name: str, source: Any, inline: bool) -> Callable[[Any], Callable[..., Any]]:
    """Stand in for `cute.extern`."""
    return lambda declared: CALLS[name]
