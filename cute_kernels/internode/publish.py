"""Publish kernels of several NVLink domains: puts carry the route and the weights to ranks of other domains, and rows
to their stagers (sending.py).

A relaying block precedes the announcing block, and two thirds of the other blocks send rows to other domains. In
domains of one rank all of them do, and there is no announcing block. Ids and weights of token-major rows are sent as
weights are, so there is something to relay even if no rows are sent.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import sync
from ..domains import is_near
from ..formats import Form
from ..ids import thread_id, warp_id
from ..throughput.publish import Publish, PublishArgs
from ..throughput.publish_tokens import PublishTokens
from ..throughput.route import THREADS, Counters, Message, message_at, tile_of
from ..throughput.stage_quantized import quantize_row
from ..views import Records
from .relayed import row_in
from .sending import BatchFiller, copy_rows, relay, send_rows, send_weights


@cute.jit
def address_of_message(ranks: sync.Ranks, rank: Int32, tile: Int32) -> Int64:
    """Return where this rank writes a tile's message for another rank: at that rank or, for a rank of another domain,
    in this rank's own memory, from which it is put on the wire (`put_messages`)."""
    address = Int64(0)
    if is_near(ranks, rank):
        address = ranks.view("messages", ranks.peer(rank)).at(ranks.rank, tile)
    else:
        address = ranks.view("messages_out").at(rank, tile)
    return address


def message_for(ranks: sync.Ranks, rank: Int32, tile: Int32) -> Message:
    return message_at(ranks.heap.problem, address_of_message(ranks, rank, tile))


@cute.jit
def put_messages(ranks: sync.Ranks, counters: Counters, warps: cutlass.Constexpr[int], tile: Int32) -> None:
    """By one block, behind a barrier: puts its tile's messages to ranks of other domains, one put each, whose word is
    the route flag."""
    p = ranks.heap.problem
    rank = Int32(warp_id())
    while rank < p.world_size and ranks.goes_on:
        if not is_near(ranks, rank):
            entries = Int32(counters.total[p.num_experts + rank])
            there, here = ranks.offsets("messages").at(ranks.rank, tile), ranks.offsets("messages_out").at(rank, tile)
            word = ranks.offsets("route").at(ranks.rank, tile)
            p.wire.put_signal(ranks, rank, there, here, p.message_bytes(entries), word, ranks.mark)
        rank += warps


@dataclass(frozen=True)
class PublishAcross(Publish):
    """The publish kernel."""

    @property
    def has_rows_blocks(self) -> bool:
        return self.rows or self.published_bytes > 0

    @cute.jit
    def do_rows(self, ranks: sync.Ranks, smem: Any, block: Int32, blocks: Int32, args: PublishArgs) -> None:
        """Relay what comes from other domains, stage rows for ranks of this one, and send rows to others."""
        if block == 0:
            relay(ranks, THREADS, self.rows, self.published_bytes > 0, args.max_tokens)
        elif const_expr(self.rows):
            self.do_rows_across(ranks, smem, block - 1, blocks - 1, args)

    @cute.jit
    def do_rows_across(self, ranks: sync.Ranks, smem: Any, block: Int32, blocks: Int32, args: PublishArgs) -> None:
        # Rows in a format are fetched from staging by the rank itself, too.
        alone = self.problem.domain_ranks == 1 and self.format == ""
        senders = blocks if alone else cutlass.max((blocks - 1) * 2 // 3, 1)
        if block < senders:
            row_bytes = (
                Form(self.format, self.problem.hidden_size).staged_bytes if self.format else self.problem.row_bytes
            )
            send_rows(ranks, THREADS, BatchFiller(self.fill_batch, row_bytes), args, block, senders)
        elif const_expr(not alone):
            Publish.do_rows(self, ranks, smem, block - senders, blocks - senders, args)

    @cute.jit
    def fill_batch(self, ranks: sync.Ranks, args: PublishArgs, batch: Int32, mask: Int32, to: Int64) -> None:
        """Fill a batch (see `sending.BatchFiller`)."""
        p = self.problem
        first = batch * p.batch_tokens
        if const_expr(self.format == ""):
            copy_rows(THREADS, mask, to, Records(args.x, p.row_bytes).at(first), p.row_bytes)
        else:
            form = Form(self.format, p.hidden_size)
            for token in cutlass.range(warp_id(), p.batch_tokens, THREADS // 32):
                if (mask >> token) & 1 != 0:
                    row = Records(to, form.staged_bytes).at(row_in(mask, token))
                    quantize_row(form, self.given, ranks, args, first + token, row)

    # A rank that has given up does not overwrite what its puts may still read, because a valid word would follow.

    @cute.jit
    def send_entry(self, ranks: sync.Ranks, rank: Int32, tile: Int32, index: Int32, entry: Any) -> None:
        entries = message_for(ranks, rank, tile).entries
        if ranks.goes_on or is_near(ranks, rank):
            entries[index] = entry

    @cute.jit
    def send_count(self, ranks: sync.Ranks, rank: Int32, tile: Int32, index: Int32, value: Int32) -> None:
        if ranks.goes_on or is_near(ranks, rank):
            message_for(ranks, rank, tile).counts[index] = value

    @cute.jit
    def tokens_to_publish(self, ranks: sync.Ranks, tile: Int32, args: Any) -> tuple[Int32, Int32]:
        first, end = tile_of(self.problem, tile, args.max_tokens, args.tokens)
        if not ranks.goes_on:
            end = first
        return first, end

    @cute.jit
    def send_tile_across(self, ranks: sync.Ranks, counters: Any, tile: Int32, args: Any) -> None:
        # Orders all of the block's stores before its puts.
        arch.sync_threads()
        if const_expr(self.route):
            put_messages(ranks, counters, THREADS // 32, tile)
        if const_expr(self.published_bytes > 0):
            first, end = tile_of(self.problem, tile, args.max_tokens, args.tokens)
            send_weights(ranks, THREADS // 32, self.published_bytes, tile, first, end)

    @cute.jit
    def signal_tile(self, ranks: sync.Ranks, peer: Int32, tile: Int32) -> None:
        if is_near(ranks, peer):
            ranks.signal("route", peer, (ranks.rank, tile))

    @cute.jit
    def await_tile(self, ranks: sync.Ranks, index: Int32) -> Boolean:
        source, tile = index // self.problem.tiles, index % self.problem.tiles
        come = Boolean(True)
        near = is_near(ranks, source)
        if near or const_expr(self.route):
            come = ranks.wait("route", index, source, tile)
        if const_expr(self.published_bytes > 0):
            if not near and come:
                flag = ranks.view("relayed_weights").flat.at(index)
                come = sync.await_word(ranks, flag, source, tile) >= 0
        return come

    @cute.jit
    def after_await(self, ranks: sync.Ranks) -> None:
        p = self.problem
        tid = thread_id()
        if const_expr(self.route):
            p.wire.arrived(ranks, ranks.offsets("route").flat.at(tid), tid < p.world_size * p.tiles)


@dataclass(frozen=True)
class PublishTokensAcross(PublishAcross, PublishTokens):
    """The publish kernel of a token-major dispatch."""
