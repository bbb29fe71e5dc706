"""Packets: how a warp sends 480 bytes so that the receiver needs no flag to know that they are all there.

A warp stores a packet with one 16-byte store a lane: four 128-byte lines of eight lanes. The last lane of a line
carries 8 bytes of payload and the mark of the operation; NVLink and L2 move aligned 128-byte lines as one, so a line
that shows the mark is complete. Two lines make 15 payload vectors of 16 bytes: lanes 0..6 and 8..14 carry one each,
lanes 7 and 15 the two halves of the last one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..heap import EPOCH, FAILED, TICKET
from ..marks import SHIFT
from ..sync import FLAGS, MISMATCH, TIMEOUT, Ranks, mark_of, write_report

POLLS_PER_CHECK = 256


def ld_line(addr) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes that a peer may be writing."""
    return arch.inline_ptx(
        "ld.volatile.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def st_line(addr, words) -> None:
    """16 bytes of a line; the lanes of a line store together."""
    arch.inline_ptx("st.volatile.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *words])


def st_v2(addr, words) -> None:
    """8 bytes."""
    arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, words[0], words[1]])


def lane_vector(lane) -> Int32:
    """Which of a packet's 30 payload vectors a lane carries, wholly or by half."""
    i = lane & 15
    return (lane >> 4) * 15 + i - (i >> 3) + Int32(i == 7) * 7


def lane_offset(lane) -> Int32:
    """Where a lane's bytes begin in a packet's payload."""
    return lane_vector(lane) * 16 + Int32((lane & 15) == 15) * 8


def marks(lane) -> Boolean:
    """Whether a lane carries 8 bytes and the mark."""
    return (lane & 7) == 7


@cute.jit
def seal(words, lane, mark):
    """From the payload vector of `lane_vector` to what a lane stores; in words 0 and 1 also what it receives."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    if (lane & 15) == 15:
        w0 = w2
        w1 = w3
    if marks(lane):
        w2 = Uint32(mark & 0xFFFFFFFF)
        w3 = Uint32(mark >> 32)
    return w0, w1, w2, w3


@cute.jit
def arrived(w2, w3, lane, mark) -> Boolean:
    """By the whole warp: whether all four lines have the mark."""
    complete = Boolean(True)
    if marks(lane):
        complete = w2 == Uint32(mark & 0xFFFFFFFF) and w3 == Uint32(mark >> 32)
    return arch.vote_all_sync(complete)


@cute.jit
def store_payload(words, lane, row, offset, row_bytes: cutlass.Constexpr):
    """Stores what a lane received at its offset in the row, which may end before."""
    if offset < row_bytes:
        if marks(lane):
            st_v2(row + offset, words)
        else:
            ptx.st_v4(row + offset, words)


@cute.jit
def overdue(ranks, start, flag: cutlass.Constexpr, peer, detail, w2, w3, lane) -> Boolean:
    """By the whole warp, now and then while it waits for a packet of `peer`: whether to give up, which is reported.

    `start` is when the wait began, `w2` and `w3` what was read last.
    """
    hello = ptx.ld_acquire_sys(ranks.at(ranks.own, "hello") + Int64(peer) * 8)
    # The same epoch with other terms: the ranks disagree on what they are doing.
    reason = Int32(0)
    if arch.globaltimer() - start > ranks.timeout_ns:
        reason = Int32(TIMEOUT)
    if hello != ranks.mark and (hello >> SHIFT) == (ranks.mark >> SHIFT):
        reason = Int32(MISMATCH)
    seen = hello
    if reason == TIMEOUT:
        low = Int64(arch.shuffle_sync(w2, 7)) & 0xFFFFFFFF
        seen = (Int64(arch.shuffle_sync(w3, 7)) << 32) | low
    stop = Int32(0)
    if lane == 0:
        stop = Int32(ptx.ld_u64(ranks.own + FAILED * 8) != 0)
        if reason != 0 and stop == 0:
            stop = Int32(1)
            if ptx.atom_claim(ranks.own + FAILED * 8) == 0:
                write_report(
                    ranks.report,
                    reason,
                    Int32(FLAGS.index(flag)),
                    ranks.mark,
                    ranks.rank,
                    Int32(peer),
                    Int32(detail),
                    seen,
                )
    return arch.shuffle_sync(stop, 0) != 0


@cute.jit
def receive_packet(ranks, addr, flag: cutlass.Constexpr, peer, detail, lane):
    """By the whole warp: the packet at `addr`, once it has arrived; all ones if it does not."""
    words = cute.make_rmem_tensor((4,), Uint32)
    polls = Int32(0)
    start = Int64(0)
    waiting = Int32(1)
    while waiting != 0:
        got = ld_line(addr)
        for i in range_constexpr(4):
            words[i] = got[i]
        if arrived(words[2], words[3], lane, ranks.mark):
            waiting = Int32(0)
        else:
            polls += 1
            if polls == POLLS_PER_CHECK:
                polls = Int32(0)
                if start == 0:
                    start = Int64(arch.globaltimer())
                if overdue(ranks, start, flag, peer, detail, words[2], words[3], lane):
                    waiting = Int32(0)
                    for i in range_constexpr(4):
                        words[i] = Uint32(0xFFFFFFFF)
    return words[0], words[1], words[2], words[3]


@cute.jit
def say_hello(ranks, lane):
    """By one warp: tells every rank that this one has begun the operation, hence has left the one before.

    Nothing was written that a reader of the flag could want to see: no release, no round trip.
    """
    if lane < len(ranks.peers):
        heap = ranks.peers[0]
        for i in range_constexpr(1, len(ranks.peers)):
            if lane == i:
                heap = ranks.peers[i]
        arch.inline_ptx(
            "st.relaxed.sys.global.b64 [{$r0}], {$r1};",
            read_only_args=[ranks.at(heap, "hello") + Int64(ranks.rank) * 8, ranks.mark],
        )


def again(ranks, terms):
    """`ranks` with the epoch read anew: a load that is issued here and used late does not delay the loads before it."""
    new = object.__new__(Ranks)
    new.heap, new.peers, new.rank, new.report = ranks.heap, ranks.peers, ranks.rank, ranks.report
    new.timeout_ns, new.own = ranks.timeout_ns, ranks.own
    new.epoch = ptx.ld_u64(ranks.own + EPOCH * 8)
    new.parity = new.epoch & 1
    new.mark = mark_of(new.epoch, terms)
    return new


def hold_epoch(ranks) -> None:
    """Makes the thread wait until it has the epoch that it asked for (which is never 0)."""
    arch.inline_ptx(
        "{ .reg .pred none; setp.eq.s64 none, {$r0}, 0; @none nanosleep.u32 20; }", read_only_args=[ranks.epoch]
    )


@cute.jit
def open_next_epoch(ranks):
    """By one thread of every block, when all the block's threads hold the epoch: the last one advances it.

    Kernels that follow on the stream see it; nobody waits for it here.
    """
    blocks, _, _ = arch.grid_dim()
    ticket = arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Int32],
        read_only_args=[ranks.own + TICKET * 8],
    )
    if ticket == blocks - 1:
        ptx.st_u64(ranks.own + TICKET * 8, Int64(0))
        ptx.st_u64(ranks.own + EPOCH * 8, ranks.epoch + 1)
