"""Waits of the reference backend: with a deadline, a warning before it, and one cause of failure on all ranks.

Collectives that end within a moment have no overhead. A rank that waits longer writes the number of its operation to
the store of the process group, so that others can distinguish late ranks from waiting ones. The first rank that gives
up writes its cause there, and waiting ranks look for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import Member, patience
from ...group.exchange import Exchange
from ...group.leaving import gone, has_left, short, store_of
from .. import failure_text

MOMENT = 1.0
"""Seconds, or a hundredth of the timeout if that is less, after which a rank that waits notes where it is."""
PAUSE = 1.0
"""The most seconds between two looks at what other ranks say."""
UNSENT = 2**31 - 1
"""Tag of a message that nobody sends."""
GRACE = 0.05
"""Seconds that a peer has to say why it has closed its connections."""

logger = logging.getLogger("ep_ops")


class Waits:
    """The waits of one communicator on this rank, and the failure that ended them."""

    def __init__(self, member: Member) -> None:
        self._name, self._rank, self._world_size = member.name, member.rank, member.world_size
        self.group, self._number, self._timeout = member.group, member.number, member.config.timeout
        self._moment = min(self._timeout / 100, MOMENT)
        self._operation, self._call = 0, ""
        self._warned = 0  # the last operation of which a warning has been logged
        self._raised = False
        self.failed: str | None = None
        """Text of the failure that has ended the communicator."""

    def begin(self, call: str) -> None:
        """Count an operation, before it meets the other ranks. ``call``: its name, such as "ep::dispatch"."""
        self.check()
        self._operation, self._call = self._operation + 1, call

    def check(self, cause: BaseException | None = None) -> None:
        """Raise the failure, if any."""
        if self.failed is not None:
            self._raised = True
            raise RuntimeError(self.failed) from cause

    def unsaid(self) -> str | None:
        """Return the text of the failure, unless :meth:`check` has raised it."""
        return None if self._raised else self.failed

    def listen(self) -> None:
        """Check between operations whether another rank has given up."""
        if self.failed is None and self._world_size > 1:
            self._hear(failure_text.before_operation(self._rank, self._operation + 1))

    def give_up(self, why: str) -> None:
        """Fail on all ranks, because this rank does not finish the current operation."""
        if self.failed is None and self._world_size > 1:
            self._fail(failure_text.gave_up(self._rank, self._operation, why))

    # ------------------------------------------------------------------ a collective

    def end(self, work: Any) -> None:
        """Wait until a collective of the current operation (a ``torch.distributed.Work``) has ended.

        Raises:
            RuntimeError: this rank or another one has given up.
        """
        try:
            self._end(work)
        except RuntimeError:
            if not work.is_completed():
                _keep(self.group)
            raise

    def _end(self, work: Any) -> None:
        begun = time.monotonic()
        error: Exception | None = None
        try:
            if _ended(work, self._moment):
                return
            self._note()
            while time.monotonic() - begun < self._timeout:
                if _ended(work, min(PAUSE, (time.monotonic() - begun) / 10)):
                    return
                self._hear(self._doing())
                self.check()
                if (why := gone(self.group, self._number)) is not None:
                    self._fail(failure_text.stopped(self._doing(), why))
                    self.check()
                if time.monotonic() - begun > patience(self._timeout):
                    self._warn()
        except RuntimeError as caught:
            if self.failed is not None:
                self.check(caught if str(caught) != self.failed else caught.__cause__)
            error = caught
        # The collective's own deadline is the same, so either may come first.
        if error is None or time.monotonic() - begun > 0.99 * self._timeout:
            why = failure_text.waited(_named(self._missing()), self._timeout)
        else:
            self._await_cause()
            why = f"could not exchange data with {_named(self._missing())}: {str(error).partition('. ')[0]}"
        self._fail(f"{self._doing()}, {why}")
        self.check(error)

    def _doing(self) -> str:
        if not self._operation:
            return failure_text.before_operation(self._rank, 1)
        return failure_text.in_operation(self._rank, self._call, self._operation)

    def _warn(self) -> None:
        """Log once for each operation which ranks this rank waits for. Raise if one of them will never come."""
        if self._warned == self._operation:
            return
        self._warned = self._operation
        missing = self._missing()
        if any(has_left(self.group, self._number, rank) for rank in missing):
            self._fail(f"{self._doing()}, {failure_text.waited(_named(missing), patience(self._timeout))}")
            self.check()
        logger.warning(failure_text.still_waits(self._name, self._doing(), _named(missing), self._timeout))

    def _await_cause(self) -> None:
        """After an error of the process group, give other ranks time to write their operation or their cause."""
        self._note()
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < 2 * self._moment and self._read("failed") is None:
            if waited > GRACE and len(self._missing()) < 2:
                return
            time.sleep(self._moment / 20)

    # ------------------------------------------------------------------ what ranks say in the store

    def _note(self) -> None:
        """Write which operation this rank has begun."""
        self._ask("set", f"at/{self._rank}", str(self._operation))

    def _missing(self) -> dict[int, str]:
        """Return the ranks that have not written that they wait in this operation, with what is known about them."""
        missing = {}
        for rank in range(self._world_size):
            if rank != self._rank and int(self._read(f"at/{rank}") or 0) < self._operation:
                left = has_left(self.group, self._number, rank)
                missing[rank] = f"rank {rank}{', which has called destroy' * left}"
        return missing

    def _hear(self, doing: str) -> None:
        """Fail if another rank has."""
        if (cause := self._read("failed")) is not None:
            self._end_with(failure_text.stopped(doing, cause))

    def _fail(self, why: str) -> None:
        """Fail with a cause, or with that of a rank that was first."""
        why = short(why)
        first = self._ask("compare_set", "failed", "", why)
        if first is not None and (cause := first.decode()) != why:
            why = failure_text.stopped(self._doing(), cause)
        self._end_with(why)

    def _end_with(self, why: str) -> None:
        """End the communicator, and the collectives of its process group. That is out of step: a later collective would
        receive the data of those in progress."""
        self.failed = failure_text.failed(self._name, why, "make a new one on a new process group")
        with contextlib.suppress(RuntimeError):
            disconnect(self.group, (self._rank + 1) % self._world_size)

    def _read(self, key: str) -> str | None:
        if not self._ask("check", [key]):
            return None
        value = self._ask("get", key)
        return None if value is None else value.decode()

    def _ask(self, method: str, *args: Any) -> Any:
        """Return the store's answer, or None if it cannot be reached, for instance because its rank has died."""
        try:
            return getattr(store_of(self.group, self._number), method)(*args)
        except (RuntimeError, ValueError, KeyError, TypeError):  # TypeError: a group without a store (MPI)
            return None


