"""The ranks that hold experts: ranks hold consecutive experts, in the order of ranks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from .heap import Problem


def spread(problem: Problem) -> tuple[int, int]:
    """Return the number of experts of every rank, and how many of the first ranks have one more; two zeros if experts
    are distributed otherwise."""
    each, more = divmod(problem.num_experts, problem.world_size)
    even = tuple(each + (rank < more) for rank in range(problem.world_size))
    return (each, more) if problem.experts_per_rank == even else (0, 0)


@cute.jit
def first_expert(problem: cutlass.Constexpr[Problem], rank: Int32) -> Int32:
    """Return the first expert of a rank that is known at run time; num_experts for the rank after the last."""
    first = Int32(0)
    each, more = spread(problem)
    if const_expr(each + more > 0):
        first = rank * each
        if const_expr(more > 0):
            first += cutlass.min(rank, more)
    else:
        for r in range_constexpr(1, problem.world_size + 1):
            if rank == r:
                first = Int32(problem.first_expert[r])
    return first


@cute.jit
def local_experts(problem: cutlass.Constexpr[Problem], rank: Int32) -> tuple[Int32, Int32]:
    """Return the first expert of a rank, and the one after its last."""
    return first_expert(problem, rank), first_expert(problem, rank + 1)


@cute.jit
def holder_of(problem: cutlass.Constexpr[Problem], expert: Int32) -> Int32:
    """Return the rank that holds an expert; any rank for ids of no expert."""
    holder = Int32(0)
    each, more = spread(problem)
    if const_expr(each + more > 0):
        given = cutlass.max(expert, 0)
        if const_expr(each > 0):
            holder = more + (given - more * (each + 1)) // each
        if const_expr(more > 0):
            if given < more * (each + 1):
                holder = given // (each + 1)
        holder = cutlass.min(holder, problem.world_size - 1)
    else:
        for r in range_constexpr(1, problem.world_size):
            if expert >= problem.first_expert[r]:
                holder = Int32(r)
    return holder
