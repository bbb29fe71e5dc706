"""All flags, waits and barriers between ranks, in one module, so that every memory order that kernels rely on is stated
here.

A flag is an 8-byte word in the reader's memory with a single writer. Its value, the mark, identifies the operation: its
epoch, and what the ranks must agree on (marks.py). The epoch is the number of the operation on this communicator,
starting at 1, equal on all ranks. It is stored in device memory and advanced by the last block of an operation, so that
captured graphs can be replayed.

Memory order:

- `signal` is a system-scope release. The writes of the calling thread before it, and the writes of other threads of its
  block before a preceding block barrier, are visible to a thread that acquires the flag.
- `wait` is a system-scope acquire by the calling thread. A block or warp barrier after it extends the order to other
  threads.
- Rows that are written with generic-proxy stores and read with bulk copies cross proxies. The reader executes
  `fence_async` between its acquire and its copies. In a gather, the owner of the rows also executes one, because the
  writer of the rows is a kernel of the user.
- A system-scope fence waits for all of its SM's outstanding stores to peers, and an SM executes one fence at a time.
  Where many flags become due, one thread therefore fences once for all of them: warps that push rows pass theirs to
  another warp of the block (throughput/outbox.py), staging blocks of a dispatch to a block that does nothing else
  (throughput/stage.py).
- Every operation sets its `hello` flag at all ranks when it begins, and does not end before it has acquired all hellos.
  A rank that has left operation e - 1 therefore knows that all ranks have left operation e - 2, and may reuse the
  memory of that operation.

Every wait for another rank ends (`why_stop`, for flags and packets alike). When its deadline passes, the thread claims
the report (the first one wins), writes who waited for whom to host-visible memory, and stops waiting. Later waits, in
this kernel and the next ones, then stop immediately. At the end of the operation, or when the host sees the report, an
alarm is sent to all ranks (`pass_on`), and their waits stop with the same cause.

What a rank sends does not depend on what it receives in the same operation, but may depend on what it received in an
earlier one. After the operation in which a rank gives up, everything that it sends carries marks that no wait accepts
(marks.py), so no peer accepts its data as valid.

A rank whose host rejects an operation, because of an invalid argument, still consumes the operation's epoch: it stores
its reason at all ranks, sets their `rejection` flag, and sets its hello (`rejection.py`). Waits of that operation then
stop on every rank, whichever rank they wait for. The reason is reported, and the next operation is not affected. A
rejected operation still waits for the hellos of all ranks.

Ranks of several NVLink domains (domains.py) store only to memory of their own domain and reach other domains by puts
over a wire (internode/wire.py), which guarantees only that a word arrives after the bytes of its own put. Across
domains, a flag that is set alone therefore orders nothing else, a rank that has given up puts nothing any more, and a
rejected operation ends at a rank only after everything that was put to it has arrived (`settle`).
"""

import copy
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from . import ptx
from .carried import Carried
from .domains import is_near
from .heap import (
    EPOCH,
    FAILED,
    GAVE_UP,
    LATE,
    NOTES,
    REJECTED,
    WAIT_BITS,
    WAIT_UNIT,
    Heap,
)
from .internode.reports import (
    heed_alarm,
    heed_rejections,
    late_rank,
    put_alarm,
    put_flag,
    rejection_follows,
    show_alive,
)
from .launch import RankArgs
from .marks import (
    ALARM_BITS,
    GIVEN_UP,
    SHIFT,
    base_of,
    beside_number,
    has_number,
    number_in,
    same_operation,
)
from .views import Words, view_of

FLAGS = ("hello", "route", "staged", "chunk", "token", "fetched", "counted", "batch", "put_counts")
"""Kinds of flag that waits can give up, by the name of their heap section. A record contains the index."""

OWN_FLAGS = ("counted",)
"""Kinds that the blocks of one rank set for each other."""

REPORT_WORDS = 16
"""Words (8 bytes each) of a record of the host-visible report. The records are: a failed wait, an invalid value, an
operation that a peer rejected, and a long wait."""


