"""Fake kernel of a plan: the integer tensors of a route."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import TOKEN_MAJOR, AnySizedDispatch, DispatchDynamicArgs, PlanArgs

Placed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def arrivals_size(num_rows: Any, world_size: int) -> Any:
    """Return the number of ints in ``arrivals`` for ``num_rows`` rows, symbolic if these are."""
    return 4 * num_rows + world_size + 3


def plan(a: PlanArgs) -> Placed:
    """Return the results of :func:`placed` for ``capacity`` rows."""
    return placed(a, a.capacity)


def placed(a: PlanArgs | AnySizedDispatch | DispatchDynamicArgs, num_rows: int | torch.SymInt) -> Placed:
    """Return send_rows [T, K], arrivals [4 R + W + 3], offs, counts and dropped [El], and recv_idx, all int32.

    R is ``num_rows``. recv_idx is [R, K] for token-major rows, else [0].
    """
    tokens, top_k = a.topk_idx.shape
    lists, local = (arrivals_size(num_rows, a.world_size),), (a.num_local_experts,)
    ids = (num_rows, top_k) if a.layout == TOKEN_MAJOR else (0,)
    shapes: list[tuple[Any, ...]] = [(tokens, top_k), lists, local, local, local, ids]
    made = (a.topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)
    send_rows, arrivals, offs, counts, dropped, recv_idx = made
    return send_rows, arrivals, offs, counts, dropped, recv_idx
