"""Starts and waits of split operations launch their kernels on the right streams, in the right order. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from recorded import FEW, IDX, IN_THREE, MANY, PLAIN, PROBLEM, WEIGHTS, Computes, Device, X, route_of


def on_the_side(done: list[tuple[str, str, Any]], event: int, *kernels: str) -> bool:
    """Whether that is a start: results are allocated on the caller's stream, whose work the side stream then follows;
    between its kernels there is nothing."""
    fork = done.index(("records", "caller", 1))
    before, rest = done[:fork], done[fork + 1 :]
    launched = [("launches", "side", kernel) for kernel in kernels]
    return {what for what, *_ in before} <= {"allocates"} and rest == [
        ("waits for", "side", 1), *launched, ("records", "side", event)
    ]  # fmt: skip


def test_many_tokens(backend: Any, device: Device) -> None:
    """Everything is launched by the start; the wait orders the caller's stream behind it, and hands out results."""
    backend.start(1, "dispatch", X, WEIGHTS, IDX, MANY, PLAIN)
    assert on_the_side(device.take(), 3, "Publish", "Pull")
    written = backend.side.launched[-1][2]
    recv_x, _, recv_weights, *placed = backend.wait(1, "dispatch")
    assert device.take() == [("waits for", "caller", 3)] and recv_x is written["recv_x"]
    route = route_of(placed, 400)
    backend.start(0, "combine", recv_x, recv_weights, route, None, "")
    assert on_the_side(device.take(), 2, "Combine")
    assert backend.wait(0, "combine") is backend.side.launched[-1][2]["out"]
    device.take()
    backend.start(0, "combine_backward", X, recv_x, recv_weights, route)
    assert on_the_side(device.take(), 2, "Publish", "PullScaled")
    assert backend.wait(0, "combine_backward")[0] is backend.side.launched[-1][2]["grad_y"]
    device.take()
    backend.start(0, "dispatch_backward", recv_x, recv_weights, route)
    assert on_the_side(device.take(), 2, "Combine")
    assert backend.wait(0, "dispatch_backward")[0] is backend.side.launched[-1][2]["out"]
    assert not backend._flights.started


@pytest.mark.parametrize("weighted", [False, True])
def test_rounds(weighted: bool, backend: Any, device: Device) -> None:
    """All of them are launched by the start, and what torch does between them is beside the caller's stream, too. Two
    may be under way, one after the other on the side stream."""
    cut = ("computes", "side", None)

    def launched(*kernels: str) -> list[tuple[str, str, Any]]:
        return [cut if kernel == "cut" else ("launches", "side", kernel) for kernel in kernels]

    def started(event: int) -> list[tuple[str, str, Any]]:
        """Return what a start has launched on the side stream."""
        done = device.take()
        fork = done.index(("records", "caller", 1))
        assert {what for what, *_ in done[:fork]} == {"allocates"} and done[fork + 1] == ("waits for", "side", 1)
        assert done[-1] == ("records", "side", event)
        return done[fork + 2 : -1]

    given = WEIGHTS if weighted else None
    with Computes(device):
        for flight in (0, 1):
            backend.start(flight, "dispatch", X, given, IDX, IN_THREE, PLAIN)
            moving = launched(*["cut", "Publish", "Pull"] * 3)
            assert started(2 + flight) == [*launched("Publish"), *moving]
        recv_x, _, recv_weights, *placed = backend.wait(1, "dispatch")
        assert device.take() == [("waits for", "caller", 3)]
        backend.wait(0, "dispatch")
        route, row_weights = route_of(placed, IN_THREE.max_tokens), recv_weights if weighted else None
        device.take()
        backend.start(0, "combine", recv_x, row_weights, route, None, "")
        assert started(2) == launched(*["cut", "Combine"] * 3)
        backend.wait(0, "combine")
        device.take()
        backend.start(0, "dispatch_backward", recv_x, row_weights, route)
        assert started(2) == launched(*["cut", "Combine"] * 3)
        backend.wait(0, "dispatch_backward")
        device.take()
        backend.start(0, "combine_backward", X, recv_x, row_weights, route)
        assert started(2) == launched(*["cut", "Publish", "PullScaled" if weighted else "Pull"] * 3)
        backend.wait(0, "combine_backward")
        device.take()
        tokens = IN_THREE._replace(alignment=1, layout="token_major")
        backend.start(0, "dispatch", X, given, IDX, tokens, PLAIN)
        along = ["cut", "PublishTokens" if weighted else "Publish", "Pull"] * 3
        assert started(2) == launched("PublishTokens", *along)
        backend.wait(0, "dispatch")
    assert not backend._flights.started


