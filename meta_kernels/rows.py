"""Rows, and the scalars that are sent with them."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of routing weights and of sums of rows of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_like(x: Tensor, count: int | torch.SymInt) -> Tensor:
    """Return an empty tensor [count, H] of x's dtype."""
    return x.new_empty((count, x.shape[1]))


def scalars_like(weights: Tensor | None, shape: tuple[int | torch.SymInt, ...], rows: Tensor) -> Tensor:
    """Return an empty tensor of ``shape`` and the weights' dtype; if weights is None, [0] of their dtype."""
    if weights is None:
        return rows.new_empty((0,), dtype=exact_dtype(rows.dtype))
    return weights.new_empty(shape)
