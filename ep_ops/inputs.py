"""Conversion of a model's tensors to what operators accept.

Tensors that cannot be converted are returned unchanged; the operator then raises the error on all ranks.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from .group.survivors import ExpertIds
from .records import Route, is_ordinary


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
    """Return the tensors for a dispatch and the ``batch`` of its route. ValueError if leading dimensions differ."""
    if (  # no conversion is needed, which is checked fast for decode steps
        wanted.expert_ids is None
        and getattr(x, "dtype", None) is wanted.dtype
        and getattr(topk_idx, "dtype", None) is torch.int32
        and topk_idx.ndim == x.ndim == 2
        and (topk_weights is None or getattr(topk_weights, "dtype", None) is wanted.weights_dtype)
    ):
        return x, topk_idx, topk_weights, None
    batch = _batch(x)
    if convertible(x):
        _check_leading("topk_idx", topk_idx, x, batch)
        _check_leading("topk_weights", topk_weights, x, batch)
    return rows(wanted, x), _own(wanted, topk_idx), weights(wanted, topk_weights), batch


def to_send_along(
    wanted: Wanted, x: Tensor, topk_weights: Tensor | None, route: Route
) -> tuple[Tensor, Tensor | None, Route]:
    """Return the tensors for a dispatch along a route, and the route with the ``batch`` of x. ValueError if leading
    dimensions differ."""
    given = with_weights(wanted, x, topk_weights)
    if route.batch is None and given[0] is x and given[1] is topk_weights:  # without leading dimensions
        return *given, route
    if convertible(x):
        batch = _batch(x)
        if batch is not None and route.batch is not None and batch != route.batch:
            allowed = f"[{', '.join(map(str, route.batch))}, H], like the ids of the route, or [T, H]"
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: {allowed}")
        _check_leading("topk_weights", topk_weights, x, batch)
        route = route if batch == route.batch else route._replace(batch=batch)
    return *given, route


def with_weights(wanted: Wanted, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return rows and their weights."""
    if getattr(x, "dtype", None) is not wanted.dtype or x.ndim != 2:
        x = rows(wanted, x)
    if given is not None and (getattr(given, "dtype", None) is not wanted.weights_dtype or given.ndim > 2):
        given = weights(wanted, given)
    return x, given


def residual(wanted: Wanted, given: Tensor, route: Route) -> Tensor:
    """Return the residual of a combine as [T, H]. ValueError if its leading dimensions are not those of the tokens."""
    batch = _batch(given)
    if batch is not None and route.batch is not None and batch != route.batch:
        allowed = f"[{', '.join(map(str, route.batch))}, H], like the tokens of the route, or [T, H]"
        raise ValueError(f"residual has shape {tuple(given.shape)}; allowed: {allowed}")
    return rows(wanted, given)


def _check_leading(name: str, given: object, x: Tensor, batch: tuple[int, ...] | None) -> None:
    """Raise ValueError unless the leading dimensions of ids or weights are those of x, or they are [T, K]."""
    if not convertible(given) or given.dim() <= 2 or tuple(given.shape[:-1]) == batch:
        return
    allowed = "[T, K]" if batch is None else f"[{', '.join(map(str, batch))}, K], like x, or [T, K]"
    raise ValueError(f"{name} has shape {tuple(given.shape)}, and x {tuple(x.shape)}; allowed: {allowed}")


def convertible(given: object) -> TypeGuard[Tensor]:
    """Return whether the dimensions of an argument can be flattened."""
    return is_ordinary(given)


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
    """Flatten [..., G] or [...] to [T, G] or [T], for tokens of several dimensions. Scales whose leading dimensions
    differ from those of the tokens are returned unchanged."""
    if batch is None or not convertible(given) or tuple(given.shape[: len(batch)]) != batch:
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


def _batch(given: Tensor) -> tuple[int, ...] | None:
    """Return the leading dimensions of a tensor of tokens if there are several, else None."""
    return tuple(given.shape[:-1]) if convertible(given) and given.dim() > 2 else None
