"""Placing of rows from the expert ids of all ranks. Each block computes it on its own, so that no block waits for
another.

The row of an entry is the start of its expert's segment plus the number of earlier entries of that expert, in the order
of (source rank, token, k). A block that moves rows places the experts of its rank; the block that writes the route
places all experts.

In the example of ../arrivals.py, rank 1 places experts 2 and 3. `asked` is 3 1, `start` 0 3, and `rows` of the entries
of rank 0 is 0 -1 3 1, of those of rank 1 2 -1 -1 -1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint16, Uint32, range_constexpr
from cutlass.cute import arch

from ..carried import Carried
from ..experts import local_experts
from ..heap import ALIGNMENT, CAPACITY, SLOTS, Problem
from ..ids import thread_id, warp_id
from ..segments import place_segments, write_segment
from ..sync import BAD_EXPERT, Ranks, reject
from .packets import THREADS, WARPS, Words, lane_offset, lane_vector, marks
from .sizes import PAYLOAD_BYTES, PAYLOAD_VECTORS, ROUTE_HEADER_BYTES, LatencyHeap, table_ints

NO_EXPERT = 0xFFFF
ROUTE_WORDS = PAYLOAD_BYTES // 4


def source_stride(entries: Int32) -> Int32:
    """Return the distance of two sources' entries in `RouteTables.rows`."""
    return (entries + 31) // 32 * 32


