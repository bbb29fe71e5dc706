"""Common code of local kernels on rows, whose slices (../slices.py) are dealt out to the warps of the grid."""

# No "from __future__ import annotations": the kernels' annotations are read as types.

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from ..launch import Launched
from ..rows import Width
from ..slices import Slices
from ..views import Vectors

WARPS = 8
"""Warps of a block."""


@dataclass(frozen=True)
class RowSlices(Launched):
    """A kernel on rows of `hidden_size` numbers."""

    hidden_size: int
    dtype: str

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (WARPS * 32, 1, 1)}

    @property
    def width(self) -> Width:
        return Width(self.hidden_size, self.dtype)

    @property
    def most_vectors(self) -> int:
        """The most vectors of one operand that a lane holds."""
        return 4

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes in a row."""
        return self.width.row_bytes // 16

    @property
    def slices(self) -> Slices:
        """Slices of a row. A lane loads its vectors of an operand before it looks at the first."""
        return Slices(self.width.row_bytes, self.dtype, self.most_vectors)

    @cute.jit
    def load(self, at: Int64, first: Int32, words: Any, where: int = 0) -> None:
        """By a lane: loads its vectors from the `first`; behind the end of the row the last one again."""
        for u in range_constexpr(self.slices.vectors):
            vector = cutlass.min(first + u * 32, self.vectors - 1)
            got = Vectors(at)[vector]
            for i in range_constexpr(4):
                words[where + 4 * u + i] = got[i]

    @cute.jit
    def store(self, at: Int64, first: Int32, words: Any) -> None:
        """By a lane: stores its vectors from the `first`, as far as the row has them."""
        for u in range_constexpr(self.slices.vectors):
            vector = first + u * 32
            if vector < self.vectors:
                Vectors(at)[vector] = [words[4 * u + i] for i in range(4)]
