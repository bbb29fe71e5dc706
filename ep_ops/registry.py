"""The communicators of this process by name. Operators, which take the name, find their communicator here."""

from __future__ import annotations

import os
import re
import threading
from typing import NoReturn, Protocol

from .backends.base import Backend
from .backends.calls import CallCache
from .config import Member
from .group.survivors import ExpertIds
from .overflow import Overflow
from .statistics.counts import Counts


class Living(Member, Protocol):
    """The attributes of a communicator that its methods and operators use."""

    alignment: int
    backend: Backend
    calls: CallCache  # those that have passed their checks
    busy: threading.RLock  # held by the thread that calls the communicator
    destroyed: bool
    expert_ids: ExpertIds | None  # after experts were lost
    warned_rows: float  # a larger default capacity causes a warning
    overflowed: Overflow | None
    counts: Counts | None


living: dict[str, Living] = {}
_destroyed: set[str] = set()
_inherited: dict[str, tuple[Living, int]] = {}
"""Communicators of the process from which this process was forked, and its id. These references prevent that garbage
collection frees memory and connections of the parent."""
_reserved: set[str] = set()
_numbered = 0
_lock = threading.Lock()  # held while names are reserved


def get(name: str) -> Living:
    """Return the communicator of that name, or raise RuntimeError."""
    found = living.get(name)
    if found is None:
        reject(name)
    return found


def reject(name: str) -> NoReturn:
    """Raise RuntimeError for a communicator that does not exist here, or that existed before the living one of that
    name."""
    state = "was destroyed" if name in _destroyed or name in living else "does not exist in this process"
    if name in living:
        state += ", and another one has its name now"
    if name in _inherited and name not in _destroyed:
        state = (
            f"was created by process {_inherited[name][1]}, from which this process was forked; a child process must"
            " create its own process group and communicator"
        )
    others = ", ".join(map(repr, living)) or "none"
    raise RuntimeError(f"communicator {name!r} {state}; living communicators: {others}")


def reject_destroyed(comm: Living) -> None:
    """Raise RuntimeError for a communicator that was destroyed, or that a parent process has created."""
    if comm.destroyed:
        reject(comm.name)


def next_number() -> int:
    """Return a number n such that this process has not used the default name "epn" or a higher one."""
    return _numbered


def reserve(name: str) -> bool:
    """Reserve a name for a communicator that is being created, until :func:`release`. Returns False if a living
    communicator, or one that another thread is creating, has it."""
    global _numbered
    with _lock:
        free = name not in _reserved and name not in living
        if free:
            _reserved.add(name)
        if re.fullmatch(r"ep\d+", name):
            _numbered = max(_numbered, int(name[2:]) + 1)
    return free


def release(name: str) -> None:
    """End the reservation of a name."""
    _reserved.discard(name)


def add(comm: Living) -> None:
    """Make a communicator available to operators."""
    living[comm.name] = comm
    _destroyed.discard(comm.name)


def remove(name: str) -> None:
    """Remove a communicator. Operators that name it then raise an error that says that it was destroyed."""
    living.pop(name, None)
    _destroyed.add(name)


def _forget_parent() -> None:
    """Disable the communicators of the parent process, whose connections and memory this process must not use."""
    global _lock
    _lock = threading.Lock()
    for name, comm in living.items():
        _inherited[name] = comm, os.getppid()
        comm.destroyed = True
        comm.calls.forget()
    living.clear()
    _reserved.clear()


os.register_at_fork(after_in_child=_forget_parent)
