"""The integer tensors of a route."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Placed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def plan(a: Any) -> Placed:
    """-> what a plan into ``capacity`` rows returns"""
    return placed(a, a.capacity)


def placed(a: Any, num_rows: int | torch.SymInt) -> Placed:
    """-> send_rows [T, K], arrivals [4 R + W + 3], offs [El], counts [El], dropped [El], all int32; R = ``num_rows``"""
    tokens, top_k = a.topk_idx.shape
    local = (a.num_local_experts,)
    shapes: list[tuple[Any, ...]] = [(tokens, top_k), (4 * num_rows + a.world_size + 3,), local, local, local]
    send_rows, arrivals, offs, counts, dropped = (a.topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return send_rows, arrivals, offs, counts, dropped
