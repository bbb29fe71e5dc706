"""What a MoECommunicator counts, on the device, and what ranks have noted of when they began their operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.formats import format_of, per_row
from ep_ops.records import Operation, Route


class Stats(NamedTuple):
    """Of one rank, in the host's memory: counts since the last :meth:`MoECommunicator.reset_stats`, and the times of
    the last operations. A call that goes in rounds (``staging_bytes``) is an operation for each of them, and one more
    where it tells the route. E logical experts, W ranks, N operations."""

    rank: int  # whose they are
    dispatches: int  # that have been counted
    rows: Tensor  # int64 [E] rows that came to this rank, by logical expert; token-major: (row, k)
    dropped: Tensor  # int64 [E] those that did not fit
    received: Tensor  # int64 [W] bytes of rows and scales that dispatches brought here, by source rank
    returned: Tensor  # int64 [W] bytes of rows that combines gave back, by the rank that they went to
    operations: tuple[int, ...]  # the last ones that all ranks have noted, by number on the communicator; at most 16
    begun: Tensor  # float64 [W, N] seconds from when the first rank began the operation to when each rank did
    waits: Tensor  # float64 [W, W, N] the longest that a thread of each rank waited for each source rank in it, seconds

    @property
    def awaited(self) -> Tensor:
        """float64 [W]: for how long other ranks waited for each one, the longest of them, on average. A straggler's is
        large, that of all others small."""
        others = self.waits.new_zeros(self.begun.shape[0])
        if self.operations:
            others = (self.waits * (1 - torch.eye(len(others))[:, :, None])).amax(0).mean(1)
        return others

    @property
    def late(self) -> Tensor:
        """float64 [W]: how much later than the first rank each one began, on average. A straggler's is large, that of
        all others small."""
        return self.begun.mean(1) if self.operations else self.begun.new_zeros(self.begun.shape[0])


def last(noted: Sequence[Sequence[Operation]]) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """``Stats.operations``, ``begun`` and ``waits`` of what each rank has noted (``Communicator.last_operations``)."""
    by_number = [{operation.number: operation for operation in own} for own in noted]
    numbers = tuple(sorted(set(by_number[0]).intersection(*by_number[1:])))
    times = torch.tensor([[own[n].begun for n in numbers] for own in by_number], dtype=torch.float64)
    waits = torch.tensor([[own[n].waits for n in numbers] for own in by_number], dtype=torch.float64)
    if not numbers:
        return numbers, times, times.new_zeros(len(noted), len(noted), 0)
    return numbers, times - times.amin(0), waits.transpose(1, 2)


class Counts:
    """Sums over operations, in device memory: captured graphs add to them when they are replayed."""

    def __init__(self, num_local_experts: int, world_size: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # else nothing else could add to them
            self._dispatches = torch.zeros((), dtype=torch.int64, device=device)
            self._rows = torch.zeros(2, num_local_experts, dtype=torch.int64, device=device)  # kept, dropped
            # As `Route.sources` has them: sums over the ranks up to and with each.
            self._bytes = torch.zeros(2, world_size + 1, dtype=torch.int64, device=device)  # received, returned

    def dispatched(self, route: Route, dropped: Tensor, row_bytes: int) -> None:
        self._dispatches.add_(1)
        self._rows[0].add_(route.counts)
        self._rows[1].add_(dropped)
        self._bytes[0].add_(route.sources, alpha=row_bytes)

    def combined(self, route: Route, row_bytes: int) -> None:
        self._bytes[1].add_(route.sources, alpha=row_bytes)

    def reset(self) -> None:
        for sums in (self._dispatches, self._rows, self._bytes):
            sums.zero_()

    def forget_rows(self) -> None:
        """When somebody else has noted them."""
        self._rows.zero_()

    # What follows waits for the device.

    @property
    def dispatches(self) -> int:
        return int(self._dispatches)

    @property
    def rows(self) -> Tensor:
        """[2, El] rows kept and dropped, by local expert."""
        return self._rows.cpu()

    @property
    def bytes(self) -> Tensor:
        """[2, W] bytes received from and returned to each rank."""
        return self._bytes.cpu().diff()


def row_bytes(hidden_size: int, itemsize: int, format: str = "") -> int:
    """Bytes of a row as it travels: its numbers, or its codes and scales."""
    if not format:
        return hidden_size * itemsize
    form = format_of(format)
    return hidden_size + per_row(form, hidden_size) * form.scale_dtype.itemsize
