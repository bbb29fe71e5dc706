"""Events between streams, as DeepEP's callers pass them. On a CPU they are nothing."""

from __future__ import annotations

from typing import Any

import torch


class EventHandle:
    """What has been put on the current stream when it is made."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """The current stream goes on when that is done."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An event that may be None: then there is nothing to wait for. ``with`` waits at the end.

    Args:
        event: as :class:`EventHandle`.
        extra_tensors: kept alive beside it.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """RuntimeError where there is no event, as of an operation that was not asked for one (``async_finish``)."""
        if self.event is None:
            raise RuntimeError("there is no event to wait for: the operation was called without async_finish")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def wait_for(event: EventOverlap | None) -> None:
    """A ``previous_event``."""
    if event is not None and event.event is not None:
        event.current_stream_wait()


def after(asked: bool) -> EventOverlap:
    """What an operation returns: operators run on the current stream, so an event is what follows them there."""
    return EventOverlap(EventHandle() if asked else None)
