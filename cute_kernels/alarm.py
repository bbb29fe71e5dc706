"""The kernel that notifies all other ranks that this rank has given up. The host launches it when it sees the report of
a kernel, or when the host itself gives up."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from . import ptx, sync
from .heap import FAILED, Heap
from .ids import thread_id
from .launch import Kernel, RankArgs
from .marks import ALARM_BITS
from .rejection import leave_reason


class AlarmArgs(NamedTuple):
    ranks: RankArgs
    text: Int64  # why this rank gives up, REASON_BYTES bytes; 0 if its state already says that it has
    blocks: Int32  # one


@dataclass(frozen=True)
class RaiseAlarm(Kernel):
    """One warp. It belongs to no operation and may run concurrently with any. With a text, it runs after the last
    kernel that this rank has launched, because all running kernels then give up."""

    NAME, Args = "ep_alarm", AlarmArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: AlarmArgs) -> None:
        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
        tid = thread_id()
        if args.text != 0:
            # Ranks of other domains receive the alarm without the reason.
            leave_reason(ranks, args.text, arch.WARP_SIZE)
            # All lanes' words come before thread 0's release, with which it sets off the alarm.
            arch.sync_warp()
            if tid == 0:
                self.give_up(ranks)
        failed = ptx.ld_relaxed_sys(ranks.word(FAILED))
        if tid == 0 and failed != 0:
            sync.pass_on(ranks, failed)

    @cute.jit
    def give_up(self, ranks: sync.Ranks) -> None:
        """By one thread: report that this rank gives up, with the number of the operation, unless a wait has failed
        before."""
        before = ptx.atom_claim(ranks.word(FAILED))
        if before != 1:
            reason = Int32(sync.HALF)
            if before == sync.FAILED_BY_PEER:
                reason = Int32(sync.PEER_FAILED)
            number = Int32(ranks.epoch & ((1 << ALARM_BITS.detail) - 1))
            sync.write_report(ranks, 0, reason, Int32(0), ranks.rank, number, Int64(0))
