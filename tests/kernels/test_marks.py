"""Marks say which operation they belong to, and reports say in words what differs."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass")

from cute_kernels import heap, marks, sync
from cute_kernels.formats import FORMATS
from cute_kernels.heap import MOST_RANKS, MOST_RANKS_ACROSS
from ep_ops.backends.cute import watch
from ep_ops.backends.cute.report import Report


def mark(epoch: int, *args, **kwargs) -> int:
    return epoch << marks.SHIFT | marks.pack(*args, **kwargs)


@pytest.mark.parametrize(("kind", "token_major"), marks._NUMBERED[1:])
def test_round_trip(kind, token_major):
    every = itertools.product([(False, True, False), (True, False, True)], [0, 1, 4096, 2**17 - 1], FORMATS)
    for flags, tokens, name in every:
        terms = marks.Terms(kind, *flags, tokens, name, token_major)
        packed = marks.pack(kind, tokens, *flags, format=name, token_major=token_major)
        assert marks.unpack(12345 << marks.SHIFT | packed) == (12345, terms), (flags, tokens, name)
        assert packed < 2**31 and packed >> marks.SHIFT == 0


def test_layout_of_marks():
    """All bits of a mark have one purpose each: terms and epoch. A number takes the place of terms only."""
    terms = 0
    for number, what in (
        (marks.pack("none", 127 << marks.LOW_TOKENS, rows=False), "highest bits of max_tokens"),
        ((1 << marks.KIND_BITS) - 1 << marks.KIND, "kind"), (7 << marks.FLAGS, "scalars, rows, latency"),
        (7 << marks.FORMAT, "format"), (marks.pack("none", 1023, rows=False), "lowest bits of max_tokens"),
    ):  # fmt: skip
        assert number & terms == 0, what
        terms |= number
    assert terms == (1 << marks.SHIFT) - 1 and marks.NUMBER + marks.NUMBER_BITS == marks.SHIFT
    assert marks.make(5, terms) == 5 << marks.SHIFT | terms and marks.make(2**36, 0) == -(2**63)


def test_layout_of_state():
    """Words do not overlap, EPOCH and FAILED are loaded together, and there is room for a mask of all ranks of a domain
    beside them."""
    words = [
        heap.EPOCH, heap.FAILED, *range(heap.VACANT, heap.VACANT + heap.VACANT_WORDS), heap.TICKET, heap.REJECTED,
        heap.LATE, heap.ALIVE, heap.CLAIMS, heap.PUSHES,
    ]  # fmt: skip
    assert len(set(words)) == len(words) and 8 * max(words) < heap.STATE_BYTES
    assert heap.FAILED == heap.EPOCH + 1 and heap.EPOCH % 2 == 0
    assert heap.VACANT == heap.FAILED + 1 and 64 * heap.VACANT_WORDS >= MOST_RANKS
    assert heap.PUSHES == heap.CLAIMS + 1 and heap.CLAIMS * 8 % 128 == 0


TURNS = (2**35, 2**36, 2**36 + 2**35, 2**37, 2**40, 2**43)


def test_epochs_go_on():
    """Marks of the same terms differ, also those of operations that are a power of two apart; words with a number are
    of one operation only; and nothing looks like memory that was not written."""
    terms = marks.pack("combine", 64)
    epochs = [1, 2, 3, *(turn + away for turn in TURNS for away in range(-20, 20))]
    assert len({marks.make(epoch, terms) for epoch in epochs}) == len(epochs)
    bases = [marks.make(epoch, 0) for epoch in epochs]
    assert 0 not in bases and all(-(2**63) <= base < 2**63 for base in bases)
    most = (1 << marks.NUMBER_BITS) - 1
    for epoch, base in zip(epochs, bases, strict=True):
        word = marks.with_number(base, most)
        assert [other for other in epochs if marks.has_number(word, marks.make(other, 0))] == [epoch]
        assert marks.number_in(word, base) == most and not marks.has_number(0, base)
        assert marks.same_operation(marks.make(epoch, marks.pack("plan", 9)), base ^ terms)
        assert not marks.same_operation(marks.make(epoch + 1, terms), base ^ terms)
        assert not marks.same_operation(0, base ^ terms)
        assert (base >> marks.SHIFT & 1) == epoch & 1
        for given_up in (0, -(1 << 63)):
            for away in (-20, -1, 0, 1, 20):
                told = marks.unpack(base ^ terms ^ given_up, max(epoch + away, 0))
                assert told == (epoch, marks.unpack(terms)[1])


def test_errors_number_operations_of_any_epoch():
    for turn in TURNS:
        made = object.__new__(Report)
        made._timeout, made._num_experts, made.reported = 2.0, 8, 0
        own, seen = marks.make(turn + 7, marks.pack("dispatch", 64)), marks.make(turn + 6, marks.pack("combine", 64))
        made._now = lambda turn=turn: turn + 9
        made._words = [1, sync.TIMEOUT, sync.FLAGS.index("route"), 0, 1, 0, own, seen] + [0] * 56
        text = made.failed()
        assert f"(operation {turn + 7}" in text and f"that is ep::combine, operation {turn + 6}" in text
        rejection = marks.make(turn + 7, marks.pack_rejection(3))
        made._words = [0] * 32 + [1, sync.REJECTION, 0, 0, 3, 0, own, rejection] + [0] * 24
        assert made.rejected_in() == turn + 7
        assert made.rejection()[:2] == (3, turn + 7) and made.rejection() is None


def test_numbers_in_the_place_of_terms():
    """A word that carries one may be what a failed wait has seen: the report must not fail of it."""
    for number in (0xF, 7 << marks.FORMAT, (1 << marks.SHIFT) - 1):
        epoch, terms = marks.unpack(5 << marks.SHIFT | number)
        assert epoch == 5 and terms.kind in marks.KINDS and terms.format in FORMATS
        assert "waited 2 s for rank 1" in report(sync.TIMEOUT, mark(7, "dispatch", 64), 5 << marks.SHIFT | number)


def test_what_a_failure_says_of_lazy_loading(monkeypatch):
    """Only where a wait has reached its deadline, and a kernel may still have to be loaded."""
    from ep_ops.backends.cute.failures import Failures

    def text(reason: int) -> str:
        made = object.__new__(Failures)
        made._config, made._noted = SimpleNamespace(name="ep0"), lambda: ""
        made.report = object.__new__(Report)
        made.report._timeout, made.report._num_experts = 2.0, 8
        own, seen = mark(7, "dispatch", 64), mark(7, "plan", 64)
        made.report._words = [1, reason, sync.FLAGS.index("route"), 0, 1, 0, own, seen] + [0] * 24
        return made._failed()

    for given, told in ((None, True), ("LAZY", True), ("EAGER", False)):
        monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_MODULE_LOADING", given)
        assert ("set CUDA_MODULE_LOADING=EAGER" in text(sync.TIMEOUT)) == told
        assert "CUDA_MODULE_LOADING" not in text(sync.MISMATCH)


def report(reason: int, own: int, seen: int) -> str:
    made = object.__new__(Report)
    made._timeout, made._num_experts = 2.0, 8
    made._words = [1, reason, sync.FLAGS.index("route"), 0, 1, 0, own, seen] + [0] * 24
    text = made.failed()
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (mark(7, "plan", 64), "met rank 1 in ep::plan: the ranks call operators in different orders"),
        (mark(7, "dispatch", 32), "met rank 1, which passed max_tokens 32, not 64"),
        (mark(7, "dispatch", 64, True), "only one of them passed weights (or their gradients)"),
        (
            mark(7, "dispatch", 64, format="e4m3/32/mx"),
            "met rank 1, whose rows travel in format 'e4m3/32/mx', not '': all ranks must pass the same",
        ),
        (mark(7, "dispatch", 64, latency=True), "only one of them passed a residual"),
    ],
)
def test_mismatch(other, said):
    text = report(sync.MISMATCH, mark(7, "dispatch", 64), other)
    assert said in text
    assert "rank 0, in ep::dispatch (operation 7" in text


def test_timeout():
    text = report(sync.TIMEOUT, mark(7, "dispatch", 64), mark(6, "combine", 64))
    assert "waited 2 s for rank 1 (route flag" in text and "that is ep::combine, operation 6" in text
    assert "that is nothing" in report(sync.TIMEOUT, mark(7, "dispatch", 64), 0)


def test_told():
    """The host reads from an alarm what the rank that raised it has waited for."""
    parts = marks.Alarm(sync.TIMEOUT, sync.FLAGS.index("token"), MOST_RANKS_ACROSS - 1, 3, 2**25 - 1)
    word = shift = 0
    for part, bits in zip(parts, marks.ALARM_BITS, strict=True):
        word, shift = word | part << shift, shift + bits
    assert marks.unpack_alarm(word) == parts and shift < 64
    made = object.__new__(Report)
    made._timeout, made._heard = 2.0, lambda epoch: (word, ())
    made._words = [1, sync.PEER_FAILED, 0, 0, 0, 0, mark(7, "combine", 64) | -(1 << 63), 0] + [0] * 56
    assert made.failed_by_peer()
    assert made.failed() == (
        "rank 0, in ep::combine (operation 7 of this communicator), stopped because rank 1023 waited 2 s for rank 3"
        " (token flag, token 33554431)"
    )


def test_told_of_a_rank_that_has_launched_a_part():
    """A rank that has launched a part has left the reason in the bank of that operation."""
    made = object.__new__(Report)
    word = sync.HALF | 3 << 7 | 3 << 7 + marks.RANK_BITS | 9 << 7 + 2 * marks.RANK_BITS
    made._timeout, made._heard = 2.0, lambda epoch: (word, ())
    made._reason = lambda rank, epoch: f"no memory at rank {rank} in {epoch}"
    made._words = [1, sync.PEER_FAILED, 0, 0, 0, 0, mark(10, "combine", 64), 0] + [0] * 56
    said = "rank 0, in ep::combine (operation 10 of this communicator), stopped because rank 3 gave up at operation 9: "
    assert made.failed() == f"{said}no memory at rank 3 in 9"
    made._reason = lambda rank, epoch: ""  # of another NVLink domain
    assert made.failed() == f"{said}its host has given up"
    assert sync.HALF < 1 << marks.ALARM_BITS.reason


def test_told_before_anything_was_begun():
    """The host writes the record that no kernel has."""
    made = object.__new__(Report)
    told = sync.TIMEOUT | 3 << 7 | 1 << 7 + marks.RANK_BITS
    made._timeout, made._heard = 2.0, lambda epoch: (told, ())
    made._words = [0] * 64
    made.fail_by_peer(1, 9)
    assert made.pending() and made.failed_by_peer()
    assert made.failed() == (
        "rank 1, which has not begun operation 9 of this communicator, stopped because rank 3 waited 2 s for rank 1"
        " (hello flag)"
    )


def test_told_of_ranks_that_disagree():
    """The marks of ranks that disagree say on what."""
    made = object.__new__(Report)
    begun = [mark(7, "dispatch", 64), mark(7, "dispatch", 32) | -(1 << 63), mark(7, "dispatch", 64)]
    alike = [mark(6, "combine", 64)] * 3
    for at, marked in ((7, begun), (6, alike)):  # in the operation in which this rank is told, or in the next one
        made._heard = lambda epoch: (sync.MISMATCH | 2 << 7 | 1 << 7 + marks.RANK_BITS, begun if epoch == 7 else alike)
        made._words = [1, sync.PEER_FAILED, 0, 0, 0, 0, marked[0], 0] + [0] * 56
        assert str(made.failed()).endswith(
            "stopped because rank 2 met rank 1, which passed max_tokens 32, not 64: all ranks must pass the same value"
        ), at
    made._heard = lambda epoch: (sync.MISMATCH | 2 << 7 | 1 << 7 + marks.RANK_BITS, alike)
    assert str(made.failed()).endswith("all ranks must call the same operators with the same arguments")


def test_waiting():
    made = object.__new__(Report)
    made._timeout = 600.0
    made._words = [0] * 48 + [1, sync.WAITING, sync.FLAGS.index("hello"), 1, 5, 0, mark(9, "plan", 64), 0] + [0] * 8
    doing = "rank 1, in ep::plan (operation 9 of this communicator)"
    text = f"communicator 'ep0': {doing}, still waits for rank 5 (hello flag); it gives up after 600 s"
    assert made.waiting("ep0") == text and made.waiting("ep0") is None and made.failed() is None


class Backend:
    """A stand-in for the parts of a backend that are watched."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self.failed: list[str] = []
        self.told: list[str] = []

    def waiting(self) -> str | None:
        return self.late.pop() if self.late else None

    def failure(self) -> str | None:
        return self.failed.pop() if self.failed else None

    def on_failure(self, text: str) -> None:
        self.told.append(text)
        raise RuntimeError("a callback may raise")


