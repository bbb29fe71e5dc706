"""What every kernel's launch has in common."""

from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from .heap import Problem


def ranks_signature(problem: Problem) -> tuple:
    """Example values of the arguments that all kernels begin with: addresses of all ranks' heaps, this rank, address
    of the host-visible report, deadline of each wait in ns, terms of the operation (`marks.pack`)."""
    return (tuple(Int64(0) for _ in range(problem.world_size)), Int32(0), Int64(0), Int64(0), Int32(0))


def example_stream():
    return make_fake_stream()