class Record(NamedTuple):
    """The words of a record of the report. The host reads one whose `done` is set."""

    done: Any
    reason: Any  # TIMEOUT, ...
    flag: Any  # index in FLAGS
    rank: Any  # which reports
    peer: Any  # which it waited for
    detail: Any
    mark: Any  # of the operation
    seen: Any  # what was found instead


TIMEOUT, MISMATCH, BAD_EXPERT, BAD_ROW, REJECTION, PEER_FAILED, HALF, BAD_SCALE, WAITING = range(1, 10)
"""Reasons in a record. PEER_FAILED: another rank has given up, and its alarm is in this rank's memory. HALF: this
rank's host has launched a part of an operation and cannot launch the rest. Alarms have room for reasons up to HALF."""
FAILED_BY_PEER = 3
"""Value of the state's word FAILED if another rank's alarm made this rank give up. The other values are 0, and 1 if
this rank gave up itself and reports it."""
LONG_NS = 60_000_000_000
"""A wait that lasts this long, or a tenth of the deadline, is reported for a warning."""

POLLS_PER_CHECK = 256
"""Number of polls between two checks of the deadline."""


class Ranks(Carried):
    """A kernel's view of the group, built by each whole block at its start from the launch arguments."""

    carried = ("peers", "rank", "report", "timeout_ns", "terms", "own", "epoch", "bank", "mark")

    def __init__(self, heap: Heap, args: RankArgs) -> None:
        self.heap: Any = heap  # or LatencyHeap, where that is what the kernel is made for
        self.peers = args.peers
        self.rank = args.rank
        self.report = args.report
        self.timeout_ns = args.timeout_ns
        self.terms = args.terms
        self.own = args.own
        self.read_epoch(heap.problem.num_domains > 1)

    def read_epoch(self, by_block: bool = False) -> None:
        """`by_block`: by a whole block, all of whose threads then have the same answer from `goes_on`. An alarm may
        arrive between two threads' loads, and the answer decides who comes to barriers and to operations of a warp."""
        self.epoch, failed = ptx.ld_u64_pair(self.word(EPOCH))
        if by_block:
            failed = Int64(Int32(ptx.barrier_count(Int32(failed & 1)) != 0))
        self.bank = self.epoch & 1
        self.mark = mark_of(self.epoch, self.terms, failed)

    @property
    def world_size(self) -> int:
        return self.heap.problem.world_size

    @property
    def base(self) -> Int64:
        """The bits that all words of this operation with a number in place of terms have in common."""
        return self.mark ^ Int64(self.terms)

    @property
    def own_mark(self) -> Int64:
        """The mark for words that blocks of this rank set for each other. Blocks of one operation start at different
        times, so only some of them may know that their rank has given up: it does not depend on that."""
        return mark_of(self.epoch, self.terms, Int64(0))

    @property
    def goes_on(self) -> Boolean:
        """Whether this rank had not given up when this block began, if there are several NVLink domains."""
        return (self.mark ^ (self.epoch << SHIFT)) >= 0

    def peer(self, rank: Int32 | int) -> Int64:
        """Return the address of a rank's heap."""
        return ptx.ld_constant(Words(self.peers).at(rank))

    def word(self, number: int, heap: Int64 | None = None) -> Int64:
        """Return the address of a word of a rank's own state (heap.py); `heap`: that of another rank."""
        return Words(self.own if heap is None else heap).at(number)

    def view(self, name: str, heap: Int64 | None = None, nbytes: int = 0) -> Any:
        """Return a section of this rank's heap, or of another `heap`, in the bank that this operation uses. `nbytes`:
        bytes of a record, where this operation has shorter or longer ones."""
        base = (self.own if heap is None else heap) + self.heap.offset[name] + self.bank * self.heap.distance[name]
        return view_of(self.heap.section[name], base, nbytes)

    def offsets(self, name: str, nbytes: int = 0) -> Any:
        """Return a section as `view` does, but of no heap: addresses are offsets, the same in all heaps."""
        return self.view(name, Int64(0), nbytes)

    def of_next(self, name: str) -> Any:
        """Return a section of this rank's heap in the bank that the next operation uses."""
        base = self.own + self.heap.offset[name] + (1 - self.bank) * self.heap.distance[name]
        return view_of(self.heap.section[name], base)

    def lasting(self, name: str, heap: Int64 | None = None) -> Any:
        """Return a section that all operations share: `alarm`, `notes`, `waited` or `waits`."""
        base = (self.own if heap is None else heap) + self.heap.offset[name]
        return view_of(self.heap.section[name], base)

    def signal(self, flag: str, peer: Int32 | int, index: Any) -> None:
        """Set the flag with this index (a number among all of its kind, or a tuple) at `peer` with a system-scope
        release of what this thread, or its block before a barrier, wrote. At a rank of another NVLink domain the flag
        orders nothing else."""
        set_flag(self, flag, Int32(peer), index, True)

    def wait(self, flag: str, index: Any, peer: Int32 | int, detail: Int32 | int) -> Boolean:
        """Wait for the flag with this index, set by `peer`, and acquire it. Return False if the wait gave up
        (`why_stop`)."""
        return await_flag(self, flag_at(self.view(flag), index), flag, Int32(peer), Int32(detail))

    def seen(self, flag: str, index: Any) -> Boolean:
        """Return whether the flag with this index is set, and acquire it if so."""
        return ptx.ld_acquire_sys(flag_at(self.view(flag), index)) == self.mark


