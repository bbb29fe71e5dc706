"""Segments of rows, drawn at random: which rows experts have, which pad them, and which are nobody's."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor


class Drawn(NamedTuple):
    counts: list[int]  # kept rows of each expert
    offs: list[int]  # where each segment ends
    kept: list[int]  # rows
    padding: list[int]
    rows: int  # that there is room for

    @property
    def live(self) -> list[int]:
        return sorted(self.kept + self.padding)

    @property
    def dead(self) -> list[int]:
        return sorted(set(range(self.rows)) - set(self.live))

    def poisoned(self, width: int, dtype: torch.dtype, draw: random.Random, scale: float = 3.0) -> Tensor:
        """[rows, width]: random in kept rows, NaN in all others."""
        x = torch.full((self.rows, width), math.nan, dtype=dtype)
        generator = torch.Generator().manual_seed(draw.getrandbits(31))
        x[self.kept] = (torch.randn(len(self.kept), width, generator=generator) * scale).to(dtype)
        return x


def segments(draw: random.Random, slots: int = 0, experts: int = 5, alignment: int = 4, behind: int = 9,
             most: int = 11) -> Drawn:  # fmt: skip
    """Draw segments of up to `most` rows, or `slots`; some empty, one not. `behind` rows behind the last, if there are
    no slots."""
    counts = [draw.choice([0, draw.randint(0, slots or most)]) for _ in range(experts)]
    counts[draw.randrange(experts)] = slots or most
    begin, offs, kept, padding = 0, [], [], []
    for expert, count in enumerate(counts):
        begin = expert * slots if slots else begin
        end = begin + -(-count // alignment) * alignment
        kept += range(begin, begin + count)
        padding += range(begin + count, end)
        offs.append(end)
        begin = end
    return Drawn(counts, offs, kept, padding, experts * slots if slots else begin + behind)
