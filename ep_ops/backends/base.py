"""The interface of backends. Arguments have passed :mod:`ep_ops.checks`; every result is a new tensor.

W ranks, T tokens of this rank, K = top_k, El local experts, R rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..records import Delivery, DispatchTensors, Operation, Placed, Received, Route, Sizes
from .budget import Budget

Formats = Sequence[tuple[str, str]]
"""Formats of rows, each with the layout of its scales ("": the first): see docs/formats.md."""


class Backend(Protocol):
    """The operators and services of a backend, created by ``ep_ops.backends.make``."""

    name: str
    budget: Budget  # multiprocessors that the operators take, read when they run
    calls: int  # operators that this rank has begun or rejected, without calls that were not checked again

    # ------------------------------------------------------------------ operators

    def plan(self, topk_idx: Tensor, sizes: Sizes) -> Placed: ...

    def dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> DispatchTensors: ...

    def dispatch_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> DispatchTensors:
        """Dispatch into as many rows as are received; ``sizes.capacity`` is UNBOUNDED."""

    def dispatch_planned(
        self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery
    ) -> Received: ...

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None, format: str = ""
    ) -> Tensor:
        """Return out [T, H]. ``format``: format in which sums are sent, one of ``COMBINE_FORMATS`` or empty."""

    def combine_gathered(self, y: Tensor, route: Route) -> Tensor:
        """Return out [T, H]."""

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        """Return grad_x [T, H] or [0], and grad_topk_weights [T, K] or [0]. grad_recv_weights is [R], token-major [R,
        K]."""

    def combine_backward(
        self, grad_out: Tensor, y: Tensor | None, recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        """Return grad_y [R, H], and grad_recv_weights [R] ([0] unless y and recv_weights are given)."""

    def bind(self, operator: str, *args: Any) -> Callable[..., Any] | None:
        """Return a function that runs ``operator`` faster for other tensors of the same shapes and dtypes as these
        arguments of its method, or None if there is none. It takes (x, topk_weights, topk_idx) for a dispatch, and
        (y, recv_weights, *route.tensors) for a combine."""

    # Split operations, each in a flight 0 .. FLIGHTS - 1, of "dispatch", "combine" and their gradients.

    def start(self, flight: int, operator: str, *args: Any) -> Tensor:
        """Start ``operator`` with the arguments of its method, and return the ticket, float32 [0]."""

    def wait(self, flight: int, operator: str, *args: Any) -> Any:
        """Finish ``operator`` and return its results. ``args``: those of the start, or for gradients a function that
        makes two tensors of the sizes of the results."""

    def end_flights(self) -> None:
        """Wait for the split operations in progress and drop their results. Raises nothing."""

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """End ``operator``, which this rank does not run and its peers do, on all ranks; the others raise ``reason``.

        Does nothing while a CUDA graph is captured, or if the peers do not run it either (a wait whose start has run
        it, a start in a ``flight`` that is in use). ``max_tokens``: argument of the operator, if it has one.
        """

    def interrupted(
        self, operator: str, error: BaseException, again: Callable[[], Any], flight: int = 0, max_tokens: Any = 0
    ) -> None:
        """Inform the other ranks, if necessary, that ``operator`` raises ``error`` on this rank after its checks.
        ``again`` runs it once more. ``flight``, ``max_tokens``: arguments of the operator."""

    # ------------------------------------------------------------------ the rest

    def empty_rows(self, num_rows: int) -> Tensor:
        """Return [num_rows, H] for combine_gathered. ``num_rows`` is at most ``symmetric_rows``."""

    def compile(self, formats: Formats = ()) -> None:
        """Compile and load all kernels that the operators need, for unquantized rows and for ``formats``. Not
        collective."""

    def warmup(self) -> None:
        """Run every kernel once. Collective."""

    def check_errors(self) -> None:
        """Raise RuntimeError or ValueError for what kernels or other ranks have reported."""

    def listen(self) -> None:
        """Check whether another rank has reported a failure, which only running kernels would notice otherwise."""

    def call_on_failure(self, callback: Callable[[str], None]) -> None:
        """Register a callback for the text of a failure that kernels report."""

    def last_operations(self, rank: int) -> list[Operation]:
        """Return the last operations that a rank has recorded, the latest first. Does not wait for running kernels."""

    def has_failed(self) -> bool:
        """Return whether the communicator has failed."""

    def unsaid(self) -> str | None:
        """Return the text of a failure that has not been raised yet."""

    def destroy(self, keep: bool) -> None:
        """Free all memory. ``keep``: keep memory that peers may still write to."""


def not_gatherable(y: Tensor, memory: Tensor | None, most: int, name: str) -> str | None:
    """Return why ``combine_gathered`` cannot take rows ``y``, or None. ``memory``: symmetric memory of ``most`` rows,
    or None."""
    if memory is None:
        return f"communicator {name!r} has no rows in symmetric memory: symmetric_rows is 0"
    if y.shape[0] > most:
        return f"y has {y.shape[0]} rows; allowed: at most {most}, the symmetric_rows of {name!r}"
    inside = y.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    if inside and y.numel() and lies_elsewhere(y, memory):
        return "y lies in symmetric memory, and not at its beginning; pass the tensor that empty_rows returned"
    return None


def lies_elsewhere(y: Tensor, memory: Tensor) -> bool:
    """Return whether rows ``y`` must be copied to ``memory``."""
    return y.numel() > 0 and y.data_ptr() != memory.data_ptr()
