"""A combine of what experts made of token-major rows, which adds up a token's places on its way home.

    sent = comm.dispatch(x, topk_idx, topk_weights, layout="token_major")  # rows [R, H], local ids and weights [R, K]
    lists = expert_lists(sent.local_idx, comm.num_local_experts)
    y = gather_mm(sent.x, w, lists)                             # [L, N], a row for each place
    out = comm.combine(y, places_route(comm, sent.route, lists), weights_of_places(sent.weights, lists))

A result of a GEMM that gathers has a row for each place, as a buffer of rows that are grouped by expert has a row for
each (token, k). :func:`places_route` writes the route of a token-major dispatch as that of such rows. So the combine of
grouped rows takes them, weights included, and sums them where it reads them: on the expert's rank over k ascending,
one row to the owner. The same bits as a combine of :func:`ep_ops.nn.reduce_rows`, whose result [R, H] is never stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.nn import list_operators as operators
from ep_ops.nn.grouped import grouped_mm
from ep_ops.nn.lists import ExpertLists, gather_rows, places_at_most
from ep_ops.nn.per_expert import refuse_no_route
from ep_ops.records import TOKEN_MAJOR, Route


def gather_mm(x: Tensor, w: Tensor, lists: ExpertLists) -> Tensor:
    """Token-major rows x [R, M], each times the matrices w [El, M, N] of the experts that it names: [L, N], of each
    place; undefined behind the last list. Differentiable.

    Rows are copied for it. :func:`ep_ops.integrations.quack.gather_mm` does without, on GPUs.
    """
    return grouped_mm(gather_rows(x, lists), w, lists.offs)


def places_route(comm: Communicator, route: Route, lists: ExpertLists) -> Route:
    """The route whose rows [L] are the places of ``lists``, made of that of a token-major dispatch, without
    waiting for the device.

    It is a route of rows grouped by expert, for everything that goes along one but ``combine_gathered``: where rows lie
    at other ranks is not known here (``send_rows`` is 2**31 - 1 there), and no combine but that one asks.

    ValueError for a route of grouped rows, for lists of another number of rows, and for lists that may have left out
    something (a ``capacity`` below what R rows can take): a copy of which nothing is left would never come home. Take
    ``reduce_rows`` there.
    """
    refuse_no_route(route)
    num_rows, top_k = lists.places.shape
    num_places, most = lists.rows.shape[0], places_at_most(num_rows * top_k, lists.counts.shape[0], lists.alignment)
    if route.layout != TOKEN_MAJOR or num_rows != route.num_rows:
        raise ValueError(
            f"route is of {route.num_rows} rows in layout {route.layout!r}; allowed: the route of the token-major"
            f" dispatch that the lists of {num_rows} rows are made of"
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
    """Weights [R, K] of token-major rows -> [L], of each place, 0 where nothing is. Differentiable."""
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
