"""Tokens to token-major rows. The gradients of these are shaped as any dispatch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatch import Arrived, arrived
from .plan import placed


def dispatch_tokens(a: Any) -> tuple[Tensor, ...]:
    """-> recv_x [capacity, H], recv_scales or [0], recv_weights [capacity, K] or [0], what plan returns, recv_idx
    int32 [capacity, K]"""
    return _dispatched(a, a.capacity)


def dispatch_tokens_dynamic(a: Any) -> tuple[Tensor, ...]:
    """As dispatch_tokens, with a number of rows that only the data tell."""
    return _dispatched(a, torch.library.get_ctx().new_dynamic_size())


def dispatch_tokens_planned(a: Any) -> Arrived:
    """-> recv_x [num_rows, H], recv_scales or [0], recv_weights [num_rows, K] or [0]"""
    return arrived(a, a.num_rows, 0, 1, a.topk_idx.shape[1:])


def _dispatched(a: Any, num_rows: int | torch.SymInt) -> tuple[Tensor, ...]:
    top_k = a.topk_idx.shape[1]
    recv_idx = a.topk_idx.new_empty((num_rows, top_k), dtype=torch.int32)
    return *arrived(a, num_rows, 0, 1, (top_k,)), *placed(a, num_rows), recv_idx
