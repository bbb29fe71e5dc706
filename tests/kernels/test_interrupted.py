"""A rank whose operator raises on the host rejects it for the others and counts it. Needs no GPU."""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from operate import Sizes
from recorded import FEW, IDX, IN_THREE, MANY, PLAIN, PROBLEM, Device, X, route_of, told

from cute_kernels import marks, sync
from cute_kernels.heap import NOTE_WORDS, NOTES, REASON_BYTES, REJECTED, STATE_BYTES
from ep_ops import arrivals
from ep_ops.backends.cute import history, watch
from ep_ops.backends.cute.backend import raise_alarm
from ep_ops.backends.cute.call_state import Stage
from ep_ops.backends.cute.failures import Failures
from ep_ops.backends.cute.report import Report
from ep_ops.backends.split import parts_of
from ep_ops.records import UNBOUNDED, Operation
from ep_ops.symmetric import SymmetricBuffer

MOST = PROBLEM.max_tokens
OOM = torch.OutOfMemoryError("no room")


def call(on: Any, operator: str, *args: Any, flight: int = 0, max_tokens: Any = 0) -> Any:
    """Call an operator as the operators' implementations do."""
    whole, part = parts_of(operator)
    run = functools.partial(getattr(on, part or whole), *((args[0], whole, *args[1:]) if part else args))
    try:
        return run()
    except BaseException as error:
        on.interrupted(operator, error, run, flight, max_tokens)
        raise


def kernels(device: Device) -> list[str]:
    return [kernel for what, _, kernel in device.take() if what == "launches"]


