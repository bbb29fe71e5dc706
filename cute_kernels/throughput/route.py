"""Messages of a route: each tile's counts to every rank, and each entry to the rank of its expert.

An entry is a (token, k) that names an expert. It is stored at the rank that holds the expert, in the memory of this
source rank and tile there, after the tile's earlier entries for that rank in the order of (token, k). Its four ints
are: its flat index token × K + k; the expert's index at its rank and, from bit 16, the number of the token's copy
there; how many earlier entries of the tile name the same expert; and, from bit 1, how many earlier tokens of the tile
have an entry there, with bit 0 set in the first entry of a token.

In the example of arrivals.py, with one tile, the message of rank 0 to rank 1 has the counts 1 0 2 1 (entries of each
expert) and three entries:

    0  0 | 1 << 16  0  0 << 1 | 1    token 0, k 0: expert 2, its first entry; copy 1 of the token, the first copy
    2  1            0  1 << 1 | 1    token 1, k 0: expert 3, its first entry; copy 0 of the token, the second copy
    3  0            1  1 << 1 | 0    token 1, k 1: expert 2, its second entry; of the same copy

A tile is a range of consecutive tokens, the same for all ranks of a call. One block processes one tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..barriers import whole_block
from ..experts import first_expert, holder_of
from ..heap import ALIGNMENT, CAPACITY, COPIES, PLACING_WARPS, SETTINGS_INTS, SLOTS, Problem
from ..ids import thread_id
from ..sync import BAD_EXPERT, Ranks, reject
from ..views import Ints, Vectors

THREADS = 32 * PLACING_WARPS
"""Threads of every block of a publish kernel."""
STEPS = 2
"""Number of steps of 32 entries that a warp counts between two barriers: their loads are in flight together."""


class Counters(NamedTuple):
    """Tables of a block in shared memory while it counts a tile, int32. Columns: entries of each expert, entries for
    each rank, copies for each rank."""

    warps: Any  # [counting warps, columns] of this round; then what lies before each warp's entries
    total: Any  # [columns]


def tile_of(problem: Problem, tile: Int32, max_tokens: Int32, tokens: Int32) -> tuple[Int32, Int32]:
    """Return the first token of a tile, and the one after its last."""
    each = (max_tokens + problem.tiles - 1) // problem.tiles
    return tile * each, cutlass.min((tile + 1) * each, tokens)


class Message(NamedTuple):
    """The message of a source rank's tile."""

    counts: Ints  # [header_ints] entries of each expert, and the source's settings
    entries: Vectors  # of experts of the rank that has the message


def message_at(problem: Problem, address: Int64) -> Message:
    counts = Ints(address)
    return Message(counts, Vectors(counts.at(problem.header_ints)))


def received(ranks: Ranks, source: Int32 | int, tile: Int32) -> Message:
    """Return the message of a source rank's tile to this rank."""
    return message_at(ranks.heap.problem, ranks.view("messages").at(source, tile))


def outgoing(ranks: Ranks, rank: Int32, tile: Int32) -> Message:
    """Return where this rank writes a tile's message at another rank."""
    return message_at(ranks.heap.problem, ranks.view("messages", ranks.peer(rank)).at(ranks.rank, tile))


class Asked(NamedTuple):
    """A lane's (token, k) in one of its warp's steps."""

    asker: Int32  # token × K + k; -1 if the lane has none
    expert: Int32  # its expert, which may be out of range; -1 for none


class Counted(NamedTuple):
    """An entry, and how many entries of its warp in this round come before it."""

    asker: Int32  # token × K + k; -1 if the lane has none
    expert: Int32  # -1: no entry
    holder: Int32  # the rank that holds the expert
    number: Int32  # of the token's copy at the holder
    opens: Int32  # 1 if it is the token's first entry for the holder
    of_expert: Int32  # earlier entries of the expert
    of_holder: Int32  # earlier entries for the holder
    copies: Int32  # earlier copies for the holder


