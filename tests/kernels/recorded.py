"""A device that keeps a list of what is done on its streams, for tests of what the cute backend launches where."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from launches import Recorder
from operate import PLAIN, Sizes  # noqa: F401  PLAIN
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import marks
from cute_kernels.heap import REASON_BYTES, Problem
from cute_kernels.rejection import Reject
from ep_ops.backends.cute.call_state import CallState
from ep_ops.records import Route

PROBLEM = Problem(2, (2, 2), 2, 64, "bf16", 512, route_tokens=3 * 512)
MANY, FEW = Sizes(32, 16, 0, 400), Sizes(32, 16, 0, 8)
IN_THREE = Sizes(32, 16, 0, 2 * 512 + 1)
X, IDX, WEIGHTS = torch.zeros(5, 64, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2)


class Device:
    """Keeps a list of all that is done: (what, stream, which event or kernel)."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, Any]] = []
        self.current = self.caller = self.stream("caller")
        self.capturing = 0  # the number of the capture
        self.capture_mode = "CU_STREAM_CAPTURE_MODE_GLOBAL"  # of this thread
        self.events = 0
        self.state = CallState()
        self.rejected: list[tuple[int, str, int]] = []  # turn, reason and number of turns of each rejection

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            cuda_stream=name,
            wait_event=lambda event: self.done.append(("waits for", name, event.number)),
            synchronize=lambda: self.done.append(("synchronizes", name, None)),
        )

    def event(self) -> Any:
        self.events += 1
        event = SimpleNamespace(number=self.events)
        event.record = lambda stream: self.done.append(("records", stream.name, event.number))
        return event

    @contextlib.contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def take(self) -> list[tuple[str, str, Any]]:
        done, self.done[:] = list(self.done), []
        return done


def told(text: torch.Tensor) -> tuple[str, int]:
    """Return what a rank reports to the others: the reason, and of how many operations."""
    said = bytes(text.tolist())
    assert len(said) == REASON_BYTES
    return said[:-1].rstrip(b"\0").decode(), said[-1]


class Computes(TorchDispatchMode):
    """Notes on which stream torch computes something, once for all that it does between two launches."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.on = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note = ("computes", self.on.current.name, None)
        if not func.is_view and "empty" not in str(func) and self.on.done[-1:] != [note]:
            self.on.done.append(note)
        return func(*args, **(kwargs or {}))


class Launches(Recorder):
    """Notes launches on the current stream, or on that which a launcher is given."""

    def __init__(self, device: Device, raw: Any = None) -> None:
        super().__init__(PROBLEM, 132)
        self.on, self.raw, self.state = device, raw, device.state

    def get(self, kernel: Any, **variant: Any) -> Any:
        if kernel is Reject:

            def reject(terms: int, text: torch.Tensor) -> None:
                self.on.done.append(("launches", self.on.current.name, "Reject"))
                self.on.rejected.append((marks.unpack_rejection(marks.unpack(terms)[1].max_tokens)[1], *told(text)))

            return lambda terms, blocks: functools.partial(reject, terms)
        bind = super().get(kernel, **variant)

        def bound(terms: int, **values: Any) -> Any:
            launch = bind(terms, **values)

            def noted(*given: Any, **by_name: Any) -> None:
                stream = self.raw(0) if self.raw else self.on.current.name
                launch(*given, **by_name)
                self.on.done.append(("launches", stream, kernel.__name__))

            return noted

        return bound


def route_of(placed: Any, max_tokens: int) -> Route:
    return Route(IDX, *placed[:4], 16, 32, max_tokens)
