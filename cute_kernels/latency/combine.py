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

internode/latency_combine.py adds what several NVLink domains need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import given_row, lists
from ..barriers import WarpBarrier
from ..copies import below, entry_of, pop_lowest, set_of
from ..experts import holder_of
from ..formats import Form
from ..ids import block_ids, warp_id
from ..launch import Kernel, RankArgs
from ..rows import Width
from ..views import Floats, Ints, Records
from .lookup import find_copy, row_at
from .packets import (
    WARPS,
    WarpShare,
    Words,
    await_packets,
    by_mark,
    hold_epoch,
    lane_offset,
    lane_vector,
    open_next_epoch,
    part_of,
    seal,
    st_line,
    store_payload,
)
from .quantized import packets_of
from .reach import Peers, heap_of
from .row_sums import add_rows
from .sizes import PACKET_BYTES, PAYLOAD_BYTES, PAYLOAD_VECTORS, packets
from .split import SplitOperation
from .sum_packets import NUMBERS, numbers_in, store_sums, sum_words

EPOCH_HELD = WarpBarrier(1, WARPS - 1, 1)
"""The barrier at which each warp reports that it has the epoch."""
BATCH = 4
"""Number of rows that a warp loads together; half as many for this rank's own tokens if there are more copies than
`COPIES`: a rank then has few rows of a token, and registers are scarce."""
COPIES = 4
"""Number of copies of a token that a warp waits for together, limited by registers."""


class LatencyCombineArgs(NamedTuple):
    ranks: RankArgs
    y: Int64
    recv_weights: Floats
    topk_idx: Ints
    send_rows: Ints
    arrivals: Int64
    out: Int64
    tokens: Int32
    max_tokens: Int32
    num_rows: Int32  # of y and recv_weights
    senders: Int32
    first_receiver: Int32
    blocks: Int32


class Named(NamedTuple):
    """The copies of a token that have rows, as bit masks by their numbers."""

    row: Int32  # of a lane's entry (of k), if it is here; else -1
    expected: Int32  # all copies that have rows
    own: Int32  # the copy at this rank, if it has rows


