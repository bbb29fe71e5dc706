"""Conversion of a model's tensors, and of the sizes of a call, to what operators accept.

Tensors that cannot be converted are returned unchanged; the operator then raises the error on all ranks.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .config import most_token_rows, worst_case_rows
from .records import DISTINCT, GROUPED, INT32_LIMIT, PADDED, TOKEN_MAJOR, Route, is_ordinary, whole, wrong_type
from .registry import Living


def sizes_of(
    comm: Living, layout: str, capacity: int | None, slots: int, max_tokens: int | None, alignment: int | None,
    exact: bool = False,
) -> tuple[int, int, int, int, str]:  # fmt: skip
    """Return capacity (0 if ``exact``), alignment, slots, max_tokens and layout, with defaults filled in. Raise
    TypeError or ValueError for wrong types and impossible combinations."""
    if not isinstance(layout, str):
        raise wrong_type("layout", layout, str)
    tokens = comm.max_tokens_per_rank if max_tokens is None else max_tokens
    align = alignment
    if align is None:
        align = 1 if layout == TOKEN_MAJOR else comm.alignment
    if not (type(align) is type(tokens) is type(slots) is int and (capacity is None or type(capacity) is int)):
        align, tokens = whole("alignment", align), whole("max_tokens", tokens)
        slots, capacity = whole("slots", slots), None if capacity is None else whole("capacity", capacity)
    if exact is not False:
        if exact is not True:
            raise wrong_type("exact", exact, bool)
        if capacity is not None or slots or layout == PADDED:
            raise ValueError(
                f"exact is True, with layout {layout!r}, capacity {capacity} and slots {slots}; allowed: layout"
                f" {GROUPED!r} or {TOKEN_MAJOR!r}, without capacity and slots"
            )
        capacity = 0
    elif capacity is not None:
        if slots:
            raise ValueError(f"capacity is {capacity} and slots is {slots}; allowed: one of the two")
    elif layout == PADDED:
        capacity = comm.num_local_experts * slots
    elif layout == TOKEN_MAJOR:
        capacity = _default_rows(comm, most_token_rows(comm.world_size, tokens, comm.num_local_experts), tokens)
    else:  # the operator rejects an alignment below 1
        rows = worst_case_rows(comm.world_size, tokens, comm.top_k, comm.num_local_experts, max(align, 1))
        capacity = _default_rows(comm, rows, tokens)
        layout = DISTINCT if layout == GROUPED and not slots else layout
    return capacity, align, slots, tokens, layout


def _default_rows(comm: Living, rows: int, tokens: int) -> int:
    """Warn if the default capacity is large. (Two functions are between this one and the caller.)"""
    if rows > comm.warned_rows and not torch.compiler.is_compiling():
        size = rows * comm.hidden_size * comm.dtype.itemsize / 2**30
        text = (
            f"communicator {comm.name!r}: without capacity, rows that {tokens} tokens per rank may send here"
            f" take {size:.1f} GiB in the worst case. Pass capacity (what does not fit is dropped and"
            " counted) or exact=True, or make several calls of fewer tokens (max_tokens)."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return rows


def to_plan(comm: Living, topk_idx: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return the ids for a plan and the ``batch`` of its route."""
    if comm.expert_ids is None and getattr(topk_idx, "dtype", None) is torch.int32 and topk_idx.ndim == 2:
        return topk_idx, None
    return _own(comm, topk_idx), _batch(topk_idx)


