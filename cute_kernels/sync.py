"""Every flag, wait and barrier between ranks. One place, so that each order that a kernel relies on can be read here.

A flag is one 8-byte word in the reader's memory with a single writer. Its value, the mark, says which operation it
belongs to: its epoch, and what the ranks must agree on (marks.py). The epoch is the number of the operation on this
communicator, from 1, the same on all ranks; it lives in device memory and the last block of an operation advances it,
so that captured graphs replay.

Orders that hold:
- `signal` is a system-scope release: what the calling thread wrote before it, and what other threads of its block
  wrote before a block barrier that precedes it, is visible to whoever sees the flag.
- `wait` is a system-scope acquire by the calling thread; a block or warp barrier behind it passes the order on.
- Rows written with ordinary stores and fetched with bulk copies change proxy: `fence_async` by the reader, between
  what it acquired and its copies (in a gather also on the rows' side, whose writer is a kernel of the user).
- A fence at system scope waits for everything that its SM has sent over the link, and an SM does one at a time. Where
  many flags are due, one thread fences once for all that are due by then: warps of a combine hand theirs to another one
  of their block (`Outbox`), staging blocks of a dispatch to a block that does nothing else (throughput/stage.py).
- Every operation signals `hello` to all ranks when it starts and does not end before it saw all hellos. So a rank that
  has left operation e - 1 knows that all ranks have left operation e - 2, and may reuse what that one used.

No wait for another rank lasts for ever: when its deadline passes it claims the report (first come), writes who waited
for whom into host-visible memory, and returns False. The waits that follow, in this kernel and the next ones, then give
up at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from . import ptx
from .carried import Carried
from .heap import CLAIMS, EPOCH, FAILED, TICKET
from .marks import SHIFT

FLAGS = ("hello", "route", "placed", "staged", "chunk", "token", "fetched")
"""Kinds of flag, by the name of their place in the heap; a report carries the index."""

REPORT_WORDS = 16
TIMEOUT, MISMATCH, BAD_EXPERT = 1, 2, 3
"""Reasons in a report. Its words: done mark, reason, flag, rank, peer, detail, expected mark, seen."""

POLLS_PER_CHECK = 256


class Ranks(Carried):
    """What a kernel knows of the group: built once at its start from the launch arguments (see launch.py)."""

    carried = ("peers", "rank", "report", "timeout_ns", "own", "epoch", "parity", "mark")

    def __init__(self, heap, peers, rank, report, timeout_ns, terms):
        self.heap = heap
        self.peers = tuple(peers)
        self.rank = rank
        self.report = report
        self.timeout_ns = timeout_ns
        self.own = select(peers, rank)
        self.epoch = ptx.ld_u64(self.own + EPOCH * 8)
        self.parity = self.epoch & 1
        self.mark = mark_of(self.epoch, terms)

    def at(self, base, name: str):
        """Address of the current half of a heap section in the heap at `base`."""
        return base + getattr(self.heap, name) + self.parity * getattr(self.heap, name + "_stride")

    def signal(self, flag: str, peer, index) -> None:
        """Sets flag `index` at `peer`: releases what this thread (or, before a barrier, its block) wrote."""
        ptx.st_release_sys(self.at(select(self.peers, peer), flag) + Int64(index) * 8, self.mark)

    def wait(self, flag: str, index, peer, detail) -> Boolean:
        """Acquires flag `index` of its kind, set by `peer`. False when the deadline passed or the terms differ."""
        return _wait(
            self.at(self.own, flag) + Int64(index) * 8,
            self.at(self.own, "hello") + Int64(peer) * 8,
            self.mark,
            self.own,
            self.report,
            self.timeout_ns,
            self.rank,
            Int32(peer),
            Int32(detail),
            FLAGS.index(flag),
        )

    def seen(self, flag: str, index) -> Boolean:
        """Acquires flag `index` of its kind if it is set already."""
        return ptx.ld_acquire_sys(self.at(self.own, flag) + Int64(index) * 8) == self.mark


def mark_of(epoch, terms) -> Int64:
    """See marks.py."""
    return (epoch << SHIFT) | Int64(terms)


@cute.jit
def select(values, index) -> Int64:
    """values[index] of a tuple of launch arguments, for an index known at run time."""
    picked = values[0]
    for i in range_constexpr(1, len(values)):
        if index == i:
            picked = values[i]
    return picked


@cute.jit
def _wait(addr, hello, expected, own, report, timeout_ns, rank, peer, detail, flag: cutlass.Constexpr) -> Boolean:
    seen = ptx.ld_acquire_sys(addr)
    if seen != expected:
        start = arch.globaltimer()
        polls = Int32(0)
        reason = Int32(0)
        while seen != expected and reason == 0:
            seen = ptx.ld_acquire_sys(addr)
            polls += 1
            if polls == POLLS_PER_CHECK:
                polls = Int32(0)
                if ptx.ld_u64(own + FAILED * 8) != 0 or arch.globaltimer() - start > timeout_ns:
                    reason = Int32(TIMEOUT)
                # The peer is in the same epoch with other terms: the ranks disagree on what they are doing.
                word = ptx.ld_acquire_sys(hello)
                if seen != expected and word != expected and (word >> SHIFT) == (expected >> SHIFT):
                    reason = Int32(MISMATCH)
                    seen = word
        if seen != expected:
            if ptx.atom_claim(own + FAILED * 8) == 0:
                write_report(report, reason, flag, expected, rank, peer, detail, seen)
    return seen == expected


@cute.jit
def write_report(report, reason, flag, mark, rank, peer, detail, seen):
    """Fills the host-visible report; the done mark is released last."""
    words = (reason, flag, rank, peer, detail, mark, seen)
    for i in range_constexpr(len(words)):
        ptx.st_u64(report + (i + 1) * 8, Int64(words[i]))
    ptx.st_release_sys(report, Int64(1))


@cute.jit
def say_hello(ranks):
    """Tells every rank that this one has begun the operation, hence has left the one before."""
    tid, _, _ = arch.thread_idx()
    bid, _, _ = arch.block_idx()
    if bid == 0 and tid < len(ranks.peers):
        ranks.signal("hello", tid, ranks.rank)


@cute.jit
def finish(ranks, fetched: cutlass.Constexpr = False):
    """Ends an operation: the last block to come here waits for all hellos and opens the next epoch.

    With `fetched` no rank's operation ends before all ranks have come here: nobody reads its memory any more.
    """
    tid, _, _ = arch.thread_idx()
    blocks, _, _ = arch.grid_dim()
    world_size = len(ranks.peers)
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
                if tid < world_size:
                    ranks.signal("fetched", tid, ranks.rank)
                    ranks.wait("fetched", tid, tid, 0)
            if tid < world_size:
                ranks.wait("hello", tid, tid, 0)
            arch.sync_warp()
            if tid == 0:
                ptx.st_u64(ranks.own + CLAIMS * 8, Int64(0))
                ptx.st_u64(ranks.own + TICKET * 8, Int64(0))
                ptx.st_u64(ranks.own + EPOCH * 8, ranks.epoch + 1)


@cute.jit
def claim(own) -> Int32:
    """By a whole warp: claims the next item of the operation that no warp has. The answer, in lane 0, is how many were
    claimed before; it is used late (`granted`), so that nobody waits for it.

    SMs are not equally fast (they share ways to the link), so items that were dealt out beforehand would leave some of
    them waiting for others at the end.
    """
    ticket = Int32(0)
    if arch.lane_idx() == 0:
        ticket = ptx.atom_inc(own + CLAIMS * 8)
    return ticket


def granted(ticket) -> Int32:
    """The answer to a claim, for the whole warp."""
    return arch.shuffle_sync(ticket, 0)


def fence_async() -> None:
    """Orders ordinary accesses of this thread with bulk copies on the same memory."""
    arch.fence_proxy("async")


class Outbox(Carried):
    """Flags that the warps of a block have become due, set by another warp of the block.

    Lane w of the setting warp serves worker w (at most 32). A worker's stores come before its post (release, block
    scope); the setting warp acquires the posts, then fences at system scope, then sets the flags: whoever sees a flag
    sees the stores of the worker's warp.
    """

    DEPTH = 8
    """Flags a worker may have posted that are not set yet; it waits before the next."""

    carried = ("queue", "posted", "taken")

    def __init__(self, workers, queue, posted, taken):
        self.workers = workers
        self.queue = queue
        self.posted = posted
        self.taken = taken


@cute.jit
def new_outbox(smem, workers: cutlass.Constexpr):
    """By the whole block."""
    tid, _, _ = arch.thread_idx()
    queue = smem.allocate_array(Int32, workers * Outbox.DEPTH)
    posted = smem.allocate_array(Int32, workers)
    taken = smem.allocate_array(Int32, workers)
    if tid < workers:
        posted[tid] = 0
        taken[tid] = 0
    arch.sync_threads()
    return Outbox(workers, queue, posted, taken)


@cute.jit
def post(outbox, worker, count, code):
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
def close(outbox, worker, count):
    """By a whole warp: no more flags after `count`."""
    if arch.lane_idx() == 0:
        ptx.st_release_shared(outbox.posted + worker, -count - 1)


@cute.jit
def deliver(outbox, ranks, flag: cutlass.Constexpr, index, per_peer: cutlass.Constexpr):
    """By one warp: sets the flag of each code posted, `index + code % per_peer` at rank `code // per_peer`, until all
    workers have closed."""
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
                heap = select(ranks.peers, code // per_peer)
                ptx.st_relaxed_sys(ranks.at(heap, flag) + Int64(index + code % per_peer) * 8, ranks.mark)
                taken += 1
            if lane < outbox.workers:
                ptx.st_release_shared(outbox.taken + lane, taken)
        more = Int32(arch.vote_any_sync(posted >= 0))
