"""How an operation begins and ends where not all ranks are mapped: as in sync.py, but they tell each other over a wire.

A rank that has given up says so with one word, its alarm, since two words might arrive in any order: waits here look at
the alarm itself (`sync.await_word`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import EPOCH, FAILED, TICKET
from ..marks import SHIFT
from .wire import Wire


@cute.jit
def begin(wire: cutlass.Constexpr[Wire], ranks: sync.Ranks, number: Int32, threads: cutlass.Constexpr[int]) -> None:
    """By `threads` threads of one block, `number` 0, 1, ...: tells every rank that this one has begun the operation,
    hence has left the one before."""
    peer = Int32(number)
    word = ranks.at(Int64(0), "hello") + Int64(ranks.rank) * 8
    while peer < ranks.world_size:
        wire.put_value(ranks, peer, word, ranks.mark)
        peer += threads
    if number == 0:
        sync.note_begun(ranks)


@cute.jit
def meet(wire: cutlass.Constexpr[Wire], ranks: sync.Ranks, peer: Int32) -> None:
    """By one thread, at an operation's end: until `peer` has begun it, with the same terms, or it is given up."""
    terms = Int32(wire.wait(ranks, ranks.at(Int64(0), "hello") + Int64(peer) * 8, peer, Int32(0)))
    if terms >= 0 and terms != Int32(ranks.mark & ((1 << SHIFT) - 1)):
        seen = ((ranks.mark >> SHIFT) << SHIFT) | Int64(terms)
        sync.fail(ranks, Int32(sync.MISMATCH), "hello", peer, Int32(0), seen)


@cute.jit
def finish(wire: cutlass.Constexpr[Wire], ranks: sync.Ranks, blocks: Int32) -> None:
    """Ends an operation: the last of so many blocks to come here waits for all hellos, tells all ranks if this one has
    given up, and opens the next epoch."""
    tid, _, _ = arch.thread_idx()
    # Every thread's reads of what came precede the block's ticket.
    arch.sync_threads()
    if tid < arch.WARP_SIZE:
        last = Int32(0)
        if tid == 0:
            last = Int32(ptx.atom_inc_acq_rel(ranks.own + TICKET * 8) == blocks - 1)
        last = arch.shuffle_sync(last, 0)
        if last != 0:
            peer = Int32(tid)
            while peer < ranks.world_size:
                meet(wire, ranks, peer)
                peer += arch.WARP_SIZE
            # What each lane has met, or given up, comes before lane 0's looks.
            arch.sync_warp()
            if tid == 0:
                tell_all(wire, ranks)
                sync.note_met(ranks)
                ptx.st_u64(ranks.own + TICKET * 8, Int64(0))
                ptx.st_u64(ranks.own + EPOCH * 8, ranks.epoch + 1)


@cute.jit
def tell_all(wire: cutlass.Constexpr[Wire], ranks: sync.Ranks) -> None:
    """By one thread: if this rank has given up, and was not told to, leaves its alarm with every rank."""
    if ptx.ld_relaxed_sys(ranks.own + FAILED * 8) != 0:
        alarm = sync.own_alarm(ranks)
        peer = Int32(0)
        while alarm != 0 and peer < ranks.world_size:
            wire.put_value(ranks, peer, Int64(ranks.heap.offset["alarm"]), alarm)
            peer += 1
