"""Ranges in traces of the PyTorch profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling
_profiler_enabled = torch.autograd._profiler_enabled


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show calls of a function as ``name`` in traces. Compiled code shows operators only."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_compiling() or not _profiler_enabled():
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return run

    return wrap
