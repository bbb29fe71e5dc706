"""Rows and the scalars that travel with them."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of routing weights and of sums of rows with this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_like(x: Tensor, count: int | torch.SymInt) -> Tensor:
    """[count, H] of x's dtype."""
    return x.new_empty((count, x.shape[1]))


def scalars_like(weights: Tensor | None, shape: tuple[int | torch.SymInt, ...], beside: Tensor) -> Tensor:
    """``shape`` of the weights' dtype; without weights [0], of the dtype that weights of the rows ``beside`` have."""
    if weights is None:
        return beside.new_empty((0,), dtype=exact_dtype(beside.dtype))
    return weights.new_empty(shape)
