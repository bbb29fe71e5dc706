"""Which rank holds an expert: ranks hold consecutive ones, in the order of ranks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from .heap import Problem


def experts_each(problem: Problem) -> int:
    """How many experts every rank holds; 0 if some hold more than others."""
    each = set(problem.experts_per_rank)
    return each.pop() if len(each) == 1 else 0


@cute.jit
def first_expert(problem: cutlass.Constexpr[Problem], rank: Int32) -> Int32:
    """Of a rank known at run time; num_experts for the rank behind the last."""
    first = Int32(0)
    if const_expr(experts_each(problem) > 0):
        first = rank * experts_each(problem)
    else:
        for r in range_constexpr(1, problem.world_size + 1):
            if rank == r:
                first = Int32(problem.first_expert[r])
    return first


@cute.jit
def local_experts(problem: cutlass.Constexpr[Problem], rank: Int32) -> tuple[Int32, Int32]:
    """First expert of a rank, and the one behind its last."""
    return first_expert(problem, rank), first_expert(problem, rank + 1)


@cute.jit
def holder_of(problem: cutlass.Constexpr[Problem], expert: Int32) -> Int32:
    """The rank that holds an expert; some rank for ids that no expert has."""
    holder = Int32(0)
    if const_expr(experts_each(problem) > 0):
        holder = cutlass.min(cutlass.max(expert, 0) // experts_each(problem), problem.world_size - 1)
    else:
        for r in range_constexpr(1, problem.world_size):
            if expert >= problem.first_expert[r]:
                holder = Int32(r)
    return holder