@dataclass(frozen=True)
class LatencyCombine(SplitOperation, Kernel):
    """The kernel. `weighted`: rows are multiplied by their routing weights. `tokens`, `send`, `receive`: see split.py.
    `format`: format in which sums are sent (sum_packets.py); empty for rows of the dtype."""

    NAME, Args = "ep_latency_combine", LatencyCombineArgs

    tokens: int
    weighted: bool
    send: bool = True
    receive: bool = True
    format: str = ""

    @property
    def form(self) -> Form:
        return Form(self.format, self.problem.hidden_size)

    @property
    def row_packets(self) -> int:
        if self.format:
            return packets_of(self.form, self.problem.top_k, False)
        return packets(self.problem.row_bytes)

    @property
    def row_stride(self) -> int:
        """Bytes of a sum on its way: those behind one another in a put have no gaps."""
        return self.row_packets * PACKET_BYTES

    @property
    def values(self) -> int:
        """Numbers of a lane: those in 16 bytes."""
        return NUMBERS if self.format else 16 // self.problem.itemsize

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

    # ------------------------------------------------------------------ pushing

    def words_of(self, args: LatencyCombineArgs, row: Int32, packet: Int32, lane: Int32, batch: int) -> Words:
        """Return the sum over ascending k of the rows that the lanes hold, as it is sent, in a lane's payload
        vector."""
        if self.format:
            batch = max(1, batch // self.problem.itemsize)  # as many bytes as without a format
            return sum_words(self.form, self.problem.dtype, self.weighted, args, row, packet, lane, batch)
        return self.sum_rows(args, row, packet, lane, batch)

    @cute.jit
    def push(self, ranks: sync.Ranks, args: LatencyCombineArgs, peers: Peers, share: WarpShare) -> None:
        """Packets of copies from other ranks, a packet a warp.

        There are as many items as there might be copies, so that how many there are, where they lie and what rows they
        have is all read at once.
        """
        count, lane = self.row_packets, share.lane

        def send(owner: Int32, line: Int32, item: Int32, row: Int32) -> None:
            now = sync.again(ranks)
            packet = item % count
            words = self.words_of(args, row, packet, lane, BATCH)
            row_at = now.view("lines", heap_of(peers, owner), self.row_stride).at(line)
            st_line(part_of(row_at, packet, lane), seal(words, lane, now.mark))

        self.send_copies(ranks, args, (share.first, share.step), count, True, send)

    @cute.jit
    def send_copies(
        self, ranks: sync.Ranks, args: LatencyCombineArgs, items: tuple[Int32, Int32], each: cutlass.Constexpr[int],
        near: cutlass.Constexpr[bool], send: Callable[[Int32, Int32, Int32, Int32], None],
    ) -> None:  # fmt: skip
        """By a warp: `send(owner, line, item, row)` for every copy whose owner is `near`, or is not; `row` is a lane's
        row of the copy. There are `each` items for a copy; the warp takes those from items[0] on in steps of items[1].

        In each round the lanes look up one of the warp's next 32 items each; then the warp goes through those that go
        anywhere, and reads the rows of the next one before it sends one.
        """
        p, lane = self.problem, arch.lane_idx()
        item, step = items
        at = lists(args.arrivals, args.num_rows)
        last = Int32(-1)  # row of all that this lane meets
        while item < args.max_tokens * (p.world_size * each):
            found, rows_near = find_copy(self, ranks, args, item + lane * step, each)
            left = Int32(arch.vote_ballot_sync(self.goes_to(ranks, found.owner, found.rows > 0, near)))
            row = row_at(at, rows_near, found, left)
            while left != 0:
                i, left = pop_lowest(left)
                ahead = Int32(-1)
                # A warp that has one copy only does not wait for the row of another one.
                if left != 0:
                    ahead = row_at(at, rows_near, found, left)
                owner, line = arch.shuffle_sync(found.owner, i), arch.shuffle_sync(found.line, i)
                last = cutlass.max(last, row)
                if row >= args.num_rows:
                    row = Int32(-1)
                send(owner, line, item + i * step, row)
                row = ahead
            item += 32 * step
        # Reported behind the loop, so that the loop stays short.
        given_row(ranks, last, args.num_rows)

    @cute.jit
    def sum_rows(
        self, args: LatencyCombineArgs, row: Int32, packet: Int32, lane: Int32, batch: cutlass.Constexpr[int]
    ) -> Words:
        """Return the rounded sum over ascending k of the rows that the lanes hold, in a lane's payload vector."""
        p = self.problem
        acc = cute.make_rmem_tensor((self.values,), Float32)
        offset = cutlass.min((packet * PAYLOAD_VECTORS + lane_vector(lane)) * 16, p.row_bytes - 16)
        add_rows(p, self.weighted, args, row, offset, 1, batch, acc)
        packed = ptx.pack([acc[i] for i in range(self.values)], p.dtype)
        return packed[0], packed[1], packed[2], packed[3]

    # ------------------------------------------------------------------ summing

    @cute.jit
    def sum(self, ranks: sync.Ranks, args: LatencyCombineArgs, numbers: Any, share: WarpShare) -> None:
        """Sum this rank's tokens, one packet for each warp. `numbers`: what `numbers_of_sums` returned."""
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

    def put_all(self, ranks: sync.Ranks, args: LatencyCombineArgs, share: WarpShare) -> None:
        """By a sending block: put the sums that go to ranks whose memory is not mapped."""

    def goes_to(self, ranks: sync.Ranks, owner: Int32, goes: Boolean, near: bool) -> Boolean:
        """Return whether the sum of a copy, if it `goes` anywhere, goes to an owner that is `near` or is not."""
        return goes

    def line_of(self, ranks: sync.Ranks, number: Int32, token: Int32) -> Int32:
        """Return the line of the owner's staging rows that the sum of a copy goes to."""
        return number * self.tokens + token

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
