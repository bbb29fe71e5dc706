"""First kernel of a throughput dispatch: publish the route, stage the rows, and place every row.

Three kinds of block work side by side:
  block 0            writes expert ids, positions, counts and weights of its own tokens where peers read them
  blocks 1..PLACERS  wait for all ranks' routes and turn them into send_rows, recv_rows, offs, counts, dropped
  the others         copy x into staging, chunk by chunk, and announce each chunk to all peers
Block 0 and the copying blocks wait for nobody, so the placing blocks' waits end whatever order blocks start in.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import CHUNK_TOKENS, STAGED_TICKET, Heap, Problem
from ..launch import example_stream, ranks_signature
from ..route import place_rows, publish_positions

PLACERS = 16
THREADS = 1024
COPIES_IN_FLIGHT = 4


@dataclass(frozen=True)
class Publish:
    """`route`: exchange and place the route. `rows`: stage x. `weights`: publish the routing weights.

    `ends_operation`: nothing follows (ep::plan), so this kernel ends the epoch.
    """

    problem: Problem
    route: bool
    rows: bool
    weights: bool
    ends_operation: bool

    def signature(self):
        ranks = ranks_signature(self.problem)
        return (*ranks, *[Int64(0)] * 8, *[Int32(0)] * 6, example_stream())

    @property
    def first_copier(self) -> int:
        """Blocks before this one do not stage rows."""
        return 1 + (PLACERS if self.route else 0)

    @cute.jit
    def __call__(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        kind: Int32,
        x: Int64,
        topk_idx: Int64,
        topk_weights: Int64,
        send_rows: Int64,
        recv_rows: Int64,
        offs: Int64,
        counts: Int64,
        dropped: Int64,
        tokens: Int32,
        max_tokens: Int32,
        capacity: Int32,
        alignment: Int32,
        slots: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel.set_name_prefix("ep_publish", remove_cutlass_symbol=True)
        self.kernel(
            peers, rank, report, timeout_ns, kind, x, topk_idx, topk_weights, send_rows, recv_rows, offs, counts,
            dropped, tokens, max_tokens, capacity, alignment, slots,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        peers: tuple,
        rank: Int32,
        report: Int64,
        timeout_ns: Int64,
        kind: Int32,
        x: Int64,
        topk_idx: Int64,
        topk_weights: Int64,
        send_rows: Int64,
        recv_rows: Int64,
        offs: Int64,
        counts: Int64,
        dropped: Int64,
        tokens: Int32,
        max_tokens: Int32,
        capacity: Int32,
        alignment: Int32,
        slots: Int32,
    ):
        p = self.problem
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ranks = sync.Ranks(Heap(p), peers, rank, report, timeout_ns, kind)
        sync.say_hello(ranks)

        smem = cutlass.memory.SmemAllocator()
        if const_expr(self.route):
            # Block 0 counts in [warps, E]; a placing block needs [W, E] and [2, E]. The larger of the two.
            table = smem.allocate_tensor(Int32, cute.make_layout(max(THREADS // 32, p.world_size) * p.num_experts))
            start = smem.allocate_tensor(Int32, cute.make_layout(2 * p.num_experts))
            header = smem.allocate_tensor(Int32, cute.make_layout(4 * p.world_size))
            failed = smem.allocate_tensor(Int32, cute.make_layout(1))

        if bid == 0:
            if const_expr(self.route):
                publish_positions(ranks, p, topk_idx, tokens, THREADS // 32, table, start)
                if tid == 0:
                    values = (tokens, capacity, alignment, slots)
                    for i in range_constexpr(4):
                        ptx.st_i32(ranks.at(ranks.own, "header") + i * 4, values[i])
            if const_expr(self.weights):
                j = tid
                while j < tokens * p.top_k:
                    ptx.st_f32(ranks.at(ranks.own, "weights") + Int64(j) * 4, ptx.ld_f32(topk_weights + Int64(j) * 4))
                    j += THREADS
            # All of the block's stores come before the release of the flags.
            arch.sync_threads()
            if tid < p.world_size:
                ranks.signal("route", tid, rank)

        if const_expr(self.route):
            if bid >= 1 and bid <= PLACERS:
                if tid == 0:
                    failed[0] = 0
                arch.sync_threads()
                if tid < p.world_size:
                    if not ranks.wait("route", tid, tid, 0):
                        failed[0] = 1
                # The barrier hands what was acquired to the whole block.
                arch.sync_threads()
                ok = 1 - failed[0]
                place_rows(
                    ranks, p, ok, bid - 1, PLACERS, THREADS, tokens, max_tokens, table, start, header,
                    send_rows, recv_rows, offs, counts, dropped,
                )  # fmt: skip

        if const_expr(self.rows):
            if bid >= self.first_copier:
                self.stage(ranks, x, tokens, bid - self.first_copier, blocks - self.first_copier)

        if const_expr(self.ends_operation):
            sync.finish(ranks)

    @cute.jit
    def stage(self, ranks, x, tokens, copier, copiers):
        """Copies x into staging. A chunk is announced as soon as it lies there, the whole by the last block."""
        p = self.problem
        tid, _, _ = arch.thread_idx()
        staging = ranks.at(ranks.own, "rows")
        chunks = (tokens + CHUNK_TOKENS - 1) // CHUNK_TOKENS
        chunk = copier
        while chunk < chunks:
            begin = Int64(chunk) * (CHUNK_TOKENS * p.row_bytes)
            end = cutlass.min(begin + CHUNK_TOKENS * p.row_bytes, Int64(tokens) * p.row_bytes)
            at = begin + tid * 16
            while at < end:
                words = []
                for i in range_constexpr(COPIES_IN_FLIGHT):
                    # Beyond the end the last vector is copied again, by a thread that has it too.
                    words.append(ptx.ld_v4(x + cutlass.min(at + i * THREADS * 16, end - 16)))
                for i in range_constexpr(COPIES_IN_FLIGHT):
                    ptx.st_v4(staging + cutlass.min(at + i * THREADS * 16, end - 16), words[i])
                at += COPIES_IN_FLIGHT * THREADS * 16
            # Peers fetch with bulk copies what ordinary stores wrote.
            sync.fence_async()
            arch.sync_threads()
            if tid < p.world_size:
                ranks.signal("chunk", tid, ranks.rank * ranks.heap.chunks + chunk)
            chunk += copiers
        arch.sync_threads()
        if tid == 0:
            if ptx.atom_inc_acq_rel(ranks.own + STAGED_TICKET * 8) == copiers - 1:
                ptx.st_u64(ranks.own + STAGED_TICKET * 8, Int64(0))
                for peer in range_constexpr(p.world_size):
                    ranks.signal("staged", peer, ranks.rank)
