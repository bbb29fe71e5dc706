"""Begin and end of an operation at a rank: hello flags, the log, and the step to the next epoch. sync.py states the
memory order that these establish."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from . import ptx
from .domains import is_near
from .heap import (
    BEGUN,
    CLAIMS,
    EPOCH,
    MET,
    NOTES,
    SUM_LAG,
    TICKET,
    WAIT_BITS,
    WORDS_OF_LATENCY,
    WORDS_OF_RAIL,
    WORDS_OF_RANKS,
)
from .marks import number_in, same_operation, with_number
from .sync import Ranks, await_word_of, meet_all, note_of, set_flag, too_late


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
    """By one thread: log that this rank has begun the operation, and clear the counts of puts of the next one."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        for rank in cutlass.range(ranks.world_size):
            ptx.st_u64(ranks.of_next("puts").at(rank), Int64(0))
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
    tid, _, _ = arch.thread_idx()
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
                if const_expr(ranks.heap.problem.num_domains > 1):
                    end_rejected(ranks)
                note_met(ranks)
                ptx.st_v4(ranks.word(CLAIMS), (Int32(0),) * 4)  # PUSHES, too
                ptx.st_u64(ranks.word(TICKET), Int64(0))
                ptx.st_u64(ranks.word(EPOCH), ranks.epoch + 1)


@cute.jit
def end_rejected(ranks: Ranks) -> None:
    """By one thread, at the end of an operation: if a rank has rejected it, wait until all puts of this rank have
    arrived. Other ranks may not have waited for them, and their destinations are used again."""
    if const_expr(ranks.heap.problem.wire.late):
        rejection = ptx.ld_acquire_sys(ranks.view("rejection").base)
        if same_operation(rejection, ranks.mark):
            settle(ranks)


@cute.jit
def settle(ranks: Ranks) -> None:
    """By one thread of a rank whose other threads put nothing any more in this operation: wait until everything that
    other ranks have put to this rank has arrived. They send the number of their puts. Otherwise late puts would arrive
    in the operation after the next, which uses the same places. A dead rank sends no number, and is named at the
    deadline."""
    if const_expr(ranks.heap.problem.wire.late):
        rank = Int32(0)
        while rank < ranks.world_size and ranks.goes_on:
            if not is_near(ranks, rank):
                count = ptx.ld_relaxed_sys(ranks.view("puts").at(rank))
                word = ranks.offsets("put_counts").at(ranks.rank)
                said = with_number(ranks.base, count)
                ranks.heap.problem.wire.put_value(ranks, rank, word, said)
            rank += 1
        expected = Int64(0)
        for source in cutlass.range(ranks.world_size):
            if not is_near(ranks, source):
                said = await_word_of(ranks, "put_counts", source)
                if said != 0:
                    expected += number_in(said, ranks.base)
        start, stop, come = Int64(arch.globaltimer()), Boolean(False), Int64(0)
        while come < expected and not stop:
            come = Int64(words_come(ranks))
            if come < expected:
                stop = too_late(ranks, start, "put_counts", ranks.rank, expected)


@cute.jit
def words_come(ranks: Ranks) -> Int32:
    """By one thread: return the number of words of this operation that ranks of other domains have set here, without
    `sent`."""
    p = ranks.heap.problem
    count = Int32(0)
    for name in WORDS_OF_RANKS:
        each = max(1, ranks.heap.section[name].length // p.world_size)
        for rank in cutlass.range(p.world_size):
            if not is_near(ranks, rank):
                count += words_set(ranks, name, rank * each, Int32(each))
    for name in (*WORDS_OF_RAIL, *(name for name in WORDS_OF_LATENCY if name in ranks.heap.section)):
        count += words_set(ranks, name, Int32(0), Int32(ranks.heap.section[name].length))
    return count


@cute.jit
def words_set(ranks: Ranks, name: cutlass.Constexpr[str], first: Int32, words: Int32) -> Int32:
    count = Int32(0)
    for i in cutlass.range(first, first + words, 1):
        if same_operation(ptx.ld_acquire_sys(ranks.view(name).flat.at(i)), ranks.mark):
            count += 1
    return count
