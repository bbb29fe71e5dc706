"""The kernel that raises a failed rank's alarm at all other ranks. Its host launches it when it sees the failure, or
when the host itself fails."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from . import ptx, sync
from .heap import FAILED, Heap
from .launch import Kernel, RankArgs
from .marks import ALARM_BITS
from .refusal import leave_reason


class AlarmArgs(NamedTuple):
    ranks: RankArgs
    text: Int64  # why this rank gives up, REASON_BYTES bytes; 0: its state says already that it has
    blocks: Int32  # one


@dataclass(frozen=True)
class RaiseAlarm(Kernel):
    """One warp. It belongs to no operation, and may run beside any; with a text it comes behind the last kernel that
    this rank has launched, since whatever runs at the time gives up."""

    NAME, Args = "ep_alarm", AlarmArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: AlarmArgs) -> None:
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        tid, _, _ = arch.thread_idx()
        if args.text != 0:
            # Ranks of other domains hear of the failure without the reason.
            leave_reason(ranks, args.text, arch.WARP_SIZE)
            # All lanes' words come before thread 0's release, with which it sets off the alarm.
            arch.sync_warp()
            if tid == 0:
                self.give_up(ranks)
        failed = ptx.ld_relaxed_sys(ranks.own + FAILED * 8)
        if tid == 0 and failed != 0:
            sync.pass_on(ranks, failed)

    @cute.jit
    def give_up(self, ranks: sync.Ranks) -> None:
        """By one thread: reports it, with the number of the operation, unless a wait has failed before."""
        before = ptx.atom_claim(ranks.own + FAILED * 8)
        if before != 1:
            reason = Int32(sync.HALF)
            if before == sync.FAILED_BY_PEER:
                reason = Int32(sync.PEER_FAILED)
            number = Int32(ranks.epoch & ((1 << ALARM_BITS.detail) - 1))
            sync.write_report(ranks, 0, reason, Int32(0), ranks.rank, number, Int64(0))
