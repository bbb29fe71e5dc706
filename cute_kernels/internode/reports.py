"""Flags, failures and rejections between ranks of several NVLink domains, which do not map each other's memory
(sync.py). With one domain these functions add nothing to a kernel."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import ptx
from ..domains import is_near, position_of, rank_at
from ..heap import ALIVE, EPOCH, FAILED
from ..marks import KINDS, base_of, kind_in, same_operation

REJECTED_KIND = KINDS.index("rejected")


@cute.jit
def put_flag(ranks: Any, peer: Int32, offset: Int64) -> None:
    """Set a flag at a rank of another domain. Over a wire, a rank that has given up says nothing any more."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        if ranks.goes_on:
            ranks.heap.problem.wire.put_value(ranks, peer, offset, ranks.mark)


def put_alarm(ranks: Any, peer: Int32, alarm: Int64) -> None:
    """Send an alarm to a rank of another domain. Two words may arrive in any order, so waits across domains check the
    alarm itself."""
    if ranks.heap.problem.num_domains > 1:
        ranks.heap.problem.wire.put_value(ranks, peer, ranks.lasting("alarm", Int64(0)).base, alarm)


@cute.jit
def heed_alarm(ranks: Any) -> None:
    """By any thread: copy an alarm of another NVLink domain, whose ranks set nothing else, to this rank's state."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        if ptx.ld_acquire_sys(ranks.lasting("alarm").base) != 0:
            ptx.atom_fail_by_peer(ranks.word(FAILED))


@cute.jit
def heed_rejections(ranks: Any) -> None:
    """By any thread: copy the rejection words that ranks of other NVLink domains set to the `rejection` flag."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        for rank in cutlass.range(ranks.world_size):
            word = ranks.view("rejected").at(rank)
            if same_operation(ptx.ld_relaxed_sys(word), ranks.mark):
                ptx.st_release_sys(ranks.view("rejection").base, ptx.ld_acquire_sys(word))


@cute.jit
def rejection_follows(ranks: Any, hello: Int64) -> Boolean:
    """Return whether a hello is that of a rank that rejects the operation, whose `rejection` flag may arrive after the
    hello."""
    follows = Boolean(False)
    if const_expr(ranks.heap.problem.num_domains > 1):
        follows = kind_in(hello ^ ranks.base) == REJECTED_KIND
    return follows


def show_alive(ranks: Any) -> None:
    """By any thread that waits: say when it has last looked why, for `is_silent`."""
    if ranks.heap.problem.num_domains > 1:
        ptx.st_relaxed_sys(ranks.word(ALIVE), arch.globaltimer())


@cute.jit
def late_rank(ranks: Any, peer: Int32) -> Int32:
    """By one thread whose wait for `peer` has reached its deadline: return the rank to name in the error.

    A stager does not know which rank of its domain has the copy that it waits for, and a rank that waits for relayed
    data does not know whether the source or the stager is late. If `peer` is not silent, this returns a rank of this
    domain that is.
    """
    found = Int32(peer)
    if const_expr(ranks.heap.problem.num_domains > 1):
        if not is_silent(ranks, peer):
            domain, _ = position_of(ranks, ranks.rank)
            for index in cutlass.range(ranks.heap.problem.domain_ranks):
                mate = rank_at(ranks, domain, index)
                if is_silent(ranks, mate):
                    found = mate
    return found


@cute.jit
def is_silent(ranks: Any, rank: Int32) -> Boolean:
    """Return whether `rank` is another rank of this domain, in the same operation, none of whose threads has been
    waiting recently: it is dead, or does not launch what is expected of it."""
    found = Boolean(False)
    if rank != ranks.rank:
        if is_near(ranks, rank):
            heap = ranks.peer(rank)
            since = arch.globaltimer() - ptx.ld_relaxed_sys(ranks.word(ALIVE, heap))
            its = base_of(ptx.ld_relaxed_sys(ranks.word(EPOCH, heap)))
            found = since > ranks.timeout_ns // 2 and same_operation(its, ranks.mark)
    return found
