"""Failures and rejections that kernels report: read, describe and raise them, and forward them to other ranks."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Sequence

import torch

from cute_kernels import marks
from cute_kernels.heap import EPOCH, REASON_BYTES, REJECTED, STATE_BYTES
from cute_kernels.sync import FAILED_BY_PEER

from ...config import Config
from ...records import Operation
from ...symmetric import SymmetricBuffer, beside_captures
from .. import failure_text
from . import history, watch
from .report import Report
from .sizing import across, heap_of


def loading_hint() -> str:
    """Return a hint for a timeout that may have occurred because the peer's host was blocked (docs/progress.md)."""
    if os.environ.get("CUDA_MODULE_LOADING") == "EAGER":
        return ""
    return (
        ". If several communicators run concurrently, CUDA may have blocked the host of the late rank to load a kernel:"
        " set CUDA_MODULE_LOADING=EAGER on all ranks"
    )


def pack_reason(reason: str, turns: int = 0) -> bytes:
    """Return the message in which a rank gives all ranks the reason for rejecting an operator.

    Args:
        reason: the reason; its end is cut off if it does not fit.
        turns: number of kernel operations that the operator consists of.
    """
    return reason.encode()[: REASON_BYTES - 1].ljust(REASON_BYTES - 1, b"\0") + bytes([turns])


