"""Launches of throughput kernels: one or two kernels for each operator, and the SMs that they use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled
from meta_kernels.arguments import (
    AnyCombine,
    AnyCombineBackward,
    AnyDispatchBackward,
    AnySizedDispatch,
    CombineArgs,
    CombineGatheredArgs,
    DispatchPlannedArgs,
    PlanArgs,
)

from ... import arrivals
from ...records import (
    TOKEN_MAJOR,
    DispatchTensors,
    Placed,
    Received,
    Route,
    gradient_route,
    plan_in,
    route_in,
    route_of,
)
from ...specs import PLAIN, CombineBackwardSpec, CombineSpec, DispatchBackwardSpec, DispatchSpec, PlanSpec, Spec
from ..budget import Budget
from .launcher import Launch, Launcher
from .outputs import WEIGHTED, Outputs, published_slots
from .sm_model import OperationSms, TokenTraffic
from .streams import Side


def pushes(problem: Problem, format: str, token_major: bool) -> bool:
    """Return whether a dispatch pushes its rows. Otherwise it stages them, and the ranks that receive them pull."""
    return problem.has_room_for_pushes and token_major and not format


def publisher(token_major: bool, known: bool, weighted: bool) -> Any:
    """Return the kernel that publishes the rows of a dispatch."""
    return PublishTokens if token_major and (weighted or not known) else Publish


@functools.cache
def _sum_bytes(problem: Problem, format: str) -> int:
    """Return the bytes of a sum in staging in a format; 0 without one."""
    return Combine(problem, rows=True, format=format).sum_bytes if format else 0


_new = tuple.__new__  # makes records in a third of the time
_ALL = slice(None)

Some = TypeVar("Some", Tensor, Tensor | None)
Bound = TypeVar("Bound")
Routed = AnyCombine | AnyDispatchBackward | AnyCombineBackward


def _of(tensor: Some, tokens: slice) -> Some:
    """Return the part of a tensor that belongs to a round's tokens."""
    return tensor if tensor is None or tokens is _ALL else tensor[tokens]


