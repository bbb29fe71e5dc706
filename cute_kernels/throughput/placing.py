"""Placing of rows from the messages of all ranks: destinations of this rank's tokens, and the lists of arrivals.

The row of an entry follows from prefix sums: the start of its expert's segment, plus the rows of that expert from lower
source ranks, plus those from earlier tiles of its own rank, plus its position within the tile. Its index in the lists
follows in the same way from the numbers of entries and copies before its tile. One block therefore places one tile of
all ranks, and no block waits for another. Only if rows are dropped do the blocks of a rank exchange how many they keep.

In the example of arrivals.py, rank 1 receives the counts 2 1 of its experts from rank 0 and 1 0 from itself, so their
segments begin at rows 0 and 3. The entry (0, 1, 1) is the second of expert 2 from rank 0: row 0 + 0 + 1 = 1. The entry
(1, 0, 0) is the first of expert 2 from rank 1: row 0 + 2 + 0 = 2. Rank 0 has 3 of rank 1's 4 entries and 2 of its 3
copies, so the lists continue with entry 3 and copy 2 for rank 1. `send_rows` of rank 0 becomes 0 0, 3 1.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..arrivals import Lists, lists
from ..experts import local_experts
from ..heap import ALIGNMENT, CAPACITY, COPIES, SETTINGS_INTS, SLOTS, Problem
from ..ids import thread_id
from ..internode.relayed import weights_of
from ..segments import inclusive_sum, place_segments, write_segment
from ..sync import Ranks
from ..views import Vectors
from .route import THREADS, add_ahead, received, sum_tiles, tile_of


class PlacingTables(NamedTuple):
    """Tables of a block in shared memory while it places a tile, int32. L: largest number of experts of a rank."""

    # For each (source rank, local expert): rows in all tiles, rows in earlier tiles. Later the first is replaced by the
    # row of the tile's first entry.
    rows: Any  # [2, W, L]
    asked: Any  # [E] entries that name each expert, of all ranks
    mine: Any  # [E] row of the first entry of this rank's tile
    start: Any  # [E] first row of each segment
    limit: Any  # [E] the row behind the last one that fits
    settings: Any  # [3, W] capacity, alignment, slots of each rank
    # For each source rank: entries for local experts in all tiles, in earlier tiles, in this one. Later the second is
    # replaced by the position of this tile's first entry in the list of rows.
    entries: Any  # [3, W]
    # For each source rank: copies at this rank in all tiles, in earlier tiles. Later the second is replaced by the
    # position of this tile's first copy in the list of copies.
    copies: Any  # [2, W]
    drops: Any  # [1] 1 where some expert here has more entries than rows; -1 where it cannot be known what is kept


def new_tables(problem: Problem, smem: Any, table: Any) -> PlacingTables:
    """Allocate the tables. `table` is the memory that counting has used."""

    def ints(n: int) -> Any:
        return smem.allocate_tensor(Int32, cute.make_layout(n))

    e, w = problem.num_experts, problem.world_size
    return PlacingTables(table, ints(e), ints(e), ints(e), ints(e), ints(3 * w), ints(3 * w), ints(2 * w), ints(1))


@cute.jit
def place_tile(ranks: Ranks, ok: Int32, tile: Int32, tables: PlacingTables, args: Any) -> None:
    """One block: write this tile's part of the lists, for all source ranks; tile 0 also writes what exists once.

    Reads all ranks' messages, whose route flags have been acquired; `ok` is 0 if some did not arrive. `args` are those
    of the publish kernel. If messages or another block's counts are missing (`tables.drops` is -1), the lists are
    incomplete, and no pull kernel may read them (`sync.decide`).
    """
    p = ranks.heap.problem
    tid = thread_id()
    out = lists(args.arrivals, args.num_rows)
    sum_counts(ranks, ok, tile, tables)
    arch.sync_threads()
    for destination in cutlass.range(tid // 32, p.world_size, THREADS // 32):
        settings = tuple(tables.settings[what * p.world_size + destination] for what in (CAPACITY, ALIGNMENT, SLOTS))
        place_segments(tables, local_experts(p, destination), 0, settings)
    arch.sync_threads()
    finish_segments(ranks, tile, tables, args)
    arch.sync_threads()
    if tables.drops[0] != 0:
        scan_kept(ranks, tile, tables, args, False)
        exchange_kept(ranks, tile, tables)
    if tid < 32:
        number_sources(p, tables, tile, out)
    arch.sync_threads()
    drops = tables.drops[0]
    if drops > 0:
        scan_kept(ranks, tile, tables, args, True)
    if drops == 0:
        write_lists(ranks, tile, tables, args)


@cute.jit
def finish_tile(ranks: Ranks, weighted: cutlass.Constexpr[bool], tile: Int32, tables: PlacingTables, args: Any) -> None:
    """One block, after `place_tile`: write what no row depends on."""
    p = ranks.heap.problem
    if const_expr(weighted):
        fetch_weights(ranks, tile, tables, args)
    first, end = tile_of(p, tile, args.max_tokens, args.tokens)
    for j in cutlass.range(first * p.top_k + thread_id(), end * p.top_k, THREADS):
        row = args.send_rows[j]  # the position within the tile
        if row >= 0:
            expert = args.topk_idx[j]
            row += tables.mine[expert]
            if row >= tables.limit[expert]:
                row = Int32(-1)
        args.send_rows[j] = row


@cute.jit
def sum_counts(ranks: Ranks, ok: Int32, tile: Int32, tables: PlacingTables) -> None:
    """By one block: the sums of the counts in all ranks' messages; zeros where `ok` is 0."""
    p = ranks.heap.problem
    tid = thread_id()
    world_size, num_experts, local = p.world_size, p.num_experts, p.local_experts
    first_local, end_local = local_experts(p, ranks.rank)
    for i in cutlass.range(tid, num_experts, THREADS):
        tables.asked[i] = 0
        tables.mine[i] = 0
    for i in cutlass.range(tid, world_size, THREADS):
        for part in range_constexpr(3):
            tables.entries[part * world_size + i] = 0
    if tid == 0:
        tables.drops[0] = 0
    arch.sync_threads()
    for i in cutlass.range(tid, world_size * num_experts, THREADS):
        source = i // num_experts
        expert = i - source * num_experts
        total, before, now = Int32(0), Int32(0), Int32(0)
        if ok != 0:
            total, before, now = sum_tiles(ranks, source, expert, tile)
        if total != 0:
            ptx.add_shared(tables.asked.iterator + expert, total)
        add_ahead(ranks, source, total, before, tables.mine.iterator + expert)
        if expert >= first_local and expert < end_local:
            at_rows = source * local + expert - first_local
            tables.rows[at_rows] = total
            tables.rows[world_size * local + at_rows] = before
            if total != 0:
                ptx.add_shared(tables.entries.iterator + source, total)
                ptx.add_shared(tables.entries.iterator + (world_size + source), before)
                ptx.add_shared(tables.entries.iterator + (2 * world_size + source), now)
    read_settings(ranks, ok, tile, tables)


