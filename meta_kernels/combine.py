"""Fake kernels of combines and their gradients."""

from __future__ import annotations

from torch import Tensor

from .arguments import AnyCombine, AnyCombineBackward, CombineGatheredArgs
from .rows import rows_like, scalars_like


def combine(a: AnyCombine | CombineGatheredArgs) -> Tensor:
    """Return out [T, H]."""
    return rows_like(a.y, a.topk_idx.shape[0])


def combine_backward(a: AnyCombineBackward) -> tuple[Tensor, Tensor]:
    """Return grad_y [num_rows, H] and grad_recv_weights [num_rows] ([0] unless y and recv_weights are given)."""
    weights = None if a.y is None else a.recv_weights
    return rows_like(a.grad_out, a.num_rows), scalars_like(weights, (a.num_rows,), a.grad_out)
