"""Quantization of rows in plain torch. The kernels produce the same bits.

A block is the numbers that share a scale; ``amax`` is its largest magnitude.

* ``pow2``: the scale is the smallest power of two s with ``448 * s >= max(amax, 1e-4)``;
* ``mx``: the smallest power of two s >= 2**-127 with ``448 * s >= amax`` (RCEIL of the OCP MX formats);
* ``fp32``: ``max(amax, 1e-4) / 448``, rounded to fp32.

A code is ``x * (1 / s)``, both rounded to fp32, rounded to the nearest e4m3 (ties to even), at most 448 in magnitude.
The sign of a zero is kept. A number decodes to code times scale.

* A block of zeros has codes 0, and the scale of amax = 1e-4 (byte 105, or 2.2321e-7); in MX, byte 0.
* An MX block whose amax is at most 448 * 2**-127 (byte 0) has codes 0.
* A block that holds an Inf or a NaN is NaN as a whole: codes 0x7F, and scale byte 255, or Inf as fp32 (so that a
  ``pow2`` scale is always an exponent field alone).

Sources: DeepGEMM's ``per_token_cast_to_fp8`` (floor, rounding up, x times the reciprocal), and torchao's ``to_mx`` with
RCEIL, which differs for Inf (byte 254) and, where its fp32 log2 is not exact, for fp32 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.formats import ELEMENT, Format, per_row

LARGEST = 448.0  # largest e4m3 number
FLOOR = 1e-4  # least amax, except in MX


def quantize(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Quantize rows.

    Args:
        x: bfloat16, float16 or float32 [T, H].
        form: the format.

    Returns:
        Codes e4m3 [T, H], and scales of ``form.scale_dtype`` [T, G], or [T] with one scale a row.

    Raises:
        ValueError: H is not a multiple of the block.
    """
    reject_hidden(x.shape[1], form)
    count = per_row(form, x.shape[1])
    blocks = x.float().view(x.shape[0], count, x.shape[1] // count)
    amax = blocks.abs().amax(2)  # [T, G]; NaN if the block has one
    one = torch.ones((), device=x.device)
    if form.power:
        byte = _exponent(amax if form.block == 32 else amax.clamp(min=FLOOR))
        stored = byte.to(torch.uint8).view(form.scale_dtype) if form.block == 32 else powers(byte)
        inverse = powers(254 - byte)  # valid for 1..247; others are replaced
        if form.block == 32:
            inverse = torch.where(byte == 0, 0.0, inverse)
        inverse = torch.where(byte == 255, torch.nan, inverse)
    else:
        bad = ~amax.isfinite()
        stored = torch.where(bad, torch.inf, amax.clamp(min=FLOOR) / (LARGEST * one))
        inverse = torch.where(bad, torch.nan, one / stored)
    codes = to_e4m3(blocks * inverse[..., None]).view(x.shape)
    return codes, stored if form.block else stored[:, 0]


def dequantize(codes: Tensor, scales: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """Return the rows [T, H] that :func:`quantize` encoded: code times scale in fp32, rounded to ``dtype`` (may be
    Inf)."""
    count = per_row(form, codes.shape[1])
    exact = powers(scales.view(torch.uint8).int()) if scales.dtype == torch.float8_e8m0fnu else scales
    blocks = codes.float().view(codes.shape[0], count, codes.shape[1] // count)
    return (blocks * exact.view(-1, count, 1)).view(codes.shape).to(dtype)


def reject_hidden(hidden: int, form: Format, name: str = "hidden_size") -> None:
    """Raise ValueError for a hidden size that the format does not allow. ``name``: what has this size."""
    if hidden % form.multiple:
        raise ValueError(
            f"{name} is {hidden}; format {form.name!r} takes multiples of {form.multiple}"
            + ("" if form.block else " (rows begin at multiples of 16 bytes)")
        )


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3, ties to even, at most 448 in magnitude; NaN is 0x7F. ``Tensor.to`` saturates since
    torch 2.13; this function does in all versions."""
    codes = x.clamp(-LARGEST, LARGEST).to(ELEMENT).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes).view(ELEMENT)


def _exponent(amax: Tensor) -> Tensor:
    """Return the exponent field of the smallest power of two s with 448 * s >= amax, int32; 255 for Inf and NaN. 448 is
    1.75 * 2**8, so a mantissa above 1.75 rounds up. 0 stands for 2**-127."""
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return torch.where(amax.isfinite(), exponent.clamp(min=0), 255)


def powers(exponent: Tensor) -> Tensor:
    """Return the fp32 powers of two with these exponent fields, int32 0..255: 0 is 2**-127, 255 is Inf."""
    return torch.where(exponent == 0, 0x400000, exponent << 23).view(torch.float32)


def exponents(scales: Tensor) -> Tensor:
    """Return the exponent bytes of scales that are powers of two, uint8."""
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    return (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def are_powers(scales: Tensor) -> Tensor:
    """Return which fp32 scales are powers of two, 0 or Inf."""
    return scales.view(torch.int32) & 0x807FFFFF == 0
