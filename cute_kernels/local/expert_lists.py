"""The lists of token-major rows: which rows each local expert has, in one launch; what they are: docs/token-major.md.

An *entry* is a (row, k), by rows. Every block looks at all entries and counts how many name each expert before its own
share of them, and in all, so that no block waits for another one. From the counts follows where each expert's list
begins. Then one warp goes through the block's share in order, 32 entries at a time, and gives each the next place of
its expert; the other warps fill what lies behind the last list.

Example: three rows of two entries, local ids 0 -1, 1 0 and 0 -1 (those of ../arrivals.py at rank 1), two experts,
alignment 1. Expert 0 is named by entries 0, 3 and 4, expert 1 by entry 2, so

    flat    0 3 4 2       entries of the places
    rows    0 1 2 1       rows of these: entry // 2
    places  0 -1  3 1  2 -1
    offs    3 4
"""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from .. import ptx
from ..ids import block_id, thread_id
from ..launch import Launched
from ..segments import inclusive_sum, padded
from ..views import Ints

WARPS = 32


def share_of(entries: Int32, blocks: Int32) -> Int32:
    """Return the number of entries of a block: whole steps of a warp, and therefore whole vectors of 16 bytes."""
    return (entries + blocks * 32 - 1) // (blocks * 32) * 32


class ExpertListsArgs(NamedTuple):
    """R rows, K experts a token, El local experts, L places. All tensors are int32."""

    local_idx: Ints  # [R, K], below 0: none
    rows: Ints  # [L]
    flat: Ints  # [L]
    places: Ints  # [R, K]
    offs: Ints  # [El]
    counts: Ints  # [El]
    dropped: Ints  # [El]
    entries: Int32  # R K
    top_k: Int32
    length: Int32  # L
    alignment: Int32
    blocks: Int32


class ListTables(NamedTuple):
    """In shared memory, int32 [El] but for the last."""

    before: Any  # entries that name each expert before this block's share; then those that have been gone through, too
    asked: Any  # entries behind the beginning of the share; then all of them
    begin: Any  # of each list
    last: Any  # [1] where the last list ends


@dataclass(frozen=True)
class MakeExpertLists(Launched):
    experts: int

    NAME: ClassVar[str] = "ep_expert_lists"
    Args: ClassVar[Any] = ExpertListsArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (WARPS * 32, 1, 1)}

    @cute.kernel
    def kernel(self, args: ExpertListsArgs) -> None:
        tid = thread_id()
        bid = block_id()
        smem = cutlass.memory.SmemAllocator()
        sizes = (self.experts, self.experts, self.experts, 1)
        tables = ListTables(*(smem.allocate_tensor(Int32, cute.make_layout(size)) for size in sizes))
        share = share_of(args.entries, args.blocks)
        first = cutlass.min(bid * share, args.entries)
        end = cutlass.min(first + share, args.entries)
        self.count(args, tables, tid, first)
        arch.sync_threads()
        if tid < 32:
            self.begin(args, tables, bid == 0)
        arch.sync_threads()
        if tid < 32:
            self.fill(args, tables, first, end)
        else:
            threads = (WARPS - 1) * 32
            for at in cutlass.range(tables.last[0] + bid * threads + tid - 32, args.length, args.blocks * threads):
                args.rows[at] = Int32(0)
                args.flat[at] = args.entries

    @cute.jit
    def count(self, args: ExpertListsArgs, tables: ListTables, tid: Int32, first: Int32) -> None:
        """By the whole block."""
        for e in cutlass.range(tid, self.experts, WARPS * 32):
            tables.before[e] = Int32(0)
            tables.asked[e] = Int32(0)
        arch.sync_threads()
        i = tid * 4
        while i + 3 < args.entries:
            for word in ptx.ld_v4(args.local_idx.at(i)):
                self.count_one(tables, Int32(word), i < first)
            i += WARPS * 128
        i = args.entries // 4 * 4 + tid
        if i < args.entries:
            self.count_one(tables, args.local_idx[i], i < first)

    @cute.jit
    def count_one(self, tables: ListTables, expert: Int32, before: Any) -> None:
        if expert >= 0 and expert < self.experts:
            if before:
                ptx.add_shared(tables.before.iterator + expert, Int32(1))
            else:
                ptx.add_shared(tables.asked.iterator + expert, Int32(1))

    @cute.jit
    def begin(self, args: ExpertListsArgs, tables: ListTables, writes: Any) -> None:
        """By a warp: where lists begin, 32 experts at a time; by one block the tensors of experts."""
        lane = Int32(arch.lane_idx())
        carry = Int32(0)
        for first in cutlass.range(0, self.experts, 32):
            e = first + lane
            asked = Int32(0)
            if e < self.experts:
                asked = tables.before[e] + tables.asked[e]
            size = padded(asked, args.alignment)
            total = inclusive_sum(size)
            begin = cutlass.min(carry + total - size, args.length)
            if e < self.experts:
                kept = cutlass.min(asked, args.length - begin)
                tables.asked[e] = asked
                tables.begin[e] = begin
                if writes:
                    args.offs[e] = begin + padded(kept, args.alignment)
                    args.counts[e] = kept
                    args.dropped[e] = asked - kept
            carry += arch.shuffle_sync(total, 31)
        if lane == 0:
            tables.last[0] = cutlass.min(carry, args.length)

    @cute.jit
    def fill(self, args: ExpertListsArgs, tables: ListTables, first: Int32, end: Int32) -> None:
        """By a warp: the places of a block's entries, and the padding behind the last of an expert's."""
        lane = Int32(arch.lane_idx())
        coming = self.expert_of(args, first + lane, end)
        for start in cutlass.range(first, end, 32):
            i, expert = start + lane, Int32(coming)
            coming = self.expert_of(args, i + 32, end)  # under way meanwhile
            same = Int32(arch.match_sync(0xFFFFFFFF, expert))
            earlier = Int32(arch.popc(same & Int32(arch.lanemask_lt())))
            number = earlier
            if expert >= 0:
                number += tables.before[expert]
            arch.sync_warp()  # all lanes have read how many came before these 32
            if i < end:
                place = Int32(-1)
                if expert >= 0:
                    if earlier == 0:
                        tables.before[expert] = number + Int32(arch.popc(same))
                    place = self.take(args, tables, i, expert, number)
                args.places[i] = place
            arch.sync_warp()  # what has been counted is seen by those of the next 32

    @cute.jit
    def expert_of(self, args: ExpertListsArgs, entry: Int32, end: Int32) -> Int32:
        """Return the expert of an entry, or -1 if it names none."""
        expert = Int32(-1)
        if entry < end:
            expert = args.local_idx[entry]
        if expert >= self.experts or expert < 0:
            expert = Int32(-1)
        return expert

    @cute.jit
    def take(self, args: ExpertListsArgs, tables: ListTables, i: Int32, expert: Int32, number: Int32) -> Int32:
        """By a lane: the place of an expert's entry of that number, -1 where the list has no more."""
        place = Int32(-1)
        begin = tables.begin[expert]
        kept = cutlass.min(tables.asked[expert], args.length - begin)
        if number < kept:
            place = begin + number
            row = i // args.top_k
            self.put(args, place, row, i)
            if number == kept - 1:
                for at in cutlass.range(place + 1, begin + padded(kept, args.alignment), 1):
                    self.put(args, at, row, args.entries)
        return place

    @cute.jit
    def put(self, args: ExpertListsArgs, place: Int32, row: Int32, flat: Int32) -> None:
        args.rows[place] = row
        args.flat[place] = flat
