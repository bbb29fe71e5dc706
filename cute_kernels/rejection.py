"""The kernel that a rank runs in place of an operation that its host rejects. It sends the reason to all ranks and
consumes the operation's epoch.

To ranks of other NVLink domains the reason is put over the wire, followed by a word of this rank. The hello may arrive
before them; waits recognize from its kind that a reason will follow (`sync.why_stop`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from . import operation, ptx, sync
from .barriers import whole_block
from .domains import is_near
from .heap import EPOCH, REASON_BYTES, Heap
from .ids import thread_id
from .internode.rejected import put_reason, settle
from .latency.sizes import LatencyHeap
from .launch import Kernel, RankArgs
from .views import Words

THREADS = 256
WORDS = REASON_BYTES // 8


class RejectArgs(NamedTuple):
    """Arguments of :class:`Reject`."""

    ranks: RankArgs
    text: Int64  # REASON_BYTES bytes
    blocks: Int32  # one


@cute.jit
def leave_reason(ranks: sync.Ranks, text: Int64, threads: cutlass.Constexpr[int]) -> None:
    """By a block: copies this rank's reason from `text` to every rank of its NVLink domain."""
    for i in cutlass.range(thread_id(), ranks.world_size * WORDS, whole_block(threads)):
        peer = i // WORDS
        number = i - peer * WORDS
        if is_near(ranks, peer):
            reason = Words(ranks.view("reason", ranks.peer(peer)).at(ranks.rank))
            ptx.st_relaxed_sys(reason.at(number), ptx.ld_u64(Words(text).at(number)))


@dataclass(frozen=True)
class Reject(Kernel):
    """One block: store the reason at every rank, set the `rejection` flag there, set the hello flag, and wait until all
    ranks have begun the operation."""

    tokens: int = 0
    """The bound of the latency kernels if they run across domains, because words that other ranks put here may be in
    their buffers; else 0."""

    NAME, Args = "ep_reject", RejectArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (THREADS, 1, 1)}

    @cute.kernel
    def kernel(self, args: RejectArgs) -> None:
        world_size = self.problem.world_size
        heap = LatencyHeap.of(self.problem, self.tokens) if self.tokens else Heap.of(self.problem)
        ranks = sync.Ranks(heap, args.ranks)
        tid = thread_id()
        leave_reason(ranks, args.text, THREADS)
        # The whole block's text comes before each thread's releases.
        arch.sync_threads()
        put_reason(ranks, THREADS)
        for peer in cutlass.range(tid, world_size, THREADS):
            if is_near(ranks, peer):
                # Program order of two releases: a thread that acquires the hello sees the `rejection` flag.
                ranks.signal("rejection", peer, Int32(0))
            ranks.signal("hello", peer, ranks.rank)
        for peer in cutlass.range(tid, world_size, THREADS):
            sync.await_begun(ranks, peer)
        arch.sync_threads()
        operation.add_waits(ranks, tid, THREADS)
        if tid == 0:
            operation.note_begun(ranks)
            settle(ranks)
            operation.note_met(ranks)
            ptx.st_u64(ranks.word(EPOCH), ranks.epoch + 1)
