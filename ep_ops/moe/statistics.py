"""What a MoECommunicator counts, on the device, and what ranks have noted of when they began their operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.formats import FORMATS, per_row
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
            others = (self.waits * (1 - torch.eye(len(others), device="cpu")[:, :, None])).amax(0).mean(1)
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
    times = torch.tensor([[own[n].begun for n in numbers] for own in by_number], dtype=torch.float64, device="cpu")
    waits = torch.tensor([[own[n].waits for n in numbers] for own in by_number], dtype=torch.float64, device="cpu")
    if not numbers:
        return numbers, times, times.new_zeros(len(noted), len(noted), 0)
    return numbers, times - times.amin(0), waits.transpose(1, 2)


class Counts:
    """Sums over operations, in device memory: captured graphs add to them when they are replayed.

    Where rows lie in a route tells how many copies came from each rank, not how large they were. So there is a line of
    sums for each size that rows have in some format, and bytes are worked out when somebody asks.
    """

    def __init__(self, num_local_experts: int, world_size: int, sizes: dict[str, int], device: torch.device) -> None:
        """`sizes`: bytes of a row as it travels, by format."""
        self._sizes = sorted(set(sizes.values()))
        self._lines = {format: self._sizes.index(size) for format, size in sizes.items()}
        self._own = sizes[""]
        # A line: dispatches, rows kept and dropped by expert, and copies as `Route.sources` has them.
        self._widths = (1, num_local_experts, num_local_experts, world_size + 1)
        with torch.inference_mode(False):  # else nothing else could add to them
            self._one = torch.ones(1, dtype=torch.int32, device=device)
            self._sums = torch.zeros(len(self._sizes), sum(self._widths), dtype=torch.int64, device=device)
            self._returned = torch.zeros(world_size + 1, dtype=torch.int64, device=device)

    def dispatched(self, route: Route, dropped: Tensor, format: str) -> None:
        self._sums[self._lines[format]].add_(torch.cat((self._one, route.counts, dropped, route.sources)))

    def combined(self, route: Route) -> None:
        self._returned.add_(route.sources)

    def reset(self) -> None:
        for sums in (self._sums, self._returned):
            sums.zero_()

    def forget_rows(self) -> None:
        """When somebody else has noted them."""
        first, experts = self._widths[:2]
        self._sums[:, first : first + 2 * experts].zero_()

    # What follows waits for the device.

    @property
    def dispatches(self) -> int:
        return int(self._read()[0].sum())

    @property
    def rows(self) -> Tensor:
        """[2, El] rows kept and dropped, by local expert."""
        _, kept, dropped, _ = self._read()
        return torch.stack((kept.sum(0), dropped.sum(0)))

    @property
    def bytes(self) -> Tensor:
        """[2, W] bytes received from and returned to each rank."""
        received = torch.tensor(self._sizes, device="cpu") @ self._read()[3]
        return torch.stack((received, self._own * self._returned.cpu())).diff()

    def _read(self) -> tuple[Tensor, ...]:
        return self._sums.cpu().split(self._widths, 1)


def row_bytes(hidden_size: int, itemsize: int) -> dict[str, int]:
    """Bytes of a row as it travels, by format ("": none): its numbers, or its codes and scales."""
    coded = {
        name: hidden_size + per_row(form, hidden_size) * form.scale_dtype.itemsize for name, form in FORMATS.items()
    }
    return {"": hidden_size * itemsize, **coded}
