"""Counts that calls of a communicator add up in device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_ops.formats import FORMATS, per_row
from ep_ops.overflow import recomputing, static_zeros
from ep_ops.records import Route
from ep_ops.symmetric import peek


class Counts:
    """Sums over the calls of a communicator in device memory, so that replayed graphs are counted.

    The route says how many copies came from each rank, but not their size. Sums are therefore kept for each size of a
    row, and bytes are computed when they are read. Calls with meta tensors, and forward passes that activation
    checkpointing runs again, are not counted.
    """

    def __init__(
        self, hidden_size: int, dtype: torch.dtype, local_experts: int, world_size: int, device: torch.device
    ) -> None:
        sizes = row_bytes(hidden_size, dtype.itemsize)
        self._sizes = sorted(set(sizes.values()))
        self._lines = {format: self._sizes.index(size) for format, size in sizes.items()}
        # A line: dispatches, rows kept, rows dropped, `Route.sources` of dispatches and of combines.
        self._widths = (1, local_experts, local_experts, world_size + 1, world_size + 1)
        self._combines = sum(self._widths[:4])
        self._one = static_zeros(1, dtype=torch.int32, device=device).fill_(1)
        self._sums = static_zeros(len(self._sizes), sum(self._widths), dtype=torch.int64, device=device)

    def dispatched(self, route: Route, dropped: Tensor, format: str) -> None:
        """Count a dispatch."""
        if _takes_place(route):
            line = self._sums[self._lines[format], : self._combines]
            line.add_(torch.cat((self._one, route.counts, dropped, route.sources)))

    def combined(self, route: Route, format: str) -> None:
        """Count a combine."""
        if _takes_place(route):
            self._sums[self._lines[format], self._combines :].add_(route.sources)

    def read(self) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """Return ``dispatches``, ``rows``, ``dropped``, ``received`` and ``returned`` of :class:`Statistics`, without
        waiting for running kernels."""
        dispatches, kept, dropped, sent, returned = peek(self._sums).split(self._widths, 1)
        sizes = torch.tensor(self._sizes, device="cpu")
        return int(dispatches.sum()), kept.sum(0), dropped.sum(0), (sizes @ sent).diff(), (sizes @ returned).diff()


def _takes_place(route: Route) -> bool:
    """Return whether a call moves rows, and for the first time."""
    return not (route.counts.is_meta or recomputing())


def row_bytes(hidden_size: int, itemsize: int) -> dict[str, int]:
    """Return the bytes of a row as it is sent, by format ("": none), scales included."""
    coded = {
        name: hidden_size + per_row(form, hidden_size) * form.scale_dtype.itemsize for name, form in FORMATS.items()
    }
    return {"": hidden_size * itemsize, **coded}
