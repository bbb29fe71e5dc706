"""The throughput combine of several NVLink domains: copies of a token of another domain are pushed to the stager of its
owner (sums.py).

The first of the blocks that do not push *pass on*: they request the sums of this rank's tokens, and then put the sums
that other ranks request from them. Requests wait for nothing, and passing on waits only for pushed sums and requests,
so tokens are summed while rows are pushed and sums are passed on. If only one block does not push, it does both, one
after the other.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr

from .. import ptx, sync
from ..arrivals import Walk
from ..copies import Copies
from ..domains import index_of, slot_of, stager_of
from ..ids import block_id, warp_id
from ..quantized_sums import numbers_at
from ..slices import Slices
from ..throughput.adder import APART, BEGINS, JOINS, RowBases
from ..throughput.combine import Combine, OwnerAdder, PushAdder, ThroughputCombineArgs
from .sums import CLOSES, FAR, OPENS, ask, await_sums, in_two_parts, number_there, pass_sums

PASSING = 5 / 8
"""Share of the blocks that do not push which pass sums on; the others sum, for which each token requires a fence over
NVSHMEM (benchmarks/results/domains.md)."""
HALF_SLICE = 4
"""Vectors of a slice if a lane holds two sums in registers, in addition to the values that it adds."""


@dataclass(frozen=True)
class CombineAcross(Combine):
    """The combine."""

    @property
    def sum_slices(self) -> Slices:
        if in_two_parts(self.problem):
            return Slices(self.problem.row_bytes, self.problem.dtype, HALF_SLICE)
        return super().sum_slices

    @property
    def push_adder(self) -> PushAdder:
        return PushAdderAcross(self)

    @property
    def owner_adder(self) -> OwnerAdder:
        return OwnerAdderAcross(self)

    @property
    def flags_each(self) -> int:
        return self.problem.num_domains * super().flags_each

    @cute.jit
    def first_summing(self, ranks: sync.Ranks, pushes: Boolean, dealt: Int32, args: ThroughputCombineArgs) -> Int32:
        """Pass sums on, by the blocks that do so, and return the first of the blocks that sum."""
        bid = block_id()
        passers = cutlass.max((dealt - args.pushers) * int(PASSING * 16) // 16, 1)
        first = cutlass.min(args.pushers + passers, dealt - 1)
        if not pushes and bid < args.pushers + passers:
            self.pass_on(ranks, bid - args.pushers, passers, args)
        return first

    @cute.jit
    def pass_on(self, ranks: sync.Ranks, block: Int32, blocks: Int32, args: ThroughputCombineArgs) -> None:
        """By `block` of so many that sum, all of its warps: what goes to and from other domains."""
        warps = self.WARPS + 1
        first = Int32(warp_id()) * blocks + block
        ids = self.token_major
        ask(ranks, ids, args, first, blocks * warps)
        pass_sums(ranks, 32 * warps, self.rows, self.scalars, ids, self.in_format, args.max_tokens, (block, blocks))


@dataclass(frozen=True)
class PushAdderAcross(PushAdder):
    """Pushes the sum of a copy to its owner, or to the owner's stager in this domain."""

    @cute.jit
    def items(self, ranks: sync.Ranks, walk: Walk) -> Int32:
        # Behind what a rank that has given up pushes, a stager that is late would send a sum of it.
        return walk.items * Int32(ranks.goes_on)

    def place(self, ranks: sync.Ranks, owner: Int32, token: Int32, number: Int32) -> tuple[Int64, Int32, Int32]:
        p = self.kernel.problem
        stager, slot = stager_of(ranks, owner), slot_of(ranks, owner)
        at = (slot * p.most_copies + number_there(p, slot, number)) * p.max_tokens + token
        return ranks.peer(stager), slot, at

    def flag_of(self, ranks: sync.Ranks, owner: Int32, at: Int32) -> Int32:
        return index_of(ranks, owner) * self.kernel.flags_each + at


