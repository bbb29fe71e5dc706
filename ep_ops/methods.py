"""What a communicator sends and brings home: a method for each operator, which takes tensors as models have them, fills
in the sizes, and hands out records."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from . import inputs
from .calls import Caller, default_rows, scales_of
from .config import worst_case_rows
from .operators.eager import call, no_route, refuse
from .records import Dispatched, Route, Sizes, StartedCombine, StartedDispatch


class Methods(Caller):
    """Of :class:`ep_ops.Communicator`."""

    def capacity(self, max_tokens: int | None = None, alignment: int | None = None) -> int:
        """Rows that hold whatever ``max_tokens`` tokens per rank may route here without a drop.

        A token that names one expert several times takes a row each time, which this does not allow for.
        """
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        align = self.alignment if alignment is None else alignment
        return worst_case_rows(self.world_size, tokens, self.top_k, self.num_local_experts, align)

    def plan(
        self,
        topk_idx: Tensor,
        *,
        capacity: int | None = None,
        slots: int = 0,
        max_tokens: int | None = None,
        alignment: int | None = None,
    ) -> tuple[Route, Tensor]:
        """The route of ``topk_idx`` (int32 [T, K], -1 none), and ``dropped`` (int32 [El]).

        Args:
            capacity: rows of the receive buffer, a multiple of ``alignment``; default: :meth:`capacity` of
                ``max_tokens``, or ``El * slots``.
            slots: 0: segments follow each other; else rows that each local expert has ([El, slots, H] layout).
            max_tokens: bound on T that all ranks share for this call; default: ``max_tokens_per_rank``.
            alignment: segments are padded to a multiple of it; default: the communicator's.
        """
        sizes = self._sizes("plan", capacity, slots, max_tokens, alignment)
        if topk_idx is None:  # of an operator without any tensor torch knows no kernel
            refuse("plan", self.backend, "topk_idx is None; allowed: a tensor", max_tokens=sizes[-1])
        topk_idx, batch = inputs.to_plan(self, topk_idx)
        send_rows, arrivals, offs, counts, dropped = call("plan", topk_idx, *sizes, *self.place)
        if self.overflowed is not None:
            self.overflowed.add(dropped)
        rows, alignment, _, tokens = sizes
        return Route(topk_idx, send_rows, arrivals, offs, counts, alignment, rows, tokens, batch, slots), dropped

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        capacity: int | None = None,
        slots: int = 0,
        max_tokens: int | None = None,
        alignment: int | None = None,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
        zeros: bool | None = None,
    ) -> Dispatched:
        """Send every row of ``x`` [T, H] (and its weights, [T, K]) to the experts that ``topk_idx`` names.

        Weights are float32, float64 where the rows are; those of a narrower dtype are widened, ids may be int64, and T
        may be several dimensions ([B, S, H] with [B, S, K]), which a combine gives back. Under ``torch.autocast`` rows
        are brought to the communicator's dtype. The operators themselves take [T, H], int32 and the dtypes named alone.

        ``capacity`` ... ``alignment`` as for :meth:`plan`. Does not touch the host on the cute backend. Differentiable.

        ``format``: what rows arrive as, such as "e4m3/128/pow2" (empty: as x is); ``scales_as``: how the scales of
        received rows lie; ``scales``: those of an x that is quantised already; ``zeros``: whether padding rows hold
        zeros (by default where gradients are on, which may read them), else they are undefined. docs/formats.md has
        them all.

        Here and elsewhere TypeError for a wrong dtype, ValueError for a wrong shape, device or value, for a tensor that
        is not contiguous, and for rows that do not begin at a multiple of 16 bytes.
        """
        sizes = self._sizes("dispatch", capacity, slots, max_tokens, alignment)
        x, topk_idx, topk_weights, batch = inputs.to_send(self, x, topk_idx, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, batch)
        delivery = scales, format, scales_as, torch.is_grad_enabled() if zeros is None else zeros
        out = call("dispatch", x, topk_weights, topk_idx, *sizes, *self.place, *delivery)
        if self.overflowed is not None:
            self.overflowed.add(out[-1])
        return _dispatched(out, topk_idx, topk_weights, (sizes[1], sizes[0], sizes[3], batch, slots), delivery)

    def dispatch_dynamic(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        max_tokens: int | None = None,
        alignment: int | None = None,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
        zeros: bool | None = None,
    ) -> Dispatched:
        """:meth:`dispatch` into exactly as many rows as are needed; waits for the device once."""
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        align = self.alignment if alignment is None else alignment
        x, topk_idx, topk_weights, batch = inputs.to_send(self, x, topk_idx, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, batch)
        delivery = scales, format, scales_as, torch.is_grad_enabled() if zeros is None else zeros
        out = call("dispatch_dynamic", x, topk_weights, topk_idx, align, tokens, *self.place, *delivery)
        return _dispatched(out, topk_idx, topk_weights, (align, out[0].shape[0], tokens, batch), delivery)

    @overload
    def dispatch_planned(
        self, x: Tensor, route: Route, topk_weights: Tensor | None = None, *, zeros: bool | None = None
    ) -> tuple[Tensor, Tensor | None]: ...

    @overload
    def dispatch_planned(
        self, x: Tensor, route: Route, topk_weights: Tensor | None = None, *, scales: Tensor | None = None, format: str,
        scales_as: str = "", zeros: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...  # fmt: skip

    def dispatch_planned(
        self, x: Tensor, route: Route, topk_weights: Tensor | None = None, *, scales: Tensor | None = None,
        format: str = "", scales_as: str = "", zeros: bool | None = None,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Send ``x`` along a known route, into as many rows as it was planned with: rows, and their weights if given;
        with a ``format`` their scales too, None where it has none (see :meth:`dispatch`).

        Differentiable. (Of a token-major route :meth:`dispatch_tokens_planned` takes weights, this one x alone.)
        """
        if not isinstance(route, Route):
            self._refuse_route("dispatch_planned", route)
        if route.token_major:
            self._refuse_weights("dispatch_planned", topk_weights, route)
        args = (*route[:5], route.num_rows, route.alignment, route.max_tokens, self.name)
        x, topk_weights = inputs.with_weights(self, x, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, route.batch)
        delivery = scales, format, scales_as, torch.is_grad_enabled() if zeros is None else zeros, route.slots
        rows, recv_scales, weights = call("dispatch_planned", x, topk_weights, *args, *delivery)
        weights = None if topk_weights is None else weights
        return (rows, weights, scales_of(rows, recv_scales, route, format, scales_as)) if format else (rows, weights)

    def combine(
        self, y: Tensor, route: Route, weights: Tensor | None = None, *, residual: Tensor | None = None,
        grad_format: str = "",
    ) -> Tensor:  # fmt: skip
        """Bring the rows ``y`` [R, H] home and add them, times ``weights`` [R] if given: [T, H]. Differentiable.

        ``residual`` [T, H], given on all ranks or on none, is added before the sum is rounded.

        ``grad_format``: a format that begins with ``wire:``, the same on all ranks, in which backward sends the
        gradient to the rows; empty: as it is. docs/formats.md says how accurate that is.
        """
        if not isinstance(route, Route):
            self._refuse_route("combine", route)
        if route.token_major:
            self._refuse_weights("combine", weights, route)
        y, weights = inputs.with_weights(self, y, weights)
        if residual is not None:
            residual = inputs.rows(self, residual)
        return _home(call("combine", y, weights, *route[:6], route.max_tokens, self.name, residual, grad_format), route)

    def combine_gathered(self, y: Tensor, route: Route) -> Tensor:
        """:meth:`combine` without weights, of rows that lie in :meth:`empty_rows`. Same result to the bit.

        The owners fetch the rows where they are, all of them; :meth:`combine` first adds up those of a token on a rank.
        So this is for one row for each copy of a token: experts that are as many as ranks, or rows that are added up
        already. Ends when all ranks have fetched theirs. Differentiable.

        Rows ``y`` that lie elsewhere are copied there first. Under ``torch.compile`` they are not where Inductor
        generates the kernel that makes them, or has a product make them (``torch.mm``): that writes them there
        (docs/throughput.md). ValueError for more rows than ``symmetric_rows``.
        """
        if not isinstance(route, Route):
            self._refuse_route("combine_gathered", route)
        return _home(call("combine_gathered", y, *route[:6], route.max_tokens, self.name), route)

    def dispatch_start(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        capacity: int | None = None,
        slots: int = 0,
        max_tokens: int | None = None,
        alignment: int | None = None,
        scales: Tensor | None = None,
        format: str = "",
        scales_as: str = "",
        zeros: bool | None = None,
        flight: int = 0,
    ) -> StartedDispatch:
        """Begins :meth:`dispatch` beside the current stream: what comes before :meth:`dispatch_wait` overlaps with it.

        ``flight`` (0 or 1): which of the operations it is that may be under way at once; two micro-batches take one
        each. Until everything has been waited for, nothing but starts and waits of this communicator may be called,
        starts in the same order on all ranks. In backward the gradient of the wait starts and that of the start waits,
        in the same flight. The tensors that are given must stay as they are until the wait. docs/overlap.md.
        """
        sizes = self._sizes("dispatch_start", capacity, slots, max_tokens, alignment)
        x, topk_idx, topk_weights, batch = inputs.to_send(self, x, topk_idx, topk_weights)
        if scales is not None:
            scales = inputs.scales(scales, batch)
        delivery = scales, format, scales_as, torch.is_grad_enabled() if zeros is None else zeros
        ticket = call("dispatch_start", x, topk_weights, topk_idx, *sizes, *self.place, *delivery, flight)
        return StartedDispatch(ticket, x, topk_weights, topk_idx, Sizes(*sizes), batch, delivery, flight)

    def dispatch_wait(self, started: StartedDispatch) -> Dispatched:
        """What :meth:`dispatch` returns. Differentiable."""
        if not isinstance(started, StartedDispatch):
            raise TypeError(f"started is a {type(started).__name__}; allowed: what dispatch_start returned")
        ticket, x, topk_weights, topk_idx, sizes, batch, delivery, flight = started
        out = call("dispatch_wait", ticket, x, topk_weights, topk_idx, *sizes, *self.place, *delivery, flight)
        if self.overflowed is not None:
            self.overflowed.add(out[-1])
        return _dispatched(out, topk_idx, topk_weights, (sizes[1], sizes[0], sizes[3], batch, sizes[2]), delivery)

    def combine_start(
        self, y: Tensor, route: Route, weights: Tensor | None = None, *, flight: int = 0
    ) -> StartedCombine:
        """Begins :meth:`combine` beside the current stream; see :meth:`dispatch_start`."""
        if not isinstance(route, Route):
            self._refuse_route("combine_start", route, flight)
        if route.token_major:
            self._refuse_weights("combine_start", weights, route, flight)
        y, weights = inputs.with_weights(self, y, weights)
        ticket = call("combine_start", y, weights, *route[:6], route.max_tokens, self.name, flight)
        return StartedCombine(ticket, y, weights, route, flight)

    def combine_wait(self, started: StartedCombine) -> Tensor:
        """What :meth:`combine` returns. Differentiable."""
        if not isinstance(started, StartedCombine):
            raise TypeError(f"started is a {type(started).__name__}; allowed: what combine_start returned")
        ticket, y, weights, route, flight = started
        return _home(call("combine_wait", ticket, y, weights, *route[:6], route.max_tokens, self.name, flight), route)

    def _refuse_weights(self, operator: str, weights: Tensor | None, route: Route, flight: int = 0) -> None:
        """Of rows of a token-major route."""
        if weights is not None:
            refuse(
                operator, self.backend,
                "weights are given for the rows of a token-major route, which have one for each of their experts;"
                " allowed: None (combines: weigh before, by ep_ops.nn.reduce_rows; dispatches:"
                " dispatch_tokens_planned)",
                flight, route.max_tokens,
            )  # fmt: skip

    def _sizes(
        self, operator: str, capacity: int | None, slots: int, max_tokens: int | None, alignment: int | None
    ) -> tuple[int, int, int, int]:
        """The fields of `Sizes`."""
        align = self.alignment if alignment is None else alignment
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        if not (type(align) is type(tokens) is type(slots) is int and (capacity is None or type(capacity) is int)):
            self._refuse_sizes(operator, capacity=capacity, slots=slots, max_tokens=tokens, alignment=align)
        if capacity is None:  # an alignment below 1 is for the operator to refuse
            if slots:
                capacity = self.num_local_experts * slots
            else:
                capacity = default_rows(self, self.capacity(tokens, max(align, 1)), tokens)
        return capacity, align, slots, tokens

    def _refuse_sizes(self, operator: str, **given: Any) -> None:
        """What is no number, with which the call would fail before the operator can tell the others."""
        tokens = given["max_tokens"]
        for name, value in given.items():
            if value is not None and not hasattr(value, "__index__"):
                reason = f"{name} is {value!r}; it must be an int"
                refuse(operator, self.backend, reason, max_tokens=tokens if name != "max_tokens" else 0)

    def _refuse_route(self, operator: str, route: Any, flight: int = 0) -> None:
        refuse(operator, self.backend, no_route(route), flight)


def _home(rows: Tensor, route: Route) -> Tensor:
    """[T, H] in the shape that the tokens had."""
    return rows if route.batch is None else rows.view(*route.batch, rows.shape[-1])


def _dispatched(
    out: Any, topk_idx: Tensor, topk_weights: Tensor | None, rest: tuple[Any, ...], delivery: tuple[Any, ...]
) -> Dispatched:
    """``rest``: the last fields of `Route`; ``delivery``: those of `Delivery`."""
    x, recv_scales, weights, send_rows, arrivals, offs, counts, dropped = out
    route = Route(topk_idx, send_rows, arrivals, offs, counts, *rest)
    weights = None if topk_weights is None else weights
    scales = scales_of(x, recv_scales, route, *delivery[1:3]) if delivery[1] else None
    return Dispatched(x, weights, route, dropped, scales)
