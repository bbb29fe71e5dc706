"""Begin and end of an operation at a rank: hello flags, the log, and the step to the next epoch. sync.py states the
memory order that these establish."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import arch

from . import ptx
from .heap import BEGUN, CLAIMS, EPOCH, MET, NOTES, SUM_LAG, TICKET, WAIT_BITS
from .ids import thread_id
from .internode.rejected import clear_counts, end_rejected
from .sync import Ranks, meet_all, note_of, set_flag


@cute.jit
def say_hello(ranks: Ranks, number: Int32, threads: cutlass.Constexpr[int], release: cutlass.Constexpr[bool]) -> None:
    """By `threads` threads of one block, `number` 0, 1, ...: set this rank's hello flag at every rank. It means that
    this rank has begun the operation, and hence has left the previous one.

    With `release`, the store is a system-scope release: a rank that acquires the hello sees what earlier kernels of
    this rank wrote (rows, in a gather). Without it, the store is relaxed and costs no round trip, for kernels whose
    peers read nothing that was written before.
    """
    for peer in cutlass.range(number, ranks.world_size, threads):
        set_flag(ranks, "hello", peer, ranks.rank, release)
    if number == 0:
        note_begun(ranks)
    add_waits(ranks, number, threads)


@cute.jit
def note_begun(ranks: Ranks) -> None:
    """By one thread: log that this rank has begun the operation."""
    clear_counts(ranks)
    ptx.st_u64(note_of(ranks).base, ranks.mark)
    ptx.st_u64(note_of(ranks).at(BEGUN), arch.globaltimer())


@cute.jit
def add_waits(ranks: Ranks, number: Int32, threads: cutlass.Constexpr[int]) -> None:
    """By `threads` threads of one block, `number` 0, 1, ..., that have begun an operation: add how long this rank
    waited for each rank in the operation `SUM_LAG` before to the sums, which these threads alone write."""
    if const_expr(ranks.heap.problem.counts_waits):
        before = ranks.epoch - SUM_LAG
        for peer in cutlass.range(number, ranks.world_size, threads):
            longest = ptx.ld_u64(ranks.lasting("waited").at(before & (NOTES - 1), peer))
            if longest >> WAIT_BITS == before >> NOTES.bit_length() - 1:
                waits = ranks.lasting("waits").at(peer)
                ptx.st_u64(waits, ptx.ld_u64(waits) + (longest & ((1 << WAIT_BITS) - 1)))


@cute.jit
def note_met(ranks: Ranks) -> None:
    """By one thread: log that all ranks have begun this operation, or that a wait for one has failed. Reads nothing,
    because it may be the last step of an operation."""
    ptx.st_u64(note_of(ranks).at(MET), arch.globaltimer())


@cute.jit
def finish(ranks: Ranks, blocks: Int32, fetched: cutlass.Constexpr[bool] = False) -> None:
    """End an operation. The last of `blocks` blocks to call this waits for all hellos and advances the epoch.

    With `fetched`, no rank's operation ends before all ranks have called this, so that no peer reads its memory
    afterwards.
    """
    tid = thread_id()
    # Orders every thread's reads of staging before the block's ticket.
    arch.sync_threads()
    if tid < arch.WARP_SIZE:
        last = Int32(0)
        if tid == 0:
            last = Int32(ptx.atom_inc_acq_rel(ranks.word(TICKET)) == blocks - 1)
        last = arch.shuffle_sync(last, 0)
        if last != 0:
            if const_expr(fetched):
                # Orders all blocks' reads, which thread 0 acquired with the ticket, before every lane's release.
                arch.sync_warp()
                for peer in cutlass.range(tid, ranks.world_size, arch.WARP_SIZE):
                    ranks.signal("fetched", peer, ranks.rank)
                for peer in cutlass.range(tid, ranks.world_size, arch.WARP_SIZE):
                    ranks.wait("fetched", peer, peer, 0)
            meet_all(ranks, tid)
            arch.sync_warp()
            if tid == 0:
                end_rejected(ranks)
                note_met(ranks)
                ptx.st_v4(ranks.word(CLAIMS), (Int32(0),) * 4)  # PUSHES, too
                ptx.st_u64(ranks.word(TICKET), Int64(0))
                ptx.st_u64(ranks.word(EPOCH), ranks.epoch + 1)