class RouteTables(Carried):
    """Tables of a block in shared memory while it places rows.

    `route` [W, packets of a route]: header and ids of each rank, as they arrived. `rows` [W, entries rounded up to
    32]: the result. `earlier` [warps, experts], of 16 bits: how many entries other warps have seen before. `start`,
    `limit`, `asked` [experts]: first row, row behind the last one that fits, number of entries. `found` [2, warps]: how
    many copies and rows each warp has found (lists.py). Across NVLink domains `order` [W, tokens]: see
    ../internode/bundled.py. Of token-major rows (place_tokens.py) `rows` is [W, tokens], `earlier` [warps, W], `start`
    [W], and `asked` [2, local experts]: (row, k) that name each, all and dropped ones.

    How long each is says `table_ints`, which also bounds how many tokens there may be. `entries`: how many entries of
    each source may name an expert; 0 if some route is missing, so that nothing is placed.
    """

    entries: Any
    route: Any
    rows: Any
    earlier: Any
    start: Any
    limit: Any
    asked: Any
    found: Any
    order: Any

    def __init__(self, smem: Any, heap: LatencyHeap) -> None:
        self.route_stride = heap.route_packets * ROUTE_WORDS
        kinds = {"route": Uint32, "earlier": Uint16, "order": Uint16}
        lengths = table_ints(heap.problem, heap.tokens)
        self.entries = Int32(0)
        self.carried = ("entries", *lengths)
        for name, ints in lengths.items():
            kind = kinds.get(name, Int32)
            setattr(self, name, smem.allocate_tensor(kind, cute.make_layout(ints * 32 // kind.width)))


@cute.jit
def named_before(problem: cutlass.Constexpr[Problem], args: Any, first: Int32, ids: Any) -> Int32:
    """Return which of a lane's 8 ids, those of the entries from `first` on, repeat an earlier id of their token, as
    bits. Entries of no expert may count too."""
    top_k = problem.top_k
    again = Int32(0)
    if cutlass.const_expr(8 % top_k == 0):  # lanes hold whole tokens
        for i in range_constexpr(8):
            for back in range_constexpr(1, i % top_k + 1):
                if ids[i] == ids[i - back]:
                    again = again | (1 << i)
    else:
        entries = args.tokens * top_k
        earlier, number = cute.make_rmem_tensor((8,), Int32), cute.make_rmem_tensor((8,), Int32)
        for i in range_constexpr(8):
            earlier[i] = ids[i]
            number[i] = (first + i) % top_k
        if cutlass.const_expr(top_k < 8):
            for back in range_constexpr(1, top_k):
                again = again | same_as_earlier(entries, args, first, back, ids, earlier, number)
        else:
            for back in cutlass.range(1, top_k, 1):
                again = again | same_as_earlier(entries, args, first, back, ids, earlier, number)
    return again


@cute.jit
def same_as_earlier(
    entries: Int32, args: Any, first: Int32, back: Int32 | int, ids: Any, earlier: Any, number: Any
) -> Int32:
    """Return which of a lane's 8 ids equal the one `back` entries before, if that is of the same token. `earlier` holds
    the ids `back` - 1 entries before, and then those `back` before; `number`: the k of each entry."""
    for i in range_constexpr(7, 0, -1):
        earlier[i] = earlier[i - 1]
    earlier[0] = Int32(-1)
    if first >= back and first - back < entries:
        earlier[0] = args.topk_idx[first - back]
    same = Int32(0)
    for i in range_constexpr(8):
        if ids[i] == earlier[i] and back <= number[i]:
            same = same | (1 << i)
    return same


@cute.jit
def own_route_words(ranks: Ranks, args: Any, packet: Int32, lane: Int32, report: cutlass.Constexpr[bool]) -> Words:
    """Return a lane's payload vector of a packet of this rank's route. `args` are those of the dispatch kernel."""
    problem = ranks.heap.problem
    entries = args.tokens * problem.top_k
    vector = packet * PAYLOAD_VECTORS + lane_vector(lane)
    first = (vector - 1) * 8
    ids = cute.make_rmem_tensor((8,), Int32)
    for i in range_constexpr(8):
        ids[i] = Int32(-1)
        if first + i >= 0 and first + i < entries:
            ids[i] = args.topk_idx[first + i]
    again = Int32(0)
    if args.slots < 0:
        again = named_before(problem, args, first, ids)
    words = cute.make_rmem_tensor((4,), Uint32)
    bad = Int32(-1)
    for i in range_constexpr(8):
        expert = ids[i]
        if expert < 0 or expert >= problem.num_experts or (again >> i) & 1 != 0:
            if expert != -1:
                bad = Int32(i)
            expert = Int32(NO_EXPERT)
        if cutlass.const_expr(i % 2 == 0):
            words[i // 2] = Uint32(expert)
        else:
            words[i // 2] = words[i // 2] | (Uint32(expert) << 16)
    if cutlass.const_expr(report):
        if bad >= 0:
            reject(ranks, BAD_EXPERT, first + bad, args.topk_idx[first + bad])
    if vector == 0:
        words[0] = Uint32(args.capacity)
        words[1] = Uint32(args.alignment)
        words[2] = Uint32(args.slots)
        words[3] = Uint32(0)
    return words[0], words[1], words[2], words[3]


@cute.jit
def keep_route(tables: RouteTables, source: Int32, packet: Int32, words: Words, lane: Int32) -> None:
    """Puts what a lane holds of a received route into shared memory."""
    at = source * tables.route_stride + packet * ROUTE_WORDS + lane_offset(lane) // 4
    tables.route[at] = words[0]
    tables.route[at + 1] = words[1]
    if not marks(lane):
        tables.route[at + 2] = words[2]
        tables.route[at + 3] = words[3]


def share_of_warp(warp: Int32, total: Int32) -> tuple[Int32, Int32]:
    """Return the range of `total` consecutive items that a warp of the block processes."""
    each = (total + WARPS - 1) // WARPS
    begin = cutlass.min(warp * each, total)
    return begin, cutlass.min(begin + each, total)


@cute.jit
def count_up(earlier: Any, at: Int32, same: Int32, counts: Boolean) -> Int32:
    """By a warp: how many were counted at `earlier[at]` before a lane that `counts`, those of lower lanes included; -1
    in the others. `same`: the lanes that count there."""
    below = Int32(arch.popc(same & arch.lanemask_lt()))
    number = Int32(-1)
    if counts:
        number = Int32(earlier[at]) + below
    # The leader's update comes after every lane's read.
    arch.sync_warp()
    if counts and below == 0:
        earlier[at] = Uint16(number + Int32(arch.popc(same)))
    arch.sync_warp()
    return number


@cute.jit
def clear_counts(tables: RouteTables, experts: Int32) -> None:
    for i in cutlass.range(thread_id(), WARPS * experts, THREADS):
        tables.earlier[i] = Uint16(0)


@cute.jit
def asked_expert(tables: RouteTables, source: Int32, entry: Int32, low: Int32, high: Int32) -> Int32:
    """Return the expert id of an entry minus `low`, or -1 if it is not in low..high-1."""
    expert = Int32(-1)
    if entry < tables.entries:
        word = tables.route[source * tables.route_stride + ROUTE_HEADER_BYTES // 4 + (entry >> 1)]
        expert = Int32((word >> (Uint32(entry & 1) * 16)) & 0xFFFF)
        if expert >= low and expert < high:
            expert -= low
        else:
            expert = Int32(-1)
    return expert


class EntryRange(NamedTuple):
    """A warp's consecutive chunks of 32 entries; a chunk has entries of one source rank."""

    begin: Int32  # the warp's first chunk
    end: Int32  # the chunk behind its last one
    each: Int32  # chunks of a source
    source: Int32  # of the first chunk
    number: Int32  # of the first chunk, among those of its source


@cute.jit
def place_entries(
    problem: cutlass.Constexpr[Problem], tables: RouteTables, entries: Int32, low: Int32, high: Int32
) -> None:  # fmt: skip
    """Find the row of every entry for the experts low..high-1, which are those of one rank or of all.

    By the whole block, behind a barrier after `clear_counts` and `keep_route`; ends with a barrier. `entries` is how
    many each source may have. Then `rows` of (source, entry) at source * (entries rounded up to 32) + entry is the row
    at the expert's rank, or -1.
    """
    warp = warp_id()
    chunks = (entries + 31) // 32
    each = (problem.world_size * chunks + WARPS - 1) // WARPS
    begin = warp * each
    end = cutlass.min(begin + each, problem.world_size * chunks)
    # One division for all chunks of the warp: it takes as long as everything else that is done for a chunk.
    source = Int32(begin // chunks)
    mine = EntryRange(begin, end, chunks, source, begin - source * chunks)
    each_chunk(mine, partial(count_chunk, tables, low, high, warp * (high - low)))
    arch.sync_threads()
    sum_earlier(tables, high - low)
    arch.sync_threads()
    # A warp for each destination: where its segments start. With more ranks than warps, they take turns.
    for destination in cutlass.range(warp, problem.world_size, WARPS):
        first, behind = local_experts(problem, destination)
        if first >= low and behind <= high:
            at = destination * tables.route_stride
            settings = tuple(Int32(tables.route[at + what]) for what in (CAPACITY, ALIGNMENT, SLOTS))
            place_segments(tables, (first, behind), low, settings)
    arch.sync_threads()
    each_chunk(mine, partial(number_chunk, tables, low, high, warp * (high - low)))
    arch.sync_threads()


@cute.jit
def each_chunk(mine: EntryRange, visit: Callable[[Int32, Int32, Int32], None]) -> None:
    """By a warp: `visit(source, first, at)` for each of its chunks: the source rank, the number of the chunk's first
    entry there, and where the chunk begins in `RouteTables.rows`."""
    source, number, chunk = Int32(mine.source), Int32(mine.number), Int32(mine.begin)
    while chunk < mine.end:
        visit(source, number * 32, chunk * 32)
        chunk += 1
        number += 1
        if number == mine.each:
            source += 1
            number = Int32(0)


@cute.jit
def count_chunk(
    tables: RouteTables, low: Int32, high: Int32, counts: Int32, source: Int32, first: Int32, at: Int32
) -> None:
    """By a warp, whose counts begin at `earlier[counts]`: `rows` of its entries becomes how many of the warp's entries
    before name the same expert, and `earlier` how many name each."""
    lane = arch.lane_idx()
    expert = asked_expert(tables, source, first + lane, low, high)
    same = arch.match_sync(0xFFFFFFFF, expert)
    tables.rows[at + lane] = count_up(tables.earlier, counts + expert, same, expert >= 0)


@cute.jit
def sum_earlier(tables: RouteTables, experts: Int32) -> None:
    """By the whole block: `earlier` of each warp becomes what lies before the warp's own entries, `asked` the total."""
    for e in cutlass.range(thread_id(), experts, THREADS):
        # All reads come before the first write, so that no read waits for a write.
        found = [Int32(tables.earlier[w * experts + e]) for w in range(WARPS)]
        total = Int32(0)
        for w in range_constexpr(WARPS):
            tables.earlier[w * experts + e] = Uint16(total)
            total += found[w]
        tables.asked[e] = total


@cute.jit
def number_chunk(
    tables: RouteTables, low: Int32, high: Int32, counts: Int32, source: Int32, first: Int32, at: Int32
) -> None:
    """By a warp, behind `sum_earlier` and `place_segments`: `rows` of its entries becomes their rows."""
    lane = arch.lane_idx()
    expert = asked_expert(tables, source, first + lane, low, high)
    row = Int32(-1)
    if expert >= 0:
        earlier = Int32(tables.earlier[counts + expert])
        row = tables.rows[at + lane] + tables.start[expert] + earlier
        if row >= tables.limit[expert]:
            row = Int32(-1)
    tables.rows[at + lane] = row


@cute.jit
def kept_rows(tables: RouteTables, e: Int32) -> Int32:
    """Return how many entries of a placed expert have a row."""
    return cutlass.max(cutlass.min(tables.asked[e], tables.limit[e] - tables.start[e]), 0)


@cute.jit
def write_segments(problem: cutlass.Constexpr[Problem], tables: RouteTables, args: Any) -> None:
    """By the block that placed all experts: the segments of this rank's."""
    first, behind = local_experts(problem, args.ranks.rank)
    for e in cutlass.range(thread_id(), behind - first, THREADS):
        write_segment(args, e, tables.start[first + e], tables.asked[first + e], kept_rows(tables, first + e))
