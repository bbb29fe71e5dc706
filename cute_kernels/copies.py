"""The copies of a token, as its owner sees them: one for each rank that its ids name, numbered by ranks ascending."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute import arch

from .experts import holder_of
from .heap import Problem


class Copies(NamedTuple):
    """What a lane knows of the copies of a token, one of whose entries it has."""

    holder: Int32  # the rank that holds its expert, -1 for none
    number: Int32  # of the copy that goes there
    expected: Int32  # 1 if it is the first of the copy's lanes, and the copy has a row
    mask: Int32  # the numbers of copies that have a row, as bits; the same in all lanes


@cute.jit
def copies_of(problem: cutlass.Constexpr[Problem], expert: Int32, row: Int32) -> Copies:
    """By a warp: lane k has the k-th expert id of a token, and the row there, -1 where there is none."""
    holder = Int32(-1)
    if expert >= 0 and expert < problem.num_experts:
        holder = holder_of(problem, expert)
    same = arch.match_sync(0xFFFFFFFF, holder)
    first = Int32(holder >= 0 and (same & arch.lanemask_lt()) == 0)
    kept = arch.vote_ballot_sync(row >= 0)
    number = Int32(0)
    if const_expr(problem.world_size <= 32):
        named = Int32(0)
        if holder >= 0:
            named = Int32(1) << holder
        named = arch.warp_redux_sync(named, "or")
        number = Int32(arch.popc(named & ((Int32(1) << cutlass.max(holder, 0)) - 1)))
    else:
        firsts = arch.vote_ballot_sync(first != 0)
        for k in range_constexpr(problem.top_k):
            theirs = arch.shuffle_sync(holder, k)
            if (firsts >> k) & 1 != 0 and theirs < holder:
                number += 1
    expected = Int32(first != 0 and (same & kept) != 0)
    bit = Int32(0)
    if expected != 0:
        bit = Int32(1) << number
    return Copies(holder, number, expected, arch.warp_redux_sync(bit, "or"))
