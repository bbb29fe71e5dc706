"""An MoE layer of two micro-batches, whole and in parts, as `ep-ops bench overlap` times it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator, Dispatched, Route
from ep_ops.nn import grouped_mm, interleave, swiglu, swiglu_rows

from .operators import relative_error
from .workloads import Workload, draw_route, measure_traffic


@dataclasses.dataclass
class Batch:
    """A micro-batch; `rows` are what a dispatch brings of it."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad_out: Tensor
    rows: Dispatched


class Layer:
    """Experts of this rank, a shared expert, and two micro-batches. Method `f(i)` runs both, unless it says otherwise.

    All of it is eager code. Collective."""

    def __init__(self, comm: Communicator, workload: Workload, width: int, shared_width: int) -> None:
        self.comm, self.workload = comm, workload
        draw = torch.Generator(comm.device).manual_seed(1 + comm.rank)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=workload.torch_dtype, device=comm.device)

        hidden, local = workload.hidden, comm.num_local_experts
        self.weights = [
            (normal(*shape) * shape[-2] ** -0.5).requires_grad_()
            for shape in ((local, hidden, 2 * width), (local, width, hidden),
                          (hidden, 2 * shared_width), (shared_width, hidden))
        ]  # fmt: skip
        routes = [draw_route(workload, comm.rank, seed, comm.device, comm.world_size) for seed in range(2)]
        capacity = max(measure_traffic(route, workload.experts, comm.world_size).capacity for route in routes)
        self.sizes: dict[str, Any] = {"capacity": capacity, "max_tokens": workload.tokens}
        self.batches = []
        for topk_idx in routes:
            x, grad_out = (normal(workload.tokens, hidden) for _ in range(2))
            weights = torch.rand(topk_idx.shape, generator=draw, device=comm.device) + 0.1
            weights /= weights.sum(1, keepdim=True)
            rows = comm.dispatch(x, topk_idx, weights, zeros=True, **self.sizes)
            self.batches.append(Batch(x, topk_idx, weights, grad_out, rows))

    def experts(self, rows: Tensor, route: Route) -> Tensor:
        y = grouped_mm(rows, self.weights[0], route.offs)
        return grouped_mm(swiglu_rows(y, route), self.weights[1], route.offs)

    def shared(self, x: Tensor) -> Tensor:
        return swiglu(x @ self.weights[2]) @ self.weights[3]

    # ------------------------------------------------------------------ parts

    def gemms(self, i: int = 0) -> list[Tensor]:
        """The experts alone, of rows that are there."""
        return [self.experts(b.rows.x, b.rows.route) for b in self.batches]

    def gemms_train(self, i: int = 0) -> None:
        given = [b.rows.x.detach().requires_grad_() for b in self.batches]
        outs = [self.experts(x, b.rows.route) for x, b in zip(given, self.batches, strict=True)]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])

    def communication(self, i: int = 0) -> None:
        """Dispatch and combine alone."""
        for b in self.batches:
            rows = self.comm.dispatch(b.x, b.topk_idx, b.topk_weights, zeros=True, **self.sizes)
            self.comm.combine(rows.x, rows.route, rows.weights)

    def dispatch(self, i: int = 0) -> Any:
        """Of one."""
        b = self.batches[i % 2]
        return self.comm.dispatch(b.x, b.topk_idx, b.topk_weights, zeros=True, **self.sizes)

    def combine(self, i: int = 0) -> Tensor:
        """Of one."""
        rows = self.batches[i % 2].rows
        return self.comm.combine(rows.x, rows.route, rows.weights)

    def shared_alone(self, i: int = 0) -> Tensor:
        """Of one."""
        return self.shared(self.batches[i % 2].x)

    # ------------------------------------------------------------------ put together

    def serial(self, i: int = 0) -> list[Tensor]:
        found = []
        for b in self.batches:
            rows = self.comm.dispatch(b.x, b.topk_idx, b.topk_weights, zeros=True, **self.sizes)
            found.append(self.comm.combine(self.experts(rows.x, rows.route), rows.route, rows.weights))
        return found

    def steps(self, b: Batch, flight: int) -> Iterator[Tensor | None]:
        comm = self.comm
        dispatch = comm.dispatch_start(b.x, b.topk_idx, b.topk_weights, zeros=True, flight=flight, **self.sizes)
        yield None
        rows = comm.dispatch_wait(dispatch)
        combine = comm.combine_start(self.experts(rows.x, rows.route), rows.route, rows.weights, flight=flight)
        yield None
        yield comm.combine_wait(combine)

    def in_turns(self, i: int = 0) -> list[Tensor]:
        return interleave(*(self.steps(b, flight) for flight, b in enumerate(self.batches)))

    def shared_in_dispatch(self, i: int = 0) -> tuple[Any, Tensor]:
        """Of one: the shared expert between the halves of the dispatch."""
        b = self.batches[i % 2]
        started = self.comm.dispatch_start(b.x, b.topk_idx, b.topk_weights, zeros=True, **self.sizes)
        beside = self.shared(b.x)
        return self.comm.dispatch_wait(started), beside

    def shared_in_combine(self, i: int = 0) -> tuple[Tensor, Tensor]:
        """Of one: likewise in the combine."""
        b = self.batches[i % 2]
        started = self.comm.combine_start(b.rows.x, b.rows.route, b.rows.weights)
        beside = self.shared(b.x)
        return self.comm.combine_wait(started), beside

    def train(self, run: Callable[[], list[Tensor]]) -> Callable[[int], None]:
        """Forward and backward; gradients of weights accumulate."""

        def step(i: int = 0) -> None:
            torch.autograd.backward(run(), [b.grad_out for b in self.batches])

        return step

    def gradients(self, asked: bool) -> None:
        """Whether x and routing weights ask for theirs."""
        for b in self.batches:
            b.x.requires_grad_(asked)
            b.topk_weights.requires_grad_(asked)
            b.x.grad = b.topk_weights.grad = None

    def errors(self) -> dict[str, float]:
        """How far results lie from those of one after the other: the worst row's relative error. In training that is of
        the gradients of x."""
        with torch.no_grad():
            expected, got = self.serial(), self.in_turns()
            rows, _ = self.shared_in_dispatch()
            again = self.comm.combine(rows.x, rows.route, rows.weights)
            of_rows = self.combine()
            found = {
                "in turns": max(relative_error(*pair) for pair in zip(got, expected, strict=True)),
                "shared in dispatch": relative_error(again, of_rows),
                "shared in combine": relative_error(self.shared_in_combine()[0], of_rows),
            }
        grads: list[Any] = []
        for run in (self.serial, self.in_turns):
            self.gradients(True)
            self.train(run)(0)
            grads.append([b.x.grad for b in self.batches])
        self.gradients(False)
        found["in turns, forward + backward"] = max(map(relative_error, grads[1], grads[0]))
        return found
