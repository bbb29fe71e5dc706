"""Token-major rows: one for each copy, with something for each of its token's k beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...records import GROUPED, Delivery, Received, Route
from .ranks import Ranks
from .transfer import Transfer


def to_token_rows(rows: Transfer, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery) -> Received:
    """As `Transfer.to_rows`. The copies are rows of one group, which begins at row 0."""
    copies = route.sources[-1:]
    received = rows.to_rows(x, None, route._replace(offs=copies, counts=copies, layout=GROUPED), delivery)
    if topk_weights is None:
        return received
    return received._replace(recv_weights=_to_copies(rows, topk_weights, route, 0))


def local_ids(rows: Transfer, route: Route) -> Tensor:
    """recv_idx [R, K]."""
    return _to_copies(rows, rows.ranks.local(route.topk_idx), route, -1)


def weights_home(rows: Transfer, grad_recv_weights: Tensor, route: Route) -> Tensor:
    """[T, K]: what each weight's place in the rows [R], or in those of copies [R, K], has; 0 where there is none."""
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
    """``values`` [T, K] of those (token, k) whose experts are here, by copy [R, K]; ``none`` elsewhere."""
    asker, sent = rows.sent(route)
    recv_row, recv_counts = rows.received(route)
    goes = torch.where(_named_there(rows.ranks, route, asker), values[asker // values.shape[1]], none)
    blank = values.new_full((route.num_rows, values.shape[1]), none)
    blank[recv_row] = rows.exchange.all_to_all(goes, sent, recv_counts)
    return blank


def _named_there(ranks: Ranks, route: Route, asker: Tensor) -> Tensor:
    """bool [sent, K]: which k of the token of each copy that is sent name an expert of the rank where it goes."""
    named = ranks.named(route.topk_idx)
    return named[asker // named.shape[1]] == named.flatten()[asker][:, None]
