"""Segments of the rows of a rank's experts: one for each expert, one after the other, or in slots of one size."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.cute import arch

TOGETHER = 4
"""Consecutive experts that a lane takes at a time: one scan over the warp serves all of them."""


def padded(count: Any, alignment: Any) -> Any:
    """Return the rows of a segment with `count` kept rows, a multiple of `alignment`."""
    return (count + alignment - 1) // alignment * alignment


@cute.jit
def write_segment(args: Any, local: Int32, begin: Int32, asked: Int32, kept: Int32) -> None:
    """By one thread: writes the end, the count and the drops of the segment of local expert `local`. It begins at row
    `begin`, `asked` entries name it, and `kept` of them have rows."""
    alignment = cutlass.max(args.alignment, 1)
    end = cutlass.min(begin + padded(asked, alignment), args.capacity)
    if args.slots > 0:
        end = begin + padded(kept, alignment)
    args.offs[local] = end
    args.counts[local] = kept
    args.dropped[local] = asked - kept


@cute.jit
def inclusive_sum(value: Int32) -> Int32:
    """By a warp: the sum of the lanes up to this one."""
    lane = arch.lane_idx()
    total = value
    for step in range_constexpr(5):
        other = arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            total += other
    return total


@cute.jit
def place_segments(tables: Any, experts: tuple[Int32, Int32], low: Int32 | int, settings: tuple[Int32, ...]) -> None:
    """By a warp: `tables.start` and `tables.limit` of one rank's experts from `tables.asked`: the first row of each
    segment, and the row behind the last one that fits.

    `experts` are the first of the rank, and the one behind its last; `low` is the expert that the tables begin with;
    `settings` are capacity, alignment and slots of the rank.
    """
    first, end = experts
    capacity, alignment, slots = settings
    alignment = cutlass.max(alignment, 1)
    lane = arch.lane_idx()
    carry = Int32(0)
    for chunk in cutlass.range(first, end, 32 * TOGETHER):
        e = chunk + lane * TOGETHER
        sizes = []
        for i in range_constexpr(TOGETHER):
            asked = Int32(0)
            if e + i < end:
                asked = tables.asked[e + i - low]
            sizes.append(padded(asked, alignment))
        mine = sizes[0]
        for i in range_constexpr(1, TOGETHER):
            mine += sizes[i]
        total = inclusive_sum(mine)
        begin = carry + total - mine
        for i in range_constexpr(TOGETHER):
            if e + i < end:
                start, limit = begin, capacity
                if slots > 0:
                    start = (e + i - first) * slots
                    limit = start + slots
                tables.start[e + i - low] = start
                tables.limit[e + i - low] = limit
            begin += sizes[i]
        carry += arch.shuffle_sync(total, 31)
