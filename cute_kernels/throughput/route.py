"""What a rank tells the others of its route: each tile's counts to everybody, each entry to the holder of its expert.

An entry is a (token, k) that names an expert. It goes to the rank that holds the expert, into a place that this source
rank and this tile have there, behind the tile's entries for that rank that come before it in the order of (token, k).
Its four ints: its flat index token × K + k; the expert's index at its rank, and, from bit 16, the number of the token's
copy there; how many entries of the tile name the same expert before it; and, from bit 1, how many of the tile's tokens
have an entry there before this one's, with bit 0 set in the first entry of a token.

A tile is a run of consecutive tokens, the same for all ranks of a call; one block does one tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..domains import is_near
from ..experts import first_expert, holder_of
from ..heap import ALIGNMENT, CAPACITY, COPIES, ENTRY_BYTES, SETTINGS_INTS, SLOTS, Problem
from ..sync import BAD_EXPERT, Ranks, refuse

STEPS = 2
"""How many times 32 lanes' entries a warp counts between two barriers: their loads are in flight together."""


class Counters(NamedTuple):
    """What a block holds in shared memory while it counts a tile, int32. Columns: entries of each expert, entries for
    each rank, copies for each rank."""

    warps: Any  # [counting warps, columns] of this round; then what lies before each warp's entries
    total: Any  # [columns]


def tile_of(problem: Problem, tile: Int32, max_tokens: Int32, tokens: Int32) -> tuple[Int32, Int32]:
    """First token of a tile, and the one behind its last."""
    each = (max_tokens + problem.tiles - 1) // problem.tiles
    return tile * each, cutlass.min((tile + 1) * each, tokens)


def address_of_entries(ranks: Ranks, heap: Int64, source: Int32, tile: Int32) -> Int64:
    """Where the entries of a source rank's tile lie in a rank's heap."""
    return address_of_message(ranks, heap, source, tile) + ranks.heap.problem.header_ints * 4


def address_of_message(ranks: Ranks, heap: Int64, source: Int32, tile: Int32) -> Int64:
    """Where its counts lie, and what is told behind them."""
    return heap + offset_of_message(ranks, "messages", source, tile)


def offset_of_message(ranks: Ranks, name: str, rank: Int32, tile: Int32) -> Int64:
    """Of a section that has room for what each tile tells, by rank."""
    return ranks.at(Int64(0), name) + Int64(rank * ranks.heap.problem.tiles + tile) * ranks.heap.message_bytes


@cute.jit
def address_of_outgoing(ranks: Ranks, rank: Int32, tile: Int32) -> Int64:
    """Where this rank writes what a tile tells another one: there, or, for a rank of another NVLink domain, here, from
    where it is put on the wire (`put_messages`)."""
    place = Int64(0)
    if const_expr(not ranks.heap.problem.domains):
        place = address_of_message(ranks, ranks.peer(rank), ranks.rank, tile)
    else:
        if is_near(ranks, rank):
            place = address_of_message(ranks, ranks.peer(rank), ranks.rank, tile)
        else:
            place = ranks.own + offset_of_message(ranks, "messages_out", rank, tile)
    return place


@cute.jit
def may_write(ranks: Ranks, rank: Int32) -> Boolean:
    """A rank that has given up leaves alone what its puts may still read: they would bring it behind a good word."""
    may = Boolean(True)
    if const_expr(ranks.heap.problem.num_domains > 1):
        may = ranks.mark >= 0 or is_near(ranks, rank)
    return may


