"""Fake kernels: shapes, dtypes and devices of what every ``ep`` operator returns, for tracing and compilation.

The function of an operator's name takes the operator's arguments as a record with the schema's names. Sizes come from
the arguments alone and not from a communicator, so a compiled graph that is loaded from a cache is valid for any
communicator of that name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import (
    TOKEN_MAJOR,
    AnyCombine,
    AnyCombineBackward,
    AnyDispatch,
    AnyDispatchBackward,
    AnySizedDispatch,
    AnyStart,
    CombineBackwardWaitArgs,
    CombineGatheredArgs,
    DispatchBackwardWaitArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    PlanArgs,
)
from .formats import ELEMENT, Grid, format_of, layout_of, scales_shape

Placed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Received = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor]


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of routing weights and of sums of rows of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_like(x: Tensor, count: int | torch.SymInt) -> Tensor:
    """Return an empty tensor [count, H] of x's dtype."""
    return x.new_empty((count, x.shape[1]))


def scalars_like(weights: Tensor | None, shape: tuple[int | torch.SymInt, ...], rows: Tensor) -> Tensor:
    """Return an empty tensor of ``shape`` and the weights' dtype; if weights is None, [0] of their dtype."""
    if weights is None:
        return rows.new_empty((0,), dtype=exact_dtype(rows.dtype))
    return weights.new_empty(shape)


def arrivals_size(num_rows: Any, world_size: int) -> Any:
    """Return the number of ints in ``arrivals`` for ``num_rows`` rows, symbolic if these are."""
    return 4 * num_rows + world_size + 3


def plan(a: PlanArgs) -> Placed:
    """Return the results of :func:`placed` for ``capacity`` rows."""
    return placed(a, a.capacity)


def placed(a: PlanArgs | AnySizedDispatch | DispatchDynamicArgs, num_rows: int | torch.SymInt) -> Placed:
    """Return send_rows [T, K], arrivals [4 R + W + 3], offs, counts and dropped [El], and recv_idx, all int32.

    R is ``num_rows``. recv_idx is [R, K] for token-major rows, else [0].
    """
    tokens, top_k = a.topk_idx.shape
    lists, local = (arrivals_size(num_rows, a.world_size),), (a.num_local_experts,)
    ids = (num_rows, top_k) if a.layout == TOKEN_MAJOR else (0,)
    shapes: list[tuple[Any, ...]] = [(tokens, top_k), lists, local, local, local, ids]
    made = (a.topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)
    send_rows, arrivals, offs, counts, dropped, recv_idx = made
    return send_rows, arrivals, offs, counts, dropped, recv_idx


def dispatch(a: AnySizedDispatch) -> tuple[Tensor, ...]:
    """Return the results of :func:`received` for ``capacity`` rows, then those of a plan."""
    return *received(a, a.capacity, a.slots, a.num_local_experts), *placed(a, a.capacity)


def dispatch_dynamic(a: DispatchDynamicArgs) -> tuple[Tensor, ...]:
    """Return what :func:`dispatch` does, with a number of rows that depends on data."""
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return *received(a, num_rows, 0, a.num_local_experts), *placed(a, num_rows)


def dispatch_planned(a: DispatchPlannedArgs) -> Received:
    """Return the results of :func:`received` for ``num_rows`` rows."""
    return received(a, a.num_rows, a.slots, a.offs.shape[0])


def received(a: AnyDispatch, num_rows: int | torch.SymInt, slots: int | torch.SymInt, groups: int) -> Received:
    """Return recv_x [num_rows, H], recv_scales or [0], recv_weights [num_rows] (token-major [num_rows, K]) or [0]."""
    per_row = a.topk_idx.shape[1:] if a.layout == TOKEN_MAJOR else ()
    recv_weights = scalars_like(a.topk_weights, (num_rows, *per_row), a.x)
    form = format_of(a.format) if a.format else None
    if form is None or form.wire:
        return rows_like(a.x, num_rows), a.x.new_empty((0,), dtype=torch.float32), recv_weights
    hidden = a.x.shape[1]
    shape, dtype = scales_shape(form, layout_of(form, a.scales_as), Grid(num_rows, slots, groups, hidden))
    return a.x.new_empty((num_rows, hidden), dtype=ELEMENT), a.x.new_empty(shape, dtype=dtype), recv_weights


def dispatch_backward(a: AnyDispatchBackward) -> Gradients:
    """Return grad_x [T, H] or [0], and grad_topk_weights [T, K] or [0]."""
    given = a.grad_recv_x if a.grad_recv_x is not None else a.grad_recv_weights
    if given is None:
        raise ValueError("dispatch_backward: one of grad_recv_x and grad_recv_weights must be given")
    tokens, top_k = a.topk_idx.shape
    grad_x = scalars_like(None, (), given) if a.grad_recv_x is None else rows_like(a.grad_recv_x, tokens)
    return grad_x, scalars_like(a.grad_recv_weights, (tokens, top_k), given)


def combine(a: AnyCombine | CombineGatheredArgs) -> Tensor:
    """Return out [T, H]."""
    return rows_like(a.y, a.topk_idx.shape[0])


def combine_backward(a: AnyCombineBackward) -> Gradients:
    """Return grad_y [num_rows, H] and grad_recv_weights [num_rows] ([0] unless y and recv_weights are given)."""
    weights = None if a.y is None else a.recv_weights
    return rows_like(a.grad_out, a.num_rows), scalars_like(weights, (a.num_rows,), a.grad_out)


def dispatch_start(a: AnyStart) -> Tensor:
    """Return a ticket, float32 [0]."""
    return a.topk_idx.new_empty(0, dtype=torch.float32)


combine_start = dispatch_backward_start = combine_backward_start = dispatch_start
dispatch_wait, combine_wait, combine_gathered = dispatch, combine, combine


def dispatch_backward_wait(a: DispatchBackwardWaitArgs) -> Gradients:
    """Return grad_x [tokens, hidden] ([0] if hidden is 0) and grad_topk_weights [tokens, top_k] ([0] if top_k is 0)."""
    return _gradients(a, (a.tokens, a.hidden), (a.tokens, a.top_k) if a.top_k else (0,))


def combine_backward_wait(a: CombineBackwardWaitArgs) -> Gradients:
    """Return grad_y [num_rows, hidden] and grad_recv_weights [num_rows] or [0]."""
    return _gradients(a, (a.num_rows, a.hidden), (a.num_rows,) if a.scalars else (0,))


def _gradients(
    a: DispatchBackwardWaitArgs | CombineBackwardWaitArgs, rows: tuple[Any, Any], scalars: tuple[Any, ...]
) -> Gradients:
    exact = exact_dtype(a.dtype)
    grad_rows = a.ticket.new_empty(rows, dtype=a.dtype) if rows[1] else a.ticket.new_empty(0, dtype=exact)
    return grad_rows, a.ticket.new_empty(scalars, dtype=exact)
