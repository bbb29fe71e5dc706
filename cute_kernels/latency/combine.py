"""Latency combine, one kernel: experts' ranks add up rows and push the sums, owners add up what arrives.

Blocks before `senders` push: a warp takes a packet of a token that has rows here, adds them in fp32 over k ascending,
rounds and stores it into the owner's staging row [this rank][token]. Blocks from `first_receiver` on sum: a warp takes
a packet of one of this rank's tokens, adds up what lies on this rank itself, waits for the packets of the other ranks
that hold rows of the token (known from the route) and adds them in fp32 over ranks ascending. A block that does both
pushes first, and pushing waits for nobody: all waits end, as long as all blocks fit on the device at once.

**Complete when it ends.** The kernel has seen every line that the route says must come. Ranks without rows for this
one are heard by their hello flag, which the rule of two banks asks for (sync.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..experts import holder_of
from ..launch import Kernel, RankArgs
from ..route import given_row
from .heap import PACKET_BYTES, PAYLOAD_BYTES, PAYLOAD_VECTORS, LatencyHeap, packets
from .packets import (
    THREADS,
    WARPS,
    Share,
    Words,
    arrived,
    hold_epoch,
    lane_offset,
    lane_vector,
    ld_line,
    open_next_epoch,
    seal,
    st_line,
    store_payload,
)

BATCH = 4
"""How many rows a warp loads together."""


class CombineArgs(NamedTuple):
    ranks: RankArgs
    y: Int64
    recv_weights: Int64
    topk_idx: Int64
    send_rows: Int64
    recv_rows: Int64
    out: Int64
    tokens: Int32
    max_tokens: Int32
    num_rows: Int32  # of y and recv_weights
    senders: Int32
    first_receiver: Int32
    blocks: Int32


@dataclass(frozen=True)
class Combine(Kernel):
    """`tokens`: most tokens of a rank. `weighted`: rows times their routing weight.

    `send` and `receive`: both for a whole operation. Of a split one the start only sends, and the wait only receives
    and ends the operation. Only whole ones are launched ahead of their turn (programmatic dependent launch): a start
    and a wait have more than one kernel before them.
    """

    NAME, Args = "ep_latency_combine", CombineArgs

    tokens: int
    weighted: bool
    send: bool = True
    receive: bool = True

    @property
    def heap(self) -> LatencyHeap:
        return LatencyHeap(self.problem, self.tokens)

    @property
    def row_packets(self) -> int:
        return packets(self.problem.row_bytes)

    @property
    def values(self) -> int:
        """Numbers in 16 bytes."""
        return 16 // self.problem.itemsize

    @property
    def options(self) -> dict[str, Any]:
        together = {"use_pdl": self.send and self.receive, "min_blocks_per_mp": 2, "preferred_smem_carveout": 100}
        return {"block": (THREADS, 1, 1), **together}

    @cute.kernel
    def kernel(self, args: CombineArgs) -> None:
        p = self.problem
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        lane = arch.lane_idx()
        warp = arch.make_warp_uniform(tid // 32)
        # Nothing is read or written before the kernel in front has ended: its epoch, its y.
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        ranks = sync.Ranks(self.heap, args.ranks)

        if const_expr(self.send):
            if bid == blocks - 1 and warp == WARPS - 1:
                sync.say_hello(ranks, lane, False)
            if const_expr(p.world_size > 1):
                if bid < args.senders:
                    self.push(ranks, args, Share(bid, args.senders, warp, lane))

        if const_expr(self.receive):
            hold_epoch(ranks)
            # The last warp meets the others, which do not wait for it.
            if warp < WARPS - 1:
                arch.barrier_arrive(barrier_id=1, number_of_threads=THREADS)
            else:
                arch.barrier(barrier_id=1, number_of_threads=THREADS)
                if lane == 0:
                    open_next_epoch(ranks)
                if bid == blocks - 1:
                    if lane < p.world_size:
                        sync.meet(ranks, lane)
                    arch.sync_warp()
            if bid >= args.first_receiver:
                first = args.first_receiver
                self.sum(ranks, args, Share(bid - first, blocks - first, warp, lane))

    @cute.jit
    def push(self, ranks: sync.Ranks, args: CombineArgs, share: Share) -> None:
        lane = share.lane
        max_tokens = args.max_tokens
        p = self.problem
        count = self.row_packets
        others = p.world_size - 1
        last = Int32(-1)  # row of all that this lane meets
        item = share.first
        while item < max_tokens * (others * count):
            token = item // (others * count)
            owner = (ranks.rank + 1 + (item // count) % others) % p.world_size
            packet = item % count
            row = Int32(-1)
            if lane < p.top_k:
                row = ptx.ld_i32(args.recv_rows + (Int64(owner * max_tokens + token) * p.top_k + lane) * 4)
            now = sync.again(ranks)
            if arch.vote_any_sync(row >= 0):
                last = cutlass.max(last, row)
                if row >= args.num_rows:
                    row = Int32(-1)
                words = self.sum_rows(args, row, packet, lane)
                at = Int64(ranks.rank * self.tokens + token) * ranks.heap.row_stride + packet * PACKET_BYTES + lane * 16
                address = now.at(sync.select(now.peers, owner), "lines") + at
                st_line(address, seal(words, lane, now.mark))
            item += share.step
        # Told behind the loop: nothing is to be slow in it.
        given_row(ranks, last, args.num_rows)

    @cute.jit
    def sum_rows(self, args: CombineArgs, row: Int32, packet: Int32, lane: Int32) -> Words:
        """The rounded sum over k ascending of the rows that the lanes hold, in a lane's payload vector."""
        p = self.problem
        weight = Float32(1.0)
        if const_expr(self.weighted):
            if row >= 0:
                weight = ptx.ld_f32(args.recv_weights + Int64(row) * 4)
        acc = cute.make_rmem_tensor((self.values,), Float32)
        for i in range_constexpr(self.values):
            acc[i] = Float32(0.0)
        vector = cutlass.min((packet * PAYLOAD_VECTORS + lane_vector(lane)) * 16, p.row_bytes - 16)
        words = cute.make_rmem_tensor((4 * BATCH,), Uint32)
        left = arch.vote_ballot_sync(row >= 0)
        while left != 0:
            loading = left
            for b in range_constexpr(BATCH):
                if loading != 0:
                    k = arch.popc((loading & -loading) - 1)
                    loading = loading & (loading - 1)
                    got = ptx.ld_v4(args.y + Int64(arch.shuffle_sync(row, k)) * p.row_bytes + vector)
                    for i in range_constexpr(4):
                        words[4 * b + i] = got[i]
            for b in range_constexpr(BATCH):
                if left != 0:
                    k = arch.popc((left & -left) - 1)
                    left = left & (left - 1)
                    values = ptx.unpack([words[4 * b + i] for i in range(4)], p.dtype)
                    if const_expr(self.weighted):
                        w = arch.shuffle_sync(weight, k)
                        values = [ptx.mul_rn(value, w) for value in values]
                    for i in range_constexpr(self.values):
                        acc[i] = ptx.add_rn(acc[i], values[i])
        packed = ptx.pack([acc[i] for i in range(self.values)], p.dtype)
        return packed[0], packed[1], packed[2], packed[3]

    @cute.jit
    def sum(self, ranks: sync.Ranks, args: CombineArgs, share: Share) -> None:
        lane = share.lane
        p = self.problem
        count = self.row_packets
        staging = ranks.at(ranks.own, "lines")
        words = cute.make_rmem_tensor((4 * p.world_size,), Uint32)
        acc = cute.make_rmem_tensor((self.values,), Float32)
        last = Int32(-1)  # row here, of all that this lane meets
        item = share.first
        while item < args.tokens * count:
            token = item // count
            packet = item - token * count
            row = Int32(-1)
            holder = Int32(0)
            if lane < p.top_k:
                at = Int64(token * p.top_k + lane) * 4
                row = ptx.ld_i32(args.send_rows + at)
                holder = holder_of(p, ptx.ld_i32(args.topk_idx + at))
            bit = Int32(0)
            if row >= 0:
                bit = Int32(1) << holder
            expected = arch.warp_redux_sync(bit, "or")
            if holder != ranks.rank:
                row = Int32(-1)
            last = cutlass.max(last, row)
            if row >= args.num_rows:
                row = Int32(-1)
            own = seal(self.sum_rows(args, row, packet, lane), lane, Int64(0))

            address = staging + Int64(token) * ranks.heap.row_stride + packet * PACKET_BYTES + lane * 16
            waiting = expected & ~(Int32(1) << ranks.rank)
            polls = Int32(0)
            start = Int64(0)
            while waiting != 0:
                for r in range_constexpr(p.world_size):
                    if (waiting >> r) & 1 != 0:
                        got = ld_line(address + r * (self.tokens * ranks.heap.row_stride))
                        for i in range_constexpr(4):
                            words[4 * r + i] = got[i]
                missing = Int32(0)
                for r in range_constexpr(p.world_size):
                    if (waiting >> r) & 1 != 0:
                        if not arrived(words[4 * r + 2], words[4 * r + 3], lane, ranks.mark):
                            missing = missing | (Int32(1) << r)
                waiting = missing
                polls += 1
                if polls == sync.POLLS_PER_CHECK and waiting != 0:
                    polls = Int32(0)
                    if start == 0:
                        start = Int64(arch.globaltimer())
                    peer = Int32(arch.popc((waiting & -waiting) - 1))
                    if sync.warp_gives_up(ranks, start, "token", peer, token, Int64(0)):
                        waiting = Int32(0)
                        expected = Int32(0)

            for i in range_constexpr(self.values):
                acc[i] = Float32(0.0)
            for r in range_constexpr(p.world_size):
                if (expected >> r) & 1 != 0:
                    w0, w1, w2, w3 = words[4 * r], words[4 * r + 1], words[4 * r + 2], words[4 * r + 3]
                    if ranks.rank == r:
                        w0, w1, w2, w3 = own[0], own[1], own[2], own[3]
                    values = ptx.unpack([w0, w1, w2, w3], p.dtype)
                    for i in range_constexpr(self.values):
                        acc[i] = ptx.add_rn(acc[i], values[i])
            packed = ptx.pack([acc[i] for i in range(self.values)], p.dtype)
            offset = packet * PAYLOAD_BYTES + lane_offset(lane)
            store_payload(packed, lane, args.out + Int64(token) * p.row_bytes, offset, p.row_bytes)
            item += share.step
        # Told behind the loop: registers are few in it.
        given_row(ranks, last, args.num_rows)
