"""What a rank does instead of an operation that its host refuses: tell all ranks why, and use up the number.

To ranks of other NVLink domains the reason is put on the wire, behind which a word of this rank is set, and hello may
arrive before that: waits there know by its kind that a refusal is on its way (`sync.why_stop`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import arch

from . import operation, ptx, sync
from .domains import is_near
from .heap import EPOCH, REASON_BYTES, Heap
from .latency.sizes import LatencyHeap
from .launch import Kernel, RankArgs

THREADS = 256
WORDS = REASON_BYTES // 8


class RefuseArgs(NamedTuple):
    """Of :class:`Refuse`."""

    ranks: RankArgs
    text: Int64  # REASON_BYTES bytes
    blocks: Int32  # one


@dataclass(frozen=True)
class Refuse(Kernel):
    """One block: leaves the reason with every rank, sets `refusal` there, says hello, waits until all have begun."""

    tokens: int = 0
    """The bound of the latency kernels where they take calls across domains: what others put here is in places of
    theirs, too."""

    NAME, Args = "ep_refuse", RefuseArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (THREADS, 1, 1)}

    @cute.kernel
    def kernel(self, args: RefuseArgs) -> None:
        world_size = self.problem.world_size
        heap = LatencyHeap(self.problem, self.tokens) if self.tokens else Heap(self.problem)
        ranks = sync.Ranks(heap, args.ranks)
        tid, _, _ = arch.thread_idx()
        i = tid
        while i < world_size * WORDS:
            peer = i // WORDS
            at = Int64(i - peer * WORDS) * 8
            if is_near(ranks, peer):
                place = ranks.at(ranks.peer(peer), "reason") + Int64(ranks.rank) * REASON_BYTES
                ptx.st_relaxed_sys(place + at, ptx.ld_u64(args.text + at))
            i += THREADS
        # The whole block's text comes before each thread's releases.
        arch.sync_threads()
        if const_expr(self.problem.num_domains > 1):
            self.tell_far_ranks(ranks)
        peer = Int32(tid)
        while peer < world_size:
            if is_near(ranks, peer):
                # The refusal is released before the hello: whoever sees the hello sees the refusal.
                ranks.signal("refusal", peer, Int32(0))
            ranks.signal("hello", peer, ranks.rank)
            peer += THREADS
        peer = Int32(tid)
        while peer < world_size:
            sync.await_begun(ranks, peer)
            peer += THREADS
        arch.sync_threads()
        if tid == 0:
            operation.note_begun(ranks)
            if const_expr(self.problem.num_domains > 1):
                operation.settle(ranks)
            operation.note_met(ranks)
            ptx.st_u64(ranks.own + EPOCH * 8, ranks.epoch + 1)

    @cute.jit
    def tell_far_ranks(self, ranks: sync.Ranks) -> None:
        """Ranks of other domains, each by a put from where this rank's own reason lies with itself."""
        tid, _, _ = arch.thread_idx()
        reason = ranks.at(Int64(0), "reason") + Int64(ranks.rank) * REASON_BYTES
        rank = Int32(arch.make_warp_uniform(tid // 32))
        while rank < self.problem.world_size and ranks.mark >= 0:
            if not is_near(ranks, rank):
                word = ranks.at(Int64(0), "refused") + Int64(ranks.rank) * 8
                self.problem.wire.put_signal(ranks, rank, reason, reason, Int32(REASON_BYTES), word, ranks.mark)
            rank += THREADS // 32
