"""Events between streams, as DeepEP's callers pass them. On a CPU they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EventHandle:
    """An event that records the work submitted to the current stream so far."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """The event that an operation returns, or None where the operation was not asynchronous.

    As a context manager, it waits for the event when the block ends.

    Args:
        event: the event, or None.
        extra_tensors: tensors to keep alive as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release_at_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event, then call the registered hook once.

        Args:
            release_handle: drop the event afterwards.

        Raises:
            RuntimeError: there is no event, because the operation was called without ``async_finish``.
        """
        if self.event is None:
            raise RuntimeError("there is no event to wait for: the operation was called without async_finish")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call ``hook_after_wait()`` after the next :meth:`current_stream_wait`.

        Raises:
            RuntimeError: a hook is registered already.
        """
        if self.hook_after_wait is not None:
            raise RuntimeError("register_hook_after_wait: a hook is registered already; it runs at the next wait")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return this object for a ``with`` statement that drops the event at its end if ``release_handle``."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: Any) -> None:
        release, self._release_at_exit = self._release_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release)


def wait_for(*events: EventHandle | EventOverlap | None) -> None:
    """Make the current stream wait for the ``previous_event`` arguments that hold an event."""
    for event in events:
        if event is not None and getattr(event, "event", event) is not None:
            event.current_stream_wait()


def after(asked: bool) -> EventOverlap:
    """Return an operation's event. Operators run on the current stream, so the event records that stream."""
    return EventOverlap(EventHandle() if asked else None)
