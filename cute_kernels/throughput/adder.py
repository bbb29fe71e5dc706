"""Summing of rows, shared by the pushing and the summing blocks of a combine.

An item is the rows to add and the address of the sum. A stage of the ring holds a slice of a row (pipeline.py). A lane
adds its vectors of each slice in fp32 in registers and stores the rounded sum from there. The adders of combine.py say
which rows belong to an item.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..carried import Carried
from ..copies import lowest
from ..quantized_sums import SumSlices, numbers_at, store_slice
from ..slices import Slices
from ..views import Records
from .outbox import Outbox, close, post
from .pipeline import Items, run
from .ring import Ring

FIRST, LAST, END, APART, BEGINS, JOINS, PLAIN = 1, 2, 4, 8, 16, 32, 64
"""Mark of a stage, as bits: its slice is the first of a sum; the last of a sum; the last of the item. APART, BEGINS and
JOINS belong to sums over several NVLink domains (../internode/combine.py). If owners add their own rows, JOINS marks
the last of these, whose sum is rounded or quantized. If the other rows are in a format: the slice is of a row of the
dtype."""
OTHER_LANE = 31
"""Lane of the other rank's sum if owners add their own rows, which lower lanes have."""


class Notes(Carried):
    """Notes on the stages of a warp, read when a stage is full. Lane 0 writes them when the load of a stage starts."""

    carried = ("marks", "weights", "codes", "targets")

    def __init__(self, smem: Any, stages: int) -> None:
        self.marks = smem.allocate_array(Int32, stages)
        self.weights = smem.allocate_array(Float32, stages)
        self.codes = smem.allocate_array(Int32, stages)
        self.targets = smem.allocate_array(Int64, stages)


class SumJob(NamedTuple):
    """The job of an item: the lanes that hold a row of it, and those whose load of the slice has not been started."""

    held: Any  # a bit mask; bit 32 stands for an extra row
    left: Any
    piece: Int32  # the slice that loads are being started for
    row: Int32
    weight: Float32
    target: Int64
    code: Int32


class RowBases(NamedTuple):
    """Addresses of the rows to add."""

    base: Int64
    extra: Any = None  # address of extra rows, if there are any
    other: Any = None  # address of sums that lie elsewhere: those of another rank or of other NVLink domains


class AdderState(NamedTuple):
    """State of a warp, in addition to its ring."""

    notes: Notes
    warp: Int32
    acc: Any  # a lane's sum of a slice
    part: Any  # a second sum of some of the rows, if there are `RowAdder.part_numbers`
    count: Any  # how many codes were posted
    rows: RowBases
    outbox: Outbox | None


class ItemRows(NamedTuple):
    """The rows of an item, as a whole warp knows them."""

    held: Any  # bit mask of lanes that hold a row; bit 32: there is an extra row, added last; 0: the item is skipped
    row: Int32  # a lane's row, counted from `RowBases.base`
    weight: Float32  # of the row, used if rows are `weighted`
    target: Int64  # address of the sum
    code: Int32  # of the flag to post when the sum is stored; number of the extra row, counted from `RowBases.extra`


