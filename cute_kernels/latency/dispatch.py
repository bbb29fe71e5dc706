"""Latency dispatch: one kernel that exchanges routes, pushes rows, and writes received rows to their final places.

Block roles. Blocks [0, senders) push: this rank's route to every peer, then each row once to every rank that holds one
of its experts, one warp for each packet. Blocks [first_receiver, grid), at least two, receive: each waits for the
routes of all ranks, computes the destinations of this rank's rows, then waits for its share of the rows and stores
them. The last block takes no rows: it computes the segments of all experts and `send_rows`. The block before it writes
the lists of arrivals; if only two blocks receive, the last one does that as well. A block with both roles pushes first.
Pushing never waits, so every wait ends, in whatever order blocks start, if all blocks are co-resident.

Completion. The routes determine which rows arrive, and the kernel has seen every line of them before it exits. The
lines of all ranks' routes also show that all ranks have begun this operation, as the rule of two banks requires
(sync.py).

dispatch_sender.py describes pushing. internode/latency_dispatch.py adds what several NVLink domains need.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..copies import lowest, pop_lowest
from ..delivery import Arrived
from ..experts import first_expert, local_experts
from ..ids import block_ids, thread_id, warp_id
from ..segments import padded
from ..swizzled import Begins
from ..token_major import clear_choices
from ..views import Records, Vectors
from .dispatch_sender import DispatchSender, LatencyDispatchArgs
from .lists import own_weights, write_lists
from .packets import (
    THREADS,
    WARPS,
    WarpShare,
    Words,
    arrived,
    await_packets,
    hold_epoch,
    lane_offset,
    lane_vector,
    load_packets,
    marks,
    open_next_epoch,
    part_of,
    receive_packet,
    seal,
    store_payload,
)
from .place import (
    RouteTables,
    asked_expert,
    clear_counts,
    keep_route,
    kept_rows,
    own_route_words,
    place_entries,
    source_stride,
    write_segments,
)
from .place_tokens import place_tokens, write_copies, write_send_rows
from .quantized import WEIGHTS, first_weight, row_words, store_row
from .reach import Peers
from .sizes import PACKET_BYTES, PAYLOAD_BYTES, PAYLOAD_VECTORS, ROUTE_HEADER_BYTES, packets

BATCH = 4
"""Number of packets of token-major rows that a warp waits for together."""
EAGER_BATCH = 3
"""Number of packets that a warp waits for together where each is stored when it arrives. Registers hold no more."""
HELD, POLLS = 8, 16
"""Lowest bits of the parts of a batch's state, behind a bit for each packet that is not stored yet."""


class Batch(NamedTuple):
    """Packets that a warp waits for together, in registers; their numbers are `step` apart."""

    words: Any  # [4 × packets] a lane's 16 bytes of each
    vectors: Any  # [packets] which 16 bytes of the staging these are
    rows: Any  # [packets] a row of the packet's token, one a lane, or -1


