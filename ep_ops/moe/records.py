"""What a MoECommunicator hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from ep_ops.records import Route

T = TypeVar("T")


class DispatchOutput(NamedTuple):
    """What experts compute on. El local physical experts, R rows, S slots, K experts a token."""

    x: Tensor  # [R, H], of layout "padded" [El, S, H]; codes of the format where rows are quantized
    weights: Tensor | None  # [R] or [El, S] of each row, of token-major rows [R, K]; None if no weights were given
    scales: Tensor | None  # of quantized rows (docs/formats.md)
    counts: Tensor  # int32 [El] rows of each local expert; of token-major rows, of how many (row, k) it is the expert
    offs: Tensor  # int32 [El] where the segment of each ends, its padding included; of token-major rows sums of counts
    dropped: Tensor  # int32 [El] rows that did not fit
    local_idx: Tensor | None  # int32 [R, K] local experts of token-major rows, -1 none; None in other layouts


class DispatchHandle(NamedTuple):
    """What a combine, or another dispatch along the same route, has to know: tensors, and the ints that they were
    planned with. It may be kept, passed through compiled functions and captured graphs; gradients flow through
    ``weights``."""

    route: Route
    weights: Tensor | None  # [R] by which a combine multiplies rows; None: by nothing


class Request(Generic[T]):
    """A call that has been started."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    def wait(self) -> T:
        """What the call returns. Once only."""
        return self._finish()
