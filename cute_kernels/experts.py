"""Which rank holds an expert: ranks hold consecutive ones, in the order of ranks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from .heap import Problem


@cute.jit
def first_expert(problem: cutlass.Constexpr[Problem], rank: Int32) -> Int32:
    """Of a rank known at run time; num_experts for the rank behind the last."""
    first = Int32(0)
    for r in range_constexpr(1, problem.world_size + 1):
        if rank == r:
            first = Int32(problem.first_expert[r])
    return first


@cute.jit
def local_experts(problem: cutlass.Constexpr[Problem], rank: Int32) -> tuple[Int32, Int32]:
    """First expert of a rank, and the one behind its last."""
    first = Int32(problem.first_expert[0])
    end = Int32(problem.first_expert[1])
    for r in range_constexpr(1, problem.world_size):
        if rank == r:
            first = Int32(problem.first_expert[r])
            end = Int32(problem.first_expert[r + 1])
    return first, end


@cute.jit
def holder_of(problem: cutlass.Constexpr[Problem], expert: Int32) -> Int32:
    """The rank that holds an expert; some rank for ids that no expert has."""
    holder = Int32(0)
    for r in range_constexpr(1, problem.world_size):
        if expert >= problem.first_expert[r]:
            holder = Int32(r)
    return holder
