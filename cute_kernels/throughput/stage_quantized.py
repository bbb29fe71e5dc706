"""Staging in a format: x is quantized to codes and scales where all ranks, including this one, fetch its rows.

A team of warps stages one chunk, row part by row part: the fewer chunks are in progress, the sooner the first ones can
be fetched. A warp loads a part into its lanes, computes the scales, and stores the codes, and the scales after the
row's last code. stage.py describes how chunks are marked and announced.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..barriers import TeamBarriers
from ..formats import Form
from ..heap import Problem
from ..ids import warp_id
from ..quantize import encode, given_word, largest, numbers_of, of_group, scale_of, store_codes, word_of_bytes
from ..views import Ints, Records, Vectors
from .route import THREADS

AHEAD = 4
"""Number of 16-byte vectors that a lane loads before it looks at the first."""
TEAM = 8
"""Warps that do a chunk together. A block has 15 barriers for its teams."""


def parts_of(form: Form, given: bool, dtype: str) -> int:
    """Return the number of parts of a row: what the lanes of a warp load at a time, or the row if it is read twice."""
    if form.whole_row and not given:
        return 1
    return -(-form.hidden_size // (32 * AHEAD * (16 if given else numbers_of(dtype))))


@cute.jit
def stage_quantized(
    form: cutlass.Constexpr[Form], given: cutlass.Constexpr[bool], ranks: sync.Ranks,
    args: Any, copier: Int32, copiers: Int32,
) -> None:  # fmt: skip
    """By block `copier` of `copiers`. `given`: x and its scales are quantized already."""
    problem = ranks.heap.problem
    parts = parts_of(form, given, problem.dtype)
    teams = TeamBarriers(1, THREADS // 32 // TEAM, TEAM)
    warp, lane = warp_id(), arch.lane_idx()
    member, mine = warp % TEAM, warp // TEAM
    staging = ranks.view("rows", nbytes=form.staged_bytes)
    marks = ranks.view("chunk").part(ranks.rank)
    chunk = mine * copiers + copier
    while chunk * problem.chunk_tokens < args.tokens:
        first = chunk * problem.chunk_tokens
        items = (cutlass.min(first + problem.chunk_tokens, args.tokens) - first) * parts
        for item in cutlass.range(member, items, TEAM):
            token = first + item // parts
            quantize_part(form, given, ranks, args, token, staging.at(token), item % parts)
        # All of the team's stores come before the mark.
        teams.wait(mine)
        if member == 0 and lane == 0:
            ptx.st_release_gpu(marks.at(chunk), ranks.own_mark)
        chunk += teams.teams * copiers


@cute.jit
def quantize_row(
    form: cutlass.Constexpr[Form], given: cutlass.Constexpr[bool], ranks: sync.Ranks, args: Any, token: Int32,
    row: Int64,
) -> None:  # fmt: skip
    """By a warp: a token's row and its scales, to the address `row`."""
    for part in cutlass.range(parts_of(form, given, ranks.heap.problem.dtype)):
        quantize_part(form, given, ranks, args, token, row, part)


@cute.jit
def quantize_part(
    form: cutlass.Constexpr[Form], given: cutlass.Constexpr[bool], ranks: sync.Ranks, args: Any, token: Int32,
    row: Int64, part: Int32,
) -> None:  # fmt: skip
    """By a warp: a part of a row, and its scales."""
    problem = ranks.heap.problem
    if const_expr(given):
        copy_part(form, ranks, args, token, row, part)
    elif const_expr(form.whole_row):
        quantize_whole(form, problem, Records(args.x, problem.row_bytes).at(token), row)
    else:
        quantize_blocks(form, problem, Records(args.x, problem.row_bytes).at(token), row, part)


@cute.jit
def load(x: Int64, first: Int32, vectors: cutlass.Constexpr[int], words: Any) -> None:
    """Load a lane's next vectors of 16 bytes; after the end of the row, the last one again."""
    for u in range_constexpr(AHEAD):
        load_one(x, first + u * 32 + arch.lane_idx(), vectors, words, u)


