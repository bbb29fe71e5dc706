"""Grouped GEMM for few rows an expert: a block reads a slice of one expert's weights once, and multiplies all rows of
the expert by it.

A block takes `Tile.columns` columns of the weights of an expert that has rows, and of further ones if there are more
such experts than blocks for them. Blocks without an expert leave at once. Weights and rows go through a ring of stages
in shared memory, which asynchronous copies of 16 bytes fill ahead. Weights are the wide operand (16) of
`mma.sync.m16n8k16`, rows the narrow one (8), so eight rows waste nothing.

The columns of a block are two halves of equal width. In the first GEMM of an expert these are gate columns and the up
columns that belong to them, so that silu(gate) * up is computed in registers. A warp has 16 columns of each half.

Sums. A number of the result is the sum over K in steps of 16, in ascending order, in one fp32 accumulator. It depends
neither on the tile, nor on the order of the weights, nor on other rows.

Dependent launches. The first GEMM waits for the kernel in front before it reads anything. The second one is launched
behind the first of the same rows: it begins when all blocks of the first have seen that the route is complete, so it
reads the counts and fetches weights at once, and waits only before it reads rows.
"""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..copies import lowest
from ..ids import block_id, thread_id, warp_id
from ..launch import Launched
from ..segments import padded
from ..views import Ints, Records

NUMBER = 2
"""Bytes of a number."""


class FewRowsArgs(NamedTuple):
    """R rows, El experts, K numbers in a row, N columns of weights (2 F in the first GEMM)."""

    x: Int64  # [R, K]
    weights: Int64  # [El, K, N] or [El, N, K]
    out: Int64  # [R, F] or [R, N]
    offs: Ints  # [El]
    counts: Ints  # [El]
    alignment: Int32
    blocks: Int32


class Segment(NamedTuple):
    """The rows of an expert."""

    expert: Int32
    begin: Int32
    rows: Int32  # 0: there is no such expert
    named: Int32  # number of experts that have rows


class Part(NamedTuple):
    """Part of the result that a block computes at a time."""

    expert: Int32
    column: Int32  # the first one of the result
    begin: Int32  # the first row
    rows: Int32


