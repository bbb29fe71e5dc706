"""Rows to tokens, and the gradients of tokens back to rows."""

from __future__ import annotations

from torch import Tensor

from .rows import rows_like, scalars_like


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
    """-> out [T, H]"""
    return rows_like(y, topk_idx.shape[0])


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
    """-> out [T, H]"""
    return rows_like(y, topk_idx.shape[0])


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
    """-> grad_y [num_rows, H], grad_recv_weights [num_rows], or [0] unless y and recv_weights are given"""
    weights = None if y is None else recv_weights
    return rows_like(grad_out, num_rows), scalars_like(weights, (num_rows,), grad_out)
