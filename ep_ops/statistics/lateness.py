"""How late ranks began their last operations, and how long they waited for each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.records import Operation


class Lateness(NamedTuple):
    """When all ranks began their last operations, and for how long they waited, in host memory
    (:meth:`Communicator.lateness`).

    W ranks, N operations. A call that runs in rounds (``staging_bytes``) is one operation for each round, and one for
    the route.
    """

    operations: tuple[int, ...]  # numbers of the last operations that all ranks recorded; at most 16
    begun: Tensor  # float64 [W, N] seconds from the first rank's begin of the operation to each rank's
    waits: Tensor  # float64 [W, W, N] longest wait of a thread of each rank for each other rank, seconds; 0 for itself

    @property
    def awaited(self) -> Tensor:
        """Return how long other ranks waited for each rank, the longest of them, on average: float64 [W] seconds.

        It is large for a straggler and small for the others.
        """
        return self.waits.amax(0).mean(1) if self.operations else self.begun.new_zeros(self.begun.shape[0])

    @property
    def late(self) -> Tensor:
        """Return how much later than the first rank each rank began, on average: float64 [W] seconds."""
        return self.begun.mean(1) if self.operations else self.begun.new_zeros(self.begun.shape[0])


def lateness(noted: Sequence[Sequence[Operation]]) -> Lateness:
    """Return the lateness of ranks from the operations that each of them recorded."""
    by_number = [{operation.number: operation for operation in own} for own in noted]
    numbers = tuple(sorted(set(by_number[0]).intersection(*by_number[1:])))
    found = [[own[n] for n in numbers] for own in by_number]
    times = torch.tensor([[one.begun for one in own] for own in found], dtype=torch.float64, device="cpu")
    waits = torch.tensor([[one.waits for one in own] for own in found], dtype=torch.float64, device="cpu")
    if not numbers:
        return Lateness(numbers, times, times.new_zeros(len(noted), len(noted), 0))
    waits.diagonal(dim1=0, dim2=2).zero_()  # blocks of a rank wait for each other as well
    met = torch.tensor(
        [[math.inf if one.met is None else one.met for one in own] for own in found], dtype=torch.float64, device="cpu"
    )
    times = times - _ahead(times, met)[:, None]
    return Lateness(numbers, times - times.amin(0), waits.transpose(1, 2))


def _ahead(begun: Tensor, met: Tensor) -> Tensor:
    """Return how far the clock of each rank is ahead of a common clock, [W] seconds; none is positive.

    Records leave a range of possible values. Return those that correct each clock least: with them no rank observes
    that all have begun before each of them has.

    Args:
        begun: [W, N] when ranks began operations, each by its own clock.
        met: [W, N] when each had observed that all had begun; infinity: unknown.
    """
    most = (met[:, None] - begun).amin(2)  # [r, s]: clock r is at most this far ahead of clock s
    for via in range(len(most)):
        most = torch.minimum(most, most[:, via, None] + most[via])
    return most.amin(1).clamp(max=0)