class Tile(NamedTuple):
    """The size of what a block computes at a time. It has a thread for each column of weights."""

    columns: int
    """Columns of weights: 64, 128 or 256."""
    rows: int
    """Largest number of rows, a multiple of 8. For more rows of an expert the block reads the weights again."""
    stages: int
    """Number of stages of the ring."""
    depth: int = 64
    """Length of K in a stage, a multiple of 32."""

    @property
    def half(self) -> int:
        return self.columns // 2

    @property
    def stage_bytes(self) -> int:
        return 2 * self.depth * (self.columns + self.rows)

    @property
    def half_bytes(self) -> int:
        """Bytes of half of the weights in a stage."""
        return 2 * self.depth * self.half

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes in a row of x, or in a column of weights, of a stage."""
        return self.depth // 8


ROWS = (8, 16, 32, 64, 96, 128)
"""Rows of a tile."""


def rows_of(most: int, mean: float) -> int:
    """Return the rows of a tile that hold all rows of an expert, if experts are named at random. `most`: largest number
    of rows that an expert can have; `mean`: the expected number."""
    likely = min(most, mean + 3 * mean**0.5 + 4)
    return next((rows for rows in ROWS if rows >= likely), ROWS[-1])


def tile_of(width: int, gated: bool, transposed: bool, rows: int, named: int) -> Tile:
    """Return the tile of a GEMM. It affects the speed only.

    A line of weights in a stage should have 256 bytes: memory reads shorter lines more slowly. Narrow tiles are for
    few blocks, which would leave multiprocessors without work.

    Args:
        width, gated, transposed: as for `FewRows`.
        rows: of the tile.
        named: number of experts that are expected to have rows.
    """
    blocks = named * -(-width // (128 if gated else 256))  # of 256 columns
    if transposed and rows <= 32:
        return Tile(64, rows, 4, 128)
    if transposed and rows <= 64:
        return Tile(128, rows, 3, 128)
    return Tile(256 if transposed or blocks >= 128 else 128, rows, 4, 64)


@dataclass(frozen=True)
class FewRows(Launched):
    """Multiply the rows of each expert by its weights. `gated`: the first GEMM of SwiGLU experts."""

    experts: int
    depth: int
    """K"""
    width: int
    """Numbers in a row of the result."""
    dtype: str
    tile: Tile
    gated: bool
    transposed: bool
    """Whether weights lie as [El, N, K]."""

    Args = FewRowsArgs
    ALIGNMENT = 128
    """Bytes of which the address of the ring is a multiple."""

    @property
    def name(self) -> str:
        """Name of the kernel in a profile."""
        return "ep_gate_up" if self.gated else "ep_down"

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (self.tile.columns, 1, 1), "use_pdl": True, "preferred_smem_carveout": 100}

    @property
    def all_columns(self) -> int:
        """N"""
        return 2 * self.width if self.gated else self.width

    @property
    def share(self) -> int:
        """Columns of the result that a block computes."""
        return self.tile.half if self.gated else self.tile.columns

    @property
    def shares(self) -> int:
        """Blocks of an expert."""
        return -(-self.width // self.share)

    @property
    def steps(self) -> int:
        """Stages that a block goes through."""
        return -(-self.depth // self.tile.depth)

    @property
    def groups(self) -> int:
        """Groups of 8 rows."""
        return self.tile.rows // 8

    @property
    def pitch(self) -> int:
        """Chunks of 16 bytes in a line of a half of the weights in shared memory."""
        return self.tile.chunks if self.transposed else self.tile.half // 8

    @cute.kernel
    def kernel(self, args: Any) -> None:
        bid = block_id()
        smem = cutlass.memory.SmemAllocator()
        ring = smem.allocate_array(Uint8, self.tile.stages * self.tile.stage_bytes, byte_alignment=self.ALIGNMENT)
        if const_expr(self.gated):
            arch.griddepcontrol_wait()
        number, step = bid // self.shares, args.blocks // self.shares
        named = number + 1
        while number < named:
            named = self.take(args, ring, number, bid % self.shares * self.share)
            number += step
            if number < named:
                arch.sync_threads()  # nobody reads the ring of the expert before

    @cute.jit
    def take(self, args: Any, ring: Any, number: Int32, column: Int32) -> Int32:
        """Compute columns of the `number`-th expert that has rows, if there are so many. Return their number."""
        segment = self.find(args, number)
        if segment.rows > 0:
            weights = Records(args.weights, 2 * self.depth * self.all_columns).at(segment.expert)
            self.start_weights(ring, weights, column)
            if const_expr(not self.gated):
                arch.griddepcontrol_wait()
            done = Int32(0)
            while done < segment.rows:
                rows = cutlass.min(segment.rows - done, self.tile.rows)
                part = Part(segment.expert, column, segment.begin + done, rows)
                self.multiply(args, ring, weights, part)
                done += self.tile.rows
                if done < segment.rows:
                    arch.sync_threads()  # nobody reads the ring any more
                    self.start_weights(ring, weights, column)
        return segment.named

    @cute.jit
    def start_weights(self, ring: Any, weights: Int64, column: Int32) -> None:
        """Start copying the weights of the first stages."""
        for stage in range_constexpr(min(self.tile.stages - 1, self.steps)):
            self.load_weights(ring + stage * self.tile.stage_bytes, weights, column, Int32(stage))

    @cute.jit
    def find(self, args: Any, number: Int32) -> Segment:
        """By a warp: return the rows of the `number`-th expert that has any, counted from 0."""
        lane = arch.lane_idx()
        counts, ends = [], []
        for first in range_constexpr(0, self.experts, 32):
            count, end = Int32(0), Int32(0)
            if first + lane < self.experts:
                count = ptx.ld_relaxed_i32(args.counts.at(first + lane))
                end = ptx.ld_relaxed_i32(args.offs.at(first + lane))
            counts.append(count)
            ends.append(end)
        before, expert, rows, end = Int32(0), Int32(0), Int32(0), Int32(0)
        for i in range_constexpr(len(counts)):
            named = arch.vote_ballot_sync(counts[i] > 0)
            if counts[i] > 0 and before + Int32(arch.popc(named & arch.lanemask_lt())) == number:
                expert, rows, end = 32 * i + lane, counts[i], ends[i]
            before += Int32(arch.popc(named))
        holder = cutlass.min(lowest(Int32(arch.vote_ballot_sync(rows > 0))), 31)
        expert, rows = arch.shuffle_sync(expert, holder), arch.shuffle_sync(rows, holder)
        begin = arch.shuffle_sync(end, holder) - padded(rows, args.alignment)
        return Segment(expert, begin, rows, before)

    @cute.jit
    def multiply(self, args: Any, ring: Any, weights: Int64, part: Part) -> None:
        """Compute a block of rows. The copies of the weights of the first stages have been started."""
        tile = self.tile
        ahead = tile.stages - 1
        acc = cute.make_rmem_tensor((2 * self.groups * 4,), Float32)
        for group in range_constexpr(2 * self.groups):
            for i in range_constexpr(4):
                acc[4 * group + i] = Float32(0.0)
        x = Records(args.x, 2 * self.depth).at(part.begin)
        for step in range_constexpr(ahead):
            if const_expr(step < self.steps):
                self.load_rows(ring + step * tile.stage_bytes, x, part.rows, Int32(step))
            ptx.cp_async_commit()
        stage, free = Int32(0), Int32(ahead)
        for step in cutlass.range(self.steps):
            given = self.wait_for_copies(args, part, step, ahead - 1)
            arch.sync_threads()  # the stage is full for all threads, and nobody reads the one before it any more
            if step + ahead < self.steps:
                into = ring + free * tile.stage_bytes
                self.load_weights(into, weights, part.column, step + ahead)
                self.load_rows(into, x, part.rows, step + ahead)
            ptx.cp_async_commit()
            if step == max(self.steps - ahead, 0):
                arch.griddepcontrol_launch_dependents()
            self.add(args, ring + stage * tile.stage_bytes, part, step, acc, given)
            stage += 1
            if stage == tile.stages:
                stage = Int32(0)
            free += 1
            if free == tile.stages:
                free = Int32(0)
        self.store(args, ring, part, acc)

    # ------------------------------------------------------------------ copies

    def wait_for_copies(self, args: Any, part: Part, step: Any, most: int) -> Any:
        """Wait until all groups of the thread's copies are complete but for the last `most`. Return what `add` needs
        besides them."""
        ptx.cp_async_wait(most)

    @cute.jit
    def load_weights(self, to: Any, weights: Int64, column: Int32, step: Int32) -> None:
        """Start copying a stage's weights: lines of K with columns, or of columns with K if they are transposed."""
        tile, thread = self.tile, thread_id()
        line, chunk = thread // self.pitch, thread % self.pitch
        lines = tile.columns // self.pitch  # that all threads copy at a time
        for half in range_constexpr(2):
            first = column + half * (self.width if self.gated else tile.half)
            last = (half + 1) * self.width if self.gated else self.width
            into = to + half * tile.half_bytes
            for i in range_constexpr(tile.depth // 16):
                if const_expr(self.transposed):
                    at = first + (line + i * lines)
                    if const_expr(self.width % self.share != 0):
                        at = cutlass.min(at, last - 1)
                    k = step * tile.depth + chunk * 8
                    address = Records(weights, NUMBER, self.depth).part(at).at(k)
                else:
                    at = first + chunk * 8
                    if const_expr(self.width % self.share != 0):
                        at = cutlass.min(at, last - 8)
                    k = step * tile.depth + (line + i * lines)
                    address = Records(weights, NUMBER, self.all_columns).part(k).at(at)
                self.copy(into + self.place(line + i * lines, chunk, self.pitch, tile.half), address, k)

    @cute.jit
    def load_rows(self, to: Any, x: Int64, rows: Int32, step: Int32) -> None:
        """Start copying a stage's part of the rows."""
        tile, thread = self.tile, thread_id()
        line, chunk = thread // tile.chunks, thread % tile.chunks
        lines = tile.columns // tile.chunks
        into = to + 2 * tile.half_bytes
        k = step * tile.depth + chunk * 8
        for first in range_constexpr(0, tile.rows, lines):
            if first + line < rows:
                address = Records(x, NUMBER, self.depth).part(first + line).at(k)
                self.copy(into + self.place(first + line, chunk, tile.chunks, tile.rows), address, k)

    def copy(self, to: Any, address: Int64, k: Int32) -> None:
        """Start copying a chunk that begins at `k` of K, or zeros behind the end of K."""
        if self.depth % self.tile.depth == 0:
            ptx.cp_async(to, address)
        else:
            self.copy_or_clear(to, address, k)

    @cute.jit
    def copy_or_clear(self, to: Any, address: Int64, k: Int32) -> None:
        nbytes = Int32(16)
        if k >= self.depth:
            nbytes = Int32(0)
        ptx.cp_async_some(to, address, nbytes)

    def place(self, line: Any, chunk: Any, pitch: int, lines: int) -> Any:
        """Return the offset of a chunk of 16 bytes in a tile of `lines` lines of `pitch` chunks."""
        return swizzled(line, chunk, pitch)

    # ------------------------------------------------------------------ products

    @cute.jit
    def add(self, args: Any, stage: Any, part: Part, step: Int32, acc: Any, given: Any) -> None:
        """By a warp: add the products of a stage to the sums."""
        lane, warp = arch.lane_idx(), warp_id()
        matrix, line = lane // 8, lane % 8
        x = stage + 2 * self.tile.half_bytes
        for pair in range_constexpr(self.tile.depth // 32):  # two steps of 16 each
            weights = []
            for which in range_constexpr(2):
                k = pair * 2 + which
                for half in range_constexpr(2):
                    at = stage + half * self.tile.half_bytes
                    if const_expr(self.transposed):
                        at = at + swizzled(warp * 16 + matrix % 2 * 8 + line, k * 2 + matrix // 2, self.pitch)
                    else:
                        at = at + swizzled(k * 16 + matrix // 2 * 8 + line, warp * 2 + matrix % 2, self.pitch)
                    weights.append(ptx.ldmatrix(at, not self.transposed))
            for group in range_constexpr(self.groups):
                if group * 8 < part.rows:
                    some = ptx.ldmatrix(x + swizzled(group * 8 + line, pair * 4 + matrix, self.tile.chunks), False)
                    for which in range_constexpr(2):
                        for half in range_constexpr(2):
                            first = (half * self.groups + group) * 4
                            sums = ptx.mma(
                                [acc[first + i] for i in range(4)], weights[2 * which + half],
                                some[2 * which : 2 * which + 2], self.dtype,
                            )  # fmt: skip
                            for i in range_constexpr(4):
                                acc[first + i] = sums[i]

    @cute.jit
    def store(self, args: Any, ring: Any, part: Part, acc: Any) -> None:
        """By a warp: store the sums. The ring may be in use by other warps."""
        self.store_rows(args, part, acc)

    @cute.jit
    def store_rows(self, args: Any, part: Part, acc: Any) -> None:
        """By a warp: round the sums and store them. A lane has two rows of a column, then two columns of a row."""
        lane, warp = arch.lane_idx(), warp_id()
        for group in range_constexpr(self.groups):
            if group * 8 < part.rows:
                row = group * 8 + lane // 4
                to = Records(args.out, NUMBER, self.width).part(part.begin + row)
                for half in range_constexpr(1 if self.gated else 2):
                    first = (half * self.groups + group) * 4
                    values = [acc[first + i] for i in range(4)]
                    if const_expr(self.gated):
                        values = self.gated_values(acc, group)
                    words = ptx.pack(values, self.dtype)
                    for i in range_constexpr(2):
                        word = ptx.movmatrix(words[i])
                        at = part.column + (half * self.tile.half + i * 8) + warp * 16 + lane % 4 * 2
                        if row < part.rows and at < self.width:
                            Ints(to.at(at))[0] = Int32(word)

    def gated_values(self, acc: Any, group: int) -> list[Any]:
        """Return silu(gate) * up of a group of rows."""
        gates, ups = ([acc[(half * self.groups + group) * 4 + i] for i in range(4)] for half in range(2))
        return [gate * ptx.sigmoid(gate) * up for gate, up in zip(gates, ups, strict=True)]


@cute.jit
def swizzled(line: Any, chunk: Any, pitch: cutlass.Constexpr[int]) -> Any:
    """Return the offset of a chunk of 16 bytes in a tile with `pitch` chunks in a line. The same chunk of 8 consecutive
    lines, and 8 consecutive chunks of a line, lie in different banks of shared memory."""
    if const_expr(pitch >= 8):
        return (line * pitch + (chunk ^ (line % 8))) * 16
    return (line * pitch + (chunk ^ (line // 2 % 4))) * 16
