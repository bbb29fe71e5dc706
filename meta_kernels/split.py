"""Fake kernels of split operations: a start returns a ticket, a wait returns what the whole operation returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import (
    AnyDispatchBackward,
    CombineBackwardStartArgs,
    CombineBackwardWaitArgs,
    CombineStartArgs,
    DispatchBackwardWaitArgs,
    DispatchStartArgs,
)
from .rows import exact_dtype

Gradients = tuple[Tensor, Tensor]


def dispatch_start(a: DispatchStartArgs | CombineStartArgs | AnyDispatchBackward | CombineBackwardStartArgs) -> Tensor:
    """Return a ticket, float32 [0]."""
    return a.topk_idx.new_empty(0, dtype=torch.float32)


combine_start = dispatch_backward_start = combine_backward_start = dispatch_start


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