def test_watch(caplog):
    backend = Backend()
    watch.watch(backend)
    backend.late.append("rank 5 is late")
    backend.failed.append("rank 5 is gone")
    while "a callback may raise" not in caplog.text:  # until the test's own time limit
        time.sleep(0.01)
    watch.unwatch(backend)
    assert backend.told == ["rank 5 is gone"]
    assert "rank 5 is late" in caplog.text and "a callback may raise" in caplog.text


def test_rejection():
    """The host is informed of a rejection once, whether it is seen first or last in an operation, and of the next one
    again."""
    made = object.__new__(Report)
    made.reported = 0
    for epoch in (7, 8):
        own, rejection = mark(epoch, "dispatch", 64), epoch << marks.SHIFT | marks.pack_rejection(3)
        record = [1, sync.REJECTION, 0, 0, 1, 5, own, rejection]
        made._words = [0] * 32 + record + [0] * 8
        assert made.pending()
        assert made.rejection() == (3, epoch, f"ep::dispatch (operation {epoch})", marks.unpack(own)[1])
        assert made.rejection() is None and not made.pending()
        made._words[32:40] = record
        assert made.rejection() is None and not made.pending()


def test_rejection_in_rounds():
    """The rejection of an operation of several epochs is reported once, whichever epoch the host reads."""
    made = object.__new__(Report)
    made.reported = 0
    most = MOST_RANKS_ACROSS - 1
    for first, seen in ((7, (7, 8, 71)), (72, (74, 72))):
        for number, epoch in enumerate(seen):
            own = mark(epoch, "combine", 64)
            rejection = epoch << marks.SHIFT | marks.pack_rejection(most, epoch - first)
            made._words = [0] * 32 + [1, sync.REJECTION, 0, 0, 1, 5, own, rejection] + [0] * 8
            told = (most, epoch, f"ep::combine (operation {epoch})", marks.unpack(own)[1])
            assert made.rejection() == (None if number else told)
