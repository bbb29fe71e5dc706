"""Addresses of all ranks' heaps in registers, because every load before a store costs time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..carried import Carried
from ..copies import words_of
from ..heap import Problem
from ..views import Words


class Peers(Carried):
    """The addresses of all ranks' heaps: lane i of a warp holds those of the ranks i, i + 32, ...

    Made by whole warps before they wait for the kernel in front: the table never changes while a communicator lives.
    """

    carried = ("held",)

    def __init__(self, problem: Problem, table: Int64, lane: Int32) -> None:
        last = problem.world_size - 1
        self.held = tuple(
            ptx.ld_constant(Words(table).at(cutlass.min(lane + 32 * i, last))) for i in range(words_of(problem))
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


def rotated(word: Int32, by: Int32) -> Int32:
    """Return a word rotated to the right by `by` modulo 32 bits."""
    return arch.inline_ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, by]
    )