@dataclass(frozen=True)
class RowAdder:
    """The work of a warp that sums items (pipeline.Work). Subclasses look items up."""

    kernel: Any
    """The combine (`combine.Combine`)."""
    pushes: ClassVar[bool] = False
    """Whether a warp adds rows of experts and pushes the sums, in the format if there is one. If not, it adds such
    sums, and rows of the dtype if they are extra ones or its own."""
    own: ClassVar[bool] = False
    """Whether rows of this rank are added to a sum of the other rank (`combine.OwnRowsAdder`)."""
    part_numbers: ClassVar[Any] = 1
    """Numbers of a lane's second sum."""

    @property
    def slices(self) -> Slices:
        """Slices of rows."""
        return self.kernel.slices if self.pushes or self.own else self.kernel.sum_slices

    @property
    def weighted(self) -> bool:
        """Whether rows are multiplied by weights."""
        return self.kernel.weighted and (self.pushes or self.own)

    @property
    def extra(self) -> bool:
        """Whether an item may have an extra row, the residual."""
        return self.kernel.residual and not self.pushes

    @property
    def wire(self) -> SumSlices | None:
        """Layout of sums that are sent in a format."""
        return self.kernel.in_format

    def fetch(self, lists: Any, scouted: Any, peeked: Any) -> ItemRows:
        """Return the rows of an item."""
        raise NotImplementedError

    @property
    def decodes(self) -> bool:
        return self.wire is not None and not self.pushes

    @property
    def mixes(self) -> bool:
        """Whether a warp adds rows in the format and rows of the dtype."""
        return self.decodes and (self.extra or self.own)

    @property
    def stored_bytes(self) -> int:
        """Bytes of a slice of a sum in the memory that it is stored in."""
        return self.wire.slice_bytes if self.wire is not None and self.pushes else self.slices.slice_bytes

    def nothing(self) -> SumJob:
        none: Any = Int64(0) if self.extra else Int32(0)
        return SumJob(none, none, Int32(self.slices.slices), Int32(0), Float32(1.0), Int64(0), Int32(0))

    @cute.jit
    def begin(self, lists: Any, state: AdderState, item: Int32, scouted: Any, peeked: Any) -> SumJob:
        held, row, weight, target, code = self.fetch(lists, scouted, peeked)
        piece = Int32(0)
        if held == 0:
            piece = Int32(self.slices.slices)
        return SumJob(held, held, piece, row, weight, target, code)

    @cute.jit
    def left(self, job: SumJob) -> Boolean:
        return job.left != 0 or job.piece < self.slices.slices - 1

    @cute.jit
    def load(self, lists: Any, state: AdderState, ring: Ring, stage: Int32, job: SumJob) -> SumJob:
        shape, notes = ring.shape, state.notes
        held, left, piece, row, weight, target, code = job
        if left == 0:
            piece += 1
            left = held
        k = lowest(left)
        mark = Int32(0)
        if left == held:
            mark = mark | FIRST
        left = left & (left - 1)
        if left == 0:
            mark = mark | LAST
            if piece == shape.pieces - 1:
                mark = mark | END
        number = arch.shuffle_sync(row, k & 31)
        base, number, more = self.found_at(state.rows, k, number, left)
        mark = mark | more
        if const_expr(self.extra):
            if k == 32:
                base, number = state.rows.extra, code
        source = Records(base, shape.row_bytes).at(number)
        if const_expr(self.mixes):
            offset, length = piece * shape.piece_bytes, Int32(shape.bytes_of(piece))
            if k == 32 or (self.own and k < OTHER_LANE):
                mark = mark | PLAIN
                source = Records(base, self.slices.row_bytes).at(number)
                offset = piece * self.slices.slice_bytes
                length = cutlass.min(self.slices.row_bytes - offset, self.slices.slice_bytes)
        note = state.warp * shape.stages + stage
        if const_expr(self.weighted):
            factor = arch.shuffle_sync(weight, k & 31)
            if const_expr(self.own and self.extra):
                if k == 32:
                    factor = Float32(1.0)
            if arch.lane_idx() == 0:
                (notes.weights + note).store(factor)
        if arch.lane_idx() == 0:
            (notes.marks + note).store(mark)
            (notes.codes + note).store(code)
            (notes.targets + note).store(target + piece * self.stored_bytes)
            if const_expr(self.mixes):
                ring.load(stage, source + offset, length)
            else:
                ring.load(stage, source + piece * shape.piece_bytes, shape.bytes_of(piece))
        return SumJob(held, left, piece, row, weight, target, code)

    def found_at(self, rows: RowBases, k: Int32, number: Int32, left: Any) -> tuple[Int64, Int32, Int32]:
        """Return from where lane `k`'s row is counted, its number from there, and what it adds to the mark of a stage.
        `left`: the lanes whose loads follow."""
        return rows.base, number, Int32(0)

    def close_part(self, mark: Int32, acc: Any) -> None:
        """By a whole warp, after it has added a stage: end a part of the sum if the stage's mark says so."""

    @cute.jit
    def use(self, state: AdderState, ring: Ring, stage: Int32, phase: Int32) -> None:
        slices, shape = self.slices, ring.shape
        notes, warp, acc, part, count, _, outbox = state
        lane = arch.lane_idx()
        note = warp * shape.stages + stage
        # Where to look is worked out before the wait, so that nothing is left to do when it ends.
        at, noted = ring.buffer + stage * shape.stride + lane * 16, notes.marks + note
        ring.wait_soon(stage, phase)
        mark = noted.load()
        if mark & FIRST != 0:
            for i in range_constexpr(slices.values):
                acc[i] = Float32(0.0)
        if const_expr(self.mixes):
            if mark & PLAIN != 0:
                self.add(at, mark, acc, part, notes.weights + note)
            else:
                self.add_encoded(ring.buffer + stage * shape.stride, mark, acc, part)
        elif const_expr(self.decodes):
            self.add_encoded(ring.buffer + stage * shape.stride, mark, acc, part)
        else:
            self.add(at, mark, acc, part, notes.weights + note)
        self.close_part(mark, acc)
        if const_expr(self.wire is not None and self.pushes):
            if mark & LAST != 0:
                store_slice(self.wire, acc, (notes.targets + note).load(), mark & END)
        elif mark & LAST != 0:
            to = (notes.targets + note).load() + lane * 16
            sums = ptx.pack([acc[i] for i in range(slices.values)], slices.dtype)
            behind = slices.end_of(mark & END != 0)
            for u in range_constexpr(slices.vectors):
                if u * 512 + lane * 16 < behind:
                    ptx.st_v4(to + u * 512, sums[4 * u : 4 * u + 4])
        if const_expr(outbox is not None):
            if mark & END != 0:
                post(outbox, warp, count[0], (notes.codes + note).load())
                count[0] += 1

    @cute.jit
    def add(self, at: Any, mark: Int32, acc: Any, part: Any, weight: Any) -> None:
        """Add a lane's numbers of the slice at `at` in a stage, times the factor at `weight` if rows are weighted."""
        slices = self.slices
        words = []
        for u in range_constexpr(slices.vectors):
            words.extend(ptx.ld_shared_v4(at + u * 512))
        values = ptx.unpack(words, slices.dtype)
        if const_expr(self.weighted):
            factor = weight.load()
            for i in range_constexpr(slices.values):
                acc[i] = ptx.add_rn(acc[i], ptx.mul_rn(values[i], factor))
        else:
            for i in range_constexpr(slices.values):
                acc[i] = ptx.add_rn(acc[i], values[i])

    @cute.jit
    def add_encoded(self, stage: Any, mark: Int32, acc: Any, part: Any) -> None:
        """Add a lane's numbers of a stage's slice in the format: codes times their scales."""
        wire: Any = self.wire
        n = wire.numbers
        for u in range_constexpr(self.slices.vectors):
            values = numbers_at(wire, stage, u)
            for i in range_constexpr(n):
                acc[n * u + i] = ptx.add_rn(acc[n * u + i], values[i])


@cute.jit
def round_sum(slices: cutlass.Constexpr[Slices], acc: Any) -> None:
    """Round a sum to the dtype of rows, as if it were stored and then added to nothing (-0 becomes 0)."""
    rounded = ptx.unpack(ptx.pack([acc[i] for i in range(slices.values)], slices.dtype), slices.dtype)
    for i in range_constexpr(slices.values):
        acc[i] = ptx.add_rn(rounded[i], Float32(0.0))


@cute.jit
def add_items(
    ring: Ring, notes: Notes, warp: Int32, adder: cutlass.Constexpr[RowAdder], items: Items, lists: Any, rows: RowBases,
    outbox: Outbox | None = None,
) -> None:  # fmt: skip
    """By one warp: all its items. Codes are posted to `outbox`, if there is one."""
    acc = cute.make_rmem_tensor((adder.slices.values,), Float32)
    part = cute.make_rmem_tensor((adder.part_numbers,), Float32)
    count = cute.make_rmem_tensor((1,), Int32)
    count[0] = Int32(0)
    run(adder, ring, items, lists, AdderState(notes, warp, acc, part, count, rows, outbox))
    if const_expr(outbox is not None):
        close(outbox, warp, count[0])
