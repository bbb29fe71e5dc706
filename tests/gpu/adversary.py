"""`EP_OPS_WIRE=adversary`, in tests alone: an adversary as the wire between declared domains, beneath all operators.

Every kernel of a communicator leaves its puts in a mailbox of its rank. A courier runs beside each operation, on a
stream of its own, and delivers what lies there late, in pieces and in any order, behind the operation's end as well
(tests/courier.py). The operation begins when its courier is there: behind it, a courier might find no
place beside a kernel that waits for what only the courier delivers.

A kernel that is launched for the first time is loaded, which may have to wait for those that run, hence for a courier
that waits for that kernel. So a communicator launches all that a test will, with no mailbox, and is then handed to
`wake`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from courier import HEADER_WORDS, LATEST, RECORD_WORDS, Adversary, Courier, Gate, mailbox_bytes

from cute_kernels import jit
from cute_kernels.alarm import RaiseAlarm
from cute_kernels.heap import BEGUN, EPOCH, MET, NOTE_WORDS, NOTES, STATE_BYTES, Heap
from cute_kernels.marks import SHIFT
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled
from ep_ops import config
from ep_ops.backends.cute import backend, launcher, sizing

NAME = "adversary"
DEPTH, COURIERS = 64, 2
"""Puts that a mailbox has room for, fewer than an operation has; blocks of a courier."""
OPERATIONS = 8192
"""So many operations later nobody looks at a courier's epoch any more."""
LOGGED, SHOWN = 4, 12
"""Words that a courier leaves when it goes, and of how many of the last ones a failed test shows them."""
LATER = (Pull, PullScaled)
"""Kernels of an operation that another kernel has begun."""

_awake: weakref.WeakSet[Any] = weakref.WeakSet()


def problem_of(given: config.Config) -> Any:
    """Return the kernels' problem, as `sizing.problem_of`, which does not know this wire."""
    if given.wire != NAME or not sizing.across(given):
        return sizing.problem_of(given)
    return dataclasses.replace(sizing.sizes_of(given), wire=Adversary(DEPTH, rows=sizing.rows_of_a_put(given)))


def kernels_of(given: config.Config, formats: Any = ()) -> list[Any]:
    """Everything that a communicator over any wire launches."""
    courier = [Courier(problem_of(given), DEPTH), Gate(problem_of(given))] if given.wire == NAME else []
    return [*backend.all_kernels(given, formats), *courier]


def install(patch: Callable[[Any, str, Any], None]) -> None:
    """Makes the wire known to communicators that are made behind this. `patch`: `setattr`, or one that is undone."""
    config._WIRE["holds"] = lambda value: value in config.WIRES
    patch(config, "WIRES", (*config.WIRES, NAME))
    patch(backend, "problem_of", problem_of)
    patch(backend, "Launcher", Launcher)
    usual = torch.cuda.graph.__exit__

    def leave(graph: Any, *error: Any) -> None:
        for mail in _awake:
            mail.join()
        usual(graph, *error)

    patch(torch.cuda.graph, "__exit__", leave)
    destroy = backend.CuteBackend.destroy

    def show(self: backend.CuteBackend, keep: bool) -> None:
        mail = getattr(self._launcher, "mail", None)
        if mail in _awake and self._failures.report.failed() is not None:
            with contextlib.suppress(torch.AcceleratorError):
                mail.show(Heap(self._launcher.problem))
        if mail is not None:
            _awake.discard(mail)
            mail.notes = mail._epoch = mail.box[:0]  # no view of the heap is left
        destroy(self, keep)

    patch(backend.CuteBackend, "destroy", show)


