"""Counts, positions and offsets: from the experts that each rank's tokens chose to the row of every (token, k).

A row's place follows from prefix sums alone: the start of its expert's segment, plus the rows of that expert from
lower source ranks, plus those from earlier tiles of its own rank, plus its position within the tile in order of
(token, k). A tile is a run of consecutive tokens, the same for all ranks of a call; one block does one tile.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from . import ptx
from .experts import local_experts
from .sync import BAD_EXPERT, BAD_ROW, Ranks, refuse, select

ENTRIES_PER_LANE = 2
"""How many entries of topk_idx a lane holds at once: their loads are in flight together."""


class Tables(NamedTuple):
    """What a block holds in shared memory while it places a tile, int32."""

    base: Any  # [W, E] rows of (rank, expert); then the row of the tile's first entry of (source rank, expert)
    earlier: Any  # [W, E] rows of tiles before this one
    start: Any  # [2, E] first row of each expert's segment at its own rank, and the row behind the last one that fits
    header: Any  # [W, 4] what each rank published of its call: tokens, capacity, alignment, slots


@cute.jit
def publish_positions(
    ranks: Ranks, topk_idx: Int64, tile: Int32, first: Int32, end: Int32, warps: cutlass.Constexpr[int], hist: Any,
    running: Any,
) -> None:  # fmt: skip
    """One block: expert id and position within the tile for the entries first..end of topk_idx, and the tile's counts.

    `hist` [warps, E] and `running` [E] are int32 tensors in shared memory. Each warp takes consecutive entries, so the
    order of warps, rounds and lanes is the order of entries.
    """
    tid, _, _ = arch.thread_idx()
    lane = arch.lane_idx()
    warp = tid // 32
    num_experts = ranks.heap.problem.num_experts
    experts_out = ranks.at(ranks.own, "experts")
    positions_out = ranks.at(ranks.own, "positions")
    per_warp = 32 * ENTRIES_PER_LANE

    e = tid
    while e < num_experts:
        running[e] = 0
        e += 32 * warps
    while first < end:
        mine = first + warp * per_warp + lane
        experts = cute.make_rmem_tensor((ENTRIES_PER_LANE,), Int32)
        ranked = cute.make_rmem_tensor((ENTRIES_PER_LANE,), Int32)
        for r in range_constexpr(ENTRIES_PER_LANE):
            experts[r] = ptx.ld_i32(topk_idx + Int64(cutlass.min(mine + r * 32, end - 1)) * 4)
        e = tid
        while e < num_experts * warps:
            hist[e] = 0
            e += 32 * warps
        arch.sync_threads()
        for r in range_constexpr(ENTRIES_PER_LANE):
            entry = mine + r * 32
            expert = experts[r]
            if entry >= end:
                expert = Int32(-1)
            elif expert < -1 or expert >= num_experts:
                refuse(ranks, BAD_EXPERT, entry, expert)
                expert = Int32(-1)
            experts[r] = expert
            same = arch.match_sync(0xFFFFFFFF, expert)
            below = arch.popc(same & arch.lanemask_lt())
            at = warp * num_experts + expert
            before = Int32(0)
            if expert >= 0:
                before = hist[at]
            # The leader's update comes after every lane's read.
            arch.sync_warp()
            if expert >= 0 and below == 0:
                hist[at] = before + Int32(arch.popc(same))
            arch.sync_warp()
            ranked[r] = before + Int32(below)
        arch.sync_threads()
        e = tid
        while e < num_experts:
            total = running[e]
            for w in range_constexpr(warps):
                n = hist[w * num_experts + e]
                hist[w * num_experts + e] = total
                total += n
            running[e] = total
            e += 32 * warps
        arch.sync_threads()
        for r in range_constexpr(ENTRIES_PER_LANE):
            entry = mine + r * 32
            if entry < end:
                expert = experts[r]
                position = Int32(-1)
                if expert >= 0:
                    position = ranked[r] + hist[warp * num_experts + expert]
                ptx.st_i32(experts_out + Int64(entry) * 4, expert)
                ptx.st_i32(positions_out + Int64(entry) * 4, position)
        arch.sync_threads()
        first += warps * per_warp
    e = tid
    while e < num_experts:
        ptx.st_i32(ranks.at(ranks.own, "counts") + Int64(tile * num_experts + e) * 4, running[e])
        e += 32 * warps


@cute.jit
def given_row(ranks: Ranks, row: Int32, num_rows: Int32) -> Int32:
    """A row of a route that an operator was given: -1, and reported, if it lies behind the `num_rows` that there are.

    Whatever integers an operator is called with, nothing outside of its tensors is read or written. Kernels that place
    the route themselves need no such look.
    """
    if row >= num_rows:
        refuse(ranks, BAD_ROW, row, num_rows)
        row = Int32(-1)
    return row


@cute.jit
def sum_counts(ranks: Ranks, threads: cutlass.Constexpr[int], ok: Int32, tile: Int32, tables: Tables) -> None:
    """`base` and `earlier` of what all ranks published; zero where `ok` is 0."""
    tid, _, _ = arch.thread_idx()
    problem = ranks.heap.problem
    num_experts = problem.num_experts
    i = tid
    while i < problem.world_size * num_experts:
        total = Int32(0)
        before = Int32(0)
        if ok != 0:
            expert = i % num_experts
            counts = ranks.at(select(ranks.peers, i // num_experts), "counts") + expert * 4
            # All loads first: they are in flight together.
            found = cute.make_rmem_tensor((problem.tiles,), Int32)
            for t in range_constexpr(problem.tiles):
                found[t] = ptx.ld_i32(counts + t * (num_experts * 4))
            for t in range_constexpr(problem.tiles):
                total += found[t]
                if t < tile:
                    before += found[t]
        tables.base[i] = total
        tables.earlier[i] = before
        i += threads


@cute.jit
def place_segments(ranks: Ranks, tables: Tables) -> None:
    """`start`, by one warp for each destination rank."""
    problem, header, base, start = ranks.heap.problem, tables.header, tables.base, tables.start
    tid, _, _ = arch.thread_idx()
    lane = arch.lane_idx()
    warp = tid // 32
    num_experts = problem.num_experts
    for d in range_constexpr(problem.world_size):
        if warp == d:
            capacity, alignment, slots = header[d * 4 + 1], cutlass.max(header[d * 4 + 2], 1), header[d * 4 + 3]
            carry = Int32(0)
            chunk = Int32(problem.first_expert[d])
            while chunk < problem.first_expert[d + 1]:
                e = chunk + lane
                n = Int32(0)
                if e < problem.first_expert[d + 1]:
                    for s in range_constexpr(problem.world_size):
                        n += base[s * num_experts + e]
                padded = (n + alignment - 1) // alignment * alignment
                total = padded
                for step in range_constexpr(5):
                    other = arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
                    if lane >= (1 << step):
                        total += other
                if e < problem.first_expert[d + 1]:
                    begin = carry + total - padded
                    limit = capacity
                    if slots > 0:
                        begin = (e - problem.first_expert[d]) * slots
                        limit = begin + slots
                    start[e] = begin
                    start[num_experts + e] = limit
                carry += arch.shuffle_sync(total, 31)
                chunk += 32


@cute.jit
def place_tile(
    ranks: Ranks, threads: cutlass.Constexpr[int], weighted: cutlass.Constexpr[bool], ok: Int32, tile: Int32,
    tables: Tables, args: Any,
) -> None:  # fmt: skip
    """One block: the row of every entry of this tile that the rank sends or receives; tile 0 also the segments.

    Reads what all ranks published (their route flags are acquired; `ok` says whether all came). `args` are those of
    the publish kernel.
    """
    tid, _, _ = arch.thread_idx()
    problem = ranks.heap.problem
    world_size, num_experts, top_k = problem.world_size, problem.num_experts, problem.top_k
    base, earlier, start, header = tables.base, tables.earlier, tables.start, tables.header
    first_local, end_local = local_experts(problem, ranks.rank)
    if tid < world_size * 4:
        value = Int32(0)
        if ok != 0:
            value = ptx.ld_i32(ranks.at(select(ranks.peers, tid // 4), "header") + (tid % 4) * 4)
        header[tid] = value
    sum_counts(ranks, threads, ok, tile, tables)
    arch.sync_threads()
    place_segments(ranks, tables)
    arch.sync_threads()

    # base becomes the row of the tile's first entry of (source rank, expert).
    e = tid
    while e < num_experts:
        begin = start[e]
        end = begin
        for s in range_constexpr(world_size):
            n = base[s * num_experts + e]
            base[s * num_experts + e] = end + earlier[s * num_experts + e]
            end += n
        if tile == 0 and e >= first_local and e < end_local:
            n = end - begin
            kept = cutlass.max(cutlass.min(n, start[num_experts + e] - begin), 0)
            alignment = cutlass.max(header[ranks.rank * 4 + 2], 1)
            stop = cutlass.min(begin + (n + alignment - 1) // alignment * alignment, header[ranks.rank * 4 + 1])
            if header[ranks.rank * 4 + 3] > 0:
                stop = begin + (kept + alignment - 1) // alignment * alignment
            at = Int64(e - first_local) * 4
            ptx.st_i32(args.offs + at, stop)
            ptx.st_i32(args.counts + at, kept)
            ptx.st_i32(args.dropped + at, n - kept)
        e += threads
    arch.sync_threads()

    # What comes here: the same entry of every source at once, so that the loads from all peers are in flight together.
    bound = args.max_tokens * top_k
    per_tile = (args.max_tokens + problem.tiles - 1) // problem.tiles * top_k
    first = tile * per_tile
    end = cutlass.min(first + per_tile, bound)
    j = first + tid
    while j < end:
        experts = cute.make_rmem_tensor((world_size,), Int32)
        positions = cute.make_rmem_tensor((world_size,), Int32)
        weights = cute.make_rmem_tensor((world_size,), Float32)
        for s in range_constexpr(world_size):
            experts[s] = ptx.ld_i32(ranks.at(ranks.peers[s], "experts") + Int64(j) * 4)
            positions[s] = ptx.ld_i32(ranks.at(ranks.peers[s], "positions") + Int64(j) * 4)
            if const_expr(weighted):
                weights[s] = ptx.ld_f32(ranks.at(ranks.peers[s], "weights") + Int64(j) * 4)
        for s in range_constexpr(world_size):
            row = Int32(-1)
            expert = experts[s]
            # Entries behind the source's last token hold what an earlier call left there.
            if j < header[s * 4] * top_k and expert >= first_local and expert < end_local:
                row = base[s * num_experts + expert] + positions[s]
                if row >= start[num_experts + expert]:
                    row = Int32(-1)
            ptx.st_i32(args.recv_rows + (Int64(s) * bound + j) * 4, row)
            if const_expr(weighted):
                if row >= 0:
                    ptx.st_f32(args.recv_weights + Int64(row) * 4, weights[s])
        j += threads

    j = first + tid
    while j < cutlass.min(end, args.tokens * top_k):
        expert = ptx.ld_i32(ranks.at(ranks.own, "experts") + Int64(j) * 4)
        row = Int32(-1)
        if ok != 0 and expert >= 0:
            row = base[ranks.rank * num_experts + expert] + ptx.ld_i32(ranks.at(ranks.own, "positions") + Int64(j) * 4)
            if row >= start[num_experts + expert]:
                row = Int32(-1)
        ptx.st_i32(args.send_rows + Int64(j) * 4, row)
        j += threads


@cute.jit
def place_weights(ranks: Ranks, threads: cutlass.Constexpr[int], ok: Int32, tile: Int32, args: Any) -> None:
    """One block: the weights of this tile's entries along a known route (their owners' route flags are acquired). Rows
    behind the last one are left out; the pull kernel, which goes along the same route, reports them."""
    tid, _, _ = arch.thread_idx()
    problem = ranks.heap.problem
    bound = args.max_tokens * problem.top_k
    per_tile = (args.max_tokens + problem.tiles - 1) // problem.tiles * problem.top_k
    end = cutlass.min((tile + 1) * per_tile, bound)
    j = tile * per_tile + tid
    while j < end and ok != 0:
        for s in range_constexpr(problem.world_size):
            row = ptx.ld_i32(args.recv_rows + (Int64(s) * bound + j) * 4)
            if row >= 0 and row < args.capacity:
                weight = ptx.ld_f32(ranks.at(ranks.peers[s], "weights") + Int64(j) * 4)
                ptx.st_f32(args.recv_weights + Int64(row) * 4, weight)
        j += threads
