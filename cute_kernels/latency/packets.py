"""Packets: units of 480 bytes whose arrival a receiver detects without a flag.

A warp stores a packet with one 16-byte store for each lane: four 128-byte lines of eight lanes. The last lane of a line
carries 8 bytes of payload and the mark of the operation. NVLink and L2 deliver an aligned 128-byte line as a unit, so a
line with the mark is complete. Two lines contain 15 payload vectors of 16 bytes: lanes 0..6 and 8..14 carry one each,
lanes 7 and 15 the two halves of the last one.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..copies import lowest
from ..heap import EPOCH, TICKET
from ..marks import SHIFT
from ..sync import POLLS_PER_CHECK, Ranks, await_begun, note_wait, warp_gives_up
from .sizes import PACKET_BYTES, WARPS

THREADS = 32 * WARPS

Words = tuple[Uint32, Uint32, Uint32, Uint32]
"""The 16 bytes that a lane loads or stores at once."""


class WarpShare(NamedTuple):
    """A warp's share of the items of some blocks: every `step`-th one from `first`."""

    block: Int32
    blocks: Int32
    warp: Int32
    lane: Int32

    @property
    def first(self) -> Int32:
        return self.warp * self.blocks + self.block

    @property
    def step(self) -> Int32:
        return self.blocks * WARPS


def ld_line(addr: Int64) -> Words:
    """By a whole warp, behind a vote: load 16 bytes that a peer may be writing. A lane that loads before the lane with
    the mark may get older bytes, so all lanes of a line load in one instruction."""
    return arch.inline_ptx(
        "ld.volatile.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def st_line(addr: Int64, words: Sequence[Any]) -> None:
    """By a whole warp: store 16 bytes of a line. All lanes of a line store in one instruction, so that it travels as a
    unit."""
    arch.sync_warp()
    arch.inline_ptx("st.volatile.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[addr, *words])


def st_v2(addr: Int64, words: Sequence[Any]) -> None:
    """Store 8 bytes."""
    arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, words[0], words[1]])


def part_of(packets: Int64, number: Int32 | int, lane: Int32) -> Int64:
    """Return the address of a lane's 16 bytes in the packet of that number, from the address of consecutive packets."""
    return packets + number * PACKET_BYTES + lane * 16


def lane_vector(lane: Int32) -> Int32:
    """Return which of a packet's 30 payload vectors a lane holds, completely or half of it."""
    i = lane & 15
    return (lane >> 4) * 15 + i - (i >> 3) + Int32(i == 7) * 7


def lane_offset(lane: Int32) -> Int32:
    """Return the offset of a lane's bytes in a packet's payload."""
    return lane_vector(lane) * 16 + Int32((lane & 15) == 15) * 8


def marks(lane: Int32) -> Boolean:
    """Return whether a lane holds 8 bytes and the mark."""
    return (lane & 7) == 7


