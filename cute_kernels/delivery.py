"""Storing of received rows: as x, as codes with scales in the layout of a consumer, or decoded to numbers.

docs/formats.md defines the layouts, and the position of each unit of 4 bytes or 1 byte.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from . import ptx
from .formats import Form
from .heap import Problem
from .rows import Width, zero_row
from .swizzled import TILE_BYTES, Begins, Tiles
from .views import Floats, Ints, Records, Uint8s


class Arrived(NamedTuple):
    """The tensors that rows go to, and their sizes."""

    rows: Int64
    weights: Floats
    scales: Int64
    num_rows: Int32
    slots: Int32  # rows of each expert; 0: segments follow each other
    begins: Begins | None = None  # where swizzled scales need it


@dataclass(frozen=True)
class Delivery:
    """`format` "": rows travel as they are. `layout` "": what travels in a format arrives as the numbers."""

    problem: Problem | Width  # whose rows these are
    format: str = ""
    layout: str = ""

    @property
    def form(self) -> Form:
        return Form(self.format, self.problem.hidden_size)

    @property
    def row_bytes(self) -> int:
        """Size of a received row in bytes."""
        return self.problem.hidden_size if self.layout else self.problem.row_bytes

    @property
    def traveling_bytes(self) -> int:
        """Size of a sent row in bytes."""
        return self.form.staged_bytes if self.format else self.problem.row_bytes

    @property
    def tiles(self) -> Any:
        """The layout of swizzled scales (`Tiles`); None for others."""
        kind, _, consumer = self.layout.partition("/")
        return Tiles(consumer, self.units) if kind == "swizzled" else None

    @property
    def in_words(self) -> bool:
        """Whether four exponents of a row are 4 bytes, those of columns behind the last one among them."""
        return self.layout not in ("", "rows", "columns")

    @property
    def unit(self) -> int:
        """Bytes that scales are stored by: 4, unless a row's exponents would not lie at multiples of 4."""
        return 1 if self.layout == "rows" and self.form.in_bytes and self.form.scales % 4 else 4

    @property
    def units(self) -> int:
        """Number of 4-byte units of a row's scales. A unit contains four exponents."""
        four = self.unit == 4 and (self.form.in_bytes or self.in_words)
        return -(-self.form.scales // 4) if four else self.form.scales

    @cute.jit
    def scales_at(self, to: Arrived, row: Int32) -> tuple[Int64, Int32]:
        """By a warp: where the first unit of a row's scales lies, and the distance to the next."""
        if const_expr(self.tiles is not None):
            return self.tiles.scales_at(to, row), Int32(TILE_BYTES)
        if const_expr(self.layout == "rows"):
            return Records(to.scales, self.units * self.unit).at(row), Int32(self.unit)
        return _scales_in_lines(to, row, self.units)

    @cute.jit
    def zero(self, to: Arrived, row: Int32, end: Int32, lane: Int32, weights: cutlass.Constexpr[bool]) -> None:
        """By a warp: padding rows of one expert, from `row` on, and what goes with them, but for swizzled scales, of
        which more is zeroed than rows have (`Tiles.clear`)."""
        for i in cutlass.range(row, end, 1):
            zero_row(self.row_bytes, Records(to.rows, self.row_bytes).at(i), lane)
        if const_expr(weights):
            for i in cutlass.range(row + lane, end, 32):
                to.weights.bits[i] = Int32(0)
        if const_expr(self.layout == "rows"):
            first, _ = self.scales_at(to, row)
            for i in cutlass.range(lane, (end - row) * self.units, 32):
                self.store_unit(Records(first, self.unit).at(i), Int32(0))
        elif const_expr(self.layout != "" and self.tiles is None):
            first, step = self.scales_at(to, row)
            for line in cutlass.range(self.units):
                for i in cutlass.range(lane, end - row, 32):
                    self.store_unit(Ints(Records(first, step).at(line)).at(i), Int32(0))

    def store_unit(self, at: Int64, value: Int32) -> None:
        if self.unit == 1:
            Uint8s(at)[0] = value
        else:
            Ints(at)[0] = value

    @cute.jit
    def staged_unit(self, words: Any, i: Int32) -> Int32:
        """Return the i-th unit of staged scales, which begin at `words` (bytes) in shared memory."""
        form = self.form
        value = Int32(0)
        if const_expr(self.unit == 1):
            value = staged_scale(form, words, i)
        elif const_expr(self.layout == "packed" and not form.in_bytes):
            for j in range_constexpr(4):
                if 4 * i + j < form.scales:
                    value = value | (((staged_scale(form, words, 4 * i + j) >> 23) & 0xFF) << (8 * j))
        else:
            value = ptx.ld_shared(words + i * 4)
        return value

    @cute.jit
    def store_scale(self, at: tuple[Int64, Int32], column: Int32, stored: Int32) -> None:
        """Store one scale of the row whose scales lie `at`, an address and the distance to the next unit: as fp32 bits,
        or as its exponent where these travel. `in_words` a column behind the last belongs to the row, too."""
        first, step = at
        if const_expr(self.in_words):
            exponent = stored
            if const_expr(not self.form.in_bytes):
                exponent = (stored >> 23) & 0xFF
            Uint8s(Records(first, step).at(column >> 2))[column & 3] = exponent
        elif const_expr(self.form.in_bytes):
            Uint8s(first)[column] = stored
        else:
            Ints(Records(first, step).at(column))[0] = stored


def staged_scale(form: Form, words: Any, i: Int32) -> Int32:
    """Return the i-th of the staged scales that begin at `words` in shared memory: fp32 bits, or an exponent."""
    if form.in_bytes:
        return (ptx.ld_shared(words + (i >> 2) * 4) >> ((i & 3) * 8)) & 0xFF
    return ptx.ld_shared(words + i * 4)


@cute.jit
def _scales_in_lines(to: Arrived, row: Int32, lines: cutlass.Constexpr[int]) -> tuple[Int64, Int32]:
    """Return the address of units in lines, each of which contains one unit of every row; in the padded layout, of
    every row of an expert."""
    across, at = (to.num_rows + 3) & ~3, Int64(row)
    if to.slots > 0:
        across = (to.slots + 3) & ~3
        expert = row // to.slots
        at = Int64(expert) * lines * across + (row - expert * to.slots)
    scales = Ints(to.scales)
    return scales.at(at), across * scales.step