@dataclass(frozen=True)
class OwnerAdderAcross(OwnerAdder):
    """Adds the sums of this domain's ranks and those of other domains. With more than two domains, rows of this one are
    summed separately (`in_two_parts`): the mark of a stage says that its slice belongs to this domain (APART), is the
    first of that sum (BEGINS), or is the last, after which that sum is added to the others (JOINS)."""

    @property
    def tree(self) -> bool:
        return in_two_parts(self.kernel.problem)

    @property
    def part_numbers(self) -> int:
        return self.slices.values if self.tree else 1

    def bases(self, ranks: sync.Ranks, args: ThroughputCombineArgs) -> RowBases:
        return RowBases(ranks.view("rows").base, args.residual, ranks.view("rows_in").base)

    @cute.jit
    def await_copies(self, ranks: sync.Ranks, copy: Copies, token: Int32) -> tuple[Int32, Int32, Boolean]:
        number, count, complete = await_sums(ranks, copy, token, self.kernel.rows, self.kernel.scalars)
        held = (Int32(1) << count) - 1 if self.kernel.problem.top_k < 32 else Int32((Int64(1) << count) - 1)
        return held, number, complete

    @cute.jit
    def address_of_returned(self, ranks: sync.Ranks, holder: Int32, token: Int32, k: Int32) -> Int64:
        """Return the address of the scalar that a rank returns to this one; those of other domains arrive over the
        wire."""
        at = OwnerAdder.address_of_returned(self, ranks, holder, token, k)
        slot = slot_of(ranks, holder)
        if slot > 0:
            at = ranks.view("scalars_in").at(slot - 1, token, k)
        return at

    @cute.jit
    def found_at(self, rows: RowBases, k: Int32, number: Int32, left: Any) -> tuple[Int64, Int32, Int32]:
        base, mark = rows.base, Int32(0)
        if number & FAR != 0:
            base = rows.other
        if const_expr(self.tree):
            if number & FAR == 0 and k < 32:
                mark = mark | APART
            if number & OPENS != 0:
                mark = mark | BEGINS
            if number & CLOSES != 0:
                mark = mark | JOINS
            # (Bits that lane 0's row brings to the extra one change nothing: all rows of this domain have joined.)
        return base, number & (CLOSES - 1), mark

    @cute.jit
    def add(self, at: Any, mark: Int32, acc: Any, part: Any, weight: Any) -> None:
        if const_expr(self.tree):
            words = []
            for u in range_constexpr(self.slices.vectors):
                words.extend(ptx.ld_shared_v4(at + u * 512))
            add_apart(self.slices.values, mark, acc, part, ptx.unpack(words, self.slices.dtype))
        else:
            OwnerAdder.add(self, at, mark, acc, part, weight)

    @cute.jit
    def add_encoded(self, stage: Any, mark: Int32, acc: Any, part: Any) -> None:
        wire: Any = self.wire
        if const_expr(self.tree):
            values = []
            for u in range_constexpr(self.slices.vectors):
                values.extend(numbers_at(wire, stage, u))
            add_apart(self.slices.values, mark, acc, part, values)
        else:
            OwnerAdder.add_encoded(self, stage, mark, acc, part)


@cute.jit
def add_apart(count: cutlass.Constexpr[int], mark: Int32, acc: Any, part: Any, values: Any) -> None:
    """Add values to the sum of this domain, if they belong to it, or to that of all."""
    if mark & BEGINS != 0:
        for i in range_constexpr(count):
            part[i] = Float32(0.0)
    if mark & APART != 0:
        for i in range_constexpr(count):
            part[i] = ptx.add_rn(part[i], values[i])
    else:
        for i in range_constexpr(count):
            acc[i] = ptx.add_rn(acc[i], values[i])
    if mark & JOINS != 0:
        for i in range_constexpr(count):
            acc[i] = ptx.add_rn(acc[i], part[i])
