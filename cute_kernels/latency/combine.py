"""Latency combine: one kernel in which the experts' ranks sum rows and push the sums, and owners sum what arrives.

Block roles. Blocks [0, senders) push: a warp takes a packet of a copy that has rows here (../arrivals.py), sums them in
fp32 over ascending k, rounds, and stores the result in the owner's staging row [copy number][token]. Blocks
[first_receiver, grid) sum: a warp takes a packet of one of this rank's tokens, sums the rows on this rank, waits for
the packets of the other ranks that hold rows of the token (known from the route), and adds them in fp32 over ascending
ranks. A block with both roles pushes first. Pushing never waits, so every wait ends if all blocks are co-resident.

In the example of ../arrivals.py, rank 1 pushes the sums of row 0 and of rows 3 and 1 to the staging rows [1][0] and
[0][1] of rank 0. For its own token 0, it adds what rank 0 has pushed to [0][0] and then row 2, because copies are added
in the order of their numbers.

Completion. The kernel has seen every line that the route expects before it exits. It waits for the hello flags of ranks
without rows for this one, as the rule of two banks requires (sync.py).

combine_sender.py describes pushing. internode/latency_combine.py adds what several NVLink domains need.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import given_row
from ..barriers import WarpBarrier
from ..copies import below, entry_of, set_of
from ..experts import holder_of
from ..ids import block_ids, warp_id
from ..rows import Width
from ..views import Records
from .combine_sender import BATCH, CombineSender, LatencyCombineArgs
from .packets import (
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
from .sum_packets import numbers_in, store_sums

EPOCH_HELD = WarpBarrier(1, WARPS - 1, 1)
"""The barrier at which each warp reports that it has the epoch."""
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
            if bid < args.senders:
                self.put_all(ranks, args, WarpShare(bid, args.senders, warp, lane))
                if const_expr(p.domain_ranks > 1):
                    self.push(ranks, args, peers, WarpShare(bid, args.senders, warp, lane))

        if const_expr(self.receive):
            numbers = self.numbers_of_sums(ranks, args, bid, warp)
            hold_epoch(ranks)
            # The last warp meets the others, which do not wait for it.
            if warp < EPOCH_HELD.arriving:
                EPOCH_HELD.arrive()
            else:
                EPOCH_HELD.wait()
                if lane == 0:
                    self.leave_epoch(ranks)
                if bid == blocks - 1:
                    sync.meet_all(ranks, lane)
                    self.end_operation(ranks, lane)
                    if lane == 0:
                        operation.note_met(ranks)
                    arch.sync_warp()
            if bid >= args.first_receiver:
                first = args.first_receiver
                self.sum(ranks, args, numbers, WarpShare(bid - first, blocks - first, warp, lane))

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
            row, copies = self.look_up(ranks, args, numbers, token, lane)
            last = cutlass.max(last, row)
            if row >= args.num_rows:
                row = Int32(-1)
            own = seal(self.words_of(args, row, packet, lane, batch), lane, Int64(0))

            now = by_mark(ranks)
            address = part_of(now.view("lines").base, packet, lane)
            for i in range_constexpr(self.values):
                acc[i] = Float32(0.0)
            self.add_all(now, args, copies, (own, acc), token, address)
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
        given_row(ranks, last, args.num_rows)

    @cute.jit
    def named(self, ranks: sync.Ranks, args: LatencyCombineArgs, token: Int32, lane: Int32) -> Named:
        """Return which copies of a token exist, and which of them have rows."""
        p = self.problem
        row, expert = entry_of(p, args, token, Boolean(True))
        holder, names, number = self.numbered(expert)
        bit = Int32(1) << number
        if row < 0 or not names:
            bit = Int32(0)
        expected = arch.warp_redux_sync(bit, "or")
        if holder != ranks.rank:
            bit = Int32(0)
        if bit == 0:
            row = Int32(-1)
        return Named(row, expected, arch.warp_redux_sync(bit, "or"))

    @cute.jit
    def numbered(self, expert: Int32) -> tuple[Int32, Boolean, Int32]:
        """By a whole warp, whose lanes have the expert ids of a token: return the rank that holds a lane's expert,
        whether there is such an expert, and the number of the copy at that rank."""
        p = self.problem
        holder = holder_of(p, expert)
        names = expert >= 0 and expert < p.num_experts
        return holder, names, below(set_of(p, holder, names), holder)

    @cute.jit
    def add_all(
        self, ranks: sync.Ranks, args: LatencyCombineArgs, copies: Any, sums: Any, token: Int32, address: Int64
    ) -> None:  # fmt: skip
        """Add a token's copies that have rows. `copies`: what `look_up` found; `address`: that of line 0."""
        address = Records(address, self.row_stride).at(token)
        if const_expr(self.problem.most_copies <= COPIES):
            self.add_copies(ranks, args, copies, sums, token, address, Int32(0))
        else:
            first = Int32(0)
            left = Uint32(copies.expected)
            while left != 0:
                self.add_copies(ranks, args, copies, sums, token, address, first)
                address += COPIES * self.tokens * self.row_stride
                first += COPIES
                left = left >> COPIES

    @cute.jit
    def holder_of_copy(self, args: LatencyCombineArgs, token: Int32, number: Int32) -> Int32:
        """By a whole warp: return the rank of the copy with that number. Called only when a wait lasts long, because
        registers are scarce."""
        p = self.problem
        expert = Int32(-1)
        if arch.lane_idx() < p.top_k:
            expert = args.topk_idx[token * p.top_k + arch.lane_idx()]
        holder, names, its = self.numbered(expert)
        if its != number or not names:
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
        mine = (words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3])
        if self.format:
            return numbers_in(mine, Int32(arch.lane_idx()))
        return ptx.unpack(mine, self.problem.dtype)

    def add(self, acc: Any, values: Any) -> None:
        for i in range(self.values):
            acc[i] = ptx.add_rn(acc[i], values[i])

    # What several NVLink domains do differently (internode/latency_combine.py).

    def numbers_of_sums(self, ranks: sync.Ranks, args: LatencyCombineArgs, bid: Int32, warp: Int32) -> Any:
        """By a block: return what `look_up` needs to find sums that do not lie by token."""
        return None

    def leave_epoch(self, ranks: sync.Ranks) -> None:
        """By one thread of each block, all of whose threads have read the epoch."""
        open_next_epoch(ranks)

    def end_operation(self, ranks: sync.Ranks, lane: Int32) -> None:
        """By the warp that has met all ranks: end the operation if `leave_epoch` does not."""

    @cute.jit
    def look_up(
        self, ranks: sync.Ranks, args: LatencyCombineArgs, numbers: Any, token: Int32, lane: Int32
    ) -> tuple[Int32, Any]:  # fmt: skip
        """By a whole warp: return a lane's row of a token, if it is here, and the token's copies."""
        named = self.named(ranks, args, token, lane)
        return named.row, named
