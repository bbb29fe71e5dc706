"""Checks of the grouped GEMMs for few rows an expert: no ranks, both GEMMs of SwiGLU experts, the second one behind the
first."""

from __future__ import annotations

import random
from typing import Any

import torch
from segments import segments
from torch import Tensor

from ep_ops.formats import format_of, quantize

from . import machine
from .formats import put_bytes
from .memory import POISON
from .ranks import numbered
from .threads import Launch, run

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Experts:
    """Rows of experts that are drawn at random, and their weights. Rows hold NaN where none is kept, and weights of
    experts without rows as well."""

    def __init__(self, draw: random.Random, experts: int, hidden: int, width: int, dtype: str, most: int) -> None:
        self.draw, self.hidden, self.width, self.dtype = draw, hidden, width, dtype
        self.memory = machine.new_memory(1 << 22)
        self.alignment = draw.choice([1, 4])
        self.of = segments(draw, draw.choice([0, -(-most // 4) * 4]), experts, self.alignment, behind=2, most=most)
        self.x = self.of.poisoned(hidden, DTYPES[dtype], draw, 1.0)
        self.w_in, self.w_out = self.weights(hidden, 2 * width), self.weights(width, hidden)

    @property
    def ranks(self) -> Experts:
        """Where `put_bytes` looks for the memory."""
        return self

    def weights(self, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.getrandbits(31))
        made = torch.randn(len(self.of.counts), rows, columns, generator=generator) * rows**-0.5
        made[torch.tensor(self.of.counts) == 0] = torch.nan
        return made.to(DTYPES[self.dtype])

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        """fp64 [rows, N], NaN where no row is kept."""
        out = torch.full((self.of.rows, weights.shape[2]), torch.nan, dtype=torch.float64)
        for w, count, end in zip(weights, self.of.counts, self.of.offs, strict=True):
            begin = end - -(-count // self.alignment) * self.alignment
            out[begin : begin + count] = x[begin : begin + count].double() @ w.double()
        return out

    def run(self, tile: tuple[int, ...], transposed: bool) -> None:
        from cute_kernels.gemm.few_rows import FewRows, Tile

        experts, rows = len(self.of.counts), self.of.rows
        at = {
            name: self.memory.put(torch.tensor(values, dtype=torch.int32), name)
            for name, values in (("offs", self.of.offs), ("counts", self.of.counts))
        }
        x = put_bytes(self, self.x, "x")
        w_in, w_out = (
            put_bytes(self, (w.transpose(1, 2) if transposed else w).contiguous(), "weights")
            for w in (self.w_in, self.w_out)
        )
        h, y = (self.memory.take(max(2 * rows * n, 16), "out") for n in (self.width, self.hidden))
        first = FewRows(experts, self.hidden, self.width, self.dtype, Tile(*tile), True, transposed)
        second = FewRows(experts, self.width, self.hidden, self.dtype, Tile(*tile), False, transposed)
        named = self.draw.choice([1, 2, experts])
        run(
            [
                Launch(
                    kernel, numbered(FewRows.Args, **at, x=rows_at, weights=weights, out=out, alignment=self.alignment,
                                     blocks=named * kernel.shares),
                    after, uneven=40,
                )
                for kernel, rows_at, weights, out, after in ((first, x, w_in, h, None), (second, h, w_out, y, 0))
            ],
            self.draw,
        )  # fmt: skip
        got = self.memory.tensor(h, (rows, self.width), DTYPES[self.dtype])
        gate, up = self.product(self.x, self.w_in).chunk(2, 1)
        self.check(got, gate / (1 + (-gate).exp()) * up)
        self.check(self.memory.tensor(y, (rows, self.hidden), DTYPES[self.dtype]), self.product(got, self.w_out))

    def check(self, got: Tensor, want: Tensor) -> None:
        kept = self.of.kept
        eps = torch.finfo(got.dtype).eps
        error = (got[kept].double() - want[kept]).abs()
        assert (error <= eps * want[kept].abs() + 1e-3 * eps).all(), f"off by {error.max():.1e}"
        others = torch.ones(self.of.rows, dtype=torch.bool)
        others[kept] = False
        words = got[others].contiguous().view(torch.int16)
        assert (words == torch.tensor(POISON & 0xFFFF, dtype=torch.int32).short()).all(), "written where no row is"


class QuantizedExperts:
    """Rows and weights of e4m3. Rows that are not kept hold NaN, weights of experts without rows as well."""

    def __init__(self, draw: random.Random, experts: int, hidden: int, width: int, most: int) -> None:
        self.draw, self.hidden, self.width = draw, hidden, width
        self.memory = machine.new_memory(1 << 22)
        self.alignment = draw.choice([1, 4])
        self.of = segments(draw, draw.choice([0, -(-most // 4) * 4]), experts, self.alignment, behind=2, most=most)
        self.x = quantize(self.of.poisoned(hidden, torch.bfloat16, draw, 1.0), format_of("e4m3/128/fp32"))
        self.w_in, self.w_out = self.weights(2 * width, hidden), self.weights(hidden, width)

    @property
    def ranks(self) -> QuantizedExperts:
        """Where `put_bytes` looks for the memory."""
        return self

    def weights(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Codes [E, rows, columns] and scales."""
        experts = len(self.of.counts)
        generator = torch.Generator().manual_seed(self.draw.getrandbits(31))
        numbers = (torch.randn(experts, rows, columns, generator=generator) * 100).clamp(-448, 448)
        codes = numbers.to(torch.float8_e4m3fn)  # which makes NaN of larger numbers before PyTorch 2.13
        scales = (torch.rand(experts, rows // 128, columns // 128, generator=generator) + 0.5) * columns**-0.5 / 100
        scales[torch.tensor(self.of.counts) == 0] = torch.nan
        return codes, scales

    def product(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """fp64 [rows, N], NaN where no row is kept."""
        codes, scales = weights
        out = torch.full((self.of.rows, codes.shape[1]), torch.nan, dtype=torch.float64)
        for w, scale, count, end in zip(codes, scales, self.of.counts, self.of.offs, strict=True):
            begin = end - -(-count // self.alignment) * self.alignment
            exact = w.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            out[begin : begin + count] = x[begin : begin + count].double() @ exact.T
        return out

    def run(self, tiles: tuple[tuple[int, ...], tuple[int, ...]], arch: str) -> None:
        from cute_kernels.gemm.few_rows import Tile
        from cute_kernels.gemm.few_rows_e4m3 import FewRowsE4M3

        experts, rows = len(self.of.counts), self.of.rows
        at = {
            name: self.memory.put(torch.tensor(values, dtype=torch.int32), name)
            for name, values in (("offs", self.of.offs), ("counts", self.of.counts))
        }
        x, scales = (put_bytes(self, tensor, "x") for tensor in self.x)
        (w_in, in_scales), (w_out, out_scales) = (
            [put_bytes(self, tensor, "weights") for tensor in pair] for pair in (self.w_in, self.w_out)
        )
        h, h_scales, y = (
            self.memory.take(max(nbytes, 16), "out")
            for nbytes in (rows * self.width, rows * self.width // 32, 2 * rows * self.hidden)
        )
        first, second = (
            FewRowsE4M3(experts, depth // 2, columns, "bf16", Tile(*tile), gated, True).on(arch)
            for depth, columns, tile, gated in (
                (self.hidden, self.width, tiles[0], True), (self.width, self.hidden, tiles[1], False),
            )
        )  # fmt: skip
        named = self.draw.choice([1, experts])
        given = {**at, "alignment": self.alignment}
        of_first = dict(x=x, scales=scales, weights=w_in, weight_scales=in_scales, out=h, out_scales=h_scales)
        of_second = dict(x=h, scales=h_scales, weights=w_out, weight_scales=out_scales, out=y, out_scales=0)
        run(
            [
                Launch(
                    kernel, numbered(FewRowsE4M3.Args, **given, **own, blocks=named * kernel.shares), after, uneven=40
                )
                for kernel, own, after in ((first, of_first, None), (second, of_second, 0))
            ],
            self.draw,
        )
        self.check(
            self.memory.tensor(h, (rows, self.width), torch.float8_e4m3fn),
            self.memory.tensor(h_scales, (rows, self.width // 128), torch.float32),
            self.memory.tensor(y, (rows, self.hidden), torch.bfloat16),
        )

    def check(self, codes: Tensor, scales: Tensor, y: Tensor) -> None:
        """Codes and scales are those of the rounded numbers, but where rounding is close."""
        kept = self.of.kept
        exact = self.x[0].double() * self.x[1].double().repeat_interleave(128, 1)
        gate, up = self.product(exact, self.w_in).chunk(2, 1)
        want = (gate / (1 + (-gate).exp()) * up)[kept]
        inner = codes.double() * scales.double().repeat_interleave(128, 1)
        amax = want.view(len(kept), -1, 128).abs().amax(2)
        assert ((scales[kept].double() * 448 - amax).abs() <= amax / 200).all()
        error = (inner[kept] - want).abs()
        step = scales[kept].double().repeat_interleave(128, 1) * 2.0**-10  # half of the smallest
        assert (error <= torch.maximum(want.abs() / 16, step) + want.abs() / 128).all(), f"off by {error.max():.1e}"
        expected = self.product(inner, self.w_out)[kept]
        error = (y[kept].double() - expected).abs()
        assert (error <= expected.abs() / 256 + 1e-5).all(), f"off by {error.max():.1e}"
        others = torch.ones(self.of.rows, dtype=torch.bool)
        others[kept] = False
        for tensor in (codes, scales, y):
            poison = torch.tensor([POISON], dtype=torch.int32).view(torch.uint8)
            found = tensor[others].contiguous().view(torch.uint8).view(-1, 4)
            assert (found == poison).all(), "written where no row is"


def both(
    draw: random.Random, experts: int, hidden: int, width: int, tile: tuple[int, ...], most: int,
    transposed: bool | None = None,
) -> None:  # fmt: skip
    if transposed is None:
        transposed = draw.random() < 0.5
    Experts(draw, experts, hidden, width, draw.choice(["bf16", "fp16"]), most).run(tile, transposed)


CHECKS: dict[str, Any] = {
    # Tiles: columns, rows, stages, depth. K ends within a step of 16 and within a stage, or at the end of one.
    "few_rows": lambda draw: both(draw, 4, 72, 40, (64, 8, draw.choice([2, 3]), 32), 7),
    "few_rows_few_blocks": lambda draw: both(draw, 6, 96, 32, (64, 8, draw.choice([2, 3]), 32), 7),
    "few_rows_loop": lambda draw: both(draw, 2, 96, 64, (64, 8, draw.choice([2, 3]), 32), 20),
    "few_rows_many_experts": lambda draw: both(draw, 37, 40, 24, (64, 16, 2, 32), 2),
    "few_rows_wide": lambda draw: both(draw, 2, 72, 136, (128, 16, 3, draw.choice([32, 64])), 13),
    # Rows and weights of e4m3. K ends within a stage, or at the end of one; rows are walked in a loop, or not.
    "few_rows_e4m3": lambda draw: QuantizedExperts(draw, 3, 384, 128, 7).run(
        ((256, 8, 2, 128), (128, 8, draw.choice([2, 3]), draw.choice([64, 128]))), "sm_100a"
    ),
    "few_rows_e4m3_loop": lambda draw: QuantizedExperts(draw, 2, 128, 256, 20).run(
        ((256, 8, 2, 64), (128, 16, 2, 128)), "sm_100a"
    ),
    "few_rows_wgmma": lambda draw: QuantizedExperts(draw, 3, 384, 128, 7).run(
        ((256, 8, 2, 128), (128, 8, draw.choice([2, 3]), draw.choice([64, 128]))), "sm_90a"
    ),
    "few_rows_wgmma_loop": lambda draw: QuantizedExperts(draw, 2, 128, 256, 20).run(
        ((256, 8, 2, 64), (128, 16, 2, 128)), "sm_90a"
    ),
    # Several instructions for the rows of a tile.
    "few_rows_wgmma_wide": lambda draw: QuantizedExperts(draw, 1, 256, 128, 90).run(
        ((256, 96, 2, 64), (128, 96, 2, 128)), "sm_90a"
    ),
    "few_rows_widest": lambda draw: both(draw, 2, 72, 136, (256, 8, 2, 64), 5, draw.random() < 0.3),
}
