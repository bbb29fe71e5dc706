"""Placing of token-major rows (docs/token-major.md), one for each copy.

A copy's number is its row: copies of lower source ranks precede it, then those of earlier tiles of its own rank, then
earlier ones of its tile (route.py). Copies that do not fit are the last ones, so blocks need not exchange how many they
keep. Local ids and weights of a copy are loaded from its owner.

In the example of arrivals.py, rank 1 receives 2 copies from rank 0 and 1 from itself: rows 0 and 1 are tokens 0 and 1
of rank 0, row 2 is token 0 of rank 1. Their local ids are 0 -1, 1 0 and 0 -1 (-1: an expert of another rank).
`send_rows` of rank 0 becomes 0 0 for token 0, whose k 0 goes to row 0 of rank 1 and k 1 to row 0 of rank 0, and 1 -1
for token 1, whose entries share row 1 of rank 1.
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
from ..internode.relayed import weights_of
from ..segments import inclusive_sum
from ..sync import Ranks
from ..token_major import clear_choices, write_counts
from ..views import Floats, Ints
from .route import THREADS, add_ahead, received, sum_tiles, tile_of


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
    tid = thread_id()
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
        row = args.send_rows[j]  # the copy's number within the tile
        if row >= 0:
            rank = holder_of(p, args.topk_idx[j])
            row += tables.there[rank]
            if row >= tables.there[p.world_size + rank]:
                row = Int32(-1)
        args.send_rows[j] = row
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
        copies = lists(args.arrivals, args.num_rows).sources[p.world_size]
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
    tid = thread_id()
    world_size, held = p.world_size, p.local_experts
    first_local, end_local = local_experts(p, ranks.rank)
    for i in cutlass.range(tid, world_size, THREADS):
        tables.entries[i] = 0
        tables.there[i] = 0
        capacity = Int32(0)
        if ok != 0:
            capacity = received(ranks, i, Int32(0)).counts[p.header_ints - SETTINGS_INTS + CAPACITY]
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
                out.sources[source] = cutlass.min(begin, args.capacity)
        copies += arch.shuffle_sync(upto, 31)
    if lane == 0:
        tables.total[0] = copies
        if tile == 0:
            kept = cutlass.min(copies, args.capacity)
            out.sources[world_size] = kept
            out.copies.first[kept] = kept


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
        entries = received(ranks, source, tile).entries
        for i in cutlass.range(unit // p.world_size * 32 + arch.lane_idx(), n, parts * 32):
            asker, where, _, copy = entries[i]
            row = first + (Int32(copy) >> 1)
            if Int32(copy) & 1 != 0 and row < args.capacity:
                token = source * args.max_tokens + Int32(asker) // p.top_k
                out.copies[row] = row, token * p.most_copies + (Int32(where) >> 16)
                out.owned[row] = row, source * args.max_tokens * p.top_k + Int32(asker)


def weights_and_ids(problem: Problem, weights: Int64) -> tuple[Floats, Ints]:
    """Return the weights and the ids of a rank's tokens, each by [token, k], at the address of its weights: the ids of
    a token lie behind its weights."""
    each = problem.weights_each
    return Floats(weights, 2 * each), Ints(Floats(weights).at(each), 2 * each)


@cute.jit
def write_choice(
    ranks: Ranks, args: Any, index: Int32, ids: cutlass.Constexpr[bool], weights: cutlass.Constexpr[bool]
) -> None:
    """By one thread: the local id and the weight of one k of a copy; `index` is the copy's number × K + k."""
    p = ranks.heap.problem
    copy = index // p.top_k
    k = index - copy * p.top_k
    row, asker = lists(args.arrivals, args.num_rows).owned[copy]
    entries = args.max_tokens * p.top_k
    if row >= 0 and row < args.num_rows and asker >= 0 and asker < entries * p.world_size:
        source = asker // cutlass.max(entries, 1)
        given, named = weights_and_ids(p, weights_of(ranks, source).base)
        token = (asker - source * entries) // p.top_k
        expert = named.part(token)[k]
        first, end = local_experts(p, ranks.rank)
        local = Int32(-1)
        if expert >= first and expert < end:
            local = expert - first
        to = Int64(row) * p.top_k + k
        if const_expr(weights):
            weight = given.part(token)[k]
            if local < 0:
                weight = Float32(0.0)
            args.recv_weights[to] = weight
        if const_expr(ids):
            args.recv_idx[to] = local


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
            message = received(ranks, source, tile)
            n = Int32(0)
            for expert in cutlass.range(first_local + lane, end_local, 32):
                n += message.counts[expert]
            n = arch.warp_redux_sync(n, "add")
            for i in cutlass.range(lane, n, 32):
                _, where, _, copy = message.entries[i]
                if first + (Int32(copy) >> 1) >= args.capacity:
                    ptx.add_shared(tables.named.iterator + (p.local_experts + (Int32(where) & 0xFFFF)), Int32(1))