class WaitingExchange(Exchange):
    """Collectives on the host that follow the communicator's ``timeout``; on other devices, the process group's."""

    def __init__(self, member: Member, waits: Waits) -> None:
        super().__init__(member.group, member.device)
        self._waits = waits
        self._timeout = timedelta(seconds=min(member.config.timeout, 1e9))

    def _all_gather(self, gathered: list[Tensor], tensor: Tensor) -> None:
        if self.wire_device.type == "cpu":
            self._waits.end(self.group.allgather(gathered, tensor, self._timeout))
        else:
            super()._all_gather(gathered, tensor)

    def _all_to_all(self, received: Tensor, sent: Tensor, recv_counts: list[int], send_counts: list[int]) -> None:
        if self.wire_device.type == "cpu":
            self._waits.end(self.group.alltoall_base(received, sent, recv_counts, send_counts, self._timeout))
        else:
            super()._all_to_all(received, sent, recv_counts, send_counts)


def _ended(work: Any, seconds: float) -> bool:
    """Return whether a collective ended within some seconds. RuntimeError: it ended with that error."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have succeeded in the meantime
    return True


def disconnect(group: Any, peer: int) -> None:
    """Close this rank's connections, which ends all collectives of the group with an error, on all its ranks. ``peer``:
    another rank of the group."""
    backend: Any = group._get_backend(torch.device("cpu"))
    by_gloo = isinstance(backend, getattr(dist, "ProcessGroupGloo", ()))
    if by_gloo:
        # Its `abort` does nothing, but a receive that times out closes all connections.
        backend.recv([torch.empty(1, device="cpu")], peer, UNSENT).wait(timedelta(milliseconds=1))
    else:
        backend.abort()


def _keep(group: Any) -> None:
    """Never destroy a process group, some of which do not end a collective in progress when they are closed. The
    destructor would wait for it until its deadline."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _named(ranks: dict[int, str]) -> str:
    """Return the names of ranks for a text."""
    return " and ".join(ranks.values()) or "the other ranks"
