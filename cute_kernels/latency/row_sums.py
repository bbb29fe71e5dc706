"""Sums of the rows of a copy at the rank of their experts, in the registers of a warp."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..copies import pop_lowest
from ..heap import RowSizes
from ..views import Records


@cute.jit
def add_rows(
    sizes: cutlass.Constexpr[RowSizes], weighted: cutlass.Constexpr[bool], args: Any, row: Int32, offset: Int32,
    vectors: cutlass.Constexpr[int], batch: cutlass.Constexpr[int], acc: Any,
) -> None:  # fmt: skip
    """By the whole warp: set `acc` to the sum, over ascending k, of the rows that the lanes hold (-1: none). Each lane
    adds its `vectors` of 16 bytes, which begin at byte `offset` of a row. `batch`: number of rows whose loads are in
    flight together. `args` are those of a combine."""
    numbers = vectors * 16 // sizes.itemsize
    weight = Float32(1.0)
    if const_expr(weighted):
        if row >= 0:
            weight = args.recv_weights[row]
    for i in range_constexpr(numbers):
        acc[i] = Float32(0.0)
    words = cute.make_rmem_tensor((4 * vectors * batch,), Uint32)
    left = arch.vote_ballot_sync(row >= 0)
    while left != 0:
        loading = left
        for b in range_constexpr(batch):
            if loading != 0:
                k, loading = pop_lowest(loading)
                at = Records(args.y, sizes.row_bytes).at(arch.shuffle_sync(row, k)) + offset
                for u in range_constexpr(vectors):
                    got = ptx.ld_v4(at + 16 * u)
                    for i in range_constexpr(4):
                        words[4 * (vectors * b + u) + i] = got[i]
        for b in range_constexpr(batch):
            if left != 0:
                k, left = pop_lowest(left)
                values = ptx.unpack([words[4 * vectors * b + i] for i in range(4 * vectors)], sizes.dtype)
                if const_expr(weighted):
                    w = arch.shuffle_sync(weight, k)
                    values = [ptx.mul_rn(value, w) for value in values]
                for i in range_constexpr(numbers):
                    acc[i] = ptx.add_rn(acc[i], values[i])


@cute.jit
def fetch_rows(
    sizes: cutlass.Constexpr[RowSizes], args: Any, row: Int32, offset: Int32, batch: cutlass.Constexpr[int]
) -> None:  # fmt: skip
    """By the whole warp: fetch the rows that the lanes hold into L2, except the first `batch`, which `add_rows` loads
    first. Each lane fetches the line at byte `offset` of a row."""
    left = arch.vote_ballot_sync(row >= 0)
    for _ in range_constexpr(batch):
        left = left & (left - 1)
    while left != 0:
        k, left = pop_lowest(left)
        ptx.prefetch(Records(args.y, sizes.row_bytes).at(arch.shuffle_sync(row, k)) + offset)
