"""The cute backend: checks and limits of a communicator, and the choice of kernels for each call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels import marks
from cute_kernels.alarm import RaiseAlarm
from cute_kernels.rejection import Reject
from cute_kernels.slices import Slices
from meta_kernels.arguments import (
    AnyStart,
    Args,
    CombineArgs,
    CombineBackwardArgs,
    CombineGatheredArgs,
    CombineStartArgs,
    DispatchArgs,
    DispatchBackwardArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    DispatchStartArgs,
    PlanArgs,
)

from ... import arrivals, symmetric
from ...config import Config, Member, most_rows, most_token_rows
from ...group import leaving, meeting
from ...group.exchange import Exchange
from ...records import (
    FLIGHTS,
    GROUPED,
    TOKEN_MAJOR,
    DispatchTensors,
    Operation,
    Placed,
    plan_in,
    route_of,
)  # fmt: skip
from ...specs import CombineSpec, DispatchSpec, GatherSpec, Spec, spec_of
from ..base import Formats, lies_elsewhere, not_gatherable
from ..split import nothing, parts_of, ticket
from .ahead import latency_kernels, throughput_kernels
from .call_state import AGREED, BEGUN, CHECKING, LAUNCHING, CallState
from .failures import Failures, pack_reason
from .latency import RECEIVE, SEND, LatencyPath
from .launcher import Launcher, processes_of_rank
from .outputs import Outputs
from .residency import most_pulling
from .sizing import across, heap_of, problem_of, rows_bytes, token_bound
from .sm_model import TokenTraffic, default_budget
from .streams import Flights
from .throughput import ThroughputPath
from .tuning import Row, Tuning, rows_given

NO_CAPACITY_LIMIT = 2**31 - 2**16
"""Capacity that an exact dispatch publishes. Aligned rows (up to 1024) still fit below 2**31."""

Parts = tuple[Callable[[Any], Any], tuple[Callable[[Any], Any], Callable[[Any], Any]] | None]
"""What launches a split operation in its start, and what launches the rest of it, on the side stream or on the current
stream. None: the start launches everything."""

_kept: list[Any] = []
"""Memory of communicators that have failed: a peer may still write there."""


def all_kernels(config: Config, formats: Formats = ()) -> list[Any]:
    """Return all kernels that such a communicator may launch, with rows in these formats."""
    problem = problem_of(config)
    tokens = token_bound(config, problem)
    found: list[Any] = []
    for name, scales_as in (("", ""), *formats):
        spec = DispatchSpec("dispatch", GROUPED, format=name, scales_as=scales_as)
        found += throughput_kernels(problem, spec)
        found += latency_kernels(problem, tokens, spec)
    return [*dict.fromkeys(found), Reject(problem, tokens if problem.domains else 0), RaiseAlarm(problem)]


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
        self._exchange, self._number = Exchange(member.group, member.device), member.number
        self._problem = problem = problem_of(config)
        self._across = across(config)
        over_domains = self._across and config.wire == "nvshmem"
        near = next((ranks for ranks in config.domains if member.rank in ranks), ())
        self.memory = symmetric.allocate(heap_of(config).nbytes, member.group, member.device, over_domains, near)
        self._rows: symmetric.SymmetricBuffer | None = None
        if config.symmetric_rows:  # across domains nobody else reads them
            self._rows = symmetric.allocate(rows_bytes(config), None if self._across else member.group, member.device)
        self._failures = failures = Failures(config, member.rank, member.device, self.memory)
        self._flights = Flights(config.name, member.device, FLIGHTS)
        place = problem, self.memory, member.multiprocessors
        rest = member.rank, failures.report.address, int(config.timeout * 1e9)
        self._state = CallState()
        name = torch.cuda.get_device_properties(member.device).name
        self.tuning = tuning = Tuning(name, config.world_size, rows_given())
        self._launcher = Launcher(*place, rest, None, self._state, tuning)
        self._side_launcher = Launcher(*place, rest, self._flights.side.raw, self._state, tuning)
        traffic = TokenTraffic.of(problem, Slices(problem.row_bytes, problem.dtype).slices)
        sms = member.multiprocessors
        limits = sms, most_pulling(problem, sms), config.dispatch_sms, config.combine_sms
        self._default_budget = functools.partial(default_budget, traffic, tuning, *limits)
        self.budget = self._default_budget()
        outputs = Outputs(problem, member.num_local_experts, member.device)
        few = token_bound(config, problem)
        self.latency = LatencyPath(self._launcher, outputs, few)
        self.throughput = ThroughputPath(self._launcher, outputs, self.budget, traffic)
        # The same paths on the communicator's own stream, for split operations.
        self._latency_beside = LatencyPath(self._side_launcher, outputs, few)
        self._beside = ThroughputPath(self._side_launcher, outputs, self.budget, traffic, self._flights.side)
        failures.turns = self._turns
        if member.group is not None:
            failures.gone = lambda: leaving.gone(self._exchange.group, self._number)
        failures.members = (0,) if member.group is None else dist.get_process_group_ranks(member.group)
        failures.watch(functools.partial(raise_alarm, self._launcher))

    # ------------------------------------------------------------------ operators

    def bind(self, spec: Spec, a: Args) -> Callable[[Any], Any]:
        """The first call prepares launches, after its checks, because kernels may have to be compiled."""
        begin, launches, run = self.begin, self.launches, None

        def call(a: Args) -> Any:
            nonlocal run
            begin()
            if run is None:
                run = launches(spec, a)
            return run(a)

        return call

    def bind_start(self, spec: Spec, a: Args) -> Callable[[Any], Tensor]:
        state, flights = self._state, self._flights
        parts: Parts | None = None  # does not refer to the tensors of the call that made it

        def start(a: AnyStart) -> Tensor:
            nonlocal parts
            state.stage = CHECKING
            self._failures.check(self._late)
            flights.forget_lost()
            flights.free(a.flight)
            state.stage, state.launched = BEGUN, 0
            if parts is None:
                parts = self.parts(spec, a)
            run, receive = parts
            flights.settle()
            state.stage, state.launched = BEGUN, 0  # `settle` may have launched the rest of another call
            later = receive and (functools.partial(receive[0], a), functools.partial(receive[1], a))
            tensors = tuple(given for given in a if isinstance(given, Tensor))
            flights.start(a.flight, spec.kind, tensors, functools.partial(run, a), later)
            return ticket(self._device)

        return start

    def launches(self, spec: Spec, a: Any) -> Callable[[Any], Any]:
        """Return a function that launches the kernels of calls that differ from these arguments only in tensors."""
        match spec:
            case DispatchSpec(kind="dispatch_dynamic"):
                return functools.partial(self._dispatch_dynamic, spec)
            case GatherSpec():
                return self._combine_gathered
        path = self.latency if self.latency.takes(spec, a) else self.throughput
        return path.launches(spec, a)

    def _dispatch_dynamic(self, spec: DispatchSpec, a: DispatchDynamicArgs) -> DispatchTensors:
        placed = self._plan_exactly(a)
        route = route_of(placed, plan_in(a, 0))
        received = self.throughput.along("dispatch_planned", spec, a.x, a.topk_weights, a.scales, route)
        return DispatchTensors(*received, *placed)

    def _plan_exactly(self, a: DispatchDynamicArgs) -> Placed:
        """Return a plan of exactly the rows that are received. Synchronizes the host."""
        ranks, tokens, alignment = self._problem.world_size, a.max_tokens, a.alignment
        if a.layout == TOKEN_MAJOR:
            most = most_token_rows(ranks, tokens, self._local_experts)
            placed = self.throughput.plan(plan_in(a, most))
            num_rows = int(placed.arrivals[-1])  # the last of `sources`: how many copies there are
        else:
            most = most_rows(ranks, tokens, self._problem.top_k, self._local_experts, alignment, repeats=True)
            capacity = NO_CAPACITY_LIMIT // alignment * alignment
            placed = self.throughput.plan(plan_in(a, capacity), most)
            num_rows = int(placed.offs[-1]) if self._local_experts else 0
        self._check_last()
        placed = placed._replace(arrivals=arrivals.cut(placed.arrivals, most, num_rows))
        if a.layout == TOKEN_MAJOR:
            placed = placed._replace(recv_idx=placed.recv_idx[:num_rows].clone())
        return placed

    def _combine_gathered(self, a: CombineGatheredArgs) -> Tensor:
        y, rows, most = a.y, self._rows, self._config.symmetric_rows
        problem = not_gatherable(y, None if rows is None else rows.local, most, self._config.name)
        if problem is not None or rows is None:
            self.reject("combine_gathered", str(problem), max_tokens=a.max_tokens)
            self._state.stage = AGREED
            raise ValueError(problem)
        if self._across:
            whole = CombineArgs(y, None, *a[1:])
            return self.throughput.launches(CombineSpec(), whole)(whole)
        if lies_elsewhere(y, rows.local):
            self.empty_rows(y.shape[0]).copy_(y)
        return self.throughput.combine_gathered(a, rows.table, most)

    # Split operations (streams.py).

    def parts(self, spec: Spec, a: Any) -> Parts:
        """Return what launches the parts of split operations that differ from these arguments only in tensors."""
        if not self.latency.takes(spec, a):
            return self._beside.launches(spec, a), None
        beside, here = (path.launches(spec, a, RECEIVE) for path in (self._latency_beside, self.latency))
        return self._latency_beside.launches(spec, a, SEND), (beside, here)

    def wait(self, operator: str, flight: int, again: Callable[[], Any]) -> Any:
        self._state.stage = CHECKING
        self._flights.begun(flight, operator)
        problem = self._flights.problem(flight)
        if problem is not None:
            raise RuntimeError(f"communicator {self._config.name!r}: ep::{operator}_wait: {problem}")
        self._state.stage, self._state.launched = BEGUN, 0
        results = self._flights.wait(flight)
        self._state.stage = AGREED  # everything of the operation is launched
        self._failures.check()
        return results

    def end_flights(self) -> None:
        self._flights.forget_lost()
        for flight, one in [*self._flights.started.items()]:
            with contextlib.suppress(Exception):
                self.wait(one.operator, flight, nothing)

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
        state, (whole, part) = self._state, parts_of(operator)
        if torch.cuda.is_current_stream_capturing() or self._failures.has_failed():
            return
        if state.stage is CHECKING:
            if isinstance(error, ValueError):
                self._run_late(operator, again, flight, max_tokens)
            return
        if state.stage is AGREED:
            return
        why = f"ep::{operator}: {type(error).__name__}: {error}".rstrip(": ")
        stream = self._flights.side.stream if part == "start" else torch.cuda.current_stream(self._device)
        if state.stage is LAUNCHING or (part == "start" and self._flights.unreceived and state.launched):
            with torch.cuda.stream(stream):
                self._failures.give_up(f"launched a part of an operation, and cannot launch the rest: {why}")
            return
        first, turns = state.launched, self._turns(whole, max_tokens)
        if first and "dynamic" in whole:  # the plan has ended, and what follows is along its route
            first, turns = first - 1, self._turns("dispatch_planned", max_tokens)
        if part == "wait":
            turns = int(self._flights.unreceived)
        try:
            self._reject(why, first, turns)
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
                self.wait(whole, flight, nothing)
        except BaseException as error:
            if not isinstance(error, ValueError) or self._state.stage is not CHECKING:
                self.interrupted(operator, error, again, flight, max_tokens)
        finally:
            self._late = False

    def _check_last(self) -> None:
        """Raise the error that ended the first operation of a call on all ranks, after the host has waited for that
        operation."""
        self._state.stage = AGREED
        self._failures.check_last()
        self._state.stage = BEGUN  # another operation of the call follows

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """Notify the other ranks by a kernel that runs in place of the operator's kernels: one launch for each round of
        the operator, because each round is an operation.

        Does nothing while a CUDA graph is captured, or if the communicator has failed: the other ranks then wait until
        the deadline.
        """
        if torch.cuda.is_current_stream_capturing() or self.has_failed():
            return
        self._flights.forget_lost()
        (whole, part), started = parts_of(operator), self._flights.started
        if part == "wait":
            if flight not in started or started[flight].operator != whole:
                return
            if not self._flights.abandon(flight):
                return  # it runs to its end, here as elsewhere
        elif started and (part == "" or flight in started):
            return  # nobody runs it
        self._reject(reason, 0, self._turns(whole, max_tokens) if part != "wait" else 1)

    def _reject(self, reason: str, first: int, turns: int) -> None:
        """Reject operations `first` to `turns` - 1 of an operator."""
        if first >= turns:
            return
        self._flights.follow()
        text = torch.frombuffer(bytearray(pack_reason(reason, turns)), dtype=torch.uint8).to(self._device)
        tokens = self.latency.tokens if self._across else 0
        bind = self._launcher.get(Reject, tokens=tokens)
        for turn in range(first, turns):
            bind(marks.pack_rejection(self._rank, turn), blocks=1)(text)

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

    def tune(self, *rows: Row) -> None:
        """Put rows of knobs before all others, in place of those that were put before, for calls that are bound from
        then on. Only outside of blocks that change the budget."""
        self.tuning.put(*rows)
        vars(self.budget).update(vars(self._default_budget()))

    def give_up(self, why: str) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._failures.give_up(why)

    @contextlib.contextmanager
    def together(self, call: str, problem: str | None = None, values: Sequence[int] = ()) -> Iterator[Tensor]:
        with self._exchange.turn:
            yield meeting.meet(self._exchange, call, self._config.name, self._number, problem, values)

    def begin(self) -> None:
        """Raise what kernels reported, and check that no split operation is in progress. Called by every operator that
        is not split."""
        state = self._state
        state.stage = CHECKING
        self._failures.check(self._late)
        if self._flights.started:
            self._flights.forget_lost()
            self._flights.check()
        state.stage, state.launched = BEGUN, 0

    # ------------------------------------------------------------------ lifetime

    def compile(self, formats: Formats = ()) -> None:
        self._launcher.compile(all_kernels(self._config, formats), processes_of_rank(self._exchange))

    def warmup(self) -> None:
        """Run every kernel once, without tokens."""
        config = self._config
        x = torch.empty(0, config.hidden_size, dtype=config.dtype, device=self._device)
        topk_idx = torch.empty(0, config.top_k, dtype=torch.int32, device=self._device)
        weights = torch.empty(0, config.top_k, dtype=torch.float32, device=self._device)
        own: dict[str, Any] = {
            "num_local_experts": self._local_experts, "world_size": config.world_size, "comm": config.name
        }  # fmt: skip
        # Bounds that select latency kernels, throughput kernels, and throughput kernels in rounds.
        bounds = sorted({1, self._problem.max_tokens, config.max_tokens_per_rank})
        for layout in (GROUPED, TOKEN_MAJOR):
            alignment = 1 if layout == TOKEN_MAJOR else config.alignment
            plans = [
                PlanArgs(topk_idx, config.alignment, alignment, 0, bound, **own, layout=layout) for bound in bounds
            ]  # fmt: skip
            self._run(plans[0])
            for given in (None, weights):
                for plan in plans:
                    out = self._run(DispatchArgs(x, given, *plan))
                    route = route_of(out.placed, plan)
                    row_weights = None if given is None else out.recv_weights
                    along = *route.tensors, *route.ints, config.name
                    if layout == GROUPED:
                        self._run(CombineArgs(out.recv_x, row_weights, *along))
                        self._run(CombineArgs(out.recv_x, row_weights, *along, residual=x))
                started = self._run_split(DispatchStartArgs(x, given, *plans[0]))
                known = *route.tensors, route.num_rows, *route.ints, config.name
                if layout == GROUPED:
                    small = route_of(started.placed, plans[0])
                    of_small = *small.tensors, *small.ints, config.name
                    self._run_split(CombineStartArgs(started.recv_x, row_weights, *of_small))
                    self._run(CombineBackwardArgs(x, out.recv_x, row_weights, *known))
                    self._run(CombineBackwardArgs(x, None, row_weights, *known))
                self._run(DispatchPlannedArgs(x, given, *known, layout))
                self._run(DispatchBackwardArgs(out.recv_x, row_weights, *along, layout))
            self._run(DispatchBackwardArgs(None, out.recv_weights, *along, layout))
            if layout == GROUPED and config.symmetric_rows:
                self._run(CombineGatheredArgs(self.empty_rows(0), *along))
        self._run(DispatchDynamicArgs(x, None, topk_idx, 1, 1, **own, layout=TOKEN_MAJOR))
        torch.cuda.synchronize(self._device)
        self.check_errors()

    def _run(self, a: Args) -> Any:
        spec = spec_of(a)
        assert spec is not None
        return self.bind(spec, a)(a)

    def _run_split(self, a: AnyStart) -> Any:
        spec = spec_of(a)
        assert spec is not None
        self.bind_start(spec, a)(a)
        return self.wait(spec.kind, a.flight, nothing)

    # ------------------------------------------------------------------ failures (failures.py)

    def listen(self) -> None:
        self._failures.listen()

    def check_errors(self) -> None:
        self._failures.check()

    def last_operations(self, rank: int) -> list[Operation]:
        return self._failures.last_operations(rank)

    def operations(self) -> int:
        return self._failures.operations()

    def waited(self) -> list[float]:
        return self._failures.waited()

    def call_on_failure(self, callback: Callable[[str], None]) -> None:
        self._failures.callbacks.append(callback)

    def has_failed(self) -> bool:
        return self._failures.has_failed()

    def unsaid(self) -> str | None:
        return self._failures.unsaid()

    def destroy(self, keep: bool) -> None:
        """Free the communicator. With ``keep``, memory is kept until the process ends."""
        self._failures.unwatch()
        self._exchange.group = None
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
    with symmetric.beside_captures():
        if why:
            text = torch.frombuffer(bytearray(pack_reason(why)), dtype=torch.uint8).to(launcher.device)
        launcher.get(RaiseAlarm)(0, blocks=1)(text)
