"""Pieces of rows, over which local kernels walk. The lanes of a warp hold a piece in registers at once."""

# No "from __future__ import annotations": the kernels' annotations are read as types.

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from ..launch import Launched
from ..rows import Width
from ..views import Vectors

WARPS = 8
"""Warps of a block."""


@dataclass(frozen=True)
class RowPieces(Launched):
    """A kernel on rows of `hidden_size` numbers, whose pieces are dealt out to the warps of the grid."""

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
    def pieces(self) -> int:
        """Pieces of a row."""
        return -(-self.vectors // (32 * self.most_vectors))

    @property
    def ahead(self) -> int:
        """Vectors of an operand that a lane loads before it looks at the first."""
        return -(-self.vectors // (32 * self.pieces))

    @cute.jit
    def load(self, at: Int64, first: Int32, words: Any, where: int = 0) -> None:
        """By a lane: loads its vectors from the `first`; behind the end of the row the last one again."""
        for u in range_constexpr(self.ahead):
            vector = cutlass.min(first + u * 32, self.vectors - 1)
            got = Vectors(at)[vector]
            for i in range_constexpr(4):
                words[where + 4 * u + i] = got[i]

    @cute.jit
    def store(self, at: Int64, first: Int32, words: Any) -> None:
        """By a lane: stores its vectors from the `first`, as far as the row has them."""
        for u in range_constexpr(self.ahead):
            vector = first + u * 32
            if vector < self.vectors:
                Vectors(at)[vector] = [words[4 * u + i] for i in range(4)]
