"""Surplus blocks, for a rank that has more rows than others.

The number of rows of a rank is only known on the device. A dispatch is therefore launched with more blocks than an
average rank needs, and those that have no work according to this rank's lists of arrivals exit immediately. In a
combine, blocks that would otherwise sum join those that push. Which blocks join follows from the lists alone, so all
blocks of the grid compute the same number.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..arrivals import lists
from ..sync import Ranks


@cute.jit
def surplus_blocks(ranks: Ranks, args: Any, blocks: Int32, most: Int32, of_copy: cutlass.Constexpr[float]) -> Int32:
    """By one thread: how many surplus blocks, at most `most`, join the `blocks` that are made for the load
    `args.expected` of an average rank. `args`: those of a pull or a combine. A row here counts as one, a copy as
    `of_copy`. Up to a tenth more than expected needs nobody; from there on blocks follow the load."""
    given = lists(args.arrivals, args.num_rows)
    copies = given.sources[ranks.heap.problem.world_size]
    copies = cutlass.min(cutlass.max(copies, 0), args.num_rows)
    rows = cutlass.min(cutlass.max(given.copies.first[copies], 0), args.num_rows)
    load = Int64(rows) + Int64(copies) * int(of_copy * 64) // 64
    expected = Int64(cutlass.max(args.expected, 1))
    more = Int64(0)
    if load * 10 > expected * 11:
        more = cutlass.min((blocks * load + expected - 1) // expected - blocks, Int64(most))
    return Int32(more)
