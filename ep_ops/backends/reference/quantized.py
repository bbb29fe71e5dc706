"""Quantized rows of the reference backend.

x is quantized at its owner. Codes and byte scales are sent as uint8, which every torch operation supports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import ELEMENT, FORMATS, Grid, ScaleLayout, dequantize, exact_dtype, format_of, quantize
from ...formats.quantize import are_powers
from ...records import Route
from ...specs import DispatchSpec

NAMES = {"format": tuple(dict.fromkeys(["", *(name.removeprefix("wire:") for name in FORMATS)]))}
"""What ranks agree on, by name: they tell each other the index."""

NAN_CODE, NAN_BYTE = 0x7F, 0xFF


def agreed(format: str) -> dict[str, int]:
    """Return the format as a value that ranks must agree on."""
    return {"format": NAMES["format"].index(format.removeprefix("wire:"))}


class SumFormat(NamedTuple):
    """The form in which the sums of a combine are sent: rounded to the rows' dtype, or quantized."""

    dtype: torch.dtype  # of the rows
    format: str  # one of COMBINE_FORMATS, or empty

    def packed(self, sums: Tensor) -> Tensor:
        """Return the rows that are sent for sums [rows, H] of fp32 (fp64)."""
        if not self.format:
            return sums.to(self.dtype)
        codes, scales = quantize(sums, format_of(self.format))
        # A single column of scales may have any stride, which a view as bytes does not take.
        packed = scales.flatten().view(torch.uint8).view(scales.shape[0], scales.shape[1] * scales.itemsize)
        return torch.cat([codes.view(torch.uint8), packed], 1)

    def unpacked(self, rows: Tensor, hidden_size: int) -> Tensor:
        """Return the summands, fp32 (fp64) [rows, H], of rows that were sent."""
        if not self.format:
            return rows.to(exact_dtype(self.dtype))
        form = format_of(self.format)
        codes, scales = rows[:, :hidden_size].contiguous(), rows[:, hidden_size:].contiguous()
        return dequantize(codes.view(ELEMENT), scales.view(form.scale_dtype), form, torch.float32)


def problem(spec: DispatchSpec, scales: Tensor | None) -> str | None:
    """Return what is wrong with the values of the given scales, or None."""
    if scales is None:
        return None
    form = format_of(spec.format)
    if not form.power or form.scale_dtype != torch.float32:
        return None
    wrong = (~are_powers(scales)).nonzero()
    if not wrong.numel():
        return None
    token, column = wrong[0].tolist()
    value = float(scales[token, column])
    return f"scales[{token}, {column}] is {value!r}; format {form.name!r} takes powers of two, 0 and Inf"


def to_rows(
    x: Tensor,
    token: Tensor,
    spec: DispatchSpec,
    given: Tensor | None,
    route: Route,
    moved: Callable[[Tensor, float], Tensor],
    unused: float,
) -> tuple[Tensor, Tensor]:
    """Return recv_x and recv_scales of the rows that ``token`` [sent] of x [T, H] are sent to: codes and scales in the
    requested layout, or rows of x's dtype and [0].

    ``given``: scales of an x that is quantized already. ``moved`` moves values to their rows and fills the other rows
    with its second argument. ``unused`` is the value of undefined floats.
    """
    form = format_of(spec.format)
    codes, scales = (x, given) if given is not None else quantize(x, form)
    nan = math.isnan(unused)
    recv_codes = moved(codes.view(torch.uint8)[token], NAN_CODE if nan else 0).view(codes.dtype)
    if scales.dtype == torch.float8_e8m0fnu:
        recv_scales = moved(scales.view(torch.uint8)[token], NAN_BYTE if nan else 0).view(scales.dtype)
    else:
        recv_scales = moved(scales[token], unused)
    if form.wire:
        return dequantize(recv_codes, recv_scales, form, x.dtype), recv_scales.new_empty(0, dtype=torch.float32)
    grid = Grid(route.num_rows, route.slots, route.offs.numel(), x.shape[1])
    layout = ScaleLayout(form, spec.scales_layout, grid, route.segments)
    return recv_codes, layout.pack(recv_scales, spec.zeros, unused)
