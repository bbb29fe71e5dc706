"""Second kernel of a throughput dispatch: fetch each row once from its owner and store it to all its places.

Each warp owns a ring of row-sized stages in shared memory: a bulk copy brings a row over NVLink, then the lanes that
hold one of its places each start a bulk copy out. Nothing passes through registers, duplicates cross the link once.
One more warp of each block clears the padding.

Where a publish kernel goes before, this one is launched while that runs: `placed` flags say when the route is there.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import RING_BYTES, Heap, Problem
from ..launch import example_stream, ranks_signature
from ..rows import Ring, RingShape, init_ring_barriers
from .staged import await_rows, clear_padding, source_row, token_of


@dataclass(frozen=True)
class Pull:
    """`weights`: recv_weights has padding to clear too. `begins_operation`: no publish kernel goes before.
    `placed`: the publish kernel places the route that is read here."""

    problem: Problem
    weights: bool
    begins_operation: bool
    placed: bool

    def signature(self):
        return (*ranks_signature(self.problem), *[Int64(0)] * 6, *[Int32(0)] * 3, example_stream())

    @property
    def ring(self) -> RingShape:
        return RingShape.of(self.problem.row_bytes, RING_BYTES)

    @cute.jit
    def __call__(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        terms: Int32,
        x: Int64,
        recv_rows: Int64,
        offs: Int64,
        counts: Int64,
        recv_x: Int64,
        recv_weights: Int64,
        max_tokens: Int32,
        alignment: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel.set_name_prefix("ep_pull", remove_cutlass_symbol=True)
        self.kernel(
            peers, rank, report, timeout_ns, terms, x, recv_rows, offs, counts, recv_x, recv_weights,
            max_tokens, alignment,
        ).launch(
            grid=(blocks, 1, 1),
            block=(32 * (self.ring.warps + 1), 1, 1),
            stream=stream,
            use_pdl=not self.begins_operation,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        terms: Int32,
        x: Int64,
        recv_rows: Int64,
        offs: Int64,
        counts: Int64,
        recv_x: Int64,
        recv_weights: Int64,
        max_tokens: Int32,
        alignment: Int32,
    ):
        p, shape = self.problem, self.ring
        tid, _, _ = arch.thread_idx()
        ranks = sync.Ranks(Heap(p), peers, rank, report, timeout_ns, terms)
        if const_expr(self.begins_operation):
            sync.say_hello(ranks)
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
                if not ranks.wait("placed", tid, rank, tid):
                    lost[0] = 1
        # Hands the barriers, and the route that was acquired, to the whole block.
        arch.sync_threads()
        if lost[0] != 0:
            pass  # reported; without a route nothing can be moved
        elif warp < shape.warps:
            ring = Ring(shape, buffers, barriers, warp)
            self.move_rows(ranks, ring, places, warp, x, recv_rows, recv_x, max_tokens)
        else:
            clear_padding(p, ranks, offs, counts, recv_x, recv_weights, alignment, self.weights)
        if const_expr(not self.begins_operation):
            # The publish kernel has left the epoch before it changes.
            arch.griddepcontrol_wait()
        sync.finish(ranks)

    @cute.jit
    def move_rows(self, ranks, ring, places, warp, x, recv_rows, recv_x, max_tokens):
        """One warp's items, one dealt out, others claimed. An item is a piece of the row of (source rank, token)."""
        p, shape = self.problem, self.ring
        lane = arch.lane_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        step = blocks * shape.warps
        total = Int32(max_tokens * (p.world_size * shape.pieces))
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
                    place = ptx.ld_i32(recv_rows + (Int64(source * max_tokens + token) * p.top_k + lane) * 4)
                if arch.vote_any_sync(place >= 0):
                    ready, known = await_rows(p, ranks, known, source, token)
                    if ready == 0:
                        total = Int32(0)  # reported: leave the rest
                    else:
                        stage = loaded % shape.stages
                        piece = item % shape.pieces
                        if place >= 0:
                            place = place * shape.pieces + piece
                        places[(warp * shape.stages + stage) * 32 + lane] = place
                        if lane == 0:
                            at = source_row(p, ranks, x, source, token) + piece * shape.piece_bytes
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
                    ring.store(stage, recv_x + at, shape.bytes_of(piece))
                # Until all lanes' copies have left shared memory, so that the stage may be filled again. Meanwhile the
                # loads of the other stages are under way.
                arch.cp_async_bulk_commit_group()
                arch.cp_async_bulk_wait_group(0, read=True)
                arch.sync_warp()
                stored += 1
            more = Int32(stored < loaded or item < total)
        # The rows lie in memory before the block ends.
        arch.cp_async_bulk_wait_group(0)
