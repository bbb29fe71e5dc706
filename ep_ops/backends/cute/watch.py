"""Looks at what kernels report while nobody calls anything: a server that only replays graphs learns of a failure, and
its peers do."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

PERIOD = 0.05
"""Seconds between two looks."""

logger = logging.getLogger("ep_ops")


class Watched(Protocol):
    """A communicator's backend."""

    def waiting(self) -> str | None:
        """What is to be warned of."""

    def failure(self) -> str | None:
        """What the communicator failed of, once."""

    def on_failure(self, text: str) -> None:
        """Tells whoever is to be told."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(backend: Watched) -> None:
    """From now on, as long as the backend lives or until `unwatch`."""
    global _thread
    with _lock:
        _watched.add(backend)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, name="ep_ops watch", daemon=True)
            _thread.start()


def watched() -> list[Watched]:
    """Those that are looked at now."""
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
    """Once."""
    try:
        if (text := backend.waiting()) is not None:
            logger.warning(text)
        if (text := backend.failure()) is not None:
            backend.on_failure(text)
    except Exception:  # nobody is there to catch it
        logger.exception("what a kernel has reported could not be told")
