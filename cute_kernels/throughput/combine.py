"""Throughput combine: one kernel in which the experts' ranks sum rows and push the sums, and owners sum what arrives.

Block roles. Blocks [0, `pushers`) push: an item is a copy, that is, the rows of a token at this rank. They are added in
fp32 over ascending k, the rounded sum is stored in the owner's staging row [copy][token], and the flag of that row is
set. The last blocks push as well, as many as this rank's rows require beyond those of an average rank, at most
`joining` (surplus.py). The blocks in between sum: an item is one of this rank's tokens. A warp waits for the flags of
its copies that have rows (known from the route), adds their sums in fp32 over ascending ranks, and then adds the
token's residual. Pushers never wait, so every wait ends.

With two ranks, owners also add the rows that their own rank has of their tokens (`adds_own`), and pushers process the
other rank's tokens only. Memory limits such a combine, and half of all sums then need not be staged.

In the example of ../arrivals.py, rank 1 has three copies: the sums of row 0, of rows 3 and 1, and of row 2. The first
two go to the staging rows [1][0] and [0][1] of rank 0, which adds its own row 0 and [1][0] for its token 0, and takes
[0][1] for token 1. The third copy is of rank 1's own token 0. With more ranks it would be pushed to row [1][0] of rank
1 itself; with two, the block that sums this token adds row 2 and what rank 0 has pushed to [0][0].

A separate warp of each pushing block sets its flags (outbox.py), so that no row waits for a fence.

Sums can be sent in a format (../quantized_sums.py): pushers quantize sums instead of rounding them, rows of staging
contain codes and scales, and owners add codes times scales.

`PushAdder` finds what a pushing warp adds, and `OwnerAdder` or `OwnRowsAdder` what a summing warp adds. They differ
from each other in the methods that adder.py calls. internode/combine.py has those of several NVLink domains.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import (
    Copy,
    Walk,
    begin_walk,
    copies_of_other,
    copy_of,
    copy_of_other,
    given_row,
    guarded,
    row_of,
    token_of,
)  # fmt: skip
from ..copies import Copies, copies_of, entry_of
from ..experts import holder_of
from ..formats import Form
from ..heap import CLAIMS, SEND, Heap
from ..ids import block_id, block_ids, thread_id, warp_id
from ..launch import RankArgs
from ..quantized_sums import SumSlices, requantize_slice
from ..rows import zero_row
from ..slices import Slices
from ..token_major import copy_scalars
from ..views import Floats, Ints, Records
from .adder import JOINS, OTHER_LANE, ItemRows, Notes, RowAdder, RowBases, add_items, round_sum
from .outbox import close, deliver, new_outbox, post
from .pipeline import Items, deal_out
from .ring import Ring, RingShape, SlicedKernel, init_ring_barriers
from .surplus import surplus_blocks


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
            return RingShape.of_slices(wire.row_bytes, self.WARPS, wire.slice_bytes, room)
        return RingShape.of_slices(self.sum_slices.row_bytes, self.WARPS, self.sum_slices.slice_bytes)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * (self.WARPS + 1), 1, 1), **self.one_block}

    @cute.kernel
    def kernel(self, args: ThroughputCombineArgs) -> None:
        bid, blocks = block_ids()
        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
        p, rings = self.problem, (self.ring, self.sum_ring)
        tid = thread_id()
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
        dealt = blocks
        if bid >= args.pushers and args.joining > 0:
            if tid == 0:
                found[0] = surplus_blocks(ranks, args, args.pushers, args.joining, SEND)
            arch.sync_threads()
            dealt -= found[0]
        self.take_part(ranks, dealt, (outbox, buffers, barriers, notes, sources), args)
        operation.finish(ranks, blocks)

    @cute.jit
    def take_part(self, ranks: sync.Ranks, dealt: Int32, shared: Any, args: ThroughputCombineArgs) -> None:
        """Do a block's share. The blocks behind `dealt` push, although no items are dealt out to them."""
        bid = block_id()
        warp = warp_id()
        outbox, buffers, barriers, notes, sources = shared
        pushers = args.pushers
        pushes = bid < pushers or bid >= dealt
        last = cute.make_rmem_tensor((1,), Int32)  # row that this lane has met
        last[0] = Int32(-1)
        first = self.first_summing(ranks, pushes, dealt, args)
        if warp == self.WARPS:
            if pushes:
                deliver(outbox, ranks, "token", self.flags_each)
        elif pushes:
            adder = self.push_adder
            item, step = warp * pushers + bid, pushers * self.WARPS
            walk = begin_walk(ranks, sources, args.arrivals, args.num_rows, args.max_tokens)
            total = adder.items(ranks, walk)
            pushing = (ranks, walk, args, last)
            if const_expr(self.rows):
                ring = Ring(self.ring, buffers, barriers, warp)
                items = deal_out(ranks.word(CLAIMS), item, step, total, bid < dealt)
                add_items(ring, notes, warp, adder, items, pushing, RowBases(args.y), outbox)
            else:
                count = Int32(0)
                while item < total:
                    copy = adder.scout(pushing, item)
                    rows = adder.fetch(pushing, copy, adder.peek(pushing, copy))
                    if rows.held != 0:
                        post(outbox, warp, count, rows.code)
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
        warp, adder = warp_id(), self.owner_adder
        item, step = warp * blocks + block, blocks * self.WARPS
        if const_expr(self.rows):
            ring = Ring(self.sum_ring, buffers, barriers, warp)
            items = Items(item, item + step, step, args.tokens)
            add_items(ring, notes, warp, adder, items, summing, adder.bases(ranks, args))
        else:
            while item < args.tokens:
                adder.fetch(summing, item, adder.peek(summing, item))
                item += step

    # What several NVLink domains do differently (internode/combine.py).

    @property
    def push_adder(self) -> "PushAdder":
        return PushAdder(self)

    @property
    def owner_adder(self) -> "OwnerAdder":
        return OwnRowsAdder(self) if self.adds_own else OwnerAdder(self)

    @property
    def flags_each(self) -> int:
        """Number of codes of flags at each rank that sums are pushed to."""
        return self.problem.most_copies * self.problem.max_tokens

    def first_summing(self, ranks: sync.Ranks, pushes: Boolean, dealt: Int32, args: ThroughputCombineArgs) -> Int32:
        """Return the first of the blocks that sum."""
        return Int32(args.pushers)


