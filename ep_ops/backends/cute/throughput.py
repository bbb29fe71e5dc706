"""The throughput kernels' side of the cute backend: one or two kernels an operator, and their shares of the GPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
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

from ... import arrivals
from ...formats import OF_TOKENS
from ...records import TOKEN_MAJOR, Delivery, DispatchTensors, Placed, Received, Route, Sizes, route_of
from ..budget import Budget
from .launcher import Launch, Launcher, Plans
from .outputs import Outputs, published_slots
from .row_format import AS_GIVEN, RowFormat, row_format
from .sm_model import OperationSms, TokenTraffic
from .streams import Side


def pushes(problem: Problem, format: str, token_major: bool) -> bool:
    """Return whether a dispatch pushes its rows. Otherwise it stages them, and the ranks that receive them pull."""
    return problem.has_room_for_pushes and token_major and not format


def publisher(token_major: bool, known: bool, weighted: bool) -> Any:
    """Return the kernel that publishes the rows of a dispatch."""
    return PublishTokens if token_major and (weighted or not known) else Publish


def _dispatch_kernels(problem: Problem) -> list[Any]:
    """Return the kernels of plans, and of dispatches of rows without a format."""
    alone = problem.world_size == 1  # a single rank reads its own rows where they are
    found: list[Any] = [kind(problem, True, False, False, True) for kind in (Publish, PublishTokens)]
    for known, token_major, weights in itertools.product((False, True), repeat=3):
        pushed = pushes(problem, "", token_major)
        first = alone and known and not weights  # nothing is published
        if not first:
            publish = publisher(token_major, known, weights)
            found.append(publish(problem, not known, not alone, weights, False, "", False, pushed))
        found.append(Pull(problem, weights, first, not known, False, "", "", pushed))
        if not alone and not known:
            found.append(Pull(problem, weights, False, True, True, "", "", pushed))
    return list(dict.fromkeys(found))


def kernels_of(problem: Problem) -> list[Any]:
    """Return every throughput kernel that the operators of such a communicator launch."""
    alone = problem.world_size == 1
    combine: list[tuple[bool, ...]] = []
    combine += [(True, weights, False, residual) for weights in (False, True) for residual in (False, True)]
    # With the gradients of weights, one for each row or `top_k`.
    combine += [(rows, False, True, False, token_major) for rows in (False, True) for token_major in (False, True)]
    variants: dict[Any, Sequence[tuple[Any, ...]]] = {
        Combine: combine,
        PullScaled: [(alone,)],
        Gather: [] if problem.domains else [()],  # rows of other domains are copied
    }
    others = [kernel(problem, *variant) for kernel, made in variants.items() for variant in made]
    return [*_dispatch_kernels(problem), *others]


def kernels_of_format(problem: Problem, how: RowFormat) -> list[Any]:
    """Return the kernels of dispatches and combines in a format, for quantized and unquantized x."""
    alone = problem.world_size == 1
    parts: list[tuple[bool, bool]] = [(False, False), (True, False), *([] if alone else [(True, True)])]
    given = (False, True) if how.layout else (False,)
    found: list[Any] = []
    for weights in (False, True):
        found += [
            Publish(problem, route, True, weights, False, how.format, g) for route in (False, True) for g in given
        ]
        found += [Pull(problem, weights, False, placed, joins, how.format, how.layout) for placed, joins in parts]
    if how.layout in ("", *OF_TOKENS):
        tokens = [(True, False), (True, True), (False, True)]  # along a known route without weights there is no need
        found += [PublishTokens(problem, route, True, w, False, how.format, g) for route, w in tokens for g in given]
    if how.sums:
        options = itertools.product((False, True), repeat=2)
        found += [
            Combine(problem, True, weighted, False, residual, False, how.format) for weighted, residual in options
        ]
    return found


@functools.cache
def _sum_bytes(problem: Problem, format: str) -> int:
    """Return the bytes of a sum in staging in a format; 0 without one."""
    return Combine(problem, True, False, False, False, False, format).sum_bytes if format else 0


_new = tuple.__new__  # makes records in a third of the time
_ALL = slice(None)

Some = TypeVar("Some", Tensor, Tensor | None)


def _of(tensor: Some, tokens: slice) -> Some:
    """Return the part of a tensor that belongs to a round's tokens."""
    return tensor if tensor is None or tokens is _ALL else tensor[tokens]


