"""Sums that cross NVLink domains in a format: a stager decodes the sums that were pushed to it, adds them and quantizes
the result (../quantized_sums.py)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cute import arch

from .. import sync
from ..copies import nth_bit, pop_lowest
from ..ids import warp_id
from ..quantized_sums import SumSlices, add_slice, store_slice
from ..views import Records


@cute.jit
def add_pushed_in_format(
    wire: cutlass.Constexpr[SumSlices], ranks: sync.Ranks, threads: cutlass.Constexpr[int], slot: Int32,
    first_token: Int32, wanted: Int32, mask: Int32, to: Int64,
) -> None:  # fmt: skip
    """By a whole block: `sums.add_pushed` of the batch that begins with `first_token`; its sums go to the address `to`.
    A warp takes a slice of a sum."""
    p = ranks.heap.problem
    slices = wire.plain.slices
    acc = cute.make_rmem_tensor((wire.plain.values,), Float32)
    rows = ranks.view("rows", nbytes=wire.row_bytes)
    pushed = Records(rows.at(slot * p.most_copies * p.max_tokens + first_token), wire.row_bytes)
    for item in cutlass.range(Int32(warp_id()), Int32(arch.popc(mask)) * slices, threads // 32):
        row = item // slices
        piece = item - row * slices
        token = nth_bit(mask, row)
        copies = arch.shuffle_sync(wanted, token)
        last = Int32(piece == slices - 1)
        for i in range_constexpr(wire.plain.values):
            acc[i] = Float32(0.0)
        while copies != 0:
            copy, copies = pop_lowest(copies)
            at = pushed.at(copy * p.max_tokens + token) + piece * wire.slice_bytes
            add_slice(wire, at, last, acc)
        store_slice(wire, acc, Records(to, wire.row_bytes).at(row) + piece * wire.slice_bytes, last)
