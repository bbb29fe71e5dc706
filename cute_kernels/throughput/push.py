"""Pushing: rows go straight to the ranks that have a copy of their token.

A bulk copy loads a row from x, another one stores it in the staging of a peer, at [this rank][token]. When the row is
visible there, another warp of the block sets its flag (outbox.py). Pushing waits for no rank and no other block, not
even for the route: which ranks a token reaches follows from its expert ids.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..experts import local_experts
from ..heap import PUSHES, Problem
from ..ids import warp_id
from .outbox import Outbox, close, deliver, new_outbox, post
from .pipeline import deal_out, run
from .ring import BOOKKEEPING, MAX_PIECE, Ring, RingShape, init_ring_barriers

LAG = 2
"""Number of pieces that a warp stores before it waits until an earlier one is visible at the peer."""


class PushJob(NamedTuple):
    """The job of an item."""

    left: Int32  # pieces to load
    source: Int64  # address of the next one
    target: Int64  # where it goes
    code: Int32  # of the row's flag


class Pusher(NamedTuple):
    """State of a warp, in addition to its ring."""

    targets: Any  # of each stage: where its piece goes
    codes: Any  # of each stage: the code of the row's flag if the piece is its last one, else -1
    outbox: Outbox
    warp: Int32
    late: Any  # [LAG] codes of the latest pieces, the oldest first
    count: Any  # [1] codes posted


@dataclass(frozen=True)
class Pushing:
    """How a warp pushes rows (pipeline.Work). An item is a token and a peer. `ring_bytes`: shared memory of a block's
    ring. `known`: the route is known, and copies that have been dropped are not pushed."""

    problem: Problem
    ring_bytes: int
    known: bool

    @property
    def ring(self) -> RingShape:
        most = max(128, (self.ring_bytes // 2 - BOOKKEEPING) // 128 * 128)
        return RingShape.of(self.problem.row_bytes, self.ring_bytes, min(MAX_PIECE, most))

    @property
    def peers(self) -> int:
        return self.problem.world_size - 1

    def scout(self, lists: Any, item: Int32) -> Int32:
        """Return nothing, because nothing has to be loaded first."""
        return item

    @cute.jit
    def peek(self, lists: Any, item: Int32) -> tuple[Int32, Int32]:
        """Return a lane's expert id of the item's token, and whether it has a row (its entry of `send_rows`), -1 for
        none."""
        _, args = lists
        top_k, lane = self.problem.top_k, arch.lane_idx()
        token = item // self.peers
        expert, row = Int32(-1), Int32(-1)
        if token < args.tokens and lane < top_k:
            at = Int64(token * top_k + lane) * 4
            expert = ptx.ld_i32(args.topk_idx + at)
            row = Int32(0)
            if const_expr(self.known):
                row = ptx.ld_i32(args.send_rows + at)
        return expert, row

    def nothing(self) -> PushJob:
        return PushJob(Int32(0), Int64(0), Int64(0), Int32(0))

    @cute.jit
    def begin(self, lists: Any, state: Pusher, item: Int32, scouted: Int32, peeked: tuple[Int32, Int32]) -> PushJob:
        ranks, args = lists
        p = self.problem
        expert, row = peeked
        token = item // self.peers
        # Rotated from token to token, so that all links are busy.
        peer = (ranks.rank + 1 + (item + token) % self.peers) % p.world_size
        first, end = local_experts(p, peer)
        left = Int32(0)
        if arch.vote_any_sync(row >= 0 and expert >= first and expert < end):
            left = Int32(self.ring.pieces)
        slot = slot_of_row(p, ranks.rank, token)
        target = ranks.at(ranks.peer(peer), "rows") + Int64(slot) * p.row_bytes
        return PushJob(left, args.x + Int64(token) * p.row_bytes, target, peer * (p.world_size * p.max_tokens) + slot)

    def left(self, job: PushJob) -> Boolean:
        return job.left != 0

    @cute.jit
    def load(self, lists: Any, state: Pusher, ring: Ring, stage: Int32, job: PushJob) -> PushJob:
        shape = self.ring
        left, source, target, code = job
        if arch.lane_idx() == 0:
            (state.targets + stage).store(target)
            last = Int32(-1)
            if left == 1:
                last = code
            (state.codes + stage).store(last)
            ring.load(stage, source, shape.bytes_of(shape.pieces - left))
        return PushJob(left - 1, source + shape.piece_bytes, target + shape.piece_bytes, code)

    @cute.jit
    def use(self, state: Pusher, ring: Ring, stage: Int32, phase: Int32) -> None:
        shape = self.ring
        ring.wait(stage, phase)
        code = (state.codes + stage).load()
        nbytes = Int32(shape.piece_bytes)
        if code >= 0:
            nbytes = Int32(shape.bytes_of(shape.pieces - 1))
        if arch.lane_idx() == 0:
            ring.store(stage, (state.targets + stage).load(), nbytes)
        arch.cp_async_bulk_commit_group()
        # The piece has left shared memory, so that the stage may be filled again.
        arch.cp_async_bulk_wait_group(0, read=True)
        # All pieces but the latest ones are visible at the peers.
        arch.cp_async_bulk_wait_group(LAG)
        post_late(state, code)

    @cute.jit
    def push(self, ranks: sync.Ranks, smem: Any, args: Any, block: Int32, blocks: Int32) -> None:
        """By `block` of so many that push: its share of the rows."""
        shape, p = self.ring, self.problem
        stages = shape.warps * shape.stages
        barriers = smem.allocate_array(Int64, stages)
        targets = smem.allocate_array(Int64, stages)
        codes = smem.allocate_array(Int32, stages)
        buffers = smem.allocate_array(Uint8, stages * shape.stride, byte_alignment=128)
        warp = warp_id()
        if warp == 0:
            init_ring_barriers(barriers, stages)
        outbox = new_outbox(smem, shape.warps)  # with a barrier
        if warp < shape.warps:
            late = cute.make_rmem_tensor((LAG,), Int32)
            count = cute.make_rmem_tensor((1,), Int32)
            for i in range_constexpr(LAG):
                late[i] = Int32(-1)
            count[0] = Int32(0)
            mine = warp * shape.stages
            state = Pusher(targets + mine, codes + mine, outbox, warp, late, count)
            step = blocks * shape.warps
            first, total = warp * blocks + block, args.tokens * self.peers
            items = deal_out(ranks.own, first, step, total, Boolean(True), PUSHES)
            run(self, Ring(shape, buffers, barriers, warp), items, (ranks, args), state)
            arch.cp_async_bulk_wait_group(0)
            for _ in range_constexpr(LAG):
                post_late(state, Int32(-1))
            close(outbox, warp, count[0])
        elif warp == shape.warps:
            deliver(outbox, ranks, "token", p.world_size * p.max_tokens)


@cute.jit
def post_late(state: Pusher, code: Int32) -> None:
    """By a whole warp: post the oldest of the late codes, and add one."""
    late, count = state.late, state.count
    if late[0] >= 0:
        post(state.outbox, state.warp, count[0], late[0])
        count[0] += 1
    for i in range_constexpr(LAG - 1):
        late[i] = late[i + 1]
    late[LAG - 1] = code


def slot_of_row(problem: Problem, source: Int32, token: Int32) -> Int32:
    """Return the row of staging, and the flag, of a pushed row at the rank that receives it."""
    return source * problem.max_tokens + token
