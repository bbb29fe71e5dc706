"""Arguments of grouped GEMMs, computed from a route on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.formats import round_up


class Segments(NamedTuple):
    """The rows of each local expert."""

    offs: Tensor  # int32 [El] where each segment ends, its padding included
    counts: Tensor  # int32 [El] kept rows
    alignment: int  # segments are padded to a multiple of it

    @property
    def sizes(self) -> Tensor:
        """Return the rows of each segment, padding included, int32 [El]."""
        return round_up(self.counts, self.alignment)

    @property
    def psum(self) -> Tensor:
        """Return the end of the kept rows of each expert, int32 [El] (DeepGEMM's ``use_psum_layout``)."""
        return self.offs - self.sizes + self.counts

    def m_indices(self, num_rows: int) -> Tensor:
        """Return the local expert of each kept row, -1 for others, int32 [R] (DeepGEMM's ``grouped_layout``)."""
        expert, place = self.places(num_rows)
        return torch.where(place < _of(self.counts, expert), expert, -1).int()

    def covered(self, num_rows: int, padding: bool) -> Tensor:
        """Return which rows are kept, or kept or padding, bool [R]."""
        expert, place = self.places(num_rows)
        return place < _of(self.sizes if padding else self.counts, expert)

    def places(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the last local expert whose segment begins at or before each row (-1: no experts), and the row's index
        in the segment, int64 [R] each."""
        row = torch.arange(num_rows, device=self.offs.device)
        begin = (self.offs - self.sizes).long()
        expert = torch.searchsorted(begin, row, right=True) - 1
        return expert, row - _of(begin, expert)


def _of(values: Tensor, expert: Tensor) -> Tensor:
    """Return the value of each row's expert, 0 if there are no experts."""
    return values[expert.clamp(min=0)] if values.numel() else torch.zeros_like(expert)
