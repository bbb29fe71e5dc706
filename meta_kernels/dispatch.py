"""Fake kernels of dispatches and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import (
    TOKEN_MAJOR,
    AnyDispatch,
    AnyDispatchBackward,
    AnySizedDispatch,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
)
from .formats import ELEMENT, Grid, format_of, layout_of, scales_shape
from .plan import placed
from .rows import rows_like, scalars_like

Received = tuple[Tensor, Tensor, Tensor]


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


def dispatch_backward(a: AnyDispatchBackward) -> tuple[Tensor, Tensor]:
    """Return grad_x [T, H] or [0], and grad_topk_weights [T, K] or [0]."""
    given = a.grad_recv_x if a.grad_recv_x is not None else a.grad_recv_weights
    if given is None:
        raise ValueError("dispatch_backward: one of grad_recv_x and grad_recv_weights must be given")
    tokens, top_k = a.topk_idx.shape
    grad_x = scalars_like(None, (), given) if a.grad_recv_x is None else rows_like(a.grad_recv_x, tokens)
    return grad_x, scalars_like(a.grad_recv_weights, (tokens, top_k), given)