@dataclass(frozen=True)
class PushAdder(RowAdder):
    """Adds the rows of copies at this rank, and pushes the sums. An item is a copy."""

    pushes: ClassVar[bool] = True

    @cute.jit
    def items(self, ranks: sync.Ranks, walk: Walk) -> Int32:
        """Return how many copies this rank pushes."""
        total = walk.items
        if const_expr(self.kernel.adds_own):
            total = copies_of_other(ranks, walk)
        return total

    @cute.jit
    def scout(self, lists: Any, item: Int32) -> Copy:
        """Return the copy of an item, if there is one."""
        ranks, walk = lists[:2]
        if const_expr(self.kernel.adds_own):
            return copy_of_other(ranks, walk, item)
        return copy_of(ranks, walk, item)

    @cute.jit
    def peek(self, lists: Any, scouted: Copy) -> tuple[Int32, Int32]:
        """Return a lane's row of the copy, -1 for none, and its entry at the owner."""
        return row_of(lists[1], scouted)

    @cute.jit
    def fetch(self, lists: Any, scouted: Copy, peeked: Any) -> ItemRows:
        """Return the rows of a copy, and send its scalars. A row after the last one is reported, and the last row is
        read in its place, because the owner waits for a sum. (If there are no rows, the owner waits until its
        deadline.)"""
        kernel = self.kernel
        ranks, walk, args, last = lists
        p = kernel.problem
        copy = guarded(ranks, args.num_rows, args.max_tokens, scouted)
        row, asker = peeked
        if copy.rows == 0:
            row = Int32(-1)
        owner, token, number = Int32(0), Int32(0), Int32(0)
        if copy.rows != 0:
            owner, (token, number) = copy.source, token_of(p, copy, args.max_tokens)
        heap, slot, at = self.place(ranks, owner, token, number)
        target = ranks.view("rows", heap, kernel.sum_bytes).at(at)
        last[0] = cutlass.max(last[0], row)
        row = cutlass.min(row, args.num_rows - 1)
        weight = Float32(1.0)
        if row >= 0:
            if const_expr(kernel.weighted):
                weight = args.recv_weights[row]
            if const_expr(kernel.scalars and not kernel.token_major):
                scalar = args.row_scalars[row]
                k = cutlass.max(asker, 0) % p.top_k
                ranks.view("scalars", heap)[slot, token, k] = scalar
        if const_expr(kernel.scalars and kernel.token_major):
            first = arch.shuffle_sync(row, 0)
            lane = arch.lane_idx()
            if first >= 0 and lane < p.top_k:
                scalar = args.row_scalars[Int64(first) * p.top_k + lane]
                copy_scalars(ranks, heap, slot, ranks.rank, token)[lane] = scalar
        held = arch.vote_ballot_sync(row >= 0)
        return ItemRows(held, row, weight, target, self.flag_of(ranks, owner, at))

    def place(self, ranks: sync.Ranks, owner: Int32, token: Int32, number: Int32) -> tuple[Int64, Int32, Int32]:
        """Return where the sum of a copy goes: the heap, the slot there (domains.py), and the number of the row in
        staging."""
        return ranks.peer(owner), Int32(0), number * self.kernel.problem.max_tokens + token

    def flag_of(self, ranks: sync.Ranks, owner: Int32, at: Int32) -> Int32:
        """Return the code of the flag (outbox.py) of the row with that number."""
        return owner * self.kernel.flags_each + at


