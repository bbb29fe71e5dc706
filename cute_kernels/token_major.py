"""Common code of throughput and latency kernels for token-major rows (docs/token-major.md)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import arch

from .domains import index_of
from .experts import local_experts
from .heap import Problem
from .ids import thread_id
from .segments import inclusive_sum
from .sync import Ranks
from .views import Floats


@cute.jit
def clear_choices(
    p: cutlass.Constexpr[Problem], threads: cutlass.Constexpr[int], share: tuple[Int32, Any], args: Any, copies: Int32,
    ids: cutlass.Constexpr[bool], weights: cutlass.Constexpr[bool],
) -> None:  # fmt: skip
    """One block: clear its share of the local ids and weights of rows after the last copy; it is the `share[0]`-th of
    so many blocks."""
    block, blocks = share
    i = Int64(copies) * p.top_k + (block * threads + thread_id())
    while i < Int64(args.capacity) * p.top_k:
        if const_expr(ids):
            args.recv_idx[i] = Int32(-1)
        if const_expr(weights):
            args.recv_weights.bits[i] = Int32(0)
        i += blocks * threads


def copy_scalars(ranks: Ranks, heap: Int64, slot: Int32, holder: Int32, token: Int32) -> Floats:
    """Return the `top_k` scalars of a token-major row of `holder`, in the heap of the token's owner or of its stager.
    They use the space of a dispatch's messages, which has room for as many of each rank."""
    p = ranks.heap.problem
    row = (slot * p.domain_ranks + index_of(ranks, holder)) * p.max_tokens + token
    return Floats(ranks.view("messages", heap).base, p.weights_each).part(row)


@cute.jit
def write_counts(ranks: Ranks, named: Any, args: Any) -> None:
    """By one warp: how many (row, k) name each expert here, their sums, and how many are dropped with their copies.
    `named` [2, local experts]: all, and those that are dropped."""
    p = ranks.heap.problem
    lane = arch.lane_idx()
    first_local, end_local = local_experts(p, ranks.rank)
    held = end_local - first_local
    before = Int32(0)
    for chunk in cutlass.range(0, held, 32):
        local = chunk + lane
        dropped, kept = Int32(0), Int32(0)
        if local < held:
            dropped = named[p.local_experts + local]
            kept = named[local] - dropped
        upto = inclusive_sum(kept)
        if local < held:
            args.offs[local] = before + upto
            args.counts[local] = kept
            args.dropped[local] = dropped
        before += arch.shuffle_sync(upto, 31)
