"""SwiGLU of the rows of a route: an expert's kept rows are worked out, its padding becomes zeros, and no other row is
read or written.

A row of x is F gates and behind them as many ups; what is made of it is silu(gate) times up, F numbers. All is done in
fp32 and rounded once; a result that is quantized is so as it would be behind this, from numbers of x's dtype.

A slice of a row is what the lanes of a warp hold at once. The slices of all rows that segments have are dealt out to
the warps of the grid, whatever the number of rows that there is room for; where a row lies each warp finds out by
itself.
"""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..delivery import Arrived, Delivery
from ..ids import block_id, warp_id
from ..quantize import encode, largest, numbers_of, of_group, scale_of, store_codes
from ..segments import inclusive_sum, padded
from ..views import Floats, Ints, Records
from .row_slices import WARPS, RowSlices


class SwiGLUArgs(NamedTuple):
    """R rows, F numbers, El local experts."""

    x: Int64  # [R, 2 F]
    grad: Int64  # backward: that of the result, [R, F]
    weights: Floats  # weighted: [R]
    out: Int64  # [R, F]; backward: the gradient of x, [R, 2 F]
    scales: Int64  # of a quantized result
    made: Int64  # weighted: the result, [R, F]
    dots: Floats  # weighted: gradients of the weights, [R]
    offs: Ints  # [El]
    counts: Ints  # [El]
    num_rows: Int32  # R
    slots: Int32  # rows of each expert; 0: segments follow each other
    experts: Int32  # El
    alignment: Int32
    blocks: Int32


