"""Kernels that a communicator may launch, found before there is one: the paths of the backend plan every kind of call
with a launcher that notes the kernels which they ask for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cute_kernels.heap import Problem
from meta_kernels.arguments import (
    CombineArgs,
    CombineBackwardArgs,
    CombineGatheredArgs,
    DispatchArgs,
    DispatchBackwardArgs,
    DispatchPlannedArgs,
    PlanArgs,
)

from ...formats import OF_TOKENS
from ...records import GROUPED, TOKEN_MAJOR
from ...specs import PLAIN, DispatchSpec, spec_of
from ..budget import Budget
from .call_state import CallState
from .latency import PARTS, LatencyPath
from .outputs import Outputs
from .sm_model import TokenTraffic
from .throughput import ThroughputPath
from .tuning import Tuning

NOTED = torch.device("meta")
"""Tensors of noted calls have no memory."""
SMS = 132
"""Multiprocessors of the GPU that is planned for. Kernels do not depend on their number."""


class NotingLauncher:
    """A launcher that records the kernels it would launch, and launches nothing."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.multiprocessors, self.device = problem, SMS, NOTED
        self.tuning = Tuning("", problem.world_size)
        self.state = CallState()
        self.found: dict[Any, None] = {}

    def get(self, kernel: Any, **variant: Any) -> Callable[..., Any]:
        self.found[kernel(self.problem, **variant)] = None
        return lambda terms, **numbers: _launch_nothing


def _launch_nothing(*tensors: Any, **by_name: Any) -> None:
    """Stand for a launch."""


def throughput_kernels(problem: Problem, spec: DispatchSpec = PLAIN) -> list[Any]:
    """Return the throughput kernels of all operators or, if the specification names a format, those of dispatches and
    combines in this format."""
    launcher: Any = NotingLauncher(problem)
    # Few SMs for a dispatch, and more for a rank with more rows: every grid that may join another one is planned.
    budget = Budget(2, 4, most_dispatch=2, beyond=SMS // 2 if problem.world_size > 1 else 0)
    traffic = TokenTraffic.of(problem, 1)
    path = ThroughputPath(launcher, Outputs(problem, problem.local_experts, NOTED), budget, traffic)
    for a in _calls(problem, spec):
        named: Any = spec_of(a)
        if isinstance(a, CombineGatheredArgs):
            path.combine_gathered(a, _ints(problem.world_size), 1)
        else:
            path.launches(named, a)(a)
    return list(launcher.found)


def latency_kernels(problem: Problem, tokens: int, spec: DispatchSpec = PLAIN) -> list[Any]:
    """Return the latency kernels of operators of at most so many tokens, whole and split; see
    `throughput_kernels`."""
    launcher: Any = NotingLauncher(problem)
    path = LatencyPath(launcher, Outputs(problem, problem.local_experts, NOTED), tokens)
    for a, part in itertools.product(_calls(problem, spec), PARTS):
        named: Any = spec_of(a)
        if path.takes(named, a):
            path.launches(named, a, part)
    return list(launcher.found)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=NOTED)


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=NOTED)


def _calls(problem: Problem, spec: DispatchSpec) -> Iterator[Any]:
    """Yield the arguments of a call of each kind, with one token, or of each in the format of the specification."""
    p, lists = problem, (_ints(1, problem.top_k), _ints(1, problem.top_k), _ints(4 + problem.world_size + 3))
    local = _ints(p.local_experts), _ints(p.local_experts)
    x, weights, scales = _floats(1, p.hidden_size), _floats(1, p.top_k), _floats(1, 1)
    both = (None, weights)
    sizes = 1, 1, 0, 1, p.local_experts, p.world_size, "ep"
    rows = (GROUPED, TOKEN_MAJOR) if spec.scales_layout in ("", *OF_TOKENS) else (GROUPED,)
    for layout, weighted, given in itertools.product(rows, both, (None, scales) if spec.scales_layout else (None,)):
        received: dict[str, Any] = dict(layout=layout, scales=given, format=spec.format, scales_as=spec.scales_as)
        yield DispatchArgs(x, weighted, lists[0], *sizes, **received)
        yield DispatchPlannedArgs(x, weighted, *lists, *local, 1, 1, 1, "ep", **received)
    route = *lists, *local
    if not spec.format or spec.sums:
        for weighted, residual in itertools.product(both, (None, x)):
            yield CombineArgs(x, weighted, *route, 1, 1, "ep", residual, "", spec.format)
    if spec.format:
        return
    for layout in rows:
        yield PlanArgs(lists[0], *sizes, layout)
        for of_rows, of_weights in ((x, None), (x, weights), (None, weights)):
            yield DispatchBackwardArgs(of_rows, of_weights, *route, 1, 1, "ep", layout)
    if not p.domains:  # rows of other domains are copied
        yield CombineGatheredArgs(x, *route, 1, 1, "ep")
    for weighted in both:
        yield CombineBackwardArgs(x, x, weighted, *route, 1, 1, 1, "ep")
