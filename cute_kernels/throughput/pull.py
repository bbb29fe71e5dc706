"""Second kernel of a throughput dispatch: fetch each row once from its owner and store it to all its places.

Each warp owns a ring of row-sized stages in shared memory: a bulk copy brings a row over NVLink, then the lanes that
hold one of its places each start a bulk copy out. Nothing passes through registers, duplicates cross the link once.
One more warp of each block clears the padding.

Where a publish kernel goes before, this one is launched while that runs: `placed` flags say when the route is there.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import RING_BYTES, Heap
from ..launch import Kernel, RankArgs
from ..route import given_row
from ..rows import Ring, RingShape, init_ring_barriers
from .staged import Segments, await_rows, clear_padding, source_row, token_of


class PullArgs(NamedTuple):
    ranks: RankArgs
    x: Int64
    recv_rows: Int64
    offs: Int64
    counts: Int64
    recv_x: Int64
    recv_weights: Int64
    max_tokens: Int32
    alignment: Int32
    num_rows: Int32  # of recv_x
    blocks: Int32


@dataclass(frozen=True)
class Pull(Kernel):
    """`weights`: recv_weights has padding to clear too. `begins_operation`: no publish kernel goes before.
    `placed`: the publish kernel places the route that is read here."""

    NAME, Args = "ep_pull", PullArgs

    weights: bool
    begins_operation: bool
    placed: bool

    @property
    def ring(self) -> RingShape:
        return RingShape.of(self.problem.row_bytes, RING_BYTES)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * (self.ring.warps + 1), 1, 1), "use_pdl": not self.begins_operation}

    @cute.kernel
    def kernel(self, args: PullArgs) -> None:
        p, shape = self.problem, self.ring
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        # Where a publish kernel goes before, it may run still. The epoch, x and a known route are read all the same:
        # they were written before that kernel began, since that is no dependent launch itself (publish.py).
        ranks = sync.Ranks(Heap(p), args.ranks)
        if const_expr(self.begins_operation):
            if bid == 0:
                sync.say_hello(ranks, tid, True)
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, shape.warps * shape.stages)
        buffers = smem.allocate_array(Uint8, shape.warps * shape.stages * shape.stride, byte_alignment=128)
        # What a lane has to store from a stage; written and read by the same lane.
        places = smem.allocate_tensor(Int32, cute.make_layout(shape.warps * shape.stages * 32))
        warp = arch.make_warp_uniform(tid // 32)
        if tid < 32:
            init_ring_barriers(barriers, shape.warps * shape.stages)
        lost = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            lost[0] = 0
        arch.sync_threads()
        if const_expr(self.placed):
            if tid < p.tiles:
                if not ranks.wait("placed", tid, ranks.rank, tid):
                    lost[0] = 1
        # Hands the barriers, and the route that was acquired, to the whole block.
        arch.sync_threads()
        if lost[0] != 0:
            pass  # reported; without a route nothing can be moved
        elif warp < shape.warps:
            ring = Ring(shape, buffers, barriers, warp)
            self.move_rows(ranks, ring, places, warp, args)
        else:
            segments = Segments(args.offs, args.counts, args.alignment, args.num_rows)
            clear_padding(ranks, segments, not self.placed, args.recv_x, args.recv_weights, self.weights)
        if const_expr(not self.begins_operation):
            # The publish kernel has left the epoch before it changes.
            arch.griddepcontrol_wait()
        sync.finish(ranks)

    @cute.jit
    def move_rows(self, ranks: sync.Ranks, ring: Ring, places: Any, warp: Int32, args: PullArgs) -> None:
        """One warp's items, one dealt out, others claimed. An item is a piece of the row of (source rank, token)."""
        p, shape = self.problem, self.ring
        lane = arch.lane_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        step = blocks * shape.warps
        total = Int32(args.max_tokens * (p.world_size * shape.pieces))
        item = warp * blocks + bid
        loaded = Int32(0)
        stored = Int32(0)
        known = Int32(1) << ranks.rank
        ticket = sync.claim(ranks.own)
        more = Int32(1)
        while more != 0:
            # Start loads until all stages are under way.
            while loaded - stored < shape.stages and item < total:
                token, source = token_of(p, ranks.rank, item // shape.pieces)
                place = Int32(-1)
                if lane < p.top_k:
                    at = (Int64(source * args.max_tokens + token) * p.top_k + lane) * 4
                    place = ptx.ld_i32(args.recv_rows + at)
                if const_expr(not self.placed):
                    place = given_row(ranks, place, args.num_rows)
                if arch.vote_any_sync(place >= 0):
                    ready, known = await_rows(ranks, known, source, token)
                    if ready == 0:
                        total = Int32(0)  # reported: leave the rest
                    else:
                        stage = loaded % shape.stages
                        piece = item % shape.pieces
                        if place >= 0:
                            place = place * shape.pieces + piece
                        places[(warp * shape.stages + stage) * 32 + lane] = place
                        if lane == 0:
                            at = source_row(ranks, args.x, source, token) + piece * shape.piece_bytes
                            ring.load(stage, at, shape.bytes_of(piece))
                        loaded += 1
                item = step + sync.granted(ticket)
                ticket = sync.claim(ranks.own)
            if stored < loaded:
                stage = stored % shape.stages
                ring.wait(stage, (stored // shape.stages) & 1)
                place = places[(warp * shape.stages + stage) * 32 + lane]
                if place >= 0:
                    piece = place % shape.pieces
                    at = Int64(place // shape.pieces) * p.row_bytes + piece * shape.piece_bytes
                    ring.store(stage, args.recv_x + at, shape.bytes_of(piece))
                # Until all lanes' copies have left shared memory, so that the stage may be filled again. Meanwhile the
                # loads of the other stages are under way.
                arch.cp_async_bulk_commit_group()
                arch.cp_async_bulk_wait_group(0, read=True)
                arch.sync_warp()
                stored += 1
            more = Int32(stored < loaded or item < total)
        # The rows lie in memory before the block ends.
        arch.cp_async_bulk_wait_group(0)