def flag_at(flags: Words, index: Any) -> Int64:
    """Return the address of a flag. `index`: a number among all of its kind, or a tuple."""
    return flags.at(*index) if isinstance(index, tuple) else flags.flat.at(index)


@cute.jit
def set_flag(
    ranks: Ranks, flag: cutlass.Constexpr[str], peer: Int32, index: Any, release: cutlass.Constexpr[bool]
) -> None:
    offset = flag_at(ranks.offsets(flag), index)
    store = ptx.st_release_sys if release else ptx.st_relaxed_sys
    if is_near(ranks, peer):
        store(ranks.peer(peer) + offset, ranks.mark)
    else:
        put_flag(ranks, peer, offset)


def again(ranks: Ranks) -> Ranks:
    """Return `ranks` with the epoch read again. A load that is issued here and used late does not delay the loads
    before it."""
    new = copy.copy(ranks)
    new.read_epoch()
    return new


def mark_of(epoch: Int64, terms: Int32, failed: Int64) -> Int64:
    """Return the mark of an operation (marks.py). `failed` is odd if this rank has given up, else 0."""
    return base_of(epoch) ^ Int64(terms) ^ (failed << GIVEN_UP)


# ---------------------------------------------------------------------- between the blocks of one rank


@cute.jit
def decide(ranks: Ranks, flag: cutlass.Constexpr[str], index: Int32, good: Boolean) -> None:
    """By one thread, behind a barrier of its block: release flag `index` of its kind in this rank's memory, from which
    `decided` learns whether it is `good`."""
    ptx.st_release_sys(ranks.view(flag).at(index), ranks.own_mark ^ Int64(1 - Int32(good)))


@cute.jit
def decided(ranks: Ranks, flag: cutlass.Constexpr[str], index: Int32, waits: cutlass.Constexpr[bool]) -> Boolean:
    """By one thread: acquire what `decide` has released, and return whether it is good, or False if it is not of this
    operation. With `waits`, wait for it without a deadline: the deciding block runs already, and its waits have
    deadlines. All blocks that wait get the same answer."""
    address = ranks.view(flag).at(index)
    word = ptx.ld_acquire_sys(address)
    if const_expr(waits):
        while (word ^ ranks.own_mark) >> 1 != 0:
            word = ptx.ld_acquire_sys(address)
    return word == ranks.own_mark


# ---------------------------------------------------------------------- waits


def await_flag(ranks: Ranks, addr: Int64, flag: str, peer: Int32, detail: Int32) -> Boolean:
    """By one thread: wait for the flag at `addr` and acquire it. Return False if the wait gave up."""
    return poll(ranks, addr, flag, peer, detail) == ranks.mark


