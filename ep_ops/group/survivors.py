"""Expert ids where some experts are gone, with the ranks that held them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertIds:
    """Turns the ids that a model uses into those of a communicator that has only some of the experts."""

    def __init__(self, own: Sequence[int], device: torch.device) -> None:
        """``own``: for each id of the model the communicator's, or -1."""
        self.own = tuple(own)
        # Besides, -1 stays -1, and ids above the last one stay too large: whoever takes them says so.
        table = [-1, *self.own, sum(i >= 0 for i in own)]
        self._table = torch.tensor(table, dtype=torch.int32, device=device)

    @staticmethod
    def kept(held: Sequence[int], ranks: Sequence[int], before: ExpertIds | None, device: torch.device) -> ExpertIds:
        """Return the ids of a communicator that consists of ``ranks`` of another one.

        Args:
            held: number of experts of each rank of the other communicator.
            ranks: ranks of the other communicator that remain.
            before: conversion to ids of the other communicator, or None.
            device: device of the table.
        """
        first, own = 0, [-1] * sum(held)
        for rank in ranks:
            begin = sum(held[:rank])
            own[begin : begin + held[rank]] = range(first, first + held[rank])
            first += held[rank]
        if before is not None:
            own = [-1 if i < 0 else own[i] for i in before.own]
        return ExpertIds(own, device)

    def of(self, topk_idx: Tensor) -> Tensor:
        """Convert to ids of this communicator; experts that no longer exist become -1."""
        if not isinstance(topk_idx, Tensor) or topk_idx.dtype != torch.int32:
            return topk_idx  # the operator rejects it
        return self._table[topk_idx.clamp(-1, len(self.own)).long() + 1]

    def lost(self, topk_idx: Tensor) -> Tensor:
        """Count the entries that name an expert that no longer exists: int64 []."""
        return ((topk_idx >= 0) & (self.of(topk_idx) < 0)).sum()
