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
        self._numbers = {format: self._sizes.index(size) for format, size in sizes.items()}
        # Dispatches, rows kept, rows dropped, `Route.sources`; and `Route.sources` of combines.
        self._widths = (1, local_experts, local_experts, world_size + 1)
        self._one = static_zeros(1, dtype=torch.int32, device=device).fill_(1)
        self._dispatches, self._combines = (
            [static_zeros(width, dtype=torch.int64, device=device) for _ in self._sizes]
            for width in (sum(self._widths), world_size + 1)
        )

    def dispatched(self, route: Route, dropped: Tensor, format: str) -> None:
        """Count a dispatch."""
        if _takes_place(route):
            found = torch.cat((self._one, route.counts, dropped, route.sources))
            self._dispatches[self._numbers[format]].add_(found)

    def combined(self, route: Route, format: str) -> None:
        """Count a combine."""
        if _takes_place(route):
            self._combines[self._numbers[format]].add_(route.sources)

    def read(self) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """Return ``dispatches``, ``rows``, ``dropped``, ``received`` and ``returned`` of :class:`Statistics`, without
        waiting for running kernels."""
        sums, returned = (torch.stack([peek(one) for one in lines]) for lines in (self._dispatches, self._combines))
        dispatches, kept, dropped, sent = sums.split(self._widths, 1)
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
