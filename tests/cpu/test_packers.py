"""Swizzled scales against the packers of their readers: torch's; torchao's and quack's where they are installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import cases
import pytest
import torch
from torch import Tensor

from ep_ops import formats
from ep_ops.formats import Grid, ScaleLayout, Segments

FORM = formats.format_of("e4m3/32/mx")
Packer = Callable[[Tensor, list[int]], Tensor]


def torchs() -> Packer:
    """Return the scales of each group, packed by the functions that torch's tests of ``scaled_grouped_mm`` use."""
    from torch.testing._internal.common_quantized import to_blocked

    return lambda scales, sizes: torch.cat([to_blocked(part) for part in scales.split(sizes) if len(part)])


def torchaos() -> Packer:
    name = "torchao.prototype.moe_training.kernels.mxfp8.quant"
    quant = pytest.importorskip(name, reason="needs torchao, whose packer this is")

    def packed(scales: Tensor, sizes: list[int]) -> Tensor:
        ends = torch.tensor(sizes).cumsum(0).int()
        return quant.torch_to_blocked_2d_M_groups(scales, ends)[0].flatten()

    return packed


def quacks() -> Packer:
    """Each group at the tile that its kernel looks for it at."""
    quantize = pytest.importorskip("quack.blockscaled.quantize", reason="needs quack-kernels, whose packer this is")

    def packed(scales: Tensor, sizes: list[int]) -> Tensor:
        rows = scales.new_zeros(128 * (-(-len(scales) // 128) + len(sizes) - 1), scales.shape[1])
        for group, (first, part) in enumerate(
            zip(itertools.accumulate([0, *sizes]), scales.split(sizes), strict=False)
        ):
            begin = 128 * (first // 128 + group)
            rows[begin : begin + len(part)] = part
        return quantize.pack_scale_2d_to_blocked_contig(rows).flatten()

    return packed


def ours(scales: Tensor, sizes: list[int], layout: str, slots: int = 0) -> Tensor:
    ends, counts = torch.tensor(sizes).cumsum(0).int(), torch.tensor(sizes, dtype=torch.int32)
    if slots:
        ends = torch.arange(len(sizes), dtype=torch.int32) * slots + counts
    grid = Grid(len(scales), slots, len(sizes), 32 * scales.shape[1])
    made = ScaleLayout(FORM, layout, grid, Segments(ends, counts, 1))
    return made.pack(scales.view(torch.float8_e8m0fnu), True, 0.0).view(torch.uint8).flatten()


@pytest.mark.parametrize(("consumer", "packer"), [("torch", torchs), ("torch", torchaos), ("quack", quacks)])
def test_groups(consumer: str, packer: Callable[[], Packer]) -> None:
    """Groups of a row, of none, and of more than a tile, with rows of whole and of unfinished words."""
    pack, draw = packer(), torch.Generator().manual_seed(cases.fresh_seed())
    for sizes, count in (([1, 0, 130, 128, 31], 8), ([128, 256, 0], 4), ([0, 300, 5], 4 if packer is torchaos else 6)):
        scales = torch.randint(1, 255, (sum(sizes), count), generator=draw, dtype=torch.uint8)
        expected, got = pack(scales, sizes), ours(scales, sizes, f"swizzled/{consumer}")
        shorter = min(len(expected), len(got))  # both have room for more tiles than these groups have
        assert torch.equal(got[:shorter], expected[:shorter])
        assert not expected[shorter:].any() and not got[shorter:].any()


def test_padded_layout() -> None:
    """Each expert's rows by themselves."""
    pack, draw = torchs(), torch.Generator().manual_seed(cases.fresh_seed())
    sizes, slots = [3, 0, 200], 200
    scales = torch.randint(1, 255, (3 * slots, 5), generator=draw, dtype=torch.uint8)
    for rows, size in zip(scales.split(slots), sizes, strict=True):
        rows[size:] = 0
    expected = pack(scales, [slots] * 3)
    for consumer in ("torch", "quack", "flashinfer"):
        assert torch.equal(ours(scales, sizes, f"swizzled/{consumer}", slots), expected)
