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
  many flags are due, one thread fences once for all that are due by then: warps of a combine hand theirs to another
  one of their block (throughput/outbox.py), staging blocks of a dispatch to a block that does nothing else (stage.py).
- Every operation signals `hello` to all ranks when it starts and does not end before it saw all hellos. So a rank that
  has left operation e - 1 knows that all ranks have left operation e - 2, and may reuse what that one used.

No wait for another rank lasts for ever (`why_stop`, for flags and packets alike): when its deadline passes it claims
the report (first come), writes who waited for whom into host-visible memory, and ends. The waits that follow, in this
kernel and the next ones, then give up at once, and at the end of the operation, or when the host sees the report, all
ranks are told (`pass_on`): their waits give up, too, for that one cause.

What a rank sends does not depend on what it receives in the same operation, but it may on what it received in an
earlier one. So whatever it sends behind the operation in which it gave up carries marks that nobody waits for
(marks.py), and no peer takes garbage for good.

A rank that refuses an operation (its host does, for an argument that cannot be taken) uses up the operation's number
all the same: it leaves its reason with all ranks, sets their `refusal` word, and says hello (refusal.py). Waits of that
operation then give up, on every rank and for whomever they wait; the reason is reported, and the next operation is as
any other. For an operation that is given up by a refusal the hellos of all ranks are still awaited.

Ranks of several NVLink domains (domains.py) store only in their own one's memory, and tell others by puts on a wire
(internode/wire.py), of which nothing is known but that a word comes behind the bytes of its own put. So across domains
a flag that is set alone says nothing else; a rank that has given up puts nothing any more; and an operation that was
refused ends at a rank when all that was put to it has arrived (`settle`).
"""

import copy
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from . import ptx
from .carried import Carried
from .domains import is_near, position_of, rank_at
from .heap import (
    ALIVE,
    EPOCH,
    FAILED,
    GAVE_UP,
    LATE,
    NOTE_WORDS,
    NOTES,
    REFUSED,
    WAIT_BITS,
    WAIT_UNIT,
    Heap,
)
from .launch import RankArgs
from .marks import ALARM_BITS, GIVEN_UP, KINDS, SHIFT, kind_in, number_in, same_operation

FLAGS = ("hello", "route", "placed", "staged", "chunk", "token", "fetched", "counted", "batch", "put_counts")
"""Kinds of flag, by the name of their section of the heap; a record carries the index."""

OWN_FLAGS = ("placed", "counted")
"""Those that blocks of one rank set for each other."""

REPORT_WORDS = 16
"""Words (8 bytes each) of each record of the report, which the host sees. The first record is for a wait that failed,
the second for a value that was refused, the third for an operation that a peer refused, the fourth for a wait that
lasts long."""
TIMEOUT, MISMATCH, BAD_EXPERT, BAD_ROW, REFUSAL, PEER_FAILED, HALF, BAD_SCALE, WAITING = range(1, 10)
"""Reasons in a record. Its words are done mark, reason, flag, rank, peer, detail, expected mark, seen. PEER_FAILED:
another rank has given up, and has left its alarm here. HALF: this rank's host has launched a part of an operation and
cannot launch the rest. Alarms have room for reasons up to HALF."""
FAILED_BY_PEER = 3
"""The state's word FAILED is 0, 1 when this rank has given up and reports it, or this: another rank has told it to."""
LONG_NS = 60_000_000_000
"""A flag that has been awaited for so long, or for a tenth of the deadline, is told of."""

REFUSED_KIND = KINDS.index("refused")

POLLS_PER_CHECK = 256
"""How many times a waiting thread looks for what it waits for between two looks at the deadline."""


