"""The sums that a rank sends: copies of other ranks' tokens that have rows here, looked up in the route's lists of
arrivals (../arrivals.py). `args`: those of a combine."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import sync
from ..arrivals import Copy, Lists, guarded, lists, token_of
from ..copies import lowest
from ..heap import Problem

COMPARED = 8
"""The most ranks among which the source of a copy is found by comparisons, which take less time than a division."""


class Found(NamedTuple):
    """One of the copies that a warp is to send, as lane i knows the i-th."""

    begin: Int32  # of its rows in `owned`
    rows: Int32  # how many; 0 where there is nothing to send
    owner: Int32
    line: Int32  # of the owner's staging rows


class Near(NamedTuple):
    """64 rows of `owned`: lane i holds the i-th from `begin` on and the (32 + i)-th."""

    begin: Int32
    rows: Int32
    behind: Int32


@cute.jit
def find_copy(
    kernel: cutlass.Constexpr[Any], ranks: sync.Ranks, args: Any, item: Int32, each: cutlass.Constexpr[int]
) -> tuple[Found, Near]:
    """By a whole warp: the copy of a lane's `item`, of which there are `each` for a copy, and rows about where
    those of lane 0 should lie."""
    p = ranks.heap.problem
    at = lists(args.arrivals, args.num_rows)
    total = at.sources[p.world_size]
    index = index_of_item(p, ranks.rank, args.max_tokens, item // each)
    copy = Copy(Int32(0), Int32(0), Int32(0), Int32(0))
    listed = item < args.max_tokens * (p.world_size * each) and index < args.num_rows
    if listed:
        copy = copy_at(p, at, index, args.max_tokens)
    near = rows_near(p, args, arch.shuffle_sync(index, 0))
    if not listed or index >= total:
        copy = Copy(Int32(0), Int32(0), Int32(0), Int32(0))
    copy = guarded(ranks, args.num_rows, args.max_tokens, copy)
    token, number = token_of(p, copy, args.max_tokens)
    rows = copy.rows
    if copy.source == ranks.rank:
        rows = Int32(0)  # copies of this rank's own tokens go nowhere
    return Found(copy.begin, rows, copy.source, kernel.line_of(ranks, number, token)), near


@cute.jit
def rows_near(problem: cutlass.Constexpr[Problem], args: Any, index: Int32) -> Near:
    """By a whole warp: rows about where those of the copy `index` should lie, if all experts are as likely. Most
    warps need no others, and do not wait once more until they know."""
    lane = arch.lane_idx()
    expected = index * rows_of_copies(problem, 64) // 64
    if args.num_rows <= args.max_tokens * problem.world_size:
        expected = index  # where there is no more room than for one each, as of token-major rows
    begin = cutlass.max(expected - 24, 0)
    last = cutlass.max(args.num_rows - 1, 0)
    owned = lists(args.arrivals, args.num_rows).owned
    row, _ = owned[cutlass.min(begin + lane, last)]
    behind, _ = owned[cutlass.min(begin + 32 + lane, last)]
    return Near(begin, row, behind)


def rows_of_copies(problem: Problem, copies: int) -> int:
    """Return the expected number of rows of so many copies, whose tokens choose different experts, all equally
    likely."""
    experts, k = problem.num_experts, min(problem.top_k, problem.num_experts)
    missed = sum(math.comb(experts - held, k) / math.comb(experts, k) for held in problem.experts_per_rank)
    return round(copies * k / (problem.world_size - missed))


@cute.jit
def index_of_item(problem: cutlass.Constexpr[Problem], rank: Int32, max_tokens: Int32, number: Int32) -> Int32:
    """Return the position of the `number`-th copy in the list of at most W x max_tokens. Sources have about equally
    many copies, in their order: consecutive numbers alternate among the other ranks, so that all links are busy, and
    end with this rank's own copies. At rank 1 of 3, with two tokens each, the numbers 0, 1, ... are at 4 0 5 1 2 3."""
    others = max(problem.world_size - 1, 1)
    part = (rank + 1 + number % others) % problem.world_size
    index = part * max_tokens + number // others
    if number >= others * max_tokens:
        index = rank * max_tokens + number - others * max_tokens
    return index


@cute.jit
def copy_at(problem: cutlass.Constexpr[Problem], at: Lists, index: Int32, max_tokens: Int32) -> Copy:
    """By each lane: copy `index` of the list, garbage if there are not so many."""
    begin, home, end = at.copies.with_next(index)
    each = Uint32(max_tokens) * problem.most_copies  # homes of a source
    source = Int32(0)
    if const_expr(problem.world_size > COMPARED):
        source = Int32(Uint32(home) // each)
    else:
        for rank in range_constexpr(1, problem.world_size):
            source += Int32(Uint32(home) >= rank * each)
    return Copy(begin, end, home, source)


@cute.jit
def row_at(at: Lists, near: Near, found: Found, lanes: Int32) -> Int32:
    """By a whole warp: a lane's row of the copy that the lowest of `lanes` has found; none if there is no lane."""
    lane = arch.lane_idx()
    i = lowest(lanes) & 31
    begin, rows = arch.shuffle_sync(found.begin, i), arch.shuffle_sync(found.rows, i)
    if lanes == 0:
        rows = Int32(0)
    row = Int32(-1)
    first = begin - near.begin
    if first >= 0 and first + rows <= 64:
        mine = first + lane
        row = arch.shuffle_sync(near.rows, mine & 31)
        behind = arch.shuffle_sync(near.behind, mine & 31)
        if mine >= 32:
            row = behind
        if lane >= rows:
            row = Int32(-1)
    elif lane < rows:
        row, _ = at.owned[begin + lane]
    return row
