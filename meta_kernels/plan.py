"""The integer tensors of a route."""

from __future__ import annotations

import torch
from torch import Tensor


def plan(
    topk_idx: Tensor,
    capacity: int,
    alignment: int,
    slots: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
    comm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> send_rows [T, K], recv_rows [W, max_tokens, K], offs [El], counts [El], dropped [El], all int32"""
    return route(topk_idx, max_tokens, num_local_experts, world_size)


def route(
    topk_idx: Tensor, max_tokens: int, num_local_experts: int, world_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What planning returns, whichever operator plans."""
    tokens, top_k = topk_idx.shape
    int32 = torch.int32
    return (
        topk_idx.new_empty((tokens, top_k), dtype=int32),
        topk_idx.new_empty((world_size, max_tokens, top_k), dtype=int32),
        topk_idx.new_empty((num_local_experts,), dtype=int32),
        topk_idx.new_empty((num_local_experts,), dtype=int32),
        topk_idx.new_empty((num_local_experts,), dtype=int32),
    )
