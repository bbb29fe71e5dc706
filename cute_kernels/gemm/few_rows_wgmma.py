"""Grouped GEMM for few rows an expert of quantized numbers on sm_90a: `FewRowsE4M3` with products of codes by `wgmma`.

Weights are the wide operand (64 columns for four warps), rows the narrow one. The tensor cores read both from the ring
of stages. The products of a block of 128 of K are added from zero, 32 at a time, then multiplied by both scales and
added to the sums in fp32. While a warp does this, the tensor cores compute the products of the next part of the stage.
A stage is not filled again before all products that read it are complete.

The tensor cores add the products of 32 codes and the sum so far with about 14 bits of the largest of them. Each column
of the narrow operand is computed on its own, so other rows do not change the bits of a row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from .. import ptx
from ..ids import warp_id
from .few_rows import Part
from .few_rows_e4m3 import BLOCK, FewRowsE4M3

SWIZZLED = 1 << 62 | 8 * BLOCK // 16 << 32 | 1 << 16
"""A descriptor without its address: chunks of 16 bytes are swizzled within lines of 128, and groups of 8 lines are 1024
bytes apart."""


def described(address: Int32) -> Int64:
    """Return the descriptor of lines of 128 bytes at an address in shared memory, a multiple of 1024."""
    return Int64((address & 0x3FFFF) >> 4) | SWIZZLED


class Scales(NamedTuple):
    """Scales of a block of K that a lane multiplies by."""

    weights: list[Float32]  # for each half of the columns
    rows: list[Float32]  # two for each group of 8


@dataclass(frozen=True)
class FewRowsWgmma(FewRowsE4M3):
    """`FewRowsE4M3` for sm_90a."""

    @property
    def blocks(self) -> int:
        """Blocks of K in a stage."""
        return self.tile.depth * 2 // BLOCK

    def wait_for_copies(self, args: Any, part: Part, step: Any, most: int) -> list[Scales]:
        """Return the scales of each block of the stage, which come while the thread waits."""
        lane, found = arch.lane_idx(), []
        for block in range(self.blocks):
            number = cutlass.min(step * self.blocks + block, self.scales - 1)
            of_rows = []
            for i in range(2 * self.groups):
                row = cutlass.min(i // 2 * 8 + lane % 4 * 2 + i % 2, part.rows - 1)
                of_rows.append(args.scales[Int64(part.begin + row) * self.scales + number])
            of_weights = [self.weight_scale(args, part, half, warp_id(), number) for half in range(2)]
            found.append(Scales(of_weights, of_rows))
        ptx.cp_async_wait(most)
        ptx.fence_async_shared()
        return found

    def add(self, args: Any, stage: Any, part: Part, step: Int32, acc: Any, given: Any) -> None:
        """By four warps: add the products of a stage to the sums."""
        tile = self.tile
        rows = tile.rows if tile.rows <= 64 else 32  # of an instruction, which leaves registers for two of them
        at = ptx.shared_address(stage)
        weights, x = described(at + warp_id() // 4 * (64 * BLOCK)), described(at + 2 * tile.half_bytes)
        orders = [
            (block, half, first)
            for block in range(self.blocks)
            for half in range(2)
            for first in range(0, tile.rows, rows)
        ]

        def start(block: int, half: int, first: int) -> Any:
            of_weights = weights + (half * tile.half_bytes + block * tile.half * BLOCK) // 16
            return ptx.wgmma_e4m3(of_weights, x + (block * tile.rows + first) * BLOCK // 16, rows)

        products = [start(*orders[0])]
        for i, (block, half, first) in enumerate(orders):
            if i + 1 < len(orders):
                products.append(start(*orders[i + 1]))  # which the tensor cores compute meanwhile
            sums = ptx.wgmma_wait(len(products) - 1, products.pop(0))
            of_weights, of_rows = given[block]
            for group in range(rows // 8):
                to = (half * self.groups + first // 8 + group) * 4
                for k in range(4):
                    scale = ptx.mul_rn(of_weights[half], of_rows[first // 4 + 2 * group + k % 2])
                    acc[to + k] = ptx.fma_rn(sums[4 * group + k], scale, acc[to + k])
