"""A number of warps or threads that does not match the block of a kernel fails the kernel's compilation."""

# No "from __future__ import annotations": the kernels' annotations are read as types.

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
import pytest
from cutlass import Int32, const_expr
from cutlass.cute import arch

from cute_kernels import jit
from cute_kernels.barriers import TeamBarriers, WarpBarrier, whole_block
from cute_kernels.heap import Problem
from cute_kernels.ids import warp_id
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.launch import Launched
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.route import THREADS

PROBLEM = Problem(2, (2, 2), 2, 64, "bf16", 64)


class BlocksArgs(NamedTuple):
    blocks: Int32


@dataclass(frozen=True)
class Meets(Launched):
    """A kernel whose warps meet at `barrier`, and, with `more`, at that one afterwards."""

    barrier: WarpBarrier
    warps: int
    arrives: bool = True
    waits: bool = True
    more: WarpBarrier | None = None

    NAME, Args = "test_meets", BlocksArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * self.warps, 1, 1)}

    @cute.kernel
    def kernel(self, args: BlocksArgs) -> None:
        self.meet(self.barrier)
        if const_expr(self.more is not None):
            self.meet(self.more)

    @cute.jit
    def meet(self, barrier: Any) -> None:
        if warp_id() < barrier.arriving:
            if const_expr(self.arrives):
                barrier.arrive()
        elif const_expr(self.waits):
            barrier.wait()


@dataclass(frozen=True)
class Teams(Launched):
    """A kernel whose warps meet in teams, and then all, as `threads`."""

    barriers: TeamBarriers
    threads: int
    warps: int = 4

    NAME, Args = "test_teams", BlocksArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * self.warps, 1, 1)}

    @cute.kernel
    def kernel(self, args: BlocksArgs) -> None:
        self.barriers.wait(warp_id() // self.barriers.warps)
        if arch.thread_idx()[0] < whole_block(self.threads):
            arch.sync_threads()


def compiled(kernel: Any) -> str:
    return jit.compile_kernel(kernel, "sm_90a", keep_ptx=True).__ptx__


def test_counts_follow_from_warps() -> None:
    """A barrier counts the threads of the warps that arrive and of those that wait."""
    ptx = compiled(Meets(WarpBarrier(3, 2, 1), 3))
    assert "barrier.cta.arrive.aligned 3, 96;" in ptx or "bar.arrive 3, 96;" in ptx or "barrier.arrive 3, 96" in ptx
    compiled(Teams(TeamBarriers(1, 2, 2), 128))
    compiled(Teams(TeamBarriers(1, 4, 1), 128))


@pytest.mark.parametrize(
    "kernel, text",
    [
        (Meets(WarpBarrier(3, 1, 1), 3), "in a block of 96 threads"),
        (Meets(WarpBarrier(3, 3, 1), 3), "in a block of 96 threads"),
        (Meets(WarpBarrier(3, 2, 1), 3, waits=False), "no warps wait"),
        (Meets(WarpBarrier(3, 2, 1), 3, arrives=False), "no warps arrive"),
        (Meets(WarpBarrier(3, 2, 1), 3, more=WarpBarrier(3, 1, 2)), "have the same number"),
        (Meets(WarpBarrier(16, 2, 1), 3), "has a number"),
        (Meets(WarpBarrier(0, 2, 1), 3), "has a number"),
        (Teams(TeamBarriers(1, 2, 1), 128), "in a block of 128 threads"),
        (Teams(TeamBarriers(13, 4, 1), 128), "has a number"),
        (Teams(TeamBarriers(1, 2, 2), 96), "code for 96 threads"),
    ],
    ids=str,
)
def test_wrong_counts_fail(kernel: Any, text: str) -> None:
    with pytest.raises(Exception, match=text):
        compiled(kernel)
    assert whole_block(1) == 1  # nothing is being traced


def test_traces_that_fail_leave_nothing_behind() -> None:
    """The next compilation does not see the block of a kernel whose device code raised an error."""

    class Broken(Meets):
        @cute.jit
        def meet(self, barrier: Any) -> None:
            barrier.arrive()
            raise AssertionError("broken")

    right = Meets(WarpBarrier(3, 2, 1), 3)
    before = compiled(right)
    for kernel in Broken(WarpBarrier(3, 2, 2), 4), Broken(WarpBarrier(3, 2, 1), 3):
        with pytest.raises(Exception, match="broken"):
            compiled(kernel)
        assert whole_block(1) == 1
        assert compiled(right) == before


def another_block(kernel: type[Any], threads: int) -> type[Any]:
    """Return the kernel with blocks of so many threads."""

    @dataclass(frozen=True)
    class Changed(kernel):
        @property
        def options(self) -> dict[str, Any]:
            return {**super().options, "block": (threads, 1, 1)}

    return Changed


@pytest.mark.parametrize("more", [-32, 32])
def test_blocks_of_kernels(more: int) -> None:
    """Kernels do not compile with blocks of another size than their barriers and loops are written for."""
    for kernel, fields in [
        (LatencyCombine, (64, False)),
        (LatencyDispatch, (64, False)),
        (Publish, (True, True, False)),
    ]:
        threads = kernel(PROBLEM, *fields).options["block"][0]
        with pytest.raises(Exception, match=rf"in a block of {threads + more}"):
            compiled(another_block(kernel, threads + more)(PROBLEM, *fields))
    assert THREADS == 1024
