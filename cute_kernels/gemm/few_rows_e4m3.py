"""Grouped GEMM for few rows an expert of quantized numbers: rows e4m3 with a scale for each 128 numbers, weights e4m3
with a scale for each 128 x 128 block, as checkpoints have them. `FewRows`, with these differences:

- Weights lie as [El, N, K]. Sizes are multiples of 128.
- What `FewRows` counts as numbers of K (`depth`, the depth of a tile) are pairs of codes here: 16 bits.
- A number of the result is the sum over the blocks of 128 of K, in ascending order, of a block's products (of 32 at a
  time, in ascending order, from zero) times the product of both scales, in fp32.
- On sm_90a `wgmma` multiplies codes as they are (few_rows_wgmma.py). sm_100a has no `mma.sync` of codes:
  `mma.m16n8k32.e4m3` is compiled to a conversion of both operands to fp16 and two products of 16 from zero, of the
  first and of the last two codes of each word, whose sum is added. The kernel does this itself, with the same bits, so
  that it converts weights once for all rows instead of once for 8 rows.
- A stage consists of blocks of 128 of K, in which lines have 128 bytes, as descriptors of `wgmma` name them.
- The first GEMM rounds silu(gate) * up to `dtype`, quantizes it by 128 columns, which a block of threads computes as a
  whole, and stores codes and scales as the second GEMM takes them.
"""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..ids import warp_id
from ..quantize import largest, of_group, scale_of
from ..views import Floats, Ints, Records
from .few_rows import FewRows, Part, Tile, swizzled

BLOCK = 128
"""Numbers that share a scale: along a row, and in both directions of weights."""


class FewRowsE4M3Args(NamedTuple):
    """R rows, El experts, K numbers in a row, N columns of weights (2 F in the first GEMM)."""

    x: Int64  # [R, K]
    scales: Floats  # of x, [R, K / 128]
    weights: Int64  # [El, N, K]
    weight_scales: Floats  # [El, N / 128, K / 128]
    out: Int64  # codes [R, F], or rows [R, N]
    out_scales: Floats  # of codes, [R, F / 128]
    offs: Ints  # [El]
    counts: Ints  # [El]
    alignment: Int32
    blocks: Int32


def tile_of(gated: bool, rows: int) -> Tile:
    """Return the tile of a GEMM. In the first one a block has 128 columns of the result. Lines of weights in a stage
    have 256 bytes if there is enough shared memory. Two blocks of the second GEMM, which end soon, share it."""
    columns, most = (2 * BLOCK, 32) if gated else (BLOCK, 16)  # rows up to which there are three stages
    return Tile(columns, rows, 3 if rows <= most else 2, 128) if rows <= 64 else Tile(columns, rows, 4, 64)


