"""How the scales of received rows lie in memory: where the scale of (row, column) is, and packing and reading by it.

R rows, G scales a row, El local experts (the groups of a grouped GEMM), a4 = rounded up to 4, P = ceil(G / 4). ``rows``
is [R, G] itself. The scale of row r and column g lies, in elements for ``columns`` and in bytes for the others, at

* ``columns``: ``g * a4(R) + r``;
* ``packed``: ``4 * ((g >> 2) * a4(R) + r) + (g & 3)``;
* both in the padded layout, of row s of expert e: with slots for R and s for r, behind e times what one expert takes;
* ``swizzled``: ``512 * P * base + ((m >> 7) * P + (g >> 2)) * 512 + (m & 31) * 16 + ((m >> 5) & 3) * 4 + (g & 3)``, m
  being the row within its expert and ``base`` the expert's first tile of 128 rows (:meth:`ScaleLayout.bases`).

``packed`` and ``swizzled`` have a4(G) bytes a row: those behind the last scale are 0 beside every row that is defined.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.formats import SWIZZLED, TILE, Format, Grid, per_row, scales_shape

from .groups import Segments
from .quantize import exponents, powers


class ScaleLayout(NamedTuple):
    """Where the scales of the rows of one dispatch lie."""

    form: Format
    name: str  # one of the format's layouts
    grid: Grid
    segments: Segments

    def pack(self, scales: Tensor, zeros: bool, unused: float) -> Tensor:
        """Scales in rows ([R, G]; [R] of whole rows), as this layout has them: what an operator returns. ``rows`` are
        taken as they are.

        ``zeros``: padding rows are defined, their scales 0, as are those of the places behind a segment in its last
        tile. What is undefined holds ``unused``: 0 or NaN.
        """
        if self.name == "rows":
            return scales
        shape, dtype = scales_shape(self.form, self.name, self.grid)
        bytewise = self.name != "columns"
        memory = torch.empty(shape, dtype=dtype, device=scales.device)
        flat = memory.view(torch.uint8 if bytewise else dtype).view(-1)
        flat.fill_(255 if bytewise and math.isnan(unused) else unused)
        expert, place = self.segments.places(self.grid.num_rows)
        row = self.segments.covered(self.grid.num_rows, zeros).nonzero().squeeze(1)
        own = exponents(scales[row]) if bytewise else scales[row]
        at = self._at(row, expert[row], place[row])
        flat[at] = torch.nn.functional.pad(own, (0, at.shape[1] - own.shape[1]))
        if zeros and self.name in SWIZZLED:
            flat[self._behind()] = 0
        return memory

    def in_rows(self, packed: Tensor) -> Tensor:
        """The other way: fp32 [R, G] of what an operator returned, NaN for rows that are in no segment."""
        count, rows = per_row(self.form, self.grid.hidden), self.grid.num_rows
        if self.name == "rows":
            bytewise = packed.dtype == torch.float8_e8m0fnu
            own = (packed.view(torch.uint8) if bytewise else packed).view(rows, count)
            return powers(own.int()) if bytewise else own
        out = torch.full((rows, count), torch.nan, device=packed.device)
        expert, place = self.segments.places(rows)
        row = self.segments.covered(rows, padding=True).nonzero().squeeze(1)
        flat = packed.view(torch.float32 if self.name == "columns" else torch.uint8).view(-1)
        own = flat[self._at(row, expert[row], place[row])][:, :count]
        out[row] = own if self.name == "columns" else powers(own.int())
        return out

    def bases(self) -> Tensor:
        """int64 [El]: the first tile of each expert that has n rows, padding included, and c rows before it.

        torch: the tiles of those before, ``ceil(n / 128)`` each; quack: ``c // 128 + e``; flashinfer:
        ``(c + 127 * e) // 128``. In the padded layout ``e * ceil(slots / 128)`` for all of them.
        """
        end = self.segments.offs.long()
        expert = torch.arange(end.numel(), device=end.device)
        if self.grid.slots:
            return expert * -(-self.grid.slots // TILE)
        before = torch.cat([end.new_zeros(1), end])[:-1]
        if self.name == "swizzled/quack":
            return before // TILE + expert
        if self.name == "swizzled/flashinfer":
            return (before + (TILE - 1) * expert) // TILE
        tiles = (end - before + TILE - 1) // TILE
        return tiles.cumsum(0) - tiles

    def _at(self, row: Tensor, expert: Tensor, place: Tensor) -> Tensor:
        """Where the scales of rows lie, int64 [rows, G], or a4(G) in ``packed`` and ``swizzled``."""
        count, slots = per_row(self.form, self.grid.hidden), self.grid.slots
        quads = (count + 3) // 4
        column = torch.arange(count if self.name == "columns" else 4 * quads, device=row.device)
        if self.name in SWIZZLED:
            tile = self.bases()[expert] * quads + (place >> 7) * quads
            inside = (place & 31) * 16 + (place >> 5 & 3) * 4
            return (512 * tile + inside)[:, None] + 512 * (column >> 2) + (column & 3)
        across = (slots or self.grid.num_rows) + 3 & ~3
        if slots:
            row = place + expert * across * (count if self.name == "columns" else quads)
        if self.name == "columns":
            return row[:, None] + column * across
        return 4 * (row[:, None] + (column >> 2) * across) + (column & 3)

    def _behind(self) -> Tensor:
        """Places of swizzled scales behind each segment, in its last tile."""
        size = self.segments.sizes.long()
        expert = torch.arange(size.numel(), device=size.device)
        place = size[:, None] + torch.arange(TILE, device=size.device)  # [El, 128]
        kept = place < (size[:, None] + TILE - 1) // TILE * TILE
        expert = expert[:, None].expand_as(place)[kept]
        return self._at(expert, expert, place[kept])


def view(packed: Tensor, name: str, grid: Grid) -> Tensor:
    """What an operator returned, as consumers take it: columns and packed as [R, .] ([El, slots, .] in the padded
    layout) whose rows are next to each other, with the strides of what they lie in; the others as they are."""
    if name not in ("columns", "packed"):
        return packed
    return packed.transpose(-1, -2).narrow(-2, 0, grid.slots or grid.num_rows)
