"""Combine for the output of a gathering GEMM on token-major rows.

    sent = comm.dispatch(x, topk_idx, topk_weights, layout="token_major")  # rows [R, H], local ids and weights [R, K]
    lists = expert_lists(sent.local_idx, comm.num_local_experts)
    y = gather_mm(sent.x, w, lists)                             # [L, N], a row for each place
    out = comm.combine(y, places_route(comm, sent.route, lists), weights_of_places(sent.weights, lists))

The output of a gathering GEMM has one row for each place, as grouped rows have one for each (token, k).
:func:`places_route` converts the route of the token-major dispatch to a route of these rows. The combine of grouped
rows then accepts them with their weights and sums them as it reads them: on the expert's rank over k ascending, with
one row sent to the owner. The result has the bits of a combine of :func:`ep_ops.nn.reduce_rows`, without storing [R,
H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.nn import list_operators as operators
from ep_ops.nn.grouped import grouped_mm
from ep_ops.nn.lists import ExpertLists, gather_rows, places_at_most
from ep_ops.records import TOKEN_MAJOR, Route, check_types


def gather_mm(x: Tensor, w: Tensor, lists: ExpertLists) -> Tensor:
    """Multiply the row of each place by its expert's matrix. Differentiable.

    Rows are copied first. :func:`ep_ops.integrations.quack.gather_mm` avoids the copy on GPUs.

    Args:
        x: token-major rows [R, M].
        w: matrices of the local experts, [El, M, N].
        lists: lists of these rows.

    Returns:
        [L, N], undefined after the last list.

    Raises:
        TypeError: x or w is not a tensor, or ``lists`` are not ExpertLists.
        ValueError: sizes differ from those of the lists.
    """
    return grouped_mm(gather_rows(x, lists), w, lists.offs)


def places_route(comm: Communicator, route: Route, lists: ExpertLists) -> Route:
    """Return the route of a token-major dispatch, rewritten so that its rows are the places of ``lists``.

    Does not wait for the device. The result is a route of grouped rows for all operators except ``combine_gathered``:
    ``send_rows`` does not contain the rows at other ranks (it is 2**31 - 1 there).

    Args:
        comm: the communicator of the dispatch.
        route: route of the token-major dispatch.
        lists: lists of its ``local_idx``, without ``capacity``.

    Returns:
        Route: with L rows.

    Raises:
        TypeError: ``route`` is not a Route, or ``lists`` are not ExpertLists.
        ValueError: the route is not token-major, the lists belong to another number of rows, or the lists have fewer
            places than the rows can need, so places may have been dropped. The result of a token
            without places could not be returned; use ``reduce_rows`` instead.
    """
    check_types(Route, route=route)
    check_types(ExpertLists, lists=lists)
    num_rows, top_k = lists.places.shape
    num_places, most = lists.rows.shape[0], places_at_most(num_rows * top_k, lists.counts.shape[0], lists.alignment)
    if route.layout != TOKEN_MAJOR or num_rows != route.num_rows:
        raise ValueError(
            f"route has {route.num_rows} rows in layout {route.layout!r}; allowed: the route of the token-major"
            f" dispatch that the lists of {num_rows} rows belong to"
        )
    if num_places < most:
        raise ValueError(
            f"lists have {num_places} places, and {num_rows} rows can take {most}; allowed: lists without a capacity"
            " (with one: combine(reduce_rows(y, lists, weights), route))"
        )
    arrivals, send_rows = operators.places_route(
        route.topk_idx, route.send_rows, route.arrivals, lists.places, num_places, comm.rank, comm.experts_per_rank
    )
    ints = lists.alignment, num_places, route.max_tokens, route.batch
    return Route(route.topk_idx, send_rows, arrivals, lists.offs, lists.counts, *ints, dropped=lists.dropped)


def weights_of_places(weights: Tensor, lists: ExpertLists) -> Tensor:
    """Return the weight of each place. Differentiable.

    Args:
        weights: weights of token-major rows, [R, K].
        lists: their lists.

    Returns:
        [L], 0 for empty places.

    Raises:
        TypeError: ``weights`` is not a tensor, or ``lists`` are not ExpertLists.
        ValueError: ``weights`` has another shape.
    """
    check_types(Tensor, weights=weights)
    check_types(ExpertLists, lists=lists)
    if weights.shape != lists.places.shape:
        allowed = f"{tuple(lists.places.shape)}, the shape of local_idx"
        raise ValueError(f"weights has shape {tuple(weights.shape)}; allowed: {allowed}")
    return _OfPlaces.apply(weights, lists.flat, lists.places)


class _OfPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, flat: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return torch.nn.functional.pad(weights.flatten(), (0, 1))[flat]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        if grad.shape[0] == 0:
            return grad.new_zeros(places.shape), None, None
        return torch.where(places >= 0, grad[places.clamp(min=0)], 0), None, None
