"""Tokens to rows, and the gradients of rows back to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import route
from .rows import rows_like, scalars_like

Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


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
) -> Dispatched:
    """-> recv_x [capacity, H], recv_weights [capacity] or [0], then what plan returns"""
    planned = route(topk_idx, max_tokens, num_local_experts, world_size)
    return rows_like(x, capacity), scalars_like(topk_weights, (capacity,), x), *planned


def dispatch_dynamic(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    alignment: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
    comm: str,
) -> Dispatched:
    """As dispatch, with a number of rows that only the data tell."""
    num_rows = torch.library.get_ctx().new_dynamic_size()
    planned = route(topk_idx, max_tokens, num_local_experts, world_size)
    return rows_like(x, num_rows), scalars_like(topk_weights, (num_rows,), x), *planned


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
    """-> recv_x [num_rows, H], recv_weights [num_rows] or [0]"""
    return rows_like(x, num_rows), scalars_like(topk_weights, (num_rows,), x)


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
    """-> grad_x [T, H] or [0], grad_topk_weights [T, K] or [0]"""
    given = grad_recv_x if grad_recv_x is not None else grad_recv_weights
    if given is None:
        raise ValueError("dispatch_backward: one of grad_recv_x and grad_recv_weights must be given")
    grad_x = scalars_like(None, (), given) if grad_recv_x is None else rows_like(grad_recv_x, topk_idx.shape[0])
    return grad_x, scalars_like(grad_recv_weights, tuple(topk_idx.shape), given)
