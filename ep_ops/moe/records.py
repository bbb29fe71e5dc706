"""Records that a MoECommunicator returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from ep_ops.records import Route

T = TypeVar("T")


class DispatchOutput(NamedTuple):
    """The received rows. El local physical experts, R rows, S slots, K experts a token."""

    x: Tensor  # [R, H], layout "padded" [El, S, H]; codes if rows are quantized
    weights: Tensor | None  # [R] or [El, S], token-major [R, K]; None if no weights were given
    scales: Tensor | None  # scales of quantized rows (docs/formats.md)
    counts: Tensor  # int32 [El] rows of each local expert; token-major: number of (row, k) that name it
    offs: Tensor  # int32 [El] end of each segment, padding included; token-major: cumulative counts
    dropped: Tensor  # int32 [El] rows that did not fit
    local_idx: Tensor | None  # token-major: int32 [R, K] local expert of each (row, k), else -1


class DispatchHandle(NamedTuple):
    """The route and weights that a combine or another dispatch along the same route needs.

    It can be kept, passed through compiled functions, and used in captured graphs. Gradients flow through ``weights``.
    """

    route: Route
    weights: Tensor | None  # [R] weights of the rows in a combine; None: 1


class Request(Generic[T]):
    """A call that was started."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    def wait(self) -> T:
        """Return the result of the call. Call it once."""
        return self._finish()
