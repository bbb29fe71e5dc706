"""Numbers to codes and scales, and scales in every layout, against plain loops and others' formulas."""

from __future__ import annotations

from pathlib import Path

import cases
import pytest
import quantized
import torch
from scales import in_rows
from torch import Tensor

import ep_ops
from ep_ops.formats import FORMATS, LAYOUTS, Format, Grid, ScaleLayout, Segments, dequantize, quantize, view
from ep_ops.formats.quantize import to_e4m3

NAMES = tuple(quantized.BLOCKS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def form(name: str) -> Format:
    return FORMATS[f"e4m3/{name}"]


def awkward(dtype: torch.dtype, seed: int, rows: int = 24, hidden: int = 256) -> Tensor:
    """Numbers of every size, in blocks of every size; whole blocks of zeros, an Inf and a NaN here and there."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, hidden // 32, 1, generator=draw).mul(12 if dtype != torch.float16 else 3).exp2()
    numbers = torch.randn(rows, hidden // 32, 32, generator=draw) * spread
    numbers *= torch.randn(rows, hidden // 32, 32, generator=draw).mul(3).exp2()
    x = numbers.view(rows, hidden).to(dtype)
    x[1] = 0
    x[2, ::2] = -0.0
    x[3, :128] = 0
    x[4, 5], x[5, 200], x[6, 130] = torch.inf, -torch.inf, torch.nan
    x[7, :32] = torch.finfo(dtype).max
    x[8, 64:96] = torch.finfo(dtype).smallest_normal
    x[9, :32] = 448 * 2.0**-127 if dtype != torch.float16 else 1e-4
    x[10, :32] = 449 * 2.0**-127 if dtype != torch.float16 else 2e-4
    x[11, :64] = 1e-4
    return x


def bits(scales: Tensor) -> Tensor:
    """Scales as float64 [T, G], byte 0 being 2**-127 and 255 Inf."""
    if scales.dtype == torch.float8_e8m0fnu:
        byte = scales.view(torch.uint8).double()
        return torch.where(byte == 255, torch.inf, 2.0 ** (byte - 127))
    return scales.double().view(scales.shape[0], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_against_loops(name: str, dtype: torch.dtype) -> None:
    x = awkward(dtype, cases.fresh_seed())
    codes, scales = quantize(x, form(name))
    expected_codes, expected_scales = quantized.quantized(x, name)
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == form(name).scale_dtype
    assert scales.shape == ((x.shape[0],) if name == "row/fp32" else expected_scales.shape)
    assert torch.equal(bits(scales), expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes)
    for wanted in DTYPES:
        back = dequantize(codes, scales, form(name), wanted)
        expected = quantized.dequantized(expected_codes, expected_scales, wanted)
        torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


def test_every_code_and_what_lies_between() -> None:
    """All fp16 numbers, which hold every e4m3 number, every middle of two, and much more on both sides."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    finite = every[every.isfinite()]
    got = to_e4m3(finite).view(torch.uint8)
    assert got.tolist() == [quantized.encoded(number) for number in finite.tolist()]
    numbers = torch.tensor([quantized.decoded(code) for code in range(256)])
    own = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(own, numbers, rtol=0, atol=0, equal_nan=True)
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e38, torch.inf, torch.nan])
    assert to_e4m3(torch.cat([beyond, -beyond[:5]])).view(torch.uint8).tolist() == [0x7E] * 5 + [0x7F] + [0xFE] * 5


@pytest.mark.parametrize("name", ["128/pow2", "32/mx"])
def test_powers_do_not_depend_on_how_a_quotient_is_rounded(name: str) -> None:
    """amax / 448 and amax times 1 / 448, rounded to fp32 and then up to a power of two, and the exact quotient rounded
    up: for mantissas around that of 448, where it matters, and others."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    mantissas = torch.cat([
        torch.arange(0x600000 - 2**13, 0x600000 + 2**13), torch.arange(2**12), torch.arange(2**23 - 2**12, 2**23),
        torch.randint(0, 2**23, (2**14,), generator=draw),
    ])  # fmt: skip
    for exponent in (120, 127, 200):
        amax = (mantissas + (exponent << 23)).int().view(torch.float32)
        x = torch.zeros(amax.numel(), form(name).block)
        x[:, 0] = -amax
        _, scales = quantize(x, form(name))
        exact = torch.where(amax.double() > 448 * 2.0 ** (exponent - 135), 2.0, 1.0) * 2.0 ** (exponent - 135)
        assert torch.equal(bits(scales)[:, 0], exact)
        for rounded in (amax / torch.full((), 448.0), amax * torch.tensor(1 / 448)):
            mantissa, power = torch.frexp(rounded)
            assert torch.equal((power - (mantissa == 0.5).int()).double().exp2(), exact)


def test_as_deepgemm_casts_tokens() -> None:
    """Scales follow DeepGEMM's formula: amax of 128, at least 1e-4, over 448; rounded up to a power of two by
    logarithms; x times 1 / s."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(cases.fresh_seed())).mul(3).exp2().bfloat16()
    blocks = x.view(64, -1, 128)
    amax = blocks.abs().float().amax(2).clamp(min=1e-4)
    for name, scales in (
        ("128/fp32", amax / torch.full((), 448.0)),
        ("128/pow2", torch.pow(2.0, (amax / torch.full((), 448.0)).log2().ceil())),
    ):
        codes = (blocks * (torch.ones(()) / scales)[..., None]).to(torch.float8_e4m3fn).view(64, 512)
        got, got_scales = quantize(x, form(name))
        assert torch.equal(got_scales, scales)
        assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))