@dataclass(frozen=True)
class FewRowsE4M3(FewRows):
    """Multiply the rows of each expert by its weights. `depth`: half of K; `dtype`: of the result of the second GEMM;
    `transposed`: True."""

    Args = FewRowsE4M3Args  # type: ignore[assignment]
    ALIGNMENT = 1024

    @property
    def name(self) -> str:
        """Name of the kernel in a profile."""
        return "ep_gate_up_e4m3" if self.gated else "ep_down_e4m3"

    def on(self, arch: str) -> "FewRowsE4M3":
        if arch != "sm_90a":
            return self
        # By name, because that file imports this one.
        return import_module(".few_rows_wgmma", __package__).FewRowsWgmma(**vars(self))

    @property
    def scales(self) -> int:
        """Scales of a row."""
        return self.depth * 2 // BLOCK

    @property
    def warps(self) -> int:
        return self.tile.columns // 32

    @cute.jit
    def add(self, args: Any, stage: Any, part: Part, step: Int32, acc: Any, given: Any) -> None:
        """By a warp: add the products of a stage to the sums."""
        lane, warp = arch.lane_idx(), warp_id()
        matrix, line = lane // 8, lane % 8
        x = stage + 2 * self.tile.half_bytes
        blocks = self.tile.depth * 2 // BLOCK  # of a stage
        for block in range_constexpr(blocks):
            # Behind the end of K numbers are zeros, and any scale will do.
            number = cutlass.min(step * blocks + block, self.scales - 1)
            of_weights, weights = [], []
            for half in range_constexpr(2):
                of_weights.append(self.weight_scale(args, part, half, warp, number))
            for k in range_constexpr(4):  # of 32 numbers
                for half in range_constexpr(2):
                    to = self.place(
                        warp * 16 + matrix % 2 * 8 + line, block * 8 + k * 2 + matrix // 2, self.pitch, self.tile.half
                    )
                    weights.append(ptx.as_fp16(ptx.ldmatrix(stage + half * self.tile.half_bytes + to, False)))
            for group in range_constexpr(self.groups):
                if group * 8 < part.rows:
                    numbers = []  # of 32 numbers each
                    for first in range_constexpr(0, 8, 4):
                        at = self.place(group * 8 + line, block * 8 + first + matrix, self.tile.chunks, self.tile.rows)
                        words = ptx.ldmatrix(x + at, False)
                        numbers += [ptx.as_fp16(words[2 * k : 2 * k + 2]) for k in range(2)]
                    of_rows = []
                    for i in range_constexpr(2):
                        row = cutlass.min(group * 8 + lane % 4 * 2 + i, part.rows - 1)
                        of_rows.append(args.scales[Int64(part.begin + row) * self.scales + number])
                    for half in range_constexpr(2):
                        sums: tuple[Float32, ...] = ()
                        for k in range_constexpr(4):
                            products: tuple[Float32, ...] = (Float32(0.0),) * 4
                            for pair in range_constexpr(2):
                                products = ptx.mma(products, weights[2 * k + half][pair], numbers[k][pair], "fp16")
                            if const_expr(k == 0):  # adding to zero changes only the sign of zeros, which acc loses
                                sums = products
                            else:
                                sums = tuple(ptx.add_rn(sums[i], products[i]) for i in range(4))
                        for i in range_constexpr(4):
                            scale = ptx.mul_rn(of_weights[half], of_rows[i % 2])
                            to = (half * self.groups + group) * 4 + i
                            acc[to] = ptx.add_rn(acc[to], ptx.mul_rn(sums[i], scale))

    def place(self, line: Any, chunk: Any, pitch: int, lines: int) -> Any:
        """Return the offset of a chunk in a tile that consists of blocks of 128 of K."""
        return chunk // 8 * (lines * BLOCK) + swizzled(line, chunk % 8, 8)

    @cute.jit
    def weight_scale(self, args: Any, part: Part, half: cutlass.Constexpr[int], warp: Int32, number: Int32) -> Float32:
        """Return the scale of the weights of a warp in the `number`-th block of K."""
        column = part.column + half * (self.width if self.gated else self.tile.half) + warp * 16
        block = Int64(part.expert) * (self.all_columns // BLOCK) + column // BLOCK
        return args.weight_scales[block * self.scales + number]

    @cute.jit
    def store(self, args: Any, ring: Any, part: Part, acc: Any) -> None:
        """By a warp: store the sums, or codes and scales."""
        if const_expr(self.gated):
            self.store_codes(args, ring, part, acc)
        else:
            self.store_rows(args, part, acc)

    @cute.jit
    def store_codes(self, args: Any, ring: Any, part: Part, acc: Any) -> None:
        """By a warp: quantize 16 columns. The largest magnitudes of all warps are exchanged in shared memory."""
        lane, warp = arch.lane_idx(), warp_id()
        words = cute.make_rmem_tensor((2 * self.groups,), Uint32)
        arch.sync_threads()  # nobody reads the ring any more
        for group in range_constexpr(self.groups):
            if group * 8 < part.rows:
                packed = ptx.pack(self.gated_values(acc, group), self.dtype)
                for i in range_constexpr(2):
                    words[2 * group + i] = ptx.movmatrix(packed[i])
                most = of_group(largest([words[2 * group + i] for i in range(2)], self.dtype), 4)
                if lane % 4 == 0:
                    ptx.st_shared(ring + ((group * 8 + lane // 4) * self.warps + warp) * 4, most)
        arch.sync_threads()  # the largest magnitudes of all warps are there
        for group in range_constexpr(self.groups):
            if group * 8 < part.rows:
                row = group * 8 + lane // 4
                most = Int32(0)
                for first in range_constexpr(0, self.warps, 4):
                    found = ptx.ld_shared_v4(ring + (row * self.warps + first) * 4)
                    for i in range_constexpr(4):
                        most = cutlass.max(most, Int32(found[i]))
                stored, inverse = scale_of("fp32", most)
                values = ptx.unpack([words[2 * group], words[2 * group + 1]], self.dtype)
                # Lanes 2 i and 2 i + 1 have 4 neighboring columns of each half of 16: each stores those of one half.
                codes = Int32(ptx.encode(values, inverse))
                other = arch.shuffle_sync_bfly(codes, 1)
                word = (codes & 0xFFFF) | (other << 16)
                if lane % 2 == 1:
                    word = ((other >> 16) & 0xFFFF) | (codes & Int32(-65536))
                column = part.column + warp * 16 + lane % 2 * 8 + lane % 4 // 2 * 4
                to = Ints(Records(args.out, 1, self.width).part(part.begin + row).at(column))
                if row < part.rows:
                    to[0] = word
                    if warp == 0 and lane % 4 == 0:
                        at = Int64(part.begin + row) * (self.width // BLOCK) + part.column // BLOCK
                        args.out_scales.bits[at] = stored
