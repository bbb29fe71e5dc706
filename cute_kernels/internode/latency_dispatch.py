"""The latency dispatch of several NVLink domains: ranks of other domains get their packets by puts, before all others.

A block assembles a put: one for a route (far.py), and one for a row or several rows (bundled.py). The last block also
waits for the hello flags of all ranks, and ends the operation when all blocks have put.
"""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import sync
from ..copies import set_of
from ..domains import is_near
from ..experts import holder_of, local_experts
from ..latency.dispatch import LatencyDispatch
from ..latency.dispatch_sender import LatencyDispatchArgs
from ..latency.packets import WarpShare, Words, part_of, st_line
from ..latency.place import RouteTables, asked_expert, own_route_words
from ..latency.sizes import PACKET_BYTES, ROUTE_HEADER_BYTES, packets
from .bundled import bundle_of, bundles, first_of, number_of, number_rows, tokens_for
from .far import FarTarget, await_far, end, far_rank, have_put, put_packets


@dataclass(frozen=True)
class LatencyDispatchAcross(LatencyDispatch):
    """The dispatch."""

    @property
    def triggers(self) -> bool:
        """The operation ends with a wait of its own, and dependents start when the kernel ends."""
        return False

    @property
    def pushes_to_all(self) -> bool:
        return False

    @cute.jit
    def put_all(
        self, ranks: sync.Ranks, args: LatencyDispatchArgs, from_first: WarpShare, from_last: WarpShare
    ) -> None:  # fmt: skip
        self.put_routes(ranks, args, from_last)
        if const_expr(self.problem.bundles):
            self.put_bundles(ranks, args, from_first)
        else:
            self.put_rows(ranks, args, from_first)

    @cute.jit
    def put_routes(self, ranks: sync.Ranks, args: LatencyDispatchArgs, share: WarpShare) -> None:
        """Put this rank's route to each rank of another domain, one block for each."""
        p = self.problem
        total = packets(ROUTE_HEADER_BYTES + 2 * args.max_tokens * p.top_k)
        stride = ranks.heap.route_packets * PACKET_BYTES
        for item in cutlass.range(share.block, p.world_size - 1, share.blocks):
            rank = (ranks.rank + 1 + item) % p.world_size
            if not is_near(ranks, rank):

                def words_of(packet: Int32) -> Words:
                    return own_route_words(ranks, args, packet, share.lane, True)

                to = FarTarget(rank, ranks.rank, stride)
                put_packets(ranks, share, "routes", to, rank, total, words_of)

    @cute.jit
    def put_rows(self, ranks: sync.Ranks, args: LatencyDispatchArgs, share: WarpShare) -> None:
        """Put each row once to every rank of another domain that holds one of its experts, one block for each (row,
        rank)."""
        p = self.problem
        far = min(p.top_k, p.world_size - p.domain_ranks)  # the most such ranks of a token
        for item in cutlass.range(share.block, args.tokens * far, share.blocks):
            number = item // args.tokens
            token = item - number * args.tokens
            expert = Int32(-1)
            if share.lane < p.top_k:
                expert = args.topk_idx[token * p.top_k + share.lane]
            names = expert >= 0 and expert < p.num_experts
            holder = Int32(0)
            if names:
                holder = Int32(holder_of(p, expert))
            rank = far_rank(set_of(p, holder, names and not is_near(ranks, holder)), number)
            if rank >= 0:
                words_of = partial(self.row_words, ranks, args, token, lane=share.lane)
                to = FarTarget(rank, ranks.rank * self.tokens + token, self.row_stride)
                put_packets(ranks, share, "lines", to, rank * self.tokens + token, self.row_packets, words_of)

    @cute.jit
    def put_bundles(self, ranks: sync.Ranks, args: LatencyDispatchArgs, share: WarpShare) -> None:
        """Put rows to other domains, several rows for a rank at a time, by one block."""
        p, count = self.problem, self.row_packets
        for item in cutlass.range(share.block, bundles(p, args.tokens), share.blocks):
            rank, first = bundle_of(ranks, item)
            rows, token = Int32(0), Int32(0)
            if not is_near(ranks, rank):
                rows, token = tokens_for(p, args, rank, first)
            if rows > 0:

                def words_of(packet: Int32, token: Int32 = token) -> Words:
                    row = packet // count
                    return self.row_words(ranks, args, arch.shuffle_sync(token, row), packet - row * count, share.lane)

                to = FarTarget(rank, ranks.rank * self.tokens + first, self.row_stride)
                put_packets(ranks, share, "lines", to, rank * self.tokens + first, rows * count, words_of)

    @cute.jit
    def push_route_to(
        self, ranks: sync.Ranks, heap: Int64, peer: Int32, packet: Int32, lane: Int32, words: Words
    ) -> None:  # fmt: skip
        if is_near(ranks, peer):
            st_line(part_of(ranks.view("routes", heap).at(ranks.rank, packet), 0, lane), words)

    @cute.jit
    def is_pushed_to(self, ranks: sync.Ranks, rank: Int32, wanted: Boolean) -> Boolean:
        if wanted:
            wanted = is_near(ranks, rank)
        return wanted

    def leave_epoch(self, ranks: sync.Ranks) -> None:
        have_put(ranks)

    @cute.jit
    def end_operation(self, ranks: sync.Ranks, warp: Int32, lane: Int32) -> None:
        """By the last block: meet all ranks and end the operation."""
        if warp == 0:
            sync.meet_all(ranks, lane)
            arch.sync_warp()
            if lane == 0:
                end(ranks)

    @cute.jit
    def await_route(self, ranks: sync.Ranks, source: Int32, lane: Int32) -> None:
        """A wait that is given up leaves lines that may be incomplete under a valid mark. Nobody uses them: a rank that
        rejects sends no route, which every block misses, and after a failure the results are undefined (all ids that a
        line can hold, of this operation or an earlier one, are valid)."""
        if not is_near(ranks, source):
            await_far(ranks, "routes", Boolean(lane == 0), source, source, Int32(0))

    @cute.jit
    def await_rows(
        self, ranks: sync.Ranks, tables: RouteTables, args: LatencyDispatchArgs, item: Int32, total: Int32,
        size: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        """By a whole warp: until those of its next packets have come that belong to rows from other domains, kept or
        dropped. Each lane has its own `item`, the first ones those of the batch."""
        p = self.problem
        lane = Int32(arch.lane_idx())
        count = self.row_packets
        token = item // (p.world_size * count)
        source = (item // count) % p.world_size
        comes = Boolean(False)
        if lane < size and item < total:
            if not is_near(ranks, source):
                first, end = local_experts(p, ranks.rank)
                for k in range_constexpr(p.top_k):
                    if asked_expert(tables, source, token * p.top_k + k, first, end) >= 0:
                        comes = Boolean(True)
        number = Int32(token)
        if const_expr(p.bundles):
            if comes:
                number = first_of(p, number_of(ranks, tables, source, token))
        await_far(ranks, "lines", comes, source * self.tokens + number, source, token)

    @cute.jit
    def number_rows(self, ranks: sync.Ranks, tables: RouteTables, max_tokens: Int32, warp: Int32) -> None:
        if const_expr(self.problem.bundles):
            number_rows(ranks, tables, max_tokens, warp)

    @cute.jit
    def number_of_row(
        self, ranks: sync.Ranks, tables: RouteTables, source: Int32, token: Int32, exists: Boolean
    ) -> Int32:  # fmt: skip
        number = Int32(token)
        if const_expr(self.problem.bundles):
            if exists:
                number = number_of(ranks, tables, source, token)
        return number
