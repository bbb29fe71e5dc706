"""Surplus blocks, for a rank that has more rows than others.

The number of rows of a rank is only known on the device. A dispatch is therefore launched with more blocks than an
average rank needs, and those that have no work according to this rank's lists of arrivals exit immediately. In a
combine, blocks that would otherwise sum join those that push. Which blocks join follows from the lists alone, so all
blocks of the grid compute the same number.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute import arch

from ..arrivals import lists
from ..ids import thread_id
from ..sync import Ranks


class BlockBudget(NamedTuple):
    """Numbers of blocks of a kernel, and the load that they are made for."""

    blocks: Int32  # that take part in any case
    expected: Int32  # load of an average rank, for which they are made
    most: Int32  # blocks that may join them


class Parts(NamedTuple):
    """Numbers from which a block learns how many blocks take part in an operation."""

    ranks: Ranks
    arrivals: Int64
    num_rows: Int32
    always: Int32  # how many in any case
    share: BlockBudget
    found: Any  # [1] in shared memory


@cute.jit
def count_parts(parts: Parts, of_copy: cutlass.Constexpr[float]) -> None:
    """By one thread, and a barrier before `found` is read. A row here counts as one, a copy as `of_copy`. Up to a tenth
    more than expected needs nobody; from there on blocks follow the load."""
    ranks, arrivals, num_rows, always, share, found = parts
    given = lists(arrivals, num_rows)
    copies = given.sources[ranks.heap.problem.world_size]
    copies = cutlass.min(cutlass.max(copies, 0), num_rows)
    rows = cutlass.min(cutlass.max(given.copies.first[copies], 0), num_rows)
    load = Int64(rows) + Int64(copies) * int(of_copy * 64) // 64
    expected = Int64(cutlass.max(share.expected, 1))
    more = Int64(0)
    if load * 10 > expected * 11:
        more = cutlass.min((share.blocks * load + expected - 1) // expected - share.blocks, Int64(share.most))
    found[0] = always + Int32(more)


@cute.jit
def takes_part(parts: Parts, number: Int32, of_copy: cutlass.Constexpr[float]) -> Boolean:
    """By a whole block, the `number`-th: whether it takes part. Only those that may not have to ask."""
    part = Boolean(True)
    if number >= parts.always:
        if thread_id() == 0:
            count_parts(parts, of_copy)
        arch.sync_threads()
        part = number < parts.found[0]
    return part
