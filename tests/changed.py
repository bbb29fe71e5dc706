"""Stands for kernels that are wrong: what a backend returns, changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ep_ops

Change = Callable[[str, list[Tensor]], list[Tensor]]
"""(operator, results) -> results"""


class Changed:
    """Another backend, whose operators' results go through ``change``; tickets do not."""

    def __init__(self, backend: Any, change: Change) -> None:
        self._right, self._change = backend, change

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._right, name)
        if not callable(found) or not hasattr(torch.ops.ep, name) and name != "wait":
            return found

        def run(*args: Any) -> Any:
            operator = f"{args[1]}_wait" if name == "wait" else name
            results = found(*args)
            alone = isinstance(results, torch.Tensor)
            changed = self._change(operator, [results] if alone else list(results))
            return changed[0] if alone else tuple(changed)

        return run


def using(comm: ep_ops.Communicator, change: Change) -> Any:
    """``with using(comm, change): ...``: so does the backend that a communicator in checking mode compares."""
    return mock.patch.object(comm.backend, "_backend", Changed(comm.backend._backend, change))
