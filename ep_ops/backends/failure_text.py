"""The words in which every backend tells of waits for other ranks and of failures."""

from __future__ import annotations


def in_operation(rank: int, operator: str, number: int) -> str:
    """Say which operation of its communicator a rank is in."""
    return f"rank {rank}, in ep::{operator} (operation {number} of this communicator)"


def before_operation(rank: int, number: int) -> str:
    """Say which operation a rank begins next."""
    return f"rank {rank}, which has not begun operation {number} of this communicator"


def still_waits(communicator: str, doing: str, awaited: str, timeout: float) -> str:
    """Return the warning about a wait that lasts long. ``doing``: who waits; ``awaited``: for whom."""
    return f"communicator {communicator!r}: {doing}, still waits for {awaited}; it gives up after {timeout:g} s"


def waited(awaited: str, timeout: float) -> str:
    """Say that a wait has reached its deadline."""
    return f"waited {timeout:g} s for {awaited}"


def stopped(doing: str, cause: str) -> str:
    """Say that a rank gives up because another one has. ``cause``: what that one says."""
    return f"{doing}, stopped because {cause}"


def gave_up(rank: int, number: int, why: str) -> str:
    """Say that a rank's host could not go on with an operation."""
    return f"rank {rank} gave up at operation {number}: {why}"


def failed(communicator: str, why: str) -> str:
    """Return the error of every call once the communicator has failed."""
    return f"communicator {communicator!r} failed: {why}; destroy it and make a new one"