def test_two_under_way(backend: Any, device: Device) -> None:
    """Two operations run in the order of their starts on the side stream, each with an event, awaited in any order."""
    for flight in (0, 1):
        backend.start(flight, "dispatch", X, None, IDX, MANY, PLAIN)
        assert on_the_side(device.take(), 2 + flight, "Publish", "Pull")
    first, second = (given["recv_x"] for kernel, _, given in backend.side.launched if type(kernel).__name__ == "Pull")
    with pytest.raises(RuntimeError, match="flight 1 is in use: ep::dispatch_start must be followed"):
        backend.start(1, "dispatch", X, None, IDX, MANY, PLAIN)
    with pytest.raises(
        RuntimeError, match="ep::combine_wait was called, but ep::dispatch_start was called in flight 0"
    ):
        backend.wait(0, "combine")
    with pytest.raises(RuntimeError, match="before an operator that is not split"):
        backend.dispatch(X, None, IDX, MANY, PLAIN)
    assert device.take() == []
    assert backend.wait(1, "dispatch")[0] is second and device.take() == [("waits for", "caller", 3)]
    assert backend.wait(0, "dispatch")[0] is first and device.take() == [("waits for", "caller", 2)]
    with pytest.raises(RuntimeError, match="ep::dispatch_wait was called, but nothing was started in flight 0"):
        backend.wait(0, "dispatch")
    backend.dispatch(X, None, IDX, MANY, PLAIN)
    assert ("launches", "caller", "Pull") in device.take()


def test_few_tokens(backend: Any, device: Device) -> None:
    """The start sends beside the caller's stream, the wait receives on it."""
    backend.start(0, "dispatch", X, WEIGHTS, IDX, FEW, PLAIN)
    assert on_the_side(device.take(), 2, "LatencyDispatch")
    recv_x, _, recv_weights, *placed = backend.wait(0, "dispatch")
    done = [each for each in device.take() if each[0] != "allocates"]
    assert done == [("waits for", "caller", 2), ("launches", "caller", "LatencyDispatch")]
    send, receive = backend.side.launched[0], backend._launcher.launched[0]
    assert (send[0].send, send[0].receive) == (True, False) and receive[2]["recv_x"] is recv_x
    assert (receive[0].send, receive[0].receive) == (False, True)
    backend.start(0, "combine", recv_x, recv_weights, route_of(placed, 8), None, "")
    assert on_the_side(device.take(), 2, "LatencyCombine")
    assert backend.wait(0, "combine") is backend._launcher.launched[-1][2]["out"]


def test_few_tokens_and_another_start(backend: Any, device: Device) -> None:
    """Few tokens are received before another start, beside the caller's stream: between sending and receiving nothing
    may come."""
    backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
    device.take()
    backend.start(1, "dispatch", X, None, IDX, MANY, PLAIN)
    done = device.take()
    second = done.index(("records", "side", 2)) + 1
    assert on_the_side(done[:second], 2, "LatencyDispatch") and on_the_side(done[second:], 3, "Publish", "Pull")
    assert backend.side.launched[1][0].receive and not backend.side.launched[1][0].send
    assert backend.wait(0, "dispatch")[0] is backend.side.launched[1][2]["recv_x"]
    assert device.take() == [("waits for", "caller", 2)]
    backend.wait(1, "dispatch")


def test_flights_that_are_ended(backend: Any, device: Device) -> None:
    """Flights that have only sent are received when they are ended, so that this rank counts as many operations as its
    peers."""
    backend.start(0, "dispatch", X, WEIGHTS, IDX, FEW, PLAIN)
    backend.start(1, "dispatch", X, None, IDX, MANY, PLAIN)
    backend.end_flights()
    assert not backend._flights.started
    device.take()
    backend.start(1, "dispatch", X, None, IDX, FEW, PLAIN)
    device.take()
    backend.end_flights()
    assert [kernel for what, _, kernel in device.take() if what == "launches"] == ["LatencyDispatch"]
    assert backend._launcher.launched[-1][0].receive and not backend._flights.started


