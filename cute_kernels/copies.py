"""The ranks that a token reaches, and its copies as its owner sees them: one for each rank that its ids name, numbered
in ascending order of ranks.

Sets of ranks are words of 32 bits, one for each 32 ranks, the same in all lanes of a warp.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr
from cutlass.cute import arch

from .experts import holder_of
from .heap import Problem

RankSet = tuple[Int32, ...]
"""A set of ranks."""
MOST_WORDS = 4
"""Largest number of words of a set that a warp keeps in registers during a sum. Larger sets are distributed over its
lanes and searched word by word."""


def words_of(problem: Problem) -> int:
    """Return the number of words of a set of ranks."""
    return -(-problem.world_size // 32)


@cute.jit
def set_of(problem: cutlass.Constexpr[Problem], rank: Int32, member: Boolean) -> RankSet:
    """By a whole warp: the ranks of those lanes that have a member."""
    words = []
    for i in range_constexpr(words_of(problem)):
        bit = Int32(0)
        here = member
        if const_expr(words_of(problem) > 1):
            here = member and rank >> 5 == i
        if here:
            bit = Int32(1) << (rank & 31)
        words.append(arch.warp_redux_sync(bit, "or"))
    return tuple(words)


@cute.jit
def below(ranks: RankSet, rank: Int32) -> Int32:
    """Return how many ranks of the set are lower than `rank`."""
    count = Int32(0)
    for i in range_constexpr(len(ranks)):
        mask = (Int32(1) << (rank & 31)) - 1
        if const_expr(len(ranks) > 1):
            if rank >> 5 > i:
                mask = Int32(-1)
            if rank >> 5 < i:
                mask = Int32(0)
        count += arch.popc(ranks[i] & mask)
    return count


def lowest(word: Any) -> Int32:
    """Return the index of a word's lowest set bit."""
    return Int32(arch.popc((word & -word) - 1))


def pop_lowest(word: Any) -> tuple[Int32, Any]:
    """Return the index of a word's lowest set bit, and the word without it."""
    return lowest(word), word & (word - 1)


@cute.jit
def nth_bit(word: Int32, n: Int32) -> Int32:
    """Return the index of the `n`-th set bit of a word, counted from 0 at the lowest one."""
    left = Int32(word)
    for _ in cutlass.range(n):
        left = left & (left - 1)
    return lowest(left)


@cute.jit
def entry_of(problem: cutlass.Constexpr[Problem], args: Any, token: Int32, exists: Boolean) -> tuple[Int32, Int32]:
    """By each lane: the row and the expert of the entry (of k) of one of this rank's tokens, from `send_rows` and
    `topk_idx` among `args`; -1 for both if there is none."""
    row, expert = Int32(-1), Int32(-1)
    if exists and arch.lane_idx() < problem.top_k:
        entry = token * problem.top_k + arch.lane_idx()
        row = args.send_rows[entry]
        expert = args.topk_idx[entry]
    return row, expert


class Copies(NamedTuple):
    """The copies of a token, as a lane with one of its entries knows them."""

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
    kept = arch.vote_ballot_sync(row >= 0)
    opens = holder >= 0 and (same & arch.lanemask_lt()) == 0
    number = Int32(0)
    if const_expr(words_of(problem) <= MOST_WORDS):
        number = below(set_of(problem, holder, holder >= 0), cutlass.max(holder, 0))
    else:
        opening = arch.vote_ballot_sync(opens)
        for k in range_constexpr(problem.top_k):
            theirs = arch.shuffle_sync(holder, k)
            if (opening >> k) & 1 != 0 and theirs < holder:
                number += 1
    expected = Int32(opens and (same & kept) != 0)
    bit = Int32(0)
    if expected != 0:
        bit = Int32(1) << number
    return Copies(holder, number, expected, arch.warp_redux_sync(bit, "or"))
