"""Transfer of rows along a route: from tokens to rows and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import arrivals
from ...formats import exact_dtype
from ...group.exchange import Exchange
from ...records import NO_SCALES, Received, Route
from ...specs import PLAIN, DispatchSpec
from . import quantized
from .ranks import ExpertRanks


class Transfer:
    """Transfers are collective: all ranks move rows along routes of one plan."""

    def __init__(self, ranks: ExpertRanks, exchange: Exchange, weights_dtype: torch.dtype, unused: float) -> None:
        self.ranks, self.exchange = ranks, exchange
        self.weights_dtype = weights_dtype
        self.unused = unused  # value of undefined rows

    # ------------------------------------------------------------------ a route

    def destinations(self, topk_idx: Tensor, send_rows: Tensor) -> Tensor:
        """Return the rank that holds the row of each (token, k), [T, K]; world_size for none."""
        return torch.where(send_rows >= 0, self.ranks.named(topk_idx), self.ranks.world_size)

    def sent(self, route: Route) -> tuple[Tensor, list[int]]:
        """Return the (token, k) that dispatch sends, flat and sorted by destination, and their number for each rank."""
        world_size = self.ranks.world_size
        destination = self.destinations(route.topk_idx, route.send_rows).flatten()
        sent = torch.bincount(destination, minlength=world_size + 1)[:world_size].tolist()
        asker = destination.argsort(stable=True)[: sum(sent)]
        return asker, sent

    def received(self, route: Route) -> tuple[Tensor, list[int]]:
        """Return the rows that receive them, by (source rank, token, k), and their number from each rank."""
        table = self._table(route)
        return table[table >= 0].long(), (table >= 0).sum((1, 2)).tolist()

    def _table(self, route: Route) -> Tensor:
        """Return the row here of (source rank, token, k), [W, max_tokens, K], -1 for none."""
        return arrivals.table(route.arrivals, self.ranks.world_size, route.max_tokens, route.topk_idx.shape[1])

    # ------------------------------------------------------------------ to rows

    def to_rows(
        self, x: Tensor, topk_weights: Tensor | None, route: Route, spec: DispatchSpec = PLAIN,
        scales: Tensor | None = None,
    ) -> Received:  # fmt: skip
        """Send rows along a route. ``scales``: those of an x that is quantized already."""
        asker, sent = self.sent(route)
        recv_row, recv_counts = self.received(route)
        token = asker // route.topk_idx.shape[1]

        def moved(values: Tensor, unused: float) -> Tensor:
            """Send ``values`` to rows here; all other rows are ``unused``."""
            rows = _blank((route.num_rows, *values.shape[1:]), values.dtype, route, unused, spec.zeros)
            rows[recv_row] = self.exchange.all_to_all(values, sent, recv_counts)
            return rows

        if spec.format:
            recv_x, recv_scales = quantized.to_rows(x, token, spec, scales, route, moved, self.unused)
        else:
            recv_x, recv_scales = moved(x[token], self.unused), NO_SCALES[x.device]
        if topk_weights is None:
            return Received(recv_x, recv_scales, x.new_empty(0, dtype=self.weights_dtype))
        return Received(recv_x, recv_scales, moved(topk_weights.flatten()[asker], self.unused))

    def with_weights(
        self, grad_y: Tensor, y: Tensor | None, recv_weights: Tensor, route: Route
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply the dispatched gradient rows ``grad_y`` by the rows' weights in place, and return them with their
        dot products with ``y`` if that is given."""
        exact = exact_dtype(grad_y.dtype)
        row, _ = self.received(route)
        g = grad_y[row].to(exact)
        grad_y[row] = (g * recv_weights[row].to(exact)[:, None]).to(grad_y.dtype)
        if y is None:
            return grad_y, None
        grad_recv_weights = _blank((route.num_rows,), recv_weights.dtype, route, self.unused)
        grad_recv_weights[row] = (g * y[row].to(exact)).sum(1).to(recv_weights.dtype)
        return grad_y, grad_recv_weights

    # ------------------------------------------------------------------ to tokens

    def to_tokens(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None, format: str = ""
    ) -> Tensor:
        """Sum rows at the owners of their tokens, with the residual last. ``format``: in which sums are sent."""
        ranks, topk_idx, table = self.ranks, route.topk_idx, self._table(route)
        hidden_size, wire = y.shape[1], quantized.SumFormat(y.dtype, format)
        exact = exact_dtype(y.dtype)

        came = (table >= 0).any(2)  # [W, max_tokens]: tokens with a row here
        rows = table[came].long()  # [tokens, K], in the order of (source rank, token)
        partial = torch.zeros(rows.shape[0], y.shape[1], dtype=exact, device=y.device)
        for k in range(rows.shape[1]):
            present = rows[:, k] >= 0
            row = rows[present, k]
            summand = y[row].to(exact)
            if recv_weights is not None:
                summand = summand * recv_weights[row].to(exact)[:, None]
            partial[present] += summand

        destination = self.destinations(topk_idx, route.send_rows)  # [T, K]
        went = torch.stack([(destination == rank).any(1) for rank in range(ranks.world_size)])  # [W, T]
        went_counts = went.sum(1).tolist()
        arrived = self.exchange.all_to_all(wire.packed(partial), came.sum(1).tolist(), went_counts)

        out = torch.zeros(topk_idx.shape[0], hidden_size, dtype=exact, device=y.device)
        summands = wire.unpacked(arrived, hidden_size).split(went_counts)
        for domain in ranks.domains:  # by their lowest ranks; the sums of other ones have crossed
            total = torch.zeros_like(out)
            for rank in domain:
                total[went[rank]] += summands[rank]
            out += total if ranks.rank in domain else wire.unpacked(wire.packed(total), hidden_size)
        if residual is not None:
            out += residual.to(exact)
        return out.to(y.dtype)


def _blank(shape: tuple[int, ...], dtype: torch.dtype, route: Route, unused: float, zeros: bool = True) -> Tensor:
    """Return rows to be filled: zeros in the padding of segments if ``zeros``, ``unused`` elsewhere.

    Combines do not know the layout of a route. Segments of a token-major one overlap rows that no copy has taken; they
    have no padding, so these rows stay undefined.
    """
    blank = torch.full(shape, unused, dtype=dtype, device=route.offs.device)
    if zeros:
        kept, covered = (route.segments.covered(shape[0], padding) for padding in (False, True))
        blank[covered & ~kept] = 0
    return blank
