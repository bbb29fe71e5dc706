"""Methods of :class:`ep_ops.Communicator`, which convert dtypes, fill in sizes, call operators and return records."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from meta_kernels.arguments import (
    CombineArgs,
    CombineGatheredArgs,
    CombineStartArgs,
    CombineWaitArgs,
    DispatchArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    DispatchStartArgs,
    DispatchWaitArgs,
    PlanArgs,
)

from . import formats, inputs
from .config import worst_case_rows
from .inputs import sizes_of
from .operators.rejection import reject
from .operators.table import (
    COMBINE,
    COMBINE_GATHERED,
    COMBINE_START,
    COMBINE_WAIT,
    DISPATCH,
    DISPATCH_DYNAMIC,
    DISPATCH_PLANNED,
    DISPATCH_START,
    DISPATCH_WAIT,
    PLAN,
)
from .records import (
    DISTINCT,
    GROUPED,
    TOKEN_MAJOR,
    Dispatched,
    DispatchTensors,
    Route,
    StartedCombine,
    StartedDispatch,
    check_types,
    wrong_type,
)
from .registry import reject_destroyed

if TYPE_CHECKING:
    from typing_extensions import Never

    from .registry import Living as Attributes
else:
    Attributes = object

_A = TypeVar("_A", DispatchArgs, DispatchStartArgs)
_new = tuple.__new__  # makes records in a third of the time
_is_grad_enabled = torch.is_grad_enabled
_SCALES = DispatchArgs._fields.index("scales")


class Methods(Attributes):
    """The operators of a :class:`ep_ops.Communicator`, which sets the attributes."""

    def capacity(self, max_tokens: int | None = None, alignment: int | None = None) -> int:
        """Return the number of rows of a receive buffer that has room for every row in the worst case.

        This is the default ``capacity`` of :meth:`dispatch`. It assumes that the expert ids of a token are distinct.

        Args:
            max_tokens: bound on the number of tokens of any rank. None: ``max_tokens_per_rank``.
            alignment: the rows of each expert are padded to a multiple of this number. None: the communicator's.

        Returns:
            The number of rows, a multiple of ``alignment``.

        Raises:
            ValueError: ``alignment`` is less than 1.
        """
        tokens = self.max_tokens_per_rank if max_tokens is None else max_tokens
        align = self.alignment if alignment is None else alignment
        if align < 1:
            raise ValueError(f"alignment is {align}; allowed: an int of at least 1")
        return worst_case_rows(self.world_size, tokens, self.top_k, self.num_local_experts, align)

    def plan(
        self, topk_idx: Tensor, *surplus: Never, layout: str = GROUPED, capacity: int | None = None, slots: int = 0,
        max_tokens: int | None = None, alignment: int | None = None, **unknown: Never,
    ) -> tuple[Route, Tensor]:  # fmt: skip
        """Compute the route for ``topk_idx`` without sending rows.

        Collective. Does not synchronize the host on the cute backend.

        Args:
            topk_idx, layout, capacity, slots, max_tokens, alignment: as for :meth:`dispatch`.

        Returns:
            The :class:`ep_ops.Route`, for :meth:`dispatch_planned` and :meth:`combine`, and ``dropped``, int32 [El]:
            for each local expert, the number of rows that do not fit.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`dispatch`.
        """
        if self.destroyed or surplus or unknown:
            self._reject("plan", surplus, unknown, 0, max_tokens)
        try:
            rows, align, slots, tokens, layout = sizes_of(self, layout, capacity, slots, max_tokens, alignment)
            topk_idx, batch = inputs.to_plan(self, topk_idx)
        except Exception as error:
            reject("plan", self, error, 0, max_tokens)
        a = PlanArgs(
            topk_idx=topk_idx, capacity=rows, alignment=align, slots=slots, max_tokens=tokens,
            num_local_experts=self.num_local_experts, world_size=self.world_size, comm=self.name, layout=layout,
        )  # fmt: skip
        send_rows, arrivals, offs, counts, dropped, recv_idx = PLAN.call(a)
        if self.overflowed is not None:
            self.overflowed.add(dropped)
        layout = GROUPED if layout == DISTINCT else layout
        local_idx = recv_idx if layout == TOKEN_MAJOR else None
        along = topk_idx, send_rows, arrivals, offs, counts
        return Route(*along, align, rows, tokens, batch, slots, layout, dropped, local_idx), dropped

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None, *surplus: Never, layout: str = GROUPED,
        capacity: int | None = None, slots: int = 0, exact: bool = False, max_tokens: int | None = None,
        alignment: int | None = None, scales: Tensor | None = None, format: str = "", scales_as: str = "",
        zeros: bool | None = None, **unknown: Never,
    ) -> Dispatched:  # fmt: skip
        """Send each token to the ranks that hold its experts and return the rows that arrive at this rank.

        Collective: every rank calls it, in the same order and with the same ``max_tokens``. T may differ between ranks
        and may be 0. Differentiable. Does not synchronize the host on the cute backend, unless ``exact`` is True.

        Args:
            x: tokens, [T, H] or [..., H], in the communicator's dtype. Under ``torch.autocast`` they are cast to it.
            topk_idx: global expert ids, int32 or int64 [T, K], or [..., K] like x; -1 means no expert. The ids of
                a token must be distinct, unless ``capacity``, ``slots`` or ``exact`` is given or rows are token-major.
            topk_weights: routing weights [T, K], or [..., K] like x, float32 (float64 with float64 rows); narrower
                dtypes are converted. If None, the rows have no weights.
            layout: order of the received rows. "grouped": one contiguous segment for each local expert, padded to
                a multiple of ``alignment``. "padded": ``slots`` rows for each local expert. "token_major": one row for
                each (token, rank), in the order of (source rank, token), with local expert ids and weights [R, K], for
                GEMMs that gather their rows (docs/token-major.md).
            capacity: number of rows R of the receive buffer, a multiple of ``alignment``. Rows that do not fit are
                dropped and counted in ``Dispatched.dropped``. None: the worst case, :meth:`capacity` of ``max_tokens``,
                or ``world_size * max_tokens`` for token-major rows. Cannot be combined with ``slots``.
            slots: number of rows of each local expert, a positive multiple of ``alignment``. Required with layout
                "padded", not allowed with others.
            exact: allocate exactly as many rows as arrive (padding included), which synchronizes the host once. Cannot
                be combined with ``capacity``, ``slots`` or layout "padded".
            max_tokens: bound on T in this call, the same on all ranks. None: ``max_tokens_per_rank``.
            alignment: segments are padded to a multiple of this many rows. None: the communicator's; token-major: 1.
            scales: scales of an x that is already quantized, [T, G] or [T] (docs/formats.md).
            format: format in which rows arrive, such as "e4m3/128/pow2". Empty: the dtype of x.
            scales_as: memory layout of the received scales. Empty: the first layout of the format.
            zeros: whether padding rows hold zeros or are undefined. None: zeros if gradients are enabled, for backward.

        Returns:
            Dispatched: received rows, their weights, the route for :meth:`combine`, and counts of dropped rows.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: an argument has the wrong shape, device or value, a tensor is not contiguous, or its address is
                not a multiple of 16 bytes. The other ranks raise ValueError with the same reason.
            RuntimeError: a peer did not arrive within ``timeout`` seconds, or called a different operator.
        """
        if self.destroyed or surplus or unknown:
            self._reject("dispatch_dynamic" if exact is True else "dispatch", surplus, unknown, 0, max_tokens)
        try:
            rows, align, slots, tokens, layout = sizes_of(self, layout, capacity, slots, max_tokens, alignment, exact)
        except Exception as error:
            reject("dispatch_dynamic" if exact is True else "dispatch", self, error, 0, max_tokens)
        a: DispatchArgs = _new(DispatchArgs, (x, topk_weights, topk_idx, rows, align, slots, tokens,
            self.num_local_experts, self.world_size, self.name, layout, scales, format, scales_as,
            _is_grad_enabled() if zeros is None else zeros))  # fmt: skip
        if exact:
            return self._dispatch_exactly(a, max_tokens)
        converts = self.expert_ids is not None or getattr(topk_idx, "dtype", None) is not torch.int32
        if not (converts or _is_grad_enabled()) and (out := DISPATCH.repeat(a)) is not None:
            return self._dispatched(out, a, rows, slots, None)
        a, batch = self._to_send("dispatch", a, max_tokens)
        return self._dispatched(DISPATCH.call(a), a, rows, slots, batch)

    def _dispatch_exactly(self, a: DispatchArgs, max_tokens: int | None) -> Dispatched:
        """Run a dispatch with exactly as many rows as arrive."""
        sent, batch = self._to_send("dispatch_dynamic", a, max_tokens)
        fewer = *sent[:3], sent.alignment, *sent[6:]  # without capacity and slots
        dynamic: DispatchDynamicArgs = _new(DispatchDynamicArgs, fewer)
        out = DISPATCH_DYNAMIC.call(dynamic)
        return self._dispatched(out, dynamic, out[0].shape[0], 0, batch)

    def dispatch_planned(
        self, x: Tensor, route: Route, topk_weights: Tensor | None = None, *surplus: Never,
        scales: Tensor | None = None, format: str = "", scales_as: str = "", zeros: bool | None = None,
        **unknown: Never,
    ) -> Dispatched:  # fmt: skip
        """Send ``x`` along an existing route, and return the received rows in the order of that route.

        Collective and differentiable. Does not synchronize the host on the cute backend.

        Args:
            x: tokens, [T, H] or [..., H], in the communicator's dtype.
            route: result of :meth:`plan` or of a dispatch of this communicator.
            topk_weights, scales, format, scales_as, zeros: as for :meth:`dispatch`.

        Returns:
            Dispatched: as for :meth:`dispatch`. ``dropped`` contains the counts of the plan or dispatch that made the
                route.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`dispatch`.
        """
        if self.destroyed or surplus or unknown:
            self._reject("dispatch_planned", surplus, unknown, 0, getattr(route, "max_tokens", None))
        try:
            check_types(Route, route=route)
            x, topk_weights, route = inputs.to_send_along(self, x, topk_weights, route)
            if scales is not None:
                scales = inputs.scales(scales, route.batch)
        except Exception as error:
            reject("dispatch_planned", self, error, 0, getattr(route, "max_tokens", None))
        a = DispatchPlannedArgs(
            x=x, topk_weights=topk_weights, topk_idx=route.topk_idx, send_rows=route.send_rows,
            arrivals=route.arrivals, offs=route.offs, counts=route.counts, num_rows=route.num_rows,
            alignment=route.alignment, max_tokens=route.max_tokens, comm=self.name, layout=route.layout,
            slots=route.slots, scales=scales, format=format, scales_as=scales_as, zeros=_clears(zeros),
        )  # fmt: skip
        rows, recv_scales, weights = DISPATCH_PLANNED.call(a)
        weights = None if topk_weights is None else weights
        received = _scales_of(rows, recv_scales, route, format, scales_as) if format else None
        dropped = torch.zeros_like(route.counts) if route.dropped is None else route.dropped
        if self.counts is not None:
            self.counts.dispatched(route, dropped, format)
        return Dispatched(rows, weights, route, dropped, received, route.local_idx)

    def combine(
        self, y: Tensor, route: Route, weights: Tensor | None = None, *surplus: Never, residual: Tensor | None = None,
        format: str = "", grad_format: str = "", **unknown: Never,
    ) -> Tensor:  # fmt: skip
        """Return the rows ``y`` to the ranks of their tokens and compute the weighted sum of the rows of each token.

        Collective and differentiable. Does not synchronize the host on the cute backend. The order of summation is
        fixed, so results are bit-identical from run to run.

        Args:
            y: outputs of the experts, [R, H] in the communicator's dtype, in the same order as the rows of the
                dispatch. Contents of rows that hold no token are ignored.
            route: result of a dispatch or of :meth:`plan`.
            weights: weight of each row, float32 [R] (float64 with float64 rows). None: all weights are 1. Not allowed
                for token-major rows; apply their weights with :func:`ep_ops.nn.reduce_rows`.
            residual: [T, H] or [..., H], added to each token's sum before the sum is rounded. Given on all ranks or on
                none.
            format: format in which each rank sends its sums to the ranks of the tokens, the same on all ranks:
                "wire:e4m3/32/mx" or "wire:e4m3/128/pow2". Empty: the communicator's dtype. Gradients do not depend on
                it. docs/formats.md states the rounding error.
            grad_format: format that begins with ``wire:`` in which backward sends the gradient to the rows, the same on
                all ranks. Empty: unquantized. docs/formats.md states the rounding error.

        Returns:
            Sums [T, H], or [..., H] in the shape of the tokens.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`dispatch`.
        """
        if self.destroyed or surplus or unknown:
            self._reject("combine", surplus, unknown, 0, getattr(route, "max_tokens", None))
        if not isinstance(route, Route):
            reject("combine", self, wrong_type("route", route, Route), 0, None)
        topk_idx, send_rows, arrivals, offs, counts, align, _, tokens, batch, _, layout, _, _ = route
        a: CombineArgs = _new(CombineArgs, (
            y, weights, topk_idx, send_rows, arrivals, offs, counts, align, tokens, self.name, residual, grad_format,
            format,
        ))  # fmt: skip
        out = None
        if not _is_grad_enabled() and (weights is None or layout != TOKEN_MAJOR):
            out = COMBINE.repeat(a)
        if out is None:
            try:
                y, weights = self._rows(y, weights, route)
                residual = None if residual is None else inputs.residual(self, residual, route)
            except Exception as error:
                reject("combine", self, error, 0, tokens)
            if y is not a.y or weights is not a.recv_weights or residual is not a.residual:
                a = a._replace(y=y, recv_weights=weights, residual=residual)
            out = COMBINE.call(a)
        if self.counts is not None:
            self.counts.combined(route, format)
        return out if batch is None else _home(out, route)

    def combine_gathered(self, y: Tensor, route: Route, *surplus: Never, **unknown: Never) -> Tensor:
        """Combine without weights: each rank reads the rows of its tokens from symmetric memory (:meth:`empty_rows`).

        Collective and differentiable. Returns the same bits as :meth:`combine`. The operation ends when all ranks have
        read their rows. Use it if a token has at most one row on each rank: with one expert on each rank, or with rows
        that are already summed. If a token has several rows on a rank, :meth:`combine` sends their sum once, but this
        method reads each row.

        Rows in other memory are copied to symmetric memory first. Under ``torch.compile`` the copy is avoided if
        Inductor generates the kernel that computes ``y`` or passes its output memory (``torch.mm``); see
        docs/throughput.md.

        Args:
            y: [R, H] in the communicator's dtype, at most ``symmetric_rows`` rows.
            route: result of a dispatch or of :meth:`plan`.

        Returns:
            Sums [T, H], or [..., H] in the shape of the tokens.

        Raises:
            ValueError: there are more rows than ``symmetric_rows``. Other errors as for :meth:`dispatch`.
        """
        if self.destroyed or surplus or unknown:
            self._reject("combine_gathered", surplus, unknown, 0, getattr(route, "max_tokens", None))
        if not isinstance(route, Route):
            reject("combine_gathered", self, wrong_type("route", route, Route), 0, None)
        a = CombineGatheredArgs(
            y=y, topk_idx=route.topk_idx, send_rows=route.send_rows, arrivals=route.arrivals, offs=route.offs,
            counts=route.counts, alignment=route.alignment, max_tokens=route.max_tokens, comm=self.name,
        )  # fmt: skip
        return _home(COMBINE_GATHERED.call(a), route)

    def dispatch_start(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None, *surplus: Never, layout: str = GROUPED,
        capacity: int | None = None, slots: int = 0, max_tokens: int | None = None, alignment: int | None = None,
        scales: Tensor | None = None, format: str = "", scales_as: str = "", zeros: bool | None = None, flight: int = 0,
        **unknown: Never,
    ) -> StartedDispatch:  # fmt: skip
        """Start :meth:`dispatch`, which then runs concurrently with the current stream until :meth:`dispatch_wait`.

        Until the wait of every start has been called, only starts and waits of this communicator may be called. All
        ranks call starts in the same order. The tensors must not be modified before the wait. In the backward pass, the
        gradient of the wait is a start, and the gradient of the start is a wait. See docs/overlap.md.

        Args:
            x, topk_idx, topk_weights, layout, capacity, slots, max_tokens, alignment: as for :meth:`dispatch`.
            scales, format, scales_as, zeros: as for :meth:`dispatch`.
            flight: 0 or 1, to distinguish two operations that are in progress at the same time.

        Returns:
            StartedDispatch: the argument of :meth:`dispatch_wait`.

        Raises:
            RuntimeError: the flight is in use. Other errors as for :meth:`dispatch`.
        """
        if self.destroyed or surplus or unknown:
            self._reject("dispatch_start", surplus, unknown, flight, max_tokens)
        try:
            rows, align, slots, tokens, layout = sizes_of(self, layout, capacity, slots, max_tokens, alignment)
        except Exception as error:
            reject("dispatch_start", self, error, flight, max_tokens)
        a = DispatchStartArgs(
            x=x, topk_weights=topk_weights, topk_idx=topk_idx, capacity=rows, alignment=align, slots=slots,
            max_tokens=tokens, num_local_experts=self.num_local_experts, world_size=self.world_size, comm=self.name,
            layout=layout, scales=scales, format=format, scales_as=scales_as, zeros=_clears(zeros), flight=flight,
        )  # fmt: skip
        a, batch = self._to_send("dispatch_start", a, max_tokens)
        return StartedDispatch(DISPATCH_START.call(a), a, batch)

    def dispatch_wait(self, started: StartedDispatch) -> Dispatched:
        """Finish a dispatch that :meth:`dispatch_start` has started, and return its result. Differentiable.

        Args:
            started: result of :meth:`dispatch_start`.

        Returns:
            Dispatched: as for :meth:`dispatch`.

        Raises:
            TypeError: ``started`` is not a StartedDispatch.
            RuntimeError: no dispatch was started in this flight.
        """
        reject_destroyed(self)
        if not isinstance(started, StartedDispatch):
            raise wrong_type("started", started, "what dispatch_start returned")
        a = started.arguments
        out = DISPATCH_WAIT.call(DispatchWaitArgs(started.ticket, *a))
        return self._dispatched(out, a, a.capacity, a.slots, started.batch)

    def combine_start(
        self, y: Tensor, route: Route, weights: Tensor | None = None, *surplus: Never, format: str = "",
        flight: int = 0, **unknown: Never,
    ) -> StartedCombine:  # fmt: skip
        """Start :meth:`combine`, which then runs concurrently with the current stream until :meth:`combine_wait`.

        The rules that :meth:`dispatch_start` states apply. A residual is not supported.

        Args:
            y, route, weights, format: as for :meth:`combine`.
            flight: 0 or 1, to distinguish two operations that are in progress at the same time.

        Returns:
            StartedCombine: the argument of :meth:`combine_wait`.

        Raises:
            RuntimeError: the flight is in use. Other errors as for :meth:`combine`.
        """
        if self.destroyed or surplus or unknown:
            self._reject("combine_start", surplus, unknown, flight, getattr(route, "max_tokens", None))
        try:
            check_types(Route, route=route)
            y, weights = self._rows(y, weights, route)
        except Exception as error:
            reject("combine_start", self, error, flight, getattr(route, "max_tokens", None))
        a = CombineStartArgs(
            y=y, recv_weights=weights, topk_idx=route.topk_idx, send_rows=route.send_rows, arrivals=route.arrivals,
            offs=route.offs, counts=route.counts, alignment=route.alignment, max_tokens=route.max_tokens,
            comm=self.name, flight=flight, format=format,
        )  # fmt: skip
        return StartedCombine(COMBINE_START.call(a), a, route)

    def combine_wait(self, started: StartedCombine) -> Tensor:
        """Finish a combine that :meth:`combine_start` has started, and return its result. Differentiable.

        Args:
            started: result of :meth:`combine_start`.

        Returns:
            Sums [T, H], or [..., H] in the shape of the tokens.

        Raises:
            TypeError: ``started`` is not a StartedCombine.
            RuntimeError: no combine was started in this flight.
        """
        reject_destroyed(self)
        if not isinstance(started, StartedCombine):
            raise wrong_type("started", started, "what combine_start returned")
        out = COMBINE_WAIT.call(CombineWaitArgs(started.ticket, *started.arguments))
        if self.counts is not None:
            self.counts.combined(started.route, started.arguments.format)
        return _home(out, started.route)

    # ------------------------------------------------------------------ arguments

    def _reject(
        self, operator: str, surplus: Sequence[Any], unknown: Collection[str], flight: Any, max_tokens: Any
    ) -> NoReturn:
        """Raise RuntimeError if the communicator was destroyed; otherwise reject on all ranks the arguments that a
        method does not have."""
        reject_destroyed(self)
        method = operator.removesuffix("_dynamic")
        known = list(inspect.signature(getattr(Methods, method)).parameters)[1:-1]
        positional, named = known[: (at := known.index("surplus"))], known[at + 1 :]
        problem = f"unknown arguments {', '.join(unknown)}; allowed: {', '.join(positional + named)}"
        if not unknown:
            problem = f"{at + len(surplus)} positional arguments; allowed: {at} ({', '.join(positional)})"
            problem += f", others by name ({', '.join(named)})" if named else ""
        reject(operator, self, TypeError(f"{method} got {problem}"), flight, max_tokens)

    def _to_send(self, operator: str, a: _A, max_tokens: int | None) -> tuple[_A, tuple[int, ...] | None]:
        """Return the arguments with tensors as operators take them, and the ``batch`` of the route. What cannot be
        converted is rejected on all ranks."""
        try:
            x, topk_idx, topk_weights, batch = inputs.to_send(self, a.x, a.topk_idx, a.topk_weights)
            scales = None if a.scales is None else inputs.scales(a.scales, batch)
        except Exception as error:
            reject(operator, self, error, getattr(a, "flight", 0), max_tokens)
        if x is a.x and topk_idx is a.topk_idx and topk_weights is a.topk_weights and scales is a.scales:
            return a, batch
        converted = x, topk_weights, topk_idx, *a[3:_SCALES], scales, *a[_SCALES + 1 :]
        return _new(type(a), converted), batch  # in a third of the time of `_replace`

    def _rows(self, y: Tensor, weights: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
        """Return the rows of a combine and their weights as operators take them."""
        if weights is not None and route.layout == TOKEN_MAJOR:
            raise ValueError(
                "weights are given for token-major rows, which have one for each of their experts; allowed: None"
                " (apply them with ep_ops.nn.reduce_rows)"
            )
        return inputs.with_weights(self, y, weights)

    # ------------------------------------------------------------------ results

    def _dispatched(
        self, out: DispatchTensors, a: DispatchArgs | DispatchDynamicArgs | DispatchStartArgs, num_rows: int,
        slots: int, batch: tuple[int, ...] | None,
    ) -> Dispatched:  # fmt: skip
        """Return the results of a dispatch with these arguments as a record."""
        recv_x, recv_scales, weights, send_rows, arrivals, offs, counts, dropped, recv_idx = out
        layout, local_idx = a.layout, None
        if layout == DISTINCT:
            layout = GROUPED
        elif layout == TOKEN_MAJOR:
            local_idx = recv_idx
        if self.overflowed is not None:
            self.overflowed.add(dropped)
        along = (
            a.topk_idx, send_rows, arrivals, offs, counts, a.alignment, num_rows, a.max_tokens, batch, slots, layout,
            dropped, local_idx,
        )  # fmt: skip
        route: Route = _new(Route, along)
        if self.counts is not None:
            self.counts.dispatched(route, dropped, a.format)
        kept = None if a.topk_weights is None else weights
        scales = _scales_of(recv_x, recv_scales, route, a.format, a.scales_as) if a.format else None
        made: Dispatched = _new(Dispatched, (recv_x, kept, route, dropped, scales, local_idx))
        return made


def _clears(zeros: bool | None) -> bool:
    """Return whether a dispatch clears padding: ``zeros``, or by default whether gradients are enabled."""
    return torch.is_grad_enabled() if zeros is None else zeros


def _home(rows: Tensor, route: Route) -> Tensor:
    """Return [T, H] in the shape of the tokens."""
    return rows if route.batch is None else rows.view(*route.batch, rows.shape[-1])


def _scales_of(rows: Tensor, recv_scales: Tensor, route: Route, format: str, scales_as: str) -> Tensor | None:
    """Return scales in the view that consumers take, or None if rows have none."""
    form = formats.format_of(format)
    if form.wire:
        return None
    grid = formats.Grid(route.num_rows, route.slots, route.offs.shape[0], rows.shape[1])
    return formats.view(recv_scales, formats.layout_of(form, scales_as), grid)
