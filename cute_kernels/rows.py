"""The sizes of rows, and clearing a row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx
from .heap import RowSizes


@dataclass(frozen=True)
class Width(RowSizes):
    """Rows that are not those of a problem."""

    hidden_size: int
    dtype: str


@cute.jit
def zero_row(row_bytes: cutlass.Constexpr[int], addr: Int64, lane: Int32) -> None:
    """By one warp: clears a row."""
    for at in cutlass.range(lane * 16, row_bytes, 32 * 16):
        ptx.st_v4(addr + at, (Int32(0), Int32(0), Int32(0), Int32(0)))
