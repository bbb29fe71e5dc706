"""A combine of what experts made of token-major rows, which adds up a token's places on its way home.

    sent = comm.dispatch_tokens(x, topk_idx, topk_weights)      # rows [R, H], local ids and weights [R, K]
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

from ep_ops import arrivals
from ep_ops.communicator import Communicator
from ep_ops.nn.lists import ExpertLists, gather_rows, places_at_most
from ep_ops.nn.moe_layer import grouped_mm
from ep_ops.records import UNTOLD, Route


def gather_mm(x: Tensor, w: Tensor, lists: ExpertLists) -> Tensor:
    """Token-major rows x [R, M], each times the matrices w [El, M, N] of the experts that it names: [L, N], of each
    place; undefined behind the last list. Differentiable.

    Rows are copied for it. :func:`ep_ops.integrations.quack.gather_mm` does without, on GPUs.
    """
    return grouped_mm(gather_rows(x, lists), w, lists.offs)


def places_route(comm: Communicator, route: Route, lists: ExpertLists) -> Route:
    """The route whose rows [L] are the places of ``lists``, made of that of a token-major dispatch, in plain PyTorch,
    without waiting for the device.

    It is a route of rows grouped by expert, for everything that goes along one but ``combine_gathered``: where rows lie
    at other ranks is not known here (``send_rows`` is 2**31 - 1 there), and no combine but that one asks.

    ValueError for a route of grouped rows, for lists of another number of rows, and for lists that may have left out
    something (a ``capacity`` below what R rows can take): a copy of which nothing is left would never come home. Take
    ``reduce_rows`` there.
    """
    num_rows, top_k = lists.places.shape
    num_places, most = lists.rows.shape[0], places_at_most(num_rows * top_k, lists.counts.shape[0], lists.alignment)
    if not route.token_major or num_rows != route.num_rows:
        kind = "token-major" if route.token_major else "of rows grouped by expert"
        raise ValueError(
            f"route is {kind}, of {route.num_rows} rows; allowed: the route of the token-major dispatch that the"
            f" lists of {num_rows} rows are made of"
        )
    if num_places < most:
        raise ValueError(
            f"lists have {num_places} places, and {num_rows} rows can take {most}; allowed: lists without a capacity"
            " (with one: combine(reduce_rows(y, lists, weights), route))"
        )
    come = _arrivals(comm, route, lists.places, num_places)
    send_rows = _send_rows(comm, route, lists.places)
    ints = lists.alignment, num_places, route.max_tokens, route.batch
    return Route(route.topk_idx, send_rows, come, lists.offs, lists.counts, *ints)


def weights_of_places(weights: Tensor, lists: ExpertLists) -> Tensor:
    """Weights [R, K] of token-major rows -> [L], of each place, 0 where nothing is. Differentiable."""
    return _OfPlaces.apply(weights, lists.flat, lists.places)


def _arrivals(comm: Communicator, route: Route, places: Tensor, num_places: int) -> Tensor:
    """`arrivals` of the places: the same copies, of as many rows as they have places."""
    num_rows, top_k = places.shape
    copies, _, sources = arrivals.views(route.arrivals, num_rows)
    held = places.flatten() >= 0
    behind = held.cumsum(0)  # of places of the copies up to and with each
    begin = torch.nn.functional.pad(behind, (1, 0))[::top_k][: num_rows + 1]
    home = copies[:, 1].long()
    asker = (home[:num_rows, None] // min(top_k, comm.world_size) * top_k).add(_ks(places)).flatten()
    at = torch.where(held, behind - 1, num_places)
    owned = [
        values.new_full((num_places + 1,), -1).scatter(0, at, values)[:num_places]
        for values in (places.flatten().long(), asker)
    ]
    ends = torch.nn.functional.pad(torch.stack([begin, home], 1), (0, 0, 0, num_places - num_rows), value=-1)
    return torch.cat([ends.flatten(), torch.stack(owned, 1).flatten(), sources]).int()


def _send_rows(comm: Communicator, route: Route, places: Tensor) -> Tensor:
    """[T, K]: of what lies on this rank the place; `UNTOLD` of what lies elsewhere."""
    holder = _holders(comm, route.topk_idx)
    same = holder[:, :, None] == holder[:, None, :]
    copy = torch.where(same, route.send_rows[:, None, :], -1).amax(2)  # the copy's row at its rank
    elsewhere = torch.where(copy >= 0, UNTOLD, -1)
    if places.shape[0] == 0:
        return elsewhere.int()
    here = (holder == comm.rank) & (copy >= 0)
    row = torch.where(here, copy, 0).long()
    return torch.where(here, places[row, _ks(places)], elsewhere).int()


def _holders(comm: Communicator, topk_idx: Tensor) -> Tensor:
    """The rank that holds each expert, -1 of none."""
    each = comm.experts_per_rank[0]
    if len(set(comm.experts_per_rank)) == 1:
        return torch.div(topk_idx, each, rounding_mode="floor")
    first = torch.where(topk_idx >= 0, 0, -1)
    for begin in comm.first_expert[1:]:
        first = first + (topk_idx >= begin)
    return first


def _ks(places: Tensor) -> Tensor:
    return torch.arange(places.shape[1], device=places.device)


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