@cute.jit
def read_settings(ranks: Ranks, ok: Int32, tile: Int32, tables: PlacingTables) -> None:
    """By one block: capacity, alignment and slots of each rank, and how many copies come from it."""
    p = ranks.heap.problem
    for source in cutlass.range(thread_id(), p.world_size, THREADS):
        total, before = Int32(0), Int32(0)
        settings = (Int32(0), Int32(1), Int32(0))
        if ok != 0:
            column = p.header_ints - SETTINGS_INTS
            header = received(ranks, source, Int32(0)).counts
            settings = (header[column + CAPACITY], header[column + ALIGNMENT], header[column + SLOTS])
            total, before, _ = sum_tiles(ranks, source, Int32(column + COPIES), tile)
        for what in range_constexpr(3):
            tables.settings[what * p.world_size + source] = settings[what]
        tables.copies[source] = total
        tables.copies[p.world_size + source] = before


@cute.jit
def finish_segments(ranks: Ranks, tile: Int32, tables: PlacingTables, args: Any) -> None:
    """Convert `mine` and the first of `rows` to rows; tile 0 writes the segments of the local experts."""
    p = ranks.heap.problem
    first_local, end_local = local_experts(p, ranks.rank)
    for e in cutlass.range(thread_id(), p.num_experts, THREADS):
        tables.mine[e] = tables.mine[e] + tables.start[e]
        if e >= first_local and e < end_local:
            begin, local = tables.start[e], e - first_local
            end = begin
            for source in cutlass.range(p.world_size):
                n = tables.rows[source * p.local_experts + local]
                before = tables.rows[(p.world_size + source) * p.local_experts + local]
                tables.rows[source * p.local_experts + local] = end + before
                end += n
            n = end - begin
            kept = cutlass.max(cutlass.min(n, tables.limit[e] - begin), 0)
            if kept < n:
                tables.drops[0] = 1
            if tile == 0:
                write_segment(args, local, begin, n, kept)


