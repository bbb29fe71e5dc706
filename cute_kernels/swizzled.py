"""Places of swizzled scales: tiles of 128 rows and 4 columns, each expert's beginning a tile of its own.

One exponent is a byte; the four of a row that lie in one tile are next to each other, 4 bytes, and a row's next four
512 bytes further on, in the next tile. Which is an expert's first tile, its *base*, consumers say differently:
docs/formats.md.

Example: three experts of 100 rows each, 8 columns, so tiles come in pairs of 1024 bytes. The third expert begins at row
200. Its base is 2 for "torch" (one tile for each expert before it), and 3 for "quack" (200 >> 7, and one for each
expert before it) and "flashinfer" ((200 + 2 * 127) >> 7). The scales of its row 37 = 1 * 32 + 5, columns 0 to 3, begin
5 * 16 + 1 * 4 = 84 bytes into its base, and those of columns 4 to 7 at 84 + 512.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import arch

from .views import Ints, Records

ROWS = 128
"""Rows of a tile."""
TILE_BYTES = 512


class Begins(NamedTuple):
    """The begins of the segments of this rank's experts."""

    experts: Int32
    offs: Ints | None  # where each ends in memory; if `start` is None
    start: Any = None  # where each begins, in shared memory


@cute.jit
def begin_of(begins: Begins, expert: Int32) -> Int32:
    begin = Int32(0)
    if const_expr(begins.start is not None):
        begin = begins.start[expert]
    elif expert > 0:
        begin = begins.offs[expert - 1]  # type: ignore[index]
    return begin


@cute.jit
def expert_of(begins: Begins, row: Int32) -> Int32:
    """By a warp: the last expert that begins at or before a row."""
    begun = Int32(0)
    for first in cutlass.range(0, begins.experts, 32):
        expert, there = first + arch.lane_idx(), Int32(0)
        if expert < begins.experts:
            if begin_of(begins, expert) <= row:
                there = Int32(1)
        begun += Int32(arch.popc(arch.vote_ballot_sync(there != 0)))
    return begun - 1


@dataclass(frozen=True)
class Tiles:
    """Tiles of the scales that a rank receives: `consumer` is "torch", "quack" or "flashinfer"; `words` of 4 columns a
    row."""

    consumer: str
    words: int

    @cute.jit
    def scales_at(self, to: Any, row: Int32) -> Int64:
        """By a warp: where the first 4 bytes of a row's scales lie. `to`: a `delivery.Arrived`."""
        expert, begin = Int32(0), Int32(0)
        if to.slots > 0:
            expert = row // to.slots
            begin = expert * to.slots
        else:
            expert = expert_of(to.begins, row)
            begin = begin_of(to.begins, expert)
        return self.at(to, self.base(to, expert, begin), row - begin)

    @cute.jit
    def base(self, to: Any, expert: Int32, begin: Int32) -> Int32:
        """By a warp: the first tile of an expert whose rows begin there."""
        base = expert * ((to.slots + ROWS - 1) >> 7)
        if to.slots == 0:
            if const_expr(self.consumer == "quack"):
                base = (begin >> 7) + expert
            elif const_expr(self.consumer == "flashinfer"):
                base = (begin + (ROWS - 1) * expert) >> 7
            else:
                tiles = Int32(0)
                for behind in cutlass.range(arch.lane_idx() + 1, expert + 1, 32):
                    rows = begin_of(to.begins, behind) - begin_of(to.begins, behind - 1)
                    tiles += (rows + ROWS - 1) >> 7
                base = arch.warp_redux_sync(tiles, "add")
        return base

    @cute.jit
    def at(self, to: Any, base: Int32, number: Int32) -> Int64:
        """Return the address of the scales of the `number`-th row of an expert. It is within some existing tile, even
        for an invalid route."""
        tiles = to.begins.experts * ((to.slots + ROWS - 1) >> 7)
        if to.slots == 0:
            if const_expr(self.consumer == "quack"):
                tiles = ((to.num_rows + ROWS - 1) >> 7) + to.begins.experts - 1
            else:
                tiles = (to.num_rows + (ROWS - 1) * to.begins.experts) >> 7
        tile = cutlass.max(cutlass.min(base + (number >> 7), tiles - 1), 0)
        return Records(to.scales, self.words * TILE_BYTES).at(tile) + ((number & 31) * 16 + ((number >> 5) & 3) * 4)

    @cute.jit
    def clear(self, to: Any, expert: Int32, begin: Int32, kept: Int32, rows: Int32) -> None:
        """By a warp: zeroes the scales behind the `kept` first of an expert's rows, up to the end of the tile in which
        its segment of so many rows ends."""
        base = self.base(to, expert, begin)
        for number in cutlass.range(kept + arch.lane_idx(), (rows + ROWS - 1) // ROWS * ROWS, 32):
            at = self.at(to, base, number)
            for word in cutlass.range(self.words):
                Ints(at, step=TILE_BYTES)[word] = Int32(0)
