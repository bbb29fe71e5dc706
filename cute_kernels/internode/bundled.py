"""Rows of the latency kernels that are sent together to a rank of another NVLink domain: up to `wire.rows` in one put.

The rows of one rank for another are numbered in the order of their tokens. They are contiguous at [source
rank][number], and the word of a put is that of its first row, whose number is a multiple of `wire.rows`. Both ends know
the numbers in advance: in a dispatch from the source's expert ids, so that dropped rows, which the source does not
know, are counted as well; in a combine from the rows that the route keeps, so that a copy without rows has no sum.

Example with `wire.rows` 2: tokens 1, 4 and 5 of a rank name experts of another one. Their rows have the numbers 0, 1
and 2. One put brings rows 0 and 1 and sets word 0, another brings row 2 and sets word 2.

One block assembles one put. No block waits for another block before a put, and a row only waits for the other rows of
its put.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint16, range_constexpr
from cutlass.cute import arch

from .. import sync
from ..copies import lowest
from ..domains import is_near
from ..experts import local_experts
from ..heap import Problem
from ..latency.packets import WARPS
from ..latency.place import RouteTables, asked_expert


def bundles(problem: Problem, tokens: Int32) -> Int32:
    """Return the largest number of puts of the rows of so many tokens of a rank to all others."""
    return (problem.world_size - 1) * ((tokens + problem.wire.rows - 1) // problem.wire.rows)


def bundle_of(ranks: sync.Ranks, item: Int32 | int) -> tuple[Int32, Int32]:
    """Return the destination rank of the put with that number, and the number of its first row. The first puts for all
    ranks come first."""
    others = ranks.world_size - 1
    number = item // others
    return (ranks.rank + 1 + item - number * others) % ranks.world_size, number * ranks.heap.problem.wire.rows


def first_of(problem: Problem, number: Int32) -> Int32:
    """Return the number of the first row in a row's put."""
    return number // problem.wire.rows * problem.wire.rows


@cute.jit
def tokens_for(problem: cutlass.Constexpr[Problem], args: Any, rank: Int32, first: Int32) -> tuple[Int32, Int32]:
    """By a whole warp of a dispatch: how many rows for that rank are in the put whose first row has the number `first`,
    and the token of each, in a lane."""
    lane = Int32(arch.lane_idx())
    low, high = local_experts(problem, rank)
    mine, number = Int32(0), -first  # of the next row, counted from the first
    begin = Int32(0)
    while begin < args.tokens and number < problem.wire.rows:
        names = Boolean(False)
        for k in range_constexpr(problem.top_k):
            if begin + lane < args.tokens:
                expert = args.topk_idx[(begin + lane) * problem.top_k + k]
                names = names or (expert >= low and expert < high)
        left = Int32(arch.vote_ballot_sync(names))
        while left != 0:
            if number == lane:
                mine = begin + lowest(left)
            number += 1
            left = left & (left - 1)
        begin += 32
    return cutlass.min(cutlass.max(number, 0), problem.wire.rows), mine


@cute.jit
def number_rows(ranks: sync.Ranks, tables: RouteTables, max_tokens: Int32, warp: Int32) -> None:
    """By a whole block of a dispatch that has all routes, with a barrier behind it: the number of each token's row, if
    one comes here, among those of its source. Rows of this rank's own domain, which stores bring, have their tokens'.
    """
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    low, high = local_experts(p, ranks.rank)
    for source in cutlass.range(warp, p.world_size, WARPS):
        near = is_near(ranks, source)
        before = Int32(0)
        for begin in cutlass.range(0, max_tokens, 32):
            token = begin + lane
            names = Boolean(False)
            for k in range_constexpr(p.top_k):
                expert = asked_expert(tables, source, token * p.top_k + k, low, high)
                names = names or expert >= 0
            members = Int32(arch.vote_ballot_sync(names))
            number = before + Int32(arch.popc(members & Int32(arch.lanemask_lt())))
            if near:
                number = token
            if token < max_tokens:
                tables.order[source * ranks.heap.tokens + token] = Uint16(number)
            before += Int32(arch.popc(members))


def number_of(ranks: sync.Ranks, tables: RouteTables, source: Int32, token: Int32) -> Int32:
    """Return the number of a row, as `number_rows` has computed it."""
    return Int32(tables.order[source * ranks.heap.tokens + token])


@cute.jit
def number_sums(ranks: sync.Ranks, args: Any, order: Any, warp: Int32) -> None:
    """By a whole block of a combine, with a barrier behind it: of each (token, k) of this rank whose copy has a row,
    be it another entry's, the number of that copy's sum among those of the rank that has it. `order`: [tokens, top_k]
    in shared memory. Sums of this rank's own domain, which stores bring, have their tokens'."""
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    for rank in cutlass.range(warp, p.world_size, WARPS):
        near = is_near(ranks, rank)
        low, high = local_experts(p, rank)
        before = Int32(0)
        for begin in cutlass.range(0, args.tokens, 32):
            token = begin + lane
            mine, kept = Int32(0), Int32(0)  # the token's entries there, and those of them that have rows, as bits
            for k in range_constexpr(p.top_k):
                if token < args.tokens:
                    entry = token * p.top_k + k
                    expert, row = args.topk_idx[entry], args.send_rows[entry]
                    if expert >= low and expert < high:
                        mine = mine | (Int32(1) << k)
                        if row >= 0:
                            kept = kept | (Int32(1) << k)
            members = Int32(arch.vote_ballot_sync(kept != 0))
            number = before + Int32(arch.popc(members & Int32(arch.lanemask_lt())))
            if near:
                number = token
            for k in range_constexpr(p.top_k):
                if kept != 0 and (mine >> k) & 1 != 0:
                    order[token * p.top_k + k] = Uint16(number)
            before += Int32(arch.popc(members))
