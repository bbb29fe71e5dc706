"""Fixtures: a cute backend without a GPU, whose launches go to a :class:`recorded.Device`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from recorded import Device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    from recorded import Device

    from ep_ops.backends.cute import outputs, streams

    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: made.stream("side" if priority < 0 else "low"))
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing != 0)
    monkeypatch.setattr(streams, "capture_of", lambda device: made.capturing)
    monkeypatch.setattr(torch.cuda, "stream", made.entered)
    driver = pytest.importorskip("cuda.bindings.driver")

    def exchange(mode: Any) -> tuple[int, Any]:
        made.capture_mode, before = mode.name, made.capture_mode
        return 0, SimpleNamespace(name=before)

    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)

    def used(tensors: Any, stream: Any) -> None:
        made.done.append(("uses", stream.name, sum(t is not None for t in tensors)))

    monkeypatch.setattr(streams, "_used", used)

    def new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.done.append(("allocates", made.current.name, None))
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(outputs, "allocator", lambda device: lambda: new)
    return made


@pytest.fixture
def backend(device: Device) -> Any:
    from launches import NO_FAILURES
    from operate import On
    from recorded import PROBLEM, Launches

    from ep_ops.backends.budget import Budget
    from ep_ops.backends.cute import streams
    from ep_ops.backends.cute.backend import CuteBackend
    from ep_ops.backends.cute.latency import LatencyPath
    from ep_ops.backends.cute.outputs import Outputs
    from ep_ops.backends.cute.sm_model import TokenTraffic
    from ep_ops.backends.cute.throughput import ThroughputPath

    made: Any = On(object.__new__(CuteBackend))
    made._flights = streams.Flights("ep", torch.device("cpu"), 2)
    made._config = SimpleNamespace(name="ep", max_tokens_per_rank=PROBLEM.planned_tokens)
    made._failures = NO_FAILURES
    made._rank, made._device, made._across = 0, torch.device("cpu"), False
    made._problem = PROBLEM
    results, traffic = Outputs(PROBLEM, 2, torch.device("cpu")), TokenTraffic.of(PROBLEM, 1)
    made._launcher, made._state = Launches(device), device.state
    here = made._launcher
    made.side = side = Launches(device, made._flights.side.raw)
    made.latency, made._latency_beside = (LatencyPath(launcher, results, 64) for launcher in (here, side))  # type: ignore
    made.throughput = ThroughputPath(here, results, Budget(20, 30), traffic)  # type: ignore[arg-type]
    made._beside = ThroughputPath(side, results, Budget(20, 30), traffic, made._flights.side)  # type: ignore[arg-type]
    device.take()
    return made
