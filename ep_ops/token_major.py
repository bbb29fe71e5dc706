"""Dispatches of a communicator that bring token-major rows: one for each copy, for GEMMs that gather.

docs/token-major.md says all of it in one page.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import inputs
from .calls import Caller, default_rows, scales_of
from .operators.eager import call, no_route, refuse
from .records import DispatchedTokens, Route, Sizes, StartedDispatch


class TokenMajor(Caller):
    """Of :class:`ep_ops.Communicator`."""

    def dispatch_tokens(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        capacity: int | None = None,
        max_tokens: int | None = None,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
    ) -> DispatchedTokens:
        """Send every row of ``x`` [T, H] (and its weights, [T, K]) once to each rank with experts that ``topk_idx``
        names: a row each, [R, H], in the order of (source rank, token), with local ids and weights [R, K] beside it.

        :func:`ep_ops.nn.expert_lists` makes of the local ids what gathering GEMMs take, and :meth:`combine` brings one
        row for each row home along the route. Takes what :meth:`dispatch` takes; the same holds for dtypes, shapes and
        errors. Rows behind the last copy are undefined, their local ids -1 and their weights 0. Does not wait for the
        device. Differentiable.

        ``capacity``: R; default ``world_size * max_tokens``, which is the most there can be. Copies that do not fit are
        dropped, the last ones, and counted by expert. ``max_tokens``: bound on T that all ranks share. ``scales_as``:
        "rows" or "columns".
        """
        capacity, tokens = self._room(capacity, max_tokens)
        x, topk_idx, topk_weights, batch = inputs.to_send(self, x, topk_idx, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, batch)
        out = call(
            "dispatch_tokens", x, topk_weights, topk_idx, capacity, tokens, *self.place, scales, format, scales_as
        )
        return self._arrived(out, topk_idx, topk_weights, (capacity, tokens, batch), format, scales_as)

    def dispatch_tokens_dynamic(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        max_tokens: int | None = None,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
    ) -> DispatchedTokens:
        """:meth:`dispatch_tokens` into exactly as many rows as there are copies; waits for the device once."""
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        x, topk_idx, topk_weights, batch = inputs.to_send(self, x, topk_idx, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, batch)
        out = call("dispatch_tokens_dynamic", x, topk_weights, topk_idx, tokens, *self.place, scales, format, scales_as)
        return self._arrived(out, topk_idx, topk_weights, (out[0].shape[0], tokens, batch), format, scales_as)

    def dispatch_tokens_planned(
        self,
        x: Tensor,
        route: Route,
        topk_weights: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Send ``x`` along the route of an earlier token-major dispatch: its rows, their weights [R, K] if given, and
        their scales where the format has some. Differentiable. ValueError for a route of rows grouped by expert."""
        if not isinstance(route, Route):
            refuse("dispatch_tokens_planned", self.backend, no_route(route))
        if not route.token_major:
            reason = "route is of rows grouped by expert; allowed: that of a token-major dispatch"
            refuse("dispatch_tokens_planned", self.backend, reason, max_tokens=route.max_tokens)
        x, topk_weights = inputs.with_weights(self, x, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, route.batch)
        args = (*route[:5], route.num_rows, route.alignment, route.max_tokens, self.name)
        rows, found, weights = call(
            "dispatch_tokens_planned", x, topk_weights, *args, scales, format, scales_as
        )  # fmt: skip
        weights = None if topk_weights is None else weights
        return rows, weights, scales_of(rows, found, route, format, scales_as)

    def dispatch_tokens_start(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        capacity: int | None = None,
        max_tokens: int | None = None,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
        flight: int = 0,
    ) -> StartedDispatch:
        """Begins :meth:`dispatch_tokens` beside the current stream; see :meth:`dispatch_start`."""
        capacity, tokens = self._room(capacity, max_tokens)
        x, topk_idx, topk_weights, batch = inputs.to_send(self, x, topk_idx, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, batch)
        given = x, topk_weights, topk_idx, capacity, tokens, *self.place, scales, format, scales_as, flight
        ticket = call("dispatch_tokens_start", *given)
        delivery, sizes = (scales, format, scales_as, True), Sizes(capacity, 1, 0, tokens)
        return StartedDispatch(ticket, x, topk_weights, topk_idx, sizes, batch, delivery, flight)

    def dispatch_tokens_wait(self, started: StartedDispatch) -> DispatchedTokens:
        """What :meth:`dispatch_tokens` returns. Differentiable."""
        if not isinstance(started, StartedDispatch):
            raise TypeError(f"started is a {type(started).__name__}; allowed: what dispatch_tokens_start returned")
        ticket, x, topk_weights, topk_idx, (capacity, _, _, tokens), batch, delivery, flight = started
        given = x, topk_weights, topk_idx, capacity, tokens, *self.place, *delivery[:3], flight
        out = call("dispatch_tokens_wait", ticket, *given)
        return self._arrived(out, topk_idx, topk_weights, (capacity, tokens, batch), *delivery[1:3])

    def _room(self, capacity: int | None, max_tokens: int | None) -> tuple[int, int]:
        """Rows, and the bound on tokens."""
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        if capacity is not None:
            return capacity, tokens
        if not hasattr(tokens, "__index__"):  # no number: for the operator to refuse, on all ranks
            return 0, tokens
        return default_rows(self, self.world_size * tokens if self.num_local_experts else 0, tokens), tokens

    def _arrived(
        self, out: Any, topk_idx: Tensor, topk_weights: Tensor | None, sizes: tuple[Any, ...], format: str,
        scales_as: str,
    ) -> DispatchedTokens:  # fmt: skip
        """``sizes``: rows, max_tokens, batch."""
        x, found, weights, send_rows, arrivals, offs, counts, dropped, local_idx = out
        if self.overflowed is not None:
            self.overflowed.add(dropped)
        rows, tokens, batch = sizes
        route = Route(topk_idx, send_rows, arrivals, offs, counts, 1, rows, tokens, batch, 0, True)
        weights = None if topk_weights is None else weights
        return DispatchedTokens(x, local_idx, weights, route, dropped, scales_of(x, found, route, format, scales_as))
