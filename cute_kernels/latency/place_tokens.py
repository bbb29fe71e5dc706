"""Placing of token-major rows from the expert ids of all ranks: one row for each token that names an expert of this
rank.

The row of a token is the number of earlier tokens, in the order of (source rank, token), that name an expert of this
rank. Each block that stores rows computes it on its own, one token for each lane. Two blocks write what no row depends
on: the rows of this rank's tokens at all ranks, and the lists of arrivals.

In the example of ../arrivals.py, rank 1 has the rows 0 1 for the tokens of rank 0, and 2 -1 for its own, of which the
second names no expert here. `copies` is [0, 1] [1, 2] [2, 5] and `owned` [0, 0] [1, 2] [2, 4], a row for each copy.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..arrivals import lists
from ..experts import holder_of, local_experts
from ..heap import CAPACITY, Problem
from ..ids import thread_id, warp_id
from ..sync import Ranks
from ..token_major import write_counts
from .lists import copy_number, entry_of
from .packets import THREADS, WARPS
from .place import RouteTables, asked_expert, count_up, share_of_warp
from .sizes import placed


@cute.jit
def place_tokens(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any) -> Int32:
    """By the whole block, behind a barrier after `keep_route`; ends with a barrier. How many copies ask for a row here.

    Then `rows` of (source, token) at source * max_tokens + token is the row, or -1; `start` of each source is how many
    rows lie before its first one; and `asked` is cleared for `write_copies`. Each warp takes consecutive tokens.
    """
    lane = arch.lane_idx()
    warp = warp_id()
    for i in cutlass.range(thread_id(), placed(problem), THREADS):
        tables.start[i] = Int32(0)
        tables.asked[i] = Int32(0)
    mine = share_of_warp(warp, (args.max_tokens * problem.world_size + 31) // 32)
    before = count_tokens(problem, tables, args, mine)
    if lane == 0:
        tables.found[warp] = before
    # All warps' counts come before the reads of any, and what was cleared above before what is written below.
    arch.sync_threads()
    found = Int32(0)
    if lane < WARPS:
        found = tables.found[lane]
    total = arch.warp_redux_sync(found, "add")
    if lane >= warp:
        found = Int32(0)
    number_tokens(problem, tables, args, mine, arch.warp_redux_sync(found, "add"))
    arch.sync_threads()
    return total


@cute.jit
def count_tokens(
    problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any, mine: tuple[Int32, Int32]
) -> Int32:  # fmt: skip
    """By a warp: how many of its tokens (chunks of 32, from mine[0] to mine[1]) name an expert here. `rows` of a token
    becomes twice the number of the warp's earlier ones that do, and 1 more if it does itself."""
    lane = arch.lane_idx()
    first, end = local_experts(problem, args.ranks.rank)
    tokens = args.max_tokens * problem.world_size
    before = Int32(0)
    for chunk in cutlass.range(mine[0], mine[1], 1):
        token = chunk * 32 + lane
        comes = Boolean(False)
        if token < tokens:
            source = token // args.max_tokens
            entry = (token - source * args.max_tokens) * problem.top_k
            for k in range_constexpr(problem.top_k):
                if asked_expert(tables, source, entry + k, first, end) >= 0:
                    comes = Boolean(True)
        coming = arch.vote_ballot_sync(comes)
        if token < tokens:
            number = before + Int32(arch.popc(coming & arch.lanemask_lt()))
            tables.rows[token] = 2 * number + Int32(comes)
        before += Int32(arch.popc(coming))
    return before


@cute.jit
def number_tokens(
    problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any, mine: tuple[Int32, Int32], before: Int32
) -> None:  # fmt: skip
    """By a warp, before whose tokens so many rows come: `rows` of its tokens becomes their rows, -1 for none."""
    for chunk in cutlass.range(mine[0], mine[1], 1):
        token = chunk * 32 + arch.lane_idx()
        if token < args.max_tokens * problem.world_size:
            number = tables.rows[token]
            row = before + (number >> 1)
            source = token // args.max_tokens
            if token == source * args.max_tokens:
                tables.start[source] = cutlass.min(row, args.capacity)
            if number & 1 == 0 or row >= args.capacity:
                row = Int32(-1)
            tables.rows[token] = row


