"""Which ranks a token reaches, and where their heaps lie: in registers, since every load in front of a store counts.

Sets of ranks are words of 32 bits, one for each 32 ranks, the same in all lanes of a warp.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..carried import Carried
from ..heap import Problem

Ranks = tuple[Int32, ...]
"""A set of ranks."""


def words_of(problem: Problem) -> int:
    """Words of a set of ranks."""
    return -(-problem.world_size // 32)


class Peers(Carried):
    """The addresses of all ranks' heaps: lane i of a warp holds those of the ranks i, i + 32, ...

    Made by whole warps before they wait for the kernel in front: the table never changes while a communicator lives.
    """

    carried = ("held",)

    def __init__(self, problem: Problem, table: Int64, lane: Int32) -> None:
        last = problem.world_size - 1
        self.held = tuple(
            ptx.ld_constant(table + Int64(cutlass.min(lane + 32 * i, last)) * 8) for i in range(words_of(problem))
        )


@cute.jit
def heap_of(peers: Peers, rank: Int32) -> Int64:
    """By a whole warp: the address of a rank's heap; lanes may ask for different ranks."""
    heap = arch.shuffle_sync(peers.held[0], rank & 31)
    for i in range_constexpr(1, len(peers.held)):
        other = arch.shuffle_sync(peers.held[i], rank & 31)
        if rank >> 5 == i:
            heap = other
    return heap


@cute.jit
def set_of(problem: cutlass.Constexpr[Problem], rank: Int32, member: Boolean) -> Ranks:
    """By a whole warp: the ranks of those lanes that have a member."""
    words = []
    for i in range_constexpr(words_of(problem)):
        bit = Int32(0)
        here = member
        if const_expr(words_of(problem) > 1):
            here = member and rank >> 5 == i
        if here:
            bit = Int32(1) << (rank & 31)
        words.append(arch.warp_redux_sync(bit, "or"))
    return tuple(words)


@cute.jit
def below(ranks: Ranks, rank: Int32) -> Int32:
    """How many of the set are lower than `rank`."""
    count = Int32(0)
    for i in range_constexpr(len(ranks)):
        mask = (Int32(1) << (rank & 31)) - 1
        if const_expr(len(ranks) > 1):
            if rank >> 5 > i:
                mask = Int32(-1)
            if rank >> 5 < i:
                mask = Int32(0)
        count += arch.popc(ranks[i] & mask)
    return count


def rotated(word: Int32, by: Int32) -> Int32:
    """A word rotated to the right by `by` modulo 32 bits."""
    return arch.inline_ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, by]
    )


def lowest(word: Any) -> Int32:
    """The number of a word's lowest bit that is set."""
    return Int32(arch.popc((word & -word) - 1))


def low_bits(count: int) -> Uint32:
    """The lowest `count` bits, at most 32."""
    return Uint32((1 << count) - 1)
