"""Slices: how a warp iterates over a row in registers, 16 bytes for each lane at a time."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr


@dataclass(frozen=True)
class Slices:
    """Division of a row into `slices` of `vectors` 16-byte vectors for each of 32 lanes. `most`: the largest number of
    vectors that fit in registers. There are as few slices as possible, because each has a fixed cost."""

    row_bytes: int
    dtype: str
    most: int = 8

    @property
    def lane_vectors(self) -> int:
        return -(-self.row_bytes // (16 * 32))

    @property
    def vectors(self) -> int:
        return min(range(1, self.most + 1), key=lambda u: (-(-self.lane_vectors // u), u))

    @property
    def slices(self) -> int:
        return -(-self.lane_vectors // self.vectors)

    @property
    def slice_bytes(self) -> int:
        return self.vectors * 32 * 16

    @cute.jit
    def end_of(self, last: Boolean) -> Int32:
        """Return the bytes of a slice, which are fewer in the `last` one of a row that does not fill it."""
        end = Int32(self.slice_bytes)
        if const_expr(self.row_bytes % self.slice_bytes != 0):
            if last:
                end = Int32(self.row_bytes % self.slice_bytes)
        return end

    @property
    def values(self) -> int:
        """Numbers a lane holds in one slice."""
        return self.vectors * (16 // (4 if self.dtype == "fp32" else 2))