@dataclass(frozen=True)
class OwnerAdder(RowAdder):
    """Adds the sums of this rank's tokens, which other ranks and this one have pushed. An item is a token."""

    def bases(self, ranks: sync.Ranks, args: ThroughputCombineArgs) -> RowBases:
        """Return the addresses of the rows to add."""
        return RowBases(ranks.view("rows").base, args.residual)

    @cute.jit
    def scout(self, lists: Any, item: Int32) -> Int32:
        """Return the token: nothing has to be loaded first."""
        return item

    @cute.jit
    def peek(self, lists: Any, scouted: Int32) -> tuple[Int32, Int32]:
        """Return a lane's row and expert of one of this rank's tokens."""
        args = lists[1]
        return entry_of(self.kernel.problem, args, scouted, scouted < args.tokens)

    @cute.jit
    def fetch(self, lists: Any, scouted: Int32, peeked: Any) -> ItemRows:
        """Return the staged rows of one of this rank's tokens after they have arrived: lane c has copy c."""
        kernel = self.kernel
        ranks, args, _ = lists
        row, expert = peeked
        token = scouted
        # A lane with an entry that opens a copy waits for it, if the copy has a row.
        copy = copies_of(kernel.problem, expert, row)
        held, number, complete = self.await_copies(ranks, copy, token)
        if not complete:
            held = Int32(0)
        # Ordinary stores filled the staging, bulk copies read it.
        sync.fence_async()
        arch.sync_warp()
        if const_expr(kernel.scalars):
            self.return_scalar(ranks, args, token, copy, row, complete)
        rows, target = self.with_residual(args, token, held, complete)
        return ItemRows(rows, number, Float32(1.0), target, token)

    @cute.jit
    def await_copies(self, ranks: sync.Ranks, copy: Copies, token: Int32) -> tuple[Int32, Int32, Boolean]:
        """By a whole warp: wait for the copies of a token that have rows. Return as bits the lanes that hold a sum, the
        number of a lane's sum in staging, and whether all have arrived."""
        p = self.kernel.problem
        number, arrived = arch.lane_idx() * p.max_tokens + token, Int32(1)
        if copy.expected != 0:
            arrived = Int32(ranks.wait("token", copy.number * p.max_tokens + token, copy.holder, token))
        # Hands what each lane acquired to the whole warp.
        complete = arch.vote_all_sync(arrived != 0)
        return copy.mask, number, complete

    @cute.jit
    def with_residual(
        self, args: ThroughputCombineArgs, token: Int32, held: Int32, complete: Boolean
    ) -> tuple[Any, Int64]:
        """By a whole warp: return the bit mask of the rows to add, with the residual as one more, which is added last,
        and the address of the token's sum. If there is nothing to add, the sum is set to zeros."""
        row_bytes = self.kernel.problem.row_bytes
        target = Records(args.out, row_bytes).at(token)
        rows = held
        if const_expr(self.kernel.residual):
            rows = Int64(held) & 0xFFFFFFFF
            if complete:
                rows = rows | (Int64(1) << 32)
        if const_expr(self.kernel.rows):
            if rows == 0:
                zero_row(row_bytes, target, arch.lane_idx())
        return rows, target

    @cute.jit
    def return_scalar(
        self, ranks: sync.Ranks, args: ThroughputCombineArgs, token: Int32, copy: Copies, row: Int32, complete: Boolean
    ) -> None:
        """By a warp, after the waits for a token's copies: lane k, which has the row of the token's k-th expert, writes
        its scalar; 0 if there is no row, or if the token is not `complete`."""
        kernel = self.kernel
        p = kernel.problem
        lane = arch.lane_idx()
        if not complete:
            row = Int32(-1)
        own = row  # the row of this rank that has the scalar
        if const_expr(kernel.token_major):
            if copy.holder != ranks.rank:
                own = Int32(-1)
            own = arch.warp_redux_sync(own, "max")
            row = ((copy.mask >> copy.number) & 1) * Int32(copy.holder >= 0 and complete) - 1
            if const_expr(self.own):
                if copy.holder == ranks.rank:
                    row = cutlass.min(row, own)  # nothing is read if y has no row at all
        if lane < p.top_k:
            value = Float32(0.0)
            if row >= 0:
                at = self.address_of_returned(ranks, copy.holder, token, lane)
                if const_expr(self.own):
                    if copy.holder == ranks.rank:
                        at = args.row_scalars.at(own)
                        if const_expr(kernel.token_major):
                            at = args.row_scalars.at(Int64(own) * p.top_k + lane)
                value = ptx.ld_f32(at)
            args.out_scalars[token * p.top_k + lane] = value

    @cute.jit
    def address_of_returned(self, ranks: sync.Ranks, holder: Int32, token: Int32, k: Int32) -> Int64:
        """Return the address of the scalar that a rank returns to this one."""
        at = ranks.view("scalars").at(0, token, k)
        if const_expr(self.kernel.token_major):
            at = copy_scalars(ranks, ranks.own, Int32(0), holder, token).at(k)
        return at


