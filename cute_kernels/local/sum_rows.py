"""Sums of rows: of each row that is made, those that its indices name, each times a weight, or as it is. Or copies of
rows, up to the end of the last segment.

A row of sums is cut into slices, which the lanes of a warp hold in registers at once. Slices are dealt out to the warps
of the grid. A lane reads one of the indices; those that name a row are gone through in their order.
"""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..copies import pop_lowest
from ..ids import block_id, warp_id
from ..views import Floats, Ints, Records
from .row_slices import WARPS, RowSlices


class SumRowsArgs(NamedTuple):
    """B rows of sums, each of K rows at most."""

    x: Int64  # [N, H]
    indices: Ints  # [B, K], below 0: none
    weights: Floats  # [B, K]
    out: Int64  # [B, H]
    ends: Ints  # [experts], if bounded
    rows: Int32  # B
    terms: Int32  # K
    experts: Int32
    blocks: Int32


@dataclass(frozen=True)
class SumRows(RowSlices):
    """`alone`: K is 1 and nothing is weighted, so that bytes are copied as they are, NaN and -0 among them. `bounded`:
    rows after the last of `ends` are not made."""

    weighted: bool = False
    alone: bool = False
    bounded: bool = False

    NAME: ClassVar[str] = "ep_sum_rows"
    Args: ClassVar[Any] = SumRowsArgs

    @cute.kernel
    def kernel(self, args: SumRowsArgs) -> None:
        bid = block_id()
        first_item = bid * WARPS + warp_id()
        rows = args.rows
        if const_expr(self.bounded):
            rows = cutlass.min(rows, args.ends[args.experts - 1])
        for item in cutlass.range(first_item, rows * self.slices.slices, args.blocks * WARPS):
            row = item // self.slices.slices
            first = (item - row * self.slices.slices) * (32 * self.slices.vectors) + arch.lane_idx()
            if const_expr(self.alone):
                self.copy(args, row, first)
            else:
                self.add_up(args, row, first)

    @cute.jit
    def copy(self, args: SumRowsArgs, row: Int32, first: Int32) -> None:
        """By a warp: one slice of a row, zeros where no row is named."""
        words = self.nothing()
        index = args.indices[row]
        if index >= 0:
            self.load(Records(args.x, self.width.row_bytes).at(index), first, words)
        self.store(Records(args.out, self.width.row_bytes).at(row), first, words)

    @cute.jit
    def add_up(self, args: SumRowsArgs, row: Int32, first: Int32) -> None:
        """By a warp: one slice of a row."""
        lane = arch.lane_idx()
        sums = cute.make_rmem_tensor((self.slices.values,), Float32)
        for i in range_constexpr(self.slices.values):
            sums[i] = Float32(0.0)
        for begin in cutlass.range(0, args.terms, 32):
            index, weight = Int32(-1), Float32(1.0)
            if begin + lane < args.terms:
                term = Int64(row) * args.terms + begin + lane
                index = args.indices[term]
                if const_expr(self.weighted):
                    weight = args.weights[term]
            left = arch.vote_ballot_sync(index >= 0)
            while left != 0:
                k, left = pop_lowest(left)
                self.add(args, arch.shuffle_sync(index, k), arch.shuffle_sync(weight, k), first, sums)
        packed = ptx.pack([sums[i] for i in range(self.slices.values)], self.dtype)
        words = cute.make_rmem_tensor((4 * self.slices.vectors,), Uint32)
        for i in range_constexpr(4 * self.slices.vectors):
            words[i] = packed[i]
        self.store(Records(args.out, self.width.row_bytes).at(row), first, words)

    @cute.jit
    def add(self, args: SumRowsArgs, index: Int32, weight: Float32, first: Int32, sums: Any) -> None:
        words = self.nothing()
        self.load(Records(args.x, self.width.row_bytes).at(index), first, words)
        values = ptx.unpack([words[i] for i in range(4 * self.slices.vectors)], self.dtype)
        for i in range_constexpr(self.slices.values):
            term = ptx.mul_rn(values[i], weight) if const_expr(self.weighted) else values[i]
            sums[i] = ptx.add_rn(sums[i], term)

    @cute.jit
    def nothing(self) -> Any:
        words = cute.make_rmem_tensor((4 * self.slices.vectors,), Uint32)
        for i in range_constexpr(4 * self.slices.vectors):
            words[i] = Uint32(0)
        return words