@cute.jit
def await_word(
    ranks: Ranks, addr: Int64, peer: Int32, detail: Int32, deadlines: cutlass.Constexpr[int] = 1
) -> Int64:  # fmt: skip
    """By one thread: wait for a word of this operation that contains a number in place of terms, and acquire it. Return
    the number, or -1 if the wait gave up. `deadlines` is 2 if `peer` may itself be waiting for another rank, which it
    then names."""
    word = poll(ranks, addr, "batch", peer, detail, True, deadlines)
    number = number_in(word, ranks.base)
    if not has_number(word, ranks.base):
        number = Int64(-1)
    return number


@cute.jit
def poll(
    ranks: Ranks, addr: Int64, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32,
    numbered: cutlass.Constexpr[bool] = False, deadlines: cutlass.Constexpr[int] = 1,
) -> Int64:  # fmt: skip
    """By one thread: acquires the word at `addr` until it belongs to this operation, and returns it. When the wait is
    given up, which is reported, it returns another word.

    `numbered`: the word carries a number in place of terms. It comes from another NVLink domain, whose ranks report a
    failure by the alarm alone.
    """
    seen = ptx.ld_acquire_sys(addr)
    if is_awaited(ranks, seen, numbered):
        start = arch.globaltimer()
        polls = Int32(0)
        reason, instead = Int32(0), Int64(0)
        while is_awaited(ranks, seen, numbered) and reason == 0:
            seen = ptx.ld_acquire_sys(addr)
            polls += 1
            if polls == POLLS_PER_CHECK:
                polls = Int32(0)
                reason, instead = why_stop(ranks, start + (deadlines - 1) * ranks.timeout_ns, peer)
                if const_expr(numbered):
                    alarm = ptx.ld_acquire_sys(ranks.lasting("alarm").base)
                    if alarm != 0:
                        reason, instead = Int32(PEER_FAILED), alarm
                elif const_expr(flag != "chunk"):  # pulling warps, which await chunks, have no registers for a warning
                    if arch.globaltimer() - start > cutlass.min(ranks.timeout_ns // 10, Int64(LONG_NS)):
                        if ptx.atom_claim(ranks.word(LATE), ranks.mark) != ranks.mark:
                            write_report(ranks, 3, Int32(WAITING), Int32(FLAGS.index(flag)), peer, detail, seen)
        if const_expr(flag not in OWN_FLAGS):
            note_wait(ranks, peer, start)
        if is_awaited(ranks, seen, numbered):
            fail(ranks, reason, flag, peer, detail, seen if reason == TIMEOUT else instead)
    return seen


def is_awaited(ranks: Ranks, seen: Int64, numbered: bool) -> Boolean:
    """Return whether a word that was read does not belong to this operation yet."""
    return beside_number(seen ^ ranks.base) != 0 if numbered else seen != ranks.mark


@cute.jit
def note_wait(ranks: Ranks, peer: Int32, start: Int64) -> None:
    """By one thread that has waited for `peer` since `start`: log the wait, unless a wait for that rank in this
    operation was longer. Does not wait."""
    lasted = cutlass.min((arch.globaltimer() - start) >> WAIT_UNIT, Int64((1 << WAIT_BITS) - 1))
    longest = ranks.lasting("waited").at(ranks.epoch & (NOTES - 1), peer)
    ptx.red_max(longest, (ranks.epoch >> NOTES.bit_length() - 1 << WAIT_BITS) | lasted)


@cute.jit
def warp_gives_up(
    ranks: Ranks, start: Int64, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32, seen: Int64
) -> Boolean:
    """By a whole warp that has waited for `peer` since `start`, called now and then: return whether to stop waiting.
    Arguments are those of lane 0; `seen` is the mark that it found last."""
    given_up = Int32(0)
    if arch.lane_idx() == 0:
        given_up = Int32(gives_up(ranks, start, flag, peer, detail, seen))
    return arch.shuffle_sync(given_up, 0) != 0


@cute.jit
def gives_up(
    ranks: Ranks, start: Int64, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32, seen: Int64
) -> Boolean:
    """By one thread: return whether to stop waiting for `peer`, and report why."""
    reason, instead = why_stop(ranks, start, peer)
    if reason != 0:
        fail(ranks, reason, flag, peer, detail, seen if reason == TIMEOUT else instead)
    return reason != 0


@cute.jit
def why_stop(ranks: Ranks, start: Int64, peer: Int32) -> tuple[Int32, Int64]:
    """By one thread that has waited for `peer` since `start`: return the reason to stop waiting, or 0, and the mark
    that is its cause, the peer's hello or the `rejection` flag.

    Reasons are: the deadline has passed; this rank has given up before, or received an alarm; a rank rejects the
    operation; or the peer's hello has other terms, because the ranks disagree on what they run. Waits for blocks of
    this rank have twice the deadline, because those blocks may be waiting for a peer, which they then name.
    """
    reason = Int32(0)
    limit = ranks.timeout_ns
    if peer == ranks.rank:
        limit = 2 * ranks.timeout_ns
    heed_alarm(ranks)
    show_alive(ranks)
    failed = ptx.ld_acquire_sys(ranks.word(FAILED))
    if failed != 0 or arch.globaltimer() - start > limit:
        reason = Int32(TIMEOUT)
    mark = ptx.ld_acquire_sys(ranks.view("hello").at(peer))
    heed_rejections(ranks)
    # A rank that rejects releases this flag before its hello: an acquire of the hello makes the flag visible.
    rejection = ptx.ld_acquire_sys(ranks.view("rejection").base)
    if mark != ranks.mark and same_operation(mark, ranks.mark):
        if not rejection_follows(ranks, mark):
            reason = Int32(MISMATCH)
    if same_operation(rejection, ranks.mark):
        reason = Int32(REJECTION)
        mark = rejection
    return reason, mark


@cute.jit
def fail(ranks: Ranks, reason: Int32, flag: cutlass.Constexpr[str], peer: Int32, detail: Int32, seen: Int64) -> None:
    """Report a wait that ended. The first failed wait of this rank writes the first record: why it failed, or that
    another rank's alarm ended it. Waits that end because of a rejection write the third record; within one operation
    they all write the same (the terms of the seen mark contain the rank)."""
    if reason == TIMEOUT:
        peer = late_rank(ranks, peer)
    record = Int32(0)
    writes = reason == REJECTION
    if writes:
        record = Int32(2)
    else:
        before = ptx.atom_claim(ranks.word(FAILED))
        ptx.st_u64(note_of(ranks).at(GAVE_UP), arch.globaltimer())
        writes = before != 1
        if before == FAILED_BY_PEER:
            reason = Int32(PEER_FAILED)
    if writes:
        write_report(ranks, record, reason, Int32(FLAGS.index(flag)), peer, detail, seen)


def await_begun(ranks: Ranks, peer: Int32 | int) -> None:
    """By one thread: wait for `peer`'s hello of this operation, with any terms, or for the deadline."""
    await_word_of(ranks, "hello", peer)


@cute.jit
def await_word_of(ranks: Ranks, flag: cutlass.Constexpr[str], peer: Int32 | int) -> Int64:
    """By one thread: wait until `peer` has set its word of that kind in this operation, with any terms. Return the
    word, or 0 after the deadline. Rejections do not end this wait."""
    address = ranks.view(flag).at(peer)
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
    """By one thread that has waited for `peer` since `start`, and that rejections do not stop: return whether to stop
    waiting."""
    stop = Boolean(False)
    heed_alarm(ranks)
    failed = ptx.ld_acquire_sys(ranks.word(FAILED))
    if failed != 0 or arch.globaltimer() - start > ranks.timeout_ns:
        stop = Boolean(True)
        fail(ranks, Int32(TIMEOUT), flag, peer, Int32(0), seen)
    return stop


@cute.jit
def meet(ranks: Ranks, peer: Int32) -> Boolean:
    """By one thread, at the end of an operation: wait until `peer` has begun it, so that the bank that it used may be
    written again two operations later. Return False if the operation was given up."""
    met = ranks.wait("hello", peer, peer, 0)
    if not met:
        await_begun(ranks, peer)
    return met


@cute.jit
def meet_all(ranks: Ranks, lane: Int32) -> None:
    """By a warp, when the operation's rows have been read: `meet` with every rank.

    If this rank has given up, or has received an alarm, it then sends an alarm to all ranks, which give up, too. A rank
    that has given up may have continued without this one and overwritten what this one read; in that case its alarm
    arrived before.
    """
    heed_alarm(ranks)
    failed = ptx.ld_relaxed_sys(ranks.word(FAILED))
    for peer in cutlass.range(lane, ranks.world_size, arch.WARP_SIZE):
        if not meet(ranks, peer):
            failed = ptx.ld_relaxed_sys(ranks.word(FAILED))
    if failed != 0:
        pass_on(ranks, failed)


@cute.jit
def pass_on(ranks: Ranks, failed: Int64) -> None:
    """By one or several threads of a rank that has given up: send an alarm to all ranks. `failed` is the value of the
    state's word."""
    alarm = Int64(0)
    if failed == 1:
        alarm = own_alarm(ranks)
    else:
        alarm = ptx.ld_acquire_sys(ranks.lasting("alarm").base)
        if ptx.atom_claim(ranks.word(FAILED)) == FAILED_BY_PEER:
            write_report(ranks, 0, Int32(PEER_FAILED), Int32(0), ranks.rank, Int32(0), alarm)
    peer = Int32(0)
    while alarm != 0 and peer < ranks.world_size:
        if is_near(ranks, peer):
            send_alarm(ranks, ranks.peer(peer), alarm)
        else:
            put_alarm(ranks, peer, alarm)
        peer += 1


def send_alarm(ranks: Ranks, heap: Int64, alarm: Int64) -> None:
    # The alarm is released by the word that makes waits give up.
    ptx.st_relaxed_sys(ranks.lasting("alarm", heap).base, alarm)
    ptx.atom_fail_by_peer(ranks.word(FAILED, heap))


@cute.jit
def own_alarm(ranks: Ranks) -> Int64:
    """By one thread of a rank that has given up: return its alarm, or 0 if the other ranks have it already."""
    alarm = Int64(0)
    # The others know of a failure that a peer reported. While the thread that claimed the report is filling it, no
    # alarm is raised; the host raises it when it sees the report.
    report = Words(ranks.report)
    written = ptx.ld_acquire_sys(report.base)
    if written != 0 and ptx.ld_relaxed_sys(report.at(1)) != PEER_FAILED:
        shift = 0
        for word, bits in enumerate(ALARM_BITS, 1):  # the record has the same parts in the same order
            alarm = alarm | ((ptx.ld_relaxed_sys(report.at(word)) & ((1 << bits) - 1)) << shift)
            shift += bits
    return alarm


@cute.jit
def write_report(
    ranks: Ranks, record: Int32 | int, reason: Int32, flag: Int32, peer: Int32, detail: Int32, seen: Int64
) -> None:
    """Write a host-visible record. Its done mark is released last."""
    report = Words(ranks.report, REPORT_WORDS).part(record)
    words = Record(1, reason, flag, ranks.rank, peer, detail, ranks.mark, seen)
    for i in range_constexpr(1, len(words)):
        ptx.st_u64(report.at(i), Int64(words[i]))
    ptx.st_release_sys(report.base, Int64(1))


@cute.jit
def reject(ranks: Ranks, reason: cutlass.Constexpr[int], detail: Int32, value: Int32) -> None:
    """Report an invalid value in the second record, if it is the first since the host last read it."""
    if ptx.atom_claim(ranks.word(REJECTED)) == 0:
        write_report(ranks, 1, Int32(reason), Int32(0), ranks.rank, detail, Int64(value))


def note_of(ranks: Ranks) -> Words:
    """Return this operation's log entry."""
    return ranks.lasting("notes").part(ranks.epoch & (NOTES - 1))


def fence_async() -> None:
    """Order generic-proxy accesses of this thread with async-proxy accesses (bulk copies) to the same memory."""
    arch.fence_proxy("async")
