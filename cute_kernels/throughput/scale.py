"""Local part of combine's backward: turns dispatched gradients into gradients of the expert rows and their weights.

For every row that the route brings here: dot(g, y) is the gradient of its weight, weight × g that of y, in place.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..heap import Problem
from ..launch import example_stream
from ..rows import Slices, store_row

WARPS = 16


@dataclass(frozen=True)
class Scale:
    """`dots`: also the gradients of the weights."""

    problem: Problem
    dots: bool

    def signature(self):
        return (*[Int64(0)] * 5, *[Int32(0)] * 2, example_stream())

    @property
    def slices(self) -> Slices:
        return Slices(self.problem.row_bytes, self.problem.dtype)

    @cute.jit
    def __call__(
        self,
        rows: Int64,
        y: Int64,
        recv_weights: Int64,
        recv_rows: Int64,
        grad_weights: Int64,
        entries: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel.set_name_prefix("ep_scale", remove_cutlass_symbol=True)
        self.kernel(rows, y, recv_weights, recv_rows, grad_weights, entries).launch(
            grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, rows: Int64, y: Int64, recv_weights: Int64, recv_rows: Int64, grad_weights: Int64, entries: Int32):
        p, shape = self.problem, self.slices
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        lane = arch.lane_idx()
        scaled = cute.make_rmem_tensor((shape.values,), Float32)
        # A warp takes 32 entries at once and then works through those that are rows here.
        first = (arch.make_warp_uniform(tid // 32) * blocks + bid) * 32
        while first < entries:
            mine = Int32(-1)
            if first + lane < entries:
                mine = ptx.ld_i32(recv_rows + Int64(first + lane) * 4)
            left = arch.vote_ballot_sync(mine >= 0)
            while left != 0:
                k = arch.popc((left & -left) - 1)
                left = left & (left - 1)
                row = Int64(arch.shuffle_sync(mine, k))
                weight = ptx.ld_f32(recv_weights + row * 4)
                dot = Float32(0.0)
                at = row * p.row_bytes
                for i in cutlass.range(shape.slices, unroll=1):
                    for u in range_constexpr(shape.vectors):
                        offset = shape.offset(i, u, lane)
                        inside = cutlass.min(offset, p.row_bytes - 16)
                        g = ptx.unpack(ptx.ld_v4(rows + at + inside), p.dtype)
                        if const_expr(self.dots):
                            v = ptx.unpack(ptx.ld_v4(y + at + inside), p.dtype)
                            if offset < p.row_bytes:
                                for n in range_constexpr(len(g)):
                                    dot += g[n] * v[n]
                        for n in range_constexpr(len(g)):
                            scaled[u * len(g) + n] = ptx.mul_rn(g[n], weight)
                    # Lanes behind the row's end have read its last vector: before it is overwritten.
                    arch.sync_warp()
                    store_row(shape, scaled, rows + at, i, lane)
                if const_expr(self.dots):
                    for step in range_constexpr(5):
                        dot += arch.shuffle_sync_bfly(dot, 16 >> step)
                    if lane == 0:
                        ptx.st_f32(grad_weights + row * 4, dot)
            first += blocks * WARPS * 32
