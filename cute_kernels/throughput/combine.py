"""Throughput combine, one kernel: experts' ranks add up and push, owners add up what arrives behind the push.

Blocks before `pushers` push: an item is a token that has rows here; they are added in fp32 over k ascending, the
rounded sum goes to the owner's staging row [this rank][token], and the token's flag is set there. The other blocks sum:
an item is one of this rank's tokens; its flags from the ranks that hold rows of it (known from the route) are awaited
and their rows added in fp32 over ranks ascending, the token's residual after them. Pushers wait for nobody, so every
wait ends.

The flags of a pushing block are set by a warp of their own (outbox.py), so that no row waits for a fence.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..experts import holder_of
from ..heap import Heap
from ..launch import Kernel, RankArgs
from ..outbox import close, deliver, new_outbox, post
from ..route import given_row
from ..rows import Ring, RingShape, Slices, init_ring_barriers, zero_row
from .adder import Adding, Items, Notes, add_items
from .staged import token_of

WARPS = 15


class CombineArgs(NamedTuple):
    ranks: RankArgs
    y: Int64
    recv_weights: Int64
    row_scalars: Int64
    topk_idx: Int64
    send_rows: Int64
    recv_rows: Int64
    residual: Int64
    out: Int64
    out_scalars: Int64
    tokens: Int32
    max_tokens: Int32
    num_rows: Int32  # of y, recv_weights and row_scalars
    pushers: Int32
    blocks: Int32


@dataclass(frozen=True)
class Combine(Kernel):
    """`rows`: sum rows. `weighted`: times their routing weight. `scalars`: return one fp32 for each row to (token, k).

    Scalars carry the gradients of the routing weights in the backward of dispatch. `residual`: a row for each of this
    rank's tokens is added to its sum.
    """

    NAME, Args = "ep_combine", CombineArgs

    rows: bool
    weighted: bool
    scalars: bool
    residual: bool = False

    @property
    def slices(self) -> Slices:
        return Slices(self.problem.row_bytes, self.problem.dtype)

    @property
    def ring(self) -> RingShape:
        return RingShape.slices(self.slices, WARPS)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * (WARPS + 1), 1, 1)}

    @cute.kernel
    def kernel(self, args: CombineArgs) -> None:
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        p, shape = self.problem, self.ring
        tid, _, _ = arch.thread_idx()
        if bid == 0:
            sync.say_hello(ranks, tid, True)
        warp = arch.make_warp_uniform(tid // 32)
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, WARPS * shape.stages)
        notes = Notes(smem, WARPS * shape.stages)
        buffers = smem.allocate_array(Uint8, WARPS * shape.stages * shape.stride, byte_alignment=128)
        if tid < 32:
            init_ring_barriers(barriers, WARPS * shape.stages)
        outbox = new_outbox(smem, WARPS)
        pushers = args.pushers
        if warp == WARPS:
            if bid < pushers:
                deliver(outbox, ranks, "token", ranks.rank * p.max_tokens, p.max_tokens)
        elif bid < pushers:
            item, step, total = warp * pushers + bid, pushers * WARPS, args.max_tokens * p.world_size
            last = cute.make_rmem_tensor((1,), Int32)  # row that this lane has met
            last[0] = Int32(-1)
            pushing = (ranks, total, args, last)
            if const_expr(self.rows):
                ring = Ring(shape, buffers, barriers, warp)
                adding = Adding(self.slices, self.weighted, self.peek_push, self.fetch_push)
                add_items(ring, notes, warp, adding, Items(item, step, total, args.y, ranks.own), pushing, outbox)
            else:
                count = Int32(0)
                while item < total:
                    held, _, _, _, code = self.fetch_push(pushing, item, self.peek_push(pushing, item))
                    if held != 0:
                        post(outbox, warp, count, code)
                        count += 1
                    item += step
                close(outbox, warp, count)
            # Told behind the loop: nothing is to be slow in it.
            given_row(ranks, last[0], args.num_rows)
        else:
            summing = (ranks, args)
            item, step = warp * (blocks - pushers) + bid - pushers, (blocks - pushers) * WARPS
            if const_expr(self.rows):
                ring = Ring(shape, buffers, barriers, warp)
                staging = ranks.at(ranks.own, "rows")
                apart = p.world_size if self.residual else None
                adding = Adding(self.slices, False, self.peek_sum, self.fetch_sum, apart)
                items = Items(item, step, args.tokens, staging, None, args.residual)
                add_items(ring, notes, warp, adding, items, summing)
            else:
                while item < args.tokens:
                    self.fetch_sum(summing, item, self.peek_sum(summing, item))
                    item += step
        sync.finish(ranks)

    @cute.jit
    def peek_push(self, context: Any, item: Int32) -> tuple[Int32, Int32]:
        """A lane's row here of one token of some rank, -1 for none."""
        ranks, total, args = context[:3]
        p = self.problem
        lane = arch.lane_idx()
        token, owner = token_of(p, ranks.rank, item)
        row = Int32(-1)
        if item < total and lane < p.top_k:
            row = ptx.ld_i32(args.recv_rows + (Int64(owner * args.max_tokens + token) * p.top_k + lane) * 4)
        return row, Int32(0)

    @cute.jit
    def fetch_push(self, context: Any, item: Int32, peeked: Any) -> tuple[Int32, Int32, Float32, Int64, Int32]:
        """The rows here of one token of some rank (see add_items); its scalars go out at once.

        In the place of a row behind the last one, which is reported, the last one is read: the owner waits for a sum
        all the same. (Where there is none to read it waits until its deadline.)
        """
        ranks, total, args, last = context
        p = self.problem
        lane = arch.lane_idx()
        token, owner = token_of(p, ranks.rank, item)
        heap = sync.select(ranks.peers, owner)
        row, _ = peeked
        place = ranks.at(heap, "rows") + Int64(ranks.rank * p.max_tokens + token) * p.row_bytes
        last[0] = cutlass.max(last[0], row)
        row = cutlass.min(row, args.num_rows - 1)
        weight = Float32(1.0)
        if row >= 0:
            if const_expr(self.weighted):
                weight = ptx.ld_f32(args.recv_weights + Int64(row) * 4)
            if const_expr(self.scalars):
                at = Int64(token * p.top_k + lane) * 4
                ptx.st_f32(ranks.at(heap, "scalars") + at, ptx.ld_f32(args.row_scalars + Int64(row) * 4))
        held = arch.vote_ballot_sync(row >= 0)
        return held, row, weight, place, owner * p.max_tokens + token

    @cute.jit
    def peek_sum(self, context: Any, token: Int32) -> tuple[Int32, Int32]:
        """A lane's entry of send_rows and topk_idx of one of this rank's tokens."""
        ranks, args = context
        lane = arch.lane_idx()
        row, expert = Int32(-1), Int32(-1)
        if token < args.tokens and lane < self.problem.top_k:
            at = Int64(token * self.problem.top_k + lane) * 4
            row = ptx.ld_i32(args.send_rows + at)
            expert = ptx.ld_i32(args.topk_idx + at)
        return row, expert

    @cute.jit
    def fetch_sum(self, context: Any, token: Int32, peeked: Any) -> tuple[Int32, Int32, Float32, Int64, Int32]:
        """The staged rows of one of this rank's tokens (see add_items), once they have arrived."""
        ranks, args = context
        p = self.problem
        lane = arch.lane_idx()
        row, expert = peeked
        at = Int64(token * p.top_k + lane) * 4
        holder = holder_of(p, expert)
        # Lane r waits for rank r, if that holds a row of this token.
        expected = Int32(0)
        for r in range_constexpr(p.world_size):
            if arch.vote_any_sync(row >= 0 and holder == r):
                expected = expected | (Int32(1) << r)
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
                ptx.st_f32(args.out_scalars + at, value)
        place = args.out + Int64(token) * p.row_bytes
        source = lane * p.max_tokens + token
        if const_expr(self.residual):
            # One row more, added last.
            if complete:
                expected = expected | (Int32(1) << p.world_size)
            if lane == p.world_size:
                source = token
        if const_expr(self.rows):
            if expected == 0:
                zero_row(p.row_bytes, place, lane)
        return expected, source, Float32(1.0), place, Int32(0)
