"""Tensors as models have them, turned into what operators take. What does not fit is left as it is: the operator says
so, on all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Wanted(Protocol):
    """What operators of a communicator take."""

    dtype: torch.dtype  # of rows
    weights_dtype: torch.dtype


def rows(wanted: Wanted, x: Tensor) -> Tensor:
    """[..., H] as [T, H]; under autocast, which leaves activations in several dtypes, in the communicator's."""
    if not isinstance(x, Tensor):
        return x
    if x.dim() > 2:
        x = x.flatten(0, -2)
    if x.dtype != wanted.dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        x = x.to(wanted.dtype)
    return x


def weights(wanted: Wanted, given: Tensor | None) -> Tensor | None:
    """[..., K] as [T, K]; those of a narrower dtype in the one that operators take."""
    if not isinstance(given, Tensor):
        return given
    if given.dim() > 2:
        given = given.flatten(0, -2)
    if given.is_floating_point() and given.dtype.itemsize < wanted.weights_dtype.itemsize:
        given = given.to(wanted.weights_dtype)
    return given


def ids(topk_idx: Tensor) -> Tensor:
    """[..., K] as int32 [T, K], of int64."""
    if not isinstance(topk_idx, Tensor):
        return topk_idx
    if topk_idx.dim() > 2:
        topk_idx = topk_idx.flatten(0, -2)
    return topk_idx.to(torch.int32) if topk_idx.dtype == torch.int64 else topk_idx


def batch(topk_idx: Tensor) -> tuple[int, ...] | None:
    """The dimensions that stand for tokens, where there are several."""
    return tuple(topk_idx.shape[:-1]) if isinstance(topk_idx, Tensor) and topk_idx.dim() > 2 else None