@cute.jit
def put_messages(ranks: Ranks, counters: Counters, warps: cutlass.Constexpr[int], tile: Int32) -> None:
    """By one block, behind a barrier: what its tile tells ranks of other domains. A put for each, whose word is the
    route flag."""
    p = ranks.heap.problem
    tid, _, _ = arch.thread_idx()
    rank = Int32(arch.make_warp_uniform(tid // 32))
    while rank < p.world_size and ranks.mark >= 0:
        if not is_near(ranks, rank):
            entries = Int32(counters.total[p.num_experts + rank])
            there, here = (
                offset_of_message(ranks, "messages", ranks.rank, tile),
                offset_of_message(ranks, "messages_out", rank, tile),
            )
            word = ranks.at(Int64(0), "route") + Int64(ranks.rank * p.tiles + tile) * 8
            p.wire.put_signal(ranks, rank, there, here, p.header_ints * 4 + entries * ENTRY_BYTES, word, ranks.mark)
        rank += warps


@cute.jit
def publish_tile(
    ranks: Ranks, counters: Counters, threads: cutlass.Constexpr[int], tile: Int32, args: Any,
    token_major: cutlass.Constexpr[bool] = False,
) -> None:  # fmt: skip
    """One block: tells all ranks what they need of this rank's tile. `args` are those of the publish kernel; what is
    told is not yet released.

    Each warp takes consecutive tokens, so that the order of warps, rounds and lanes is the order of entries.
    `send_rows` holds, until the rows are known, how many entries of the tile name the same expert before.

    `token_major`: rows are copies. A rank is told of the entries of its own experts only; of every other rank it is
    told how many copies go there, in the place of that rank's first expert. `send_rows` holds the copy's number within
    the tile where an entry opens a copy, and -1 elsewhere.
    """
    p = ranks.heap.problem
    tid, _, _ = arch.thread_idx()
    lane = arch.lane_idx()
    warp = tid // 32
    experts_all, world_size, top_k, columns = p.num_experts, p.world_size, p.top_k, p.counters
    warps = p.counting_warps
    tokens_each = 32 // top_k  # of a warp's step
    first, end = tile_of(p, tile, args.max_tokens, args.tokens)
    table, running = counters.warps, counters.total
    group = lane // top_k * top_k  # the lane of this token's first entry
    of_token = Int32(-1) if top_k == 32 else Int32((1 << top_k) - 1) << group
    below = arch.lanemask_lt()
    mine = warp * columns

    i = Int32(tid)
    while i < columns:
        running[i] = 0
        i += threads
    while first < end:
        i = Int32(tid)
        while i < warps * columns:
            table[i] = 0
            i += threads
        entries = cute.make_rmem_tensor((STEPS,), Int32)
        experts = cute.make_rmem_tensor((STEPS,), Int32)
        holders = cute.make_rmem_tensor((STEPS,), Int32)
        in_expert = cute.make_rmem_tensor((STEPS,), Int32)
        in_list = cute.make_rmem_tensor((STEPS,), Int32)
        in_copies = cute.make_rmem_tensor((STEPS,), Int32)
        numbers = cute.make_rmem_tensor((STEPS,), Int32)
        opens = cute.make_rmem_tensor((STEPS,), Int32)
        for r in range_constexpr(STEPS):
            token = first + (warp * STEPS + r) * tokens_each + lane // top_k
            entries[r] = Int32(-1)
            experts[r] = Int32(-1)
            holders[r] = Int32(-1)
            if warp < warps and lane < tokens_each * top_k and token < end:
                entries[r] = token * top_k + lane - group
                experts[r] = ptx.ld_i32(args.topk_idx + Int64(entries[r]) * 4)
        arch.sync_threads()
        if warp < warps:
            for r in range_constexpr(STEPS):
                expert = experts[r]
                if expert < -1 or expert >= experts_all:
                    refuse(ranks, BAD_EXPERT, entries[r], expert)
                    expert = Int32(-1)
                holder = Int32(-1)
                if expert >= 0:
                    holder = holder_of(p, expert)
                experts[r] = expert
                holders[r] = holder
                same_expert = arch.match_sync(0xFFFFFFFF, expert)
                same_holder = arch.match_sync(0xFFFFFFFF, holder)
                opening = Int32(holder >= 0 and (same_holder & of_token & below) == 0)
                opening_lanes = arch.vote_ballot_sync(opening != 0)
                opens[r] = opening
                number = Int32(0)
                for k in range_constexpr(top_k):
                    other = (group + k) & 31
                    theirs = arch.shuffle_sync(holder, other)
                    if (opening_lanes >> other) & 1 != 0 and theirs < holder:
                        number += 1
                numbers[r] = number
                before_expert, before_list, before_copies = Int32(0), Int32(0), Int32(0)
                if expert >= 0:
                    before_expert = table[mine + expert]
                    before_list = table[mine + experts_all + holder]
                    before_copies = table[mine + experts_all + world_size + holder]
                # The leaders' updates come after every lane's reads.
                arch.sync_warp()
                if expert >= 0:
                    if (same_expert & below) == 0:
                        table[mine + expert] = before_expert + Int32(arch.popc(same_expert))
                    if (same_holder & below) == 0:
                        table[mine + experts_all + holder] = before_list + Int32(arch.popc(same_holder))
                        copies = before_copies + Int32(arch.popc(same_holder & opening_lanes))
                        table[mine + experts_all + world_size + holder] = copies
                arch.sync_warp()
                in_expert[r] = before_expert + Int32(arch.popc(same_expert & below))
                in_list[r] = before_list + Int32(arch.popc(same_holder & below))
                # A token's later entries count its first one.
                in_copies[r] = before_copies + Int32(arch.popc(same_holder & opening_lanes & below)) + opening - 1
        arch.sync_threads()
        i = Int32(tid)
        while i < columns:
            sum_warps(table, running, warps, columns, i)
            i += threads
        arch.sync_threads()
        if warp < warps:
            for r in range_constexpr(STEPS):
                expert, holder = experts[r], holders[r]
                position = Int32(-1)
                if expert >= 0:
                    position = in_expert[r] + table[mine + expert]
                    index = in_list[r] + table[mine + experts_all + holder]
                    copy = in_copies[r] + table[mine + experts_all + world_size + holder]
                    local = expert - first_expert(p, holder)
                    place = address_of_outgoing(ranks, holder, tile) + p.header_ints * 4 + Int64(index) * ENTRY_BYTES
                    if may_write(ranks, holder):
                        ptx.st_v4(place, (entries[r], local | (numbers[r] << 16), position, copy * 2 + opens[r]))
                    if const_expr(token_major):
                        position = Int32(-1)
                        if opens[r] != 0:
                            position = copy
                if entries[r] >= 0:
                    ptx.st_i32(args.send_rows + Int64(entries[r]) * 4, position)
        arch.sync_threads()
        first += warps * STEPS * tokens_each
    arch.sync_threads()

    i = Int32(tid)
    while i < world_size * p.header_ints:
        j = i % p.header_ints
        peer = (ranks.rank + i // p.header_ints) % world_size
        value = Int32(0)
        if j < experts_all:
            value = running[j]
            if const_expr(token_major):
                holder = holder_of(p, j)
                if holder != peer:
                    value = Int32(0)
                    if j == first_expert(p, holder):
                        value = running[experts_all + world_size + holder]
        what = j - (p.header_ints - SETTINGS_INTS)
        if what == CAPACITY:
            value = args.capacity
        if what == ALIGNMENT:
            value = args.alignment
        if what == SLOTS:
            value = args.slots
        if what == COPIES:
            value = running[experts_all + world_size + peer]
        if may_write(ranks, peer):
            ptx.st_i32(address_of_outgoing(ranks, peer, tile) + Int64(j) * 4, value)
        i += threads


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