class Mail:
    """A rank's mailbox, and the stream of its couriers."""

    def __init__(self, heap: Any) -> None:
        self.device = heap.local.device
        self.box = torch.zeros(mailbox_bytes(DEPTH) // 8, dtype=torch.int64, device=self.device)
        self.served = torch.zeros(1 + OPERATIONS, dtype=torch.int64, device=self.device)  # the first: 0 for ever
        self.log = torch.zeros(1 + OPERATIONS, LOGGED, dtype=torch.int64, device=self.device)
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.operations = 0
        self.notes = heap.local
        self._epoch = heap.local[:STATE_BYTES].view(torch.int64)[EPOCH : EPOCH + 1]

    def begins(self, stream: torch.cuda.Stream) -> int:
        """An operation begins on that stream: number of the place of its epoch."""
        number = 1 + self.operations % OPERATIONS
        self.operations += 1
        with torch.cuda.stream(stream):
            torch.add(self._epoch, 0, out=self.served[number : number + 1])
        return number

    def follows(self, stream: torch.cuda.Stream) -> None:
        """Couriers of operations before this one are told that it has one of its own."""
        with torch.cuda.stream(stream):
            torch.add(self._epoch, 0, out=self.box[LATEST : LATEST + 1])

    def show(self, heap: Heap) -> None:
        """Print the notes of the last operations, and when couriers came and went, which explain why a test has
        failed."""
        torch.cuda.synchronize(self.device)
        rank = f"rank {dist.get_rank()}:" if dist.is_initialized() else ""
        left = self.box[HEADER_WORDS::RECORD_WORDS].tolist()
        print(rank, f"{self.operations} couriers; puts left:", [i for i, state in enumerate(left) if state & 1])
        for number in range(max(1, self.operations - SHOWN + 1), self.operations + 1):
            came, went, looks, why = self.log[1 + (number - 1) % OPERATIONS].tolist()
            epoch = int(self.served[1 + (number - 1) % OPERATIONS])
            print(rank, f"courier of operation {epoch}: {came} to {went}, {looks} looks, went for reason {why}")
        words = self.notes[heap.offset["notes"] :][: 8 * NOTES * NOTE_WORDS].view(torch.int64).view(NOTES, NOTE_WORDS)
        for mark, begun, met in sorted(words[:, [0, BEGUN, MET]].tolist())[-SHOWN:]:
            print(rank, f"operation {mark >> SHIFT}: begun {begun}, met all {met}")

    def join(self) -> None:
        """The current stream follows the couriers, if a graph is captured of which they are a part."""
        with torch.cuda.stream(self.stream):
            captured = torch.cuda.is_current_stream_capturing()
        if captured:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Launcher(launcher.Launcher):
    """Launches couriers, too. The two of a communicator share a mailbox."""

    def __init__(
        self, problem: Any, heap: Any, multiprocessors: int, rest: tuple[int, int, int],
        *others: Any,
    ) -> None:  # fmt: skip
        super().__init__(problem, heap, multiprocessors, rest, *others)
        self.mail: Mail | None = None
        if isinstance(problem.wire, Adversary):
            if not hasattr(heap, "mail"):
                heap.mail = Mail(heap)
            self.mail = heap.mail
            self._table = torch.cat([self._table, self._table.new_zeros(1)])
            self._ranks = (self._table.data_ptr(), *self._ranks[1:])

    def wake(self) -> None:
        """From now on puts are left in the mailbox."""
        assert self.mail is not None
        capturing = torch.cuda.is_current_stream_capturing
        self._courier = jit.get(Courier(self.problem, DEPTH), self._arch, capturing)
        self._gate = jit.get(Gate(self.problem), self._arch, capturing)
        self._table[-1] = self.mail.box.data_ptr()
        torch.cuda.synchronize(self.device)
        self.send(0)  # loads it
        self.hold(0, 0, torch.cuda.current_stream(self.device))
        torch.cuda.synchronize(self.device)
        _awake.add(self.mail)

    def send(self, number: int) -> None:
        """A courier, for the operation whose epoch has that place."""
        mail = self.mail
        assert mail is not None
        served, log = mail.served.data_ptr() + 8 * number, mail.log.data_ptr() + 8 * LOGGED * number
        self._courier(*self._ranks, 0, served, log, mail.operations * 40503 % 2**30, COURIERS, mail.stream.cuda_stream)

    def hold(self, number: int, couriers: int, stream: torch.cuda.Stream) -> None:
        """Let work that comes next in the stream begin when that courier has come."""
        assert self.mail is not None
        served = self.mail.served.data_ptr() + 8 * number
        self._gate(*self._ranks, 0, served, couriers, 1, stream.cuda_stream)

    def stream_of(self, raw: int) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self.device)
        return current if raw == current.cuda_stream else torch.cuda.ExternalStream(raw, self.device)

    def get(self, kernel: Any, **variant: Any) -> Any:
        bind, mail = super().get(kernel, **variant), self.mail
        if mail is None or kernel in LATER:
            return bind
        return lambda terms, **numbers: functools.partial(self.launch, mail, kernel, bind(terms, **numbers))

    def launch(self, mail: Mail, kernel: Any, launch: Any, *args: Any, **by_name: Any) -> None:
        if mail not in _awake:  # launches are kept from before
            return launch(*args, **by_name)
        with torch.cuda.device(self.device):
            stream = self.stream_of(self._stream(self.device.index))
            if kernel is RaiseAlarm:  # no operation: what it has put is delivered behind it
                launch(*args, **by_name)
                mail.stream.wait_stream(stream)
                self.send(0)
                return
            number = mail.begins(stream)
            mail.stream.wait_stream(stream)
            self.send(number)
            mail.follows(stream)
            self.hold(number, COURIERS, stream)
            launch(*args, **by_name)


def wake(comm: Any) -> None:
    """Start the couriers of a communicator that has been warmed up. Other ranks may do it later."""
    found = comm.backend
    while not isinstance(found, backend.CuteBackend):  # it is compared with another one
        found = found._backend
    for one in (found._launcher, found._side_launcher):
        assert isinstance(one, Launcher)
        one.wake()
