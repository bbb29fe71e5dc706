"""Progress of an operator's call, which determines what an exception in it means for the other ranks."""

from __future__ import annotations

from types import TracebackType


class Course:
    """Progress of the current or latest call on one communicator.

    A call consists of one or more operations of the kernels, and an operation of one or more launches. ``with course:``
    surrounds the launches of one operation, from the first to the last, and nothing else that can fail.
    """

    __slots__ = ("agreed", "counts", "ended", "open")

    def __init__(self) -> None:
        self.counts = False
        """Whether the call takes part in the operation of its peers: all checks have passed."""
        self.agreed = False
        """Whether an exception is raised on all ranks, or concerns an operation that has ended on all ranks."""
        self.open = False
        """Whether an operation may have been launched in part."""
        self.ended = 0
        """Number of operations that have been launched completely."""

    def begin(self) -> None:
        """Note that the call is about to launch."""
        self.counts, self.agreed, self.open, self.ended = True, False, False, 0

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.end()

    def end(self) -> None:
        """Note that an operation has been launched completely. Latency paths set :attr:`open` before their launch and
        call this after it, which takes less time than ``with``."""
        self.open = False
        self.ended += 1
