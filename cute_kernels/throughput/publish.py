"""First kernel of a throughput dispatch: publish the route, place every row, stage the rows.

Blocks that work side by side:
  tile blocks       (the first `problem.tiles`) tell the peers of a tile of their own tokens: counts to all, entries to
                    the holders of their experts (route.py); wait for the tiles of all ranks; place them (placing.py)
  announcing block  (the next) tells the peers of each chunk
  staging blocks    copy x into staging, chunk by chunk (stage.py), or quantize it on the way (stage_quantized.py)
Where there are several NVLink domains (internode/sending.py), the relaying block comes before the announcing one, and
of the others two thirds send rows to other domains; in domains of one rank all do, and nothing is announced.
Each tile block tells before it waits, staging blocks wait for nobody, the announcing block for staging blocks. So all
waits end, provided that the tile blocks, the announcing block and one that stages run at once: they are the first of
the grid, and a communicator is refused where there are not so many multiprocessors. Some are left free, so that a block
of somebody else's kernel delays none of them.

The pull kernel is launched while this one runs (programmatic dependent launch) and takes the multiprocessors that this
grid leaves free; the `placed` flags tell it when the route is there, the chunk flags when rows are.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..domains import is_near
from ..formats import Form
from ..heap import PLACING_WARPS, SHARED_BYTES, Heap
from ..internode.sending import BatchFiller, copy_rows, relay, row_in, send_rows, send_weights
from ..launch import Kernel, RankArgs
from .placing import finish_tile, new_tables, offset_of_weight, place_tile, place_weights
from .ring import RingShape
from .route import Counters, publish_tile, put_messages, tile_of
from .stage import announce, ring_shape, stage
from .stage_quantized import quantize_row, stage_quantized

THREADS = 32 * PLACING_WARPS


class PublishArgs(NamedTuple):
    """Along a known route `arrivals` is given, not written, and `send_rows`, `offs`, `counts`, `dropped` are none."""

    ranks: RankArgs
    x: Int64
    topk_idx: Int64
    topk_weights: Int64
    scales: Int64
    send_rows: Int64
    arrivals: Int64
    offs: Int64
    counts: Int64
    dropped: Int64
    recv_weights: Int64
    tokens: Int32
    max_tokens: Int32
    capacity: Int32  # rows of the receive buffer
    num_rows: Int32  # that `arrivals` has room for: as many, or all that may come where the capacity knows no bound
    alignment: Int32
    slots: Int32
    blocks: Int32


@dataclass(frozen=True)
class Publish(Kernel):
    """`route`: exchange and place the route. `rows`: stage x. `weights`: publish the routing weights.

    `ends_operation`: nothing follows (ep::plan), so this kernel ends the epoch. `format`: what rows travel as; `given`:
    x and its scales are in it already.
    """

    NAME, Args = "ep_publish", PublishArgs

    route: bool
    rows: bool
    weights: bool
    ends_operation: bool
    format: str = ""
    given: bool = False

    @property
    def published_bytes(self) -> int:
        """What peers read of each token besides its row: its weights, if there are any."""
        return self.problem.weights_each * 4 if self.weights else 0

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
    def kernel(self, args: Any) -> None:
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        if bid == 0:
            operation.say_hello(ranks, tid, THREADS, True)

        # Every block runs and has read the epoch: the pull kernel may take the multiprocessors that are left. It reads
        # the epoch, x and a known route without waiting for this kernel to end, so all that must have been written
        # before this kernel began: that holds because this kernel is no dependent launch itself (no `use_pdl`).
        arch.sync_threads()
        arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        if bid < self.tile_blocks:
            self.do_tile(ranks, smem, bid, args)
        elif const_expr(self.problem.num_domains > 1 and (self.rows or self.published_bytes > 0)):
            if bid == self.tile_blocks:
                relay(ranks, THREADS, self.rows, self.published_bytes > 0, args.max_tokens)
            elif const_expr(self.rows):
                self.do_rows_across(ranks, smem, bid - self.tile_blocks - 1, blocks - self.tile_blocks - 1, args)
        elif const_expr(self.rows):
            self.do_rows(ranks, smem, bid - self.tile_blocks, blocks - self.tile_blocks, args)
        if const_expr(self.ends_operation):
            operation.finish(ranks, blocks)

    @cute.jit
    def do_rows(self, ranks: sync.Ranks, smem: Any, block: Int32, blocks: Int32, args: PublishArgs) -> None:
        """By `block` of so many: for ranks of this rank's domain."""
        if block == 0:
            announce(ranks, smem, args.tokens, THREADS, self.format != "")
        elif const_expr(self.format != ""):
            form = Form(self.format, self.problem.hidden_size)
            stage_quantized(form, self.given, THREADS, ranks, args, block - 1, blocks - 1)
        else:
            stage(self.ring, ranks, smem, args.x, args.tokens, block - 1, blocks - 1)

    @cute.jit
    def do_rows_across(self, ranks: sync.Ranks, smem: Any, block: Int32, blocks: Int32, args: PublishArgs) -> None:
        """The same for those of other domains, too."""
        # Rows in a format are fetched from staging by the rank itself, too.
        alone = self.problem.domain_ranks == 1 and self.format == ""
        senders = blocks if alone else cutlass.max((blocks - 1) * 2 // 3, 1)
        if block < senders:
            row_bytes = (
                Form(self.format, self.problem.hidden_size).staged_bytes if self.format else self.problem.row_bytes
            )
            send_rows(ranks, THREADS, BatchFiller(self.fill_batch, row_bytes), args, block, senders)
        elif const_expr(not alone):
            self.do_rows(ranks, smem, block - senders, blocks - senders, args)

    @cute.jit
    def fill_batch(self, ranks: sync.Ranks, args: PublishArgs, batch: Int32, mask: Int32, to: Int64) -> None:
        """See `sending.BatchFiller`."""
        p = self.problem
        first = batch * p.batch_tokens
        if const_expr(self.format == ""):
            copy_rows(ranks, THREADS, mask, to, args.x + Int64(first) * p.row_bytes)
        else:
            form = Form(self.format, p.hidden_size)
            tid, _, _ = arch.thread_idx()
            token = Int32(arch.make_warp_uniform(tid // 32))
            while token < p.batch_tokens:
                if (mask >> token) & 1 != 0:
                    row = to + Int64(row_in(mask, token)) * form.staged_bytes
                    quantize_row(form, self.given, ranks, args, first + token, row)
                token += THREADS // 32

    @cute.jit
    def do_tile(self, ranks: sync.Ranks, smem: Any, tile: Int32, args: PublishArgs) -> None:
        p = self.problem
        tid, _, _ = arch.thread_idx()
        failed = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            failed[0] = 0
        counters: Any = None
        if const_expr(self.route):
            table = smem.allocate_tensor(Int32, cute.make_layout(p.table_ints))
            counters = Counters(table, smem.allocate_tensor(Int32, cute.make_layout(p.counters)))
            tables = new_tables(p, smem, table)
            publish_tile(ranks, counters, THREADS, tile, args)
        if const_expr(self.weights):
            self.publish_weights(ranks, tile, args)
        self.put_tile(ranks, counters, tile, args)
        ok = self.meet(ranks, tile, failed)
        if const_expr(self.route):
            place_tile(ranks, THREADS, ok, tile, tables, args)
            # The tile's part of the lists comes before the release. Without it the pull kernel gives up, and looks at
            # no list.
            arch.sync_threads()
            if tid == 0 and ok != 0 and tables.drops[0] >= 0:
                ranks.signal("placed", ranks.rank, tile)
            finish_tile(ranks, THREADS, self.weights, tile, tables, args)
        else:
            place_weights(ranks, THREADS, ok, tile, args)

    @cute.jit
    def publish_weights(self, ranks: sync.Ranks, tile: Int32, args: Any) -> None:
        """One block: puts what there is of each token of the tile where peers read it."""
        p = self.problem
        tid, _, _ = arch.thread_idx()
        first, end = tile_of(p, tile, args.max_tokens, args.tokens)
        j = first * p.top_k + tid
        if const_expr(p.num_domains > 1):
            # What puts may still read a rank that has given up leaves alone.
            if ranks.mark < 0:
                end = first
        while j < end * p.top_k:
            self.publish_weight(ranks, j, args)
            j += THREADS

    @cute.jit
    def publish_weight(self, ranks: sync.Ranks, j: Int32, args: Any) -> None:
        """Of a (token, k), as a flat index."""
        weight = ptx.ld_f32(args.topk_weights + Int64(j) * 4)
        ptx.st_f32(ranks.at(ranks.own, "weights") + offset_of_weight(self.problem, j), weight)

    @cute.jit
    def put_tile(self, ranks: sync.Ranks, counters: Any, tile: Int32, args: Any) -> None:
        """One block: what it has told of its tile goes to other NVLink domains."""
        p = self.problem
        if const_expr(p.num_domains > 1):
            # All of the block's stores come before its puts.
            arch.sync_threads()
            if const_expr(self.route):
                put_messages(ranks, counters, THREADS // 32, tile)
            if const_expr(self.published_bytes > 0):
                first, end = tile_of(p, tile, args.max_tokens, args.tokens)
                send_weights(ranks, THREADS // 32, self.published_bytes, tile, first, end)

    @cute.jit
    def meet(self, ranks: sync.Ranks, tile: Int32, failed: Any) -> Int32:
        """One block: releases what it has told of its tile, and acquires what all tiles of all ranks have. 0 if some of
        it never came."""
        p = self.problem
        tid, _, _ = arch.thread_idx()
        # All of the block's stores come before the release of the flags.
        arch.sync_threads()
        peer = Int32(tid)
        while peer < p.world_size:
            if is_near(ranks, peer):
                ranks.signal("route", peer, ranks.rank * p.tiles + tile)
            peer += THREADS
        i = Int32(tid)
        while i < p.world_size * p.tiles:
            if not self.await_tile(ranks, i):
                failed[0] = 1
            i += THREADS
        if const_expr(p.num_domains > 1 and self.route):
            p.wire.arrived(ranks, ranks.at(Int64(0), "route") + Int64(tid) * 8, tid < p.world_size * p.tiles)
        # The barrier hands what was acquired to the whole block.
        arch.sync_threads()
        return 1 - failed[0]

    @cute.jit
    def await_tile(self, ranks: sync.Ranks, index: Int32) -> Boolean:
        """By one thread: until what a tile of a rank tells is here, and its weights, too. False if they never came."""
        p = self.problem
        source, tile = index // p.tiles, index % p.tiles
        come = Boolean(True)
        if const_expr(p.num_domains == 1):
            come = ranks.wait("route", index, source, tile)
        else:
            near = is_near(ranks, source)
            if near or const_expr(self.route):
                come = ranks.wait("route", index, source, tile)
            if const_expr(self.published_bytes > 0):
                if not near and come:
                    flag = ranks.at(ranks.own, "relayed_weights") + Int64(index) * 8
                    come = sync.await_word(ranks, flag, source, tile) >= 0
        return come
