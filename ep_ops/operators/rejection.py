"""Rejection of a call on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils import checkpoint

from ..registry import Living, reject_destroyed

_is_compiling = torch.compiler.is_compiling
_END_OF_RECOMPUTATION = getattr(checkpoint, "_StopRecomputationError", ())
"""Raised where a forward pass that activation checkpointing runs again saves the last tensor that backward needs."""


Result = TypeVar("Result")


def take(comm: Living, call: str) -> None:
    """Begin a call of a communicator in this thread; ``comm.busy.release()`` ends it. RuntimeError if the communicator
    was destroyed, or if another thread is calling it."""
    reject_destroyed(comm)
    if not comm.busy.acquire(blocking=False):
        reject_thread(comm, call)


def reject(operator: str, comm: Living, error: Exception, flight: Any = 0, max_tokens: Any = 0) -> NoReturn:
    """Raise ``error`` on this rank, which does not run ``operator``, and inform the ranks that do, unless ``error`` is
    the exception with which activation checkpointing ends recomputation.

    Args:
        operator: name of the operator that the other ranks run.
        comm: the communicator.
        error: error of this rank; the other ranks raise a ValueError or RuntimeError with its text. The name of its
            type precedes the text, unless it is a TypeError, ValueError or RuntimeError.
        flight, max_tokens: arguments of the operator, valid or not; 0 if it has none.
    """
    if not isinstance(error, _END_OF_RECOMPUTATION) and not _is_compiling() and not is_tracing():
        take(comm, operator)
        try:
            comm.backend.calls += 1
            flight = flight if type(flight) is int else 0
            with contextlib.suppress(RuntimeError):  # ranks that run another operator raise by themselves
                ours = isinstance(error, (TypeError, ValueError, RuntimeError))
                reason = str(error) if ours else f"{type(error).__name__}: {error}"
                comm.backend.reject(operator, reason, flight, max_tokens)
        finally:
            comm.busy.release()
    raise error


def rejected(operator: str, comm: Living, run: Callable[[], Result], *, flight: Any = 0, max_tokens: Any = 0) -> Result:
    """Return ``run()``, after which this rank runs ``operator``. In eager code, what it raises is rejected on all
    ranks: they would otherwise run ``operator`` with the next call of this rank, which can be that of another layer.

    Args:
        operator, comm, flight, max_tokens: as for :func:`reject`.
        run: code of the program, such as a router.
    """
    if _is_compiling():  # without `try`, in which Dynamo cannot continue after a graph break
        return run()
    try:
        return run()
    except Exception as error:
        reject(operator, comm, error, flight, max_tokens)


def is_tracing() -> bool:
    """Return whether a mode for fake tensors is active, in which no operator runs."""
    return _fake_mode(_FAKE) is not None


_fake_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def reject_thread(comm: Living, call: str) -> NoReturn:
    """Raise RuntimeError on all ranks for a call of a communicator that another thread is calling, or has destroyed.
    Ranks can differ in the order of the threads' calls, so a communicator of several ranks fails."""
    reject_destroyed(comm)
    why = of_two_threads(call)
    comm.backend.give_up(why)
    comm.backend.check_errors()
    raise RuntimeError(f"communicator {comm.name!r}: {why}")


def of_two_threads(call: str) -> str:
    """Return why a call fails that begins while another thread is calling the communicator."""
    return f"{call} was called while another thread was calling the same communicator; allowed: one thread at a time"
