"""Progress of an operator's call, which determines what an exception in it means for the other ranks."""

from __future__ import annotations

import enum
from types import TracebackType


class Stage(enum.Enum):
    """Stage of a call."""

    CHECKING = enum.auto()
    """The call does not take part in the operation of its peers yet: checks are not complete."""
    BEGUN = enum.auto()
    """It takes part, and no operation is launched in part."""
    LAUNCHING = enum.auto()
    """An operation may be launched in part."""
    AGREED = enum.auto()
    """An exception is raised on all ranks, or concerns an operation that has ended on all ranks."""


# Looked up once, because members of an Enum take a noticeable part of a launch.
CHECKING, BEGUN, LAUNCHING, AGREED = Stage


class CallState:
    """Progress of the current or latest call on one communicator.

    A call consists of one or more operations of the kernels, and an operation of one or more launches. ``with state:``
    surrounds the launches of one operation, from the first to the last, and nothing else that can fail. Calls of the
    latency kernels set the attributes instead, because calls of methods take a noticeable part of a decode step.
    """

    __slots__ = ("launched", "stage")

    def __init__(self) -> None:
        self.stage = CHECKING
        self.launched = 0
        """Number of operations of the call that have been launched completely."""

    def __enter__(self) -> None:
        self.stage = LAUNCHING

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.stage = BEGUN
            self.launched += 1
