"""Flags that a block has to set: one of its warps sets them, so that warps that move rows do not wait for fences."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from .. import ptx
from ..carried import Carried
from ..domains import near_rank
from ..ids import thread_id
from ..sync import Ranks


class Outbox(Carried):
    """Flags that the warps of a block have become due, set by another warp of the block.

    Lane w of the setting warp serves worker w (at most 32). A worker's stores come before its post (release, block
    scope); the setting warp acquires the posts, then fences at system scope, then sets the flags: whoever sees a flag
    sees the stores of the worker's warp.

    The code of a flag is stored before the release of `posted` and loaded after its acquire, and its place in `queue`
    is stored to again after the acquire of `taken`, which is released after the load. So all accesses to `queue` are
    ordered by release and acquire at block scope, and those to `posted` and `taken` are strong. racecheck considers
    barriers only: it reports accesses to all three.
    """

    DEPTH = 8
    """Flags a worker may have posted that are not set yet; it waits before the next."""

    carried = ("queue", "posted", "taken")

    def __init__(self, workers: int, queue: Any, posted: Any, taken: Any) -> None:
        self.workers = workers
        self.queue = queue
        self.posted = posted
        self.taken = taken


@cute.jit
def new_outbox(smem: Any, workers: cutlass.Constexpr[int]) -> Outbox:
    """By the whole block."""
    tid = thread_id()
    queue = smem.allocate_array(Int32, workers * Outbox.DEPTH)
    posted = smem.allocate_array(Int32, workers)
    taken = smem.allocate_array(Int32, workers)
    if tid < workers:
        posted[tid] = 0
        taken[tid] = 0
    arch.sync_threads()
    return Outbox(workers, queue, posted, taken)


@cute.jit
def post(outbox: Outbox, worker: Int32, count: Int32, code: Int32) -> None:
    """By a whole warp: its `count`-th flag (from 0) is due."""
    # The stores of the whole warp come before lane 0's release.
    arch.sync_warp()
    if arch.lane_idx() == 0:
        while count - ptx.ld_acquire_shared(outbox.taken + worker) >= Outbox.DEPTH:
            pass
        outbox.queue[worker * Outbox.DEPTH + count % Outbox.DEPTH] = code
        ptx.st_release_shared(outbox.posted + worker, count + 1)
    arch.sync_warp()


@cute.jit
def close(outbox: Outbox, worker: Int32, count: Int32) -> None:
    """By a whole warp: no more flags after `count`."""
    if arch.lane_idx() == 0:
        ptx.st_release_shared(outbox.posted + worker, -count - 1)


@cute.jit
def deliver(outbox: Outbox, ranks: Ranks, flag: cutlass.Constexpr[str], per_peer: cutlass.Constexpr[int]) -> None:
    """By one warp: sets the flag of each code posted, `code % per_peer` at the rank of this NVLink domain with index
    `code // per_peer`, until all workers have closed."""
    lane = arch.lane_idx()
    taken = Int32(0)
    more = Int32(1)
    while more != 0:
        posted = Int32(-1)
        if lane < outbox.workers:
            posted = ptx.ld_acquire_shared(outbox.posted + lane)
        due = posted
        if posted < 0:
            due = -posted - 1
        if arch.vote_any_sync(due > taken):
            arch.fence_acq_rel_sys()
            while taken < due:
                code = outbox.queue[lane * Outbox.DEPTH + taken % Outbox.DEPTH]
                heap = ranks.peer(near_rank(ranks, code // per_peer))
                ptx.st_relaxed_sys(ranks.view(flag, heap).at(code % per_peer), ranks.mark)
                taken += 1
            if lane < outbox.workers:
                ptx.st_release_shared(outbox.taken + lane, taken)
        more = Int32(arch.vote_any_sync(posted >= 0))
