"""Throughput combine, one kernel: experts' ranks add up and push, owners add up what arrives behind the push.

Blocks before `pushers` push: a warp takes a token that has rows here, adds them in fp32 over k ascending, writes the
rounded sum into the owner's staging row [this rank][token] and sets the token's flag there. The other blocks sum: a
warp takes one of this rank's tokens, waits for the flags of the ranks that hold rows of it (known from the route) and
adds their rows in fp32 over ranks ascending. Pushers wait for nobody, so every wait ends.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import Heap, Problem
from ..launch import example_stream, ranks_signature
from ..rows import Slices, add_row, clear, store_row

WARPS = 16


@dataclass(frozen=True)
class Combine:
    """`rows`: sum rows. `weighted`: times their routing weight. `scalars`: return one fp32 for each row to (token, k).

    Scalars carry the gradients of the routing weights in the backward of dispatch.
    """

    problem: Problem
    rows: bool
    weighted: bool
    scalars: bool

    def signature(self):
        return (*ranks_signature(self.problem), *[Int64(0)] * 8, *[Int32(0)] * 4, example_stream())

    @property
    def slices(self) -> Slices:
        return Slices(self.problem.row_bytes, self.problem.dtype)

    @cute.jit
    def __call__(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        kind: Int32,
        y: Int64,
        recv_weights: Int64,
        row_scalars: Int64,
        topk_idx: Int64,
        send_rows: Int64,
        recv_rows: Int64,
        out: Int64,
        out_scalars: Int64,
        tokens: Int32,
        max_tokens: Int32,
        pushers: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel.set_name_prefix("ep_combine", remove_cutlass_symbol=True)
        self.kernel(
            peers, rank, report, timeout_ns, kind, y, recv_weights, row_scalars, topk_idx, send_rows, recv_rows, out,
            out_scalars, tokens, max_tokens, pushers,
        ).launch(grid=(blocks, 1, 1), block=(32 * WARPS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        kind: Int32,
        y: Int64,
        recv_weights: Int64,
        row_scalars: Int64,
        topk_idx: Int64,
        send_rows: Int64,
        recv_rows: Int64,
        out: Int64,
        out_scalars: Int64,
        tokens: Int32,
        max_tokens: Int32,
        pushers: Int32,
    ):
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ranks = sync.Ranks(Heap(self.problem), peers, rank, report, timeout_ns, kind)
        sync.say_hello(ranks)
        if bid < pushers:
            self.push(ranks, bid, pushers, y, recv_weights, row_scalars, recv_rows, max_tokens)
        else:
            self.sum(ranks, bid - pushers, blocks - pushers, topk_idx, send_rows, out, out_scalars, tokens)
        sync.finish(ranks)

    @cute.jit
    def push(self, ranks, block, blocks, y, recv_weights, row_scalars, recv_rows, max_tokens):
        p, shape = self.problem, self.slices
        tid, _, _ = arch.thread_idx()
        lane = arch.lane_idx()
        warp = arch.make_warp_uniform(tid // 32)
        acc = cute.make_rmem_tensor((shape.values,), Float32)
        item = warp * blocks + block
        while item < max_tokens * p.world_size:
            # Owners take turns, so that all links are busy all the time.
            token = item // p.world_size
            owner = (item + token + token // 4 + token // 16 + ranks.rank + 1) % p.world_size
            row = Int32(-1)
            weight = Float32(1.0)
            if lane < p.top_k:
                row = ptx.ld_i32(recv_rows + (Int64(owner * max_tokens + token) * p.top_k + lane) * 4)
            held = arch.vote_ballot_sync(row >= 0)
            if held != 0:
                heap = sync.select(ranks.peers, owner)
                if const_expr(self.weighted):
                    if row >= 0:
                        weight = ptx.ld_f32(recv_weights + Int64(row) * 4)
                if const_expr(self.scalars):
                    if row >= 0:
                        at = Int64(token * p.top_k + lane) * 4
                        ptx.st_f32(ranks.at(heap, "scalars") + at, ptx.ld_f32(row_scalars + Int64(row) * 4))
                if const_expr(self.rows):
                    dest = ranks.at(heap, "rows") + Int64(ranks.rank * p.max_tokens + token) * p.row_bytes
                    for i in cutlass.range(shape.slices, unroll=1):
                        clear(shape, acc)
                        left = held
                        while left != 0:
                            k = arch.popc((left & -left) - 1)
                            left = left & (left - 1)
                            source = y + Int64(arch.shuffle_sync(row, k)) * p.row_bytes
                            w = Float32(1.0)
                            if const_expr(self.weighted):
                                w = arch.shuffle_sync(weight, k)
                            add_row(shape, acc, source, i, lane, w, self.weighted)
                        store_row(shape, acc, dest, i, lane)
                # The warp's stores come before the release of the token's flag.
                arch.sync_warp()
                if lane == 0:
                    ranks.signal("token", owner, ranks.rank * p.max_tokens + token)
            item += blocks * WARPS

    @cute.jit
    def sum(self, ranks, block, blocks, topk_idx, send_rows, out, out_scalars, tokens):
        p, shape = self.problem, self.slices
        tid, _, _ = arch.thread_idx()
        lane = arch.lane_idx()
        warp = arch.make_warp_uniform(tid // 32)
        acc = cute.make_rmem_tensor((shape.values,), Float32)
        token = warp * blocks + block
        while token < tokens:
            row = Int32(-1)
            holder = Int32(0)
            if lane < p.top_k:
                at = Int64(token * p.top_k + lane) * 4
                row = ptx.ld_i32(send_rows + at)
                expert = ptx.ld_i32(topk_idx + at)
                for r in range_constexpr(1, p.world_size):
                    if expert >= p.first_expert[r]:
                        holder = Int32(r)
            # Lane r waits for rank r, if that holds a row of this token.
            expected = Int32(0)
            for r in range_constexpr(p.world_size):
                if arch.vote_any_sync(row >= 0 and holder == r):
                    expected = expected | (1 << r)
            arrived = Int32(1)
            if lane < p.world_size:
                if (expected >> lane) & 1 != 0:
                    arrived = Int32(ranks.wait("token", lane * p.max_tokens + token, lane, token))
            # Hands what each lane acquired to the whole warp.
            if not arch.vote_all_sync(arrived != 0):
                expected = Int32(0)
                row = Int32(-1)
            arch.sync_warp()
            if const_expr(self.scalars):
                if lane < p.top_k:
                    at = Int64(token * p.top_k + lane) * 4
                    value = Float32(0.0)
                    if row >= 0:
                        value = ptx.ld_f32(ranks.at(ranks.own, "scalars") + at)
                    ptx.st_f32(out_scalars + at, value)
            if const_expr(self.rows):
                staging = ranks.at(ranks.own, "rows") + Int64(token) * p.row_bytes
                for i in cutlass.range(shape.slices, unroll=1):
                    clear(shape, acc)
                    for r in range_constexpr(p.world_size):
                        if (expected >> r) & 1 != 0:
                            source = staging + r * (p.max_tokens * p.row_bytes)
                            add_row(shape, acc, source, i, lane, Float32(1.0), False)
                    store_row(shape, acc, out + Int64(token) * p.row_bytes, i, lane)
            token += blocks * WARPS