class ThroughputPath:
    """Operators for any number of tokens.

    A call with more tokens than staging memory holds runs in rounds. Each round is an operation of the kernels that
    moves the rows of some tokens of each rank, along a part of the route. If the route is new, another operation before
    the rounds publishes it for all tokens.
    """

    def __init__(
        self, launcher: Launcher, outputs: Outputs, budget: Budget, traffic: TokenTraffic, side: Side | None = None
    ) -> None:
        """Prepare launches.

        Args:
            side: the side stream. Kernels on it run concurrently with computation and use fewer resources: no surplus
                blocks take part, and few multiprocessors stage rows.
        """
        self._kernel, self._side, self._state = launcher.get, side, launcher.state
        self._problem, self._outputs = launcher.problem, outputs
        self.sms = OperationSms(
            launcher.problem, budget, traffic, launcher.tuning, launcher.multiprocessors, side is not None
        )

    def _by_budget(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that returns the launches of the current budget, each made once."""
        budget = self.sms.budget
        made: dict[Any, Any] = {}

        def current() -> Any:
            found = made.get(budget.asked)
            if found is None:
                found = made[budget.asked] = make()
            return found

        current()  # compiles kernels before anything is launched
        return current

    def launches(self, spec: Spec, a: Any) -> Callable[[Any], Any]:
        """Return a function that runs calls which differ from these arguments in tensors only."""
        match spec:
            case PlanSpec():
                return self.plan
            case DispatchSpec(kind="dispatch_planned"):
                return functools.partial(self.dispatch_planned, spec)
            case DispatchSpec():
                return self._dispatches(spec, a)
            case CombineSpec():
                return self._combines(spec, a)
            case DispatchBackwardSpec():
                return self._dispatch_backwards(spec, a)
            case CombineBackwardSpec():
                return self._combine_backwards(a)
        raise AssertionError(spec)  # gathered combines need the rows of all ranks

    def plan(self, a: PlanArgs, num_rows: int | None = None) -> Placed:
        """Run a plan whose lists have room for `num_rows` rows, or for the capacity if None."""
        num_rows, token_major = a.capacity if num_rows is None else num_rows, a.layout == TOKEN_MAJOR
        placed = self._outputs.placed(a.topk_idx.shape[0], num_rows, token_major)
        terms = marks.pack("plan", a.max_tokens, rows=False, token_major=token_major)
        self._plan(terms, a, placed, num_rows)
        return placed

    def _plan(self, terms: int, a: PlanArgs, placed: Placed, num_rows: int) -> None:
        """Publish and place a route, and nothing else."""
        variant, token_major = dict(route=True, ends_operation=True), a.layout == TOKEN_MAJOR
        blocks = self.sms.publishing(0, **variant)
        if token_major:
            blocks += bool(self._problem.domains)  # local ids are relayed
        publish = self._kernel(publisher(token_major, False, False), **variant)(
            terms, tokens=a.topk_idx.shape[0], max_tokens=a.max_tokens, capacity=a.capacity, num_rows=num_rows,
            alignment=a.alignment, slots=published_slots(a), blocks=blocks,
        )  # fmt: skip
        with self._state:
            publish(
                topk_idx=a.topk_idx, send_rows=placed.send_rows, arrivals=placed.arrivals, offs=placed.offs,
                counts=placed.counts, dropped=placed.dropped, recv_idx=placed.recv_idx,
            )  # fmt: skip

    def rounds(self, max_tokens: int) -> int:
        """Return the number of rounds for so many tokens."""
        return max(1, -(-max_tokens // self._problem.max_tokens))

    def _parts(self, route: Route) -> Iterator[tuple[slice, Route]]:
        """Yield for each round which tokens of this rank it moves, and the part of the route for the tokens of all
        ranks. Rows keep their places of the whole route."""
        each, most = self._problem.max_tokens, route.max_tokens
        if most <= each:
            yield _ALL, route
            return
        world_size, top_k = self._problem.world_size, self._problem.top_k
        for first in range(0, most, each):
            tokens, here = min(each, most - first), slice(first, first + each)
            with self._on_stream():
                lists = arrivals.part(route.arrivals, world_size, most, top_k, first, tokens)
            yield (
                here,
                route._replace(
                    topk_idx=route.topk_idx[here], send_rows=route.send_rows[here], arrivals=lists, max_tokens=tokens
                ),
            )

    def _rounds(self, a: Routed, num_rows: int, launches: list[Bound]) -> Iterable[tuple[slice, Any, Bound]]:
        """Return for each round which tokens of this rank it moves, what has the tensors of its part of the route, and
        its launches."""
        if len(launches) == 1:
            return ((_ALL, a, launches[0]),)
        parts = self._parts(route_in(a, num_rows))
        return ((here, part, launch) for (here, part), launch in zip(parts, launches, strict=True))

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch runs operations between kernels."""
        return contextlib.nullcontext() if self._side is None else self._side.entered()

    def _dispatches(self, spec: DispatchSpec, a: AnySizedDispatch) -> Callable[[Any], DispatchTensors]:
        tokens, outputs = a.topk_idx.shape[0], self._outputs
        if self.rounds(a.max_tokens) > 1:
            return functools.partial(self._dispatch_in_rounds, spec)
        capacity, slots, state = a.capacity, a.slots, self._state
        sizes = tokens, capacity, a.alignment, a.max_tokens, slots, published_slots(a)
        current = self._by_budget(functools.partial(self._plan_dispatch, spec, *sizes))
        make = outputs.dispatched(spec, tokens, capacity, slots)

        def run(a: AnySizedDispatch) -> DispatchTensors:
            publish, pulls = current()
            out = make()
            recv_x, recv_scales, recv_weights, send_rows, arrived, offs, counts, dropped, recv_idx = out
            with state:
                publish(
                    x=a.x, scales=a.scales, topk_idx=a.topk_idx, topk_weights=a.topk_weights, send_rows=send_rows,
                    arrivals=arrived, offs=offs, counts=counts, dropped=dropped, recv_weights=recv_weights,
                    recv_idx=recv_idx,
                )  # fmt: skip
                for pull in pulls:
                    pull(
                        x=a.x, arrivals=arrived, offs=offs, counts=counts, recv_x=recv_x, recv_weights=recv_weights,
                        recv_scales=recv_scales,
                    )  # fmt: skip
            return out

        return run

    def _dispatch_in_rounds(self, spec: DispatchSpec, a: AnySizedDispatch) -> DispatchTensors:
        received = self._outputs.received(spec, a.capacity, a.slots)
        placed = self._outputs.placed(a.topk_idx.shape[0], a.capacity, spec.token_major)
        terms, plan = self._terms("dispatch", spec, a.max_tokens), plan_in(a)
        self._plan(terms, plan, placed, a.capacity)
        self._dispatch_along(terms, spec, a.x, a.topk_weights, a.scales, route_of(placed, plan), received)
        return DispatchTensors(*received, *placed)

    @staticmethod
    def _terms(kind: str, spec: DispatchSpec, max_tokens: int) -> int:
        return marks.pack(kind, max_tokens, spec.weighted, format=spec.sent_as, token_major=spec.token_major)

    def _plan_dispatch(
        self,
        spec: DispatchSpec,
        tokens: int,
        capacity: int,
        alignment: int,
        max_tokens: int,
        slots: int,
        published: int,
    ) -> tuple[Launch, list[Launch]]:
        """Return the launches of publish and pull for dispatches that differ only in tensors. `published`: what the
        publish kernel gets as `slots`."""
        traffic = self.sms.traffic_of(capacity, tokens, spec.token_major)
        pulling = self.sms.pulling(traffic, spec, tokens)
        beyond = max(0, self.sms.beyond - pulling) if pulling > 1 else 0
        # A grid that may join has one block in any case.
        dealt, joining = (pulling - 1, 1 + beyond) if beyond else (pulling, 0)
        terms = self._terms("dispatch", spec, max_tokens)
        sizes_of = dict(max_tokens=max_tokens, alignment=alignment, num_rows=capacity)
        pushed = pushes(self._problem, spec.sent_as, spec.token_major)
        variant = self._publish_variant(spec, route=True, pushes=pushed)
        publish = self._kernel(publisher(spec.token_major, False, spec.weighted), **variant)(
            terms, tokens=tokens, capacity=capacity, slots=published,
            blocks=self.sms.publishing(pulling, tokens, **variant), **sizes_of,
        )  # fmt: skip
        pulls: list[Launch] = [
            self._kernel(
                Pull, weights=spec.weighted, placed=True, joins=joins, format=spec.sent_as, layout=spec.scales_layout,
                pushed=pushed,
            )(
                terms, zeros=spec.clears, dealt=dealt, expected=traffic.expected(tokens), joining=joining,
                blocks=blocks,
                slots=slots, **sizes_of,
            )
            for joins, blocks in ((False, dealt), (True, joining)) if blocks
        ]  # fmt: skip
        return publish, pulls

    def _publish_variant(self, spec: DispatchSpec, route: bool, pushes: bool) -> dict[str, Any]:
        """Return what the publish kernel of a dispatch is compiled for."""
        staged = self._problem.world_size > 1 or bool(spec.format)  # else a single rank reads its own rows in place
        return dict(
            route=route, rows=staged, weights=spec.weighted, format=spec.sent_as, given=spec.scaled,
            pushes=pushes,
        )  # fmt: skip

    def dispatch_planned(self, spec: DispatchSpec, a: DispatchPlannedArgs) -> Received:
        """Dispatch along a known route."""
        route = route_in(a, a.num_rows, a.layout, a.slots)
        return self.along("dispatch_planned", spec, a.x, a.topk_weights, a.scales, route)

    def along(
        self, kind: str, spec: DispatchSpec, x: Tensor, topk_weights: Tensor | None, scales: Tensor | None, route: Route
    ) -> Received:
        """Dispatch along a known route, as an operation of that kind."""
        received = self._outputs.received(spec, route.num_rows, route.slots)
        self._dispatch_along(self._terms(kind, spec, route.max_tokens), spec, x, topk_weights, scales, route, received)
        return received

    def _dispatch_along(
        self, terms: int, spec: DispatchSpec, x: Tensor, topk_weights: Tensor | None, scales: Tensor | None,
        route: Route, received: Received,
    ) -> None:  # fmt: skip
        """Dispatch along a known route into `received`."""
        weighted, token_major = spec.weighted, spec.token_major
        traffic = self.sms.traffic_of(route.num_rows, x.shape[0], token_major)
        pulling = self.sms.pulling(traffic, spec, x.shape[0])
        recv_x, recv_scales, recv_weights = received
        joining = max(0, self.sms.beyond - pulling)
        whole = self.rounds(route.max_tokens) == 1
        if not whole and weighted and token_major:
            with self._on_stream():
                recv_weights.zero_()  # kernels of a round do not know the last copy of the whole route
        zeros = spec.clears
        pushed = pushes(self._problem, spec.sent_as, token_major)
        for here, part in self._parts(route):
            of_x = _of(x, here)
            publish = self._plan_publishing(
                terms, pulling, spec, part.topk_idx.shape[0], part.max_tokens, part.num_rows,
                part.num_rows if whole else 0, pushed,
            )  # fmt: skip
            pull = self._kernel(
                Pull, weights=weighted, begins_operation=publish is None, format=spec.sent_as,
                layout=spec.scales_layout, pushed=pushed,
            )(
                terms, max_tokens=part.max_tokens, alignment=part.alignment, num_rows=part.num_rows, slots=part.slots,
                zeros=zeros, dealt=pulling, expected=traffic.expected(of_x.shape[0]), joining=joining,
                blocks=pulling + joining,
            )  # fmt: skip
            with self._state:
                if publish is not None:
                    publish(
                        x=of_x, scales=_of(scales, here), topk_idx=part.topk_idx,
                        topk_weights=_of(topk_weights, here), send_rows=part.send_rows, arrivals=part.arrivals,
                        recv_weights=recv_weights,
                    )  # fmt: skip
                pull(
                    x=of_x, arrivals=part.arrivals, offs=part.offs, counts=part.counts, recv_x=recv_x,
                    recv_weights=recv_weights, recv_scales=recv_scales,
                )  # fmt: skip
            zeros = 0  # padding is that of all rounds

    def _combines(self, spec: CombineSpec, a: AnyCombine) -> Callable[[Any], Tensor]:
        tokens, max_tokens, outputs, state = a.topk_idx.shape[0], a.max_tokens, self._outputs, self._state
        num_rows = a.y.shape[0]
        current = self._by_budget(functools.partial(self._plan_combine, spec, num_rows, max_tokens, tokens))
        make = outputs.sums(tokens)

        def run(a: AnyCombine) -> Tensor:
            launches, out = current(), make()
            residual = a.residual if isinstance(a, CombineArgs) else None  # split combines take none
            for here, part, launch in self._rounds(a, num_rows, launches):
                with state:
                    launch(
                        y=a.y, recv_weights=a.recv_weights, topk_idx=part.topk_idx, send_rows=part.send_rows,
                        arrivals=part.arrivals, residual=_of(residual, here), out=_of(out, here),
                    )  # fmt: skip
            return out

        return run

    def _plan_combine(self, spec: CombineSpec, num_rows: int, most: int, tokens: int) -> list[Launch]:
        """Return the launch of each round of combines that differ only in tensors."""
        format = spec.sent_as
        traffic = self.sms.traffic_of(num_rows, tokens).in_format(_sum_bytes(self._problem, format))
        bind = self._kernel(Combine, rows=True, weighted=spec.weighted, residual=spec.residual, format=format)
        bind = functools.partial(bind, marks.pack("combine", most, format=format))
        return [
            bind(
                tokens=here,
                max_tokens=max_tokens,
                num_rows=num_rows,
                **self.sms.pushing(traffic, here, True, spec.format),
            )
            for here, max_tokens in self._tokens_of_rounds(tokens, most)
        ]

    def _tokens_of_rounds(self, tokens: int, most: int) -> list[tuple[int, int]]:
        """Return for each round the number of tokens of this rank, and its bound."""
        each = self._problem.max_tokens
        return [(min(max(tokens - first, 0), each), min(each, most - first)) for first in range(0, max(most, 1), each)]

    def combine_gathered(self, a: CombineGatheredArgs, bases: Tensor, num_rows: int) -> Tensor:
        """Run a gathered combine. `bases`: a table of the address of row 0 at each rank, which has `num_rows` rows."""
        tokens = a.topk_idx.shape[0]
        out = self._outputs.sums(tokens)()
        terms = marks.pack("combine_gathered", a.max_tokens)
        launch = self._kernel(Gather)(terms, tokens=tokens, num_rows=num_rows, blocks=self.sms.budget.gather)
        with self._state:
            launch(topk_idx=a.topk_idx, send_rows=a.send_rows, out=out, bases=bases)
        return out

    def _dispatch_backwards(
        self, spec: DispatchBackwardSpec, a: AnyDispatchBackward
    ) -> Callable[[Any], tuple[Tensor, Tensor]]:
        (tokens, top_k), outputs, state = a.topk_idx.shape, self._outputs, self._state
        num_rows, rows, scalars = gradient_route(a).num_rows, spec.rows, spec.scalars
        current = self._by_budget(functools.partial(self._plan_dispatch_backward, spec, num_rows, a.max_tokens, tokens))
        of_scalars = (tokens, top_k) if scalars else (0,)
        make = outputs.sums(tokens) if rows else functools.partial(outputs.scalars, (0,))

        def run(a: AnyDispatchBackward) -> tuple[Tensor, Tensor]:
            launches, grad_x, grad_weights = current(), make(), outputs.scalars(of_scalars)
            for here, part, launch in self._rounds(a, num_rows, launches):
                of_x = _of(grad_x, here) if rows else grad_x
                of_weights = _of(grad_weights, here) if scalars else grad_weights
                with state:
                    launch(
                        y=a.grad_recv_x, row_scalars=a.grad_recv_weights, topk_idx=part.topk_idx,
                        send_rows=part.send_rows, arrivals=part.arrivals, out=of_x, out_scalars=of_weights,
                    )  # fmt: skip
            return grad_x, grad_weights

        return run

    def _plan_dispatch_backward(
        self, spec: DispatchBackwardSpec, num_rows: int, most: int, tokens: int
    ) -> list[Launch]:
        """Return the launch of each round of gradients of dispatches that differ only in tensors."""
        rows, scalars, token_major = spec.rows, spec.scalars, spec.token_major
        traffic = self.sms.traffic_of(num_rows, tokens, token_major)
        bind = self._kernel(Combine, rows=rows, scalars=scalars, token_major=scalars and token_major)
        terms = marks.pack("dispatch_backward", most, scalars, rows, token_major=token_major)
        return [
            bind(terms, tokens=here, max_tokens=max_tokens, num_rows=num_rows, **self.sms.pushing(traffic, here, rows))
            for here, max_tokens in self._tokens_of_rounds(tokens, most)
        ]

    def _combine_backwards(self, a: AnyCombineBackward) -> Callable[[Any], tuple[Tensor, Tensor]]:
        if a.recv_weights is None:
            return self._combine_backward_unweighted
        num_rows, outputs, state = a.num_rows, self._outputs, self._state
        tokens, most, alignment = a.topk_idx.shape[0], a.max_tokens, a.alignment
        current = self._by_budget(functools.partial(self._plan_combine_backward, num_rows, alignment, most, tokens))

        def run(a: AnyCombineBackward) -> tuple[Tensor, Tensor]:
            y, launches = a.y, current()
            grad_y, _, grad_weights = outputs.received(WEIGHTED, num_rows)
            for here, part, (publish, pull) in self._rounds(a, num_rows, launches):
                of_out = _of(a.grad_out, here)
                with state:
                    if publish is not None:
                        publish(x=of_out, topk_idx=part.topk_idx, send_rows=part.send_rows, arrivals=part.arrivals)
                    # Without y, the kernel reads grad_y in its place, and the products are discarded.
                    pull(
                        grad_out=of_out, y=grad_y if y is None else y, recv_weights=a.recv_weights,
                        arrivals=part.arrivals, offs=part.offs, counts=part.counts, grad_y=grad_y,
                        grad_weights=grad_weights,
                    )  # fmt: skip
            return grad_y, grad_weights[:0].clone() if y is None else grad_weights

        return run

    def _combine_backward_unweighted(self, a: AnyCombineBackward) -> tuple[Tensor, Tensor]:
        grad_y, _, none = self.along("combine_backward", PLAIN, a.grad_out, None, None, route_in(a, a.num_rows))
        return grad_y, none

    def _plan_combine_backward(
        self, num_rows: int, alignment: int, most: int, tokens: int
    ) -> list[tuple[Launch | None, Launch]]:
        """Return the launches of publish and pull of each round of gradients of weighted combines that differ only in
        tensors."""
        blocks = self.sms.budget.scaled
        terms = marks.pack("combine_backward", most, scalars=True)
        rounds: list[tuple[Launch | None, Launch]] = []
        for here, max_tokens in self._tokens_of_rounds(tokens, most):
            publish = self._plan_publishing(terms, blocks, PLAIN, here, max_tokens, num_rows, num_rows)
            pull = self._kernel(PullScaled, begins_operation=publish is None)(
                terms, max_tokens=max_tokens, alignment=alignment, num_rows=num_rows, blocks=blocks
            )
            rounds.append((publish, pull))
        return rounds

    def _plan_publishing(
        self, terms: int, pulling: int, spec: DispatchSpec, tokens: int, max_tokens: int, num_rows: int,
        cleared: int, pushed: bool = False,
    ) -> Launch | None:  # fmt: skip
        """Return the launch of the publish kernel of a known route, or None if it has nothing to do. `cleared`: the
        rows of the receive buffer, if the kernel clears the weights of token-major rows behind the last copy, else 0.
        `pushed`: whether it pushes rows."""
        variant = self._publish_variant(spec, route=False, pushes=pushed)
        if not (variant["rows"] or spec.weighted):
            return None
        return self._kernel(publisher(spec.token_major, True, spec.weighted), **variant)(
            terms, tokens=tokens, max_tokens=max_tokens, capacity=cleared, num_rows=num_rows, alignment=1, slots=0,
            blocks=self.sms.publishing(pulling, tokens, **variant),
        )  # fmt: skip