@cute.jit
def publish_tile(kernel: cutlass.Constexpr[Any], ranks: Ranks, counters: Counters, tile: Int32, args: Any) -> None:
    """By one block: write this rank's message about a tile to every rank. `kernel`: the publish kernel; `args`: its
    arguments.

    The messages are not released here. Each warp takes consecutive tokens, so that the order of rounds, warps, steps
    and lanes is the order of entries. `send_rows` holds, until the rows are known, how many entries of the tile name
    the same expert before.

    Token-major rows are copies. A message has the counts of the receiver's own experts only; for every other rank it
    says how many copies go there, in the column of that rank's first expert. `send_rows` holds the copy's number within
    the tile where an entry opens a copy, and -1 elsewhere.
    """
    p = ranks.heap.problem
    begin, end = tile_of(p, tile, args.max_tokens, args.tokens)
    whole_block(THREADS)
    clear_counters(counters.total, p.counters)
    for first in cutlass.range(begin, end, p.counting_warps * STEPS * (32 // p.top_k)):
        clear_counters(counters.warps, p.counting_warps * p.counters)
        # All loads first: they are in flight together.
        asked = [load_asked(p, args, first, end, r) for r in range(STEPS)]
        arch.sync_threads()
        counted = [count_entry(ranks, counters, asked[r], args.slots < 0) for r in range(STEPS)]
        arch.sync_threads()
        for i in cutlass.range(thread_id(), p.counters, THREADS):
            sum_warps(counters.warps, counters.total, p.counting_warps, p.counters, i)
        arch.sync_threads()
        for r in range_constexpr(STEPS):
            write_entry(kernel, ranks, counters, tile, counted[r], args)
        arch.sync_threads()
    arch.sync_threads()
    write_headers(kernel, ranks, counters, tile, args)


@cute.jit
def clear_counters(counters: Any, length: cutlass.Constexpr[int]) -> None:
    """By one block."""
    for i in cutlass.range(thread_id(), length, THREADS):
        counters[i] = 0


@cute.jit
def load_asked(
    problem: cutlass.Constexpr[Problem], args: Any, first: Int32, end: Int32, step: cutlass.Constexpr[int]
) -> Asked:
    """By a warp: a lane's (token, k) in a step of the round that begins with token `first`. Lanes of a token are
    neighbors. Warps beyond those that count have none."""
    top_k = problem.top_k
    tokens_each = 32 // top_k  # of a warp's step
    lane, warp = arch.lane_idx(), thread_id() // 32
    token = first + (warp * STEPS + step) * tokens_each + lane // top_k
    index, expert = Int32(-1), Int32(-1)
    if warp < problem.counting_warps and lane < tokens_each * top_k and token < end:
        index = token * top_k + lane % top_k
        expert = args.topk_idx[index]
    return Asked(index, expert)


@cute.jit
def count_entry(ranks: Ranks, counters: Counters, asked: Asked, distinct: Boolean) -> Counted:
    """By a warp: adds the entries of its lanes to its own counters. An expert out of range is reported, and is none. So
    is one that the token names before, if ids must be `distinct`."""
    p = ranks.heap.problem
    lane, below = arch.lane_idx(), arch.lanemask_lt()
    table, mine = counters.warps, thread_id() // 32 * p.counters
    group = lane // p.top_k * p.top_k  # the lane of this token's first entry
    of_token = Int32(-1) if p.top_k == 32 else Int32((1 << p.top_k) - 1) << group
    expert, holder = Int32(asked.expert), Int32(-1)
    same_expert = arch.match_sync(0xFFFFFFFF, expert)
    again = distinct and expert >= 0 and (same_expert & of_token & below) != 0
    same_expert = same_expert & ~arch.vote_ballot_sync(again)
    if expert < -1 or expert >= p.num_experts or again:
        reject(ranks, BAD_EXPERT, asked.asker, expert)
        expert = Int32(-1)
    if expert >= 0:
        holder = holder_of(p, expert)
    same_holder = arch.match_sync(0xFFFFFFFF, holder)
    opens = Int32(holder >= 0 and (same_holder & of_token & below) == 0)
    opening = arch.vote_ballot_sync(opens != 0)
    number = Int32(0)
    for k in range_constexpr(p.top_k):
        other = (group + k) & 31
        theirs = arch.shuffle_sync(holder, other)
        if (opening >> other) & 1 != 0 and theirs < holder:
            number += 1
    of_expert, of_holder, copies = Int32(0), Int32(0), Int32(0)
    if expert >= 0:
        of_expert = table[mine + expert]
        of_holder = table[mine + p.num_experts + holder]
        copies = table[mine + p.num_experts + p.world_size + holder]
    # The leaders' updates come after every lane's reads.
    arch.sync_warp()
    if expert >= 0:
        if (same_expert & below) == 0:
            table[mine + expert] = of_expert + Int32(arch.popc(same_expert))
        if (same_holder & below) == 0:
            table[mine + p.num_experts + holder] = of_holder + Int32(arch.popc(same_holder))
            more = copies + Int32(arch.popc(same_holder & opening))
            table[mine + p.num_experts + p.world_size + holder] = more
    arch.sync_warp()
    of_expert += Int32(arch.popc(same_expert & below))
    of_holder += Int32(arch.popc(same_holder & below))
    # A token's later entries count its first one.
    copies += Int32(arch.popc(same_holder & opening & below)) + opens - 1
    return Counted(asked.asker, expert, holder, number, opens, of_expert, of_holder, copies)


@cute.jit
def write_entry(
    kernel: cutlass.Constexpr[Any], ranks: Ranks, counters: Counters, tile: Int32, entry: Counted, args: Any
) -> None:
    """By a warp, behind the sums over warps: an entry of each lane, into the message to its expert's holder."""
    p = ranks.heap.problem
    table, mine = counters.warps, thread_id() // 32 * p.counters
    position = Int32(-1)
    if entry.expert >= 0:
        position = entry.of_expert + table[mine + entry.expert]
        index = entry.of_holder + table[mine + p.num_experts + entry.holder]
        copy = entry.copies + table[mine + p.num_experts + p.world_size + entry.holder]
        local = entry.expert - first_expert(p, entry.holder)
        words = (entry.asker, local | (entry.number << 16), position, copy * 2 + entry.opens)
        kernel.send_entry(ranks, entry.holder, tile, index, words)
        if const_expr(kernel.TOKEN_MAJOR):
            position = Int32(-1)
            if entry.opens != 0:
                position = copy
    if entry.asker >= 0:
        args.send_rows[entry.asker] = position


@cute.jit
def write_headers(kernel: cutlass.Constexpr[Any], ranks: Ranks, counters: Counters, tile: Int32, args: Any) -> None:
    """By one block that has counted its tile: what stands before the entries in the message to each rank."""
    p = ranks.heap.problem
    total, copies = counters.total, p.num_experts + p.world_size  # the first column of copies
    for i in cutlass.range(thread_id(), p.world_size * p.header_ints, THREADS):
        j = i % p.header_ints
        peer = (ranks.rank + i // p.header_ints) % p.world_size
        value = Int32(0)
        if j < p.num_experts:
            value = total[j]
            if const_expr(kernel.TOKEN_MAJOR):
                holder = holder_of(p, j)
                if holder != peer:
                    value = Int32(0)
                    if j == first_expert(p, holder):
                        value = total[copies + holder]
        what = j - (p.header_ints - SETTINGS_INTS)
        if what == CAPACITY:
            value = args.capacity
        if what == ALIGNMENT:
            value = args.alignment
        if what == SLOTS:
            value = args.slots
        if what == COPIES:
            value = total[copies + peer]
        kernel.send_count(ranks, peer, tile, j, value)


@cute.jit
def sum_warps(
    table: Any, running: Any, warps: cutlass.Constexpr[int], columns: cutlass.Constexpr[int], column: Int32
) -> None:
    """By one thread: turns a column of counts into what lies before each warp's, and adds them to the total."""
    total = running[column]
    for w in range_constexpr(warps):
        n = table[w * columns + column]
        table[w * columns + column] = total
        total += n
    running[column] = total


@cute.jit
def add_ahead(ranks: Ranks, source: Int32, total: Int32, before: Int32, counter: Any) -> None:
    """By one thread: adds to `counter` in shared memory what a source rank has ahead of this rank's tile: its `total`
    if it is a lower rank; what comes `before` the tile if it is this one."""
    ahead = Int32(0)
    if source < ranks.rank:
        ahead = total
    if source == ranks.rank:
        ahead = before
    if ahead != 0:
        ptx.add_shared(counter, ahead)


@cute.jit
def sum_tiles(ranks: Ranks, source: Int32, column: Int32, tile: Int32) -> tuple[Int32, Int32, Int32]:
    """Return a source rank's counts of a column: of all tiles, of those before `tile`, and of this one."""
    p = ranks.heap.problem
    of_tiles = Ints(received(ranks, source, Int32(0)).counts.at(column), step=ranks.heap.message_bytes)
    # All loads first: they are in flight together.
    found = cute.make_rmem_tensor((p.tiles,), Int32)
    for t in range_constexpr(p.tiles):
        found[t] = of_tiles[t]
    total, before, now = Int32(0), Int32(0), Int32(0)
    for t in range_constexpr(p.tiles):
        total += found[t]
        if t < tile:
            before += found[t]
        if t == tile:
            now = found[t]
    return total, before, now
