"""Rejected operations of several NVLink domains: a rank puts its reason to ranks of other domains, and waits until
everything that was put to it has arrived. With one domain these functions add nothing to a kernel."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import ptx
from ..domains import is_near
from ..heap import REASON_BYTES, WORDS_OF_LATENCY, WORDS_OF_RAIL, WORDS_OF_RANKS
from ..ids import warp_id
from ..marks import number_in, same_operation, with_number
from ..sync import Ranks, await_word_of, too_late


def puts_are_late(ranks: Ranks) -> bool:
    """Return whether puts may arrive after what is released behind them."""
    return ranks.heap.problem.num_domains > 1 and ranks.heap.problem.wire.late


@cute.jit
def clear_counts(ranks: Ranks) -> None:
    """By one thread, at the begin of an operation: clear the counts of puts of the next one."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        for rank in cutlass.range(ranks.world_size):
            ptx.st_u64(ranks.of_next("puts").at(rank), Int64(0))


@cute.jit
def put_reason(ranks: Ranks, threads: cutlass.Constexpr[int]) -> None:
    """By a block: send this rank's reason to the ranks of other domains, with one put each from its own copy of it."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        reason = ranks.offsets("reason").at(ranks.rank)
        rank = Int32(warp_id())
        while rank < ranks.world_size and ranks.goes_on:
            if not is_near(ranks, rank):
                word = ranks.offsets("rejected").at(ranks.rank)
                ranks.heap.problem.wire.put_signal(ranks, rank, reason, reason, Int32(REASON_BYTES), word, ranks.mark)
            rank += threads // 32


@cute.jit
def end_rejected(ranks: Ranks) -> None:
    """By one thread, at the end of an operation: if a rank has rejected it, wait until all puts of this rank have
    arrived. Other ranks may not have waited for them, and their destinations are used again."""
    if const_expr(puts_are_late(ranks)):
        rejection = ptx.ld_acquire_sys(ranks.view("rejection").base)
        if same_operation(rejection, ranks.mark):
            settle(ranks)


@cute.jit
def settle(ranks: Ranks) -> None:
    """By one thread of a rank whose other threads put nothing any more in this operation: wait until everything that
    other ranks have put to this rank has arrived. They send the number of their puts. Otherwise late puts would arrive
    in the operation after the next, which uses the same places. A dead rank sends no number, and is named at the
    deadline."""
    if const_expr(puts_are_late(ranks)):
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
    `put_counts`."""
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
