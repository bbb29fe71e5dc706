"""The integer tensors of a route."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def plan(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> send_rows [T, K], recv_rows [W, max_tokens, K], offs [El], counts [El], dropped [El], all int32"""
    tokens, top_k = a.topk_idx.shape
    local = (a.num_local_experts,)
    shapes: list[tuple[int, ...]] = [(tokens, top_k), (a.world_size, a.max_tokens, top_k), local, local, local]
    send_rows, recv_rows, offs, counts, dropped = (a.topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return send_rows, recv_rows, offs, counts, dropped