def test_another_stream_waits(backend: Any, device: Device) -> None:
    """The allocator learns who used what, since memory goes back to the stream that it came from."""
    backend.start(0, "dispatch", X, WEIGHTS, IDX, MANY, PLAIN)
    device.take()
    device.current = device.stream("other")
    assert len(backend.wait(0, "dispatch")) == 9
    assert device.take() == [("waits for", "other", 2), ("uses", "side", 3), ("uses", "other", 9)]


def test_another_start_on_another_stream(backend: Any, device: Device) -> None:
    """The second start receives the first operation on the side stream. The wait records its results with the
    allocator, whether it is called on the stream of the first start or of the second."""
    caller, other = device.current, device.stream("other")
    for waits in (caller, other):
        device.current = caller
        backend.start(0, "dispatch", X, WEIGHTS, IDX, FEW, PLAIN)
        device.current = other
        backend.start(1, "dispatch", X, None, IDX, MANY, PLAIN)
        device.current = waits
        device.take()
        assert len(backend.wait(0, "dispatch")) == 9
        assert device.take() == [("waits for", waits.name, 2), ("uses", "side", 3), ("uses", waits.name, 9)]
        backend.wait(1, "dispatch")


def test_a_capture_that_failed(backend: Any, device: Device) -> None:
    """Nothing of what was started in it runs, so nobody receives it, and its flight is free."""
    for after in ("start", "whole", "rejection", "capture"):
        device.capturing = 1
        backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
        device.capturing = 0
        device.take()
        if after == "start":
            backend.start(1, "dispatch", X, None, IDX, MANY, PLAIN)
            assert on_the_side(device.take(), 3, "Publish", "Pull")
            backend.wait(1, "dispatch")
        elif after == "whole":
            backend.dispatch(X, None, IDX, MANY, PLAIN)
            assert [kernel for what, _, kernel in device.take() if what == "launches"] == ["Publish", "Pull"]
        elif after == "rejection":
            backend.reject("combine_start", "why", 1, 8)
            assert device.take() == [("launches", "caller", "Reject")]
        else:
            device.capturing = 2
            with pytest.raises(RuntimeError, match="start was captured in a CUDA graph, its wait was captured in anot"):
                backend.wait(0, "dispatch")
            backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
            backend.wait(0, "dispatch")
            device.capturing = 0
        assert not backend._flights.started, after


def test_a_start_that_runs_and_one_that_is_captured(backend: Any, device: Device) -> None:
    """A start that runs is received outside of the capture of another start, and its wait takes that result."""
    backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
    device.take()
    device.capturing = 1
    backend.start(1, "dispatch", X, None, IDX, MANY, PLAIN)
    assert on_the_side(device.take(), 3, "Publish", "Pull")
    backend.wait(1, "dispatch")
    device.capturing = 0
    device.take()
    backend.wait(0, "dispatch")
    assert [done for done in device.take() if done[0] == "launches"] == [("launches", "caller", "LatencyDispatch")]
    assert not backend._launcher.launched[-1][0].send


def test_graphs(backend: Any, device: Device) -> None:
    """Start and wait are captured together, or neither is."""
    device.capturing = 1
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    assert on_the_side(device.take(), 2, "Publish", "Pull")
    backend.wait(0, "dispatch")
    device.capturing = 0
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    device.capturing = 1
    with pytest.raises(RuntimeError, match="'ep': ep::dispatch_wait: its wait is captured in a CUDA graph, its start"):
        backend.wait(0, "dispatch")
    device.capturing = 0
    backend.wait(0, "dispatch")  # it is still under way
    device.capturing = 1
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    device.capturing = 0
    with pytest.raises(RuntimeError, match="its start was captured in a CUDA graph, its wait was not"):
        backend.wait(0, "dispatch")
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)  # that one is forgotten


