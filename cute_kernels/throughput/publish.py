"""First kernel of a throughput dispatch: publish the route, place every row, stage the rows.

Blocks that work side by side:
  tile blocks       (the first `problem.tiles`) write expert ids, positions, counts and weights of a tile of their own
                    tokens where peers read them, wait for the tiles of all ranks, and turn them into rows
  staging blocks    copy x into staging, chunk by chunk (stage.py)
  announcing block  (the last) tells the peers of each chunk
Each tile block publishes before it waits, staging blocks wait for nobody, the announcing block for staging blocks that
run already. So all waits end, provided that all tile blocks run at once: they are the first of the grid, and fewer than
any supported GPU has multiprocessors.

The pull kernel is launched while this one runs (programmatic dependent launch) and takes the multiprocessors that this
grid leaves free; the `placed` flags tell it when the route is there, the chunk flags when rows are.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import PLACING_WARPS, SHARED_BYTES, Heap
from ..launch import Kernel, RankArgs
from ..route import Tables, place_tile, place_weights, publish_positions
from ..rows import RingShape
from .stage import announce, ring_shape, stage

THREADS = 32 * PLACING_WARPS


class PublishArgs(NamedTuple):
    """Along a known route `recv_rows` is given, not written, and `send_rows`, `offs`, `counts`, `dropped` are none."""

    ranks: RankArgs
    x: Int64
    topk_idx: Int64
    topk_weights: Int64
    send_rows: Int64
    recv_rows: Int64
    offs: Int64
    counts: Int64
    dropped: Int64
    recv_weights: Int64
    tokens: Int32
    max_tokens: Int32
    capacity: Int32  # rows of the receive buffer
    alignment: Int32
    slots: Int32
    blocks: Int32


@dataclass(frozen=True)
class Publish(Kernel):
    """`route`: exchange and place the route. `rows`: stage x. `weights`: publish the routing weights.

    `ends_operation`: nothing follows (ep::plan), so this kernel ends the epoch.
    """

    NAME, Args = "ep_publish", PublishArgs

    route: bool
    rows: bool
    weights: bool
    ends_operation: bool

    @property
    def tile_blocks(self) -> int:
        """Blocks before the staging ones."""
        return self.problem.tiles if self.route or self.weights else 0

    @property
    def ring(self) -> RingShape:
        """Of staging blocks, beside what tile blocks have of shared memory."""
        return ring_shape(self.problem, SHARED_BYTES - self.problem.placing_bytes)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (THREADS, 1, 1)}

    @cute.kernel
    def kernel(self, args: PublishArgs) -> None:
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        if bid == 0:
            sync.say_hello(ranks, tid, True)

        # Every block runs and has read the epoch: the pull kernel may take the multiprocessors that are left. It reads
        # the epoch, x and a known route without waiting for this kernel to end, so all that must have been written
        # before this kernel began: that holds because this kernel is no dependent launch itself (no `use_pdl`).
        arch.sync_threads()
        arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        if bid < self.tile_blocks:
            self.do_tile(ranks, smem, bid, args)
        elif const_expr(self.rows):
            copiers = blocks - 1 - self.tile_blocks
            if bid < blocks - 1:
                stage(self.ring, ranks, smem, args.x, args.tokens, bid - self.tile_blocks, copiers)
            else:
                announce(ranks, smem, args.tokens, THREADS)
        if const_expr(self.ends_operation):
            sync.finish(ranks)

    @cute.jit
    def do_tile(self, ranks: sync.Ranks, smem: Any, tile: Int32, args: PublishArgs) -> None:
        p = self.problem
        tid, _, _ = arch.thread_idx()
        tokens, max_tokens = args.tokens, args.max_tokens
        first = tile * ((max_tokens + p.tiles - 1) // p.tiles) * p.top_k
        end = cutlass.min(first + (max_tokens + p.tiles - 1) // p.tiles * p.top_k, tokens * p.top_k)
        failed = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            failed[0] = 0
        if const_expr(self.route):
            table = smem.allocate_tensor(Int32, cute.make_layout(p.table_entries))
            start = smem.allocate_tensor(Int32, cute.make_layout(2 * p.num_experts))
            header = smem.allocate_tensor(Int32, cute.make_layout(4 * p.world_size))
            publish_positions(ranks, args.topk_idx, tile, first, end, THREADS // 32, table, start)
            if tid == 0 and tile == 0:
                values = (tokens, args.capacity, args.alignment, args.slots)
                for i in range_constexpr(4):
                    ptx.st_i32(ranks.at(ranks.own, "header") + i * 4, values[i])
        if const_expr(self.weights):
            j = first + tid
            while j < end:
                weight = ptx.ld_f32(args.topk_weights + Int64(j) * 4)
                ptx.st_f32(ranks.at(ranks.own, "weights") + Int64(j) * 4, weight)
                j += THREADS
        # All of the block's stores come before the release of the flags.
        arch.sync_threads()
        if tid < p.world_size:
            ranks.signal("route", tid, ranks.rank * p.tiles + tile)
        i = tid
        while i < p.world_size * p.tiles:
            if not ranks.wait("route", i, i // p.tiles, i % p.tiles):
                failed[0] = 1
            i += THREADS
        # The barrier hands what was acquired to the whole block.
        arch.sync_threads()
        ok = 1 - failed[0]
        if const_expr(self.route):
            earlier = cute.make_tensor(table.iterator + p.world_size * p.num_experts, table.layout)
            place_tile(ranks, THREADS, self.weights, ok, tile, Tables(table, earlier, start, header), args)
        else:
            place_weights(ranks, THREADS, ok, tile, args)
        arch.sync_threads()
        if tid == 0:
            ranks.signal("placed", ranks.rank, tile)
