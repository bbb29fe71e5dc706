"""The operators of the reference backend. The docstring of this package defines them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...config import Member
from ...records import (
    DISTINCT,
    TOKEN_MAJOR,
    UNBOUNDED,
    UNKNOWN_ROW,
    Delivery,
    DispatchTensors,
    Operation,
    Placed,
    Received,
    Route,
    Sizes,
    route_of,
)
from .. import split
from ..base import Formats, lies_elsewhere, not_gatherable
from ..budget import Budget
from . import copies, quantized
from .meeting import Meeting, layout_index
from .placing import place
from .ranks import Ranks
from .transfer import Transfer
from .waits import WaitingExchange, Waits


class ReferenceBackend:
    """Runs on any device. Holds no memory but the rows of empty_rows. Every operator synchronizes the host."""

    name = "reference"
    calls = 0

    def __init__(self, member: Member) -> None:
        self._waits = Waits(member)
        self.exchange = WaitingExchange(member, self._waits)
        self.ranks = Ranks(member)
        self.rows = Transfer(self.ranks, self.exchange, member.weights_dtype, float("nan") if member.strict else 0.0)
        self.name_of_communicator, self.strict = member.name, member.strict
        self.rows_dtype, self.hidden_size, self.symmetric_rows = member.dtype, member.hidden_size, member.symmetric_rows
        self.budget = Budget(1, 2)  # validated only
        self._meeting = Meeting(self.rows, self._waits, member.name, member.number)
        self._order = split.Order(member.name)
        self._in_start = False  # whether an operation runs as part of its start
        self._ended: dict[int, Any] = {}  # flight -> result for its wait

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Run an operator that is neither start nor wait."""
        self._meeting.stage = "before"
        self._waits.check()
        if self.strict and not self._in_start:
            self._order.check()
        yield
        self._meeting.stage = "settled"

    # ------------------------------------------------------------------ planning

    def plan(self, topk_idx: Tensor, sizes: Sizes) -> Placed:
        with self._operation():
            return self._plan("plan", topk_idx, sizes, {})

    def _plan(
        self, operator: str, topk_idx: Tensor, sizes: Sizes, same: dict[str, int], problem: str | None = None
    ) -> Placed:
        """Plan a route. ``same``: values that ranks must agree on besides ``max_tokens`` and the layout."""
        tokens = topk_idx.shape[0]
        same = {"max_tokens": sizes.max_tokens, "layout": layout_index(sizes.layout), **same}
        problem = problem or self.ranks.problem(topk_idx, sizes.layout == DISTINCT)
        rooms = self._meeting.meet(operator, same, (sizes.capacity, sizes.alignment, sizes.slots), problem)

        padded_idx = topk_idx.new_full((sizes.max_tokens, topk_idx.shape[1]), -1)
        padded_idx[:tokens] = topk_idx
        everyone = self.exchange.all_gather(padded_idx).long()  # [W, max_tokens, K], the same on all ranks
        placed = place(self.ranks, everyone, rooms.tolist(), sizes, tokens)
        if sizes.layout != TOKEN_MAJOR:
            return placed
        return placed._replace(
            recv_idx=copies.local_ids(self.rows, route_of(topk_idx, placed, sizes, self.ranks.world_size))
        )

    # ------------------------------------------------------------------ dispatch

    def dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> DispatchTensors:
        with self._operation():
            operator = "dispatch_dynamic" if sizes.capacity == UNBOUNDED else "dispatch"
            same, problem = _terms(topk_weights, delivery), quantized.problem(delivery)
            placed = self._plan(operator, topk_idx, sizes, same, problem)
            received = self._move(x, topk_weights, route_of(topk_idx, placed, sizes, self.ranks.world_size), delivery)
            return DispatchTensors(*received, *placed)

    dispatch_dynamic = dispatch

    def dispatch_planned(self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery) -> Received:
        with self._operation():
            same = {**_terms(topk_weights, delivery), "layout": layout_index(route.layout)}
            self._meeting.along("dispatch_planned", same, route, quantized.problem(delivery))
            return self._move(x, topk_weights, route, delivery)

    def _move(self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery) -> Received:
        if route.layout == TOKEN_MAJOR:
            return copies.to_token_rows(self.rows, x, topk_weights, route, delivery)
        return self.rows.to_rows(x, topk_weights, route, delivery)

    # ------------------------------------------------------------------ combine

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None, format: str = ""
    ) -> Tensor:
        with self._operation():
            same = {**_given(recv_weights=recv_weights, residual=residual), **quantized.agreed(format)}
            self._meeting.along("combine", same, route)
            return self.rows.to_tokens(y, recv_weights, route, residual, format)

    def empty_rows(self, num_rows: int) -> Tensor:
        """Return ordinary memory, the same in every call."""
        return self._memory[:num_rows].detach().fill_(self.rows.unused)

    @functools.cached_property
    def _memory(self) -> Tensor:
        shape = self.symmetric_rows, self.hidden_size
        return torch.empty(shape, dtype=self.rows_dtype, device=self.ranks.device)

    def combine_gathered(self, y: Tensor, route: Route) -> Tensor:
        with self._operation():
            problem, most = None, self.symmetric_rows
            if self.strict:
                problem = not_gatherable(y, self._memory if most else None, most, self.name_of_communicator)
            if bool((route.send_rows == UNKNOWN_ROW).any()):
                problem = "the route of places does not contain the rows at other ranks; allowed: combine"
            self._meeting.along("combine_gathered", {}, route, problem)
            if self.strict and lies_elsewhere(y, self._memory):
                y = self.empty_rows(y.shape[0]).copy_(y)
            return self.rows.to_tokens(y, None, route)

    def bind(self, operator: str, *args: Any) -> None:
        """Return None: no call is faster than the operator's method."""

    # ------------------------------------------------------------------ split operations

    def start(self, flight: int, operator: str, *args: Any) -> Tensor:
        """Run the whole operation and keep its result for the wait. Without ``strict``, tools call waits without
        starts: waits with arguments run the operation, others return zeros."""
        self._meeting.stage = "before"
        self._waits.check()
        made = split.ticket(self.ranks.device)
        if self.strict:
            self._order.free(flight)
        elif "backward" not in operator:
            return made
        self._in_start = True
        try:
            self._ended[flight] = getattr(self, operator)(*args)
        finally:
            self._in_start = False
        self._order.start(flight, operator)
        return made

    def wait(self, flight: int, operator: str, *args: Any) -> Any:
        """Return the result of the start. A wait meets no other rank, because the operation has run in its start."""
        if not self.strict:
            if "backward" not in operator:
                return getattr(self, operator)(*args)
            if flight not in self._order.started:
                (blank,) = args
                return tuple(tensor.zero_() for tensor in blank())
        self._meeting.stage = "settled"
        self._order.wait(flight, operator)
        return self._ended.pop(flight)

    def end_flights(self) -> None:
        self._order.started.clear()
        self._ended.clear()

    # ------------------------------------------------------------------ backwards

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        with self._operation():
            same = _given(grad_recv_x=grad_recv_x, grad_recv_weights=grad_recv_weights)
            same["layout"] = layout_index(route.layout)
            self._meeting.along("dispatch_backward", same, route)
            grad_x = grad_topk_weights = torch.empty(0, dtype=self.rows.weights_dtype, device=self.ranks.device)
            if grad_recv_x is not None:
                grad_x = self.rows.to_tokens(grad_recv_x, None, route)
            if grad_recv_weights is not None:
                grad_topk_weights = copies.weights_home(self.rows, grad_recv_weights, route)
            return grad_x, grad_topk_weights

    def combine_backward(
        self, grad_out: Tensor, y: Tensor | None, recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        with self._operation():
            self._meeting.along("combine_backward", _given(y=y, recv_weights=recv_weights), route)
            grad_y, _, none = self.rows.to_rows(grad_out, None, route, Delivery())
            if recv_weights is None:
                return grad_y, none
            grad_y, grad_recv_weights = self.rows.with_weights(grad_y, y, recv_weights, route)
            return grad_y, none if grad_recv_weights is None else grad_recv_weights

    # ------------------------------------------------------------------ the rest of a backend

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """Meet the other ranks in the operator (for a split operator: in its start); they raise ``reason``."""
        whole, part = split.parts_of(operator)
        started = self._order.started
        if part == "wait" and self.strict:
            if started.get(flight) == whole:  # it has run; its results are discarded
                del started[flight], self._ended[flight]
        elif not started or (part == "start" and flight not in started):  # else the other ranks reject it too
            self._meeting.gather(whole, reason)
            self._meeting.stage = "settled"

    def interrupted(
        self, operator: str, error: BaseException, again: Callable[[], Any], flight: int = 0, max_tokens: Any = 0
    ) -> None:
        """Reject the operation if the ranks have not met yet. If the other ranks wait for data after the meeting, the
        communicator fails."""
        if self._meeting.stage == "before":
            self.reject(operator, f"{type(error).__name__}: {error}".rstrip(": "), flight, max_tokens)
        elif self._meeting.stage == "within":
            self._waits.give_up(f"ep::{operator}: {type(error).__name__}: {error}".rstrip(": "))

    def compile(self, formats: Formats = ()) -> None:
        """Do nothing."""

    def warmup(self) -> None:
        """Do nothing."""

    def last_operations(self, rank: int) -> list[Operation]:
        """Return nothing: operations are not recorded."""
        return []

    def has_failed(self) -> bool:
        return self._waits.failed is not None

    def unsaid(self) -> str | None:
        return self._waits.unsaid()

    def call_on_failure(self, callback: Callable[[str], None]) -> None:
        """Do nothing: every failure raises."""

    def listen(self) -> None:
        self._waits.listen()

    def check_errors(self) -> None:
        self._waits.check()

    def destroy(self, keep: bool) -> None:
        """Release the process group, whose threads would otherwise live into Python's finalization."""
        self.exchange.group = None


def _terms(topk_weights: Tensor | None, delivery: Delivery) -> dict[str, int]:
    """Return the values of a dispatch that ranks must agree on."""
    return {**_given(topk_weights=topk_weights), **quantized.agreed(delivery.format)}


def _given(**tensors: Tensor | None) -> dict[str, int]:
    """Return which tensors are given, as values that ranks must agree on."""
    return {f"whether {name} is given": int(tensor is not None) for name, tensor in tensors.items()}
