"""Common part of both latency kernels: each is a whole operation, or one half of a split operation."""

from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute import arch

from ..barriers import WarpBarrier
from ..heap import Problem
from .packets import THREADS, WARPS
from .sizes import LatencyHeap

WAITS_DONE = WarpBarrier(2, WARPS - 1, 1)
"""The barrier at which each warp reports that its waits have ended."""


class SplitOperation:
    """`tokens`: most tokens of a rank.

    `send` and `receive`: both for a whole operation. Of a split one the start only sends, and the wait only receives
    and ends the operation. Only whole ones are launched ahead of their turn (programmatic dependent launch): a start
    and a wait have more than one kernel before them.
    """

    NAME: ClassVar[str]
    problem: Problem
    tokens: int
    send: bool
    receive: bool

    @property
    def heap(self) -> LatencyHeap:
        return LatencyHeap.of(self.problem, self.tokens)

    @property
    def name(self) -> str:
        """With the half that it is, if it is one."""
        return self.NAME + ("" if self.send and self.receive else "_start" if self.send else "_wait")

    @property
    def options(self) -> dict[str, Any]:
        together = {"use_pdl": self.send and self.receive, "min_blocks_per_mp": 2, "preferred_smem_carveout": 100}
        return {"block": (THREADS, 1, 1), **together}

    @property
    def triggers(self) -> bool:
        """Whether the kernel triggers its dependents (programmatic dependent launch) before it ends.

        A block triggers when all of its warps have observed everything that they wait for. The blocks of the next
        kernel then start while the last rows are stored. An earlier trigger would let the next kernel take the
        multiprocessors that a peer's progress depends on (docs/progress.md).
        """
        return self.send and self.receive

    @cute.jit
    def end_waits(self, warp: Int32) -> None:
        """Report, by each warp of a receiving block and once, that the warp has observed all that it waits for.

        Warps other than the last one do not wait here.
        """
        if const_expr(self.triggers):
            if warp < WAITS_DONE.arriving:
                WAITS_DONE.arrive()

    @cute.jit
    def trigger_dependents(self, warp: Int32) -> None:
        """Trigger dependents, by each warp of a receiving block after its last store. The last warp first waits for all
        `end_waits` of the block; what it stored before is visible to dependents because they wait for this kernel's
        end."""
        if const_expr(self.triggers):
            if warp == WAITS_DONE.arriving:
                WAITS_DONE.wait()
                arch.griddepcontrol_launch_dependents()