@cute.jit
def load_one(x: Int64, vector: Int32, vectors: cutlass.Constexpr[int], words: Any, u: cutlass.Constexpr[int]) -> None:
    got = Vectors(x)[cutlass.min(vector, vectors - 1)]
    for i in range_constexpr(4):
        words[4 * u + i] = got[i]


@cute.jit
def quantize_blocks(
    form: cutlass.Constexpr[Form], problem: cutlass.Constexpr[Problem], x: Int64, row: Int64, part: Int32
) -> None:
    """By a warp: a part of a row of blocks that are no longer than its lanes together. A lane has several vectors of a
    block, as few other lanes away from each other as fill 32 bytes, so that a scale is found once for all of them."""
    dtype, lane = problem.dtype, arch.lane_idx()
    numbers = numbers_of(dtype)
    vectors, length = problem.hidden_size // numbers, form.block // numbers  # of a row; of a block
    each = min(AHEAD, length // 2)  # a lane's of a block
    lanes = length // each  # that hold a block
    scales = Ints(row + problem.hidden_size)
    words = cute.make_rmem_tensor((4 * AHEAD,), Uint32)
    first = part * (32 * AHEAD) + (lane // lanes) * length + lane % lanes
    for u in range_constexpr(AHEAD):
        load_one(x, first + u // each * (32 * each) + u % each * lanes, vectors, words, u)
    for run in range_constexpr(AHEAD // each):
        begin = first + run * (32 * each)
        mine = [words[4 * each * run + i] for i in range(4 * each)]
        stored, inverse = scale_of(form.kind, of_group(largest(mine, dtype), lanes))
        for u in range_constexpr(each):
            codes = encode(ptx.unpack(mine[4 * u : 4 * u + 4], dtype), inverse)
            vector = begin + u * lanes
            if vector < vectors:
                store_codes(row, vector, codes)
        if const_expr(form.in_bytes):
            # Four neighboring blocks' exponents make a word.
            if begin >= vectors:
                stored = Int32(0)
            stored = word_of_bytes(stored, lanes)
        holds = 4 if form.in_bytes else 1  # scales of a word
        if lane % (holds * lanes) == 0 and begin < vectors:
            scales[begin // (holds * length)] = stored


@cute.jit
def quantize_whole(form: cutlass.Constexpr[Form], problem: cutlass.Constexpr[Problem], x: Int64, row: Int64) -> None:
    """By a warp: a row with one scale, which is read twice."""
    dtype, lane = problem.dtype, arch.lane_idx()
    vectors = problem.hidden_size // numbers_of(dtype)
    scales = Ints(row + problem.hidden_size)
    words = cute.make_rmem_tensor((4 * AHEAD,), Uint32)
    amax = Int32(0)
    for first in cutlass.range(0, vectors, 32 * AHEAD):
        load(x, first, vectors, words)
        amax = cutlass.max(amax, largest([words[i] for i in range(4 * AHEAD)], dtype))
    stored, inverse = scale_of(form.kind, of_group(amax, 32))
    for first in cutlass.range(0, vectors, 32 * AHEAD):
        load(x, first, vectors, words)
        for u in range_constexpr(AHEAD):
            vector = first + u * 32 + lane
            codes = encode(ptx.unpack([words[4 * u + i] for i in range(4)], dtype), inverse)
            if vector < vectors:
                store_codes(row, vector, codes)
    if lane == 0:
        scales[0] = stored


@cute.jit
def copy_part(
    form: cutlass.Constexpr[Form], ranks: sync.Ranks, args: Any, token: Int32, row: Int64, part: Int32
) -> None:
    """By a warp: a part of a row that is quantized already; the first brings the scales."""
    vectors, lane = form.hidden_size // 16, arch.lane_idx()
    words = cute.make_rmem_tensor((4 * AHEAD,), Uint32)
    first = part * (32 * AHEAD)
    to, scales = Vectors(row), Ints(row + form.hidden_size)
    load(Records(args.x, form.hidden_size).at(token), first, vectors, words)
    for u in range_constexpr(AHEAD):
        vector = first + u * 32 + lane
        if vector < vectors:
            to[vector] = [words[4 * u + i] for i in range(4)]
    if part == 0:
        for i in cutlass.range(lane, form.scale_words, 32):
            scales[i] = given_word(form, ranks, args.scales, token, i)
