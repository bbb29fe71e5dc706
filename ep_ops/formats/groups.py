"""What grouped GEMMs take beside rows. Nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The rows of each local expert, as a route says where they are."""

    offs: Tensor  # int32 [El] where each segment ends, its padding included
    counts: Tensor  # int32 [El] kept rows
    alignment: int  # segments are padded to a multiple of it

    @property
    def sizes(self) -> Tensor:
        """int32 [El]: rows of each segment, its padding included."""
        return (self.counts + self.alignment - 1) // self.alignment * self.alignment

    @property
    def psum(self) -> Tensor:
        """int32 [El]: where the kept rows of each expert end (DeepGEMM's ``use_psum_layout``)."""
        return self.offs - self.sizes + self.counts

    def m_indices(self, num_rows: int) -> Tensor:
        """int32 [R]: the local expert of each kept row, -1 elsewhere (DeepGEMM's ``grouped_layout``)."""
        expert, place = self.places(num_rows)
        return torch.where(place < _of(self.counts, expert), expert, -1).int()

    def covered(self, num_rows: int, padding: bool) -> Tensor:
        """bool [R]: which rows are kept, or kept or padding."""
        expert, place = self.places(num_rows)
        return place < _of(self.sizes if padding else self.counts, expert)

    def places(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Of each row, int64 [R]: the last local expert that begins at or before it, -1 where there are no experts; and
        which row of that expert's it would be, from 0."""
        row = torch.arange(num_rows, device=self.offs.device)
        begin = (self.offs - self.sizes).long()
        expert = torch.searchsorted(begin, row, right=True) - 1
        return expert, row - _of(begin, expert)


def _of(values: Tensor, expert: Tensor) -> Tensor:
    """The value of each row's expert, 0 where there is none."""
    return values[expert.clamp(min=0)] if values.numel() else torch.zeros_like(expert)
