"""The communicators of this process by name. Operators, which take the name, find their communicator here."""

from __future__ import annotations

from typing import Protocol

from .backends.base import Backend
from .backends.calls import CallCache
from .config import Member


class Living(Member, Protocol):
    """The attributes of a communicator that operators use."""

    backend: Backend
    calls: CallCache


living: dict[str, Living] = {}
_destroyed: set[str] = set()


def get(name: str) -> Living:
    """Return the communicator of that name, or raise RuntimeError."""
    found = living.get(name)
    if found is None:
        state = "was destroyed" if name in _destroyed else "does not exist in this process"
        others = ", ".join(map(repr, living)) or "none"
        raise RuntimeError(f"communicator {name!r} {state}; living communicators: {others}")
    return found


def add(comm: Living) -> None:
    """Make a communicator available to operators."""
    living[comm.name] = comm
    _destroyed.discard(comm.name)


def remove(name: str) -> None:
    """Remove a communicator. Operators that name it then raise an error that says that it was destroyed."""
    living.pop(name, None)
    _destroyed.add(name)
