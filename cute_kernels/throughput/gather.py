"""Throughput combine of rows that lie in symmetric memory, one kernel: owners fetch the rows and add them up.

An item is a piece of one of this rank's tokens. Bulk copies bring that piece of each row of the token from the rank
that holds it, through the warp's ring and started ahead over the ends of items; the sum leaves by ordinary stores. Same
bits as the pushing combine: the rows of a rank in fp32 over k ascending, rounded to the row's dtype, then these in fp32
over ranks ascending, rounded once. A single row of a rank is its own rounded sum.

Why no rank reads too early or too late: kernels before this one on their rank's stream wrote the rows, its hello comes
after them, and no block fetches before it saw all hellos. When a rank has fetched everything it says so to all
(`fetched`), and the operation ends when all have: whatever runs next on a rank's stream may overwrite its rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import given_row
from ..copies import entry_of
from ..experts import holder_of
from ..heap import CLAIMS, Heap
from ..ids import block_ids, thread_id, warp_id
from ..launch import RankArgs
from ..views import Ints, Records, Words
from .pipeline import deal_out, run
from .ring import Ring, SlicedKernel, init_ring_barriers

OPENS, CLOSES, FIRST, LAST, END = 1, 2, 4, 8, 16
"""Bits that are noted of a stage: its row is the first or last one of its rank; of its item; its piece is the last one
of a row."""

RANK_MARKS = OPENS | CLOSES
"""The bits that lie in the low bits of a row's address, which is a multiple of 16, until its load starts."""


class GatherArgs(NamedTuple):
    ranks: RankArgs
    topk_idx: Ints
    send_rows: Ints
    out: Int64
    bases: Words  # a table of the addresses of row 0 at each rank
    tokens: Int32
    num_rows: Int32  # that each rank holds
    blocks: Int32


class GatherJob(NamedTuple):
    """The job of an item."""

    held: Int32  # its rows, whose addresses lie in the warp's `order`
    row: Int32  # the next of them to load
    target: Int64  # where the sum goes
    piece: Int32


