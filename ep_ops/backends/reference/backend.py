"""The operators of the reference backend. The docstring of this package defines them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.arguments import (
    AnyCombine,
    AnyCombineBackward,
    AnyDispatch,
    AnyDispatchBackward,
    AnySizedDispatch,
    AnyStart,
    Args,
    CombineArgs,
    CombineGatheredArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    PlanArgs,
)

from ...config import Member
from ...records import (
    DISTINCT,
    TOKEN_MAJOR,
    UNKNOWN_ROW,
    DispatchTensors,
    Operation,
    Placed,
    Received,
    Route,
    gradient_route,
    plan_in,
    route_in,
    route_of,
)
from ...specs import (
    CombineBackwardSpec,
    CombineSpec,
    DispatchBackwardSpec,
    DispatchSpec,
    GatherSpec,
    PlanSpec,
    Spec,
)
from .. import split
from ..base import Formats, lies_elsewhere, not_gatherable
from ..budget import Budget
from . import copies, quantized
from .meeting import Meeting, layout_index
from .placing import place
from .ranks import ExpertRanks
from .transfer import Transfer
from .waits import WaitingExchange, Waits


class ReferenceBackend:
    """Runs on any device. Holds no memory but the rows of empty_rows. Every operator synchronizes the host."""

    name = "reference"
    calls = 0

    def __init__(self, member: Member) -> None:
        self._waits = Waits(member)
        self.exchange = WaitingExchange(member, self._waits)
        self.ranks = ExpertRanks(member)
        self.rows = Transfer(self.ranks, self.exchange, member.weights_dtype, float("nan") if member.strict else 0.0)
        self.name_of_communicator, self.strict = member.name, member.strict
        self.rows_dtype, self.hidden_size, self.symmetric_rows = member.dtype, member.hidden_size, member.symmetric_rows
        self.budget = Budget(1, 2)  # validated only
        self._meeting = Meeting(self.rows, self._waits, member.name, member.number)
        self._order = split.FlightOrder(member.name)
        self._in_start = False  # whether an operation runs as part of its start

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Run an operator that is neither start nor wait."""
        self._meeting.stage = "before"
        with self.exchange.turn:
            self._waits.check()
            if self.strict and not self._in_start:
                self._order.check()
            yield
            self._meeting.stage = "settled"

    @contextlib.contextmanager
    def together(self, call: str, problem: str | None = None, values: Sequence[int] = ()) -> Iterator[Tensor]:
        with self.exchange.turn:
            yield self._meeting.of_method(call, problem, values)

    # ------------------------------------------------------------------ operators

    def bind(self, spec: Spec, a: Args) -> Callable[[Any], Any]:
        match spec:
            case PlanSpec():
                return self._plan
            case DispatchSpec(kind="dispatch_planned"):
                return functools.partial(self._dispatch_planned, spec)
            case DispatchSpec():
                return functools.partial(self._dispatch, spec)
            case CombineSpec():
                return functools.partial(self._combine, spec)
            case GatherSpec():
                return self._combine_gathered
            case DispatchBackwardSpec():
                return functools.partial(self._dispatch_backward, spec)
            case CombineBackwardSpec():
                return self._combine_backward

    def _plan(self, a: PlanArgs) -> Placed:
        with self._operation():
            return self._placed("plan", a, {})

    def _placed(self, operator: str, a: PlanArgs, same: dict[str, int], problem: str | None = None) -> Placed:
        """Plan a route. ``same``: values that ranks must agree on besides ``max_tokens`` and the layout."""
        topk_idx, tokens = a.topk_idx, a.topk_idx.shape[0]
        same = {"max_tokens": a.max_tokens, "layout": layout_index(a.layout), **same}
        problem = problem or self.ranks.problem(topk_idx, a.layout == DISTINCT)
        rooms = self._meeting.meet(operator, same, (a.capacity, a.alignment, a.slots), problem)

        padded_idx = topk_idx.new_full((a.max_tokens, topk_idx.shape[1]), -1)
        padded_idx[:tokens] = topk_idx
        everyone = self.exchange.all_gather(padded_idx).long()  # [W, max_tokens, K], the same on all ranks
        placed = place(self.ranks, everyone, rooms.tolist(), a)
        if a.layout != TOKEN_MAJOR:
            return placed
        return placed._replace(recv_idx=copies.local_ids(self.rows, route_of(placed, a)))

    def _dispatch(self, spec: DispatchSpec, a: AnySizedDispatch | DispatchDynamicArgs) -> DispatchTensors:
        with self._operation():
            plan = plan_in(a)
            placed = self._placed(spec.kind, plan, _terms(spec), quantized.problem(spec, a.scales))
            received = self._move(spec, a, route_of(placed, plan))
            return DispatchTensors(*received, *placed)

    def _dispatch_planned(self, spec: DispatchSpec, a: DispatchPlannedArgs) -> Received:
        with self._operation():
            route = route_in(a, a.num_rows, a.layout, a.slots)
            same = {**_terms(spec), "layout": layout_index(a.layout)}
            self._meeting.along(spec.kind, same, route, quantized.problem(spec, a.scales))
            return self._move(spec, a, route)

    def _move(self, spec: DispatchSpec, a: AnyDispatch, route: Route) -> Received:
        to_rows = functools.partial(copies.to_token_rows, self.rows) if spec.token_major else self.rows.to_rows
        return to_rows(a.x, a.topk_weights, route, spec, a.scales)

    def _combine(self, spec: CombineSpec, a: AnyCombine) -> Tensor:
        with self._operation():
            route = route_in(a, a.y.shape[0])
            same = {
                **_presence(recv_weights=spec.weighted, residual=spec.residual), **quantized.agreed(spec.format)
            }  # fmt: skip
            self._meeting.along("combine", same, route)
            residual = a.residual if isinstance(a, CombineArgs) else None  # split combines take none
            return self.rows.to_tokens(a.y, a.recv_weights, route, residual, spec.format)

    def empty_rows(self, num_rows: int) -> Tensor:
        """Return ordinary memory, the same in every call."""
        return self._memory[:num_rows].detach().fill_(self.rows.unused)

    @functools.cached_property
    def _memory(self) -> Tensor:
        shape = self.symmetric_rows, self.hidden_size
        return torch.empty(shape, dtype=self.rows_dtype, device=self.ranks.device)

    def _combine_gathered(self, a: CombineGatheredArgs) -> Tensor:
        with self._operation():
            y, route = a.y, route_in(a, a.y.shape[0])
            problem, most = None, self.symmetric_rows
            if self.strict:
                problem = not_gatherable(y, self._memory if most else None, most, self.name_of_communicator)
            if bool((route.send_rows == UNKNOWN_ROW).any()):
                problem = "the route of places does not contain the rows at other ranks; allowed: combine"
            self._meeting.along("combine_gathered", {}, route, problem)
            if self.strict and lies_elsewhere(y, self._memory):
                y = self.empty_rows(y.shape[0]).copy_(y)
            return self.rows.to_tokens(y, None, route)

    def _dispatch_backward(self, spec: DispatchBackwardSpec, a: AnyDispatchBackward) -> tuple[Tensor, Tensor]:
        with self._operation():
            route = gradient_route(a)
            same = _presence(grad_recv_x=spec.rows, grad_recv_weights=spec.scalars)
            same["layout"] = layout_index(a.layout)
            self._meeting.along("dispatch_backward", same, route)
            grad_x = grad_topk_weights = torch.empty(0, dtype=self.rows.weights_dtype, device=self.ranks.device)
            if a.grad_recv_x is not None:
                grad_x = self.rows.to_tokens(a.grad_recv_x, None, route)
            if a.grad_recv_weights is not None:
                grad_topk_weights = copies.weights_home(self.rows, a.grad_recv_weights, route)
            return grad_x, grad_topk_weights

    def _combine_backward(self, a: AnyCombineBackward) -> tuple[Tensor, Tensor]:
        with self._operation():
            y, recv_weights, route = a.y, a.recv_weights, route_in(a, a.num_rows)
            same = _presence(y=y is not None, recv_weights=recv_weights is not None)
            self._meeting.along("combine_backward", same, route)
            grad_y, _, none = self.rows.to_rows(a.grad_out, None, route)
            if recv_weights is None:
                return grad_y, none
            grad_y, grad_recv_weights = self.rows.with_weights(grad_y, y, recv_weights, route)
            return grad_y, none if grad_recv_weights is None else grad_recv_weights

    # ------------------------------------------------------------------ split operations

    def bind_start(self, spec: Spec, a: Args) -> Callable[[Any], Tensor]:
        """A start runs the whole operation and keeps its results for the wait. Without ``strict``, tools call waits
        without starts, and the waits of forward operations run them."""
        run = self.bind(spec, a)

        def start(a: AnyStart) -> Tensor:
            self._meeting.stage = "before"
            self._waits.check()
            made = split.ticket(self.ranks.device)
            if self.strict:
                self._order.free(a.flight)
            elif "backward" not in spec.kind:
                return made
            self._in_start = True
            try:
                results = run(a)
            finally:
                self._in_start = False
            self._order.started[a.flight] = Ended(spec.kind, results)
            return made

        return start

    def wait(self, operator: str, flight: int, again: Callable[[], Any]) -> Any:
        """Return the result of the start. A wait meets no other rank, because the operation has run in its start."""
        if not self.strict and ("backward" not in operator or flight not in self._order.started):
            return again()
        self._meeting.stage = "settled"
        self._order.begun(flight, operator)
        return self._order.started.pop(flight).results

    def end_flights(self) -> None:
        self._order.started.clear()

    # ------------------------------------------------------------------ the rest of a backend

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """Meet the other ranks in the operator (for a split operator: in its start); they raise ``reason``."""
        whole, part = split.parts_of(operator)
        started = self._order.started
        if part == "wait" and self.strict:
            if flight in started and started[flight].operator == whole:  # it has run; its results are discarded
                del started[flight]
        elif not started or (part == "start" and flight not in started):  # else the other ranks reject it too
            with self.exchange.turn:
                self._meeting.gather(f"ep::{whole}", reason)

    def give_up(self, why: str) -> None:
        self._waits.give_up(why)

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

    def operations(self) -> int:
        return self._meeting.operations

    def waited(self) -> list[float]:
        return [1e-9 * nanoseconds for nanoseconds in self._meeting.waited]

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
        self.exchange.group = self._waits.group = None


class Ended(NamedTuple):
    """A split operation that has run in its start."""

    operator: str
    results: Any  # for its wait


def _terms(spec: DispatchSpec) -> dict[str, int]:
    """Return the values of a dispatch that ranks must agree on."""
    return {**_presence(topk_weights=spec.weighted), **quantized.agreed(spec.format)}


def _presence(**tensors: bool) -> dict[str, int]:
    """Return which tensors are given, as values that ranks must agree on."""
    return {f"whether {name} is given": int(given) for name, given in tensors.items()}
