"""A thread that checks the reports of kernels. It detects failures in a server that only replays graphs, and notifies
its peers."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Protocol

PERIOD = 0.05
"""Seconds between two checks."""

logger = logging.getLogger("ep_ops")


class Watched(Protocol):
    """A communicator's backend."""

    def waiting(self) -> str | None:
        """Return the text of a warning, or None."""

    def failure(self) -> str | None:
        """Return the text of the communicator's failure the first time it is seen, else None."""

    def on_failure(self, text: str) -> None:
        """Notify the other ranks and call the user's callbacks."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(backend: Watched) -> None:
    """Check ``backend`` periodically until it is deleted or `unwatch` is called."""
    global _thread
    with _lock:
        _watched.add(backend)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, name="ep_ops watch", daemon=True)
            _thread.start()


def _forget_parent() -> None:
    """Forget the backends of the process from which this one was forked, whose thread does not run here."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _watched.clear()


os.register_at_fork(after_in_child=_forget_parent)


def watched() -> list[Watched]:
    """Return the backends that are checked."""
    with _lock:
        return list(_watched)


def unwatch(backend: Watched) -> None:
    with _lock:
        _watched.discard(backend)


def _look() -> None:
    while True:
        time.sleep(PERIOD)
        with _lock:
            backends = list(_watched)
            if not backends:
                return
        for backend in backends:
            look(backend)
        del backends


def look(backend: Watched) -> None:
    """Check one backend once."""
    try:
        if (text := backend.waiting()) is not None:
            logger.warning(text)
        if (text := backend.failure()) is not None:
            backend.on_failure(text)
    except Exception:  # the thread has no caller that could catch it
        logger.exception("cannot report the failure of a kernel")