class ThroughputPath:
    """Operators for any number of tokens. Those of more than the memory takes at a time go in rounds, each of which is
    an operation of the kernels: one moves the rows of some tokens of each rank, along a part of the route. Where the
    route is not known another one before them tells it, of all tokens."""

    def __init__(
        self, launcher: Launcher, outputs: Outputs, budget: Budget, traffic: TokenTraffic, side: Side | None = None
    ) -> None:
        """Prepare launches.

        Args:
            side: the side stream. Kernels on it run concurrently with computation and use fewer resources: no surplus
                blocks take part, and few multiprocessors stage rows.
        """
        self._kernel, self._side, self._course = launcher.get, side, launcher.course
        self._problem, self._outputs, self._plans = launcher.problem, outputs, Plans()
        self.sms = OperationSms(launcher.problem, budget, traffic, launcher.multiprocessors, side is not None)

    def plan(self, topk_idx: Tensor, sizes: Sizes, num_rows: int | None = None) -> Placed:
        """Run a plan whose lists have room for `num_rows` rows, or for the capacity if None."""
        num_rows, token_major = sizes.capacity if num_rows is None else num_rows, sizes.layout == TOKEN_MAJOR
        placed = self._outputs.placed(topk_idx.shape[0], num_rows, token_major)
        terms = marks.pack("plan", sizes.max_tokens, rows=False, token_major=token_major)
        self._plan(terms, topk_idx, placed, sizes, num_rows)
        return placed

    def _plan(self, terms: int, topk_idx: Tensor, placed: Placed, sizes: Sizes, num_rows: int) -> None:
        """Publish and place a route, and nothing else."""
        variant, token_major = (True, False, False, True), sizes.layout == TOKEN_MAJOR
        blocks = self.sms.publishing(variant, 0)
        if token_major:
            blocks += bool(self._problem.domains)  # local ids are relayed
        publish = self._kernel(publisher(token_major, False, False), *variant)(
            terms, tokens=topk_idx.shape[0], max_tokens=sizes.max_tokens, capacity=sizes.capacity, num_rows=num_rows,
            alignment=sizes.alignment, slots=published_slots(sizes), blocks=blocks,
        )  # fmt: skip
        with self._course:
            publish(
                topk_idx=topk_idx, send_rows=placed.send_rows, arrivals=placed.arrivals, offs=placed.offs,
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

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch runs operations between kernels."""
        return contextlib.nullcontext() if self._side is None else self._side.entered()

    def dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> DispatchTensors:
        how, weighted, token_major = row_format(delivery), topk_weights is not None, sizes.layout == TOKEN_MAJOR
        received = self._outputs.received(weighted, sizes.capacity, how, sizes.slots, token_major)
        placed = self._outputs.placed(topk_idx.shape[0], sizes.capacity, token_major)
        recv_x, recv_scales, recv_weights = received
        if self.rounds(sizes.max_tokens) > 1:
            terms = marks.pack("dispatch", sizes.max_tokens, weighted, format=how.format, token_major=token_major)
            self._plan(terms, topk_idx, placed, sizes, sizes.capacity)
            self._along(
                terms, x, topk_weights, route_of(topk_idx, placed, sizes, self._problem.world_size), delivery, received
            )
            return _new(DispatchTensors, (*received, *placed))
        key = sizes, how, weighted, x.shape[0], self.sms.budget.asked
        publish, pulls = self._plans.get(key) or self._plans.add(key, self._plan_dispatch(*key[:-1]))
        send_rows, arrived, offs, counts, dropped, recv_idx = placed
        with self._course:
            publish(
                x=x, scales=delivery.scales, topk_idx=topk_idx, topk_weights=topk_weights, send_rows=send_rows,
                arrivals=arrived, offs=offs, counts=counts, dropped=dropped, recv_weights=recv_weights,
                recv_idx=recv_idx,
            )  # fmt: skip
            for pull in pulls:
                pull(
                    x=x, arrivals=arrived, offs=offs, counts=counts, recv_x=recv_x, recv_weights=recv_weights,
                    recv_scales=recv_scales,
                )  # fmt: skip
        return _new(DispatchTensors, (*received, *placed))

    def _plan_dispatch(self, sizes: Sizes, how: RowFormat, weighted: bool, tokens: int) -> tuple[Launch, list[Launch]]:
        """Return the launches of publish and pull for dispatches that differ only in tensors."""
        capacity, alignment, slots, max_tokens, layout = sizes
        token_major = layout == TOKEN_MAJOR
        traffic = self.sms.traffic_of(capacity, tokens, token_major)
        pulling = self.sms.pulling(traffic, how)
        beyond = max(0, self.sms.beyond - pulling) if pulling > 1 else 0
        # A grid that may join has one block in any case.
        dealt, joining = (pulling - 1, 1 + beyond) if beyond else (pulling, 0)
        terms = marks.pack("dispatch", max_tokens, weighted, format=how.format, token_major=token_major)
        sizes_of = dict(max_tokens=max_tokens, alignment=alignment, num_rows=capacity)
        pushed = pushes(self._problem, how.format, token_major)
        variant = (True, self._stages(how), weighted, False, how.format, how.given, pushed)
        publish = self._kernel(publisher(token_major, False, weighted), *variant)(
            terms, tokens=tokens, capacity=capacity, slots=published_slots(sizes),
            blocks=self.sms.publishing(variant, pulling, pushed), **sizes_of,
        )  # fmt: skip
        zeros = int(how.zeros and not token_major)  # there is no padding
        pulls: list[Launch] = [
            self._kernel(Pull, weighted, False, True, joins, how.format, how.layout, pushed)(
                terms, zeros=zeros, dealt=dealt, expected=traffic.expected(tokens), joining=joining, blocks=blocks,
                slots=slots, **sizes_of,
            )
            for joins, blocks in ((False, dealt), (True, joining)) if blocks
        ]  # fmt: skip
        return publish, pulls

    def _stages(self, how: RowFormat) -> bool:
        """Return whether x is staged. A single rank reads its own rows in place, unless they are sent in a format."""
        return self._problem.world_size > 1 or bool(how.format)

    def along(self, kind: str, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery) -> Received:
        """Dispatch along a known route, as an operation of that kind."""
        how, weighted, token_major = row_format(delivery), topk_weights is not None, route.layout == TOKEN_MAJOR
        received = self._outputs.received(weighted, route.num_rows, how, route.slots, token_major)
        terms = marks.pack(kind, route.max_tokens, weighted, format=how.format, token_major=token_major)
        self._along(terms, x, topk_weights, route, delivery, received)
        return received

    def _along(
        self, terms: int, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery, received: Received
    ) -> None:
        """Dispatch along a known route into `received`."""
        how, weighted, token_major = row_format(delivery), topk_weights is not None, route.layout == TOKEN_MAJOR
        traffic = self.sms.traffic_of(route.num_rows, x.shape[0], token_major)
        pulling = self.sms.pulling(traffic, how)
        recv_x, recv_scales, recv_weights = received
        joining = max(0, self.sms.beyond - pulling)
        whole = self.rounds(route.max_tokens) == 1
        if not whole and weighted and token_major:
            with self._on_stream():
                recv_weights.zero_()  # a round does not know what lies behind the last copy
        zeros = int(how.zeros and not token_major)
        pushed = pushes(self._problem, how.format, token_major)
        for here, part in self._parts(route):
            of_x = _of(x, here)
            publish = self._publishing(
                terms,
                pulling,
                of_x,
                _of(topk_weights, here),
                recv_weights,
                part,
                how,
                _of(delivery.scales, here),
                cleared=whole,
                pushed=pushed,
            )
            pull = self._kernel(Pull, weighted, publish is None, False, False, how.format, how.layout, pushed)(
                terms, max_tokens=part.max_tokens, alignment=part.alignment, num_rows=part.num_rows, slots=part.slots,
                zeros=zeros, dealt=pulling, expected=traffic.expected(of_x.shape[0]), joining=joining,
                blocks=pulling + joining,
            )  # fmt: skip
            with self._course:
                if publish is not None:
                    publish()
                pull(
                    x=of_x, arrivals=part.arrivals, offs=part.offs, counts=part.counts, recv_x=recv_x,
                    recv_weights=recv_weights, recv_scales=recv_scales,
                )  # fmt: skip
            zeros = 0  # padding is that of all rounds

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None, format: str = ""
    ) -> Tensor:
        out = self._outputs.tokens(route.topk_idx.shape[0])
        of = route.num_rows, route.max_tokens, out.shape[0], recv_weights is not None, residual is not None, format
        key = *of, self.sms.budget.asked
        launches = self._plans.get(key) or self._plans.add(key, self._plan_combine(*of))
        for (here, part), launch in zip(self._parts(route), launches, strict=True):
            with self._course:
                launch(
                    y=y, recv_weights=recv_weights, topk_idx=part.topk_idx, send_rows=part.send_rows,
                    arrivals=part.arrivals, residual=_of(residual, here), out=_of(out, here),
                )  # fmt: skip
        return out

    def _plan_combine(
        self, num_rows: int, most: int, tokens: int, weighted: bool, residual: bool, format: str
    ) -> list[Launch]:
        """Return the launch of each round of combines that differ only in tensors."""
        each = self._problem.max_tokens
        traffic = self.sms.traffic_of(num_rows, tokens).in_format(_sum_bytes(self._problem, format))
        terms = marks.pack("combine", most, format=format)
        bind = self._kernel(Combine, True, weighted, False, residual, False, format)
        rounds: list[Launch] = []
        for first in range(0, max(most, 1), each):
            max_tokens = min(each, most - first)
            here = min(max(tokens - first, 0), each)
            pushing = self.sms.pushing(traffic, here, True)
            rounds.append(bind(terms, tokens=here, max_tokens=max_tokens, num_rows=num_rows, **pushing))
        return rounds

    def combine_gathered(self, route: Route, bases: Tensor, num_rows: int) -> Tensor:
        """Run a gathered combine. `bases`: a table of the address of row 0 at each rank, which has `num_rows` rows."""
        tokens = route.topk_idx.shape[0]
        out = self._outputs.tokens(tokens)
        terms = marks.pack("combine_gathered", route.max_tokens)
        launch = self._kernel(Gather)(terms, tokens=tokens, num_rows=num_rows, blocks=self.sms.budget.gather)
        with self._course:
            launch(topk_idx=route.topk_idx, send_rows=route.send_rows, out=out, bases=bases)
        return out

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        topk_idx, outputs, token_major = route.topk_idx, self._outputs, route.layout == TOKEN_MAJOR
        traffic = self.sms.traffic_of(route.num_rows, topk_idx.shape[0], token_major)
        rows, scalars = grad_recv_x is not None, grad_recv_weights is not None
        grad_x = outputs.scalars((0,)) if grad_recv_x is None else outputs.tokens(topk_idx.shape[0])
        grad_weights = outputs.scalars(topk_idx.shape if scalars else (0,))
        bind = self._kernel(Combine, rows, False, scalars, False, scalars and token_major)
        terms = marks.pack("dispatch_backward", route.max_tokens, scalars, rows, token_major=token_major)
        for here, part in self._parts(route):
            tokens, pushing = part.topk_idx.shape[0], self.sms.pushing(traffic, part.topk_idx.shape[0], rows)
            of_x = _of(grad_x, here) if rows else grad_x
            of_weights = _of(grad_weights, here) if scalars else grad_weights
            launch = bind(terms, tokens=tokens, max_tokens=part.max_tokens, num_rows=part.num_rows, **pushing)
            with self._course:
                launch(
                    y=grad_recv_x, row_scalars=grad_recv_weights, topk_idx=part.topk_idx, send_rows=part.send_rows,
                    arrivals=part.arrivals, out=of_x, out_scalars=of_weights,
                )  # fmt: skip
        return grad_x, grad_weights

    def combine_backward(
        self, grad_out: Tensor, y: Tensor | None, recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        if recv_weights is None:
            grad_y, _, none = self.along("combine_backward", grad_out, None, route, Delivery())
            return grad_y, none
        grad_y, _, grad_weights = self._outputs.received(True, route.num_rows)
        blocks = self.sms.budget.scaled
        terms = marks.pack("combine_backward", route.max_tokens, scalars=True)
        for here, part in self._parts(route):
            of_out = _of(grad_out, here)
            publish = self._publishing(terms, blocks, of_out, None, None, part)
            pull = self._kernel(PullScaled, publish is None)(
                terms, max_tokens=part.max_tokens, alignment=part.alignment, num_rows=part.num_rows, blocks=blocks
            )
            with self._course:
                if publish is not None:
                    publish()
                # Without y the rows of grad_y stand in for it: the products that come of them are thrown away.
                pull(
                    grad_out=of_out, y=grad_y if y is None else y, recv_weights=recv_weights,
                    arrivals=part.arrivals, offs=part.offs, counts=part.counts, grad_y=grad_y,
                    grad_weights=grad_weights,
                )  # fmt: skip
        return grad_y, grad_weights[:0].clone() if y is None else grad_weights

    def _publishing(
        self,
        terms: int,
        pulling: int,
        x: Tensor,
        topk_weights: Tensor | None,
        recv_weights: Tensor | None,
        route: Route,
        how: RowFormat = AS_GIVEN,
        scales: Tensor | None = None,
        *,
        cleared: bool = True,
        pushed: bool = False,
    ) -> Callable[[], None] | None:
        """Return what launches the publish kernel of a known route, or None if it has nothing to do. `cleared`: the
        weights of token-major rows behind the last copy are. `pushed`: rows are pushed."""
        variant = (False, self._stages(how), topk_weights is not None, False, how.format, how.given, pushed)
        if not any(variant[:4]):
            return None
        launch = self._kernel(publisher(route.layout == TOKEN_MAJOR, True, variant[2]), *variant)(
            terms, tokens=route.topk_idx.shape[0], max_tokens=route.max_tokens,
            capacity=route.num_rows if cleared else 0, num_rows=route.num_rows, alignment=1, slots=0,
            blocks=self.sms.publishing(variant, pulling, pushed),
        )  # fmt: skip
        return functools.partial(
            launch, x=x, scales=scales, topk_idx=route.topk_idx, topk_weights=topk_weights,
            send_rows=route.send_rows, arrivals=route.arrivals, recv_weights=recv_weights,
        )  # fmt: skip
