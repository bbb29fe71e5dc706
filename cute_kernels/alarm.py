"""What a rank that has given up launches when its host sees that: all other ranks are told."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from . import ptx, sync
from .heap import FAILED, Heap
from .launch import Kernel, RankArgs


class AlarmArgs(NamedTuple):
    ranks: RankArgs
    blocks: Int32  # one


@dataclass(frozen=True)
class RaiseAlarm(Kernel):
    """One warp, of which one thread works. It belongs to no operation, and may run beside any."""

    NAME, Args = "ep_alarm", AlarmArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: AlarmArgs) -> None:
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        tid, _, _ = arch.thread_idx()
        failed = ptx.ld_relaxed_sys(ranks.own + FAILED * 8)
        if tid == 0 and failed != 0:
            sync.pass_on(ranks, failed)