@cute.jit
def write_send_rows(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any) -> None:
    """By the whole block, behind a barrier after `clear_counts` of as many as there are ranks: the rows that this
    rank's tokens have at all ranks, each at the first k that names the rank.

    Each warp takes consecutive groups of the tokens up to this rank's last, twice: it counts those that go to each
    rank, and, when what the warps before it have is added up, numbers them.
    """
    lane = arch.lane_idx()
    warp = warp_id()
    world_size, top_k = problem.world_size, problem.top_k
    own = args.ranks.rank * args.max_tokens
    groups = (own + args.max_tokens + 32 // top_k - 1) // (32 // top_k)
    begin, end = share_of_warp(warp, groups)
    for turn in cutlass.range(2):
        for number in cutlass.range(begin, end, 1):
            token, expert = entry_of(problem, tables, args, number)
            holder = Int32(holder_of(problem, expert))
            key = lane // top_k * world_size + holder
            if expert < 0:
                key = Int32(-1)
            same = Int32(arch.match_sync(0xFFFFFFFF, key)) & Int32(arch.lanemask_lt())
            if expert < 0 or same != 0:
                holder = Int32(-1)
            asking = Int32(arch.match_sync(0xFFFFFFFF, holder))
            row = count_up(tables.earlier, warp * world_size + holder, asking, holder >= 0)
            mine = lane < 32 // top_k * top_k and token >= own and token < own + args.tokens
            if turn == 1 and mine:
                if holder >= 0:
                    if row >= Int32(tables.route[holder * tables.route_stride + CAPACITY]):
                        row = Int32(-1)
                args.send_rows[(token - own) * top_k + lane % top_k] = row
        if turn == 0:
            # All warps' counts come before they are added up, and the sums before the numbers.
            arch.sync_threads()
            for r in cutlass.range(thread_id(), world_size, THREADS):
                total = Int32(0)
                for w in range_constexpr(WARPS):
                    n = Int32(tables.earlier[w * world_size + r])
                    tables.earlier[w * world_size + r] = Uint16(total)
                    total += n
            arch.sync_threads()


@cute.jit
def write_copies(ranks: Ranks, tables: RouteTables, args: Any, total: Int32, weights: cutlass.Constexpr[bool]) -> None:
    """By a whole block behind `place_tokens`, which has found `total` copies: the lists of what arrives, local ids, the
    weights of this rank's own tokens, and how many (row, k) name each expert. Warps take groups of tokens in turn."""
    p = ranks.heap.problem
    tid = thread_id()
    lane = arch.lane_idx()
    warp = warp_id()
    out = lists(args.arrivals, args.capacity)
    first, end = local_experts(p, ranks.rank)
    tokens = args.max_tokens * p.world_size
    groups = (tokens + 32 // p.top_k - 1) // (32 // p.top_k)
    k = lane % p.top_k
    for number in cutlass.range(warp, groups, WARPS):
        token, expert = entry_of(p, tables, args, number)
        row, local = Int32(-1), Int32(-1)
        if lane < 32 // p.top_k * p.top_k and token < tokens:
            row = tables.rows[token]
        if expert >= first and expert < end:
            local = expert - first
        here = arch.vote_ballot_sync(local >= 0)
        earlier = Uint32(here & arch.lanemask_lt()) >> Uint32(lane - k)
        home = token * p.most_copies + copy_number(p, ranks.rank, expert)
        if row >= 0:
            at = Int64(row) * p.top_k + k
            args.recv_idx[at] = local
            if const_expr(weights):
                mine = token - ranks.rank * args.max_tokens
                if mine >= 0 and mine < args.max_tokens:
                    weight = Int32(0)
                    if local >= 0:
                        weight = args.topk_weights.bits[mine * p.top_k + k]
                    args.recv_weights.bits[at] = weight
            if local >= 0 and earlier == 0:
                out.copies[row] = row, home
                out.owned[row] = row, token * p.top_k + k
        if local >= 0:
            ptx.add_shared(tables.asked.iterator + local, Int32(1))
            if row < 0:
                ptx.add_shared(tables.asked.iterator + (p.local_experts + local), Int32(1))
    kept = cutlass.min(total, args.capacity)
    for i in cutlass.range(tid, p.world_size, THREADS):
        out.sources[i] = tables.start[i]
    if tid == 0:
        out.sources[p.world_size] = kept
        out.copies[kept] = kept, Int32(-1)
    # All warps' counts come before their sums.
    arch.sync_threads()
    if warp == 0:
        write_counts(ranks, tables.asked, args)