class Ranks(Carried):
    """What a kernel knows of the group: built once at its start from the launch arguments."""

    carried = ("peers", "rank", "report", "timeout_ns", "terms", "own", "epoch", "bank", "mark")

    def __init__(self, heap: Heap, args: RankArgs) -> None:
        self.heap: Any = heap  # or LatencyHeap, where that is what the kernel is made for
        self.peers = args.peers
        self.rank = args.rank
        self.report = args.report
        self.timeout_ns = args.timeout_ns
        self.terms = args.terms
        self.own = args.own
        self.epoch, failed = ptx.ld_u64_pair(self.own + EPOCH * 8)
        self.bank = self.epoch & 1
        self.mark = mark_of(self.epoch, self.terms, failed)

    @property
    def world_size(self) -> int:
        return self.heap.problem.world_size

    def peer(self, rank: Int32) -> Int64:
        """Address of a rank's heap."""
        return ptx.ld_constant(self.peers + Int64(rank) * 8)

    def at(self, base: Int64, name: str) -> Int64:
        """Address of a heap section in the heap at `base`, in the bank that this operation uses."""
        return base + self.heap.offset[name] + self.bank * self.heap.distance[name]

    def signal(self, flag: str, peer: Int32, index: Int32) -> None:
        """Sets flag `index` at `peer`: releases what this thread (or, before a barrier, its block) wrote. At a rank of
        another NVLink domain the flag says nothing but itself."""
        set_flag(self, flag, Int32(peer), Int32(index), True)

    def wait(self, flag: str, index: Int32, peer: Int32, detail: Int32 | int) -> Boolean:
        """Acquires flag `index` of its kind, set by `peer`. False when it gave up (`why_stop`)."""
        return await_flag(self, self.at(self.own, flag) + Int64(index) * 8, flag, Int32(peer), Int32(detail))

    def seen(self, flag: str, index: Int32) -> Boolean:
        """Acquires flag `index` of its kind if it is set already."""
        return ptx.ld_acquire_sys(self.at(self.own, flag) + Int64(index) * 8) == self.mark


@cute.jit
def set_flag(
    ranks: Ranks, flag: cutlass.Constexpr[str], peer: Int32, index: Int32, release: cutlass.Constexpr[bool]
) -> None:
    place = ranks.at(Int64(0), flag) + Int64(index) * 8
    if const_expr(not ranks.heap.problem.domains):
        store_flag(ranks.peer(peer) + place, ranks.mark, release)
    else:
        if is_near(ranks, peer):
            store_flag(ranks.peer(peer) + place, ranks.mark, release)
        elif ranks.mark >= 0:  # over a wire, who has given up says nothing any more
            ranks.heap.problem.wire.put_value(ranks, peer, place, ranks.mark)


def store_flag(address: Int64, mark: Int64, release: bool) -> None:
    store = ptx.st_release_sys if release else ptx.st_relaxed_sys
    store(address, mark)


def again(ranks: Ranks) -> Ranks:
    """`ranks` with the epoch read anew: a load that is issued here and used late does not delay the loads before it."""
    new = copy.copy(ranks)
    new.epoch, failed = ptx.ld_u64_pair(ranks.own + EPOCH * 8)
    new.bank = new.epoch & 1
    new.mark = mark_of(new.epoch, ranks.terms, failed)
    return new


def mark_of(epoch: Int64, terms: Int32, failed: Int64) -> Int64:
    """See marks.py. `failed` is odd if this rank has given up, else 0."""
    return (epoch << SHIFT) | Int64(terms) | (failed << GIVEN_UP)


# ---------------------------------------------------------------------- waits


