"""What a row is made of, and clearing one."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import ptx


@dataclass(frozen=True)
class Width:
    """Of rows: so many numbers of a dtype ("bf16", "fp16" or "fp32")."""

    hidden_size: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.itemsize


@cute.jit
def zero_row(row_bytes: cutlass.Constexpr[int], addr: Int64, lane: Int32) -> None:
    """By one warp: clears a row."""
    at = lane * 16
    while at < row_bytes:
        ptx.st_v4(addr + at, (Int32(0), Int32(0), Int32(0), Int32(0)))
        at += 32 * 16
