"""Sending part of a latency combine (combine.py): the sum of each copy, to the owner of its token. It never waits.

One warp pushes one packet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute import arch

from .. import ptx, sync
from ..arrivals import given_row, lists
from ..copies import pop_lowest
from ..formats import Form
from ..launch import Kernel, RankArgs
from ..views import Floats, Ints
from .lookup import look_up, row_at
from .packets import WarpShare, Words, lane_vector, part_of, seal, st_line
from .quantized import packets_of
from .reach import Peers, heap_of
from .row_sums import add_rows
from .sizes import PACKET_BYTES, PAYLOAD_VECTORS, packets
from .split import SplitOperation
from .sum_packets import NUMBERS, sum_words

BATCH = 4
"""Number of rows that a warp loads together; half as many for this rank's own tokens if there are more copies than
`COPIES`: a rank then has few rows of a token, and registers are scarce."""


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


@dataclass(frozen=True)
class CombineSender(SplitOperation, Kernel):
    """Sending part of a combine. `weighted`: rows are multiplied by their routing weights. `tokens`, `send`, `receive`:
    see split.py. `format`: format in which sums are sent (sum_packets.py); empty for rows of the dtype."""

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
            found, rows_near = look_up(self, ranks, args, item + lane * step, each)
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

    # What several NVLink domains do differently (internode/latency_combine.py).

    def put_all(self, ranks: sync.Ranks, args: LatencyCombineArgs, share: WarpShare) -> None:
        """By a sending block: put the sums that go to ranks whose memory is not mapped."""

    def goes_to(self, ranks: sync.Ranks, owner: Int32, goes: Boolean, near: bool) -> Boolean:
        """Return whether the sum of a copy, if it `goes` anywhere, goes to an owner that is `near` or is not."""
        return goes

    def line_of(self, ranks: sync.Ranks, number: Int32, token: Int32) -> Int32:
        """Return the line of the owner's staging rows that the sum of a copy goes to."""
        return number * self.tokens + token