@cute.jit
def number_sources(problem: cutlass.Constexpr[Problem], tables: PlacingTables, tile: Int32, out: Lists) -> None:
    """By one warp: where each source rank's entries and copies begin in the lists, of all tiles (written by tile 0) and
    of this one (the second of `entries` and `copies`)."""
    lane = arch.lane_idx()
    world_size = problem.world_size
    entries, copies = Int32(0), Int32(0)
    for chunk in cutlass.range(0, world_size, 32):
        source = chunk + lane
        n, m = Int32(0), Int32(0)
        if source < world_size:
            n, m = tables.entries[source], tables.copies[source]
        upto, copies_upto = inclusive_sum(n), inclusive_sum(m)
        if source < world_size:
            tables.entries[world_size + source] = tables.entries[world_size + source] + entries + upto - n
            begin = copies + copies_upto - m
            tables.copies[world_size + source] = tables.copies[world_size + source] + begin
            if tile == 0:
                out.sources[source] = begin
        entries += arch.shuffle_sync(upto, 31)
        copies += arch.shuffle_sync(copies_upto, 31)
    if tile == 0 and lane == 0:
        out.sources[world_size] = copies
        out.copies.first[copies] = entries


class Entry(NamedTuple):
    """An entry of a source rank's message: one of its (token, k)."""

    asker: Int32  # token × K + k
    local: Int32  # the expert's index here
    number: Int32  # of the token's copy
    row: Int32  # here, if that many rows fit
    copy: Int32  # how many of the tile's tokens have entries here before this one's
    opens: Int32  # 1 for the first entry of a copy


@cute.jit
def load_entry(
    problem: cutlass.Constexpr[Problem], tables: PlacingTables, source: Int32, entries: Vectors, number: Int32
) -> Entry:
    index, where, position, copy = entries[number]
    local = Int32(where) & 0xFFFF
    row = tables.rows[source * problem.local_experts + local] + Int32(position)
    return Entry(Int32(index), local, Int32(where) >> 16, row, Int32(copy) >> 1, Int32(copy) & 1)