def test_as_rceil_of_mx() -> None:
    """Scales follow the RCEIL formula of MX: the exponent of amax / 448, rounded up; x over the scale, clamped."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(cases.fresh_seed())).mul(9).exp2().bfloat16()
    blocks = x.float().view(64, -1, 32)
    exponent = (blocks.abs().amax(2) / 448).log2().ceil().clamp(min=-127)
    codes = (blocks / exponent.exp2()[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(64, 512)
    got, got_scales = quantize(x, form("32/mx"))
    assert torch.equal(got_scales.view(torch.uint8).int(), exponent.int() + 127)
    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_do_not_divide_are_rejected(name: str) -> None:
    multiple = form(name).multiple
    with pytest.raises(ValueError, match=rf"hidden_size is {multiple + 8}; format 'e4m3/{name}' takes multiples of"):
        quantize(torch.zeros(2, multiple + 8), form(name))


# ---------------------------------------------------------------------- layouts

SIZES = {
    # name: kept rows of each expert, alignment, slots
    "some": ([5, 0, 17, 4], 4, 0),
    "tiles": ([129, 128, 0, 300, 1, 127], 1, 0),
    "whole tiles": ([200, 0, 128, 7], 128, 0),
    "one": ([3], 16, 0),
    "none": ([0, 0, 0], 16, 0),
    "no experts": ([], 16, 0),
    "padded": ([5, 0, 8], 4, 12),
    "padded tiles": ([140, 0, 257], 1, 258),
    "padded odd": ([3, 1], 1, 5),
}
HIDDEN = {"128/pow2": (128, 640), "128/fp32": (384,), "32/mx": (32, 160, 256), "row/fp32": (16,)}
PACKED = [
    (name, hidden, layout) for name in NAMES for hidden in HIDDEN[name] for layout in form(name).layouts
    if layout != "rows"
]  # fmt: skip


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_layouts(sizes: str, zeros: bool) -> None:
    """Every layout equals, to the last byte, the same rows reshaped and transposed, and can be read back."""
    counts, alignment, slots = SIZES[sizes]
    padded = [quantized.up(count, alignment) for count in counts]
    begins = [slots * i if slots else sum(padded[:i]) for i in range(len(counts))]
    rows = len(counts) * slots if slots else sum(padded) + 3 * alignment
    ends = torch.tensor([b + n for b, n in zip(begins, padded, strict=True)], dtype=torch.int32)
    segments = Segments(ends, torch.tensor(counts, dtype=torch.int32), alignment)
    kept, covered = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    expert = torch.full((rows,), -1, dtype=torch.int32)
    for e, (begin, count, size) in enumerate(zip(begins, counts, padded, strict=True)):
        kept[begin : begin + count] = covered[begin : begin + size] = True
        expert[begin : begin + count] = e
    assert torch.equal(segments.m_indices(rows), expert)
    assert segments.psum.tolist() == [b + n for b, n in zip(begins, counts, strict=True)]

    draw = torch.Generator().manual_seed(cases.fresh_seed())
    for name, hidden, layout in PACKED:
        grid = Grid(rows, slots, len(counts), hidden)
        made = ScaleLayout(form(name), layout, grid, segments)
        count = hidden // quantized.BLOCKS[name]
        values = torch.randint(-126, 128, (rows, count), generator=draw).double().exp2()
        values[torch.rand(rows, count, generator=draw) < 0.1] = torch.inf
        if name == "128/fp32":
            values = torch.rand(rows, count, generator=draw).double()
        values[covered & ~kept] = 0
        given = values.float()
        if name == "32/mx":
            byte = torch.where(values.isinf(), 255, values.log2().clamp(min=-127) + 127)
            given = byte.to(torch.uint8).view(torch.float8_e8m0fnu)
        for fill in (torch.nan, 0.0):
            got = made.pack(given, zeros, fill)
            expected = quantized.laid(values, covered if zeros else kept, layout, padded, slots, zeros, fill)
            assert got.shape == expected.shape and got.is_contiguous()
            assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8)), (name, hidden, layout)
        back = in_rows(made, got)
        assert torch.equal(back[kept].double(), values[kept])
        if layout in ("columns", "packed"):
            seen = view(got, layout, grid)
            per = count if layout == "columns" else -(-count // 4)
            rounded = quantized.up(slots or rows, 4)
            assert seen.shape == ((len(counts), slots, per) if slots else (rows, per))
            assert seen.stride() == ((per * rounded, 1, rounded) if slots else (1, rounded))
            if layout == "columns":
                assert torch.equal(seen.reshape(rows, per)[kept], given[kept])


def test_bases_differ_between_consumers() -> None:
    """Consumers have different bases even where groups are whole tiles, with the sizes of docs/formats.md."""
    ends = torch.tensor([128, 384, 384], dtype=torch.int32)
    counts = torch.tensor([128, 256, 0], dtype=torch.int32)
    first = {
        consumer: ScaleLayout(
            form("32/mx"), f"swizzled/{consumer}", Grid(384, 0, 3, 128), Segments(ends, counts, 128)
        ).bases().tolist()
        for consumer in ("torch", "quack", "flashinfer")
    }  # fmt: skip
    assert first == {"torch": [0, 1, 3], "quack": [0, 2, 5], "flashinfer": [0, 1, 4]}


def test_the_documentation_has_them_all() -> None:
    text = (Path(ep_ops.__file__).parent.parent / "docs" / "formats.md").read_text()
    assert all(f"| `{form.name}` |" in text for form in FORMATS.values() if not form.wire)
    assert all(f"| `{layout}` |" in text for layout in LAYOUTS if "/" in layout)
    headed = {word for line in text.splitlines() if line.startswith("### ") for word in line.split()}
    assert headed >= {layout.partition("/")[0] for layout in LAYOUTS}
