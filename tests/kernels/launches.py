"""A launcher that launches nothing, for tests of what paths hand to their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from operate import On

from cute_kernels.heap import Problem
from cute_kernels.internode.wire import Wire
from cute_kernels.launch import names
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute import outputs
from ep_ops.backends.cute.call_state import CallState
from ep_ops.backends.cute.latency import LatencyPath
from ep_ops.backends.cute.sm_model import TokenTraffic
from ep_ops.backends.cute.throughput import ThroughputPath
from ep_ops.backends.cute.tuning import Tuning

PROBLEM = Problem(3, (3, 0, 5), 4, 64, "bf16", 512)


def across(wire: Wire) -> Problem:
    """The same of four ranks in two NVLink domains."""
    return dataclasses.replace(
        PROBLEM, world_size=4, experts_per_rank=(2,) * 4, domains=((0, 3), (1, 2)), wire=wire
    )  # fmt: skip


NO_FAILURES: Any = SimpleNamespace(
    check=lambda failures_alone=False: None, check_last=lambda: None, has_failed=lambda: False
)
"""Stands for a `Failures` whose kernels have reported nothing."""


class Recorder:
    """Stands for a `Launcher`; notes (kernel, terms, arguments) of each launch."""

    def __init__(self, problem: Problem, multiprocessors: int, gpu: str = "") -> None:
        self.problem, self.multiprocessors = problem, multiprocessors
        self.tuning = Tuning(gpu, problem.world_size)
        self.device, self.state = torch.device("cpu"), CallState()
        self.launched: list[tuple[Any, int, dict[str, Any]]] = []

    def get(self, kernel: Any, **variant: Any) -> Callable[..., None]:
        tensors, numbers = names(kernel.Args)

        def bind(terms: int, **values: Any) -> Callable[..., None]:
            assert set(values) == set(numbers) and all(type(value) is int for value in values.values())

            def launch(*given: Any, **by_name: Any) -> None:
                assert len(given) <= len(tensors) and set(by_name) <= set(tensors[len(given) :])
                on = {**dict(zip(tensors, given, strict=False)), **by_name}
                assert all(value is None or isinstance(value, torch.Tensor) for value in on.values())
                self.launched.append((kernel(self.problem, **variant), terms, {**on, **values}))

            return launch

        return bind


def noting(made: Any, problem: Problem, tokens: int, took: list[Any]) -> None:
    """Give a cute backend paths that note (name, specification) of each call; latency kernels take up to `tokens`."""
    made.begin = lambda: None
    recorder: Any = Recorder(problem, 132)
    made.latency = LatencyPath(recorder, outputs.Outputs(problem, 8, recorder.device), tokens)
    made.throughput = SimpleNamespace()
    for path, name in ((made.latency, "latency"), (made.throughput, "throughput")):
        path.launches = lambda spec, a, name=name: lambda a: took.append((name, spec))


def allocate_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(outputs, "allocator", lambda device: lambda: new)


def throughput(
    budget: Budget, monkeypatch: pytest.MonkeyPatch, problem: Problem = PROBLEM, multiprocessors: int = 132
) -> tuple[Any, Recorder]:
    """The path of rank 0, and what notes its launches."""
    allocate_on_cpu(monkeypatch)
    recorder: Any = Recorder(problem, multiprocessors)
    traffic = TokenTraffic.of(problem, 1)
    made = outputs.Outputs(problem, problem.experts_per_rank[0], recorder.device)
    return On(ThroughputPath(recorder, made, budget, traffic)), recorder


def joins(kernel: Any) -> bool:
    return isinstance(kernel, Pull) and kernel.joins