def to_send(
    comm: Living, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """Return the tensors for a dispatch and the ``batch`` of its route. ValueError if leading dimensions differ."""
    if (  # at most the ids are converted, which is checked fast for decode steps
        comm.expert_ids is None
        and getattr(x, "dtype", None) is comm.dtype
        and (kind := getattr(topk_idx, "dtype", None)) in (torch.int32, torch.int64)
        and topk_idx.ndim == x.ndim == 2
        and (topk_weights is None or getattr(topk_weights, "dtype", None) is comm.weights_dtype)
    ):
        return x, topk_idx if kind is torch.int32 else ids(topk_idx), topk_weights, None
    batch = _batch(x)
    if is_ordinary(x):
        _check_leading("topk_idx", topk_idx, x, batch)
        _check_leading("topk_weights", topk_weights, x, batch)
    return rows(comm, x), _own(comm, topk_idx), weights(comm, topk_weights), batch


def to_send_along(
    comm: Living, x: Tensor, topk_weights: Tensor | None, route: Route
) -> tuple[Tensor, Tensor | None, Route]:
    """Return the tensors for a dispatch along a route, and the route with the ``batch`` of x. ValueError if leading
    dimensions differ."""
    given = with_weights(comm, x, topk_weights)
    if route.batch is None and given[0] is x and given[1] is topk_weights:  # without leading dimensions
        return *given, route
    if is_ordinary(x):
        batch = _batch(x)
        if batch is not None and route.batch is not None and batch != route.batch:
            allowed = f"[{', '.join(map(str, route.batch))}, H], like the ids of the route, or [T, H]"
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: {allowed}")
        _check_leading("topk_weights", topk_weights, x, batch)
        route = route if batch == route.batch else route._replace(batch=batch)
    return *given, route


def with_weights(comm: Living, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return rows and their weights."""
    if getattr(x, "dtype", None) is not comm.dtype or x.ndim != 2:
        x = rows(comm, x)
    if given is not None and (getattr(given, "dtype", None) is not comm.weights_dtype or given.ndim > 2):
        given = weights(comm, given)
    return x, given


def residual(comm: Living, given: Tensor, route: Route) -> Tensor:
    """Return the residual of a combine as [T, H]. ValueError if its leading dimensions are not those of the tokens."""
    batch = _batch(given)
    if batch is not None and route.batch is not None and batch != route.batch:
        allowed = f"[{', '.join(map(str, route.batch))}, H], like the tokens of the route, or [T, H]"
        raise ValueError(f"residual has shape {tuple(given.shape)}; allowed: {allowed}")
    return rows(comm, given)


def _check_leading(name: str, given: object, x: Tensor, batch: tuple[int, ...] | None) -> None:
    """Raise ValueError unless the leading dimensions of ids or weights are those of x, or they are [T, K]."""
    if not is_ordinary(given) or given.dim() <= 2 or tuple(given.shape[:-1]) == batch:
        return
    allowed = "[T, K]" if batch is None else f"[{', '.join(map(str, batch))}, K], like x, or [T, K]"
    raise ValueError(f"{name} has shape {tuple(given.shape)}, and x {tuple(x.shape)}; allowed: {allowed}")


def rows(comm: Living, x: Tensor) -> Tensor:
    """Flatten [..., H] to [T, H], and under autocast cast to the communicator's dtype. Tensors of one byte for each
    number are already quantized and are not cast."""
    if not is_ordinary(x):
        return x
    if x.dim() > 2:
        x = x.flatten(0, -2)
    return x.to(comm.dtype) if casts(comm, x) else x


def casts(comm: Living, x: Tensor) -> bool:
    """Return whether rows are cast to the communicator's dtype."""
    narrow = x.dtype.itemsize == 1 or not x.is_floating_point()
    return x.dtype != comm.dtype and not narrow and autocasts(x.device.type)


def autocasts(kind: str) -> bool:
    """Return whether autocast is enabled for devices of this type. For meta devices, which have none, torch would
    raise."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def scales(given: Tensor, batch: tuple[int, ...] | None) -> Tensor:
    """Flatten [..., G] or [...] to [T, G] or [T], for tokens of several dimensions. Scales whose leading dimensions
    differ from those of the tokens are returned unchanged."""
    if batch is None or not is_ordinary(given) or tuple(given.shape[: len(batch)]) != batch:
        return given
    return given.flatten(0, len(batch) - 1)


def weights(comm: Living, given: Tensor | None) -> Tensor | None:
    """Flatten [..., K] to [T, K] and widen narrower dtypes."""
    if not is_ordinary(given):
        return given
    if given.dim() > 2:
        given = given.flatten(0, -2)
    if given.is_floating_point() and given.dtype.itemsize < comm.weights_dtype.itemsize:
        given = given.to(comm.weights_dtype)
    return given


def ids(topk_idx: Tensor) -> Tensor:
    """Flatten ids to int32 [T, K]. int64 ids outside of the int32 range become an invalid id."""
    if not is_ordinary(topk_idx):
        return topk_idx
    if topk_idx.dim() > 2:
        topk_idx = topk_idx.flatten(0, -2)
    return topk_idx.clamp(-2, INT32_LIMIT - 1).to(torch.int32) if topk_idx.dtype == torch.int64 else topk_idx


def _own(comm: Living, topk_idx: Tensor) -> Tensor:
    """Return ids [T, K] in the communicator's own numbering (see ``Communicator.shrink``)."""
    topk_idx = ids(topk_idx)
    return topk_idx if comm.expert_ids is None else comm.expert_ids.of(topk_idx)


def _batch(given: Tensor) -> tuple[int, ...] | None:
    """Return the leading dimensions of a tensor of tokens if there are several, else None."""
    return tuple(given.shape[:-1]) if is_ordinary(given) and given.dim() > 2 else None
