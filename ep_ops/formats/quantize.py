"""Rows of numbers as codes and scales, and back, in plain torch: the definition that kernels agree with bit for bit.

Of a block (the numbers that share a scale), with ``amax`` its largest magnitude:

* ``pow2``: the scale is the smallest power of two s with ``448 * s >= max(amax, 1e-4)``;
* ``mx``: the smallest power of two s >= 2**-127 with ``448 * s >= amax`` (RCEIL of the OCP MX formats);
* ``fp32``: ``max(amax, 1e-4) / 448``, rounded to fp32.

A code is ``x * (1 / s)``, both rounded to fp32, rounded to the nearest e4m3 (ties to even), at most 448 in magnitude.
The sign of a zero is kept. A number of the block decodes to code times scale.

* A block of zeros has codes of 0; its scale is that of amax = 1e-4 (byte 105, or 2.2321e-7), of MX byte 0.
* A block of MX whose amax is at most 448 * 2**-127 (byte 0) has codes of 0 as well.
* A block that holds an Inf or a NaN is NaN as a whole: codes 0x7F; its scale is byte 255, or Inf as fp32 (so that a
  scale of ``pow2`` is always an exponent field alone).

Sources: DeepGEMM's ``per_token_cast_to_fp8`` (floor, rounding up, x times the reciprocal), torchao's ``to_mx`` with
RCEIL, which differs for Inf (byte 254) and, where its fp32 log2 is not exact, for fp32 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.formats import ELEMENT, Format, per_row

LARGEST = 448.0  # of e4m3
FLOOR = 1e-4  # of amax, but in MX


def quantize(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """x [T, H] of bf16, fp16 or fp32 -> codes e4m3 [T, H], scales of ``form.scale_dtype`` [T, G] ([T] of whole rows).

    ValueError where H does not divide.
    """
    refuse_hidden(x.shape[1], form)
    count = per_row(form, x.shape[1])
    blocks = x.float().view(x.shape[0], count, x.shape[1] // count)
    amax = blocks.abs().amax(2)  # [T, G]; NaN where there is one
    one = torch.ones((), device=x.device)
    if form.power:
        byte = _exponent(amax if form.block == 32 else amax.clamp(min=FLOOR))
        stored = byte.to(torch.uint8).view(form.scale_dtype) if form.block == 32 else powers(byte)
        inverse = powers(254 - byte)  # of 1..247; others are replaced
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
    """What :func:`quantize` returned, as [T, H] of ``dtype``: code times scale in fp32, rounded (Inf if too large)."""
    count = per_row(form, codes.shape[1])
    exact = powers(scales.view(torch.uint8).int()) if scales.dtype == torch.float8_e8m0fnu else scales
    blocks = codes.float().view(codes.shape[0], count, codes.shape[1] // count)
    return (blocks * exact.view(-1, count, 1)).view(codes.shape).to(dtype)


def refuse_hidden(hidden: int, form: Format) -> None:
    """ValueError for rows that the format does not divide."""
    if hidden % form.multiple:
        raise ValueError(
            f"hidden_size is {hidden}; format {form.name!r} takes multiples of {form.multiple}"
            + ("" if form.block else " (rows begin at multiples of 16 bytes)")
        )


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest, ties to even, at most 448 in magnitude; NaN is 0x7F. (``Tensor.to`` saturates since torch 2.13.)"""
    codes = x.clamp(-LARGEST, LARGEST).to(ELEMENT).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes).view(ELEMENT)


def _exponent(amax: Tensor) -> Tensor:
    """Exponent field of the smallest power of two that times 448 is at least ``amax``, int32: 0 is 2**-127, and 255
    stands for Inf and NaN.

    448 is 1.75 * 2**8: what is more than 1.75 times a power of two goes up.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return torch.where(amax.isfinite(), exponent.clamp(min=0), 255)


def powers(exponent: Tensor) -> Tensor:
    """fp32 of exponent fields 0..255, of int32: 0 is 2**-127, 255 is Inf."""
    return torch.where(exponent == 0, 0x400000, exponent << 23).view(torch.float32)


def exponents(scales: Tensor) -> Tensor:
    """uint8: the bytes of scales that are powers of two, of fp32 or as they are."""
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    return (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


def are_powers(scales: Tensor) -> Tensor:
    """bool: which fp32 scales are powers of two, 0 or Inf."""
    return scales.view(torch.int32) & 0x807FFFFF == 0