@pytest.fixture
def failures(backend: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> Failures:
    """Return the failures of rank 0, whose kernels have reported nothing yet."""
    made = object.__new__(Failures)
    made._config = SimpleNamespace(  # type: ignore[assignment]
        name="ep", max_tokens_per_rank=PROBLEM.planned_tokens, world_size=2
    )
    made._log = lambda rank: []  # type: ignore[method-assign]
    made._rank, made._device, made._resets = 0, torch.device("cpu"), device.stream("resets")
    made._state, made._raised, made._seen = torch.zeros(STATE_BYTES // 8, dtype=torch.int64), False, False
    made.turns = backend._turns
    made._alarm = functools.partial(raise_alarm, backend._launcher)
    monkeypatch.setattr(watch, "look", lambda watched: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: device.entered(device.current))
    made.report = report = object.__new__(Report)
    report._words, report.reported, report._timeout = [0] * 64, 0, 2.0  # type: ignore[assignment]
    report._num_experts, report._lost_experts = 4, 0
    report._heard = lambda epoch: (0, ())
    backend._failures = made
    return made


def rejected_by_a_peer(failures: Failures, kind: str, max_tokens: int, turns: int, epoch: int = 7) -> None:
    """Report a peer's rejection as kernels do."""
    own = epoch << marks.SHIFT | marks.pack(kind, max_tokens)
    words = [1, sync.REJECTION, 0, 0, 1, 0, own, epoch << marks.SHIFT | marks.pack_rejection(1)]
    failures.report._words[2 * sync.REPORT_WORDS : 2 * sync.REPORT_WORDS + 8] = words  # type: ignore[assignment]
    failures._reason = lambda peer, epoch: ("why", turns)  # type: ignore[method-assign]


def rejected_here(failures: Failures) -> None:
    """An expert id of this rank, as kernels report it."""
    words = [1, sync.BAD_EXPERT, 0, 0, 0, 7, 7 << marks.SHIFT | marks.pack("dispatch", 64), 99]
    failures.report._words[sync.REPORT_WORDS : sync.REPORT_WORDS + 8] = words  # type: ignore[assignment]


# ---------------------------------------------------------------------- a rejection takes the number of the operation


def test_max_tokens_beyond_the_most(backend: Any, device: Device) -> None:
    """A rejected call with a wrong max_tokens counts as many operations as the peers' calls, not as many as the wrong
    value would take."""
    most = PROBLEM.planned_tokens
    for max_tokens in (most + 1, 1000 * most, -1, "many"):
        backend.reject("dispatch", "why", 0, max_tokens)
        assert device.rejected == [(turn, "why", 4) for turn in range(4)], max_tokens
        device.rejected.clear()
    backend._config.max_tokens_per_rank = MOST  # all in one round
    backend.reject("dispatch", "w" * REASON_BYTES, 0, 1100)
    assert device.rejected == [(0, "w" * (REASON_BYTES - 1), 1)], "as much of the reason as there is room for"


@pytest.mark.parametrize(("turns", "agrees"), [(4, True), (1, False), (3, False), (5, False)])
def test_rejections_that_take_another_number(
    turns: int, agrees: bool, backend: Any, failures: Failures, device: Device
) -> None:  # fmt: skip
    """Operations that follow would be paired with others: the communicator fails on all ranks, with both numbers."""
    rejected_by_a_peer(failures, "dispatch", IN_THREE.max_tokens, turns)
    if agrees:
        with pytest.raises(
            ValueError, match=r"^communicator 'ep': ep::dispatch \(operation 7\): rejected by rank 1: w"
        ):
            failures.check()
        assert kernels(device) == [] and not failures.has_failed()
        return
    text = rf"with its max_tokens the call runs in {turns} operations, with that of rank 0 in 4: all ranks must pass"
    with pytest.raises(RuntimeError, match=text):
        failures.check()
    assert kernels(device) == ["RaiseAlarm"] and failures.has_failed()
    with pytest.raises(RuntimeError, match=text):
        failures.check()
    assert kernels(device) == [], "told once"


# ---------------------------------------------------------------------- exceptions before the first launch, and after


def raises(error: BaseException) -> Callable[..., Any]:
    def raising(*args: Any, **values: Any) -> Any:
        raise error

    return raising


def failing(path: Any, name: str, error: BaseException, launches: bool) -> None:
    """Have that kernel not be loaded, or not be launched."""
    get = path._kernel

    def wrapped(kernel: Any, **variant: Any) -> Any:
        if kernel.__name__ != name:
            return get(kernel, **variant)
        if not launches:
            raise error
        return lambda terms, **numbers: raises(error)

    path._kernel = wrapped


@pytest.mark.parametrize("error", [OOM, KeyboardInterrupt()], ids=["oom", "interrupt"])
def test_before_the_first_launch(error: BaseException, backend: Any, device: Device, failures: Failures) -> None:
    """The operation ends on all ranks with the reason; the next one is as any other."""
    get = backend.throughput._kernel
    failing(backend.throughput, "Pull", error, launches=False)
    with pytest.raises(type(error)):
        call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
    said = f"ep::dispatch: {type(error).__name__}{': no room' if error is OOM else ''}"
    assert device.rejected == [(0, said, 1)] and kernels(device) == ["Reject"], "the publish kernel was not launched"
    backend.throughput._kernel = get
    call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
    assert kernels(device) == ["Publish", "Pull"] and not failures.has_failed()


@pytest.mark.parametrize("flight", [None, 1])
@pytest.mark.parametrize("error", [OOM, KeyboardInterrupt()], ids=["oom", "interrupt"])
def test_half_an_operation(
    error: BaseException, flight: int | None, backend: Any, device: Device, failures: Failures
) -> None:
    """If half of an operation runs, its number is used and the rest will not come: the communicator fails, and a launch
    behind that part informs everybody."""
    path = backend.throughput if flight is None else backend._beside
    failing(path, "Pull", error, launches=True)
    start = () if flight is None else (flight,)
    operator = "dispatch" if flight is None else "dispatch_start"
    with pytest.raises(type(error)):
        call(backend, operator, *start, X, None, IDX, MANY, PLAIN, flight=flight or 0, max_tokens=400)
    stream = "caller" if flight is None else "side"
    launched = [(stream, kernel) for what, stream, kernel in device.take() if what == "launches"]
    assert launched == [(stream, "Publish"), (stream, "RaiseAlarm")] and not device.rejected
    reason, _ = told(backend._launcher.launched[-1][2]["text"])
    assert f"cannot launch the rest: ep::{operator}: {type(error).__name__}" in reason
    with pytest.raises(RuntimeError, match=f"'ep' failed: rank 0: launched a part of an operation.*ep::{operator}"):
        call(backend, "combine", X, None, route_of((IDX,) * 4, 400))
    assert kernels(device) == [] and backend.has_failed() and failures.unsaid() is None


def test_between_rounds(backend: Any, device: Device, failures: Failures) -> None:
    """Rounds are operations: those that are left are rejected, in the places that they have."""
    get, number = backend.throughput._kernel, []

    def third(kernel: Any, **variant: Any) -> Any:
        number.append(kernel)
        if len(number) == 4:  # that of the route, Publish and Pull of the first round
            raise OOM
        return get(kernel, **variant)

    backend.throughput._kernel = third
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, "dispatch", X, None, IDX, IN_THREE, PLAIN, max_tokens=IN_THREE.max_tokens)
    assert kernels(device) == ["Publish", "Publish", "Pull", "Reject", "Reject"]
    assert [(turn, turns) for turn, _, turns in device.rejected] == [(2, 4), (3, 4)]


def test_between_the_halves_of_a_dynamic_dispatch(
    backend: Any, device: Device, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overloaded rank has no memory for its rows. What it rejects is the dispatch along the route of the plan."""
    backend._problem, backend._local_experts = PROBLEM, 0
    plan = backend.throughput.plan
    monkeypatch.setattr(backend.throughput, "plan", lambda a, most: plan(a._replace(capacity=32), 32))
    monkeypatch.setattr(arrivals, "cut", lambda lists, most, rows: lists)
    monkeypatch.setattr(backend.throughput, "along", raises(OOM))
    monkeypatch.setattr(failures, "check_last", lambda: None)
    for bound, turns in ((MOST, 1), (2 * MOST, 2)):
        with pytest.raises(torch.OutOfMemoryError):
            call(backend, "dispatch_dynamic", X, None, IDX, Sizes(UNBOUNDED, 16, 0, bound), PLAIN, max_tokens=bound)
        assert kernels(device) == ["Publish"] + ["Reject"] * turns
        assert [(turn, turns) for turn, _, turns in device.rejected] == [(turn, turns) for turn in range(turns)]
        device.rejected.clear()
    # What all ranks raise nobody has to be told.
    monkeypatch.setattr(failures, "check_last", raises(ValueError("rejected by rank 1")))
    with pytest.raises(ValueError, match="rejected by rank 1"):
        call(backend, "dispatch_dynamic", X, None, IDX, Sizes(UNBOUNDED, 16, 0, MOST), PLAIN, max_tokens=MOST)
    assert kernels(device) == ["Publish"] and not device.rejected


def test_a_start_and_a_wait(backend: Any, device: Device, failures: Failures) -> None:
    """If a start on latency kernels is interrupted, its wait rejects the operation, and the flight is free
    afterwards."""
    backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
    device.take()
    backend._flights.started[0].receive = raises(OOM), raises(OOM)
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, "dispatch_wait", 0)
    assert kernels(device) == ["Reject"] and [turns for *_, turns in device.rejected] == [1]
    backend._latency_beside._kernel, get = raises(OOM), backend._latency_beside._kernel
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, "dispatch_start", 0, X, None, IDX, FEW, PLAIN, max_tokens=8)
    assert kernels(device) == ["Reject"] and not backend._flights.started
    # Receiving what the flight under way is sent fails: that one's wait may still come, so nobody can be rejected.
    backend._latency_beside._kernel = get
    backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
    backend._flights.started[0].receive = raises(OOM), raises(OOM)
    device.take()
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, "dispatch_start", 1, X, None, IDX, MANY, PLAIN, flight=1, max_tokens=400)
    assert kernels(device) == ["RaiseAlarm"] and failures.has_failed()


def test_a_wait_whose_operation_has_run(backend: Any, device: Device, failures: Failures) -> None:
    """The start has launched the whole operation, so a failing wait sends no rejection."""
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    backend._flights._join = raises(OOM)
    device.take()
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, "dispatch_wait", 0)
    assert kernels(device) == [] and not failures.has_failed()


def test_a_start_that_is_rejected_beside_another_flight(backend: Any, device: Device) -> None:
    """A start is rejected beside the operation of the other flight. In a flight that is in use no rank runs it."""
    backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
    device.take()
    for operator, flight, runs in (("combine_start", 0, False), ("combine", 0, False), ("combine_start", 1, True)):
        backend.reject(operator, "why", flight, 8)
        assert device.rejected == [(0, "why", 1)] * runs, (operator, flight)


def test_what_no_rank_runs(backend: Any, device: Device, failures: Failures) -> None:
    """A call in the wrong order raises on every rank, and no rejection is sent."""
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    device.take()
    with pytest.raises(RuntimeError, match="before an operator that is not split"):
        call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
    assert kernels(device) == [] and not device.rejected


def test_flights_end_though_one_raises(backend: Any, device: Device, failures: Failures) -> None:
    for flight in (0, 1):
        backend.start(flight, "dispatch", X, None, IDX, MANY, PLAIN)
    rejected_by_a_peer(failures, "dispatch", 400, 1)
    backend.end_flights()
    assert not backend._flights.started


def test_while_a_graph_is_captured(backend: Any, device: Device, failures: Failures) -> None:
    """The captured operation never runs, so no rejection is sent."""
    device.capturing = 1
    failing(backend.throughput, "Pull", OOM, launches=True)
    with pytest.raises(torch.OutOfMemoryError):
        call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
    assert kernels(device) == ["Publish"] and not failures.has_failed() and not device.rejected


# ---------------------------------------------------------------------- what another rank has rejected


def test_a_call_that_tells_of_an_earlier_one_runs(backend: Any, device: Device, failures: Failures) -> None:
    """Ranks stay in step: whatever a rank's host has launched before it hears of a rejection, the call that raises it
    is an operation of all ranks, whose results nobody gets here."""
    rejected_by_a_peer(failures, "dispatch", 400, 1)
    with pytest.raises(ValueError, match="rejected by rank 1: why"):
        call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
    assert kernels(device) == ["Publish", "Pull"]
    rejected_by_a_peer(failures, "dispatch", 400, 1, epoch=9)
    with pytest.raises(ValueError, match="rejected by rank 1: why"):
        call(backend, "dispatch_start", 1, X, None, IDX, FEW, PLAIN, flight=1, max_tokens=8)
    assert kernels(device) == ["LatencyDispatch"] * 2 and not backend._flights.started, "it was sent and received"
    recv_x, _, recv_weights, *placed = call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
    rejected_by_a_peer(failures, "combine", 400, 1, epoch=11)
    device.take()
    failing(backend.throughput, "Combine", OOM, launches=False)
    with pytest.raises(ValueError, match="rejected by rank 1: why"):
        call(backend, "combine", X, None, route_of(placed, 400), max_tokens=400)
    assert kernels(device) == ["Reject"], "it cannot run"


def test_a_bound_call_tells_of_an_earlier_one(backend: Any, device: Device, failures: Failures) -> None:
    """A bound call reports an earlier rejection before it launches, as any other call; its stage is then that of
    checks."""
    run = backend.bound(backend.dispatch_args(X, None, IDX, FEW, PLAIN))
    run()
    assert (backend._state.stage, backend._state.launched) == (Stage.BEGUN, 1)
    assert kernels(device) == ["LatencyDispatch"]
    rejected_by_a_peer(failures, "dispatch", 8, 1)
    with pytest.raises(ValueError, match="rejected by rank 1: why") as told:
        run()
    assert backend._state.stage is Stage.CHECKING and kernels(device) == []
    again = functools.partial(backend.dispatch, X, None, IDX, FEW, PLAIN)
    backend.interrupted("dispatch", told.value, again, 0, 8)
    assert kernels(device) == ["LatencyDispatch"], "its results are dropped"


def test_a_bound_call_that_cannot_launch(backend: Any, device: Device, failures: Failures) -> None:
    """If a bound call cannot launch, it is unknown whether its kernel runs, so the communicator fails."""
    get = backend.latency._kernel
    backend.latency._kernel = lambda kernel, **variant: lambda terms, **numbers: raises(OOM)
    run = backend.bound(backend.combine_args(X, None, route_of((IDX,) * 4, 8)))
    with pytest.raises(torch.OutOfMemoryError) as told:
        run()
    backend.latency._kernel = get
    assert backend._state.stage is Stage.LAUNCHING
    backend.interrupted("combine", told.value, run, 0, 8)
    assert kernels(device) == ["RaiseAlarm"] and failures.has_failed()


def test_a_call_that_tells_of_one_of_two(backend: Any, device: Device, failures: Failures) -> None:
    """A call that can report one of two rejections runs; the next call reports the other one and runs as well."""
    rejected_by_a_peer(failures, "dispatch", 400, 1)
    rejected_here(failures)
    for text in ("rejected by rank 1: why", "topk_idx holds 99 at flat index 7"):
        with pytest.raises(ValueError, match=text):
            call(backend, "dispatch", X, None, IDX, MANY, PLAIN, max_tokens=400)
        assert kernels(device) == ["Publish", "Pull"]


@pytest.mark.parametrize("mapped", [True, False])
def test_several_rejections_before_the_host_looks(mapped: bool, failures: Failures, device: Device) -> None:
    """Kernels report the last one, and the ranks' logs contain the others: all are in one error, and only once."""
    rejected_by_a_peer(failures, "combine", 400, 1, epoch=20)
    failures.report.reported = 12  # raised before, as all older ones
    failures._reason = lambda peer, epoch: (f"reason {peer} of {epoch}", 1)  # type: ignore[method-assign]

    def log(*operations: tuple[int, str]) -> bytes:
        words = [0] * NOTES * NOTE_WORDS
        for number, kind in operations:
            words[number % NOTES * NOTE_WORDS] = marks.make(number, turns.get(number, marks.pack(kind, 64)))
        return struct.pack(f"<{len(words)}q", *words)

    turns = {number: marks.pack_rejection(1, turn) for number, turn in ((11, 0), (12, 0), (13, 0), (20, 0), (21, 0))}
    turns |= {14: marks.pack_rejection(1, 0), 15: marks.pack_rejection(1, 1), 17: marks.pack_rejection(1, 0)}
    theirs = log(*((number, "rejected") for number in turns))
    own = [(number, "dispatch" if number % 2 else "combine") for number in range(8, 21)]
    turns = {17: marks.pack_rejection(0, 0)}  # both ranks rejected it: this one raised an error of its own
    logs = [log(*own), theirs]

    def read(rank: int) -> Any:
        if not mapped and rank:
            raise RuntimeError("not mapped")
        return history.operations(logs[rank], now=21)

    failures._log = read  # type: ignore[method-assign]
    with pytest.raises(ValueError) as error:
        failures.check()
    said = "communicator 'ep': ep::combine (operation 20): rejected by rank 1: reason 1 of 20"
    if mapped:
        said += "; before that, ep::dispatch (operation 13): rejected by rank 1: another reason has replaced its own"
        said += "; ep::combine (operation 14): rejected by rank 1: another reason has replaced its own"
    assert str(error.value) == said
    failures.check()
    rejected_by_a_peer(failures, "dispatch", 400, 1, epoch=21)
    with pytest.raises(
        ValueError, match=r"^communicator 'ep': ep::dispatch \(operation 21\): rejected by rank 1: why$"
    ):
        failures.check()


def test_the_reason_of_an_earlier_rejection(failures: Failures) -> None:
    rejected_by_a_peer(failures, "combine", 400, 1, epoch=8)
    failures._reason = lambda peer, epoch: (f"reason {peer} of {epoch}", 1)  # type: ignore[method-assign]
    entry = functools.partial(Operation, scalars=False, rows=True, latency=False, format="", token_major=False)
    times: dict[str, Any] = {"begun": 0.0, "met": None}
    logs = [
        [entry(8, "combine", max_tokens=400, **times), entry(7, "dispatch", max_tokens=400, **times)],
        [entry(n, "rejected", max_tokens=1, **times) for n in (8, 7)],
    ]
    failures._log = lambda rank: logs[rank]  # type: ignore[method-assign]
    text = r"reason 1 of 8; before that, ep::dispatch \(operation 7\): rejected by rank 1: reason 1 of 7$"
    with pytest.raises(ValueError, match=text):
        failures.check()


def test_a_value_that_kernels_rejected(failures: Failures, device: Device) -> None:
    """The device's word is reset before any kernel that is launched later; else that one would report nothing."""
    where = []

    class Word:
        def __getitem__(self, which: slice) -> Any:
            return SimpleNamespace(zero_=lambda: where.append((which.start, which.stop, device.current.name)))

    modes = []
    failures._state = Word()  # type: ignore[assignment]
    failures._resets.synchronize = lambda: modes.append(device.capture_mode)  # type: ignore[method-assign]
    device.capturing = 1
    rejected_here(failures)
    failures.check()
    assert not where, "outside of the capture it is raised"
    device.capturing = 0
    with pytest.raises(ValueError, match="topk_idx holds 99 at flat index 7"):
        failures.check()
    assert where == [(REJECTED, REJECTED + 1, "resets")]
    assert modes == ["CU_STREAM_CAPTURE_MODE_RELAXED"], "a capture of another thread would end"
    assert device.capture_mode == "CU_STREAM_CAPTURE_MODE_GLOBAL"
    failures.check()


def test_memory_is_read_while_another_thread_captures(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    modes = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: device.entered(device.current))
    monkeypatch.setattr(
        torch.cuda, "Stream",
        lambda *_: SimpleNamespace(cuda_stream=0, synchronize=lambda: modes.append(device.capture_mode)),
    )  # fmt: skip
    copied = lambda *_: modes.append(device.capture_mode) or (0,)  # noqa: E731
    monkeypatch.setattr(driver, "cuMemcpyDtoHAsync", copied)
    memory = SymmetricBuffer(torch.zeros(8, dtype=torch.uint8), (64,))
    assert len(memory.read(0, 0, 8)) == 8
    assert modes == ["CU_STREAM_CAPTURE_MODE_RELAXED"] * 2
    assert device.capture_mode == "CU_STREAM_CAPTURE_MODE_GLOBAL"


def test_a_rejection_of_another_operation_than_the_last(failures: Failures) -> None:
    """A rejection of the last operation is raised at once, and one of an earlier operation by a later check."""
    rejected_by_a_peer(failures, "dispatch", 400, 1)
    failures._epoch = lambda: 9  # type: ignore[method-assign]
    failures.check_last()
    failures._epoch = lambda: 8  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="rejected by rank 1: why"):
        failures.check_last()
    failures.check_last()


@pytest.mark.parametrize("by_peer", [False, True])
def test_a_failure_that_the_watching_thread_sees(
    by_peer: bool, failures: Failures, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread takes a failure once, and notifies the other ranks unless one of them has reported it."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: device.stream("alarm"))
    called: list[str] = []
    failures.callbacks, failures._once = [called.append], threading.Lock()
    assert failures.failure() is None
    failures._failed = lambda: "why"  # type: ignore[method-assign]
    failures.report.fail_by_peer(1, 7)
    if not by_peer:
        failures.report._words[:8] = [1, sync.TIMEOUT, 0, 0, 1, 0, 7 << marks.SHIFT, 0]  # type: ignore[assignment]
    assert [failures.failure(), failures.failure()] == ["why", None]
    failures.on_failure("why")
    assert called == ["why"] and kernels(device) == ["RaiseAlarm"] * (not by_peer)


def test_a_rejection_heard_of_in_a_capture(failures: Failures, device: Device) -> None:
    """The reason cannot be read then: it is raised by the next call outside."""
    rejected_by_a_peer(failures, "dispatch", 400, 1)
    device.capturing = 1
    failures.check()
    device.capturing = 0
    with pytest.raises(ValueError, match="rejected by rank 1: why"):
        failures.check()


def test_a_rank_that_has_left(failures: Failures, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for it long enough for a warning fails, with the reason of the rank that left."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: device.stream("alarm"))
    own = 7 << marks.SHIFT | marks.pack("dispatch", 64)
    first = 3 * sync.REPORT_WORDS

    def waits() -> str | None:
        failures.report._words[first : first + 8] = [1, sync.WAITING, 0, 0, 1, 0, own, 0]  # type: ignore[assignment]
        return failures.waiting()

    for gone in (None, lambda: None):
        failures.gone = gone
        assert "still waits for rank 1" in str(waits()) and kernels(device) == [] and not failures.has_failed()
    failures.gone = lambda: "rank 1 left the block of the communicator: KeyError: 1"
    assert failures.waiting() is None and kernels(device) == [], "nothing waits"
    assert "still waits for rank 1" in str(waits()) and kernels(device) == ["RaiseAlarm"]
    with pytest.raises(RuntimeError, match="rank 0: stopped because rank 1 left the block of the communicator: KeyErr"):
        failures.check()
