"""Throughput combine: one kernel in which the experts' ranks sum rows and push the sums, and owners sum what arrives.

Block roles. Blocks [0, `pushers`) push: an item is a copy, that is, the rows of a token at this rank. They are added in
fp32 over ascending k, the rounded sum is stored in the owner's staging row [copy][token], and the flag of that row is
set. The last blocks push as well, as many as this rank's rows require beyond those of an average rank, at most
`joining` (surplus.py). The blocks in between sum: an item is one of this rank's tokens. A warp waits for the flags of
its copies that have rows (known from the route), adds their sums in fp32 over ascending ranks, and then adds the
token's residual. Pushers never wait, so every wait ends.

With two ranks, owners also add the rows that their own rank has of their tokens (`adds_own`), and pushers process the
other rank's tokens only. Memory limits such a combine, and half of all sums then need not be staged.

A separate warp of each pushing block sets its flags (outbox.py), so that no row waits for a fence.

Sums can be sent in a format (../quantized_sums.py): pushers quantize sums instead of rounding them, rows of staging
contain codes and scales, and owners add codes times scales.

With several NVLink domains (internode/sums.py), copies of a token of another domain are pushed to the stager of its
owner. The first of the blocks that do not push *pass on*: they request the sums of this rank's tokens, and then put the
sums that other ranks request from them. Requests wait for nothing, and passing on waits only for pushed sums and
requests, so tokens are summed while rows are pushed and sums are passed on. If only one block does not push, it does
both, one after the other.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import (
    Copy,
    begin_walk,
    copies_of_other,
    copy_of,
    copy_of_other,
    given_row,
    guarded,
    row_of,
    token_of,
)  # fmt: skip
from ..copies import Copies, copies_of
from ..domains import index_of, slot_of, stager_of
from ..experts import holder_of
from ..formats import Form
from ..heap import CLAIMS, SEND, Heap
from ..ids import block_ids, warp_id
from ..internode.sums import ask, await_sums, copy_scalars, in_two_parts, number_there, pass_sums
from ..launch import RankArgs
from ..quantized_sums import SumSlices
from ..rows import zero_row
from ..slices import Slices
from ..views import Floats, Ints, Records
from .adder import OTHER_LANE, Adding, Notes, RowBases, add_items
from .outbox import close, deliver, new_outbox, post
from .pipeline import Items, deal_out
from .placing import number_of_weight
from .ring import Ring, RingShape, SlicedKernel, init_ring_barriers
from .surplus import BlockBudget, Parts, count_parts

PASSING = 5 / 8
"""Share of the blocks that do not push which pass sums on, with several NVLink domains; the others sum, for which each
token requires a fence over NVSHMEM (benchmarks/results/domains.md)."""
HALF_SLICE = 4
"""Vectors of a slice if a lane holds two sums in registers, in addition to the values that it adds."""


class ThroughputCombineArgs(NamedTuple):
    ranks: RankArgs
    y: Int64
    recv_weights: Floats
    row_scalars: Floats
    topk_idx: Ints
    send_rows: Ints
    arrivals: Int64
    residual: Int64
    out: Int64
    out_scalars: Floats
    tokens: Int32
    max_tokens: Int32
    num_rows: Int32  # of y, recv_weights and row_scalars
    pushers: Int32  # blocks that push
    expected: Int32  # load of an average rank: rows, and SEND times its copies
    joining: Int32  # blocks that push as well if there are more rows than expected
    blocks: Int32


@dataclass(frozen=True)
class Combine(SlicedKernel):
    """`rows`: sum rows. `weighted`: times their routing weight. `scalars`: return one fp32 for each row to (token, k).

    Scalars carry the gradients of the routing weights in the backward of dispatch. `residual`: a row for each of this
    rank's tokens is added to its sum. `token_major`: each row has `top_k` scalars, all of which go to the owner of its
    token; of each (token, k) the owner takes that of the rank which holds the expert. `format`: format in which
    sums are sent (../quantized_sums.py); empty for rows of the dtype.
    """

    NAME, Args, WARPS = "ep_combine", ThroughputCombineArgs, 15

    rows: bool = False
    weighted: bool = False
    scalars: bool = False
    residual: bool = False
    token_major: bool = False
    format: str = ""

    @property
    def slices(self) -> Slices:
        """Slices of the rows that pushers add up. With a format, pushers and owners cut rows alike."""
        return self.sum_slices if self.format else super().slices

    @property
    def sum_slices(self) -> Slices:
        """Slices of the rows that owners add."""
        if in_two_parts(self.problem):
            return Slices(self.problem.row_bytes, self.problem.dtype, HALF_SLICE)
        return super().slices

    @property
    def adds_own(self) -> bool:
        """Whether owners add the rows of their own rank (`Problem.adds_own`)."""
        return self.rows and self.problem.adds_own

    @property
    def in_format(self) -> SumSlices | None:
        """Layout of sums that are sent in the format; None without one."""
        if not self.format:
            return None
        return SumSlices(self.sum_slices, Form(self.format, self.problem.hidden_size))

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum in staging."""
        return self.in_format.row_bytes if self.in_format else self.problem.row_bytes

    @property
    def sum_ring(self) -> RingShape:
        wire = self.in_format
        if wire:
            # With a residual or own rows a stage may also contain a slice of a row of the dtype.
            room = max(wire.slice_bytes, wire.plain.slice_bytes if self.residual or self.adds_own else 0)
            return RingShape.pieces_of(wire.row_bytes, self.WARPS, wire.slice_bytes, room)
        return RingShape.slices(self.sum_slices, self.WARPS)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * (self.WARPS + 1), 1, 1), **self.one_block}

    @cute.kernel
    def kernel(self, args: ThroughputCombineArgs) -> None:
        bid, blocks = block_ids()
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        p, rings = self.problem, (self.ring, self.sum_ring)
        tid, _, _ = arch.thread_idx()
        if bid == 0:
            operation.say_hello(ranks, tid, 32 * (self.WARPS + 1), True)
        smem = cutlass.memory.SmemAllocator()
        stages = self.WARPS * max(ring.stages for ring in rings)
        barriers = smem.allocate_array(Int64, stages)
        notes = Notes(smem, stages)
        ring_bytes = self.WARPS * max(ring.stages * ring.stride for ring in rings)
        buffers = smem.allocate_array(Uint8, ring_bytes, byte_alignment=128)
        if tid < 32:
            init_ring_barriers(barriers, stages)
        sources = smem.allocate_tensor(Int32, cute.make_layout(p.world_size + 1))
        found = smem.allocate_tensor(Int32, cute.make_layout(1))
        outbox = new_outbox(smem, self.WARPS)
        share = BlockBudget(args.pushers, args.expected, args.joining)
        parts = Parts(ranks, args.arrivals, args.num_rows, Int32(0), share, found)
        dealt = blocks
        if bid >= args.pushers and args.joining > 0:
            if tid == 0:
                count_parts(parts, SEND)
            arch.sync_threads()
            dealt -= found[0]
        self.take_part(ranks, dealt, (outbox, buffers, barriers, notes, sources), args)
        operation.finish(ranks, blocks)

    @cute.jit
    def take_part(self, ranks: sync.Ranks, dealt: Int32, shared: Any, args: ThroughputCombineArgs) -> None:
        """Do a block's share. The blocks behind `dealt` push, although no items are dealt out to them."""
        p = self.problem
        bid, _, _ = arch.block_idx()
        warp = warp_id()
        outbox, buffers, barriers, notes, sources = shared
        pushers = args.pushers
        pushes = bid < pushers or bid >= dealt
        first = Int32(pushers)  # of the blocks that sum
        last = cute.make_rmem_tensor((1,), Int32)  # row that this lane has met
        last[0] = Int32(-1)
        if const_expr(p.num_domains > 1):
            passers = cutlass.max((dealt - pushers) * int(PASSING * 16) // 16, 1)
            first = cutlass.min(pushers + passers, dealt - 1)
            if not pushes and bid < pushers + passers:
                self.pass_on(ranks, bid - pushers, passers, args)
        if warp == self.WARPS:
            if pushes:
                deliver(outbox, ranks, "token", p.num_domains * p.most_copies * p.max_tokens)
        elif pushes:
            item, step = warp * pushers + bid, pushers * self.WARPS
            walk = begin_walk(ranks, sources, args.arrivals, args.num_rows, args.max_tokens)
            total = walk.items
            if const_expr(self.adds_own):
                total = copies_of_other(ranks, walk)
            if const_expr(p.num_domains > 1):
                # Behind what a rank that has given up pushes, a stager that is late would send a sum of it.
                total = total * Int32(ranks.goes_on)
            pushing = (ranks, walk, args, last)
            if const_expr(self.rows):
                ring = Ring(self.ring, buffers, barriers, warp)
                items = deal_out(ranks.word(CLAIMS), item, step, total, bid < dealt)
                add_items(ring, notes, warp, self.adding(True), items, pushing, RowBases(args.y), outbox)
            else:
                count = Int32(0)
                while item < total:
                    copy = self.scout_push(pushing, item)
                    held, _, _, _, code = self.fetch_push(pushing, copy, self.peek_push(pushing, copy))
                    if held != 0:
                        post(outbox, warp, count, code)
                        count += 1
                    item += step
                close(outbox, warp, count)
        elif bid >= first:
            self.sum_tokens((ranks, args, last), shared, bid - first, dealt - first)
        # Reported after the loops, to keep them fast.
        given_row(ranks, last[0], args.num_rows)

    @cute.jit
    def sum_tokens(self, summing: Any, shared: Any, block: Int32, blocks: Int32) -> None:
        """By a warp of the `block`-th of so many that sum: sum this rank's tokens."""
        ranks, args, _ = summing
        _, buffers, barriers, notes, _ = shared
        warp = warp_id()
        item, step = warp * blocks + block, blocks * self.WARPS
        if const_expr(self.rows):
            ring = Ring(self.sum_ring, buffers, barriers, warp)
            staging = ranks.view("rows").base
            items = Items(item, item + step, step, args.tokens)
            bases = RowBases(staging, args.residual)
            if const_expr(self.adds_own):
                bases = RowBases(args.y, args.residual, staging)
            if const_expr(self.problem.num_domains > 1):
                bases = RowBases(staging, args.residual, ranks.view("rows_in").base)
            add_items(ring, notes, warp, self.adding(False), items, summing, bases)
        else:
            while item < args.tokens:
                self.fetch_sum(summing, item, self.peek_sum(summing, item))
                item += step

    def adding(self, pushing: bool) -> Adding:
        """Return how a warp adds rows that it pushes, or sums that have arrived."""
        if pushing:
            return Adding(
                self.slices, self.weighted, self.scout_push, self.peek_push, self.fetch_push,
                wire=self.in_format, encodes=True,
            )  # fmt: skip
        if self.adds_own:
            return Adding(
                self.slices, self.weighted, self.scout_both, self.peek_both, self.fetch_both, self.residual, own=True,
                wire=self.in_format,
            )  # fmt: skip
        return Adding(
            self.sum_slices, False, self.scout_sum, self.peek_sum, self.fetch_sum, self.residual,
            in_two_parts(self.problem), wire=self.in_format,
        )  # fmt: skip

    @cute.jit
    def pass_on(self, ranks: sync.Ranks, block: Int32, blocks: Int32, args: ThroughputCombineArgs) -> None:
        """By `block` of so many that sum, all of its warps: what goes to and from other domains."""
        warps = self.WARPS + 1
        first = Int32(warp_id()) * blocks + block
        ids = self.token_major
        ask(ranks, ids, args.topk_idx, args.send_rows, args.tokens, args.max_tokens, first, blocks * warps)
        pass_sums(ranks, 32 * warps, self.rows, self.scalars, ids, self.in_format, args.max_tokens, (block, blocks))

    @cute.jit
    def scout_push(self, context: Any, item: Int32) -> Copy:
        """Return the copy of an item, if there is one."""
        ranks, walk = context[:2]
        if const_expr(self.adds_own):
            return copy_of_other(ranks, walk, item)
        return copy_of(ranks, walk, item)

    @cute.jit
    def peek_push(self, context: Any, copy: Copy) -> tuple[Int32, Int32]:
        """Return a lane's row of the copy, -1 for none, and its entry at the owner."""
        return row_of(context[1], copy)

    @cute.jit
    def fetch_push(self, context: Any, copy: Copy, peeked: Any) -> tuple[Int32, Int32, Float32, Int64, Int32]:
        """Return the rows of a copy (see add_items), and send its scalars. A row after the last one is reported, and
        the last row is read in its place, because the owner waits for a sum. (If there are no rows, the owner waits
        until its deadline.)"""
        ranks, walk, args, last = context
        p = self.problem
        copy = guarded(ranks, args.num_rows, args.max_tokens, copy)
        row, asker = peeked
        if copy.rows == 0:
            row = Int32(-1)
        owner, token, number = Int32(0), Int32(0), Int32(0)
        if copy.rows != 0:
            owner, (token, number) = copy.source, token_of(p, copy, args.max_tokens)
        stager, slot = stager_of(ranks, owner), slot_of(ranks, owner)
        heap = ranks.peer(stager)
        at = (slot * p.most_copies + number_there(p, slot, number)) * p.max_tokens + token
        target = ranks.view("rows", heap, self.sum_bytes).at(at)
        last[0] = cutlass.max(last[0], row)
        row = cutlass.min(row, args.num_rows - 1)
        weight = Float32(1.0)
        if row >= 0:
            if const_expr(self.weighted):
                weight = args.recv_weights[row]
            if const_expr(self.scalars and not self.token_major):
                scalar = args.row_scalars[row]
                k = cutlass.max(asker, 0) % p.top_k
                ranks.view("scalars", heap).part(slot)[number_of_weight(p, token * p.top_k + k)] = scalar
        if const_expr(self.scalars and self.token_major):
            first = arch.shuffle_sync(row, 0)
            lane = arch.lane_idx()
            if first >= 0 and lane < p.top_k:
                scalar = args.row_scalars[Int64(first) * p.top_k + lane]
                copy_scalars(ranks, heap, slot, ranks.rank, token)[lane] = scalar
        held = arch.vote_ballot_sync(row >= 0)
        return held, row, weight, target, index_of(ranks, owner) * (p.num_domains * p.most_copies * p.max_tokens) + at

    @cute.jit
    def scout_sum(self, context: Any, token: Int32) -> Int32:
        """Return nothing, because nothing has to be loaded first."""
        return token

    @cute.jit
    def peek_sum(self, context: Any, token: Int32) -> tuple[Int32, Int32]:
        """Return a lane's entry of send_rows and topk_idx of one of this rank's tokens."""
        args = context[1]
        lane = arch.lane_idx()
        row, expert = Int32(-1), Int32(-1)
        if token < args.tokens and lane < self.problem.top_k:
            entry = token * self.problem.top_k + lane
            row = args.send_rows[entry]
            expert = args.topk_idx[entry]
        return row, expert

    @cute.jit
    def fetch_sum(self, context: Any, token: Int32, peeked: Any) -> tuple[Any, Int32, Float32, Int64, Int32]:
        """Return the staged rows of one of this rank's tokens (see add_items) after they have arrived: lane c has copy
        c."""
        ranks, args, _ = context
        p = self.problem
        lane = arch.lane_idx()
        row, expert = peeked
        # A lane with an entry that opens a copy waits for it, if the copy has a row.
        copy = copies_of(p, expert, row)
        number = lane * p.max_tokens + token
        held = copy.mask
        if const_expr(p.num_domains == 1):
            arrived = Int32(1)
            if copy.expected != 0:
                arrived = Int32(ranks.wait("token", copy.number * p.max_tokens + token, copy.holder, token))
            # Hands what each lane acquired to the whole warp.
            complete = arch.vote_all_sync(arrived != 0)
        else:
            number, count, complete = await_sums(ranks, copy, token, self.rows, self.scalars)
            held = (Int32(1) << count) - 1 if p.top_k < 32 else Int32((Int64(1) << count) - 1)
        if not complete:
            held = Int32(0)
        # Ordinary stores filled the staging, bulk copies read it.
        sync.fence_async()
        arch.sync_warp()
        if const_expr(self.scalars):
            self.return_scalar(ranks, args, token, copy, row, complete)
        rows, target = self.with_residual(args, token, held, complete)
        return rows, number, Float32(1.0), target, token

    @cute.jit
    def with_residual(
        self, args: ThroughputCombineArgs, token: Int32, held: Int32, complete: Boolean
    ) -> tuple[Any, Int64]:
        """By a whole warp: return the bit mask of the rows to add, with the residual as one more, which is added last,
        and the address of the token's sum. If there is nothing to add, the sum is set to zeros."""
        target = Records(args.out, self.problem.row_bytes).at(token)
        rows = held
        if const_expr(self.residual):
            rows = Int64(held) & 0xFFFFFFFF
            if complete:
                rows = rows | (Int64(1) << 32)
        if const_expr(self.rows):
            if rows == 0:
                zero_row(self.problem.row_bytes, target, arch.lane_idx())
        return rows, target

    @cute.jit
    def return_scalar(
        self, ranks: sync.Ranks, args: ThroughputCombineArgs, token: Int32, copy: Copies, row: Int32, complete: Boolean
    ) -> None:
        """By a warp, after the waits for a token's copies: lane k, which has the row of the token's k-th expert, writes
        its scalar; 0 if there is no row, or if the token is not `complete`."""
        p = self.problem
        lane = arch.lane_idx()
        if not complete:
            row = Int32(-1)
        own = row  # the row of this rank that has the scalar
        if const_expr(self.token_major):
            if copy.holder != ranks.rank:
                own = Int32(-1)
            own = arch.warp_redux_sync(own, "max")
            row = ((copy.mask >> copy.number) & 1) * Int32(copy.holder >= 0 and complete) - 1
            if const_expr(self.adds_own):
                if copy.holder == ranks.rank:
                    row = cutlass.min(row, own)  # nothing is read if y has no row at all
        if lane < p.top_k:
            value = Float32(0.0)
            if row >= 0:
                at = self.address_of_returned(ranks, copy.holder, token, lane)
                if const_expr(self.adds_own):
                    if copy.holder == ranks.rank:
                        at = args.row_scalars.at(own)
                        if const_expr(self.token_major):
                            at = args.row_scalars.at(Int64(own) * p.top_k + lane)
                value = ptx.ld_f32(at)
            args.out_scalars[token * p.top_k + lane] = value

    @cute.jit
    def scout_both(self, context: Any, token: Int32) -> tuple[Int32, Int32, Int32]:
        """Return one of this rank's tokens, and a lane's entry of send_rows and topk_idx."""
        row, expert = self.peek_sum(context, token)
        return token, row, expert

    @cute.jit
    def peek_both(self, context: Any, scouted: Any) -> Float32:
        """Return the weight of a lane's row, if it is a row of this rank. In place of a row after the last one, which
        is reported, the last row is read."""
        ranks, args, last = context
        _, row, expert = scouted
        weight = Float32(1.0)
        if row >= 0 and expert >= 0 and expert < self.problem.num_experts:
            if holder_of(self.problem, expert) == ranks.rank:
                last[0] = cutlass.max(last[0], row)
                if const_expr(self.weighted):
                    row = cutlass.min(row, args.num_rows - 1)
                    if row >= 0:
                        weight = args.recv_weights[row]
        return weight

    @cute.jit
    def fetch_both(self, context: Any, scouted: Any, weight: Float32) -> tuple[Any, Int32, Float32, Int64, Int32]:
        """Return the rows of this rank of one of its tokens, and the staged sum of the other rank after it has arrived
        (see add_items): lane k has the row of the k-th expert, OTHER_LANE the sum."""
        ranks, args, _ = context
        p = self.problem
        lane = arch.lane_idx()
        token, row, expert = scouted
        copy = copies_of(p, expert, row)
        here = copy.holder == ranks.rank
        arrived, other = Int32(1), Int32(0)
        number = copy.number * p.max_tokens + token
        if copy.expected != 0 and not here:
            arrived = Int32(ranks.wait("token", number, copy.holder, token))
            other = number + 1
        other = arch.warp_redux_sync(other, "max")
        # Hands what each lane acquired to the whole warp.
        complete = arch.vote_all_sync(arrived != 0)
        # Ordinary stores filled the staging, bulk copies read it.
        sync.fence_async()
        arch.sync_warp()
        if here:
            row = cutlass.min(row, args.num_rows - 1)
        if const_expr(self.scalars):
            self.return_scalar(ranks, args, token, copy, row, complete)
        held = Int32(arch.vote_ballot_sync(here and row >= 0))
        if lane == OTHER_LANE:
            row, weight = other - 1, Float32(1.0)
        if other != 0:
            held = held | Int32(-(1 << OTHER_LANE))
        if not complete:
            held = Int32(0)
        rows, target = self.with_residual(args, token, held, complete)
        return rows, row, weight, target, token

    @cute.jit
    def address_of_returned(self, ranks: sync.Ranks, holder: Int32, token: Int32, k: Int32) -> Int64:
        """Return the address of the scalar that a rank returns to this one; those of other NVLink domains arrive over
        the wire."""
        p = self.problem
        among = number_of_weight(p, token * p.top_k + k)
        at = ranks.view("scalars").at(0, among)
        if const_expr(self.token_major):
            at = copy_scalars(ranks, ranks.own, Int32(0), holder, token).at(k)
        if const_expr(p.num_domains > 1):
            slot = slot_of(ranks, holder)
            if slot > 0:
                at = ranks.view("scalars_in").at(slot - 1, among)
        return at
