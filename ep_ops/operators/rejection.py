"""Rejection of a call on all ranks."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch

from ..backends.base import Backend

_is_compiling = torch.compiler.is_compiling


def reject(operator: str, backend: Backend, error: Exception, flight: Any = 0, max_tokens: Any = 0) -> NoReturn:
    """Raise ``error`` on this rank, which does not run ``operator``, and inform the ranks that do.

    Args:
        operator: name of the operator that the other ranks run.
        backend: backend of the communicator.
        error: error of this rank; the other ranks raise a ValueError or RuntimeError with its text.
        flight, max_tokens: arguments of the operator, valid or not; 0 if it has none.
    """
    if not _is_compiling() and not is_tracing():
        backend.calls += 1
        flight = flight if type(flight) is int else 0
        with contextlib.suppress(RuntimeError):  # ranks that run another operator raise by themselves
            backend.reject(operator, str(error), flight, max_tokens)
    raise error


def is_tracing() -> bool:
    """Return whether a mode for fake tensors is active, in which no operator runs."""
    return _fake_mode(_FAKE) is not None


_fake_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def reject_thread(call: str, backend: Backend) -> NoReturn:
    """Raise RuntimeError on all ranks for a call of a communicator that another thread is using. Ranks can differ in
    the order of the threads' calls, so the communicator fails."""
    backend.give_up(
        f"{call} was called while another thread was calling the same communicator; allowed: one thread at a time"
    )
    backend.check_errors()
    raise AssertionError("check_errors raises after give_up")
