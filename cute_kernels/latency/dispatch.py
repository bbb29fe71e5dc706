"""Latency dispatch, one kernel: every rank pushes its route and its rows, places what comes and stores it.

Blocks before `senders` push: the route to every peer, each row once to every rank that holds one of its experts, a
warp a packet. Blocks from `first_receiver` on receive, two at least: each waits for the routes of all ranks, works out
where the rows of this rank go, waits for its share of the rows that must come and stores them to all their places. The
last block does not take rows: it does the same for all experts and writes segments and `send_rows`. Nor does the one
before it, which writes the lists of what arrives; if only two receive, the last one does that, too. A block that pushes
and receives pushes first, and pushing waits for nobody: all waits end, whatever order blocks start in, as long as all
blocks fit on the device at once.

**Complete when it ends.** The routes say which rows come, and the kernel has seen every line of them. The lines of all
ranks' routes are the sign that all ranks have begun this operation, which the rule of two banks asks for (sync.py).

How blocks push stands in dispatch_sender.py. Ranks of other NVLink domains get their packets by puts, first of all;
there the last block meets all ranks, too.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..delivery import Arrived
from ..domains import is_near
from ..experts import first_expert, local_experts
from ..swizzled import Begins
from ..token_major import clear_choices
from .bundled import first_of, number_of, number_rows
from .dispatch_sender import DispatchSender, LatencyDispatchArgs
from .far import await_far, end, have_put
from .lists import own_weights, write_lists
from .packets import (
    THREADS,
    WARPS,
    WarpShare,
    Words,
    arrived,
    hold_epoch,
    lane_offset,
    lane_vector,
    ld_line,
    marks,
    open_next_epoch,
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
from .quantised import WEIGHTS, first_weight, row_words, store_row
from .reach import Peers
from .sizes import PACKET_BYTES, PAYLOAD_BYTES, PAYLOAD_VECTORS, ROUTE_HEADER_BYTES, packets

BATCH = 4
"""How many packets a warp waits for together."""


@dataclass(frozen=True)
class LatencyDispatch(DispatchSender):
    """See above; what the fields say stands with :class:`.dispatch_sender.DispatchSender`."""

    @cute.kernel
    def kernel(self, args: LatencyDispatchArgs) -> None:
        p = self.problem
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        lane = arch.lane_idx()
        warp = arch.make_warp_uniform(tid // 32)
        if const_expr(self.send):
            peers = Peers(p, args.ranks.peers, lane)
        # Nothing else is read, or written, before the kernel in front has ended: its epoch, its x.
        arch.griddepcontrol_wait()
        ranks = sync.Ranks(self.heap, args.ranks)
        senders, first_receiver = args.senders, args.first_receiver

        if const_expr(self.send):
            if bid < senders:
                if const_expr(p.num_domains > 1):
                    self.put_routes(ranks, args, WarpShare(senders - 1 - bid, senders, warp, lane))
                    if const_expr(p.bundles):
                        self.put_bundles(ranks, args, WarpShare(bid, senders, warp, lane))
                    else:
                        self.put_rows(ranks, args, WarpShare(bid, senders, warp, lane))
                if const_expr(p.domain_ranks > 1):
                    self.push_route(ranks, args, peers, WarpShare(senders - 1 - bid, senders, warp, lane))
                    self.push_rows(ranks, args, peers, WarpShare(bid, senders, warp, lane))
            if bid == blocks - 1 and warp == WARPS - 1:
                operation.say_hello(ranks, lane, 32, False)

        if const_expr(self.receive):
            smem = cutlass.memory.SmemAllocator()
            tables = RouteTables(smem, ranks.heap)
            # The last block has all experts, the others this rank's; of token-major rows all have all ranks.
            low, high = local_experts(p, ranks.rank)
            if bid == blocks - 1:
                low = Int32(0)
                high = Int32(p.num_experts)
            if bid >= first_receiver:
                clear_counts(tables, Int32(p.world_size) if self.token_major else high - low)
                self.gather_routes(ranks, tables, args, warp, lane)
            hold_epoch(ranks)
            arch.sync_threads()
            if warp == WARPS - 1 and lane == 0:
                if const_expr(p.num_domains > 1):
                    have_put(ranks)
                else:
                    open_next_epoch(ranks)
            if bid >= first_receiver:
                if const_expr(p.bundles):
                    number_rows(ranks, tables, args.max_tokens, warp)
                copies = Int32(0)
                if const_expr(self.token_major):
                    copies = place_tokens(p, tables, args)
                else:
                    place_entries(p, tables, args.max_tokens * p.top_k, low, high)
                # Blocks that take rows: all but one or two.
                takers = cutlass.max(blocks - first_receiver - 2, 1)
                if const_expr(self.triggers):
                    # The routes were all that blocks without rows wait for.
                    if bid - first_receiver >= takers and warp == WARPS - 1:
                        arch.griddepcontrol_launch_dependents()
                if bid == blocks - 1:
                    if const_expr(self.token_major):
                        write_send_rows(p, tables, args)
                    else:
                        write_segments(p, tables, args)
                        self.write_send_rows(tables, args)
                    if const_expr(p.num_domains > 1):
                        if warp == 0:
                            sync.meet_all(ranks, lane)
                            arch.sync_warp()
                            if lane == 0:
                                end(ranks)
                    if tid == 0:
                        operation.note_met(ranks)
                if bid - first_receiver < takers:
                    share = WarpShare(bid - first_receiver, takers, warp, lane)
                    if const_expr(self.token_major):
                        behind = cutlass.min(copies, args.capacity)
                        clear_choices(p, THREADS, (share.block, share.blocks), args, behind, True, self.weights)
                    else:
                        if const_expr(self.weights):
                            own_weights(p, tables, args, share)
                        self.clear_padding(tables, args, share)
                    self.take_rows(ranks, tables, args, share)
                elif bid - first_receiver == takers:
                    if const_expr(self.token_major):
                        write_copies(ranks, tables, args, copies, self.weights)
                    else:
                        write_lists(p, tables, args)

    @cute.jit
    def gather_routes(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, warp: Int32, lane: Int32
    ) -> None:
        """The routes of all ranks into shared memory. What does not come in time names no experts. The last block
        notes for whom it waits."""
        p = self.problem
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        count = packets(ROUTE_HEADER_BYTES + 2 * (args.max_tokens * p.top_k))
        item = warp
        while item < count * p.world_size:
            source = item // count
            packet = item - source * count
            w0, w1, w2, w3 = Uint32(0), Uint32(0), Uint32(0), Uint32(0)
            if source == ranks.rank:
                own = own_route_words(ranks, args, packet, lane, p.world_size == 1)
                w0, w1, w2, w3 = seal(own, lane, Int64(0))
            else:
                if const_expr(p.num_domains > 1):
                    if not is_near(ranks, source):
                        await_far(ranks, "routes", Boolean(lane == 0), source, source, Int32(0))
                at = Int64(source * ranks.heap.route_packets + packet) * PACKET_BYTES + lane * 16
                w0, w1, w2, w3 = receive_packet(
                    ranks, ranks.at(ranks.own, "routes") + at, "route", source, bid == blocks - 1, lane
                )
            keep_route(tables, source, packet, (w0, w1, w2, w3), lane)
            item += WARPS

    @cute.jit
    def write_send_rows(self, tables: RouteTables, args: LatencyDispatchArgs) -> None:
        """By the block that placed all experts: the rows of this rank's entries."""
        tid, _, _ = arch.thread_idx()
        first = args.ranks.rank * source_stride(args.max_tokens * self.problem.top_k)
        i = tid
        while i < args.tokens * self.problem.top_k:
            ptx.st_i32(args.send_rows + Int64(i) * 4, tables.rows[first + i])
            i += THREADS

    @cute.jit
    def clear_padding(self, tables: RouteTables, args: LatencyDispatchArgs, share: WarpShare) -> None:
        """A block's share of the rows between each segment's last row and its padded end: a warp a row, and of swizzled
        scales a warp an expert."""
        p = self.problem
        rank, lane = args.ranks.rank, share.lane
        experts = first_expert(p, rank + 1) - first_expert(p, rank)
        alignment = cutlass.max(Int32(tables.route[rank * tables.route_stride + 1]), 1)
        item = share.first
        to = self.arrived(tables, args)
        end = experts * (alignment - 1) if args.zeros != 0 else Int32(0)
        while item < end:
            e = item // (alignment - 1)
            start = tables.start[e]
            kept = kept_rows(tables, e)
            row = start + kept + (item - e * (alignment - 1))
            if row < start + (kept + alignment - 1) // alignment * alignment:
                self.delivery.zero(to, row, row + 1, lane, self.weights)
            item += share.step
        if const_expr(self.delivery.tiles is not None):
            e = Int32(share.first)
            while args.zeros != 0 and e < experts:
                kept = kept_rows(tables, e)
                rows = (kept + alignment - 1) // alignment * alignment
                self.delivery.tiles.clear(to, e, tables.start[e], kept, rows)
                e += share.step

    def arrived(self, tables: RouteTables, args: LatencyDispatchArgs) -> Arrived:
        to = Arrived(args.recv_x, args.recv_weights, args.recv_scales, args.capacity, args.slots)
        if const_expr(self.delivery.tiles is None):
            return to
        first, end = local_experts(self.problem, args.ranks.rank)
        return to._replace(begins=Begins(end - first, Int64(0), tables.start))

    @cute.jit
    def take_rows(self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, share: WarpShare) -> None:
        """A block's share of the packets of all rows that come here: wait for each, store it to all its places."""
        p = self.problem
        count = self.row_packets
        lane = share.lane
        total = args.max_tokens * (p.world_size * count)
        stride = source_stride(args.max_tokens * p.top_k)
        staging = ranks.at(ranks.own, "lines")
        step = share.step
        item = share.first
        words = cute.make_rmem_tensor((4 * BATCH,), Uint32)
        vectors = self.row_stride // 16
        place = cute.make_rmem_tensor((BATCH,), Int32)  # a lane's part of a packet: which 16 bytes of the staging
        rows = cute.make_rmem_tensor((BATCH,), Int32)
        if item >= total:
            self.end_waits(share.warp)
        while item < total:
            waiting = Int32(0)
            for u in range_constexpr(BATCH):
                mine = item + u * step
                token = mine // (p.world_size * count)
                source = (mine // count) % p.world_size
                packet = mine % count
                rows[u] = Int32(-1)
                if const_expr(self.token_major):
                    if mine < total and lane == 0:
                        rows[u] = tables.rows[source * args.max_tokens + token]
                else:
                    if mine < total and lane < p.top_k:
                        rows[u] = tables.rows[source * stride + token * p.top_k + lane]
                number = Int32(token)
                if const_expr(p.bundles):
                    if mine < total:
                        number = number_of(ranks, tables, source, token)
                place[u] = (source * self.tokens + number) * vectors + packet * (PACKET_BYTES // 16) + lane
                if arch.vote_any_sync(rows[u] >= 0):
                    if source == ranks.rank:
                        if const_expr(self.format != ""):
                            raw = row_words(self.delivery.form, self.given, False, ranks, args, token, packet, lane)
                        else:
                            vector = cutlass.min((packet * PAYLOAD_VECTORS + lane_vector(lane)) * 16, p.row_bytes - 16)
                            raw = ptx.ld_v4(args.x + Int64(token) * p.row_bytes + vector)
                        own = seal(raw, lane, Int64(0))
                        for i in range_constexpr(4):
                            words[4 * u + i] = own[i]
                    else:
                        waiting = waiting | (1 << u)
            if const_expr(p.num_domains > 1):
                self.await_rows(ranks, tables, args, item + lane * step, Int32(total))
            polls = Int32(0)
            start = Int64(0)
            while waiting != 0:
                for u in range_constexpr(BATCH):
                    if (waiting >> u) & 1 != 0:
                        got = ld_line(staging + Int64(place[u]) * 16)
                        for i in range_constexpr(4):
                            words[4 * u + i] = got[i]
                missing = Int32(0)
                for u in range_constexpr(BATCH):
                    if (waiting >> u) & 1 != 0:
                        if not arrived(words[4 * u + 2], words[4 * u + 3], lane, ranks.mark):
                            missing = missing | (1 << u)
                waiting = missing
                polls += 1
                if polls == sync.POLLS_PER_CHECK and waiting != 0:
                    polls = Int32(0)
                    if start == 0:
                        start = Int64(arch.globaltimer())
                    first = item + step * Int32(arch.popc((waiting & -waiting) - 1))
                    token = first // (p.world_size * count)
                    source = (first // count) % p.world_size
                    if sync.warp_gives_up(ranks, start, "token", source, token, Int64(0)):
                        waiting = Int32(0)
            if item + BATCH * step >= total:
                self.end_waits(share.warp)
            for u in range_constexpr(BATCH):
                left = arch.vote_ballot_sync(rows[u] >= 0)
                mine = (words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3])
                # Found again from the place: registers are few.
                packet = place[u] % vectors // (PACKET_BYTES // 16)
                offset = packet * PAYLOAD_BYTES + lane_offset(lane)
                if const_expr(self.weights):
                    if left != 0:
                        first = (offset - p.row_bytes) // 4 if offset >= p.row_bytes else Int32(-4)
                        if const_expr(self.format != ""):
                            first = first_weight(packet, lane) if lane_offset(lane) >= 16 * WEIGHTS else Int32(-4)
                        self.store_weights(tables, args, mine, first, item + u * step, lane)
                if const_expr(self.format != ""):
                    if left != 0:
                        store_row(self.delivery, self.arrived(tables, args), mine, packet, rows[u], lane)
                else:
                    while left != 0:
                        k = arch.popc((left & -left) - 1)
                        left = left & (left - 1)
                        row = Int64(arch.shuffle_sync(rows[u], k))
                        store_payload(mine, lane, args.recv_x + row * p.row_bytes, offset, p.row_bytes)
            item += BATCH * step
        self.trigger_dependents(share.warp)

    @cute.jit
    def await_rows(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, item: Int32, total: Int32
    ) -> None:
        """By a whole warp: until those of its next packets have come that belong to rows from other domains, kept or
        dropped. Each lane has its own `item`, the first ones those of the batch."""
        p = self.problem
        lane = Int32(arch.lane_idx())
        count = self.row_packets
        token = item // (p.world_size * count)
        source = (item // count) % p.world_size
        comes = Boolean(False)
        if lane < BATCH and item < total:
            if not is_near(ranks, source):
                first, end = local_experts(p, ranks.rank)
                for k in range_constexpr(p.top_k):
                    entries = args.max_tokens * p.top_k
                    if asked_expert(tables, source, token * p.top_k + k, entries, first, end) >= 0:
                        comes = Boolean(True)
        number = Int32(token)
        if const_expr(p.bundles):
            if comes:
                number = first_of(p, number_of(ranks, tables, source, token))
        await_far(ranks, "lines", comes, source * self.tokens + number, source, token)

    @cute.jit
    def store_weights(
        self, tables: RouteTables, args: LatencyDispatchArgs, words: Words, first: Int32, item: Int32, lane: Int32
    ) -> None:
        """The weights in a packet that came from a peer, to the rows of their (token, k), or beside the token-major
        row. `first`: which weight of the token a lane begins with, less than 0 in lanes that have none."""
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
                        if asked_expert(tables, source, k, entries, low, high) >= 0:
                            weight = Int32(words[i])
                        ptx.st_i32(args.recv_weights + (Int64(row) * p.top_k + first + i) * 4, weight)
                    else:
                        row = tables.rows[source * stride + k]
                        if row >= 0:
                            ptx.st_i32(args.recv_weights + Int64(row) * 4, Int32(words[i]))
