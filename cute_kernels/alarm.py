"""What a rank that has given up launches when its host sees that, or when its host is the one that gives up: all other
ranks are told."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from . import ptx, sync
from .domains import is_near
from .heap import FAILED, REASON_BYTES, Heap
from .launch import Kernel, RankArgs
from .marks import ALARM_BITS

WORDS = REASON_BYTES // 8


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
            self.leave(ranks, args.text)
            # All lanes' words come before thread 0's release, with which it sets off the alarm.
            arch.sync_warp()
            if tid == 0:
                self.give_up(ranks)
        failed = ptx.ld_relaxed_sys(ranks.own + FAILED * 8)
        if tid == 0 and failed != 0:
            sync.pass_on(ranks, failed)

    @cute.jit
    def leave(self, ranks: sync.Ranks, text: Int64) -> None:
        """By the warp: the text with every rank of this one's NVLink domain, where it would leave the reason of a
        refusal. (Others hear that this rank gives up, without the reason.)"""
        tid, _, _ = arch.thread_idx()
        i = tid
        while i < self.problem.world_size * WORDS:
            peer = i // WORDS
            at = Int64(i - peer * WORDS) * 8
            if is_near(ranks, peer):
                place = ranks.at(ranks.peer(peer), "reason") + Int64(ranks.rank) * REASON_BYTES
                ptx.st_relaxed_sys(place + at, ptx.ld_u64(text + at))
            i += arch.WARP_SIZE

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
