"""Split operations on the communicator's side stream, between a start and a wait on the caller's stream.

**Order on the device.** The kernels of a start run after everything that precedes the start on the caller's stream, and
everything after the wait follows them: an event forks the side stream from the caller's stream, and another event joins
it. During the capture of a CUDA graph, both become part of the graph. Operations of one communicator run on the side
stream in the order of their starts, which is the same on all ranks. Each has its own event, so waits may come in any
order.

**Memory.** Results are allocated on the caller's stream before the fork, when everything that used their memory before
has been enqueued. The results and the inputs are referenced here until the wait. After the wait the caller's stream
follows the operation, so the allocator may reuse freed memory in the order of that stream, also in the private pool of
a graph. If the wait is called on another stream than the start, `record_stream` tells the allocator which stream used
which tensor.

**Latency kernels.** Their start only sends, and their wait receives. No other operation of the communicator may run in
between, so a second start first receives the operation in progress, on the side stream.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..split import FlightOrder

Given = tuple[Tensor | None, ...]
"""Tensors that a start was called with, which are read until the operation ends."""
Run = Callable[[], Any]


class Side:
    """The side stream, as a launcher uses it: the first kernel of an operation forks it from the current stream."""

    def __init__(self, device: torch.device) -> None:
        # High priority, so that kernels that peers wait for are not queued behind the caller's computation.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._fork = torch.cuda.Event()
        self.forked = False  # whether the operation's first kernel has been launched

    def raw(self, index: int) -> int:
        """Return the handle of the stream, for a launch. Later kernels of the operation are launched directly after the
        first, so programmatic dependent launch is possible."""
        if not self.forked:
            self._fork.record(torch.cuda.current_stream(self._device))
            self.stream.wait_event(self._fork)
            self.forked = True
        return self.stream.cuda_stream

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that runs torch operations on the stream, before or between the kernels of an
        operation."""
        self.raw(self._device.index)
        return torch.cuda.stream(self.stream)

    def ended(self, event: torch.cuda.Event) -> None:
        """Record ``event`` behind the last kernel of the operation. The next kernel belongs to another operation."""
        event.record(self.stream)
        self.forked = False


@dataclass
class _UnderWay:
    operator: str
    results: Any
    receive: tuple[Run, Run] | None  # launches what remains: on the side stream, or on the current stream
    given: Given
    began_on: torch.cuda.Stream
    captured: int  # the capture of a CUDA graph that the start was part of; 0: it ran


class Flights(FlightOrder):
    """The operations in progress, by flight."""

    started: dict[int, _UnderWay]

    def __init__(self, name: str, device: torch.device, number: int) -> None:
        super().__init__(name)
        self._device = device
        self.side = Side(device)
        self._events = [torch.cuda.Event() for _ in range(number)]
        self.unreceived = False
        """Whether the operation whose start or wait ran last has been sent but not received."""

    def start(self, flight: int, operator: str, given: Given, run: Run, receive: tuple[Run, Run] | None = None) -> None:
        """Let ``run`` launch kernels on the side stream. All other operations have been settled.

        Args:
            flight, operator: the flight and the name of the operation.
            given: input tensors.
            run: launches the kernels, and returns the results if ``receive`` is None.
            receive: two functions that launch the remaining kernels and return the results, on the side stream or on
                the current stream.
        """
        self.unreceived = receive is not None
        results = run()
        self.side.ended(self._events[flight])
        stream = torch.cuda.current_stream(self._device)
        self.started[flight] = _UnderWay(operator, results, receive, given, stream, capture_of(self._device))

    def forget_lost(self) -> None:
        """Forget operations that were started in a capture that has ended. Such a capture has failed, because nothing
        waited in it, so nothing of these operations runs."""
        if any(one.captured for one in self.started.values()):
            capture = capture_of(self._device)
            for flight, one in [*self.started.items()]:
                if one.captured not in (0, capture):
                    del self.started[flight]

    def settle(self) -> None:
        """Launch the rest of operations that have only been sent, so that another operation may begin. In a capture, do
        this only for operations that were started in it."""
        self.side.forked = False  # one that failed may have left it
        for flight, one in self.started.items():
            if one.receive is not None and one.captured == capture_of(self._device):
                on_side, _ = one.receive
                one.results, one.receive = on_side(), None
                self.side.ended(self._events[flight])
                if torch.cuda.current_stream(self._device) != one.began_on:
                    one.began_on = self.side.stream  # unlike that of any wait, which records tensors

    def problem(self, flight: int) -> str | None:
        """Return why :meth:`wait` cannot be called now, or None.

        Start and wait must be captured in the same CUDA graph, or neither of them. An operation of another capture is
        forgotten: that capture has failed, and nothing of it runs.
        """
        captured, capture = self.started[flight].captured, capture_of(self._device)
        if captured == capture:
            return None
        if not captured:
            return "its wait is captured in a CUDA graph, its start was not"
        del self.started[flight]
        return f"its start was captured in a CUDA graph, its wait was {'captured in another one' if capture else 'not'}"

    def wait(self, flight: int) -> Any:
        """Return the results. The current stream waits for the operation."""
        one = self.started.pop(flight)
        self.unreceived = one.receive is not None
        stream = self._join(flight)
        if stream != one.began_on:
            _used(one.given, self.side.stream)
        if one.receive is not None:
            _, here = one.receive
            return here()
        if stream != one.began_on:
            _used(one.results if isinstance(one.results, tuple) else (one.results,), stream)
        return one.results

    def abandon(self, flight: int) -> bool:
        """Discard the results in place of a wait. Return whether kernels remain to be launched, or something in their
        place. The current stream waits for those that were launched."""
        one = self.started.pop(flight)
        self._join(flight)
        return one.receive is not None

    def follow(self) -> None:
        """Let the current stream wait for all operations in progress."""
        self.settle()
        for flight in self.started:
            self._join(flight)

    def _join(self, flight: int) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._events[flight])
        return stream


def capture_of(device: torch.device) -> int:
    """Return the id of the capture that the current stream is part of; 0 if there is none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    # Not by cuda.bindings, which ask for edges as well and fail of programmatic ones.
    stream, status, number = torch.cuda.current_stream(device).cuda_stream, ctypes.c_int(), ctypes.c_uint64()
    asked = ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    error = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(*asked)
    if error != 0:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 returned {error}")
    return number.value


def _used(tensors: Given, stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
