"""Calls of operators on a backend, or on one path of the cute backend, from tensors, sizes and formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ep_ops.records import Route
from ep_ops.specs import DispatchSpec, spec_of
from meta_kernels.arguments import (
    CombineArgs,
    CombineBackwardArgs,
    CombineBackwardStartArgs,
    CombineGatheredArgs,
    CombineStartArgs,
    DispatchArgs,
    DispatchBackwardArgs,
    DispatchBackwardStartArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    DispatchStartArgs,
    PlanArgs,
)

Tensor = torch.Tensor
WHOLE, SEND, RECEIVE = (True, True), (True, False), (False, True)


class Sizes(NamedTuple):
    """Sizes and layout of a new route."""

    capacity: int
    alignment: int
    slots: int
    max_tokens: int
    layout: str = "grouped"


class Delivery(NamedTuple):
    """The format in which rows arrive."""

    scales: Tensor | None = None
    format: str = ""
    scales_as: str = ""
    zeros: bool = True


PLAIN = Delivery()


def row_format(delivery: Delivery) -> DispatchSpec:
    """Return the specification of dispatches in a format, which selects their kernels."""
    scales, format, scales_as, zeros = delivery
    return DispatchSpec("dispatch", "grouped", False, format, scales_as, scales is not None, zeros)


def _along(route: Route) -> tuple[Any, ...]:
    return *route.tensors, route.alignment, route.max_tokens, "ep"


class On:
    """A backend or a path. All that is not an operator is its own."""

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "target", target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.target, name, value.target if isinstance(value, On) else value)

    def __delattr__(self, name: str) -> None:
        delattr(self.target, name)

    def bound(self, a: Any, part: tuple[bool, bool] = WHOLE) -> Callable[[], Any]:
        """Return what runs a call with these arguments."""
        spec, target = spec_of(a), self.target
        assert spec is not None
        if type(target).__name__ == "LatencyPath":
            return lambda: target.launches(spec, a, part)(a)
        if type(target).__name__ == "ThroughputPath":
            return lambda: target.launches(spec, a)(a)
        run = target.bind(spec, a)
        return lambda: run(a)

    def _own(self) -> tuple[int, int, str]:
        if hasattr(self.target, "ranks"):  # the reference backend
            ranks = self.target.ranks
            return ranks.experts_per_rank[ranks.rank], ranks.world_size, "ep"
        problem = self.target._problem
        return problem.experts_per_rank[0], problem.world_size, "ep"

    def _sizes(self, sizes: Sizes) -> tuple[Any, ...]:
        return *sizes[:4], *self._own(), sizes.layout

    def plan(self, topk_idx: Tensor, sizes: Sizes, *num_rows: int) -> Any:
        a = PlanArgs(topk_idx, *self._sizes(sizes))
        return self.target.plan(a, *num_rows) if num_rows else self.bound(a)()

    def dispatch_args(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery = PLAIN
    ) -> DispatchArgs:
        return DispatchArgs(x, topk_weights, topk_idx, *self._sizes(sizes), *delivery)

    def dispatch(self, *args: Any, send: bool = True) -> Any:
        return self.bound(self.dispatch_args(*args), WHOLE if send else RECEIVE)()

    def send_dispatch(self, *args: Any) -> Any:
        return self.bound(self.dispatch_args(*args), SEND)()

    def dispatch_dynamic(self, x: Any, topk_weights: Any, topk_idx: Tensor, sizes: Sizes, delivery: Delivery) -> Any:
        _, alignment, _, max_tokens, layout = sizes
        a = DispatchDynamicArgs(x, topk_weights, topk_idx, alignment, max_tokens, *self._own(), layout, *delivery)
        return self.bound(a)()

    def dispatch_planned(self, x: Tensor, topk_weights: Any, route: Route, delivery: Delivery = PLAIN) -> Any:
        along = *route.tensors, route.num_rows, route.alignment, route.max_tokens, "ep", route.layout, route.slots
        return self.bound(DispatchPlannedArgs(x, topk_weights, *along, *delivery))()

    def along(self, kind: str, x: Tensor, topk_weights: Any, route: Route, delivery: Delivery = PLAIN) -> Any:
        scales, format, scales_as, zeros = delivery
        spec = DispatchSpec(
            "dispatch_planned", route.layout, topk_weights is not None, format, scales_as, scales is not None, zeros
        )
        return self.target.along(kind, spec, x, topk_weights, scales, route)

    def combine_args(
        self, y: Tensor, recv_weights: Any, route: Route, residual: Tensor | None = None, format: str = ""
    ) -> CombineArgs:
        return CombineArgs(y, recv_weights, *_along(route), residual, "", format)

    def combine(
        self, y: Tensor, recv_weights: Any, route: Route, residual: Any = None, format: str = "", send: bool = True
    ) -> Any:
        if format and not format.startswith("wire:"):
            format = f"wire:{format}"
        return self.bound(self.combine_args(y, recv_weights, route, residual, format), WHOLE if send else RECEIVE)()

    def send_combine(self, y: Tensor, recv_weights: Any, route: Route, format: str = "") -> Any:
        return self.bound(self.combine_args(y, recv_weights, route, None, format and f"wire:{format}"), SEND)()

    def combine_gathered(self, first: Any, *rest: Any) -> Any:
        if isinstance(first, Route):  # (route, bases, rows), of a path
            return self.target.combine_gathered(CombineGatheredArgs(first.topk_idx, *_along(first)), *rest)
        return self.bound(CombineGatheredArgs(first, *_along(*rest)))()

    def dispatch_backward(self, grad_recv_x: Any, grad_recv_weights: Any, route: Route) -> Any:
        return self.bound(DispatchBackwardArgs(grad_recv_x, grad_recv_weights, *_along(route), route.layout))()

    def combine_backward(self, grad_out: Tensor, y: Any, recv_weights: Any, route: Route) -> Any:
        along = *route.tensors, route.num_rows, route.alignment, route.max_tokens, "ep"
        return self.bound(CombineBackwardArgs(grad_out, y, recv_weights, *along))()

    def start(self, flight: int, operator: str, *args: Any) -> Tensor:
        a: Any
        if operator == "dispatch":
            a = DispatchStartArgs(*self.dispatch_args(*args), flight)
        elif operator == "combine":
            y, recv_weights, route, _, format = args
            a = CombineStartArgs(y, recv_weights, *_along(route), flight, format)
        elif operator == "dispatch_backward":
            *grads, route = args
            a = DispatchBackwardStartArgs(*grads, *_along(route), route.layout, flight)
        else:
            *given, route = args
            along = *route.tensors, route.num_rows, route.alignment, route.max_tokens, "ep"
            a = CombineBackwardStartArgs(*given, *along, flight)
        spec = spec_of(a)
        return self.target.bind_start(spec, a)(a)

    def wait(self, flight: int, operator: str, again: Callable[[], Any] = lambda: None) -> Any:
        return self.target.wait(operator, flight, again)