@cute.jit
def write_lists(ranks: Ranks, tile: Int32, tables: PlacingTables, args: Any) -> None:
    """Write the tile's part of the lists if all rows fit: an entry's index follows from its number. Warps share the
    entries of a source rank, or process several ranks one after the other."""
    p = ranks.heap.problem
    out = lists(args.arrivals, args.num_rows)
    parts = max(1, THREADS // 32 // p.world_size)
    for unit in cutlass.range(thread_id() // 32, p.world_size * parts, THREADS // 32):
        source = unit % p.world_size
        n = tables.entries[2 * p.world_size + source]
        first_row, first_copy = tables.entries[p.world_size + source], tables.copies[p.world_size + source]
        entries = received(ranks, source, tile).entries
        for i in cutlass.range(unit // p.world_size * 32 + arch.lane_idx(), n, parts * 32):
            entry = load_entry(p, tables, source, entries, i)
            write_row(p, out, source, entry, first_row + i, args.max_tokens)
            if entry.opens != 0:
                write_copy(p, out, source, entry, (first_copy + entry.copy, first_row + i), args.max_tokens)


@cute.jit
def write_row(
    problem: cutlass.Constexpr[Problem], out: Lists, source: Int32, entry: Entry, at: Int32, max_tokens: Int32
) -> None:
    out.owned[at] = entry.row, source * max_tokens * problem.top_k + entry.asker


@cute.jit
def write_copy(
    problem: cutlass.Constexpr[Problem], out: Lists, source: Int32, entry: Entry, at: tuple[Int32, Int32],
    max_tokens: Int32,
) -> None:  # fmt: skip
    """Write a copy. `at`: the indices of the copy, and of its first row, in their lists."""
    token = source * max_tokens + entry.asker // problem.top_k
    out.copies[at[0]] = at[1], token * problem.most_copies + entry.number


@cute.jit
def scan_kept(ranks: Ranks, tile: Int32, tables: PlacingTables, args: Any, write: cutlass.Constexpr[bool]) -> None:
    """Write the tile's part of the lists if some rows do not fit: a warp processes all entries of a source rank in
    order, and counts those that are kept, and their copies, for `exchange_kept`; or writes them."""
    p = ranks.heap.problem
    lane = arch.lane_idx()
    out = lists(args.arrivals, args.num_rows)
    first_local, _ = local_experts(p, ranks.rank)
    below = arch.lanemask_lt()
    for source in cutlass.range(thread_id() // 32, p.world_size, THREADS // 32):
        n = tables.entries[2 * p.world_size + source]
        entries = received(ranks, source, tile).entries
        kept, copies, last = Int32(0), Int32(0), Int32(-1)
        for i in cutlass.range(0, n, 32):
            entry = Entry(Int32(0), Int32(0), Int32(0), Int32(0), Int32(-1), Int32(0))
            fits = Int32(0)
            if i + lane < n:
                entry = load_entry(p, tables, source, entries, i + lane)
                fits = Int32(entry.row < tables.limit[first_local + entry.local])
            copy = Int32(-1)
            if fits != 0:
                copy = entry.copy
            held = arch.vote_ballot_sync(fits != 0)
            same = arch.match_sync(0xFFFFFFFF, copy)
            # A copy is counted at its first row that is kept, which another 32 entries may have had.
            opens = Int32(fits != 0 and (same & below) == 0 and copy != last)
            opened = arch.vote_ballot_sync(opens != 0)
            if const_expr(write):
                if fits != 0:
                    row = tables.entries[p.world_size + source] + kept + Int32(arch.popc(held & below))
                    write_row(p, out, source, entry, row, args.max_tokens)
                    if opens != 0:
                        number = tables.copies[p.world_size + source] + copies + Int32(arch.popc(opened & below))
                        write_copy(p, out, source, entry, (number, row), args.max_tokens)
            kept += Int32(arch.popc(held))
            copies += Int32(arch.popc(opened))
            last = cutlass.max(last, arch.warp_redux_sync(copy, "max"))
        if const_expr(not write):
            if lane == 0:
                ranks.view("kept")[tile, source] = kept, copies


@cute.jit
def exchange_kept(ranks: Ranks, tile: Int32, tables: PlacingTables) -> None:
    """One block: exchange with the other blocks of this rank how many entries each keeps. All tile blocks are
    co-resident (publish.py), and all of them call this, because they know the same counts."""
    p = ranks.heap.problem
    tid = thread_id()
    # The block's counts come before the release.
    arch.sync_threads()
    if tid == 0:
        ranks.signal("counted", ranks.rank, tile)
    if tid < p.tiles:
        if not ranks.wait("counted", tid, ranks.rank, tid):
            tables.drops[0] = -1
    # Hands what was acquired to the whole block.
    arch.sync_threads()
    known = tables.drops[0] > 0
    for source in cutlass.range(tid, p.world_size, THREADS):
        entries, entries_before, copies, copies_before = Int32(0), Int32(0), Int32(0), Int32(0)
        for t in range_constexpr(p.tiles):
            if known:
                n, m = ranks.view("kept")[t, source]
                entries += n
                copies += m
                if t < tile:
                    entries_before += n
                    copies_before += m
        tables.entries[source] = entries
        tables.entries[p.world_size + source] = entries_before
        tables.copies[source] = copies
        tables.copies[p.world_size + source] = copies_before
    arch.sync_threads()


def number_of_weight(problem: Problem, asker: Int32) -> Int32:
    """Return the number of the weight of a (token, k), given as a flat index, among its source rank's weights."""
    if problem.weights_each == problem.top_k:
        return asker
    token = asker // problem.top_k
    return token * problem.weights_each + asker - token * problem.top_k


@cute.jit
def fetch_weights(ranks: Ranks, tile: Int32, tables: PlacingTables, args: Any) -> None:
    """Load the weights of the tile's entries that arrive here from the ranks that published them."""
    p = ranks.heap.problem
    first_local, _ = local_experts(p, ranks.rank)
    parts = max(1, THREADS // 32 // p.world_size)
    for unit in cutlass.range(thread_id() // 32, p.world_size * parts, THREADS // 32):
        source = unit % p.world_size
        n = tables.entries[2 * p.world_size + source]
        entries = received(ranks, source, tile).entries
        weights = weights_of(ranks, source)
        for i in cutlass.range(unit // p.world_size * 32 + arch.lane_idx(), n, parts * 32):
            entry = load_entry(p, tables, source, entries, i)
            if entry.row < tables.limit[first_local + entry.local]:
                args.recv_weights[entry.row] = weights[number_of_weight(p, entry.asker)]


@cute.jit
def place_weights(ranks: Ranks, ok: Int32, tile: Int32, args: Any) -> None:
    """One block: load this tile's share of the weights along a known route, after the owners' route flags have been
    acquired. Invalid entries of the lists are skipped; the pull kernel, which follows the same route, reports them."""
    p = ranks.heap.problem
    given = lists(args.arrivals, args.num_rows)
    entries = args.max_tokens * p.top_k
    owned = Int32(0)
    if ok != 0:
        copies = cutlass.min(cutlass.max(given.sources[p.world_size], 0), args.num_rows)
        owned = cutlass.min(given.copies.first[copies], args.num_rows)
    for j in cutlass.range(tile * THREADS + thread_id(), owned, p.tiles * THREADS):
        row, asker = given.owned[j]
        if row >= 0 and row < args.num_rows and asker >= 0 and asker < entries * p.world_size:
            source = asker // cutlass.max(entries, 1)
            args.recv_weights[row] = weights_of(ranks, source)[number_of_weight(p, asker - source * entries)]
