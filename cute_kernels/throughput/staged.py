"""Common code of kernels that fetch staged rows: waiting for rows, and clearing padding."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import sync
from ..delivery import Arrived, Delivery
from ..experts import local_experts
from ..heap import Problem
from ..ids import block_id, thread_id
from ..internode.relayed import await_relayed, relayed_row
from ..segments import padded
from ..views import Ints, Records


@cute.jit
def await_rows(
    ranks: sync.Ranks, known: Any, source: Int32, token: Int32, own: cutlass.Constexpr[bool] = False,
    pushed: cutlass.Constexpr[bool] = False,
) -> Int32:  # fmt: skip
    """By a whole warp, before bulk copies of a staged row: wait for the row. Return 0 if it never arrived (reported),
    else what `source_row` takes. `known` [W] in shared memory belongs to the warp: the ranks that have signaled that
    all their rows are staged. `own`: this rank's rows are fetched from staging, too, instead of from x. `pushed`:
    peers push rows to this rank's staging.
    """
    ready = Int32(1)
    staged = Boolean(True)
    if const_expr(not own):
        staged = source != ranks.rank
    ready, staged = await_relayed(ranks, source, token, ready, staged)
    if staged:
        if arch.lane_idx() == 0:
            if const_expr(pushed):
                ready = Int32(ranks.wait("token", ranks.heap.problem.pushed_slot(source, token), source, token))
                # Bulk copies come after what was acquired.
                sync.fence_async()
            elif known[source] == 0:
                if ranks.seen("staged", source):
                    known[source] = Int8(1)
                elif not ranks.wait("chunk", chunk_of(ranks, source, token), source, token):
                    ready = Int32(0)
                # Bulk copies come after what was acquired.
                sync.fence_async()
        ready = arch.shuffle_sync(ready, 0)
    return ready


@cute.jit
def new_known(problem: cutlass.Constexpr[Problem], smem: Any, warps: cutlass.Constexpr[int]) -> Any:
    """By the whole block, with a barrier behind it: `known` of all warps, one after the other."""
    threads, _, _ = arch.block_dim()
    known = smem.allocate_tensor(Int8, cute.make_layout(warps * problem.world_size))
    for i in cutlass.range(thread_id(), warps * problem.world_size, threads):
        known[i] = Int8(0)
    return known


def chunk_of(ranks: sync.Ranks, source: Int32, token: Int32) -> Int32:
    """Return the index of the flag that announces a token's row."""
    return source * ranks.heap.chunks + token // ranks.heap.problem.chunk_tokens


@cute.jit
def source_row(
    ranks: sync.Ranks, x: Int64, source: Int32, token: Int32, delivery: cutlass.Constexpr[Delivery], ready: Int32,
    pushed: cutlass.Constexpr[bool] = False,
) -> Int64:  # fmt: skip
    """Address of a token's row: this rank's own lies in x, unless rows travel in a format; pushed rows lie with this
    rank. `ready`: what `await_rows` gave."""
    nbytes = delivery.traveling_bytes
    base = x
    if const_expr(delivery.format != ""):
        base = ranks.view("rows", ranks.peer(source)).base
    elif source != ranks.rank:
        if const_expr(pushed):
            base = ranks.view("rows", nbytes=nbytes).at(ranks.heap.problem.pushed_slot(source, 0))
        else:
            base = ranks.view("rows", ranks.peer(source)).base
    return relayed_row(ranks, source, token, nbytes, ready, Records(base, nbytes).at(token))


class SegmentEnds(NamedTuple):
    """The segments of rows of the local experts."""

    offs: Ints  # padded end of each
    counts: Ints  # rows of each
    alignment: Int32


@cute.jit
def clear_padding(
    ranks: sync.Ranks, segments: SegmentEnds, given: cutlass.Constexpr[bool], delivery: cutlass.Constexpr[Delivery],
    to: Arrived, weights: cutlass.Constexpr[bool], blocks: Int32,
) -> None:  # fmt: skip
    """One warp of each of the first `blocks` blocks: zero the rows between each segment's last row and its padded end,
    with their scales and weights. `given`: the segments come from the operator's caller; there are no rows after those
    that arrive, whatever `offs` and `counts` say. Uses ordinary stores, because bulk copies of zeros would be queued
    before those of rows and delay them by a third."""
    problem = ranks.heap.problem
    alignment = segments.alignment
    lane = arch.lane_idx()
    bid = block_id()
    first_local, end_local = local_experts(problem, ranks.rank)
    for e in cutlass.range(bid, end_local - first_local, blocks):
        count = segments.counts[e]
        end = segments.offs[e]
        row = end - (padded(count, alignment) - count)
        begin = row - count
        if const_expr(given):
            row, end = cutlass.max(row, 0), cutlass.min(end, to.num_rows)
            begin = cutlass.max(cutlass.min(begin, row), 0)
        delivery.zero(to, row, end, lane, weights)
        if const_expr(delivery.tiles is not None):
            delivery.tiles.clear(to, e, begin, row - begin, end - begin)
