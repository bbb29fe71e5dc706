"""Statistics of a MoECommunicator: counts on the device, and the times of its last operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.formats import FORMATS, per_row
from ep_ops.records import Operation, Route


class Stats(NamedTuple):
    """Statistics of one rank, in host memory: counts since the last :meth:`MoECommunicator.reset_stats`, and operation
    times.

    E logical experts, W ranks, N operations. A call that runs in rounds (``staging_bytes``) is one operation for each
    round, and one for the route.
    """

    rank: int  # the rank
    dispatches: int  # number of dispatches
    rows: Tensor  # int64 [E] rows received by logical expert; token-major: (row, k)
    dropped: Tensor  # int64 [E] rows that did not fit
    received: Tensor  # int64 [W] bytes of rows and scales received in dispatches, by source rank
    returned: Tensor  # int64 [W] bytes of rows returned in combines, by destination rank
    operations: tuple[int, ...]  # numbers of the last operations that all ranks recorded; at most 16
    begun: Tensor  # float64 [W, N] seconds from the first rank's begin of the operation to each rank's
    waits: Tensor  # float64 [W, W, N] longest wait of a thread of each rank for each source rank, seconds

    @property
    def awaited(self) -> Tensor:
        """Return how long other ranks waited for each rank, the longest of them, on average: float64 [W] seconds.

        It is large for a straggler and small for the others.
        """
        others = self.waits.new_zeros(self.begun.shape[0])
        if self.operations:
            others = (self.waits * (1 - torch.eye(len(others), device="cpu")[:, :, None])).amax(0).mean(1)
        return others

    @property
    def late(self) -> Tensor:
        """Return how much later than the first rank each rank began, on average: float64 [W] seconds."""
        return self.begun.mean(1) if self.operations else self.begun.new_zeros(self.begun.shape[0])


def last(noted: Sequence[Sequence[Operation]]) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Return ``operations``, ``begun`` and ``waits`` of :class:`Stats` from the operations that each rank recorded."""
    by_number = [{operation.number: operation for operation in own} for own in noted]
    numbers = tuple(sorted(set(by_number[0]).intersection(*by_number[1:])))
    found = [[own[n] for n in numbers] for own in by_number]
    times = torch.tensor([[one.begun for one in own] for own in found], dtype=torch.float64, device="cpu")
    waits = torch.tensor([[one.waits for one in own] for own in found], dtype=torch.float64, device="cpu")
    if not numbers:
        return numbers, times, times.new_zeros(len(noted), len(noted), 0)
    met = torch.tensor(
        [[math.inf if one.met is None else one.met for one in own] for own in found], dtype=torch.float64, device="cpu"
    )
    times = times - _ahead(times, met)[:, None]
    return numbers, times - times.amin(0), waits.transpose(1, 2)


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


class Totals(NamedTuple):
    """The sums that :class:`Counts` keeps, in host memory."""

    dispatches: int
    rows: Tensor  # [2, El] rows kept and dropped by local expert
    bytes: Tensor  # [2, W] bytes received from and returned to each rank


class Counts:
    """Sums over operations in device memory, so that replayed graphs are counted.

    The route says how many copies came from each rank, but not their size. Sums are therefore kept for each size of a
    row, and bytes are computed when they are read.
    """

    def __init__(self, comm: Communicator, combine_format: str) -> None:
        sizes, device = row_bytes(comm.hidden_size, comm.dtype.itemsize), comm.device
        self._sizes = sorted(set(sizes.values()))
        self._lines = {format: self._sizes.index(size) for format, size in sizes.items()}
        self._sum_bytes = sizes[combine_format]
        # A line: dispatches, rows kept, rows dropped, and `Route.sources`.
        self._widths = (1, comm.num_local_experts, comm.num_local_experts, comm.world_size + 1)
        with torch.inference_mode(False):  # inference tensors could not be updated later
            self._one = torch.ones(1, dtype=torch.int32, device=device)
            self._sums = torch.zeros(len(self._sizes), sum(self._widths), dtype=torch.int64, device=device)
            self._returned = torch.zeros(comm.world_size + 1, dtype=torch.int64, device=device)

    def dispatched(self, route: Route, dropped: Tensor, format: str) -> None:
        """Count a dispatch."""
        self._sums[self._lines[format]].add_(torch.cat((self._one, route.counts, dropped, route.sources)))

    def combined(self, route: Route) -> None:
        """Count a combine."""
        self._returned.add_(route.sources)

    def reset(self) -> None:
        for sums in (self._sums, self._returned):
            sums.zero_()

    def forget_rows(self) -> None:
        """Reset the counts of rows."""
        first, experts = self._widths[:2]
        self._sums[:, first : first + 2 * experts].zero_()

    def read(self) -> Totals:
        """Return the sums. Synchronizes the host."""
        dispatches, kept, dropped, sources = self._sums.cpu().split(self._widths, 1)
        received = torch.tensor(self._sizes, device="cpu") @ sources
        by_rank = torch.stack((received, self._sum_bytes * self._returned.cpu())).diff()
        return Totals(int(dispatches.sum()), torch.stack((kept, dropped)).sum(1), by_rank)


def row_bytes(hidden_size: int, itemsize: int) -> dict[str, int]:
    """Return the bytes of a row as it is sent, by format ("": none), scales included."""
    coded = {
        name: hidden_size + per_row(form, hidden_size) * form.scale_dtype.itemsize for name, form in FORMATS.items()
    }
    return {"": hidden_size * itemsize, **coded}
