"""Tokens to rows, and the gradients of rows back to tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .plan import placed
from .rows import rows_like, scalars_like

Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def dispatch(a: Any) -> Dispatched:
    """-> recv_x [capacity, H], recv_weights [capacity] or [0], then what plan returns"""
    return rows_like(a.x, a.capacity), scalars_like(a.topk_weights, (a.capacity,), a.x), *placed(a, a.capacity)


def dispatch_dynamic(a: Any) -> Dispatched:
    """As dispatch, with a number of rows that only the data tell."""
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return rows_like(a.x, num_rows), scalars_like(a.topk_weights, (num_rows,), a.x), *placed(a, num_rows)


def dispatch_planned(a: Any) -> tuple[Tensor, Tensor]:
    """-> recv_x [num_rows, H], recv_weights [num_rows] or [0]"""
    return rows_like(a.x, a.num_rows), scalars_like(a.topk_weights, (a.num_rows,), a.x)


def dispatch_backward(a: Any) -> tuple[Tensor, Tensor]:
    """-> grad_x [T, H] or [0], grad_topk_weights [T, K] or [0]"""
    given = a.grad_recv_x if a.grad_recv_x is not None else a.grad_recv_weights
    if given is None:
        raise ValueError("dispatch_backward: one of grad_recv_x and grad_recv_weights must be given")
    tokens, top_k = a.topk_idx.shape
    grad_x = scalars_like(None, (), given) if a.grad_recv_x is None else rows_like(a.grad_recv_x, tokens)
    return grad_x, scalars_like(a.grad_recv_weights, (tokens, top_k), given)