@dataclass(frozen=True)
class LatencyDispatch(DispatchSender):
    """The kernel. :class:`.dispatch_sender.DispatchSender` describes its fields."""

    @cute.kernel
    def kernel(self, args: LatencyDispatchArgs) -> None:
        lane = arch.lane_idx()
        warp = warp_id()
        if const_expr(self.send):
            peers = Peers(self.problem, args.ranks.peers, lane)
        # Nothing else is read, or written, before the kernel in front has ended: its epoch, its x.
        arch.griddepcontrol_wait()
        ranks = sync.Ranks(self.heap, args.ranks)
        if const_expr(self.send):
            self.send_all(ranks, args, peers, warp, lane)
        if const_expr(self.receive):
            self.receive_all(ranks, args, warp, lane)

    @cute.jit
    def send_all(
        self, ranks: sync.Ranks, args: LatencyDispatchArgs, peers: Peers, warp: Int32, lane: Int32
    ) -> None:  # fmt: skip
        """By every block: what it sends. The last block says hello."""
        p, senders = self.problem, args.senders
        bid, blocks = block_ids()
        if bid < senders:
            from_first = WarpShare(bid, senders, warp, lane)
            from_last = WarpShare(senders - 1 - bid, senders, warp, lane)
            self.put_all(ranks, args, from_first, from_last)
            if const_expr(p.domain_ranks > 1):
                self.push_route(ranks, args, peers, from_last)
                self.push_rows(ranks, args, peers, from_first)
        if bid == blocks - 1 and warp == WARPS - 1:
            operation.say_hello(ranks, lane, 32, False)

    @cute.jit
    def receive_all(self, ranks: sync.Ranks, args: LatencyDispatchArgs, warp: Int32, lane: Int32) -> None:
        """By every block: ends the block's part of the epoch; and if it receives, learns where rows go and does what is
        its role."""
        p = self.problem
        bid, blocks = block_ids()
        smem = cutlass.memory.SmemAllocator()
        tables = RouteTables(smem, ranks.heap)
        # The last block has all experts, the others this rank's; of token-major rows all have all ranks.
        low, high = local_experts(p, ranks.rank)
        if bid == blocks - 1:
            low = Int32(0)
            high = Int32(p.num_experts)
        missing = Int32(0)
        if bid >= args.first_receiver:
            clear_counts(tables, Int32(p.world_size) if self.token_major else high - low)
            missing = self.gather_routes(ranks, tables, args, warp, lane)
        hold_epoch(ranks)
        tables.entries = args.max_tokens * p.top_k * Int32(ptx.barrier_count(missing) == 0)
        if warp == WARPS - 1 and lane == 0:
            self.leave_epoch(ranks)
        if bid >= args.first_receiver:
            self.number_rows(ranks, tables, args.max_tokens, warp)
            copies = Int32(0)
            if const_expr(self.token_major):
                copies = place_tokens(p, tables, args)
            else:
                place_entries(p, tables, args.max_tokens * p.top_k, low, high)
            self.do_role(ranks, tables, args, copies, warp, lane)

    @cute.jit
    def do_role(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, copies: Int32, warp: Int32, lane: Int32
    ) -> None:
        """By a block that receives, which has placed the rows: all blocks but one or two take rows, the next one writes
        the lists of what arrives, and the last one all that depends on all experts."""
        p = self.problem
        bid, blocks = block_ids()
        takers = cutlass.max(blocks - args.first_receiver - 2, 1)
        number = bid - args.first_receiver
        if const_expr(self.triggers):
            # The routes were all that blocks without rows wait for.
            if number >= takers and warp == WARPS - 1:
                arch.griddepcontrol_launch_dependents()
        if bid == blocks - 1:
            self.write_route(ranks, tables, args, warp, lane)
        if number < takers:
            share = WarpShare(number, takers, warp, lane)
            if const_expr(self.token_major):
                behind = cutlass.min(copies, args.capacity)
                clear_choices(p, THREADS, (share.block, share.blocks), args, behind, True, self.weights)
            else:
                if const_expr(self.weights):
                    own_weights(p, tables, args, share)
                self.clear_padding(tables, args, share)
            self.take_rows(ranks, tables, args, share)
        elif number == takers:
            if const_expr(self.token_major):
                write_copies(ranks, tables, args, copies, self.weights)
            else:
                write_lists(p, tables, args)

    @cute.jit
    def write_route(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, warp: Int32, lane: Int32
    ) -> None:  # fmt: skip
        """By the last block: segments and `send_rows`."""
        p = self.problem
        if const_expr(self.token_major):
            write_send_rows(p, tables, args)
        else:
            write_segments(p, tables, args)
            self.write_send_rows(tables, args)
        self.end_operation(ranks, warp, lane)
        if warp == 0 and lane == 0:
            operation.note_met(ranks)

    @cute.jit
    def gather_routes(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, warp: Int32, lane: Int32
    ) -> Int32:
        """Receive the routes of all ranks in shared memory. Return 1 in a thread that misses some of a route, else 0.
        The last block logs which ranks it waits for.

        A block that misses a route places no rows at all. A rank that rejects the operation sends no route, so then all
        blocks of all ranks agree on a route without rows, whatever else they have received."""
        p = self.problem
        bid, blocks = block_ids()
        count = packets(ROUTE_HEADER_BYTES + 2 * (args.max_tokens * p.top_k))
        item, missing = warp, Int32(0)
        while item < count * p.world_size:
            source = item // count
            packet = item - source * count
            w0, w1, w2, w3 = Uint32(0), Uint32(0), Uint32(0), Uint32(0)
            if source == ranks.rank:
                own = own_route_words(ranks, args, packet, lane, p.world_size == 1)
                w0, w1, w2, w3 = seal(own, lane, Int64(0))
            else:
                self.await_route(ranks, source, lane)
                at = part_of(ranks.view("routes").at(source, packet), 0, lane)
                w0, w1, w2, w3 = receive_packet(ranks, at, "route", source, bid == blocks - 1, lane)
                if marks(lane) and (w2 & w3) == Uint32(0xFFFFFFFF):  # which is the mark of no kind of operation
                    missing = Int32(1)
            keep_route(tables, source, packet, (w0, w1, w2, w3), lane)
            item += WARPS
        return missing

    @cute.jit
    def write_send_rows(self, tables: RouteTables, args: LatencyDispatchArgs) -> None:
        """By the block that placed all experts: the rows of this rank's entries."""
        first = args.ranks.rank * source_stride(args.max_tokens * self.problem.top_k)
        for i in cutlass.range(thread_id(), args.tokens * self.problem.top_k, THREADS):
            args.send_rows[i] = tables.rows[first + i]

    @cute.jit
    def clear_padding(self, tables: RouteTables, args: LatencyDispatchArgs, share: WarpShare) -> None:
        """Zero a block's share of the rows between each segment's last row and its padded end: one warp for each row,
        and for swizzled scales one warp for each expert."""
        p = self.problem
        rank, lane = args.ranks.rank, share.lane
        experts = first_expert(p, rank + 1) - first_expert(p, rank)
        alignment = cutlass.max(Int32(tables.route[rank * tables.route_stride + 1]), 1)
        to = self.arrived(tables, args)
        end = experts * (alignment - 1) if args.zeros != 0 else Int32(0)
        item = share.first
        while item < end:
            e = item // (alignment - 1)
            start = tables.start[e]
            kept = kept_rows(tables, e)
            row = start + kept + (item - e * (alignment - 1))
            if row < start + padded(kept, alignment):
                self.delivery.zero(to, row, row + 1, lane, self.weights)
            item += share.step
        if const_expr(self.delivery.tiles is not None):
            e = Int32(share.first)
            while args.zeros != 0 and e < experts:
                kept = kept_rows(tables, e)
                self.delivery.tiles.clear(to, e, tables.start[e], kept, padded(kept, alignment))
                e += share.step

    def arrived(self, tables: RouteTables, args: LatencyDispatchArgs) -> Arrived:
        to = Arrived(args.recv_x, args.recv_weights, args.recv_scales, args.capacity, cutlass.max(args.slots, 0))
        if const_expr(self.delivery.tiles is None):
            return to
        first, end = local_experts(self.problem, args.ranks.rank)
        return to._replace(begins=Begins(end - first, None, tables.start))

    @cute.jit
    def take_rows(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, share: WarpShare
    ) -> None:  # fmt: skip
        """By a block: wait for its share of the packets of all rows that come here, and store each to all its rows.

        Of rows grouped by expert, which have several rows for a packet, each packet is stored as soon as it arrives, so
        that the stores overlap with what is still on the link. Token-major rows, with one store for a packet, are
        stored when the whole batch has arrived: their loop has no registers for more.
        """
        p = self.problem
        size = BATCH if self.token_major else EAGER_BATCH
        total = args.max_tokens * (p.world_size * self.row_packets)
        words = cute.make_rmem_tensor((4 * size,), Uint32)
        batch = Batch(words, *(cute.make_rmem_tensor((size,), Int32) for _ in range(2)))
        item = share.first
        if item >= total:
            self.end_waits(share.warp)
        while item < total:
            state = self.look_up_batch(ranks, tables, args, batch, item, share)
            self.await_rows(ranks, tables, args, item + share.lane * share.step, Int32(total), size)
            if const_expr(self.token_major):
                waiting = state & ~(state >> HELD) & ((1 << BATCH) - 1)
                address_of, gives_up = self.waits_of(ranks, batch, item, share)
                await_packets(ranks, batch.words, waiting, BATCH, address_of, gives_up, Int32(0))
                if item + size * share.step >= total:
                    self.end_waits(share.warp)
                for u in range_constexpr(size):
                    self.store_packet(tables, args, batch, u, item + u * share.step, share.lane)
            else:
                self.store_on_arrival(ranks, tables, args, batch, item, share, state)
                if item + size * share.step >= total:
                    self.end_waits(share.warp)
            item += size * share.step
        self.trigger_dependents(share.warp)

    @cute.jit
    def look_up_batch(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, batch: Batch, item: Int32,
        share: WarpShare,
    ) -> Int32:  # fmt: skip
        """By a warp: which packets of a batch have rows, and where. Returns a bit for each of them, and from bit `HELD`
        on a bit for each that this rank holds itself, whose words are then in the batch."""
        p = self.problem
        lane, count = share.lane, self.row_packets
        total = args.max_tokens * (p.world_size * count)
        stride = source_stride(args.max_tokens * p.top_k)
        state = Int32(0)
        for u in range_constexpr(BATCH if self.token_major else EAGER_BATCH):
            mine = item + u * share.step
            token = mine // (p.world_size * count)
            source = (mine // count) % p.world_size
            packet = mine % count
            batch.rows[u] = Int32(-1)
            if const_expr(self.token_major):
                if mine < total and lane == 0:
                    batch.rows[u] = tables.rows[source * args.max_tokens + token]
            else:
                if mine < total and lane < p.top_k:
                    batch.rows[u] = tables.rows[source * stride + token * p.top_k + lane]
            number = self.number_of_row(ranks, tables, source, token, mine < total)
            line = (source * self.tokens + number) * (self.row_stride // 16)
            batch.vectors[u] = line + packet * (PACKET_BYTES // 16) + lane
            if arch.vote_any_sync(batch.rows[u] >= 0):
                state = state | (1 << u)
                if source == ranks.rank:
                    state = state | (1 << (HELD + u))
                    own = seal(self.own_words(ranks, args, token, packet, lane), lane, Int64(0))
                    for i in range_constexpr(4):
                        batch.words[4 * u + i] = own[i]
        return state

    @cute.jit
    def own_words(
        self, ranks: sync.Ranks, args: LatencyDispatchArgs, token: Int32, packet: Int32, lane: Int32
    ) -> Words:  # fmt: skip
        """Return a lane's payload vector of a packet of one of this rank's own rows, without weights."""
        p = self.problem
        if const_expr(self.format != ""):
            return row_words(self.delivery.form, self.given, False, ranks, args, token, packet, lane)
        vector = cutlass.min((packet * PAYLOAD_VECTORS + lane_vector(lane)) * 16, p.row_bytes - 16)
        return ptx.ld_v4(Records(args.x, p.row_bytes).at(token) + vector)

    @cute.jit
    def store_on_arrival(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, batch: Batch, item: Int32,
        share: WarpShare, state: Int32,
    ) -> None:  # fmt: skip
        """By a warp: stores each packet of a batch when it arrives. What does not arrive in time is reported.

        One register holds it all: a bit for each packet that is not stored, from bit `HELD` on one for each that this
        rank holds, and from bit `POLLS` on how often the others were looked for since the last check of the deadline.
        """
        address_of, gives_up = self.waits_of(ranks, batch, item, share)
        every = (1 << EAGER_BATCH) - 1
        start = Int64(0)
        while arch.vote_any_sync(state & every != 0):
            load_packets(batch.words, state & ~(state >> HELD), EAGER_BATCH, address_of)
            for u in range_constexpr(EAGER_BATCH):
                if (state >> u) & 1 != 0:
                    whole = arrived(batch.words[4 * u + 2], batch.words[4 * u + 3], share.lane, ranks.mark)
                    if whole or (state >> (HELD + u)) & 1 != 0:
                        self.store_packet(tables, args, batch, u, item + u * share.step, share.lane)
                        state = state & ~(1 << u)
            state += 1 << POLLS
            if state >> POLLS == sync.POLLS_PER_CHECK and state & every != 0:
                state = state & ((1 << POLLS) - 1)
                if start == 0:
                    start = Int64(arch.globaltimer())
                if gives_up(start, lowest(state & every)):
                    state = Int32(0)

    def waits_of(self, ranks: sync.Ranks, batch: Batch, item: Int32, share: WarpShare) -> tuple[Any, Any]:
        """Return how a warp waits for the packets of a batch that begins with `item` (see `packets.await_packets`)."""
        staging = Vectors(ranks.view("lines").base)

        def address_of(u: int) -> Int64:
            return staging.at(batch.vectors[u])

        def gives_up(start: Int64, u: Int32) -> Boolean:
            late = item + share.step * u
            token = late // (self.problem.world_size * self.row_packets)
            source = (late // self.row_packets) % self.problem.world_size
            return sync.warp_gives_up(ranks, start, "token", source, token, Int64(0))

        return address_of, gives_up

    @cute.jit
    def store_packet(
        self, tables: RouteTables, args: LatencyDispatchArgs, batch: Batch, u: cutlass.Constexpr[int], item: Int32,
        lane: Int32,
    ) -> None:  # fmt: skip
        """By a warp: stores packet `u` of a batch to all rows of its token, and the weights that it carries."""
        p = self.problem
        words = (batch.words[4 * u], batch.words[4 * u + 1], batch.words[4 * u + 2], batch.words[4 * u + 3])
        left = arch.vote_ballot_sync(batch.rows[u] >= 0)
        # Derived again from the vector's number: registers are scarce.
        packet = batch.vectors[u] % (self.row_stride // 16) // (PACKET_BYTES // 16)
        offset = packet * PAYLOAD_BYTES + lane_offset(lane)
        if const_expr(self.weights):
            if left != 0:
                first = (offset - p.row_bytes) // 4 if offset >= p.row_bytes else Int32(-4)
                if const_expr(self.format != ""):
                    first = first_weight(packet, lane) if lane_offset(lane) >= 16 * WEIGHTS else Int32(-4)
                self.store_weights(tables, args, words, first, item, lane)
        if const_expr(self.format != ""):
            if left != 0:
                store_row(self.delivery, self.arrived(tables, args), words, packet, batch.rows[u], lane)
        else:
            while left != 0:
                k, left = pop_lowest(left)
                row = arch.shuffle_sync(batch.rows[u], k)
                store_payload(words, lane, Records(args.recv_x, p.row_bytes).at(row), offset, p.row_bytes)

    @cute.jit
    def store_weights(
        self, tables: RouteTables, args: LatencyDispatchArgs, words: Words, first: Int32, item: Int32, lane: Int32
    ) -> None:
        """Store the weights of a received packet in the rows of their (token, k), or next to the token-major row.
        `first`: index of the first weight of the token that a lane stores, negative for lanes that store none."""
        p = self.problem
        count = self.row_packets
        source = (item // count) % p.world_size
        if first >= 0 and source != args.ranks.rank:
            entries = args.max_tokens * p.top_k
            stride = source_stride(entries)
            token = item // (p.world_size * count)
            for i in range_constexpr(4):
                if first + i < p.top_k and (i < 2 or not marks(lane)):
                    k = token * p.top_k + first + i
                    if const_expr(self.token_major):
                        row = tables.rows[source * args.max_tokens + token]
                        low, high = local_experts(p, args.ranks.rank)
                        weight = Int32(0)
                        if asked_expert(tables, source, k, low, high) >= 0:
                            weight = Int32(words[i])
                        args.recv_weights.bits[Int64(row) * p.top_k + first + i] = weight
                    else:
                        row = tables.rows[source * stride + k]
                        if row >= 0:
                            args.recv_weights.bits[row] = Int32(words[i])

    # What several NVLink domains do differently (internode/latency_dispatch.py).

    def leave_epoch(self, ranks: sync.Ranks) -> None:
        """By one thread of each block, all of whose threads have read the epoch."""
        open_next_epoch(ranks)

    def end_operation(self, ranks: sync.Ranks, warp: Int32, lane: Int32) -> None:
        """By the last block: end the operation if `leave_epoch` does not."""

    def await_route(self, ranks: sync.Ranks, source: Int32, lane: Int32) -> None:
        """By a warp, before it looks at the packets of another rank's route."""

    def await_rows(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, item: Int32, total: Int32,
        size: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """By a warp, before it looks at its next packets: `size` of them, from `item` of the first lanes on."""

    def number_rows(self, ranks: sync.Ranks, tables: RouteTables, max_tokens: Int32, warp: Int32) -> None:
        """By a whole block that has all routes, with a barrier behind it: number rows that do not lie by token."""

    def number_of_row(
        self, ranks: sync.Ranks, tables: RouteTables, source: Int32, token: Int32, exists: Boolean
    ) -> Int32:  # fmt: skip
        """Return the number of a token's row among those of its rank in staging."""
        return Int32(token)