@cute.jit
def await_flag(ranks: Ranks, addr: Int64, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32) -> Boolean:
    """By one thread: acquires the flag at `addr`. False when it gave up."""
    seen = ptx.ld_acquire_sys(addr)
    if seen != ranks.mark:
        start = arch.globaltimer()
        polls = Int32(0)
        reason, instead = Int32(0), Int64(0)
        while seen != ranks.mark and reason == 0:
            seen = ptx.ld_acquire_sys(addr)
            polls += 1
            if polls == POLLS_PER_CHECK:
                polls = Int32(0)
                reason, instead = why_stop(ranks, start, peer)
                # Pulling warps, which await chunks, have no registers for that.
                if const_expr(flag != "chunk"):
                    if arch.globaltimer() - start > cutlass.min(ranks.timeout_ns // 10, Int64(LONG_NS)):
                        if ptx.atom_claim(ranks.own + LATE * 8, ranks.mark) != ranks.mark:
                            write_report(ranks, 3, Int32(WAITING), Int32(FLAGS.index(flag)), peer, detail, seen)
        if const_expr(flag not in OWN_FLAGS):
            note_wait(ranks, peer, start)
        if seen != ranks.mark:
            fail(ranks, reason, flag, peer, detail, seen if reason == TIMEOUT else instead)
    return seen == ranks.mark


@cute.jit
def await_word(
    ranks: Ranks, addr: Int64, peer: Int32, detail: Int32, deadlines: cutlass.Constexpr[int] = 1
) -> Int64:  # fmt: skip
    """By one thread: acquires a word of this operation, which carries a number where marks have terms: that number, or
    -1 when it gave up. Ranks tell each other to by the alarm alone here. `deadlines`: 2, where `peer` may be waiting
    for another rank, and then names it."""
    seen = ptx.ld_acquire_sys(addr)
    start = Int64(arch.globaltimer())
    waited = not same_operation(seen, ranks.mark)
    polls = Int32(0)
    reason, instead = Int32(0), Int64(0)
    while not same_operation(seen, ranks.mark) and reason == 0:
        seen = ptx.ld_acquire_sys(addr)
        polls += 1
        if polls == POLLS_PER_CHECK:
            polls = Int32(0)
            reason, instead = why_stop(ranks, start + (deadlines - 1) * ranks.timeout_ns, peer)
            alarm = ptx.ld_acquire_sys(ranks.own + ranks.heap.offset["alarm"])
            if alarm != 0:
                reason = Int32(PEER_FAILED)
                instead = alarm
    number = number_in(seen)
    if waited:
        note_wait(ranks, peer, start)
    if not same_operation(seen, ranks.mark):
        number = Int64(-1)
        fail(ranks, reason, "batch", peer, detail, seen if reason == TIMEOUT else instead)
    return number


@cute.jit
def note_wait(ranks: Ranks, peer: Int32, start: Int64) -> None:
    """By one thread that has waited for `peer` since `start`: kept, for people who look who is waited for, if no other
    wait for that rank in this operation was longer. Nothing is waited for here."""
    lasted = cutlass.min((arch.globaltimer() - start) >> WAIT_UNIT, Int64((1 << WAIT_BITS) - 1))
    place = (ranks.epoch & (NOTES - 1)) * ranks.world_size + peer
    ptx.red_max(
        ranks.own + ranks.heap.offset["waited"] + place * 8,
        (ranks.epoch >> NOTES.bit_length() - 1 << WAIT_BITS) | lasted,
    )


@cute.jit
def warp_gives_up(
    ranks: Ranks, start: Int64, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32, seen: Int64
) -> Boolean:
    """By a whole warp that has waited for `peer` since `start`, now and then: whether it waits no longer. Arguments are
    those of lane 0; `seen` is the mark that it found last."""
    given_up = Int32(0)
    if arch.lane_idx() == 0:
        given_up = Int32(gives_up(ranks, start, flag, peer, detail, seen))
    return arch.shuffle_sync(given_up, 0) != 0


@cute.jit
def gives_up(
    ranks: Ranks, start: Int64, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32, seen: Int64
) -> Boolean:
    """The same by one thread."""
    reason, instead = why_stop(ranks, start, peer)
    if reason != 0:
        fail(ranks, reason, flag, peer, detail, seen if reason == TIMEOUT else instead)
    return reason != 0


@cute.jit
def why_stop(ranks: Ranks, start: Int64, peer: Int32) -> tuple[Int32, Int64]:
    """By one thread that has waited for `peer` since `start`: the reason to wait no longer, or 0, and the mark that
    says so: the peer's hello, or the refusal.

    That is so when the deadline has passed, when this rank has given up before or was told to, when some rank refuses
    the operation, or when the peer has said hello with other terms: the ranks disagree on what they are doing. Blocks
    that wait for others of their own rank have twice as long: those may be waiting for a peer, and then name it.
    """
    reason = Int32(0)
    limit = ranks.timeout_ns
    if peer == ranks.rank:
        limit = 2 * ranks.timeout_ns
    heed_alarm(ranks)
    if const_expr(ranks.heap.problem.num_domains > 1):
        ptx.st_relaxed_sys(ranks.own + ALIVE * 8, arch.globaltimer())
    failed = ptx.ld_acquire_sys(ranks.own + FAILED * 8)
    if failed != 0 or arch.globaltimer() - start > limit:
        reason = Int32(TIMEOUT)
    mark = ptx.ld_acquire_sys(ranks.at(ranks.own, "hello") + Int64(peer) * 8)
    heed_refusals(ranks)
    # A rank that refuses says so before it says hello: whoever sees its hello sees this.
    refusal = ptx.ld_acquire_sys(ranks.at(ranks.own, "refusal"))
    if mark != ranks.mark and same_operation(mark, ranks.mark):
        if const_expr(not ranks.heap.problem.domains):
            reason = Int32(MISMATCH)
        elif kind_in(mark) != REFUSED_KIND:  # a refusal may come later than the hello
            reason = Int32(MISMATCH)
    if same_operation(refusal, ranks.mark):
        reason = Int32(REFUSAL)
        mark = refusal
    return reason, mark


@cute.jit
def heed_alarm(ranks: Ranks) -> None:
    """By any thread: ranks of other NVLink domains leave an alarm and nothing else; now this rank's state says so."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        if ptx.ld_acquire_sys(ranks.own + ranks.heap.offset["alarm"]) != 0:
            ptx.atom_fail_by_peer(ranks.own + FAILED * 8)


@cute.jit
def late_rank(ranks: Ranks, peer: Int32) -> Int32:
    """By one thread whose wait for `peer` has reached its deadline: who is to be named.

    A stager does not know which rank of its domain has the copy that it waits for, nor does a rank that waits for what
    its stager relays know which of the two is late. So where `peer` itself is not silent, a rank of this one's domain
    that is."""
    found = Int32(peer)
    if not is_silent(ranks, peer):
        domain, _ = position_of(ranks, ranks.rank)
        index = Int32(0)
        while index < ranks.heap.problem.domain_ranks:
            mate = rank_at(ranks, domain, index)
            if is_silent(ranks, mate):
                found = mate
            index += 1
    return found


@cute.jit
def is_silent(ranks: Ranks, rank: Int32) -> Boolean:
    """Whether a rank is another one of this one's domain, in the same operation, in which none of its threads has been
    waiting lately: it is dead, or does not launch what is to come."""
    found = Boolean(False)
    if rank != ranks.rank:
        if is_near(ranks, rank):
            heap = ranks.peer(rank)
            since = arch.globaltimer() - ptx.ld_relaxed_sys(heap + ALIVE * 8)
            found = since > ranks.timeout_ns // 2 and ptx.ld_relaxed_sys(heap + EPOCH * 8) == ranks.epoch
    return found


@cute.jit
def heed_refusals(ranks: Ranks) -> None:
    """By any thread: those of ranks of other NVLink domains set a word each; now the domain's own says so."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        rank = Int32(0)
        while rank < ranks.world_size:
            word = ranks.at(ranks.own, "refused") + Int64(rank) * 8
            if same_operation(ptx.ld_relaxed_sys(word), ranks.mark):
                ptx.st_release_sys(ranks.at(ranks.own, "refusal"), ptx.ld_acquire_sys(word))
            rank += 1


@cute.jit
def fail(ranks: Ranks, reason: Int32, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32, seen: Int64) -> None:
    """The first wait of this rank that fails says why, in the first record, or that another rank has told it to give
    up; one that a refusal ends says so in the third, where all of an operation's write the same (the rank that refuses
    is in the refusal's terms)."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        if reason == TIMEOUT:
            peer = late_rank(ranks, peer)
    record = Int32(0)
    tell = reason == REFUSAL
    if tell:
        record = Int32(2)
    else:
        before = ptx.atom_claim(ranks.own + FAILED * 8)
        ptx.st_u64(note_of(ranks) + GAVE_UP * 8, arch.globaltimer())
        tell = before != 1
        if before == FAILED_BY_PEER:
            reason = Int32(PEER_FAILED)
    if tell:
        write_report(ranks, record, reason, Int32(FLAGS.index(flag)), peer, detail, seen)


def await_begun(ranks: Ranks, peer: Int32) -> None:
    """By one thread: until `peer` has said hello in this operation, with whatever terms, or has not in time."""
    await_word_of(ranks, "hello", peer)


@cute.jit
def await_word_of(ranks: Ranks, flag: cutlass.Constexpr[str], peer: Int32) -> Int64:
    """By one thread: until `peer` has set its word of that kind in this operation, whatever else it says; that word, or
    0 if it has not in time. No refusal ends this."""
    address = ranks.at(ranks.own, flag) + Int64(peer) * 8
    seen = ptx.ld_acquire_sys(address)
    start = arch.globaltimer()
    stop = Boolean(False)
    while not same_operation(seen, ranks.mark) and not stop:
        seen = ptx.ld_acquire_sys(address)
        stop = too_late(ranks, start, flag, peer, seen)
    if stop:
        seen = Int64(0)
    return seen


@cute.jit
def too_late(ranks: Ranks, start: Int64, flag: cutlass.Constexpr[str], peer: Int32, seen: Int64) -> Boolean:
    """By one thread that has waited for `peer` since `start`, and that no refusal stops: whether it waits no longer."""
    stop = Boolean(False)
    heed_alarm(ranks)
    failed = ptx.ld_acquire_sys(ranks.own + FAILED * 8)
    if failed != 0 or arch.globaltimer() - start > ranks.timeout_ns:
        stop = Boolean(True)
        fail(ranks, Int32(TIMEOUT), flag, peer, Int32(0), seen)
    return stop


@cute.jit
def meet(ranks: Ranks, peer: Int32) -> Boolean:
    """By one thread, at an operation's end: until `peer` has begun it, so that the bank that it used may be written
    again two operations later. False if it was given up."""
    met = ranks.wait("hello", peer, peer, 0)
    if not met:
        await_begun(ranks, peer)
    return met


@cute.jit
def meet_all(ranks: Ranks, lane: Int32) -> None:
    """By a warp, when the operation's rows have been read: `meet` with every rank.

    Then a rank that has given up, or was told to, tells all ranks, which give up, too. One that has may have gone on
    without this one, and overwritten what this one read: it had told this one before.
    """
    heed_alarm(ranks)
    failed = ptx.ld_relaxed_sys(ranks.own + FAILED * 8)
    peer = Int32(lane)
    while peer < ranks.world_size:
        if not meet(ranks, peer):
            failed = ptx.ld_relaxed_sys(ranks.own + FAILED * 8)
        peer += arch.WARP_SIZE
    if failed != 0:
        pass_on(ranks, failed)


@cute.jit
def pass_on(ranks: Ranks, failed: Int64) -> None:
    """By one thread, or several, of a rank that has given up (`failed`: its state's word): tells all ranks."""
    alarm = Int64(0)
    if failed == 1:
        alarm = own_alarm(ranks)
    else:
        alarm = ptx.ld_acquire_sys(ranks.own + ranks.heap.offset["alarm"])
        if ptx.atom_claim(ranks.own + FAILED * 8) == FAILED_BY_PEER:
            write_report(ranks, 0, Int32(PEER_FAILED), Int32(0), ranks.rank, Int32(0), alarm)
    peer = Int32(0)
    while alarm != 0 and peer < ranks.world_size:
        if const_expr(not ranks.heap.problem.domains):
            send_alarm(ranks.peer(peer), ranks.heap.offset["alarm"], alarm)
        else:
            if is_near(ranks, peer):
                send_alarm(ranks.peer(peer), ranks.heap.offset["alarm"], alarm)
            else:
                # Two words might arrive in any order: waits there look at the alarm itself.
                ranks.heap.problem.wire.put_value(ranks, peer, Int64(ranks.heap.offset["alarm"]), alarm)
        peer += 1


def send_alarm(heap: Int64, at: int, alarm: Int64) -> None:
    # The alarm comes before the word that makes waits give up.
    ptx.st_relaxed_sys(heap + at, alarm)
    ptx.atom_fail_by_peer(heap + FAILED * 8)


@cute.jit
def own_alarm(ranks: Ranks) -> Int64:
    """By one thread of a rank that has given up: what it tells the others, or 0 if they know it already."""
    alarm = Int64(0)
    # What this rank was told itself the others know. While whoever claimed the report is filling it, nothing is told:
    # the host will, when it sees it.
    written = ptx.ld_acquire_sys(ranks.report)
    if written != 0 and ptx.ld_relaxed_sys(ranks.report + 8) != PEER_FAILED:
        shift = 0
        for word, bits in enumerate(ALARM_BITS, 1):  # the record has the same parts in the same order
            alarm = alarm | ((ptx.ld_relaxed_sys(ranks.report + word * 8) & ((1 << bits) - 1)) << shift)
            shift += bits
    return alarm


@cute.jit
def write_report(
    ranks: Ranks, record: Int32 | int, reason: Int32, flag: Int32, peer: Int32, detail: Int32, seen: Int64
) -> None:
    """Fills a host-visible record; its done mark is released last."""
    report = ranks.report + record * REPORT_WORDS * 8
    words = (reason, flag, ranks.rank, peer, detail, ranks.mark, seen)
    for i in range_constexpr(len(words)):
        ptx.st_u64(report + (i + 1) * 8, Int64(words[i]))
    ptx.st_release_sys(report, Int64(1))


@cute.jit
def refuse(ranks: Ranks, reason: cutlass.Constexpr[int], detail: Int32, value: Int32) -> None:
    """The first value that was refused since the host last looked goes into the second record."""
    if ptx.atom_claim(ranks.own + REFUSED * 8) == 0:
        write_report(ranks, 1, Int32(reason), Int32(0), ranks.rank, detail, Int64(value))


def note_of(ranks: Ranks) -> Int64:
    """Address of what this rank notes of the operation."""
    return ranks.own + ranks.heap.offset["notes"] + (ranks.epoch & (NOTES - 1)) * (NOTE_WORDS * 8)


def fence_async() -> None:
    """Orders ordinary accesses of this thread with bulk copies on the same memory."""
    arch.fence_proxy("async")