class Failures:
    """The failures of one communicator. Reading symmetric memory does not wait for kernels that run on the device."""

    members: Sequence[int] = ()
    """The global rank of each rank of the communicator."""
    broken: str | None = None
    """Why this rank's host has ended the communicator (:meth:`give_up`), or None."""
    gone: Callable[[], str | None] | None = None
    """Returns why another rank has left without waiting for this one, or None."""
    turns: Callable[[str, int], int] | None = None
    """Function from operator and ``max_tokens`` to the number of kernel operations; None if unknown."""

    def __init__(self, config: Config, rank: int, device: torch.device, memory: SymmetricBuffer) -> None:
        self._config, self._rank, self._device, self._memory = config, rank, device, memory
        self._heap, self._across = heap_of(config), across(config)
        self._state = memory.local[:STATE_BYTES].view(torch.int64)
        self._state[EPOCH] = 1
        self._resets = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self.report = Report(
            config.num_experts,
            config.timeout,
            self._heard,
            lambda *of: self._reason(*of)[0],
            config.lost_experts,
            self._now,
        )
        self.callbacks: list[Callable[[str], None]] = []
        self._alarm: Callable[[str], None] = lambda why: None
        self._once = threading.Lock()
        self._seen = self._raised = False

    def listen(self) -> None:
        """Copy an alarm that another rank has sent into the report, if no kernel has run here since."""
        if self.report.pending() or torch.cuda.is_current_stream_capturing():
            return
        epoch, failed = struct.unpack("<2q", self._read(EPOCH * 8, 16))
        if failed == FAILED_BY_PEER or (self._across and self._heard(epoch)[0] != 0):
            self.report.fail_by_peer(self._rank, epoch)

    def check(self, failures_alone: bool = False) -> None:
        """Raise what was reported: RuntimeError for a failure, ValueError for a rejection by this rank or another one.

        While a CUDA graph is captured, device memory is neither read nor written, so rejections are raised by a
        later call.
        """
        if self.broken is None and not self.report.pending():
            return
        watch.look(self)  # whichever thread sees it first notifies the other ranks
        failed = self._failed()
        if failed is not None:
            self._raised = True
            raise RuntimeError(failed)
        if failures_alone:
            return
        reported = self.report.reported
        rejection = None if torch.cuda.is_current_stream_capturing() else self.report.rejection()
        if rejection is not None:
            peer, epoch, doing, terms = rejection
            reason, turns = self._reason(peer, epoch)
            why = f"{doing}: rejected by rank {peer}: {reason}"
            expected = self._turns_of(terms)
            if turns and expected and turns != expected:
                # The next operation would be paired with a different one of that rank, and nothing would detect it.
                self.give_up(
                    f"{why}; with its max_tokens the call runs in {turns} operations, with that of rank {self._rank} in"
                    f" {expected}: all ranks must pass the same max_tokens"
                )
                return self.check()
            more = self._rejected_between(reported, self.report.reported)
            raise ValueError(f"communicator {self._config.name!r}: {why}{more}")
        rejected = None if torch.cuda.is_current_stream_capturing() else self.report.rejected()
        if rejected is not None:
            with beside_captures():
                with torch.cuda.device(self._device), torch.cuda.stream(self._resets):
                    self._state[REJECTED : REJECTED + 1].zero_()
                self._resets.synchronize()  # so that kernels on any stream that are launched later report again
            raise ValueError(f"communicator {self._config.name!r}: {rejected}")

    def _turns_of(self, terms: marks.Terms) -> int:
        """Return the number of kernel operations of the operator that this rank launched with these terms, or 0 if
        unknown."""
        if self.turns is None or self._config.max_tokens_per_rank >= marks.MOST_TOKENS:
            return 0
        return self.turns(terms.kind, terms.max_tokens)

    def give_up(self, why: str) -> None:
        """End the communicator on all ranks with a reason, because this rank cannot run what they expect. A kernel on
        the current stream, behind all launches of the interrupted operation, sends the reason to the peers."""
        if self.broken is None:
            self.broken = f"rank {self._rank}: {why}"
            self._alarm(why)

    def check_last(self) -> None:
        """Raise the error that ended an operation on all ranks, after the host has waited for that operation.

        Invalid values of this rank alone are left to the next :meth:`check`.
        """
        if not self.report.pending():
            return
        if self.has_failed() or self.report.rejected_in() == self._epoch() - 1:
            self.check()

    def has_failed(self) -> bool:
        """Return whether the communicator has failed, as far as is known here."""
        return self.broken is not None or self.report.failed() is not None

    def unsaid(self) -> str | None:
        """Return the text of the communicator's failure if :meth:`check` has not raised it yet, else None."""
        if self.broken is None and not self.report.pending():
            return None
        watch.look(self)
        return None if self._raised else self._failed()

    def last_operations(self, rank: int) -> list[Operation]:
        """Return the latest operations of ``rank`` from the log in its memory, newest first."""
        heap = self._heap
        notes, waited = (self._memory.read(rank, heap.offset[name], heap.size[name]) for name in ("notes", "waited"))
        hello, bank = heap.offset["hello"], heap.distance["hello"]
        hellos = [self._memory.read(rank, first, heap.size["hello"]) for first in (hello, hello + bank)]
        (epoch,) = struct.unpack("<q", self._memory.read(rank, EPOCH * 8, 8))
        return history.operations(notes, waited, hellos, epoch)

    def operations(self) -> int:
        """Return the number of operations that this rank has ended; latency kernels count when they run."""
        return self._epoch() - 1

    def waited(self) -> list[float]:
        """Return the sums of this rank's waits for each other rank, in seconds; 0 for itself."""
        held = self._read(self._heap.offset["waits"], self._heap.size["waits"])
        return [0.0 if rank == self._rank else one for rank, one in enumerate(history.seconds(held))]

    def let_go(self) -> None:
        """Release the views of symmetric memory, so that garbage collection of this object cannot delay freeing it."""
        self._state = self._state.new_empty(0)

    # ------------------------------------------------------------------ looked at by watch.py

    def watch(self, alarm: Callable[[str], None]) -> None:
        """Let a thread check for failures as well.

        Args:
            alarm: launches, on the current stream, the kernel that notifies the other ranks that this one has given up.
                Its argument is the reason if no kernel has reported one, else "".
        """
        self._alarm = alarm
        watch.watch(self)

    def unwatch(self) -> None:
        watch.unwatch(self)

    def waiting(self) -> str | None:
        text = self.report.waiting(self._config.name)
        why = self.gone() if text is not None and self.gone is not None else None
        if why is not None:
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                self.give_up(f"stopped because {why}")
        return text

    def failure(self) -> str | None:
        if not self.report.pending():
            return None
        with self._once:
            if self._seen or (text := self._failed()) is None:
                return None
            self._seen = True
        return text

    def on_failure(self, text: str) -> None:
        """Notify the other ranks, unless one of them reported the failure, and call the callbacks."""
        if not self.report.failed_by_peer():
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._alarm("")
        for callback in self.callbacks:
            callback(text)

    # ------------------------------------------------------------------ in words

    def _failed(self) -> str | None:
        failed = self.broken or self.report.failed()
        if failed is None:
            return None
        hint = loading_hint() if self.report.timed_out() else ""
        return f"{failure_text.failed(self._config.name, failed)}{hint}{self._noted()}"

    def _noted(self) -> str:
        """Return lines about the latest operations of the ranks involved, as far as their memory can be read."""
        lines, failed = "", None
        ranks: Sequence[int] = ()
        with contextlib.suppress(RuntimeError):  # a graph is being captured, or the device is lost
            ranks = () if self.broken else self.report.concerned()
            failed = self.report.failed_in()
        for rank in ranks:
            with contextlib.suppress(RuntimeError):  # or that rank's memory is not mapped
                lines += f"\n{history.describe(rank, self.last_operations(rank), failed)}"
            lines += self._elsewhere(rank)
        return lines

    def _elsewhere(self, rank: int) -> str:
        """Return a line for each other communicator of this process in which ``rank`` has waited for a long time."""
        lines = ""
        for other in watch.watched():
            if other is self or not isinstance(other, Failures) or self.members[rank] not in other.members:
                continue
            with contextlib.suppress(RuntimeError):
                there = other.members.index(self.members[rank])
                for noted in other.last_operations(there)[: history.LISTED_OPERATIONS]:
                    if noted.met is None or noted.met - noted.begun > self._config.timeout / 2:
                        lines += (
                            f"\nrank {rank} has waited in communicator {other._config.name!r}, operation {noted.number}"
                            f" ep::{noted.kind}: all must call the operators of several communicators in one order"
                        )
                        break
        return lines

    def _reason(self, peer: int, epoch: int) -> tuple[str, int]:
        """Return the message that ``peer`` has left here when it rejected the operation or gave up (`pack_reason`):
        text and number of operations."""
        first = self._heap.offset["reason"] + epoch % 2 * self._heap.distance["reason"] + peer * REASON_BYTES
        held = self._read(first, REASON_BYTES)
        return held[:-1].rstrip(b"\0").decode(errors="ignore"), held[-1]

    def _rejected_between(self, reported: int, last: int) -> str:
        """Return a text about the calls that other ranks have rejected between two rejected calls, named by the numbers
        of their first operations. Kernels report the last one only; the logs of the ranks contain the others."""
        calls: dict[int, tuple[int, int]] = {}  # first operation of a call -> the rank, and the last that it rejected
        newest: dict[tuple[int, int], int] = {}  # rank and bank -> the operation of the reason that is there
        own: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):  # the device is lost, or a rank's memory is not mapped
            own = {noted.number: noted.kind for noted in self._log(self._rank)}
            for rank in range(self._config.world_size):
                for noted in self._log(rank):
                    if rank != self._rank and noted.kind == "rejected":
                        newest.setdefault((rank, noted.number % 2), noted.number)
                        first = noted.number - marks.unpack_rejection(noted.max_tokens)[1]
                        calls.setdefault(first, (rank, noted.number))
        texts = []
        for first, (rank, number) in sorted(calls.items()):
            if reported < first < last and own.get(first, "rejected") != "rejected":
                reason = "another reason has replaced its own"
                if newest[rank, number % 2] == number:
                    reason, _ = self._reason(rank, number)
                texts.append(f"ep::{own[first]} (operation {first}): rejected by rank {rank}: {reason}")
        return f"; before that, {'; '.join(texts)}" if texts else ""

    def _log(self, rank: int) -> list[Operation]:
        """Return the operations in the log of a rank, newest first, without waits."""
        heap = self._heap
        return history.operations(self._memory.read(rank, heap.offset["notes"], heap.size["notes"]), now=self._epoch())

    def _heard(self, epoch: int) -> tuple[int, Sequence[int]]:
        """Return the alarm word, and the marks with which all ranks have begun the operation."""
        heap, ranks = self._heap, self._config.world_size
        (alarm,) = struct.unpack("<q", self._read(heap.offset["alarm"], 8))
        hello = heap.offset["hello"] + epoch % 2 * heap.distance["hello"]
        begun = struct.unpack(f"<{ranks}q", self._read(hello, 8 * ranks))
        return alarm, begun

    def _now(self) -> int:
        """Return the number of the operation that this rank runs now, or 0 if it cannot be read."""
        if torch.cuda.is_current_stream_capturing():
            return 0
        with contextlib.suppress(RuntimeError):  # the device may be lost
            return self._epoch()
        return 0

    def _epoch(self) -> int:
        """Return the number of the operation that this rank runs now."""
        return struct.unpack("<q", self._read(EPOCH * 8, 8))[0]

    def _read(self, first: int, nbytes: int) -> bytes:
        """Read bytes of this rank's memory."""
        return self._memory.read(self._rank, first, nbytes)
