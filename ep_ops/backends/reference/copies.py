"""Token-major rows: one for each copy, with one value (id or weight) for each k of its token."""

from __future__ import annotations

import torch
from torch import Tensor

from ...records import GROUPED, Received, Route
from ...specs import DispatchSpec
from .ranks import ExpertRanks
from .transfer import Transfer


def to_token_rows(
    rows: Transfer, x: Tensor, topk_weights: Tensor | None, route: Route, spec: DispatchSpec, scales: Tensor | None
) -> Received:
    """Return :meth:`Transfer.to_rows` of token-major rows. The copies are rows of one group, which begins at row 0."""
    copies = route.sources[-1:]
    received = rows.to_rows(x, None, route._replace(offs=copies, counts=copies, layout=GROUPED), spec, scales)
    if topk_weights is None:
        return received
    return received._replace(recv_weights=_to_copies(rows, topk_weights, route, 0))


def local_ids(rows: Transfer, route: Route) -> Tensor:
    """Return recv_idx [R, K]."""
    return _to_copies(rows, rows.ranks.local(route.topk_idx), route, -1)


def weights_home(rows: Transfer, grad_recv_weights: Tensor, route: Route) -> Tensor:
    """Return the gradients of weights to their owners: [T, K], from rows [R] or copies [R, K]; 0 if there is no row."""
    asker, sent = rows.sent(route)
    recv_row, recv_counts = rows.received(route)
    grads = rows.exchange.all_to_all(grad_recv_weights[recv_row], recv_counts, sent)
    home = grads.new_zeros(route.topk_idx.shape)
    if grads.dim() == 2:
        named, top_k = _named_there(rows.ranks, route, asker), grads.shape[1]
        token = (asker // top_k * top_k)[:, None]
        asker, grads = (token + torch.arange(top_k, device=grads.device))[named], grads[named]
    home.view(-1)[asker] = grads
    return home


def _to_copies(rows: Transfer, values: Tensor, route: Route, none: int) -> Tensor:
    """Send ``values`` [T, K] of the experts of each rank to it, and return them by copy [R, K]; ``none`` elsewhere."""
    asker, sent = rows.sent(route)
    recv_row, recv_counts = rows.received(route)
    goes = torch.where(_named_there(rows.ranks, route, asker), values[asker // values.shape[1]], none)
    blank = values.new_full((route.num_rows, values.shape[1]), none)
    blank[recv_row] = rows.exchange.all_to_all(goes, sent, recv_counts)
    return blank


def _named_there(ranks: ExpertRanks, route: Route, asker: Tensor) -> Tensor:
    """Return bool [sent, K]: which k of the token of each copy sent name an expert of the destination rank."""
    named = ranks.named(route.topk_idx)
    return named[asker // named.shape[1]] == named.flatten()[asker][:, None]
