"""Tensors as models have them, turned into what operators take. What does not fit is left as it is: the operator says
so, on all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .group.survivors import ExpertIds


class Wanted(Protocol):
    """What operators of a communicator take."""

    dtype: torch.dtype  # of rows
    weights_dtype: torch.dtype
    expert_ids: ExpertIds | None  # where experts are gone


def to_plan(wanted: Wanted, topk_idx: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """The ids of a plan, and the `batch` of its route."""
    if wanted.expert_ids is None and getattr(topk_idx, "dtype", None) is torch.int32 and topk_idx.ndim == 2:
        return topk_idx, None
    return _own(wanted, topk_idx), _batch(topk_idx)


def to_send(
    wanted: Wanted, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """What a dispatch is given, and the `batch` of its route."""
    if (  # as operators take them: a decode step has no time to lose
        wanted.expert_ids is None
        and getattr(x, "dtype", None) is wanted.dtype
        and getattr(topk_idx, "dtype", None) is torch.int32
        and topk_idx.ndim == x.ndim == 2
        and (topk_weights is None or getattr(topk_weights, "dtype", None) is wanted.weights_dtype)
    ):
        return x, topk_idx, topk_weights, None
    return rows(wanted, x), _own(wanted, topk_idx), weights(wanted, topk_weights), _batch(topk_idx)


def with_weights(wanted: Wanted, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows and their weights."""
    if getattr(x, "dtype", None) is not wanted.dtype or x.ndim != 2:
        x = rows(wanted, x)
    if given is not None and (getattr(given, "dtype", None) is not wanted.weights_dtype or given.ndim > 2):
        given = weights(wanted, given)
    return x, given


def rows(wanted: Wanted, x: Tensor) -> Tensor:
    """[..., H] as [T, H]; under autocast, which leaves activations in several dtypes, in the communicator's (but for
    those of one byte a number, which are quantized already)."""
    if not isinstance(x, Tensor):
        return x
    if x.dim() > 2:
        x = x.flatten(0, -2)
    narrow = x.dtype.itemsize == 1 or not x.is_floating_point()
    if x.dtype != wanted.dtype and not narrow and autocasts(x.device.type):
        x = x.to(wanted.dtype)
    return x


def autocasts(kind: str) -> bool:
    """Whether autocast is on for devices of that kind. (Meta devices have none, of which torch is not to be asked;
    torch.amp.is_autocast_available, which would say so, is not traced by torch 2.11.)"""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def scales(given: Tensor, batch: tuple[int, ...] | None) -> Tensor:
    """[..., G] or [...] of tokens that several dimensions stand for, as [T, G] or [T]."""
    if batch is None or not isinstance(given, Tensor) or given.dim() < len(batch):
        return given
    return given.flatten(0, len(batch) - 1)


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
    """[..., K] as int32 [T, K], of int64, of which what int32 does not hold stays an id that no operator takes."""
    if not isinstance(topk_idx, Tensor):
        return topk_idx
    if topk_idx.dim() > 2:
        topk_idx = topk_idx.flatten(0, -2)
    return topk_idx.clamp(-2, 2**31 - 1).to(torch.int32) if topk_idx.dtype == torch.int64 else topk_idx


def _own(wanted: Wanted, topk_idx: Tensor) -> Tensor:
    """[T, K] of the communicator's own ids of the experts that are named (see `Communicator.shrink`)."""
    topk_idx = ids(topk_idx)
    return topk_idx if wanted.expert_ids is None else wanted.expert_ids.of(topk_idx)


def _batch(topk_idx: Tensor) -> tuple[int, ...] | None:
    """The dimensions that stand for tokens, where there are several."""
    return tuple(topk_idx.shape[:-1]) if isinstance(topk_idx, Tensor) and topk_idx.dim() > 2 else None