@dataclass(frozen=True)
class OwnRowsAdder(OwnerAdder):
    """Adds the rows that this rank has of its own tokens, rounds or quantizes their sum as if it were sent, and adds
    the other rank's sum (`Combine.adds_own`). Lanes below OTHER_LANE have the rows, and OTHER_LANE the sum."""

    own: ClassVar[bool] = True

    def bases(self, ranks: sync.Ranks, args: ThroughputCombineArgs) -> RowBases:
        return RowBases(args.y, args.residual, ranks.view("rows").base)

    @cute.jit
    def scout(self, lists: Any, item: Int32) -> tuple[Int32, Int32, Int32]:
        """Return one of this rank's tokens, and a lane's row and expert of it."""
        row, expert = OwnerAdder.peek(self, lists, item)
        return item, row, expert

    @cute.jit
    def peek(self, lists: Any, scouted: Any) -> Float32:
        """Return the weight of a lane's row, if it is a row of this rank. In place of a row after the last one, which
        is reported, the last row is read."""
        ranks, args, last = lists
        _, row, expert = scouted
        weight = Float32(1.0)
        if row >= 0 and expert >= 0 and expert < self.kernel.problem.num_experts:
            if holder_of(self.kernel.problem, expert) == ranks.rank:
                last[0] = cutlass.max(last[0], row)
                if const_expr(self.kernel.weighted):
                    row = cutlass.min(row, args.num_rows - 1)
                    if row >= 0:
                        weight = args.recv_weights[row]
        return weight

    @cute.jit
    def fetch(self, lists: Any, scouted: Any, peeked: Float32) -> ItemRows:
        """Return the rows of this rank of one of its tokens, and the staged sum of the other rank after it has arrived:
        lane k has the row of the k-th expert."""
        ranks, args, _ = lists
        p = self.kernel.problem
        lane = arch.lane_idx()
        token, row, expert = scouted
        weight = peeked
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
        if const_expr(self.kernel.scalars):
            self.return_scalar(ranks, args, token, copy, row, complete)
        held = Int32(arch.vote_ballot_sync(here and row >= 0))
        if lane == OTHER_LANE:
            row, weight = other - 1, Float32(1.0)
        if other != 0:
            held = held | Int32(-(1 << OTHER_LANE))
        if not complete:
            held = Int32(0)
        rows, target = self.with_residual(args, token, held, complete)
        return ItemRows(rows, row, weight, target, token)

    @cute.jit
    def found_at(self, rows: RowBases, k: Int32, number: Int32, left: Any) -> tuple[Int64, Int32, Int32]:
        base, mark = rows.base, Int32(0)
        if k == OTHER_LANE:
            base = rows.other
        if k < OTHER_LANE and left & ((1 << OTHER_LANE) - 1) == 0:
            mark = mark | JOINS
        return base, number, mark

    @cute.jit
    def close_part(self, mark: Int32, acc: Any) -> None:
        """Round or quantize the sum of this rank's rows after the last one."""
        if mark & JOINS != 0:
            if const_expr(self.wire is not None):
                requantize_slice(self.wire, acc)
            else:
                round_sum(self.slices, acc)
