"""The cute backend: checks and limits of a communicator, and the choice of kernels for each call."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels import marks
from cute_kernels.alarm import RaiseAlarm
from cute_kernels.refusal import Refuse
from cute_kernels.slices import Slices

from ... import arrivals, symmetric
from ...config import Config, Member, most_rows, most_token_rows
from ...records import (
    FLIGHTS,
    GROUPED,
    TOKEN_MAJOR,
    UNBOUNDED,
    Delivery,
    DispatchTensors,
    Operation,
    Placed,
    Received,
    Route,
    Sizes,
    route_of,
)  # fmt: skip
from ..base import Formats, lies_elsewhere, not_gatherable
from ..split import Order, parts_of, ticket
from . import latency, throughput
from .course import Course
from .failures import Failures, pack_reason
from .launcher import Launcher
from .outputs import Outputs
from .row_format import row_format
from .sizing import across, heap_of, problem_of, rows_bytes, token_bound
from .sm_model import TokenTraffic, default_budget, has_fast_memory, most_pulling
from .streams import Flights, Given
from .throughput import ThroughputPath, kernels_of

NO_CAPACITY_LIMIT = 2**31 - 2**16
"""Capacity that an exact dispatch publishes. Aligned rows (up to 1024) still fit below 2**31."""

_kept: list[Any] = []
"""Memory of communicators that have failed: a peer may still write there."""


def all_kernels(config: Config, formats: Formats = ()) -> list[Any]:
    """Return all kernels that such a communicator may launch, with rows in these formats."""
    problem = problem_of(config)
    tokens = token_bound(config, problem)
    found = [*kernels_of(problem), *(latency.kernels_of(problem, tokens) if tokens else [])]
    for name, scales_as in formats:
        how = row_format(Delivery(None, name, scales_as))
        found += throughput.kernels_of_format(problem, how)
        if tokens and how.latency:
            found += latency.kernels_of_format(problem, tokens, how)
    return [*dict.fromkeys(found), Refuse(problem, tokens if problem.domains else 0), RaiseAlarm(problem)]


class CuteBackend:
    """Operators of one communicator as kernel launches on the current stream.

    Calls of one communicator must be ordered on the device: on one stream, or by events between streams.
    """

    name = "cute"
    calls = 0
    _late = False
    """Whether the results of the current call are discarded (`_run_late`)."""

    def __init__(self, member: Member) -> None:
        self._config = config = member.config
        self._rank, self._device = member.rank, member.device
        self._local_experts = member.num_local_experts
        self._problem = problem = problem_of(config)
        self._across = across(config)
        over_domains = self._across and config.wire == "nvshmem"
        near = next((ranks for ranks in config.domains if member.rank in ranks), ())
        self.memory = symmetric.allocate(heap_of(config).nbytes, member.group, member.device, over_domains, near)
        self._rows: symmetric.SymmetricBuffer | None = None
        if config.symmetric_rows:  # across domains nobody else reads them
            self._rows = symmetric.allocate(rows_bytes(config), None if self._across else member.group, member.device)
        self._failures = failures = Failures(config, member.rank, member.device, self.memory)
        self._flights = Flights(member.device, FLIGHTS)
        place = problem, self.memory, member.multiprocessors
        rest = member.rank, failures.report.address, int(config.timeout * 1e9)
        self._course = Course()
        self._launcher = Launcher(*place, rest, course=self._course)
        self._side_launcher = Launcher(*place, rest, self._flights.side.raw, self._course)
        sms = self._launcher.multiprocessors
        slices = Slices(problem.row_bytes, problem.dtype).slices
        of = problem.experts_per_rank, problem.top_k, problem.row_bytes, slices
        traffic = TokenTraffic.of(*of, self._across, has_fast_memory(member.device))
        self.budget = default_budget(traffic, sms, most_pulling(problem, sms), config.dispatch_sms, config.combine_sms)
        outputs = Outputs(problem, member.num_local_experts, member.device)
        self._latency_tokens = token_bound(config, problem) or -1  # a call's bound may be 0
        self.latency = latency.LatencyPath(self._launcher, outputs, max(0, self._latency_tokens))
        self.throughput = ThroughputPath(self._launcher, outputs, self.budget, traffic)
        # The same on the communicator's own stream.
        self._latency_beside = latency.LatencyPath(self._side_launcher, outputs, max(0, self._latency_tokens))
        self._beside = ThroughputPath(self._side_launcher, outputs, self.budget, traffic, self._flights.side)
        self._order = Order(config.name)
        failures.turns = self._turns
        failures.members = (0,) if member.group is None else dist.get_process_group_ranks(member.group)
        failures.watch(functools.partial(raise_alarm, self._launcher))

    # ------------------------------------------------------------------ operators

    def plan(self, topk_idx: Tensor, sizes: Sizes) -> Placed:
        self._begin()
        return self.throughput.plan(topk_idx, sizes)

    def dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> DispatchTensors:
        self._begin()
        path = self.latency if self._has_latency(sizes, delivery) else self.throughput
        return path.dispatch(x, topk_weights, topk_idx, sizes, delivery)

    def bind(self, operator: str, *args: Any) -> Callable[..., Any] | None:
        if self.latency.deal is not None or operator not in ("dispatch", "combine"):
            return None
        return self._bind_dispatch(*args) if operator == "dispatch" else self._bind_combine(*args)

    def _bind_dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> Callable[..., DispatchTensors] | None:
        if not self._has_latency(sizes, delivery):
            return None
        begin, how = self._begin, row_format(delivery)
        run = self.latency.dispatches(topk_weights is not None, topk_idx.shape[0], sizes, how)

        def dispatch(x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor) -> DispatchTensors:
            begin()
            return run(x, topk_weights, topk_idx, None)

        return dispatch

    def _has_latency(self, sizes: Sizes, delivery: Delivery) -> bool:
        """Return whether the latency kernels run a dispatch."""
        return sizes.max_tokens <= self._latency_tokens and row_format(delivery).latency

    def dispatch_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> DispatchTensors:
        self._begin()
        placed = self._plan_exactly(topk_idx, sizes)
        route = route_of(topk_idx, placed, sizes, self._problem.world_size)
        received = self.throughput.along("dispatch_planned", x, topk_weights, route, delivery)
        return DispatchTensors(*received, *placed)

    def _plan_exactly(self, topk_idx: Tensor, sizes: Sizes) -> Placed:
        """Return a plan of exactly the rows that are received. Synchronizes the host."""
        ranks, tokens, alignment = self._problem.world_size, sizes.max_tokens, sizes.alignment
        if sizes.layout == TOKEN_MAJOR:
            most = most_token_rows(ranks, tokens, self._local_experts)
            placed = self.throughput.plan(topk_idx, sizes._replace(capacity=most))
            num_rows = int(placed.arrivals[-1])  # the last of `sources`: how many copies there are
        else:
            most = most_rows(ranks, tokens, self._problem.top_k, self._local_experts, alignment, repeats=True)
            capacity = NO_CAPACITY_LIMIT // alignment * alignment
            placed = self.throughput.plan(topk_idx, sizes._replace(capacity=capacity), most)
            num_rows = int(placed.offs[-1]) if self._local_experts else 0
        self._check_last()
        placed = placed._replace(arrivals=arrivals.cut(placed.arrivals, most, num_rows))
        if sizes.layout == TOKEN_MAJOR:
            placed = placed._replace(recv_idx=placed.recv_idx[:num_rows].clone())
        return placed

    def dispatch_planned(self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery) -> Received:
        self._begin()
        return self.throughput.along("dispatch_planned", x, topk_weights, route, delivery)

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None, format: str = ""
    ) -> Tensor:
        self._begin()
        format = format.removeprefix("wire:")
        if residual is None and self._sums_latency(route, format):
            return self.latency.combine(y, recv_weights, route, format)
        return self.throughput.combine(y, recv_weights, route, residual, format)

    def _bind_combine(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None, format: str = ""
    ) -> Callable[..., Tensor] | None:
        format = format.removeprefix("wire:")
        if residual is not None or not self._sums_latency(route, format):
            return None
        begin, run = self._begin, self.latency.combines(recv_weights is not None, route, format)

        def combine(
            y: Tensor, recv_weights: Tensor | None, topk_idx: Tensor, send_rows: Tensor, arrivals: Tensor, *_: Tensor
        ) -> Tensor:
            begin()
            return run(y, recv_weights, topk_idx, send_rows, arrivals)

        return combine

    def _sums_latency(self, route: Route, format: str) -> bool:
        """Return whether the latency kernels run a combine whose sums are sent in a format."""
        return route.max_tokens <= self._latency_tokens and latency.takes_sums(self._problem, format)

    def combine_gathered(self, y: Tensor, route: Route) -> Tensor:
        self._begin()
        rows, most = self._rows, self._config.symmetric_rows
        problem = not_gatherable(y, None if rows is None else rows.local, most, self._config.name)
        if problem is not None or rows is None:
            self.reject("combine_gathered", str(problem), max_tokens=route.max_tokens)
            self._course.agreed = True
            raise ValueError(problem)
        if self._across:
            return self.throughput.combine(y, None, route, None)
        if lies_elsewhere(y, rows.local):
            self.empty_rows(y.shape[0]).copy_(y)
        return self.throughput.combine_gathered(route, rows.table, most)

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        return self.throughput.dispatch_backward(grad_recv_x, grad_recv_weights, route)

    def combine_backward(
        self, grad_out: Tensor, y: Tensor | None, recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        return self.throughput.combine_backward(grad_out, y, recv_weights, route)

    # Split operations (streams.py).

    def start(self, flight: int, operator: str, *args: Any) -> Tensor:
        self._course.counts = False
        latency_args: tuple[Any, ...] | None = None  # for the latency path, if it runs the operator
        if operator == "combine":
            y, recv_weights, route, residual, format = args
            format = format.removeprefix("wire:")
            args = y, recv_weights, route, residual, format
            latency_args = (y, recv_weights, route, format) if self._sums_latency(route, format) else None
        elif operator == "dispatch":
            *_, sizes, delivery = args
            latency_args = args if self._has_latency(sizes, delivery) else None
        run, receive = functools.partial(getattr(self._beside, operator), *args), None
        if latency_args is not None:
            paths = self._latency_beside, self.latency
            run = functools.partial(getattr(self._latency_beside, f"send_{operator}"), *latency_args)
            beside, here = (functools.partial(getattr(path, operator), *latency_args, send=False) for path in paths)
            receive = beside, here
        self._failures.check(self._late)
        self._forget_lost()
        self._order.free(flight)
        self._course.begin()
        self._flights.settle()
        self._course.begin()  # what that has launched is of another call
        self._flights.start(flight, _tensors(args), run, receive)
        self._order.start(flight, operator)  # it has not, where that raises
        return ticket(self._device)

    def wait(self, flight: int, operator: str, *args: Any) -> Any:
        self._course.counts = False
        self._order.begun(flight, operator)
        problem = self._flights.problem(flight)
        if problem is not None:
            if flight not in self._flights:
                del self._order.started[flight]
            raise RuntimeError(f"communicator {self._config.name!r}: ep::{operator}_wait: {problem}")
        del self._order.started[flight]
        self._course.begin()
        results = self._flights.wait(flight)
        self._course.agreed = True  # the operation has been ended in any case
        self._failures.check()
        return results

    def end_flights(self) -> None:
        self._forget_lost()
        for flight, operator in [*self._order.started.items()]:
            with contextlib.suppress(Exception):
                self.wait(flight, operator)

    # Exceptions.

    def interrupted(
        self, operator: str, error: BaseException, again: Callable[[], Any], flight: int = 0, max_tokens: Any = 0
    ) -> None:
        """Keep the epochs of all ranks equal when a call raises.

        Every call consumes the same number of operations on every rank, including a call that raises:

        - If it raises the error of an earlier operation, the call runs anyway and its results are discarded.
        - If it raises before its first launch, its operations are rejected.
        - If some of an operation's kernels have been launched, the communicator fails.
        """
        course, (whole, part) = self._course, parts_of(operator)
        if torch.cuda.is_current_stream_capturing() or self._failures.has_failed():
            return
        if not course.counts:
            if isinstance(error, ValueError):
                self._run_late(operator, again, flight, max_tokens)
            return
        if course.agreed:
            return
        why = f"ep::{operator}: {type(error).__name__}: {error}".rstrip(": ")
        stream = self._flights.side.stream if part == "start" else torch.cuda.current_stream(self._device)
        if course.open or (part == "start" and self._flights.unreceived and course.ended):
            with torch.cuda.stream(stream):
                self._failures.give_up(f"launched a part of an operation, and cannot launch the rest: {why}")
            return
        first, turns = course.ended, self._turns(whole, max_tokens)
        if first and "dynamic" in whole:  # the plan has ended, and what follows is along its route
            first, turns = first - 1, self._turns("dispatch_planned", max_tokens)
        if part == "wait":
            turns = int(self._flights.unreceived)
        try:
            self._refuse(why, first, turns)
        except Exception as another:
            with torch.cuda.stream(stream):
                failed = f"could not notify the other ranks that it does not run ep::{operator} ({another})"
                self._failures.give_up(f"{failed}: {why}")

    def _run_late(self, operator: str, again: Callable[[], Any], flight: int, max_tokens: Any) -> None:
        """Run a call whose results are discarded, because it raises the error of an earlier operation."""
        whole, part = parts_of(operator)
        self._late = True
        try:
            again()
            if part == "start":
                self.wait(flight, whole)
        except BaseException as error:
            if not isinstance(error, ValueError) or self._course.counts:
                self.interrupted(operator, error, again, flight, max_tokens)
        finally:
            self._late = False

    def _forget_lost(self) -> None:
        """Free the flights of operations that were started in a failed capture."""
        if self._order.started:
            for flight in self._flights.lost():
                del self._order.started[flight]

    def _check_last(self) -> None:
        """Raise the error that ended the first operation of a call on all ranks, after the host has waited for that
        operation."""
        self._course.agreed = True
        self._failures.check_last()
        self._course.agreed = False

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """Notify the other ranks by a kernel that runs in place of the operator's kernels: one launch for each round of
        the operator, because each round is an operation.

        Does nothing while a CUDA graph is captured, or if the communicator has failed: the other ranks then wait until
        the deadline.
        """
        if torch.cuda.is_current_stream_capturing() or self.has_failed():
            return
        self._forget_lost()
        (whole, part), started = parts_of(operator), self._order.started
        if part == "wait":
            if started.get(flight) != whole:
                return
            del started[flight]
            if not self._flights.abandon(flight):
                return  # it runs to its end, here as elsewhere
        elif started and (part == "" or flight in started):
            return  # nobody runs it
        self._refuse(reason, 0, self._turns(whole, max_tokens) if part != "wait" else 1)

    def _refuse(self, reason: str, first: int, turns: int) -> None:
        """Reject operations `first` to `turns` - 1 of an operator."""
        if first >= turns:
            return
        self._flights.follow()
        text = torch.frombuffer(bytearray(pack_reason(reason, turns)), dtype=torch.uint8).to(self._device)
        tokens = max(0, self._latency_tokens) if self._across else 0
        bind = self._launcher.get(Refuse, tokens)
        for turn in range(first, turns):
            bind(marks.pack_refusal(self._rank, turn), blocks=1)(text)

    def _turns(self, operator: str, max_tokens: Any) -> int:
        """Return the number of kernel operations that an operator consists of.

        An invalid `max_tokens` counts as the communicator's, which the other ranks use if they pass none. If they pass
        another value, they detect the disagreement.
        """
        most = self._config.max_tokens_per_rank
        rounds = self.throughput.rounds(max_tokens if isinstance(max_tokens, int) and 0 <= max_tokens <= most else most)
        whole = ("plan", "dispatch_dynamic")  # the second ends where its plan does
        if rounds == 1 or operator in whole or (operator == "combine_gathered" and not self._across):
            return 1
        return rounds + (operator == "dispatch")  # the route is published first

    def empty_rows(self, num_rows: int) -> Tensor:
        config = self._config
        if self._rows is None:
            return torch.empty(0, config.hidden_size, dtype=config.dtype, device=self._device)
        rows = self._rows.local.view(config.dtype).view(-1, config.hidden_size)
        return rows[:num_rows].detach()  # what autograd notes when it is written to ends with this tensor

    def _begin(self) -> None:
        """Raise what kernels reported, and check that no split operation is in progress. Called by every operator that
        is not split."""
        self._course.counts = False
        self._failures.check(self._late)
        if self._order.started:
            self._forget_lost()
            self._order.check()
        self._course.begin()

    # ------------------------------------------------------------------ lifetime

    def compile(self, formats: Formats = ()) -> None:
        self._launcher.compile(all_kernels(self._config, formats))

    def warmup(self) -> None:
        """Runs every kernel once, on no tokens."""
        config = self._config
        x = torch.empty(0, config.hidden_size, dtype=config.dtype, device=self._device)
        topk_idx = torch.empty(0, config.top_k, dtype=torch.int32, device=self._device)
        weights = torch.empty(0, config.top_k, dtype=torch.float32, device=self._device)
        rows, ranks = config.alignment, config.world_size
        # Latency kernels, throughput kernels, those that go in rounds.
        bounds = sorted({1, self._problem.max_tokens, config.max_tokens_per_rank})
        plain, fewest = Delivery(), Sizes(rows, rows, 0, bounds[0])
        for layout in (GROUPED, TOKEN_MAJOR):
            every = [fewest._replace(max_tokens=bound, layout=layout) for bound in bounds]
            if layout == TOKEN_MAJOR:
                every = [sizes._replace(alignment=1) for sizes in every]
            self.plan(topk_idx, every[0])
            for given in (None, weights):
                for sizes in every:
                    out = self.dispatch(x, given, topk_idx, sizes, plain)
                    route = route_of(topk_idx, out.placed, sizes, ranks)
                    row_weights = None if given is None else out.recv_weights
                    if layout == GROUPED:
                        self.combine(out.recv_x, row_weights, route)
                        self.combine(out.recv_x, row_weights, route, x)
                self.start(0, "dispatch", x, given, topk_idx, every[0], plain)
                started = self.wait(0, "dispatch")
                if layout == GROUPED:
                    small = route_of(topk_idx, started.placed, every[0], ranks)
                    self.start(0, "combine", started.recv_x, row_weights, small, None, "")
                    self.wait(0, "combine")
                    self.combine_backward(x, out.recv_x, row_weights, route)
                    self.combine_backward(x, None, row_weights, route)
                self.dispatch_planned(x, given, route, plain)
                self.dispatch_backward(out.recv_x, row_weights, route)
            self.dispatch_backward(None, out.recv_weights, route)
            if layout == GROUPED and config.symmetric_rows:
                self.combine_gathered(self.empty_rows(0), route)
        self.dispatch_dynamic(x, None, topk_idx, Sizes(UNBOUNDED, 1, 0, 1, TOKEN_MAJOR), plain)
        torch.cuda.synchronize(self._device)
        self.check_errors()

    # ------------------------------------------------------------------ failures (failures.py)

    def listen(self) -> None:
        self._failures.listen()

    def check_errors(self) -> None:
        self._failures.check()

    def last_operations(self, rank: int) -> list[Operation]:
        return self._failures.last_operations(rank)

    def call_on_failure(self, callback: Callable[[str], None]) -> None:
        self._failures.callbacks.append(callback)

    def has_failed(self) -> bool:
        return self._failures.has_failed()

    def unsaid(self) -> str | None:
        return self._failures.unsaid()

    def destroy(self, keep: bool) -> None:
        """Free the communicator. With ``keep``, memory is kept until the process ends."""
        self._failures.unwatch()
        if keep or self.has_failed():
            _kept.append((self.memory, self._rows, self._failures.report))
            return
        self._failures.let_go()
        self.memory.free()
        if self._rows is not None:
            self._rows.free()


def raise_alarm(launcher: Launcher, why: str) -> None:
    """Launch the kernel that notifies the other ranks that this one gives up; `why` if no kernel has reported it."""
    text = None
    if why:
        text = torch.frombuffer(bytearray(pack_reason(why)), dtype=torch.uint8).to(launcher.device)
    launcher.get(RaiseAlarm)(0, blocks=1)(text)


def _tensors(args: tuple[Any, ...]) -> Given:
    """Return the tensors of an operator's arguments, including those in records."""
    flat = itertools.chain.from_iterable(arg if isinstance(arg, tuple) else (arg,) for arg in args)
    return tuple(value for value in flat if isinstance(value, Tensor))
