"""Pushing of token-major rows: each row goes straight from x to the staging of the ranks that its token reaches.

A bulk copy loads a row from x, and another one stores it in the staging of a peer, at [this rank][token]. Pushing waits
for no rank and no other block, not even for the route: which ranks a token reaches follows from its expert ids.

Memory order. The bulk store of a row is complete, and visible to the lane that issued it, when that lane's wait for the
bulk group returns. Only then the lane posts the row's flag (release, block scope). Another warp of the block acquires
the post, fences at system scope and sets the flag (outbox.py). The rank that acquires the flag executes `fence_async`
before its bulk copies read the row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute import arch

from .. import sync
from ..experts import local_experts
from ..heap import PUSHES, Problem
from ..ids import warp_id
from ..views import Records
from .outbox import Outbox, close, deliver, new_outbox, post
from .pipeline import deal_out, run
from .ring import BOOKKEEPING, MAX_PIECE, Ring, RingShape, init_ring_barriers

LAG = 2
"""Number of bulk groups, one for each piece, that a warp leaves in flight: after it has started the store of a piece,
it waits for the piece that it stored LAG pieces earlier."""


class PushJob(NamedTuple):
    """The job of an item: the pieces of a row that are to be loaded."""

    left: Int32  # number of pieces
    source: Int64  # address of the next piece
    target: Int64  # the address at the peer where it goes
    code: Int32  # the code of the row's flag


class Pusher(NamedTuple):
    """State of a warp that pushes, in addition to its ring."""

    targets: Any  # of each stage: the address at the peer where its piece goes
    codes: Any  # of each stage: the code of the row's flag (outbox.py) if the piece is the row's last one, else -1
    outbox: Outbox
    warp: Int32
    late: Any  # [LAG] codes of pieces whose stores may be in flight, the oldest first
    count: Any  # [1] number of codes posted


@dataclass(frozen=True)
class Pushing:
    """The work of a warp that pushes rows (pipeline.Work). An item is a token and a peer. `ring_bytes`: shared memory
    of a block's ring. `known`: the route is known, so that copies which the peer drops are not pushed."""

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
        """Return the item: nothing has to be loaded before `peek`."""
        return item

    @cute.jit
    def peek(self, lists: Any, item: Int32) -> tuple[Int32, Int32]:
        """Return the expert id that the item's token has at k = lane, and the row of that (token, k) (its entry of
        `send_rows`; along a new route 0). A lane behind the last k returns -1 for both."""
        _, args = lists
        top_k, lane = self.problem.top_k, arch.lane_idx()
        token = item // self.peers
        expert, row = Int32(-1), Int32(-1)
        if token < args.tokens and lane < top_k:
            entry = token * top_k + lane
            expert = args.topk_idx[entry]
            row = Int32(0)
            if const_expr(self.known):
                row = args.send_rows[entry]
        return expert, row

    def nothing(self) -> PushJob:
        return PushJob(Int32(0), Int64(0), Int64(0), Int32(0))

    @cute.jit
    def begin(self, lists: Any, state: Pusher, item: Int32, scouted: Int32, peeked: tuple[Int32, Int32]) -> PushJob:
        ranks, args = lists
        p = self.problem
        expert, row = peeked
        token = item // self.peers
        # Consecutive tokens begin with different peers, so that all links are busy.
        peer = (ranks.rank + 1 + (item + token) % self.peers) % p.world_size
        first, end = local_experts(p, peer)
        left = Int32(0)
        if arch.vote_any_sync(row >= 0 and expert >= first and expert < end):
            left = Int32(self.ring.pieces)
        slot = p.pushed_slot(ranks.rank, token)
        source, target = Records(args.x, p.row_bytes).at(token), ranks.view("rows", ranks.peer(peer)).at(slot)
        return PushJob(left, source, target, peer * (p.world_size * p.max_tokens) + slot)

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
        """By block `block` of `blocks`: push a share of the rows, and set the flags of those rows."""
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
            items = deal_out(ranks.word(PUSHES), first, step, total, Boolean(True))
            run(self, Ring(shape, buffers, barriers, warp), items, (ranks, args), state)
            arch.cp_async_bulk_wait_group(0)
            for _ in range_constexpr(LAG):
                post_late(state, Int32(-1))
            close(outbox, warp, count[0])
        elif warp == shape.warps:
            deliver(outbox, ranks, "token", p.world_size * p.max_tokens)


@cute.jit
def post_late(state: Pusher, code: Int32) -> None:
    """By a whole warp, when the piece stored LAG pieces ago is visible at its peer: post the code of its row, unless it
    is -1. `code` is that of the piece stored last."""
    late, count = state.late, state.count
    if late[0] >= 0:
        post(state.outbox, state.warp, count[0], late[0])
        count[0] += 1
    for i in range_constexpr(LAG - 1):
        late[i] = late[i + 1]
    late[LAG - 1] = code
