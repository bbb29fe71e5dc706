"""What runs when an operator is called on a CPU or a GPU: find the communicator, check, hand to its backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meta_kernels import FAKES

from .. import checks, communicator
from . import ordering
from .eager import IMPLEMENTATIONS
from .schema import LIBRARY, SCHEMAS


def plan(
    topk_idx: Tensor,
    capacity: int,
    alignment: int,
    slots: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
    comm: str,
) -> tuple[Tensor, ...]:
    """Where every (token, k) goes; moves no rows."""
    c = communicator.get(comm)
    checks.check_plan(c, topk_idx, capacity, alignment, slots, max_tokens, num_local_experts, world_size)
    return c.backend.plan(topk_idx, capacity, alignment, slots, max_tokens)


def dispatch(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    capacity: int,
    alignment: int,
    slots: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
    comm: str,
) -> tuple[Tensor, ...]:
    """Plan, and bring the tokens to their experts."""
    c = communicator.get(comm)
    checks.check_dispatch(
        c, x, topk_weights, topk_idx, capacity, alignment, slots, max_tokens, num_local_experts, world_size
    )
    return c.backend.dispatch(x, topk_weights, topk_idx, capacity, alignment, slots, max_tokens)


def dispatch_dynamic(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    alignment: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
    comm: str,
) -> tuple[Tensor, ...]:
    """dispatch into exactly as many rows as come here; waits for the device once."""
    c = communicator.get(comm)
    checks.check_dispatch_dynamic(c, x, topk_weights, topk_idx, alignment, max_tokens, num_local_experts, world_size)
    return c.backend.dispatch_dynamic(x, topk_weights, topk_idx, alignment, max_tokens)


def dispatch_planned(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    num_rows: int,
    alignment: int,
    comm: str,
) -> tuple[Tensor, Tensor]:
    """Bring tokens to their experts along a route that is known already."""
    c = communicator.get(comm)
    route = (topk_idx, send_rows, recv_rows, offs, counts)
    checks.check_dispatch_planned(c, x, topk_weights, *route, num_rows, alignment)
    return c.backend.dispatch_planned(x, topk_weights, route, num_rows, alignment)


def combine(
    y: Tensor,
    recv_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    alignment: int,
    comm: str,
    residual: Tensor | None = None,
) -> Tensor:
    """Bring the rows home to their tokens and add them up."""
    c = communicator.get(comm)
    route = (topk_idx, send_rows, recv_rows, offs, counts)
    checks.check_combine(c, y, recv_weights, *route, alignment, residual)
    return c.backend.combine(y, recv_weights, route, alignment, residual)


def combine_gathered(
    y: Tensor,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    alignment: int,
    comm: str,
) -> Tensor:
    """combine without weights; the rows lie in symmetric memory, where their owners fetch them."""
    c = communicator.get(comm)
    route = (topk_idx, send_rows, recv_rows, offs, counts)
    checks.check_combine_gathered(c, y, *route, alignment)
    return c.backend.combine_gathered(y, route, alignment)


def dispatch_backward(
    grad_recv_x: Tensor | None,
    grad_recv_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    alignment: int,
    comm: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of dispatch's rows and weights, brought home."""
    c = communicator.get(comm)
    route = (topk_idx, send_rows, recv_rows, offs, counts)
    checks.check_dispatch_backward(c, grad_recv_x, grad_recv_weights, *route, alignment)
    return c.backend.dispatch_backward(grad_recv_x, grad_recv_weights, route, alignment)


def combine_backward(
    grad_out: Tensor,
    y: Tensor | None,
    recv_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    num_rows: int,
    alignment: int,
    comm: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of combine's result, brought to the rows and their weights."""
    c = communicator.get(comm)
    route = (topk_idx, send_rows, recv_rows, offs, counts)
    checks.check_combine_backward(c, grad_out, y, recv_weights, *route, num_rows, alignment)
    return c.backend.combine_backward(grad_out, y, recv_weights, route, num_rows, alignment)


def dispatch_start(x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, *terms: Any) -> Tensor:
    """The half of dispatch that sends."""
    *sizes, comm = terms
    c = communicator.get(comm)
    checks.check_dispatch(c, x, topk_weights, topk_idx, *sizes)
    return c.backend.dispatch_start(x, topk_weights, topk_idx, *sizes[:4])


def dispatch_wait(
    ticket: Tensor, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, *terms: Any
) -> tuple[Tensor, ...]:
    """The half of dispatch that receives."""
    *sizes, comm = terms
    c = communicator.get(comm)
    checks.check_dispatch(c, x, topk_weights, topk_idx, *sizes)
    return c.backend.dispatch_wait(x, topk_weights, topk_idx, *sizes[:4])


def combine_start(y: Tensor, recv_weights: Tensor | None, *rest: Any) -> Tensor:
    """The half of combine that sends."""
    *route, alignment, comm = rest
    c = communicator.get(comm)
    checks.check_combine(c, y, recv_weights, *rest[:-1])
    return c.backend.combine_start(y, recv_weights, tuple(route), alignment)


def combine_wait(ticket: Tensor, y: Tensor, recv_weights: Tensor | None, *rest: Any) -> Tensor:
    """The half of combine that receives."""
    *route, alignment, comm = rest
    c = communicator.get(comm)
    checks.check_combine(c, y, recv_weights, *rest[:-1])
    return c.backend.combine_wait(y, recv_weights, tuple(route), alignment)


for _f in (
    plan, dispatch, dispatch_dynamic, dispatch_planned, combine, combine_gathered, dispatch_backward,
    combine_backward, dispatch_start, dispatch_wait, combine_start, combine_wait,
):  # fmt: skip
    IMPLEMENTATIONS[_f.__name__] = _f


def _traced(fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, which runs whenever something is traced: early enough to tell Inductor about the operators."""

    @functools.wraps(fake)
    def traced(*args: Any) -> Any:
        ordering.install()
        return fake(*args)

    return traced


for _name in SCHEMAS:
    # Opaque to Dynamo: called from a function that broke its graph, a backend's Python must not be traced into.
    # (torch.compiler.disable would do, but imports Dynamo at once; this one does so in the first call.)
    _opaque = torch._disable_dynamo(IMPLEMENTATIONS[_name])
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _opaque, _key)
    torch.library.register_fake(f"ep::{_name}", _traced(FAKES[_name]), lib=LIBRARY)
