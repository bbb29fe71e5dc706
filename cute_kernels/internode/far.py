"""Packets for ranks of other NVLink domains, which only a wire reaches (wire.py).

The packets are the same as within a domain. A block assembles those of a route, of a row or of several rows
(bundled.py) in a send area of its own rank. One put copies them to the target and sets the word of the first one to the
operation's mark. A wire does not deliver a line as a unit: a reader first waits for that word, after which all lines
have the mark. Before the operation ends, the words of everything that is put to this rank are awaited, including those
of dropped rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..copies import Copies, RankSet, below, lowest, set_of
from ..domains import position_of
from ..heap import EPOCH, TICKET
from ..ids import num_blocks
from ..latency.packets import THREADS, WARPS, WarpShare, Words, part_of, seal, st_line
from ..latency.sizes import PACKET_BYTES
from ..views import Records
from .rejected import end_rejected


class FarTarget(NamedTuple):
    """Destination of packets at a rank of another domain: index `number` of an area, and those behind it."""

    rank: Int32
    number: Int32
    stride: int  # bytes from one index to the next


@cute.jit
def store_far(ranks: sync.Ranks, address: Int64, words: Words) -> None:
    """Store a part of a packet in the send area, unless this rank has given up, because the area may still be read."""
    if ranks.goes_on:
        st_line(address, words)


@cute.jit
def put_far(ranks: sync.Ranks, area: cutlass.Constexpr[str], to: FarTarget, place: Int32, count: Int32) -> None:
    """By the whole block that has stored `count` packets in the send area, from index `place` on."""
    # All packets come before the put.
    arch.sync_threads()
    if ranks.goes_on:
        there = Records(ranks.offsets(area).base, to.stride).at(to.number)
        here = Records(ranks.offsets(f"{area}_out").base, to.stride).at(place)
        word = ranks.offsets(f"{area}_words").at(to.number)
        wire = ranks.heap.problem.wire
        wire.put_signal_by_block(ranks, THREADS, to.rank, there, here, count * PACKET_BYTES, word, ranks.mark)


@cute.jit
def put_packets(
    ranks: sync.Ranks, share: WarpShare, area: cutlass.Constexpr[str], to: FarTarget, place: Int32,
    count: Int32 | int, words_of: Callable[..., Words],
) -> None:  # fmt: skip
    """By a whole block: seals `count` packets, `words_of(packet)`, into the send area from index `place` on, and puts
    them."""
    first = Records(ranks.view(f"{area}_out").base, to.stride).at(place)
    for packet in cutlass.range(share.warp, count, WARPS):
        words = seal(words_of(packet), share.lane, ranks.mark)
        store_far(ranks, part_of(first, packet, share.lane), words)
    put_far(ranks, area, to, place, Int32(count))


@cute.jit
def await_far(
    ranks: sync.Ranks, area: cutlass.Constexpr[str], waits: Boolean, number: Int32, peer: Int32, detail: Int32
) -> Boolean:  # fmt: skip
    """By a whole warp: each lane that `waits` acquires the word of what `peer` puts at index `number` of the area.
    Return False in a lane whose wait is given up. The acquires of all lanes are ordered before later reads of any."""
    word = ranks.offsets(f"{area}_words").at(number)
    came = Boolean(True)
    if waits:
        flag = "token" if area == "lines" else "route"
        came = sync.await_flag(ranks, ranks.own + word, flag, peer, detail)
    ranks.heap.problem.wire.arrived(ranks, word, waits and came)
    arch.sync_warp()
    return came


def have_put(ranks: sync.Ranks) -> None:
    """By one thread of every block, when the block puts nothing any more."""
    ptx.atom_inc_acq_rel(ranks.word(TICKET))


@cute.jit
def end(ranks: sync.Ranks) -> None:
    """By one thread that has met all ranks: ends the operation, in which all blocks have put what they put."""
    blocks = num_blocks()
    while ptx.ld_acquire_gpu(ranks.word(TICKET)) != blocks:
        pass
    end_rejected(ranks)
    ptx.st_u64(ranks.word(TICKET), Int64(0))
    ptx.st_u64(ranks.word(EPOCH), ranks.epoch + 1)


@cute.jit
def far_rank(wanted: RankSet, number: Int32) -> Int32:
    """Return member `number` of a set of ranks in ascending order, counted from 0; -1 if there are fewer."""
    rank, skipped = Int32(-1), Int32(number)
    for i in range_constexpr(len(wanted)):
        left = wanted[i]
        while left != 0 and rank < 0:
            if skipped == 0:
                rank = 32 * i + lowest(left)
            skipped -= 1
            left = left & (left - 1)
    return rank


class Order(NamedTuple):
    """Order in which a token's copies are added: lane i knows the i-th."""

    copies: Int32  # how many; this and the next three are the same in all lanes
    own: Int32  # the one that this rank has itself, as a bit
    last: Int32  # those that are the last of their domain, as bits
    rounded: Int32  # those whose domain's sum is rounded: it is not the owner's
    line: Int32  # of the sum, in the staging rows
    holder: Int32


@cute.jit
def order_of(ranks: sync.Ranks, copies: Copies, lines: Int32) -> Order:
    """By a whole warp, from the copies of a token and each lane's line: over domains ascending, in each over
    ranks ascending."""
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    theirs, index = position_of(ranks, cutlass.max(copies.holder, 0))
    mine, _ = position_of(ranks, ranks.rank)
    position = theirs * p.domain_ranks + index
    behind = below(set_of(p, position, copies.expected != 0), position)
    # Lane i looks for the lane with the i-th copy.
    giver = Int32(-1)
    for k in range_constexpr(p.top_k):
        position_of_k, comes = arch.shuffle_sync(behind, k), arch.shuffle_sync(copies.expected, k)
        if position_of_k == lane and comes != 0:
            giver = Int32(k)
    count = Int32(arch.popc(arch.vote_ballot_sync(giver >= 0)))
    lies, holder = arch.shuffle_sync(lines, giver & 31), arch.shuffle_sync(copies.holder, giver & 31)
    domain = arch.shuffle_sync(theirs, giver & 31)
    following = arch.shuffle_sync(domain, (lane + 1) & 31)
    last = arch.vote_ballot_sync(giver >= 0 and (lane == count - 1 or following != domain))
    rounded = arch.vote_ballot_sync(giver >= 0 and domain != mine)
    own = arch.vote_ballot_sync(giver >= 0 and holder == ranks.rank)
    return Order(count, Int32(own), Int32(last), Int32(rounded), lies, holder)
