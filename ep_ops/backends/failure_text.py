"""Texts about waits for other ranks and about failures, the same in every backend."""

from __future__ import annotations

REPEATS = "a token's ids must be distinct unless capacity, slots or exact is given; pad with -1"
"""What is allowed where a token names an expert twice."""


def in_operation(rank: int, call: str, number: int) -> str:
    """Return which operation of its communicator a rank is in. ``call``: such as "ep::dispatch"."""
    return f"rank {rank}, in {call} (operation {number} of this communicator)"


def before_operation(rank: int, number: int) -> str:
    """Return which operation a rank begins next."""
    return f"rank {rank}, which has not begun operation {number} of this communicator"


def still_waits(communicator: str, doing: str, awaited: str, timeout: float) -> str:
    """Return the warning about a long wait. ``doing``: which rank waits, and where; ``awaited``: for which ranks."""
    return f"communicator {communicator!r}: {doing}, still waits for {awaited}; it gives up after {timeout:g} s"


def waited(awaited: str, timeout: float) -> str:
    """Return that a wait has reached its deadline."""
    return f"waited {timeout:g} s for {awaited}"


def stopped(doing: str, cause: str) -> str:
    """Return that a rank gives up because of the ``cause`` of another rank."""
    return f"{doing}, stopped because {cause}"


def gave_up(rank: int, number: int, why: str) -> str:
    """Return that a rank's host could not go on with an operation."""
    return f"rank {rank} gave up at operation {number}: {why}"


def failed(communicator: str, why: str, then: str = "make a new one") -> str:
    """Return the error of every call after a communicator has failed. ``then``: what to do once it is destroyed."""
    return f"communicator {communicator!r} failed: {why}; destroy it and {then}"
