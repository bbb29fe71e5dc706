"""What both latency kernels have in common: each is a whole operation, or one half of a split one."""

from typing import Any, ClassVar

from ..heap import Problem
from .packets import THREADS
from .sizes import LatencyHeap


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
        return LatencyHeap(self.problem, self.tokens)

    @property
    def name(self) -> str:
        """With the half that it is, if it is one."""
        return self.NAME + ("" if self.send and self.receive else "_start" if self.send else "_wait")

    @property
    def options(self) -> dict[str, Any]:
        together = {"use_pdl": self.send and self.receive, "min_blocks_per_mp": 2, "preferred_smem_carveout": 100}
        return {"block": (THREADS, 1, 1), **together}
