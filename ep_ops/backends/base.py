"""The interface of backends. Arguments have passed :mod:`ep_ops.checks`; every result is a new tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from meta_kernels.arguments import Args

from ..records import Operation
from ..specs import Spec
from .budget import Budget

Formats = Sequence[tuple[str, str]]
"""Formats of rows, each with the layout of its scales ("": the first): see docs/formats.md."""


class Backend(Protocol):
    """The operators and services of a backend, created by ``ep_ops.backends.make``."""

    name: str
    budget: Budget  # multiprocessors that the operators take, read when they run
    calls: int  # number of operators that this rank has checked and begun, or rejected

    # ------------------------------------------------------------------ operators

    def bind(self, spec: Spec, a: Args) -> Callable[[Any], Any]:
        """Return a function that runs calls of a specification with the sizes and shapes of these arguments
        (``meta_kernels.arguments``). It takes theirs, and returns the results that the operator's schema names."""

    def bind_start(self, spec: Spec, a: Args) -> Callable[[Any], Tensor]:
        """Return a function that starts such calls, each in the flight of its arguments, and returns the ticket,
        float32 [0]."""

    def wait(self, operator: str, flight: int, again: Callable[[], Any]) -> Any:
        """Finish the split operation (its name without "_start") of a flight and return its results. ``again`` returns
        results for tools that call waits without starts."""

    def end_flights(self) -> None:
        """Wait for the split operations in progress and drop their results. Raises nothing."""

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """End ``operator``, which this rank does not run and its peers do, on all ranks; the others raise ``reason``.

        Does nothing while a CUDA graph is captured, or if the peers do not run it either (a wait whose start has run
        it, a start in a ``flight`` that is in use). ``max_tokens``: argument of the operator, if it has one.
        """

    def give_up(self, why: str) -> None:
        """End the communicator on all ranks, because this rank does not run what they expect. Any thread may call
        it."""

    def together(
        self, call: str, problem: str | None = None, values: Sequence[int] = ()
    ) -> AbstractContextManager[Tensor]:
        """Return a context manager that meets the other ranks in a collective method, in which they may then exchange
        data over the process group (``ep_ops.group.meeting``). It yields ``values`` of all ranks."""

    def interrupted(
        self, operator: str, error: BaseException, again: Callable[[], Any], flight: int = 0, max_tokens: Any = 0
    ) -> None:
        """Inform the other ranks, if necessary, that ``operator`` raises ``error`` on this rank after its checks.
        ``again`` runs it once more. ``flight``, ``max_tokens``: arguments of the operator."""

    # ------------------------------------------------------------------ the rest

    def empty_rows(self, num_rows: int) -> Tensor:
        """Return [num_rows, H] for combine_gathered. ``num_rows`` is at most ``symmetric_rows``."""

    def compile(self, formats: Formats = ()) -> None:
        """Compile and load all kernels that the operators need, for unquantized rows and for ``formats``.
        Collective, but ranks may return at different times."""

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

    def operations(self) -> int:
        """Return the number of operations that this rank has ended; one that runs may count. Does not wait for running
        kernels."""

    def waited(self) -> list[float]:
        """Return for how long this rank has waited for each rank, in seconds, without its last operations. Does not
        wait for running kernels. On the cute backend it needs ``statistics``."""

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
