"""Split operations on the communicator's own stream, between a start and a wait of the caller's.

**Order on the device.** What a start launches follows all that the caller's stream has before it, and what comes
behind a wait follows it: the side stream is forked from the caller's stream by an event and joined to it by another.
Both are part of a CUDA graph that is captured meanwhile. Operations of one communicator follow each other on the side
stream in the order of their starts, which is the same on all ranks; each has an event of its own, so they may be
awaited in any order.

**Memory.** Results are allocated on the caller's stream before the fork, by which everything that used their memory
before is done. They, and what the start was given, are held here until the wait. From then on the caller's stream
follows the operation, so whatever is freed afterwards may be used again in the order of that stream, as the allocator
does it, in the private memory of a graph as well. Where the wait is called on another stream than the start, the
allocator is told which stream used what.

**Few tokens.** The latency kernels' start only sends, and its wait receives; nothing else of the communicator may come
between. So a second start receives first what the operation under way is sent, beside the caller's stream.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Given = tuple[Tensor | None, ...]
"""What a start was given, tensors that are read until the operation ends."""
Run = Callable[[], Any]


class Side:
    """The stream, as a launcher sees it: the first kernel of an operation forks it from the current stream."""

    def __init__(self, device: torch.device) -> None:
        # Of high priority: what a peer waits for does not stand behind what the caller's stream computes.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._fork = torch.cuda.Event()
        self.forked = False  # whether the operation's first kernel has been launched

    def raw(self, index: int) -> int:
        """The stream's handle, as a launcher asks for it. Later kernels of the operation follow the first, with nothing
        in between: they may be launched while it runs."""
        if not self.forked:
            self._fork.record(torch.cuda.current_stream(self._device))
            self.stream.wait_event(self._fork)
            self.forked = True
        return self.stream.cuda_stream

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """What torch does within is on the stream, too: between kernels of an operation, or before its first."""
        self.raw(self._device.index)
        return torch.cuda.stream(self.stream)

    def ended(self, event: torch.cuda.Event) -> None:
        """``event``: when all that the operation has launched has ended. The next kernel is another one's first."""
        event.record(self.stream)
        self.forked = False


@dataclass
class _UnderWay:
    results: Any
    receive: tuple[Run, Run] | None  # what is left to be done: beside the caller's stream, or on it
    given: Given
    began_on: torch.cuda.Stream
    captured: int  # the capture of a CUDA graph that the start was part of; 0: it ran


class Flights:
    """The operations under way, by flight."""

    def __init__(self, device: torch.device, number: int) -> None:
        self._device = device
        self.side = Side(device)
        self._events = [torch.cuda.Event() for _ in range(number)]
        self._under_way: dict[int, _UnderWay] = {}
        self.unreceived = False
        """Whether the operation whose start or wait ran last has been sent, or was to be, and not yet received."""

    def start(self, flight: int, given: Given, run: Run, receive: tuple[Run, Run] | None = None) -> None:
        """Has ``run`` launch beside the current stream, when all others are settled. It returns the results, unless
        these come of ``receive``: how to launch the rest beside the current stream, and on it."""
        self.unreceived = receive is not None
        results = run()
        self.side.ended(self._events[flight])
        stream = torch.cuda.current_stream(self._device)
        self._under_way[flight] = _UnderWay(results, receive, given, stream, capture_of(self._device))

    def lost(self) -> list[int]:
        """Forget operations that were started in a capture which is over, and return their flights: it has failed, for
        nobody has waited in it, so nothing of them runs."""
        if not any(one.captured for one in self._under_way.values()):
            return []
        capture = capture_of(self._device)
        lost = [flight for flight, one in self._under_way.items() if one.captured not in (0, capture)]
        for flight in lost:
            del self._under_way[flight]
        return lost

    def settle(self) -> None:
        """Launches the rest of an operation that has only been sent, so that another may begin. In a capture those
        alone that belong to it: what runs goes on outside."""
        self.side.forked = False  # one that failed may have left it
        for flight, one in self._under_way.items():
            if one.receive is not None and one.captured == capture_of(self._device):
                beside, _ = one.receive
                one.results, one.receive = beside(), None
                self.side.ended(self._events[flight])
                if torch.cuda.current_stream(self._device) != one.began_on:
                    one.began_on = self.side.stream  # on none that a wait is called on: all is told to the allocator

    def problem(self, flight: int) -> str | None:
        """Return why :meth:`wait` cannot be called now, or None: start and wait are captured in one CUDA graph, or
        neither is. What was captured in another one is forgotten: that capture has failed, and nothing runs."""
        captured, capture = self._under_way[flight].captured, capture_of(self._device)
        if captured == capture:
            return None
        if not captured:
            return "its wait is captured in a CUDA graph, its start was not"
        del self._under_way[flight]
        return f"its start was captured in a CUDA graph, its wait was {'captured in another one' if capture else 'not'}"

    def wait(self, flight: int) -> Any:
        """The results; the current stream follows the operation."""
        one = self._under_way.pop(flight)
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
        """Instead of a wait: nobody wants the results. Whether the rest is yet to be launched, or something in the
        place of it; the current stream follows what has been."""
        one = self._under_way.pop(flight)
        self._join(flight)
        return one.receive is not None

    def follow(self) -> None:
        """The current stream follows all operations under way."""
        self.settle()
        for flight in self._under_way:
            self._join(flight)

    def __contains__(self, flight: int) -> bool:
        return flight in self._under_way

    def _join(self, flight: int) -> torch.cuda.Stream:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._events[flight])
        return stream


def capture_of(device: torch.device) -> int:
    """The number of the capture that the current stream is part of; 0: none."""
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
