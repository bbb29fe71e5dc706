"""Sending part of a latency dispatch (dispatch.py): this rank's route to every peer, and each of its rows once to every
rank that holds one of its experts. It never waits.

One warp pushes a packet to all its destinations.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr

from .. import ptx, sync
from ..copies import pop_lowest, set_of
from ..delivery import Delivery
from ..experts import holder_of
from ..launch import Kernel, RankArgs
from ..views import Floats, Ints, Records
from .packets import WarpShare, Words, lane_vector, part_of, seal, st_line
from .place import own_route_words
from .quantized import packets_of, row_words
from .reach import Peers, heap_of, rotated
from .sizes import PACKET_BYTES, PAYLOAD_BYTES, PAYLOAD_VECTORS, ROUTE_HEADER_BYTES, packets
from .split import SplitOperation

AHEAD = 4
"""Number of packets that a warp reads before it sends the first of them. Kernels of token-major rows read one, because
four are slower there (benchmarks/results/notes.md)."""


class LatencyDispatchArgs(NamedTuple):
    ranks: RankArgs
    x: Int64
    topk_weights: Floats
    scales: Int64
    topk_idx: Ints
    send_rows: Ints
    arrivals: Int64
    offs: Ints
    counts: Ints
    dropped: Ints
    recv_x: Int64
    recv_weights: Floats
    recv_scales: Int64
    recv_idx: Ints
    tokens: Int32
    max_tokens: Int32
    capacity: Int32
    alignment: Int32
    slots: Int32  # as of PublishArgs
    zeros: Int32  # whether padding is cleared
    senders: Int32
    first_receiver: Int32
    blocks: Int32


@dataclass(frozen=True)
class DispatchSender(SplitOperation, Kernel):
    """Sending part of a dispatch.

    `weights`: routing weights are sent behind the rows. `tokens`, `send`, `receive`: see split.py.

    `format` and `layout`: format in which rows are sent, and layout in which they arrive (delivery.py). `given`: x and
    its scales are in that format already.

    `token_major`: the receiver stores one row for each token that arrives, with local ids and weights [R, K]. What is
    sent does not depend on it.
    """

    NAME, Args = "ep_latency_dispatch", LatencyDispatchArgs

    tokens: int
    weights: bool
    send: bool = True
    receive: bool = True
    format: str = ""
    layout: str = ""
    given: bool = False
    token_major: bool = False

    @property
    def delivery(self) -> Delivery:
        return Delivery(self.problem, self.format, self.layout)

    @property
    def row_packets(self) -> int:
        if self.format:
            return packets_of(self.delivery.form, self.problem.top_k, self.weights)
        return packets(self.problem.row_bytes + (self.heap.weight_bytes if self.weights else 0))

    @property
    def row_stride(self) -> int:
        """Bytes of a row on its way: those behind one another in a put have no gaps."""
        return self.row_packets * PACKET_BYTES

    @cute.jit
    def push_route(self, ranks: sync.Ranks, args: LatencyDispatchArgs, peers: Peers, share: WarpShare) -> None:
        """Push this rank's route, one packet for each warp. Blocks are counted from the last one, which pushes the
        fewest rows."""
        p = self.problem
        lane = share.lane
        total = packets(ROUTE_HEADER_BYTES + 2 * args.max_tokens * p.top_k)
        for packet in cutlass.range(share.first, total, share.step):
            now = sync.again(ranks)
            words = seal(own_route_words(ranks, args, packet, lane, self.pushes_to_all), lane, now.mark)
            peer = (ranks.rank + 1) % p.world_size
            while peer != ranks.rank:
                self.push_route_to(now, heap_of(peers, peer), peer, Int32(packet), lane, words)
                peer = (peer + 1) % p.world_size

    @cute.jit
    def push_rows(self, ranks: sync.Ranks, args: LatencyDispatchArgs, peers: Peers, share: WarpShare) -> None:
        """Push each row once to every other rank that holds one of its experts, one packet for each warp. A warp reads
        several packets before it sends the first, so that it waits for memory only once."""
        p = self.problem
        lane, count = share.lane, self.row_packets
        total = args.tokens * count
        ahead = 1 if self.token_major else AHEAD
        experts = cute.make_rmem_tensor((ahead,), Int32)
        words = cute.make_rmem_tensor((4 * ahead,), Uint32)
        item = share.first
        while item < total:
            for u in range_constexpr(ahead):
                mine = item + u * share.step
                experts[u] = Int32(-1)
                if mine < total:
                    token = mine // count
                    if lane < p.top_k:
                        experts[u] = args.topk_idx[token * p.top_k + lane]
                    got = self.row_words(ranks, args, token, mine - token * count, lane)
                    for i in range_constexpr(4):
                        words[4 * u + i] = got[i]
            now = sync.again(ranks)
            for u in range_constexpr(ahead):
                mine = item + u * share.step
                if mine < total:
                    line = seal([words[4 * u + i] for i in range(4)], lane, now.mark)
                    self.push_packet(now, peers, Int32(experts[u]), mine, lane, line)
            item += ahead * share.step

    @cute.jit
    def push_packet(
        self, ranks: sync.Ranks, peers: Peers, expert: Int32, item: Int32, lane: Int32, words: Words
    ) -> None:  # fmt: skip
        """By a warp, whose lanes have the experts of a packet's token: the packet, to the ranks that hold them."""
        p, count = self.problem, self.row_packets
        token = item // count
        holder = holder_of(p, expert)
        others = expert >= 0 and expert < p.num_experts and holder != ranks.rank
        wanted = set_of(p, holder, self.is_pushed_to(ranks, holder, others))
        packet = item - token * count
        for i in range_constexpr(len(wanted)):
            # Higher ranks first: not all ranks begin with the same one.
            left = rotated(wanted[i], ranks.rank + 1)
            while left != 0:
                bit, left = pop_lowest(left)
                peer = 32 * i + ((bit + ranks.rank + 1) & 31)
                row_at = ranks.view("lines", heap_of(peers, peer), self.row_stride).at(ranks.rank * self.tokens + token)
                st_line(part_of(row_at, packet, lane), words)

    @cute.jit
    def row_words(
        self, ranks: sync.Ranks, args: LatencyDispatchArgs, token: Int32, packet: Int32, lane: Int32
    ) -> Words:
        """Return a lane's payload vector of a row's packet: 16 bytes of the row, or weights after its end."""
        p = self.problem
        if const_expr(self.format != ""):
            return row_words(self.delivery.form, self.given, self.weights, ranks, args, token, packet, lane)
        offset = (packet * PAYLOAD_VECTORS + lane_vector(lane)) * 16
        got = ptx.ld_v4(Records(args.x, p.row_bytes).at(token) + cutlass.min(offset, p.row_bytes - 16))
        w0, w1, w2, w3 = got[0], got[1], got[2], got[3]
        if const_expr(self.weights):
            if (packet + 1) * PAYLOAD_BYTES > p.row_bytes:
                if offset >= p.row_bytes:
                    words = cute.make_rmem_tensor((4,), Uint32)
                    for i in range_constexpr(4):
                        k = (offset - p.row_bytes) // 4 + i
                        words[i] = Uint32(0)
                        if k < p.top_k:
                            words[i] = Uint32(args.topk_weights.bits[token * p.top_k + k])
                    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
        return w0, w1, w2, w3

    # What several NVLink domains do differently (internode/latency_dispatch.py).

    @property
    def pushes_to_all(self) -> bool:
        """Whether packets are pushed to all ranks, and none are put."""
        return True

    def put_all(
        self, ranks: sync.Ranks, args: LatencyDispatchArgs, from_first: WarpShare, from_last: WarpShare
    ) -> None:  # fmt: skip
        """By a sending block: put what goes to ranks whose memory is not mapped."""

    def push_route_to(
        self, ranks: sync.Ranks, heap: Int64, peer: Int32, packet: Int32, lane: Int32, words: Words
    ) -> None:  # fmt: skip
        """By a warp: store a packet of this rank's route in the heap of a peer."""
        st_line(part_of(ranks.view("routes", heap).at(ranks.rank, packet), 0, lane), words)

    def is_pushed_to(self, ranks: sync.Ranks, rank: Int32, wanted: Boolean) -> Boolean:
        """Return whether a row that is `wanted` at a rank is pushed there."""
        return wanted
