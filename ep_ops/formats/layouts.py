"""Memory layouts of the scales of received rows: where each scale lies, and conversion from and to rows.

R rows, G scales a row, El local experts (the groups of a grouped GEMM), a4 = rounded up to 4, P = ceil(G / 4). ``rows``
is [R, G]. In the other layouts the scale of row r and column g lies at this offset, in elements for ``columns`` and in
bytes for the others:

* ``columns``: ``g * a4(R) + r``;
* ``packed``: ``4 * ((g >> 2) * a4(R) + r) + (g & 3)``;
* both in the padded layout, for row s of expert e: the same with slots for R and s for r, after the scales of the e
  experts before it;
* ``swizzled``: ``512 * P * base + ((m >> 7) * P + (g >> 2)) * 512 + (m & 31) * 16 + ((m >> 5) & 3) * 4 + (g & 3)``,
  where m is the row within its expert and ``base`` the expert's first tile of 128 rows (:meth:`ScaleLayout.bases`).

``packed`` and ``swizzled`` have a4(G) bytes a row. The bytes after the last scale are 0 for every defined row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.formats import SWIZZLED, TILE, Format, Grid, per_row, round_up, scales_shape

from .groups import Segments
from .quantize import exponents


class ScaleLayout(NamedTuple):
    """The memory layout of the scales of one dispatch."""

    form: Format
    name: str  # one of the format's layouts
    grid: Grid
    segments: Segments

    def pack(self, scales: Tensor, zeros: bool, unused: float) -> Tensor:
        """Return scales [R, G] ([R] for one scale a row) in this layout, as operators return them.

        Args:
            scales: scales in rows.
            zeros: whether the scales of padding rows, and of the rows after a segment in its last tile, are 0.
            unused: value of undefined scales, 0 or NaN.
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

    def bases(self) -> Tensor:
        """Return the first tile of each expert, int64 [El].

        With n rows of an expert, padding included, and c rows before it: torch, the sum of ``ceil(n / 128)`` of the
        experts before it; quack, ``c // 128 + e``; flashinfer, ``(c + 127 * e) // 128``. Padded layout: ``e *
        ceil(slots / 128)``.
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
        """Return the offsets of the scales of rows, int64 [rows, G], or [rows, a4(G)] for ``packed`` and
        ``swizzled``."""
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
        """Return the offsets of swizzled scales after each segment in its last tile."""
        size = self.segments.sizes.long()
        expert = torch.arange(size.numel(), device=size.device)
        place = size[:, None] + torch.arange(TILE, device=size.device)  # [El, 128]
        kept = place < round_up(size[:, None], TILE)
        expert = expert[:, None].expand_as(place)[kept]
        return self._at(expert, expert, place[kept])


def view(packed: Tensor, name: str, grid: Grid) -> Tensor:
    """Return an operator's scales as consumers take them. "columns" and "packed" become views [R, .], or [El, slots, .]
    in the padded layout, whose rows are adjacent in memory. Other layouts are unchanged."""
    if name not in ("columns", "packed"):
        return packed
    return packed.transpose(-1, -2).narrow(-2, 0, grid.slots or grid.num_rows)
