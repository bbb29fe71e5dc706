"""Throughput combine, one kernel: experts' ranks add up and push, owners add up what arrives behind the push.

Blocks before `pushers` push: an item is a token that has rows here; they are added in fp32 over k ascending, the
rounded sum goes to the owner's staging row [this rank][token], and the token's flag is set there. The other blocks sum:
an item is one of this rank's tokens; its flags from the ranks that hold rows of it (known from the route) are awaited
and their rows added in fp32 over ranks ascending, the token's residual after them. Pushers wait for nobody, so every
wait ends.

The flags of a pushing block are set by a warp of their own (sync.Outbox), so that no row waits for a fence.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import Heap, Problem
from ..launch import example_stream, ranks_signature
from ..rows import Ring, RingShape, Slices, init_ring_barriers, zero_row
from .adder import Notes, add_items
from .staged import token_of

WARPS = 15


@dataclass(frozen=True)
class Combine:
    """`rows`: sum rows. `weighted`: times their routing weight. `scalars`: return one fp32 for each row to (token, k).

    Scalars carry the gradients of the routing weights in the backward of dispatch. `residual`: a row for each of this
    rank's tokens is added to its sum.
    """

    problem: Problem
    rows: bool
    weighted: bool
    scalars: bool
    residual: bool = False

    def signature(self):
        return (*ranks_signature(self.problem), *[Int64(0)] * 9, *[Int32(0)] * 4, example_stream())

    @property
    def slices(self) -> Slices:
        return Slices(self.problem.row_bytes, self.problem.dtype)

    @property
    def ring(self) -> RingShape:
        return RingShape.slices(self.slices, WARPS)

    @cute.jit
    def __call__(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        terms: Int32,
        y: Int64,
        recv_weights: Int64,
        row_scalars: Int64,
        topk_idx: Int64,
        send_rows: Int64,
        recv_rows: Int64,
        residual: Int64,
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
            peers, rank, report, timeout_ns, terms, y, recv_weights, row_scalars, topk_idx, send_rows, recv_rows,
            residual, out, out_scalars, tokens, max_tokens, pushers,
        ).launch(grid=(blocks, 1, 1), block=(32 * (WARPS + 1), 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        terms: Int32,
        y: Int64,
        recv_weights: Int64,
        row_scalars: Int64,
        topk_idx: Int64,
        send_rows: Int64,
        recv_rows: Int64,
        residual: Int64,
        out: Int64,
        out_scalars: Int64,
        tokens: Int32,
        max_tokens: Int32,
        pushers: Int32,
    ):
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ranks = sync.Ranks(Heap(self.problem), peers, rank, report, timeout_ns, terms)
        sync.say_hello(ranks)
        p, shape = self.problem, self.ring
        tid, _, _ = arch.thread_idx()
        warp = arch.make_warp_uniform(tid // 32)
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, WARPS * shape.stages)
        notes = Notes(smem, WARPS * shape.stages)
        buffers = smem.allocate_array(Uint8, WARPS * shape.stages * shape.stride, byte_alignment=128)
        if tid < 32:
            init_ring_barriers(barriers, WARPS * shape.stages)
        outbox = sync.new_outbox(smem, WARPS)
        pushing = bid < pushers
        if warp == WARPS:
            if pushing:
                sync.deliver(outbox, ranks, "token", rank * p.max_tokens, p.max_tokens)
        elif pushing:
            item, step, total = warp * pushers + bid, pushers * WARPS, max_tokens * p.world_size
            context = (ranks, max_tokens, total, recv_rows, recv_weights, row_scalars)
            if const_expr(self.rows):
                ring = Ring(shape, buffers, barriers, warp)
                add_items(
                    ring, notes, self.slices, self.weighted, self.peek_push, self.fetch_push, ranks.own, item, step,
                    total, y, context, True, outbox, warp,
                )  # fmt: skip
            else:
                count = Int32(0)
                while item < total:
                    held, _, _, _, code = self.fetch_push(context, item, self.peek_push(context, item))
                    if held != 0:
                        sync.post(outbox, warp, count, code)
                        count += 1
                    item += step
                sync.close(outbox, warp, count)
        else:
            context = (ranks, tokens, topk_idx, send_rows, out, out_scalars)
            item, step = warp * (blocks - pushers) + bid - pushers, (blocks - pushers) * WARPS
            if const_expr(self.rows):
                ring = Ring(shape, buffers, barriers, warp)
                staging = ranks.at(ranks.own, "rows")
                add_items(
                    ring, notes, self.slices, False, self.peek_sum, self.fetch_sum, None, item, step, tokens, staging,
                    context, False, outbox, warp, p.world_size if self.residual else None, residual,
                )  # fmt: skip
            else:
                while item < tokens:
                    self.fetch_sum(context, item, self.peek_sum(context, item))
                    item += step
        sync.finish(ranks)

    @cute.jit
    def peek_push(self, context, item):
        """A lane's row here of one token of some rank, -1 for none."""
        ranks, max_tokens, total, recv_rows, recv_weights, row_scalars = context
        p = self.problem
        lane = arch.lane_idx()
        token, owner = token_of(p, ranks.rank, item)
        row = Int32(-1)
        if item < total and lane < p.top_k:
            row = ptx.ld_i32(recv_rows + (Int64(owner * max_tokens + token) * p.top_k + lane) * 4)
        return row, Int32(0)

    @cute.jit
    def fetch_push(self, context, item, peeked):
        """The rows here of one token of some rank (see add_items); its scalars go out at once."""
        ranks, max_tokens, total, recv_rows, recv_weights, row_scalars = context
        p = self.problem
        lane = arch.lane_idx()
        token, owner = token_of(p, ranks.rank, item)
        heap = sync.select(ranks.peers, owner)
        row, _ = peeked
        weight = Float32(1.0)
        if row >= 0:
            if const_expr(self.weighted):
                weight = ptx.ld_f32(recv_weights + Int64(row) * 4)
            if const_expr(self.scalars):
                at = Int64(token * p.top_k + lane) * 4
                ptx.st_f32(ranks.at(heap, "scalars") + at, ptx.ld_f32(row_scalars + Int64(row) * 4))
        held = arch.vote_ballot_sync(row >= 0)
        place = ranks.at(heap, "rows") + Int64(ranks.rank * p.max_tokens + token) * p.row_bytes
        return held, row, weight, place, owner * p.max_tokens + token

    @cute.jit
    def peek_sum(self, context, token):
        """A lane's entry of send_rows and topk_idx of one of this rank's tokens."""
        ranks, tokens, topk_idx, send_rows, out, out_scalars = context
        lane = arch.lane_idx()
        row, expert = Int32(-1), Int32(-1)
        if token < tokens and lane < self.problem.top_k:
            at = Int64(token * self.problem.top_k + lane) * 4
            row = ptx.ld_i32(send_rows + at)
            expert = ptx.ld_i32(topk_idx + at)
        return row, expert

    @cute.jit
    def fetch_sum(self, context, token, peeked):
        """The staged rows of one of this rank's tokens (see add_items), once they have arrived."""
        ranks, tokens, topk_idx, send_rows, out, out_scalars = context
        p = self.problem
        lane = arch.lane_idx()
        row, expert = peeked
        at = Int64(token * p.top_k + lane) * 4
        holder = Int32(0)
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
        complete = arch.vote_all_sync(arrived != 0)
        if not complete:
            expected = Int32(0)
            row = Int32(-1)
        # Ordinary stores filled the staging, bulk copies read it.
        sync.fence_async()
        arch.sync_warp()
        if const_expr(self.scalars):
            if lane < p.top_k:
                value = Float32(0.0)
                if row >= 0:
                    value = ptx.ld_f32(ranks.at(ranks.own, "scalars") + at)
                ptx.st_f32(out_scalars + at, value)
        place = out + Int64(token) * p.row_bytes
        source = lane * p.max_tokens + token
        if const_expr(self.residual):
            # One row more, added last.
            if complete:
                expected = expected | (1 << p.world_size)
            if lane == p.world_size:
                source = token
        if const_expr(self.rows):
            if expected == 0:
                zero_row(p.row_bytes, place, lane)
        return expected, source, Float32(1.0), place, Int32(0)