@dataclass(frozen=True)
class Gather(SlicedKernel):
    """Unweighted sums of rows."""

    NAME, Args, WARPS = "ep_gather", GatherArgs, 12
    # WARPS: few enough that a lane can hold two sums of a slice in registers, that of one rank's rows and that of all.

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * self.WARPS, 1, 1)}

    @cute.kernel
    def kernel(self, args: GatherArgs) -> None:
        p, shape = self.problem, self.ring
        tid = thread_id()
        bid, blocks = block_ids()
        ranks = sync.Ranks(Heap.of(p), args.ranks)
        # Earlier kernels wrote the rows, bulk copies of the peers read them.
        sync.fence_async()
        if bid == 0:
            operation.say_hello(ranks, tid, 32 * self.WARPS, True)
        warp = warp_id()
        smem = cutlass.memory.SmemAllocator()
        stages = self.WARPS * shape.stages
        barriers = smem.allocate_array(Int64, stages)
        targets = smem.allocate_array(Int64, stages)
        order = smem.allocate_array(Int64, self.WARPS * 32)
        marks = smem.allocate_array(Int32, stages)
        buffers = smem.allocate_array(Uint8, stages * shape.stride, byte_alignment=128)
        lost = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid < 32:
            init_ring_barriers(barriers, stages)
        if tid == 0:
            lost[0] = 0
        arch.sync_threads()
        for peer in cutlass.range(tid, p.world_size, 32 * self.WARPS):
            if not ranks.wait("hello", peer, peer, 0):
                lost[0] = 1
        # Hands the barriers, and what was acquired, to the whole block; then to its bulk copies.
        arch.sync_threads()
        sync.fence_async()
        if lost[0] == 0:
            first = warp * shape.stages
            notes = (order + warp * 32, marks + first, targets + first)
            total = cute.make_rmem_tensor((self.slices.values,), Float32)
            partial = cute.make_rmem_tensor((self.slices.values,), Float32)
            count = args.tokens * shape.pieces
            items = deal_out(ranks.word(CLAIMS), warp * blocks + bid, blocks * self.WARPS, count, Boolean(True))
            run(self, Ring(shape, buffers, barriers, warp), items, (ranks, args, count), (notes, total, partial))
        operation.finish(ranks, blocks, fetched=True)

    # What the warp does in its loop (pipeline.Work).

    def scout(self, lists: Any, item: Int32) -> Int32:
        """Return nothing, because nothing has to be loaded first."""
        return item

    @cute.jit
    def peek(self, lists: Any, item: Int32) -> tuple[Int32, Int32]:
        """Return a lane's row and expert of the item's token."""
        _, args, items = lists
        return entry_of(self.problem, args, item // self.ring.pieces, item < items)

    def nothing(self) -> GatherJob:
        return GatherJob(Int32(0), Int32(0), Int64(0), Int32(0))

    @cute.jit
    def begin(self, lists: Any, state: Any, item: Int32, scouted: Int32, peeked: tuple[Int32, Int32]) -> GatherJob:
        """Return the job of an item. The addresses of its rows, with their rank marks, are put into `order`: by rank,
        then by k."""
        ranks, args, _ = lists
        row, expert = peeked
        p, shape, order = self.problem, self.ring, state[0][0]
        token, piece = item // shape.pieces, item % shape.pieces
        at = piece * shape.piece_bytes
        target = Records(args.out, p.row_bytes).at(token) + at
        row = given_row(ranks, row, args.num_rows)
        holder = Int32(-1)
        if row >= 0:
            holder = holder_of(p, expert)
        same = arch.match_sync(0xFFFFFFFF, holder)
        held = Int32(arch.popc(arch.vote_ballot_sync(row >= 0)))
        mark = Int32(0)
        below = Int32(arch.popc(same & arch.lanemask_lt()))
        position = below
        for k in range_constexpr(p.top_k):
            other = arch.shuffle_sync(holder, k)
            if other >= 0 and other < holder:
                position += 1
        if below == 0:
            mark = mark | OPENS
        if below == Int32(arch.popc(same)) - 1:
            mark = mark | CLOSES
        # Lane 0 has read the order of the item before.
        arch.sync_warp()
        if row >= 0:
            address = Records(ptx.ld_constant(args.bases.at(holder)), p.row_bytes).at(row) + at
            (order + position).store(address + mark)
        arch.sync_warp()
        if held == 0:
            end = cutlass.min(p.row_bytes - at, shape.piece_bytes)
            for i in cutlass.range(arch.lane_idx() * 16, end, 32 * 16):
                ptx.st_v4(target + i, (Int32(0), Int32(0), Int32(0), Int32(0)))
        return GatherJob(held, Int32(0), target, piece)

    def left(self, job: GatherJob) -> Boolean:
        return job.row < job.held

    @cute.jit
    def load(self, lists: Any, state: Any, ring: Ring, stage: Int32, job: GatherJob) -> GatherJob:
        shape = ring.shape
        (order, marks, targets), _, _ = state
        held, row, target, piece = job
        if arch.lane_idx() == 0:
            source = (order + row).load()
            mark = Int32(source) & RANK_MARKS
            source -= Int64(mark)
            if row == 0:
                mark = mark | FIRST
            if row == held - 1:
                mark = mark | LAST
            if piece == shape.pieces - 1:
                mark = mark | END
            (marks + stage).store(mark)
            (targets + stage).store(target)
            ring.load(stage, source, shape.bytes_of(piece))
        return GatherJob(held, row + 1, target, piece)

    @cute.jit
    def use(self, state: Any, ring: Ring, stage: Int32, phase: Int32) -> None:
        shape, slices = ring.shape, self.slices
        (_, marks, targets), total, partial = state
        lane = arch.lane_idx()
        ring.wait(stage, phase)
        mark = (marks + stage).load()
        at = ring.buffer + stage * shape.stride + lane * 16
        if mark & FIRST != 0:
            for i in range_constexpr(slices.values):
                total[i] = Float32(0.0)
        words = [ptx.ld_shared_v4(at + u * 512) for u in range(slices.vectors)]
        # Vector by vector, so that few numbers besides the two sums are in registers.
        if mark & RANK_MARKS == RANK_MARKS:
            for u in range_constexpr(slices.vectors):
                add(slices.dtype, total, u, ptx.unpack(words[u], slices.dtype))
        else:
            if mark & OPENS != 0:
                for i in range_constexpr(slices.values):
                    partial[i] = Float32(0.0)
            for u in range_constexpr(slices.vectors):
                add(slices.dtype, partial, u, ptx.unpack(words[u], slices.dtype))
            if mark & CLOSES != 0:
                for u in range_constexpr(slices.vectors):
                    rounded = ptx.pack(of_vector(slices.dtype, partial, u), slices.dtype)
                    add(slices.dtype, total, u, ptx.unpack(rounded, slices.dtype))
        if mark & LAST != 0:
            to = (targets + stage).load() + lane * 16
            behind = slices.end_of(mark & END != 0)
            for u in range_constexpr(slices.vectors):
                if u * 512 + lane * 16 < behind:
                    ptx.st_v4(to + u * 512, ptx.pack(of_vector(slices.dtype, total, u), slices.dtype))


def of_vector(dtype: str, numbers: Any, u: int) -> list[Float32]:
    """Return the numbers of a lane's vector `u` of a slice."""
    each = 4 if dtype == "fp32" else 8
    return [numbers[i] for i in range(each * u, each * (u + 1))]


def add(dtype: str, numbers: Any, u: int, values: list[Float32]) -> None:
    """Adds to those of a lane's vector `u` of a slice."""
    each = 4 if dtype == "fp32" else 8
    for i, value in enumerate(values):
        numbers[each * u + i] = ptx.add_rn(numbers[each * u + i], value)
