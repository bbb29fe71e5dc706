"""The latency combine of several NVLink domains: ranks of other domains get their sums by puts, before all others, and
owners sum in the order of the tree over domains (docs/domains.md).

A block assembles a put: one for a copy (far.py) or for several copies (bundled.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..arrivals import Copy, given_row, guarded, lists
from ..copies import copies_of, entry_of
from ..domains import is_near
from ..latency.combine import BATCH, COPIES, LatencyCombine, LatencyCombineArgs
from ..latency.lookup import copy_at
from ..latency.packets import WarpShare, Words, await_packets
from ..latency.sum_packets import quantize_again
from ..views import Records
from .bundled import bundle_of, bundles, first_of, number_sums
from .far import FarTarget, Order, await_far, end, have_put, order_of, put_packets


@dataclass(frozen=True)
class LatencyCombineAcross(LatencyCombine):
    """The combine."""

    @property
    def triggers(self) -> bool:
        """The operation ends with a wait of its own, and dependents start when the kernel ends."""
        return False

    @cute.jit
    def put_all(self, ranks: sync.Ranks, args: LatencyCombineArgs, share: WarpShare) -> None:
        if const_expr(self.problem.bundles):
            self.put_bundles(ranks, args, share)
        else:
            self.put_sums(ranks, args, share)

    @cute.jit
    def put_sums(self, ranks: sync.Ranks, args: LatencyCombineArgs, share: WarpShare) -> None:
        """Put the sums of copies from other domains: one block for each copy, which puts all packets at once."""

        def send(owner: Int32, line: Int32, item: Int32, row: Int32) -> None:
            def words_of(packet: Int32) -> Words:
                return self.words_of(args, row, packet, share.lane, BATCH)

            to = FarTarget(owner, line, self.row_stride)
            place = owner * self.tokens + line % self.tokens
            put_packets(ranks, share, "lines", to, place, self.row_packets, words_of)

        self.send_copies(ranks, args, (share.block, share.blocks), 1, False, send)

    @cute.jit
    def put_bundles(self, ranks: sync.Ranks, args: LatencyCombineArgs, share: WarpShare) -> None:
        """Put the sums of copies from other domains, several sums for an owner at a time, by one block."""
        p, count = self.problem, self.row_packets
        at = lists(args.arrivals, args.num_rows)
        last = cute.make_rmem_tensor((1,), Int32)  # row of all that this lane meets
        last[0] = Int32(-1)
        for item in cutlass.range(share.block, bundles(p, args.max_tokens), share.blocks):
            owner, first = bundle_of(ranks, item)
            copy, sums = Copy(Int32(0), Int32(0), Int32(0), Int32(0)), Int32(0)
            if not is_near(ranks, owner):
                begin = at.sources[owner] + first
                end = at.sources[owner + 1]
                sums = cutlass.min(end - begin, cutlass.min(args.max_tokens - first, p.wire.rows))
                index = begin + share.lane
                if share.lane < sums and index >= 0 and index < args.num_rows:
                    copy = copy_at(p, at, index, args.max_tokens)
                copy = guarded(ranks, args.num_rows, args.max_tokens, copy)
            if sums > 0:
                words_of = partial(self.bundled_sum, args, copy, last)
                to = FarTarget(owner, ranks.rank * self.tokens + first, self.row_stride)
                put_packets(ranks, share, "lines", to, owner * self.tokens + first, sums * count, words_of)
        given_row(ranks, last[0], args.num_rows)

    @cute.jit
    def bundled_sum(self, args: LatencyCombineArgs, copy: Copy, last: Any, packet: Int32) -> Words:
        """Return a lane's payload vector of a packet of several sums. Lane i holds the i-th of their copies."""
        lane = arch.lane_idx()
        i = packet // self.row_packets
        begin, rows = arch.shuffle_sync(copy.begin, i), arch.shuffle_sync(copy.rows, i)
        row = Int32(-1)
        if lane < rows:
            row, _ = lists(args.arrivals, args.num_rows).owned[begin + lane]
        last[0] = cutlass.max(last[0], row)
        if row >= args.num_rows:
            row = Int32(-1)
        return self.words_of(args, row, packet - i * self.row_packets, lane, BATCH)

    @cute.jit
    def goes_to(self, ranks: sync.Ranks, owner: Int32, goes: Boolean, near: cutlass.Constexpr[bool]) -> Boolean:
        if goes:
            goes = is_near(ranks, owner) == near
        return goes

    def line_of(self, ranks: sync.Ranks, number: Int32, token: Int32) -> Int32:
        return (ranks.rank if self.problem.bundles else number) * self.tokens + token

    @cute.jit
    def numbers_of_sums(self, ranks: sync.Ranks, args: LatencyCombineArgs, bid: Int32, warp: Int32) -> Any:
        numbers = None
        if const_expr(self.problem.bundles):
            smem = cutlass.memory.SmemAllocator()
            numbers = smem.allocate_tensor(Uint16, cute.make_layout(self.tokens * self.problem.top_k))
            if bid >= args.first_receiver:
                number_sums(ranks, args, numbers, warp)
                arch.sync_threads()
        return numbers

    def leave_epoch(self, ranks: sync.Ranks) -> None:
        have_put(ranks)

    @cute.jit
    def end_operation(self, ranks: sync.Ranks, lane: Int32) -> None:
        arch.sync_warp()
        if lane == 0:
            end(ranks)

    @cute.jit
    def look_up(
        self, ranks: sync.Ranks, args: LatencyCombineArgs, numbers: Any, token: Int32, lane: Int32
    ) -> tuple[Int32, Order]:  # fmt: skip
        """By a whole warp: a lane's row of a token, if it is here, and its copies in the order of addition."""
        p = self.problem
        row, expert = entry_of(p, args, token, Boolean(True))
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
    def add_all(
        self, ranks: sync.Ranks, args: LatencyCombineArgs, copies: Order, sums: Any, token: Int32, address: Int64
    ) -> None:  # fmt: skip
        """Add copies as `add_copies` does, over several domains: wait for the words of copies of other domains
        first."""
        own, acc = sums
        order = copies
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