@dataclass(frozen=True)
class SwiGLURows(RowSlices):
    """`hidden_size` is F. With a `format`, rows leave as codes and scales in `layout`. `weighted`: backward of the
    result times a weight for each row, which also returns the weighted result and the gradients of the weights."""

    backward: bool = False
    format: str = ""
    layout: str = ""
    weighted: bool = False

    NAME: ClassVar[str] = "ep_swiglu"
    Args: ClassVar[Any] = SwiGLUArgs

    @property
    def delivery(self) -> Delivery:
        return Delivery(self.width, self.format, self.layout)

    @property
    def shares(self) -> int:
        """Number of warps that take part in a row. The dot product of a row is summed by one warp."""
        return 1 if self.weighted else self.slices.slices

    @property
    def most_vectors(self) -> int:
        """Backward has three operands, of which registers hold fewer."""
        return 2 if self.backward else 4

    @cute.kernel
    def kernel(self, args: SwiGLUArgs) -> None:
        bid = block_id()
        lane = arch.lane_idx()
        item = bid * WARPS + warp_id()
        before = Int32(0)
        # 32 experts at a time, one a lane; rows of segments are counted on through all of them.
        for first in cutlass.range(0, args.experts, 32):
            count, size, begin = Int32(0), Int32(0), Int32(0)
            if first + lane < args.experts:
                count = args.counts[first + lane]
                size = padded(count, args.alignment)
                begin = args.offs[first + lane] - size
            end = before + inclusive_sum(size)
            last = arch.shuffle_sync(end, 31)
            while item // self.shares < last:
                number = item // self.shares
                expert = Int32(arch.popc(arch.vote_ballot_sync(end <= number)))
                offset = number - arch.shuffle_sync(end - size, expert)
                row = arch.shuffle_sync(begin, expert) + offset
                kept = offset < arch.shuffle_sync(count, expert)
                if const_expr(self.weighted):
                    self.give_back_weighted(args, row, kept)
                else:
                    self.one_slice(args, row, kept, item - number * self.slices.slices)
                item += args.blocks * WARPS
            before = last

    @cute.jit
    def one_slice(self, args: SwiGLUArgs, row: Int32, kept: Boolean, number: Int32) -> None:
        """By a warp."""
        first = number * (32 * self.slices.vectors) + arch.lane_idx()
        if const_expr(self.backward):
            self.give_back(args, row, kept, first, Float32(1.0))
        elif const_expr(self.format == ""):
            self.store(Records(args.out, self.width.row_bytes).at(row), first, self.made(args, row, kept, first))
        else:
            to = Arrived(args.out, Floats(Int64(0)), args.scales, args.num_rows, args.slots)
            if kept:
                self.quantize(to, row, first, self.made(args, row, kept, first))
            elif number == 0:
                self.delivery.zero(to, row, row + 1, arch.lane_idx(), False)

    @cute.jit
    def operands(self, args: SwiGLUArgs, row: Int32, kept: Boolean, first: Int32) -> Any:
        """Return a lane's gates, ups and, in backward, gradients; zeros in padding, whose contents are undefined."""
        each = 4 * self.slices.vectors
        words = cute.make_rmem_tensor(((3 if self.backward else 2) * each,), Uint32)
        for i in range_constexpr((3 if self.backward else 2) * each):
            words[i] = Uint32(0)
        if kept:
            x = Records(args.x, 2 * self.width.row_bytes).at(row)
            self.load(x, first, words, 0)
            self.load(x + self.width.row_bytes, first, words, each)
            if const_expr(self.backward):
                self.load(Records(args.grad, self.width.row_bytes).at(row), first, words, 2 * each)
        return words

    @cute.jit
    def made(self, args: SwiGLUArgs, row: Int32, kept: Boolean, first: Int32) -> Any:
        """Return silu(gate) * up in x's dtype."""
        words = self.operands(args, row, kept, first)
        made = cute.make_rmem_tensor((4 * self.slices.vectors,), Uint32)
        for u in range_constexpr(self.slices.vectors):
            gates, ups = self.numbers(words, u), self.numbers(words, self.slices.vectors + u)
            values = [gate * ptx.sigmoid(gate) * up for gate, up in zip(gates, ups, strict=True)]
            packed = ptx.pack(values, self.dtype)
            for i in range_constexpr(4):
                made[4 * u + i] = packed[i]
        return made

    @cute.jit
    def give_back_weighted(self, args: SwiGLUArgs, row: Int32, kept: Boolean) -> None:
        """By a warp, for a whole row with weight w: store the gradients of gates and ups, times w; w silu(gate) up; and
        the dot product of grad and silu(gate) up, whose order is fixed."""
        lane = arch.lane_idx()
        weight = Float32(0.0)
        if kept:
            weight = args.weights[row]
        dot = Float32(0.0)
        for number in cutlass.range(self.slices.slices):
            dot += self.give_back(args, row, kept, number * (32 * self.slices.vectors) + lane, weight)
        for i in range_constexpr(5):
            dot += arch.shuffle_sync_bfly(dot, 16 >> i)
        if lane == 0:
            args.dots[row] = dot

    @cute.jit
    def give_back(self, args: SwiGLUArgs, row: Int32, kept: Boolean, first: Int32, weight: Float32) -> Float32:
        """Store a lane's gradients of a slice, with s = sigmoid(gate): gate' = grad up s (1 + gate (1 - s)),
        up' = grad gate s. If `weighted`, store the weighted result as well, and return a lane's part of the dot
        product."""
        words = self.operands(args, row, kept, first)
        of_gates, of_ups, made = (cute.make_rmem_tensor((4 * self.slices.vectors,), Uint32) for _ in range(3))
        dot = Float32(0.0)
        for u in range_constexpr(self.slices.vectors):
            gates, ups = self.numbers(words, u), self.numbers(words, self.slices.vectors + u)
            grads = self.numbers(words, 2 * self.slices.vectors + u)
            shares = [ptx.sigmoid(gate) for gate in gates]
            if const_expr(self.weighted):
                values = [gate * s * up for gate, up, s in zip(gates, ups, shares, strict=True)]
                part = Float32(0.0)
                for grad, value in zip(grads, values, strict=True):
                    part = part + grad * value
                if first + u * 32 < self.vectors:  # lanes behind the end of the row hold its last vector again
                    dot += part
                grads = [grad * weight for grad in grads]
                packed = ptx.pack([value * weight for value in values], self.dtype)
                for i in range_constexpr(4):
                    made[4 * u + i] = packed[i]
            by_gate = [
                grad * up * s * (Float32(1.0) + gate * (Float32(1.0) - s))
                for gate, up, grad, s in zip(gates, ups, grads, shares, strict=True)
            ]
            by_up = [grad * (gate * s) for gate, grad, s in zip(gates, grads, shares, strict=True)]
            packed_gates, packed_ups = ptx.pack(by_gate, self.dtype), ptx.pack(by_up, self.dtype)
            for i in range_constexpr(4):
                of_gates[4 * u + i] = packed_gates[i]
                of_ups[4 * u + i] = packed_ups[i]
        out = Records(args.out, 2 * self.width.row_bytes).at(row)
        self.store(out, first, of_gates)
        self.store(out + self.width.row_bytes, first, of_ups)
        if const_expr(self.weighted):
            self.store(Records(args.made, self.width.row_bytes).at(row), first, made)
        return dot

    def numbers(self, words: Any, vector: int) -> Sequence[Float32]:
        return ptx.unpack([words[4 * vector + i] for i in range(4)], self.dtype)

    @cute.jit
    def quantize(self, to: Arrived, row: Int32, first: Int32, words: Any) -> None:
        delivery, form, dtype = self.delivery, self.delivery.form, self.dtype
        lanes = form.block // numbers_of(dtype)  # that hold a block
        codes_at, scales_at = Records(to.rows, self.hidden_size).at(row), delivery.scales_at(to, row)
        for u in range_constexpr(self.slices.vectors):
            vector = first + u * 32
            mine = [words[4 * u + i] for i in range(4)]
            stored, inverse = scale_of(form.kind, of_group(largest(mine, dtype), lanes))
            codes = encode(ptx.unpack(mine, dtype), inverse)
            if vector < self.vectors:
                store_codes(codes_at, vector, codes)
                if vector % lanes == 0:
                    delivery.store_scale(scales_at, vector // lanes, stored)
                if const_expr(self.layout == "packed" and form.scales % 4 != 0):
                    if vector == self.vectors - 1:
                        for column in range_constexpr(form.scales, (form.scales + 3) // 4 * 4):
                            delivery.store_scale(scales_at, Int32(column), Int32(0))
