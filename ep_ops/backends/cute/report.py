"""Reports of kernels to the host: failed waits, invalid values, operations that a peer rejected, and long waits."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import torch

from cute_kernels import marks, sync

from ...group.survivors import id_of_model
from .. import failure_text

_WORDS = sync.REPORT_WORDS
_ALL = 4 * _WORDS
_FAILED, _REJECTED, _REJECTION, _LATE = range(0, _ALL, _WORDS)
"""First word of each record: a failed wait, an invalid value, an operation that a peer rejected, and a long wait."""
_NOT_BEGUN = -1
"""Stands for a flag if no kernel waited for one."""


class Report:
    """Records in pinned host memory that kernels write: a failed wait, an invalid value, an operation that a peer
    rejected, and a long wait."""

    _now: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(
        self, num_experts: int, timeout: float, heard: Callable[[int], tuple[int, Sequence[int]]],
        reason: Callable[[int, int], str], lost_experts: int = 0, now: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """Allocate the records.

        Args:
            num_experts: number of experts, for error texts.
            timeout: the communicator's timeout in seconds, for error texts.
            heard: takes an epoch; returns the alarm word (marks.Alarm) that a rank has left here, and the marks with
                which all ranks have begun the operation of that epoch.
            reason: takes a rank and an epoch; returns why that rank's host has given up in that operation.
            lost_experts: number of experts that ``shrink`` has removed, for error texts.
            now: returns the current epoch, or 0 if it is unknown. Marks do not contain all of an epoch.
        """
        self._num_experts, self._lost_experts = num_experts, lost_experts
        self._timeout = timeout
        self._heard, self._reason, self._now = heard, reason, now
        self.reported = 0
        """Epoch of the first operation of the latest call that another rank has rejected."""
        self._memory = torch.zeros(_ALL, dtype=torch.int64, device="cpu", pin_memory=True)
        self.address = self._memory.data_ptr()
        self._words = (ctypes.c_int64 * _ALL).from_address(self.address)

    def pending(self) -> bool:
        """Return whether there is something to raise. Takes a fraction of a microsecond."""
        words = self._words
        return words[_FAILED] != 0 or words[_REJECTED] != 0 or words[_REJECTION] != 0

    def _record(self, first: int) -> sync.Record:
        return sync.Record(*self._words[first : first + len(sync.Record._fields)])

    def _unpack(self, mark: int) -> tuple[int, marks.Terms]:
        """Return the epoch and the terms of a mark."""
        return marks.unpack(mark, self._now())

    def failed(self) -> str | None:
        """Return the text of the failed wait, after which the communicator cannot be used, or None."""
        if self._words[_FAILED] == 0:
            return None
        _, reason, flag, rank, peer, detail, expected, seen = self._record(_FAILED)
        epoch, own = self._unpack(expected)
        doing = failure_text.in_operation(rank, f"ep::{own.kind}", epoch)
        if reason == sync.PEER_FAILED and flag == _NOT_BEGUN:
            doing = failure_text.before_operation(rank, epoch)
        if reason == sync.PEER_FAILED:
            return failure_text.stopped(doing, self._cause(epoch))
        if reason == sync.HALF:
            return f"{doing}, has launched only a part of the operation"
        if reason == sync.MISMATCH:
            return f"{doing}, met rank {peer}{_disagreement(own, marks.unpack(seen, epoch)[1])}"
        awaited = sync.FLAGS[flag]
        where = f", token {detail}" if awaited in ("chunk", "token") else ""
        then, met = marks.unpack(seen, epoch)
        last = "nothing" if seen == 0 else f"ep::{met.kind}, operation {then}"
        whom = f"rank {peer} ({awaited} flag{where}: expected {expected}, seen {seen}, that is {last})"
        return f"{doing}, {failure_text.waited(whom, self._timeout)}"

    def timed_out(self) -> bool:
        """Return whether a wait of this rank has reached its deadline."""
        record = self._record(_FAILED)
        return record.done != 0 and record.reason == sync.TIMEOUT

    def failed_in(self) -> int | None:
        """Return the operation whose wait failed, or None."""
        if self._words[_FAILED] == 0:
            return None
        return self._unpack(self._record(_FAILED).mark)[0]

    def concerned(self) -> tuple[int, ...]:
        """Return the ranks that are involved in the failed wait."""
        record = self._record(_FAILED)
        if record.reason == sync.PEER_FAILED:
            alarm = marks.unpack_alarm(self._heard(self._unpack(record.mark)[0])[0])
            return tuple(dict.fromkeys((record.rank, alarm.rank, alarm.peer)))
        return tuple(dict.fromkeys((record.rank, record.peer)))

    def _cause(self, epoch: int) -> str:
        word, begun = self._heard(epoch)
        alarm = marks.unpack_alarm(word)
        if alarm.reason == sync.MISMATCH:
            return f"rank {alarm.rank} met rank {alarm.peer}{self._met(epoch, begun, alarm)}"
        if alarm.reason == sync.HALF:
            why = self._reason(alarm.rank, alarm.detail) or "its host has given up"
            return failure_text.gave_up(alarm.rank, alarm.detail, why)
        awaited = sync.FLAGS[alarm.flag]
        where = f", token {alarm.detail}" if awaited in ("chunk", "token") else ""
        whom = f"rank {alarm.peer} ({awaited} flag{where})"
        return f"rank {alarm.rank} {failure_text.waited(whom, self._timeout)}"

    def _met(self, epoch: int, begun: Sequence[int], alarm: marks.Alarm) -> str:
        """Return on what the two ranks of the alarm disagree: in operation ``epoch``, or in the next one, which they
        may have begun already."""
        for met in (begun, self._heard(epoch + 1)[1]):
            own, other = (marks.unpack(met[rank], epoch) for rank in (alarm.rank, alarm.peer))
            if own[0] == other[0] and own[1] != other[1]:
                return _disagreement(own[1], other[1])
        return " in another call: all ranks must call the same operators with the same arguments"

    def fail_by_peer(self, rank: int, epoch: int) -> None:
        """Write the record that a kernel would write if another rank's alarm arrived before operation `epoch` began."""
        record = sync.Record(1, sync.PEER_FAILED, _NOT_BEGUN, rank, rank, 0, marks.make(epoch, 0), 0)
        self._words[_FAILED + 1 : _FAILED + len(record)] = list(record[1:])
        self._words[_FAILED] = 1

    def failed_by_peer(self) -> bool:
        """Return whether the wait failed because another rank had raised its alarm."""
        return self._record(_FAILED).reason == sync.PEER_FAILED

    def waiting(self, communicator: str) -> str | None:
        """Return the warning about a wait that lasts long, once for each operation."""
        if self._words[_LATE] == 0:
            return None
        record = self._record(_LATE)
        self._words[_LATE] = 0
        epoch, own = self._unpack(record.mark)
        doing = failure_text.in_operation(record.rank, f"ep::{own.kind}", epoch)
        whom = f"rank {record.peer} ({sync.FLAGS[record.flag]} flag)"
        return failure_text.still_waits(communicator, doing, whom, self._timeout)

    def rejected(self) -> str | None:
        """Return the text of the first invalid expert id, row or scale since the last call, and clear the record."""
        if self._words[_REJECTED] == 0:
            return None
        _, reason, _, rank, _, detail, mark, value = self._record(_REJECTED)
        self._words[_REJECTED : _REJECTED + _WORDS] = [0] * _WORDS
        epoch, terms = self._unpack(mark)
        where = f"ep::{terms.kind}, operation {epoch}"
        if reason == sync.BAD_ROW:
            return (
                f"the route of rank {rank} fills row {detail}, but only {value} rows were given ({where}): the "
                "result is undefined"
            )
        if reason == sync.BAD_SCALE:
            given = struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))[0]
            return (
                f"scales holds {given!r} at flat index {detail} on rank {rank} ({where}); format {terms.format!r} takes"
                " powers of two, 0 and Inf: the result is undefined"
            )
        if 0 <= value < self._num_experts:
            return (
                f"topk_idx names an expert again at flat index {detail} on rank {rank} ({where});"
                f" {failure_text.REPEATS}. These entries were not sent."
            )
        return (
            f"topk_idx holds {id_of_model(value, self._lost_experts)} at flat index {detail} on rank {rank} ({where});"
            f" allowed: expert ids from -1 (none) to {self._num_experts + self._lost_experts - 1}. These"
            " entries were not sent."
        )

    def rejected_in(self) -> int | None:
        """Return the epoch of the operation that :meth:`rejection` would return, or None."""
        if self._words[_REJECTION] == 0:
            return None
        return self._unpack(self._record(_REJECTION).mark)[0]

    def rejection(self) -> tuple[int, int, str, marks.Terms] | None:
        """Return the operation that another rank rejected since the last call, and clear the record.

        Returns:
            None, or the rank that rejected it, its epoch, and its name and terms on this rank.
        """
        if self._words[_REJECTION] == 0:
            return None
        record = self._record(_REJECTION)
        self._words[_REJECTION] = 0
        epoch, terms = self._unpack(record.mark)
        rank, turn = marks.unpack_rejection(marks.unpack(record.seen, epoch)[1].max_tokens)
        if epoch - turn == self.reported:  # written again by another warp or in a later round
            return None
        self.reported = epoch - turn
        return rank, epoch, f"ep::{terms.kind} (operation {epoch})", terms


def _disagreement(own: marks.Terms, other: marks.Terms) -> str:
    if other.kind != own.kind:
        return f" in ep::{other.kind}: the ranks call operators in different orders"
    if other.token_major != own.token_major:
        theirs, ours = ("token-major" if one.token_major else "grouped by expert" for one in (other, own))
        return f", whose rows are {theirs}, not {ours}: all ranks must pass the same layout"
    if other.max_tokens != own.max_tokens:
        return f", which passed max_tokens {other.max_tokens}, not {own.max_tokens}: all ranks must pass the same value"
    if other.format != own.format:
        return (
            f", whose rows travel in format {other.format!r}, not {own.format!r}: all ranks must pass the same format"
        )
    given = [what for what, a, b in zip(_GIVEN, own[1:4], other[1:4], strict=True) if a != b]
    return f", but only one of them passed {' and '.join(given)}: all ranks must pass the same arguments"


_GIVEN = ("weights (or their gradients)", "rows", "a residual")
"""What `scalars`, `rows` and `few` of the terms stand for in calls that agree in everything else."""
