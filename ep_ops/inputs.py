"""Conversion of a model's tensors to what operators accept.

Tensors that cannot be converted are returned unchanged; the operator then raises the error on all ranks.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from .group.survivors import ExpertIds


class Wanted(Protocol):
    """The attributes of a communicator that say what its operators accept."""

    dtype: torch.dtype  # of rows
    weights_dtype: torch.dtype
    expert_ids: ExpertIds | None  # after experts were lost


def to_plan(wanted: Wanted, topk_idx: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return the ids for a plan and the ``batch`` of its route."""
    if wanted.expert_ids is None and getattr(topk_idx, "dtype", None) is torch.int32 and topk_idx.ndim == 2:
        return topk_idx, None
    return _own(wanted, topk_idx), _batch(topk_idx)


def to_send(
    wanted: Wanted, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """Return the tensors for a dispatch and the ``batch`` of its route."""
    if (  # no conversion is needed, which is checked fast for decode steps
        wanted.expert_ids is None
        and getattr(x, "dtype", None) is wanted.dtype
        and getattr(topk_idx, "dtype", None) is torch.int32
        and topk_idx.ndim == x.ndim == 2
        and (topk_weights is None or getattr(topk_weights, "dtype", None) is wanted.weights_dtype)
    ):
        return x, topk_idx, topk_weights, None
    return rows(wanted, x), _own(wanted, topk_idx), weights(wanted, topk_weights), _batch(topk_idx)


def with_weights(wanted: Wanted, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return rows and their weights."""
    if getattr(x, "dtype", None) is not wanted.dtype or x.ndim != 2:
        x = rows(wanted, x)
    if given is not None and (getattr(given, "dtype", None) is not wanted.weights_dtype or given.ndim > 2):
        given = weights(wanted, given)
    return x, given


def convertible(given: object) -> TypeGuard[Tensor]:
    """Return whether the dimensions of an argument can be flattened: it is a tensor without jagged dimensions."""
    return isinstance(given, Tensor) and not given.is_nested


def rows(wanted: Wanted, x: Tensor) -> Tensor:
    """Flatten [..., H] to [T, H], and under autocast cast to the communicator's dtype. Tensors of one byte for each
    number are already quantized and are not cast."""
    if not convertible(x):
        return x
    if x.dim() > 2:
        x = x.flatten(0, -2)
    return x.to(wanted.dtype) if casts(wanted, x) else x


def casts(wanted: Wanted, x: Tensor) -> bool:
    """Return whether rows are cast to the communicator's dtype."""
    narrow = x.dtype.itemsize == 1 or not x.is_floating_point()
    return x.dtype != wanted.dtype and not narrow and autocasts(x.device.type)


def autocasts(kind: str) -> bool:
    """Return whether autocast is enabled for devices of this type. For meta devices, which have none, torch would
    raise."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def scales(given: Tensor, batch: tuple[int, ...] | None) -> Tensor:
    """Flatten [..., G] or [...] to [T, G] or [T], for tokens of several dimensions."""
    if batch is None or not convertible(given) or given.dim() < len(batch):
        return given
    return given.flatten(0, len(batch) - 1)


def weights(wanted: Wanted, given: Tensor | None) -> Tensor | None:
    """Flatten [..., K] to [T, K] and widen narrower dtypes."""
    if not convertible(given):
        return given
    if given.dim() > 2:
        given = given.flatten(0, -2)
    if given.is_floating_point() and given.dtype.itemsize < wanted.weights_dtype.itemsize:
        given = given.to(wanted.weights_dtype)
    return given


def ids(topk_idx: Tensor) -> Tensor:
    """Flatten ids to int32 [T, K]. int64 ids outside of the int32 range become an invalid id."""
    if not convertible(topk_idx):
        return topk_idx
    if topk_idx.dim() > 2:
        topk_idx = topk_idx.flatten(0, -2)
    return topk_idx.clamp(-2, 2**31 - 1).to(torch.int32) if topk_idx.dtype == torch.int64 else topk_idx


def _own(wanted: Wanted, topk_idx: Tensor) -> Tensor:
    """Return ids [T, K] in the communicator's own numbering (see ``Communicator.shrink``)."""
    topk_idx = ids(topk_idx)
    return topk_idx if wanted.expert_ids is None else wanted.expert_ids.of(topk_idx)


def _batch(topk_idx: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of the tokens if there are several, else None."""
    return tuple(topk_idx.shape[:-1]) if convertible(topk_idx) and topk_idx.dim() > 2 else None