def test_rejections(backend: Any, device: Device) -> None:
    """This rank's number of operations remains that of its peers."""
    reject = ("launches", "caller", "Reject")
    backend.reject("dispatch_start", "why")
    assert device.take() == [reject]
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    device.take()
    backend.reject("combine_start", "why", 1)
    assert device.take() == [("waits for", "caller", 2), reject], "behind what is under way"
    for operator, flight in (("dispatch", 0), ("combine_start", 0), ("combine_wait", 0), ("dispatch_wait", 1)):
        backend.reject(operator, "why", flight)
        assert device.take() == [], "its peers do not run it"
    backend.reject("dispatch_wait", "why", 0)
    assert device.take() == [("waits for", "caller", 2)] and not backend._flights.started, "it has run"
    backend.start(0, "dispatch", X, None, IDX, FEW, PLAIN)
    device.take()
    backend.reject("dispatch_wait", "why", 0)
    assert device.take() == [("waits for", "caller", 2), reject], "in the place of what receives"


def test_rejections_of_what_goes_in_rounds(backend: Any, device: Device) -> None:
    """A rejected call counts as many operations as the kernels of the peers run, with one more for a route that is sent
    before rows."""
    reject = ("launches", "caller", "Reject")
    most = PROBLEM.max_tokens
    for operator, max_tokens, turns in (
        ("dispatch", 3 * most, 4), ("dispatch", most, 1), ("dispatch_planned", 3 * most, 3), ("combine", most + 1, 2),
        ("plan", 3 * most, 1), ("dispatch_start", 2 * most, 3), ("combine_backward", 2 * most, 2),
        ("dispatch", "many", 4), ("combine_start", 2 * most, 2),
        ("dispatch_dynamic", 2 * most, 1), ("combine_gathered", 2 * most, 1),
    ):  # fmt: skip
        backend.reject(operator, "why", 0, max_tokens)
        assert device.take() == [reject] * turns, (operator, max_tokens)
    backend._across = True  # there rows are copied, as those of any combine
    backend.reject("combine_gathered", "why", 0, 2 * most)
    assert device.take() == [reject] * 2
    backend.start(0, "dispatch", X, None, IDX, IN_THREE, PLAIN)
    device.take()
    backend.reject("combine_start", "why", 1, 2 * most)
    assert device.take() == [("waits for", "caller", 2), *[reject] * 2], "behind all rounds of what is under way"


def test_a_start_that_fails(backend: Any, device: Device) -> None:
    """Nothing is under way then, and the next one is ordered as ever."""
    get = backend.side.get

    def fails(kernel: Any, **variant: Any) -> Any:
        if kernel.__name__ == "Pull":
            raise OSError("no room for it")
        return get(kernel, **variant)

    backend._beside._kernel = fails
    with pytest.raises(OSError, match="no room"):
        backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    backend._beside._kernel = get
    device.take()
    backend.start(0, "dispatch", X, None, IDX, MANY, PLAIN)
    assert on_the_side(device.take(), 2, "Publish", "Pull")


def test_two_under_way_in_one_capture(backend: Any, device: Device) -> None:
    """The second start forgets what failed captures have started, and nothing of its own capture."""
    device.capturing = 1
    for flight in (0, 1):
        backend.start(flight, "dispatch", X, None, IDX, MANY, PLAIN)
    first, second = (given["recv_x"] for kernel, _, given in backend.side.launched if type(kernel).__name__ == "Pull")
    assert backend.wait(0, "dispatch")[0] is first and backend.wait(1, "dispatch")[0] is second


@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_a_start_behind_one_that_failed_follows_the_callers_stream(
    sizes: Any, backend: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails behind its kernels has let the side stream follow the caller's already."""

    def fails(*_: Any) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(backend._flights.side, "ended", fails)
        with pytest.raises(MemoryError, match="injected"):
            backend.start(0, "dispatch", X, None, IDX, sizes, PLAIN)
    device.take()
    backend.start(0, "dispatch", X, None, IDX, sizes, PLAIN)
    kernels = ("Publish", "Pull") if sizes is MANY else ("LatencyDispatch",)
    assert on_the_side(device.take(), 2, *kernels)
