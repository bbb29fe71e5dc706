"""Latency combine: one kernel in which the experts' ranks sum rows and push the sums, and owners sum what arrives.

Block roles. Blocks [0, senders) push: a warp takes a packet of a copy that has rows here (../arrivals.py), sums them in
fp32 over ascending k, rounds, and stores the result in the owner's staging row [copy number][token]. Blocks
[first_receiver, grid) sum: a warp takes a packet of one of this rank's tokens, sums the rows on this rank, waits for
the packets of the other ranks that hold rows of the token (known from the route), and adds them in fp32 over ascending
ranks. A block with both roles pushes first. Pushing never waits, so every wait ends if all blocks are co-resident.

Completion. The kernel has seen every line that the route expects before it exits. It waits for the hello flags of ranks
without rows for this one, as the rule of two banks requires (sync.py).

combine_sender.py describes pushing. Ranks of other NVLink domains get their sums by puts, before all others; owners sum
in the order of the tree over domains (docs/domains.md).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..copies import below, copies_of, set_of
from ..domains import is_near
from ..experts import holder_of
from ..ids import block_ids, warp_id
from ..rows import Width
from ..views import Records
from .bundled import first_of, number_sums
from .combine_sender import BATCH, CombineSender, LatencyCombineArgs, report_bad_row
from .far import Order, await_far, end, have_put, order_of
from .packets import (
    THREADS,
    WARPS,
    WarpShare,
    await_packets,
    by_mark,
    hold_epoch,
    lane_offset,
    open_next_epoch,
    part_of,
    seal,
    store_payload,
)
from .reach import Peers
from .sizes import PAYLOAD_BYTES
from .sum_packets import numbers_in, quantize_again, scale_in, store_sums

COPIES = 4
"""Number of copies of a token that a warp waits for together, limited by registers."""


class Named(NamedTuple):
    """The copies of a token that have rows, as bit masks by their numbers."""

    row: Int32  # of a lane's entry (of k), if it is here; else -1
    expected: Int32  # all copies that have rows
    own: Int32  # the copy at this rank, if it has rows


@dataclass(frozen=True)
class LatencyCombine(CombineSender):
    """The kernel. :class:`.combine_sender.CombineSender` describes its fields."""

    @cute.kernel
    def kernel(self, args: LatencyCombineArgs) -> None:
        p = self.problem
        bid, blocks = block_ids()
        lane = arch.lane_idx()
        warp = warp_id()
        if const_expr(self.send):
            peers = Peers(p, args.ranks.peers, lane)
        # Nothing else is read, or written, before the kernel in front has ended: its epoch, its y.
        arch.griddepcontrol_wait()
        ranks = sync.Ranks(self.heap, args.ranks)

        if const_expr(self.send):
            if bid == blocks - 1 and warp == WARPS - 1:
                operation.say_hello(ranks, lane, 32, False)
            if const_expr(p.num_domains > 1):
                if bid < args.senders:
                    if const_expr(p.bundles):
                        self.put_bundles(ranks, args, WarpShare(bid, args.senders, warp, lane))
                    else:
                        self.put_sums(ranks, args, WarpShare(bid, args.senders, warp, lane))
            if const_expr(p.domain_ranks > 1):
                if bid < args.senders:
                    self.push(ranks, args, peers, WarpShare(bid, args.senders, warp, lane))

        if const_expr(self.receive):
            order = None
            if const_expr(p.bundles):
                smem = cutlass.memory.SmemAllocator()
                order = smem.allocate_tensor(Uint16, cute.make_layout(self.tokens * p.top_k))
                if bid >= args.first_receiver:
                    number_sums(ranks, args, order, warp)
                    arch.sync_threads()
            hold_epoch(ranks)
            # The last warp meets the others, which do not wait for it.
            if warp < WARPS - 1:
                arch.barrier_arrive(barrier_id=1, number_of_threads=THREADS)
            else:
                arch.barrier(barrier_id=1, number_of_threads=THREADS)
                if lane == 0:
                    if const_expr(p.num_domains > 1):
                        have_put(ranks)
                    else:
                        open_next_epoch(ranks)
                if bid == blocks - 1:
                    sync.meet_all(ranks, lane)
                    if const_expr(p.num_domains > 1):
                        arch.sync_warp()
                        if lane == 0:
                            end(ranks)
                    if lane == 0:
                        operation.note_met(ranks)
                    arch.sync_warp()
            if bid >= args.first_receiver:
                first = args.first_receiver
                self.sum(ranks, args, order, WarpShare(bid - first, blocks - first, warp, lane))

    @cute.jit
    def sum(self, ranks: sync.Ranks, args: LatencyCombineArgs, numbers: Any, share: WarpShare) -> None:
        lane = share.lane
        p = self.problem
        count = self.row_packets
        batch = BATCH if p.most_copies <= COPIES else BATCH // 2
        acc = cute.make_rmem_tensor((self.values,), Float32)
        last = Int32(-1)  # row here, of all that this lane meets
        if share.first >= args.tokens * count:
            self.end_waits(share.warp)
        item = share.first
        while item < args.tokens * count:
            token = item // count
            packet = item - token * count
            if const_expr(p.num_domains > 1):
                row, order = self.ordered(ranks, args, numbers, token)
            else:
                named = self.named(ranks, args, token, lane)
                row = named.row
            last = cutlass.max(last, row)
            if row >= args.num_rows:
                row = Int32(-1)
            own = seal(self.words_of(args, row, packet, lane, batch), lane, Int64(0))

            now = by_mark(ranks)
            address = part_of(now.view("lines").base, packet, lane)
            if const_expr(p.num_domains == 1):
                address = Records(address, self.row_stride).at(token)
            for i in range_constexpr(self.values):
                acc[i] = Float32(0.0)
            if const_expr(p.num_domains > 1):
                self.add_tree(now, order, (own, acc), token, address)
            elif const_expr(p.most_copies <= COPIES):
                self.add_copies(now, args, named, (own, acc), token, address, Int32(0))
            else:
                first = Int32(0)
                left = Uint32(named.expected)
                while left != 0:
                    self.add_copies(now, args, named, (own, acc), token, address, first)
                    address += COPIES * self.tokens * self.row_stride
                    first += COPIES
                    left = left >> COPIES
            if item + share.step >= args.tokens * count:
                self.end_waits(share.warp)
            if const_expr(self.format != ""):
                store_sums(Width(p.hidden_size, p.dtype), acc, packet, lane, Records(args.out, p.row_bytes).at(token))
            else:
                packed = ptx.pack([acc[i] for i in range(self.values)], p.dtype)
                offset = packet * PAYLOAD_BYTES + lane_offset(lane)
                store_payload(packed, lane, Records(args.out, p.row_bytes).at(token), offset, p.row_bytes)
            item += share.step
        self.trigger_dependents(share.warp)
        # Reported behind the loop, in which registers are scarce.
        report_bad_row(ranks, last, args.num_rows)

    @cute.jit
    def named(self, ranks: sync.Ranks, args: LatencyCombineArgs, token: Int32, lane: Int32) -> Named:
        """Return which copies of a token exist, and which of them have rows."""
        p = self.problem
        row, expert = Int32(-1), Int32(-1)
        if lane < p.top_k:
            entry = token * p.top_k + lane
            row = args.send_rows[entry]
            expert = args.topk_idx[entry]
        holder = holder_of(p, expert)
        names = expert >= 0 and expert < p.num_experts
        holders = set_of(p, holder, names)
        bit = Int32(1) << below(holders, holder)
        if row < 0 or not names:
            bit = Int32(0)
        expected = arch.warp_redux_sync(bit, "or")
        if holder != ranks.rank:
            bit = Int32(0)
        if bit == 0:
            row = Int32(-1)
        return Named(row, expected, arch.warp_redux_sync(bit, "or"))

    @cute.jit
    def holder_of_copy(self, args: LatencyCombineArgs, token: Int32, number: Int32) -> Int32:
        """By a whole warp: return the rank of the copy with that number. Called only when a wait lasts long, because
        registers are scarce."""
        p = self.problem
        expert = Int32(-1)
        if arch.lane_idx() < p.top_k:
            expert = args.topk_idx[token * p.top_k + arch.lane_idx()]
        holder = holder_of(p, expert)
        names = expert >= 0 and expert < p.num_experts
        if below(set_of(p, holder, names), holder) != number or not names:
            holder = Int32(0)
        return arch.warp_redux_sync(holder, "max")

    @cute.jit
    def add_copies(
        self, ranks: sync.Ranks, args: LatencyCombineArgs, named: Named, sums: Any, token: Int32, address: Int64,
        first: Int32,
    ) -> None:  # fmt: skip
        """Wait for the lines of the expected copies among `COPIES` copies from `first` on, and add them in order.

        `sums`: the words of this rank's own copy, and the registers of the sum. A line with the mark is complete, but
        its arrival orders no other memory access.
        """
        own, acc = sums
        p = self.problem
        together = min(COPIES, p.most_copies)
        words = cute.make_rmem_tensor((4 * together,), Uint32)
        group = (1 << together) - 1
        expected = (named.expected >> first) & group
        mine = (named.own >> first) & group
        for u in range_constexpr(together):
            if (mine >> u) & 1 != 0:
                for i in range_constexpr(4):
                    words[4 * u + i] = own[i]

        def address_of(u: int) -> Int64:
            return address + u * (self.tokens * self.row_stride)

        def gives_up(start: Int64, u: Int32) -> Boolean:
            peer = self.holder_of_copy(args, token, first + u)
            return sync.warp_gives_up(ranks, start, "token", peer, token, Int64(0))

        expected = await_packets(ranks, words, expected & ~mine, together, address_of, gives_up, expected)
        for u in range_constexpr(together):
            if (expected >> u) & 1 != 0:
                self.add(acc, self.unpacked(words, u))

    def unpacked(self, words: Any, u: int) -> list[Float32]:
        """By the whole warp: return the numbers in a lane's 16 bytes of packet u."""
        mine = [words[4 * u + i] for i in range(4)]
        if self.format:
            return numbers_in(mine, scale_in(mine, Int32(arch.lane_idx())))
        return ptx.unpack(mine, self.problem.dtype)

    def add(self, acc: Any, values: Any) -> None:
        for i in range(self.values):
            acc[i] = ptx.add_rn(acc[i], values[i])

    @cute.jit
    def ordered(self, ranks: sync.Ranks, args: LatencyCombineArgs, numbers: Any, token: Int32) -> tuple[Int32, Order]:
        """By a whole warp: a lane's row of a token, if it is here, and its copies in the order of addition."""
        p = self.problem
        lane = Int32(arch.lane_idx())
        row, expert = Int32(-1), Int32(-1)
        if lane < p.top_k:
            entry = token * p.top_k + lane
            row = args.send_rows[entry]
            expert = args.topk_idx[entry]
        copies = copies_of(p, expert, row)
        if copies.holder != ranks.rank:
            row = Int32(-1)
        line = copies.number * self.tokens + token
        if const_expr(p.bundles):
            line = Int32(0)
            if copies.expected != 0:
                line = copies.holder * self.tokens + Int32(numbers[token * p.top_k + lane])
        return row, order_of(ranks, copies, line)

    @cute.jit
    def add_tree(self, ranks: sync.Ranks, order: Order, sums: Any, token: Int32, address: Int64) -> None:
        """Add copies as `add_copies` does, over several domains: wait for the words of copies of other domains
        first."""
        own, acc = sums
        count = self.await_far_copies(ranks, order, token)
        # A lane holds 16 numbers of a sum in a format, and 16 of its domain's sum: few registers are left for packets.
        together = min(COPIES // 2 if self.format else COPIES, self.problem.most_copies)
        words = cute.make_rmem_tensor((4 * together,), Uint32)
        part = cute.make_rmem_tensor((self.values,), Float32)
        for i in range_constexpr(self.values):
            part[i] = Float32(0.0)
        first = Int32(0)
        while first < count:
            waiting = Int32(0)
            for u in range_constexpr(together):
                if first + u < count:
                    if (order.own >> (first + u)) & 1 != 0:
                        for i in range_constexpr(4):
                            words[4 * u + i] = own[i]
                    else:
                        waiting = waiting | (1 << u)

            def address_of(u: int, first: Int32 = first) -> Int64:
                return Records(address, self.row_stride).at(arch.shuffle_sync(order.line, first + u))

            def gives_up(start: Int64, u: Int32, first: Int32 = first) -> Boolean:
                peer = arch.shuffle_sync(order.holder, first + u)
                return sync.warp_gives_up(ranks, start, "token", peer, token, Int64(0))

            count = await_packets(ranks, words, waiting, together, address_of, gives_up, count)
            for u in range_constexpr(together):
                if first + u < count:
                    self.add(part, self.unpacked(words, u))
                    self.close_domain(order, first + u, part, acc)
            first += together

    @cute.jit
    def await_far_copies(self, ranks: sync.Ranks, order: Order, token: Int32) -> Int32:
        """By a whole warp: wait for the words of a token's copies from other domains. Return the number of copies to
        add: all of the token's, or none if a wait was given up."""
        p = self.problem
        comes = Boolean(False)
        if Int32(arch.lane_idx()) < order.copies:
            comes = Boolean(not is_near(ranks, order.holder))
        number = Int32(order.line)
        if const_expr(p.bundles):
            before = order.holder * self.tokens
            number = before + first_of(p, number - before)
        complete = await_far(ranks, "lines", comes, number, order.holder, token)
        count = order.copies
        if not arch.vote_all_sync(complete):
            count = Int32(0)
        return count

    @cute.jit
    def close_domain(self, order: Order, copy: Int32, part: Any, acc: Any) -> None:
        """After the last copy of a domain: add the domain's sum `part` to `acc`, rounded (with a format: quantized)
        unless it is the owner's own domain, and clear it."""
        dtype = self.problem.dtype
        if (order.last >> copy) & 1 != 0:
            if (order.rounded >> copy) & 1 != 0:
                if const_expr(self.format == ""):
                    rounded = ptx.unpack(ptx.pack([part[i] for i in range(self.values)], dtype), dtype)
                    for i in range_constexpr(self.values):
                        part[i] = rounded[i]
                elif const_expr(self.problem.domain_ranks > 1):  # else it is one sum, which is quantized already
                    quantize_again(part)
            for i in range_constexpr(self.values):
                acc[i] = ptx.add_rn(acc[i], part[i])
                part[i] = Float32(0.0)
