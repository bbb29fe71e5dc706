"""Living communicators by name: how operators, which carry the name alone, find theirs."""

from __future__ import annotations

from typing import Protocol

from .backends.base import Backend
from .config import Member


class Living(Member, Protocol):
    """A communicator, as far as operators know it."""

    backend: Backend


living: dict[str, Living] = {}
_destroyed: set[str] = set()


def get(name: str) -> Living:
    """The living communicator of that name; RuntimeError if there is none."""
    found = living.get(name)
    if found is None:
        state = "was destroyed" if name in _destroyed else "does not exist in this process"
        others = ", ".join(map(repr, living)) or "none"
        raise RuntimeError(f"communicator {name!r} {state}; living communicators: {others}")
    return found


def taken(name: str) -> bool:
    """Whether a living communicator bears the name."""
    return name in living


def add(comm: Living) -> None:
    """From now on operators find it."""
    living[comm.name] = comm
    _destroyed.discard(comm.name)


def remove(name: str) -> None:
    """From now on operators are told that it was destroyed."""
    living.pop(name, None)
    _destroyed.add(name)
