"""First kernel of a throughput dispatch: publish the route, place every row, stage the rows.

Block roles, in the order of block indices:
  tile blocks       (`problem.tiles`) send a tile of this rank's tokens: counts to all ranks, entries to the ranks of
                    their experts (route.py); wait for the tiles of all ranks; place them (placing.py)
  announcing block  (one) sets the chunk flags at the peers
  staging blocks    copy x to staging, chunk by chunk (stage.py), or quantize it on the way (stage_quantized.py)
If rows are pushed (push.py), pushing blocks take the place of the announcing and the staging blocks.
internode/publish.py adds what several NVLink domains need.

Progress. A tile block sends before it waits, staging and pushing blocks never wait, and the announcing block waits for
staging blocks. All waits therefore end if the tile blocks, the announcing block and one staging block are co-resident,
or the tile blocks and one pushing block. They are the first blocks of the grid, and a communicator cannot be created on
too few multiprocessors. Some multiprocessors are left free, so that a block of another kernel delays none of these
blocks.

The pull kernel is launched while this one runs (programmatic dependent launch) and uses the multiprocessors that this
grid leaves free. It waits for the `placed` flags before it reads the route, and for flags of chunks, or of pushed rows,
before it reads rows.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import operation, sync
from ..formats import Form
from ..heap import RING_BYTES, SHARED_BYTES, Heap
from ..ids import block_ids, thread_id
from ..launch import Kernel, RankArgs
from ..views import Floats, Ints
from .placing import finish_tile, new_tables, number_of_weight, place_tile, place_weights
from .push import Pushing
from .ring import RingShape
from .route import THREADS, Counters, outgoing, publish_tile, tile_of
from .stage import announce, ring_shape, stage
from .stage_quantized import stage_quantized


class PublishArgs(NamedTuple):
    """Arguments of :class:`Publish`. Along a known route `arrivals` is an input, and `send_rows`, `offs`, `counts` and
    `dropped` are not used; `send_rows` is an input if rows are pushed."""

    ranks: RankArgs
    x: Int64
    topk_idx: Ints
    topk_weights: Floats
    scales: Int64
    send_rows: Ints
    arrivals: Int64
    offs: Ints
    counts: Ints
    dropped: Ints
    recv_weights: Floats
    recv_idx: Ints  # of token-major rows
    tokens: Int32
    max_tokens: Int32
    capacity: Int32  # rows of the receive buffer; token-major, along a known route: those cleared behind the last copy
    num_rows: Int32  # that `arrivals` has room for: as many, or all that may come where the capacity knows no bound
    alignment: Int32
    slots: Int32  # of the padded layout; -1: segments follow each other, and a token's ids must be distinct; else 0
    blocks: Int32


@dataclass(frozen=True)
class Publish(Kernel):
    """`route`: exchange and place the route. `rows`: stage x. `weights`: publish the routing weights.

    `ends_operation`: nothing follows (ep::plan), so this kernel ends the epoch. `format`: what rows travel as; `given`:
    x and its scales are in it already. `pushes`: x is pushed instead of staged.
    """

    NAME, Args = "ep_publish", PublishArgs
    TOKEN_MAJOR: ClassVar[bool] = False

    route: bool = False
    rows: bool = False
    weights: bool = False
    ends_operation: bool = False
    format: str = ""
    given: bool = False
    pushes: bool = False

    @property
    def published_bytes(self) -> int:
        """Bytes that peers read of each token in addition to its row: its weights, if there are any."""
        return self.problem.weights_each * 4 if self.weights else 0

    @property
    def has_rows_blocks(self) -> bool:
        """Whether there are blocks behind the tile blocks."""
        return self.rows

    @property
    def tile_blocks(self) -> int:
        """Number of tile blocks, which come first in the grid."""
        return self.problem.tiles if self.route or self.weights else 0

    @property
    def ring(self) -> RingShape:
        """The ring of staging blocks, in the shared memory that tile blocks leave."""
        return ring_shape(self.problem, SHARED_BYTES - self.problem.placing_bytes)

    @property
    def pushing(self) -> Pushing:
        """The work of pushing blocks. Along a new route their ring has the shared memory that tile blocks leave."""
        left = SHARED_BYTES - self.problem.placing_bytes if self.route else SHARED_BYTES
        return Pushing(self.problem, min(RING_BYTES, left), not self.route)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (THREADS, 1, 1)}

    @cute.kernel
    def kernel(self, args: Any) -> None:
        bid, blocks = block_ids()
        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
        if bid == 0:
            operation.say_hello(ranks, thread_id(), THREADS, True)

        arch.sync_threads()
        if const_expr(not self.ends_operation):
            # Every block runs and has read the epoch: the pull kernel may take the multiprocessors that are left. It
            # reads the epoch, x and a known route without waiting for this kernel to end, so all that must have been
            # written before this kernel began: that holds because this kernel is no dependent launch itself (no
            # `use_pdl`). Without a pull the next kernel is of another operation, and must not take multiprocessors
            # while this one waits for peers.
            arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        if bid < self.tile_blocks:
            self.do_tile(ranks, smem, bid, args)
        elif const_expr(self.has_rows_blocks):
            self.do_rows(ranks, smem, bid - self.tile_blocks, blocks - self.tile_blocks, args)
        if const_expr(self.ends_operation):
            operation.finish(ranks, blocks)

    @cute.jit
    def do_rows(self, ranks: sync.Ranks, smem: Any, block: Int32, blocks: Int32, args: PublishArgs) -> None:
        """By `block` of so many behind the tile blocks: bring rows to where peers fetch them."""
        if const_expr(self.pushes):
            self.pushing.push(ranks, smem, args, block, blocks)
        elif block == 0:
            announce(ranks, smem, args.tokens, self.format != "")
        elif const_expr(self.format != ""):
            form = Form(self.format, self.problem.hidden_size)
            stage_quantized(form, self.given, ranks, args, block - 1, blocks - 1)
        else:
            stage(self.ring, ranks, smem, args.x, args.tokens, block - 1, blocks - 1)

    @cute.jit
    def do_tile(self, ranks: sync.Ranks, smem: Any, tile: Int32, args: PublishArgs) -> None:
        """One block: publish a tile of this rank's tokens, and place that tile of all ranks."""
        p = self.problem
        tid = thread_id()
        failed = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            failed[0] = 0
        counters: Any = None
        if const_expr(self.route):
            table = smem.allocate_tensor(Int32, cute.make_layout(p.table_ints))
            counters = Counters(table, smem.allocate_tensor(Int32, cute.make_layout(p.counters)))
            tables = self.new_tables(smem, table)
            publish_tile(self, ranks, counters, tile, args)
        if const_expr(self.published_bytes > 0):
            self.publish_weights(ranks, tile, args)
        self.send_tile_across(ranks, counters, tile, args)
        ok = self.meet(ranks, tile, failed)
        if const_expr(self.route):
            self.place(ranks, ok, tile, tables, args)
            # The tile's part of the lists comes before the release, and before what this block reads of it. If it is
            # not complete, no block of the pull kernel looks at a list.
            arch.sync_threads()
            if tid == 0:
                sync.decide(ranks, "placed", tile, self.is_placed(ok, tables))
            self.finish(ranks, tile, tables, args)
        else:
            self.place_weights(ranks, ok, tile, args)

    # How rows are placed, which token-major rows do in their own way.

    def new_tables(self, smem: Any, table: Any) -> Any:
        return new_tables(self.problem, smem, table)

    def place(self, ranks: sync.Ranks, ok: Int32, tile: Int32, tables: Any, args: PublishArgs) -> None:
        place_tile(ranks, ok, tile, tables, args)

    @cute.jit
    def is_placed(self, ok: Int32, tables: Any) -> Boolean:
        """Return whether the tile's part of the lists is complete."""
        return ok != 0 and tables.drops[0] >= 0

    def finish(self, ranks: sync.Ranks, tile: Int32, tables: Any, args: PublishArgs) -> None:
        finish_tile(ranks, self.weights, tile, tables, args)

    def place_weights(self, ranks: sync.Ranks, ok: Int32, tile: Int32, args: PublishArgs) -> None:
        place_weights(ranks, ok, tile, args)

    @cute.jit
    def publish_weights(self, ranks: sync.Ranks, tile: Int32, args: Any) -> None:
        """One block: store the weights of the tile's tokens where peers read them."""
        p = self.problem
        first, end = self.tokens_to_publish(ranks, tile, args)
        for j in cutlass.range(first * p.top_k + thread_id(), end * p.top_k, THREADS):
            self.publish_weight(ranks, j, args)

    @cute.jit
    def publish_weight(self, ranks: sync.Ranks, j: Int32, args: Any) -> None:
        """Store the weight of a (token, k), given as a flat index, where peers read it."""
        ranks.view("weights")[number_of_weight(self.problem, j)] = args.topk_weights[j]

    @cute.jit
    def meet(self, ranks: sync.Ranks, tile: Int32, failed: Any) -> Int32:
        """One block: release its tile's messages and weights to all ranks, and acquire those of all tiles of all ranks.
        Return 0 if some never arrived."""
        p = self.problem
        tid = thread_id()
        # Orders all of the block's stores before the release of the flags.
        arch.sync_threads()
        for peer in cutlass.range(tid, p.world_size, THREADS):
            self.signal_tile(ranks, Int32(peer), tile)
        for i in cutlass.range(tid, p.world_size * p.tiles, THREADS):
            if not self.await_tile(ranks, Int32(i)):
                failed[0] = 1
        self.after_await(ranks)
        # The barrier extends the acquire to the whole block.
        arch.sync_threads()
        return 1 - failed[0]

    # How ranks reach each other, which is different for those of other NVLink domains (internode/publish.py).

    def send_entry(self, ranks: sync.Ranks, rank: Int32, tile: Int32, index: Int32, entry: Any) -> None:
        """Write an entry of a tile's message to a rank."""
        outgoing(ranks, rank, tile).entries[index] = entry

    def send_count(self, ranks: sync.Ranks, rank: Int32, tile: Int32, index: Int32, value: Int32) -> None:
        """Write a number that precedes the entries of a tile's message to a rank."""
        outgoing(ranks, rank, tile).counts[index] = value

    def tokens_to_publish(self, ranks: sync.Ranks, tile: Int32, args: Any) -> tuple[Int32, Int32]:
        """Return the first token of a tile whose weight is published, and the one after the last."""
        return tile_of(self.problem, tile, args.max_tokens, args.tokens)

    def send_tile_across(self, ranks: sync.Ranks, counters: Any, tile: Int32, args: Any) -> None:
        """By one block: send its tile to ranks whose memory is not mapped."""

    def signal_tile(self, ranks: sync.Ranks, peer: Int32, tile: Int32) -> None:
        """By one thread: release this rank's tile to a peer."""
        ranks.signal("route", peer, (ranks.rank, tile))

    def await_tile(self, ranks: sync.Ranks, index: Int32) -> Boolean:
        """By one thread: wait for the messages and weights of a tile of a rank, all of which are counted by `index`.
        Return False if they never arrived."""
        return ranks.wait("route", index, index // self.problem.tiles, index % self.problem.tiles)

    def after_await(self, ranks: sync.Ranks) -> None:
        """By one block, whose threads have waited for all tiles."""
