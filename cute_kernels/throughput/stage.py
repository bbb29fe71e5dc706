"""Staging: x is copied to where peers fetch its rows, chunk by chunk, and each chunk is announced to the peers.

There are two kinds of blocks. Staging blocks use bulk copies, and mark a chunk in this rank's own memory (release,
device scope). One announcing block polls these marks and sets the flags at the peers. A system-scope release waits for
all of its SM's outstanding stores over the link, which takes many microseconds while the link is busy, so blocks that
announced their own chunks would spend most of their time in releases. The announcing block fences once for all chunks
that have been staged since its last fence.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute import arch

from .. import ptx, sync
from ..barriers import whole_block
from ..copies import pop_lowest
from ..domains import neighbor
from ..heap import CHUNK_BYTES, Problem
from ..ids import thread_id, warp_id
from ..views import Records
from .ring import Ring, RingShape, init_ring_barriers
from .route import THREADS

MOST_WARPS = 16
"""The most warps of a staging block that copy."""
BARRIER = 8
"""Bytes of shared memory of a barrier."""
LEAST_PIECE = 128
"""The fewest bytes that a warp copies at a time, unless a chunk has fewer."""
BYTES_UNDER_WAY = 5 * 2**19
"""Bytes that all staging blocks together copy at a time, rounded up to whole warps of each block, as far as these have
shared memory: enough to be well ahead of the peers. With more the route, which is placed meanwhile, would be ready
later."""


def ring_shape(problem: Problem, shared_bytes: int) -> RingShape:
    """Return a ring with one piece for each copying warp of a block: a chunk, or a part of one for large rows or little
    memory."""
    chunk = problem.chunk_tokens * problem.row_bytes
    piece = min(chunk, CHUNK_BYTES, max(LEAST_PIECE, (shared_bytes - BARRIER) // 128 * 128))
    warps = max(1, min(MOST_WARPS, shared_bytes // (-(-piece // 128) * 128 + BARRIER)))
    return RingShape(chunk, warps, 1, piece)


@cute.jit
def stage(
    shape: cutlass.Constexpr[RingShape], ranks: sync.Ranks, smem: Any, x: Int64, tokens: Int32, copier: Int32,
    copiers: Int32,
) -> None:  # fmt: skip
    """By block `copier` of `copiers`: copies its chunks of x into staging and marks each."""
    problem = ranks.heap.problem
    warp = warp_id()
    barriers = smem.allocate_array(Int64, shape.warps)
    buffers = smem.allocate_array(Uint8, shape.warps * shape.stride, byte_alignment=128)
    if thread_id() < 32:
        init_ring_barriers(barriers, shape.warps)
    arch.sync_threads()
    pieces = BYTES_UNDER_WAY // shape.piece_bytes
    warps = cutlass.max(1, cutlass.min(shape.warps, (pieces + copiers - 1) // copiers))
    if warp < warps and arch.lane_idx() == 0:
        ring = Ring(shape, buffers, barriers, warp)
        staging = ranks.view("rows").base
        marks = ranks.view("chunk").part(ranks.rank)
        phase = Int32(0)
        chunk = warp * copiers + copier
        while chunk * problem.chunk_tokens < tokens:
            # Offsets in x and in staging.
            at, all_rows = Records(Int64(0), shape.row_bytes).at(chunk), Records(Int64(0), problem.row_bytes).at(tokens)
            end = cutlass.min(at + shape.row_bytes, all_rows)
            while at < end:
                nbytes = Int32(cutlass.min(end - at, Int64(shape.piece_bytes)))
                ring.load(0, x + at, nbytes)
                ring.wait(0, phase)
                phase = phase ^ 1
                ring.store(0, staging + at, nbytes)
                arch.cp_async_bulk_commit_group()
                # The piece has left shared memory, which may be filled again.
                arch.cp_async_bulk_wait_group(0, read=True)
                at += shape.piece_bytes
            # All of the chunk lies in memory before its mark is released.
            arch.cp_async_bulk_wait_group(0)
            ptx.st_release_gpu(marks.at(chunk), ranks.own_mark)
            chunk += warps * copiers


@cute.jit
def flag_chunks(ranks: sync.Ranks, group: Int32, found: Int32) -> None:
    """By a warp that has fenced: sets the flags of chunks at the peers. Lane w has those that warp w has `found`, as
    bits from chunk `group` on."""
    lane = arch.lane_idx()
    left = arch.vote_ballot_sync(found != 0)
    while left != 0:
        w, left = pop_lowest(left)
        at = arch.shuffle_sync(group, w) + lane
        if (arch.shuffle_sync(found, w) >> lane) & 1 != 0:
            r = Int32(1)
            while r < ranks.heap.problem.domain_ranks:
                flags = ranks.view("chunk", ranks.peer(neighbor(ranks, r))).part(ranks.rank)
                ptx.st_relaxed_sys(flags.at(at), ranks.mark)
                r += 1


@cute.jit
def announce(ranks: sync.Ranks, smem: Any, tokens: Int32, own: cutlass.Constexpr[bool]) -> None:
    """By one block, the first behind the tile blocks. Those that it waits for wait for nobody: they run and end as soon
    as there is a multiprocessor for one of them. Their marks do not depend on whether this rank has given up when they
    start, since this wait has no deadline.

    Each warp looks at 32 chunks at a time until all of them are announced. Those that it finds go to the first warp
    through shared memory; that warp fences, and then its lanes set the flags: one fence for all that were found. There
    are 1024 threads: each lane of the first warp reads what one of the 32 warps has found. Peers are those of this
    rank's NVLink domain. `own`: this rank fetches its own rows from staging, too.
    """
    problem = ranks.heap.problem
    tid = thread_id()
    lane = arch.lane_idx()
    warps = whole_block(THREADS) // 32
    warp = warp_id()
    # What each warp has found, as a mask of its chunks. Held twice and used in turn: a warp may write what it finds
    # next while the first warp still reads.
    masks = smem.allocate_array(Int32, 2 * warps)
    chunks = (tokens + problem.chunk_tokens - 1) // problem.chunk_tokens
    marks = ranks.view("chunk").part(ranks.rank)
    chunk = Int32(tid)
    mine = Int32(0)  # of this warp's 32 chunks, those that it has found
    group, done = Int32(lane * 32), Int32(0)  # the same of warp `lane`: its first chunk, and what it has found of them
    announced, side = Int32(0), Int32(0)
    while announced < chunks:
        ready = Int32(0)
        if chunk < chunks and (mine >> lane) & 1 == 0:
            ready = Int32(ptx.ld_acquire_gpu(marks.at(chunk)) == ranks.own_mark)
        mask = arch.vote_ballot_sync(ready != 0)
        if lane == 0:
            (masks + (side + warp)).store(mask)
        mine = mine | mask
        if mine == -1:
            mine = Int32(0)
            chunk += THREADS
        # Hands masks, and what every thread acquired, to the first warp.
        found = ptx.barrier_count(ready)
        if found != 0 and warp == 0:
            theirs = (masks + (side + lane)).load()
            # Every lane fences before the flags that it sets itself.
            arch.fence_acq_rel_sys()
            flag_chunks(ranks, group, theirs)
            done = done | theirs
            if done == -1:
                done = Int32(0)
                group += THREADS
        side = warps - side
        announced += found
    nearest = 0 if own else 1
    if tid >= nearest and tid < problem.domain_ranks:
        ranks.signal("staged", neighbor(ranks, tid), ranks.rank)
