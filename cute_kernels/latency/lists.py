"""The lists of arrivals of a route (../arrivals.py), written by a block that has placed the entries of this rank's
experts.

Lanes look at the entries of whole tokens: 16 tokens of two entries. In the example of ../arrivals.py, rank 1 sees all
four tokens at once. Lanes 0, 2, 3 and 4 keep rows (0, 3, 1, 2), and lanes 0, 2 and 4 are the first of their tokens to
keep one, so these write copies 0, 1 and 2, which begin at `owned` 0, 1 and 3.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute import arch

from .. import arrivals
from ..experts import holder_of, local_experts
from ..heap import Problem
from ..ids import thread_id, warp_id
from .packets import THREADS, WARPS, WarpShare
from .place import RouteTables, asked_expert, share_of_warp, source_stride


class Group(NamedTuple):
    """Whole tokens that a warp looks at together, an entry a lane: what a lane knows of its entry."""

    token: Int32  # source rank × max_tokens + token
    expert: Int32  # of all experts; -1 for none
    row: Int32  # the row here that the entry keeps, or -1
    kept: Int32  # lanes whose entries keep rows here
    firsts: Int32  # lanes whose entries are the first to keep one of their token


@cute.jit
def entry_of(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any, number: Int32) -> tuple[Int32, Int32]:
    """By a whole warp: the token and the expert of a lane's entry in the group of that number; -1 where there is no
    entry, or it names none. All sources' tokens follow each other. Entries of a token never lie in two groups."""
    top_k = problem.top_k
    lane = arch.lane_idx()
    token = number * (32 // top_k) + lane // top_k
    expert = Int32(-1)
    if lane < 32 // top_k * top_k and token < args.max_tokens * problem.world_size:
        source = token // args.max_tokens
        entry = (token - source * args.max_tokens) * top_k + lane % top_k
        expert = asked_expert(tables, source, entry, Int32(0), Int32(problem.num_experts))
    return token, expert


@cute.jit
def group_of(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any, number: Int32) -> Group:
    """By a whole warp: what it knows of the group of that number."""
    top_k = problem.top_k
    lane = arch.lane_idx()
    entries = args.max_tokens * top_k
    token, expert = entry_of(problem, tables, args, number)
    row = Int32(-1)
    first, end = local_experts(problem, args.ranks.rank)
    if expert >= first and expert < end:
        source = token // args.max_tokens
        entry = (token - source * args.max_tokens) * top_k + lane % top_k
        row = tables.rows[source * source_stride(entries) + entry]
    kept = arch.vote_ballot_sync(row >= 0)
    earlier = Uint32(kept & arch.lanemask_lt()) >> Uint32(lane // top_k * top_k)
    firsts = arch.vote_ballot_sync(row >= 0 and earlier == 0)
    return Group(token, expert, row, Int32(kept), Int32(firsts))


@cute.jit
def copy_number(problem: cutlass.Constexpr[Problem], rank: Int32, expert: Int32) -> Int32:
    """By a whole warp, of a group: how many ranks lower than this one a lane's token names."""
    top_k = problem.top_k
    lane = arch.lane_idx()
    holder = Int32(holder_of(problem, expert))
    lower = expert >= 0 and holder < rank
    # Lanes of one token that name one holder; those that name none match nobody that counts.
    key = lane // top_k * problem.world_size + holder
    if not lower:
        key = Int32(-1)
    same = arch.match_sync(0xFFFFFFFF, key)
    leaders = arch.vote_ballot_sync(lower and (Int32(same) & Int32(arch.lanemask_lt())) == 0)
    return Int32(arch.popc((Uint32(leaders) >> Uint32(lane // top_k * top_k)) & Uint32((1 << top_k) - 1)))


@cute.jit
def write_lists(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any) -> None:
    """By a whole block behind `place_entries`, for this rank's experts or for all.

    Each warp takes consecutive groups of tokens, twice: it counts what they keep, and, when it has added up what the
    warps before it have, writes.
    """
    tid = thread_id()
    lane = arch.lane_idx()
    warp = warp_id()
    lists = arrivals.lists(args.arrivals, args.capacity)
    tokens = args.max_tokens * problem.world_size
    groups = (tokens + 32 // problem.top_k - 1) // (32 // problem.top_k)
    begin, end = share_of_warp(warp, groups)
    copies, rows = Int32(0), Int32(0)
    group = Group(Int32(0), Int32(-1), Int32(-1), Int32(0), Int32(0))
    for turn in cutlass.range(2):
        for number in cutlass.range(begin, end, 1):
            if turn == 0 or begin + 1 < end:
                group = group_of(problem, tables, args, number)
            if turn == 1:
                write_group(problem, args, group, copies, rows)
            copies += Int32(arch.popc(group.firsts))
            rows += Int32(arch.popc(group.kept))
        if turn == 0:
            if lane == 0:
                tables.found[warp] = copies
                tables.found[WARPS + warp] = rows
            # All warps' counts come before the reads of any.
            arch.sync_threads()
            copies, rows = Int32(0), Int32(0)
            if lane < warp:
                copies = tables.found[lane]
                rows = tables.found[WARPS + lane]
            copies = arch.warp_redux_sync(copies, "add")
            rows = arch.warp_redux_sync(rows, "add")
    if warp == WARPS - 1 and lane == 0:
        # The last warp has added up everything.
        lists.copies[copies] = rows, Int32(-1)
        lists.sources[problem.world_size] = copies
    if args.max_tokens == 0 and tid < problem.world_size:
        lists.sources[tid] = Int32(0)


@cute.jit
def write_group(problem: cutlass.Constexpr[Problem], args: Any, group: Group, copies: Int32, rows: Int32) -> None:
    """By a whole warp: a group's part of the lists, before which so many copies and rows come."""
    lane = arch.lane_idx()
    lists = arrivals.lists(args.arrivals, args.capacity)
    before = Int32(arch.lanemask_lt())
    copy = copies + Int32(arch.popc(group.firsts & before))
    at = rows + Int32(arch.popc(group.kept & before))
    home = group.token * problem.most_copies + copy_number(problem, args.ranks.rank, group.expert)
    if group.row >= 0:
        lists.owned[at] = group.row, group.token * problem.top_k + lane % problem.top_k
    if (group.firsts >> lane) & 1 != 0:
        lists.copies[copy] = at, home
    begins_source(problem, args, group.token, copy)


@cute.jit
def begins_source(problem: cutlass.Constexpr[Problem], args: Any, token: Int32, copy: Int32) -> None:
    """By the lane of a token's first entry: if the token is a source's first, `copy` is how many come before it."""
    lane = arch.lane_idx()
    first_entry = lane % problem.top_k == 0 and lane < 32 // problem.top_k * problem.top_k
    if first_entry and token < args.max_tokens * problem.world_size:
        source = token // args.max_tokens
        if token == source * args.max_tokens:
            arrivals.lists(args.arrivals, args.capacity).sources[source] = copy


@cute.jit
def own_weights(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any, share: WarpShare) -> None:
    """Store a block's share of the weights of rows that stay on this rank."""
    entries = args.max_tokens * problem.top_k
    for i in cutlass.range(share.block * THREADS + thread_id(), args.tokens * problem.top_k, share.blocks * THREADS):
        row = tables.rows[args.ranks.rank * source_stride(entries) + i]
        if row >= 0:
            args.recv_weights.bits[row] = args.topk_weights.bits[i]
