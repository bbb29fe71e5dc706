"""The beginning and the end of an operation at a rank: hello to all, what is noted of it, and who opens the next epoch
when. What that orders is said in sync.py."""

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
    TICKET,
    WORDS_OF_LATENCY,
    WORDS_OF_RAIL,
    WORDS_OF_RANKS,
)
from .marks import number_in, same_operation, with_number
from .sync import Ranks, await_word_of, meet_all, note_of, set_flag, too_late


@cute.jit
def say_hello(ranks: Ranks, number: Int32, threads: cutlass.Constexpr[int], release: cutlass.Constexpr[bool]) -> None:
    """By `threads` threads of one block, `number` 0, 1, ...: signals to every rank that this one has begun the
    operation, hence has left the one before.

    With `release`, who sees the hello sees what kernels before this one wrote (rows, in a gather). Without, it is no
    round trip: for kernels whose peers read nothing that was written before.
    """
    for peer in cutlass.range(number, ranks.world_size, threads):
        set_flag(ranks, "hello", peer, ranks.rank, release)
    if number == 0:
        note_begun(ranks)


@cute.jit
def note_begun(ranks: Ranks) -> None:
    """By one thread: this rank has begun the operation. It has put nothing in the next one."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        heap = ranks.heap
        for rank in cutlass.range(ranks.world_size):
            next_bank = heap.offset["puts"] + (1 - ranks.bank) * heap.distance["puts"]
            ptx.st_u64(ranks.own + next_bank + Int64(rank) * 8, Int64(0))
    ptx.st_u64(note_of(ranks), ranks.mark)
    ptx.st_u64(note_of(ranks) + BEGUN * 8, arch.globaltimer())


@cute.jit
def note_met(ranks: Ranks) -> None:
    """By one thread, when all ranks have been seen in this operation, or a wait for one has failed, which is noted,
    too. Nothing is looked up here: it may be the last thing that an operation does."""
    ptx.st_u64(note_of(ranks) + MET * 8, arch.globaltimer())


@cute.jit
def finish(ranks: Ranks, blocks: Int32, fetched: cutlass.Constexpr[bool] = False) -> None:
    """Ends an operation: the last of so many blocks to come here waits for all hellos and opens the next epoch.

    With `fetched` no rank's operation ends before all ranks have come here: nobody reads its memory any more.
    """
    tid, _, _ = arch.thread_idx()
    # Every thread's reads of staging precede the block's ticket.
    arch.sync_threads()
    if tid < arch.WARP_SIZE:
        last = Int32(0)
        if tid == 0:
            last = Int32(ptx.atom_inc_acq_rel(ranks.own + TICKET * 8) == blocks - 1)
        last = arch.shuffle_sync(last, 0)
        if last != 0:
            if const_expr(fetched):
                # What thread 0 acquired with the ticket, all blocks' reads, comes before every lane's release.
                arch.sync_warp()
                for peer in cutlass.range(tid, ranks.world_size, arch.WARP_SIZE):
                    ranks.signal("fetched", peer, ranks.rank)
                for peer in cutlass.range(tid, ranks.world_size, arch.WARP_SIZE):
                    ranks.wait("fetched", peer, peer, 0)
            meet_all(ranks, tid)
            arch.sync_warp()
            if tid == 0:
                if const_expr(ranks.heap.problem.num_domains > 1):
                    end_refused(ranks)
                note_met(ranks)
                ptx.st_u64(ranks.own + CLAIMS * 8, Int64(0))
                ptx.st_u64(ranks.own + TICKET * 8, Int64(0))
                ptx.st_u64(ranks.own + EPOCH * 8, ranks.epoch + 1)


@cute.jit
def end_refused(ranks: Ranks) -> None:
    """By one thread, at an operation's end: if some rank has refused it, others may not have waited for what this one
    has put, which must arrive before the memory there is used again."""
    if const_expr(ranks.heap.problem.wire.late):
        refusal = ptx.ld_acquire_sys(ranks.at(ranks.own, "refusal"))
        if same_operation(refusal, ranks.mark):
            settle(ranks)


@cute.jit
def settle(ranks: Ranks) -> None:
    """By one thread of a rank whose other threads put nothing any more in this operation: until all has arrived that
    others have put to this one, who send their counts of puts. Puts that nobody waits for would else arrive in the
    operation after the next, which uses the same memory. A dead rank sends no count, and is named at the deadline."""
    if const_expr(ranks.heap.problem.wire.late):
        rank = Int32(0)
        while rank < ranks.world_size and ranks.mark >= 0:
            if not is_near(ranks, rank):
                count = ptx.ld_relaxed_sys(ranks.at(ranks.own, "puts") + Int64(rank) * 8)
                word = ranks.at(Int64(0), "put_counts") + Int64(ranks.rank) * 8
                said = with_number(ranks.mark, count)
                ranks.heap.problem.wire.put_value(ranks, rank, word, said)
            rank += 1
        expected = Int64(0)
        for source in cutlass.range(ranks.world_size):
            if not is_near(ranks, source):
                expected += number_in(await_word_of(ranks, "put_counts", source))
        start, stop, come = Int64(arch.globaltimer()), Boolean(False), Int64(0)
        while come < expected and not stop:
            come = Int64(words_come(ranks))
            if come < expected:
                stop = too_late(ranks, start, "put_counts", ranks.rank, expected)


@cute.jit
def words_come(ranks: Ranks) -> Int32:
    """By one thread: how many words of this operation ranks of other domains have set here, without `put_counts`."""
    p = ranks.heap.problem
    count = Int32(0)
    for name in WORDS_OF_RANKS:
        each = ranks.heap.size[name] // (8 * p.world_size)
        for rank in cutlass.range(p.world_size):
            if not is_near(ranks, rank):
                count += words_set(ranks, name, rank * each, Int32(each))
    for name in (*WORDS_OF_RAIL, *(name for name in WORDS_OF_LATENCY if name in ranks.heap.size)):
        count += words_set(ranks, name, Int32(0), Int32(ranks.heap.size[name] // 8))
    return count


@cute.jit
def words_set(ranks: Ranks, name: cutlass.Constexpr[str], first: Int32, words: Int32) -> Int32:
    count = Int32(0)
    for i in cutlass.range(first, first + words, 1):
        if same_operation(ptx.ld_acquire_sys(ranks.at(ranks.own, name) + Int64(i) * 8), ranks.mark):
            count += 1
    return count
