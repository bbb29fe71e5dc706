"""Stands for kernels that are wrong: what a backend returns, changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

import ep_ops

Change = Callable[[str, list[Tensor]], list[Tensor]]
"""(operator, results) -> results"""


class Changed:
    """Another backend, whose operators' results go through ``change``; tickets do not."""

    def __init__(self, backend: Any, change: Change) -> None:
        self._right, self._change = backend, change
        self._waiting = False  # a wait may run the whole operation, whose results it then changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def changed(self, operator: str, results: Any) -> Any:
        alone = isinstance(results, Tensor)
        changed = self._change(operator, [results] if alone else list(results))
        return changed[0] if alone else tuple(changed)

    def bind(self, spec: Any, a: Any) -> Callable[[Any], Any]:
        run = self._right.bind(spec, a)
        return lambda a: run(a) if self._waiting else self.changed(spec.kind, run(a))

    def wait(self, operator: str, *args: Any) -> Any:
        self._waiting = True
        try:
            results = self._right.wait(operator, *args)
        finally:
            self._waiting = False
        return self.changed(f"{operator}_wait", results)


@contextlib.contextmanager
def using(comm: ep_ops.Communicator, change: Change) -> Iterator[None]:
    """``with using(comm, change): ...``: so does the backend that a communicator in checking mode compares."""
    comm.calls.forget()
    with mock.patch.object(comm.backend, "_backend", Changed(comm.backend._backend, change)):
        yield
    comm.calls.forget()
