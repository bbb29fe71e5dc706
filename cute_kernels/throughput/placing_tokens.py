"""Placing of token-major rows (docs/token-major.md), one for each copy.

A copy's number is its row: copies of lower source ranks precede it, then those of earlier tiles of its own rank, then
earlier ones of its tile (route.py). Copies that do not fit are the last ones, so blocks need not exchange how many they
keep. Local ids and weights of a copy are loaded from its owner.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import ptx
from ..arrivals import lists
from ..experts import holder_of, local_experts
from ..heap import CAPACITY, COPIES, SETTINGS_INTS, Problem
from ..ids import thread_id
from ..segments import inclusive_sum
from ..sync import Ranks
from ..token_major import clear_choices, write_counts
from .placing import weights_of
from .route import THREADS, add_ahead, address_of_entries, address_of_message, sum_tiles, tile_of


class CopyTables(NamedTuple):
    """Tables of a block in shared memory while it places a tile, int32. L: largest number of experts of a rank."""

    # For each source rank: copies at this rank in all tiles, in earlier tiles, in this one. Later the second is
    # replaced by the row of the tile's first copy.
    here: Any  # [3, W]
    entries: Any  # [W] for each source rank: entries for local experts in this tile
    # For each rank: its row for the first copy of this rank's tile, and its number of rows.
    there: Any  # [2, W]
    named: Any  # [2, L] entries of each expert here: all of them, and, in tile 0, those of copies that are dropped
    total: Any  # [1] copies that ask for a row here


def new_copy_tables(problem: Problem, smem: Any) -> CopyTables:
    def ints(n: int) -> Any:
        return smem.allocate_tensor(Int32, cute.make_layout(n))

    w, held = problem.world_size, problem.local_experts
    return CopyTables(ints(3 * w), ints(w), ints(2 * w), ints(2 * held), ints(1))


@cute.jit
def place_copies(ranks: Ranks, ok: Int32, tile: Int32, tables: CopyTables, args: Any) -> None:
    """One block: write this tile's part of the lists, for all source ranks; tile 0 also writes what exists once.

    Reads all ranks' messages, whose route flags have been acquired; `ok` is 0 if some did not arrive. `args` are those
    of the publish kernel.
    """
    gather_copies(ranks, ok, tile, tables)
    arch.sync_threads()
    if thread_id() < 32:
        number_copies(ranks, tile, tables, args)
    arch.sync_threads()
    write_copies(ranks, tile, tables, args)


@cute.jit
def finish_copies(ranks: Ranks, tile: Int32, tables: CopyTables, args: Any, weights: cutlass.Constexpr[bool]) -> None:
    """One block, a barrier after `place_copies`: write what no row depends on."""
    p = ranks.heap.problem
    tid, _, _ = arch.thread_idx()
    parts = max(1, THREADS // 32 // p.world_size)
    for unit in cutlass.range(tid // 32, p.world_size * parts, THREADS // 32):
        source = unit % p.world_size
        first = tables.here[p.world_size + source]
        n = cutlass.min(first + tables.here[2 * p.world_size + source], args.capacity) - first
        for i in cutlass.range(unit // p.world_size * 32 + arch.lane_idx(), n * p.top_k, parts * 32):
            write_choice(ranks, args, first * p.top_k + i, True, weights)
    clear_choices(p, THREADS, (tile, p.tiles), args, cutlass.min(tables.total[0], args.capacity), True, weights)
    first, end = tile_of(p, tile, args.max_tokens, args.tokens)
    for j in cutlass.range(first * p.top_k + tid, end * p.top_k, THREADS):
        row = ptx.ld_i32(args.send_rows + Int64(j) * 4)  # the copy's number within the tile
        if row >= 0:
            rank = holder_of(p, ptx.ld_i32(args.topk_idx + Int64(j) * 4))
            row += tables.there[rank]
            if row >= tables.there[p.world_size + rank]:
                row = Int32(-1)
        ptx.st_i32(args.send_rows + Int64(j) * 4, row)
    if tile == 0:
        if tables.total[0] > args.capacity:
            count_dropped(ranks, tables, args)
            arch.sync_threads()
        if tid < 32:
            write_counts(ranks, tables.named, args)


@cute.jit
def place_copy_weights(ranks: Ranks, ok: Int32, tile: Int32, args: Any) -> None:
    """One block: load this tile's share of the weights along a known route, after the owners' route flags have been
    acquired. Invalid entries of the lists are skipped; the pull kernel, which follows the same route, reports them."""
    p = ranks.heap.problem
    copies = Int32(0)
    if ok != 0:
        copies = ptx.ld_i32(lists(args.arrivals, args.num_rows).sources + p.world_size * 4)
        most = cutlass.min(args.num_rows, args.max_tokens * p.world_size)
        copies = cutlass.min(cutlass.max(copies, 0), most)
    for i in cutlass.range(tile * THREADS + thread_id(), copies * p.top_k, p.tiles * THREADS):
        write_choice(ranks, args, i, False, True)
    clear_choices(p, THREADS, (tile, p.tiles), args, copies, False, True)


@cute.jit
def column_of_copies(ranks: Ranks, rank: Int32) -> Int32:
    """Return the column of this rank's messages that counts the copies for `rank`, or -1 if that rank holds no
    expert."""
    p = ranks.heap.problem
    column, end = local_experts(p, rank)
    if column == end:
        column = Int32(-1)
    elif rank == ranks.rank:
        column = Int32(p.header_ints - SETTINGS_INTS + COPIES)
    return column


@cute.jit
def gather_copies(ranks: Ranks, ok: Int32, tile: Int32, tables: CopyTables) -> None:
    """Sum the counts of all tiles of all ranks; zeros if `ok` is 0."""
    p = ranks.heap.problem
    tid, _, _ = arch.thread_idx()
    world_size, held = p.world_size, p.local_experts
    first_local, end_local = local_experts(p, ranks.rank)
    for i in cutlass.range(tid, world_size, THREADS):
        tables.entries[i] = 0
        tables.there[i] = 0
        capacity = Int32(0)
        if ok != 0:
            at = address_of_message(ranks, ranks.own, i, Int32(0)) + (p.header_ints - SETTINGS_INTS + CAPACITY) * 4
            capacity = ptx.ld_i32(at)
        tables.there[world_size + i] = capacity
    for i in cutlass.range(tid, 2 * held, THREADS):
        tables.named[i] = 0
    arch.sync_threads()
    for i in cutlass.range(tid, world_size * world_size, THREADS):
        source = i // world_size
        rank = i - source * world_size
        total, before, now = Int32(0), Int32(0), Int32(0)
        column = column_of_copies(ranks, rank)
        if ok != 0 and column >= 0:
            total, before, now = sum_tiles(ranks, source, column, tile)
        if rank == ranks.rank:
            tables.here[source] = total
            tables.here[world_size + source] = before
            tables.here[2 * world_size + source] = now
        add_ahead(ranks, source, total, before, tables.there.iterator + rank)
    for i in cutlass.range(tid, world_size * held, THREADS):
        source = i // held
        local = i - source * held
        total, now = Int32(0), Int32(0)
        if ok != 0 and first_local + local < end_local:
            total, _, now = sum_tiles(ranks, source, first_local + local, tile)
        if total != 0:
            ptx.add_shared(tables.named.iterator + local, total)
            ptx.add_shared(tables.entries.iterator + source, now)


@cute.jit
def number_copies(ranks: Ranks, tile: Int32, tables: CopyTables, args: Any) -> None:
    """By one warp: where each source rank's copies begin, of all tiles (written by tile 0) and of this one (the second
    of `here`)."""
    world_size = ranks.heap.problem.world_size
    lane = arch.lane_idx()
    out = lists(args.arrivals, args.num_rows)
    copies = Int32(0)
    for chunk in cutlass.range(0, world_size, 32):
        source = chunk + lane
        n = Int32(0)
        if source < world_size:
            n = tables.here[source]
        upto = inclusive_sum(n)
        if source < world_size:
            begin = copies + upto - n
            tables.here[world_size + source] = tables.here[world_size + source] + begin
            if tile == 0:
                ptx.st_i32(out.sources + Int64(source) * 4, cutlass.min(begin, args.capacity))
        copies += arch.shuffle_sync(upto, 31)
    if lane == 0:
        tables.total[0] = copies
        if tile == 0:
            kept = cutlass.min(copies, args.capacity)
            ptx.st_i32(out.sources + world_size * 4, kept)
            ptx.st_i32(out.copies + Int64(kept) * 8, kept)


@cute.jit
def write_copies(ranks: Ranks, tile: Int32, tables: CopyTables, args: Any) -> None:
    """Write the tile's part of the lists. Warps share the entries of a source rank, or process several ranks one after
    the other; the first entry of a copy contains its index."""
    p = ranks.heap.problem
    out = lists(args.arrivals, args.num_rows)
    parts = max(1, THREADS // 32 // p.world_size)
    for unit in cutlass.range(thread_id() // 32, p.world_size * parts, THREADS // 32):
        source = unit % p.world_size
        n, first = tables.entries[source], tables.here[p.world_size + source]
        at = address_of_entries(ranks, ranks.own, source, tile)
        for i in cutlass.range(unit // p.world_size * 32 + arch.lane_idx(), n, parts * 32):
            asker, where, _, copy = ptx.ld_v4(at + Int64(i) * 16)
            row = first + (Int32(copy) >> 1)
            if Int32(copy) & 1 != 0 and row < args.capacity:
                token = source * args.max_tokens + Int32(asker) // p.top_k
                ptx.st_pair(out.copies + Int64(row) * 8, row, token * p.most_copies + (Int32(where) >> 16))
                ptx.st_pair(out.owned + Int64(row) * 8, row, source * args.max_tokens * p.top_k + Int32(asker))


def offset_of_token(problem: Problem, token: Int32, k: Int32) -> Int64:
    """Return the offset of the weight of a token's k among its rank's weights. The id is `weights_each` numbers
    further."""
    return Int64(token) * problem.token_bytes + Int64(k) * 4


@cute.jit
def write_choice(
    ranks: Ranks, args: Any, index: Int32, ids: cutlass.Constexpr[bool], weights: cutlass.Constexpr[bool]
) -> None:
    """By one thread: the local id and the weight of one k of a copy; `index` is the copy's number × K + k."""
    p = ranks.heap.problem
    copy = index // p.top_k
    k = index - copy * p.top_k
    row, asker = ptx.ld_pair(lists(args.arrivals, args.num_rows).owned + Int64(copy) * 8)
    entries = args.max_tokens * p.top_k
    if row >= 0 and row < args.num_rows and asker >= 0 and asker < entries * p.world_size:
        source = asker // cutlass.max(entries, 1)
        at = weights_of(ranks, source) + offset_of_token(p, (asker - source * entries) // p.top_k, k)
        expert = ptx.ld_i32(at + p.weights_each * 4)
        first, end = local_experts(p, ranks.rank)
        local = Int32(-1)
        if expert >= first and expert < end:
            local = expert - first
        to = (Int64(row) * p.top_k + k) * 4
        if const_expr(weights):
            weight = ptx.ld_f32(at)
            if local < 0:
                weight = Float32(0.0)
            ptx.st_f32(args.recv_weights + to, weight)
        if const_expr(ids):
            ptx.st_i32(args.recv_idx + to, local)


@cute.jit
def count_dropped(ranks: Ranks, tables: CopyTables, args: Any) -> None:
    """By the block of tile 0, if copies are dropped: count their entries by expert. One warp processes a tile of a
    source rank."""
    p = ranks.heap.problem
    lane = arch.lane_idx()
    first_local, end_local = local_experts(p, ranks.rank)
    for unit in cutlass.range(thread_id() // 32, p.world_size * p.tiles, THREADS // 32):
        source = unit % p.world_size
        tile = unit // p.world_size
        _, before, now = sum_tiles(ranks, source, column_of_copies(ranks, ranks.rank), tile)
        first = tables.here[p.world_size + source] + before
        if first + now > args.capacity:
            message = address_of_message(ranks, ranks.own, source, tile)
            n = Int32(0)
            for expert in cutlass.range(first_local + lane, end_local, 32):
                n += ptx.ld_i32(message + Int64(expert) * 4)
            n = arch.warp_redux_sync(n, "add")
            at = address_of_entries(ranks, ranks.own, source, tile)
            for i in cutlass.range(lane, n, 32):
                _, where, _, copy = ptx.ld_v4(at + Int64(i) * 16)
                if first + (Int32(copy) >> 1) >= args.capacity:
                    ptx.add_shared(tables.named.iterator + (p.local_experts + (Int32(where) & 0xFFFF)), Int32(1))