@cute.jit
def seal(words: Sequence[Any], lane: Int32, mark: Int64) -> Words:
    """Convert the payload vector of `lane_vector` to what a lane stores, and in words 0 and 1 also what it receives."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    if (lane & 15) == 15:
        w0 = w2
        w1 = w3
    if marks(lane):
        w2 = Uint32(mark & 0xFFFFFFFF)
        w3 = Uint32(mark >> 32)
    return w0, w1, w2, w3


@cute.jit
def arrived(w2: Uint32, w3: Uint32, lane: Int32, mark: Int64) -> Boolean:
    """By the whole warp: whether all four lines have the mark."""
    complete = Boolean(True)
    if marks(lane):
        complete = w2 == Uint32(mark & 0xFFFFFFFF) and w3 == Uint32(mark >> 32)
    return arch.vote_all_sync(complete)


@cute.jit
def store_payload(
    words: Sequence[Any], lane: Int32, row: Int64, offset: Int32, row_bytes: cutlass.Constexpr[int]
) -> None:
    """Stores what a lane received at its offset in the row, which may end before."""
    if offset < row_bytes:
        if marks(lane):
            st_v2(row + offset, words)
        else:
            ptx.st_v4(row + offset, words)


@cute.jit
def load_packets(words: Any, wanted: Int32, count: cutlass.Constexpr[int], address_of: Callable[[int], Int64]) -> None:
    """By the whole warp, behind a vote: load a lane's 16 bytes of each packet u of the `wanted` (as bits) from
    `address_of(u)`."""
    for u in range_constexpr(count):
        if (wanted >> u) & 1 != 0:
            got = ld_line(address_of(u))
            for i in range_constexpr(4):
                words[4 * u + i] = got[i]


@cute.jit
def await_packets(
    ranks: Ranks, words: Any, waiting: Int32, count: cutlass.Constexpr[int], address_of: Callable[[int], Int64],
    gives_up: Callable[[Int64, Int32], Boolean], result: Int32,
) -> Int32:  # fmt: skip
    """By the whole warp: load the packets whose bits are set in `waiting` until all of them have arrived.

    `words` [4 x count]: a lane's 16 bytes of each packet. `address_of(u)`: where those of packet u lie.
    `gives_up(start, u)`: whether the warp, which has waited for packet u since `start`, waits no longer. Returns
    `result`, or 0 if the wait was given up.
    """
    polls = Int32(0)
    start = Int64(0)
    while arch.vote_any_sync(waiting != 0):
        load_packets(words, waiting, count, address_of)
        missing = Int32(0)
        for u in range_constexpr(count):
            if (waiting >> u) & 1 != 0:
                if not arrived(words[4 * u + 2], words[4 * u + 3], Int32(arch.lane_idx()), ranks.mark):
                    missing = missing | (1 << u)
        waiting = missing
        polls += 1
        if polls == POLLS_PER_CHECK and waiting != 0:
            polls = Int32(0)
            if start == 0:
                start = Int64(arch.globaltimer())
            if gives_up(start, lowest(waiting)):
                waiting = Int32(0)
                result = Int32(0)
    return result


@cute.jit
def receive_packet(
    ranks: Ranks, addr: Int64, flag: cutlass.Constexpr[str], peer: Int32, noted: Boolean, lane: Int32
) -> Words:
    """By the whole warp: the packet at `addr`, once it has arrived; all ones if it does not. `noted`: how long it took
    is noted (by one block's warps only, since this is a critical path)."""
    words = cute.make_rmem_tensor((4,), Uint32)
    polls = Int32(0)
    start = Int64(0)
    waiting = Int32(1)
    while arch.vote_any_sync(waiting != 0):
        got = ld_line(addr)
        for i in range_constexpr(4):
            words[i] = got[i]
        if arrived(words[2], words[3], lane, ranks.mark):
            waiting = Int32(0)
        else:
            if noted:
                if start == 0:
                    start = Int64(arch.globaltimer())
            polls += 1
            if polls == POLLS_PER_CHECK:
                polls = Int32(0)
                if start == 0:
                    start = Int64(arch.globaltimer())
                # The mark that was read last, at lane 7, for lane 0 to report.
                low = Int64(arch.shuffle_sync(words[2], 7)) & 0xFFFFFFFF
                seen = (Int64(arch.shuffle_sync(words[3], 7)) << 32) | low
                if warp_gives_up(ranks, start, flag, peer, Int32(0), seen):
                    waiting = Int32(0)
                    for i in range_constexpr(4):
                        words[i] = Uint32(0xFFFFFFFF)
                    # The packet would have been the sign that the peer has begun: see latency/dispatch.py.
                    if lane == 0:
                        await_begun(ranks, peer)
    if noted:
        if start != 0 and lane == 0:
            note_wait(ranks, peer, start)
    return words[0], words[1], words[2], words[3]


def by_mark(ranks: Ranks) -> Ranks:
    """Recompute `ranks` from its mark, so that values derived from the epoch need no registers until here. Only the
    lowest bits of its epoch are right."""
    new = copy.copy(ranks)
    new.mark = arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[ranks.mark])
    new.epoch = new.mark >> SHIFT
    new.bank = new.epoch & 1
    return new


def hold_epoch(ranks: Ranks) -> None:
    """Makes the thread wait until it has the epoch that it asked for (which is never 0)."""
    arch.inline_ptx(
        "{ .reg .pred none; setp.eq.s64 none, {$r0}, 0; @none nanosleep.u32 20; }", read_only_args=[ranks.epoch]
    )


@cute.jit
def open_next_epoch(ranks: Ranks) -> None:
    """By one thread of every block, when all the block's threads hold the epoch: the last one advances it.

    Kernels that follow on the stream see it; nobody waits for it here.
    """
    blocks, _, _ = arch.grid_dim()
    ticket = arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Int32],
        read_only_args=[ranks.word(TICKET)],
    )
    if ticket == blocks - 1:
        ptx.st_u64(ranks.word(TICKET), Int64(0))
        ptx.st_u64(ranks.word(EPOCH), ranks.epoch + 1)
