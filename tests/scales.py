"""Scales of received rows in a memory layout, converted back to rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_ops.formats import ScaleLayout, per_row
from ep_ops.formats.quantize import powers


def in_rows(layout: ScaleLayout, packed: Tensor) -> Tensor:
    """Return the scales that an operator returned as fp32 [R, G], NaN for rows outside of segments."""
    count, rows = per_row(layout.form, layout.grid.hidden), layout.grid.num_rows
    if layout.name == "rows":
        if packed.dtype != torch.float8_e8m0fnu:
            return packed.view(rows, count)
        return powers(packed.view(torch.uint8).view(rows, count).int())
    out = torch.full((rows, count), torch.nan, device=packed.device)
    expert, place = layout.segments.places(rows)
    row = layout.segments.covered(rows, padding=True).nonzero().squeeze(1)
    flat = packed.view(torch.float32 if layout.name == "columns" else torch.uint8).view(-1)
    own = flat[layout._at(row, expert[row], place[row])][:, :count]
    out[row] = own if layout.name == "columns" else powers(own.int())
    return out
