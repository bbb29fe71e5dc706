"""The host reads the notes that ranks make of their last operations."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import marks
from cute_kernels.heap import BEGUN, EPOCH, GAVE_UP, MET, NOTE_WORDS, NOTES, WAIT_BITS, WAIT_UNIT, Heap, Problem
from cute_kernels.sync import FAILED_BY_PEER, FLAGS, MISMATCH, PEER_FAILED, TIMEOUT
from ep_ops.backends.cute import history, watch
from ep_ops.backends.cute.failures import Failures
from ep_ops.backends.cute.report import Report


def noted(*operations: tuple[int, str, int, int, int]) -> bytes:
    """Number, kind, and when it was begun, had met all and gave up."""
    words = [0] * NOTES * NOTE_WORDS
    for number, kind, begun, met, gave_up in operations:
        at = number % NOTES * NOTE_WORDS
        words[at] = number << marks.SHIFT | marks.pack(kind, 64, scalars=kind == "dispatch", latency=True)
        words[at + BEGUN], words[at + MET], words[at + GAVE_UP] = begun, met, gave_up
    return struct.pack(f"<{len(words)}q", *words)


def test_the_last_comes_first() -> None:
    second = 10**9
    memory = noted(
        (31, "dispatch", 5 * second, 6 * second, 0),
        (32, "combine", 7 * second, 5 * second, 0),  # that time is the one of operation 16
        (17, "plan", second, 2 * second, 0),
        (33, "dispatch", 8 * second, 9 * second, 9 * second),
    )
    found = history.operations(memory)
    assert [(one.number, one.kind, one.begun, one.met) for one in found] == [
        (33, "dispatch", 8.0, None), (32, "combine", 7.0, None), (31, "dispatch", 5.0, 6.0)
    ]  # fmt: skip
    assert (
        found[0].scalars and found[0].latency and found[0].rows and found[0].max_tokens == 64 and not found[1].scalars
    )
    assert history.operations(noted()) == [] and found[0].waits == ()


def test_waits_of_an_operation_that_is_over_do_not_count() -> None:
    """Waits that operation 18 of 3 ranks has left do not count for operation 34, which uses the same place."""
    words = [0] * 3 * NOTES
    words[6:9] = [1 << WAIT_BITS | 7000, 2 << WAIT_BITS | 5, 2 << WAIT_BITS]  # in the place of 2, 18, 34
    words[3] = 2 << WAIT_BITS | (1 << WAIT_BITS) - 1
    found = history.operations(
        noted((34, "dispatch", 9, 0, 0), (33, "plan", 8, 0, 0)), struct.pack(f"<{len(words)}q", *words)
    )
    assert [one.waits for one in found] == [
        (0.0, 5e-9 * (1 << WAIT_UNIT), 0.0),
        (pytest.approx(137.4, abs=0.1), 0.0, 0.0),
    ]


@pytest.mark.parametrize("turn", [2**35, 2**36, 2**36 + 2**35, 2**37, 2**40])
def test_operations_of_any_epoch(turn: int) -> None:
    """Around each turn of what marks contain of an epoch: numbers, their order, waits, and who has not begun."""
    words = [0] * NOTES * NOTE_WORDS
    waited = [0] * 2 * NOTES
    for number in range(turn - 3, turn + 4):
        place, use = number % NOTES, number // NOTES
        words[place * NOTE_WORDS] = marks.make(number, marks.pack("combine", 64))
        words[place * NOTE_WORDS + BEGUN] = words[place * NOTE_WORDS + MET] = 10
        waited[2 * place + 1] = use << WAIT_BITS | 3
    hellos = [b"", b""]
    for last in (turn + 3, turn + 2):
        begun_by = [marks.make(at, marks.pack("combine", 64)) for at in (last, last - 2)]
        hellos[last % 2] = struct.pack("<2q", *begun_by)
    packed = struct.pack(f"<{len(words)}q", *words), struct.pack(f"<{len(waited)}Q", *waited)
    found = history.operations(*packed, hellos, turn + 4)
    assert [one.number for one in found] == list(range(turn + 3, turn - 4, -1))
    assert all(one.waits == (0.0, pytest.approx(3e-9 * (1 << WAIT_UNIT))) for one in found)
    assert [one.unseen for one in found[:2]] == [(1,), (1,)]


def test_what_people_read() -> None:
    line = history.describe(
        3, history.operations(noted((5, "combine", 10**9, 10**9 + 12345, 0), (6, "plan", 2 * 10**9, 0, 0)))
    )
    assert line.startswith("rank 3, last first: 6 ep::plan (max_tokens 64) begun at ")
    assert ", has not seen all ranks in it; 5 ep::combine (max_tokens 64) begun at " in line
    assert line.endswith(", has seen all ranks in it 12 us later")
    assert history.describe(0, []) == "rank 0, last first: nothing"


def test_the_operation_that_failed_is_listed() -> None:
    """The line lists it once, as far back as the log reaches, although others were launched behind it; not if the rank
    has not begun it."""
    second = 10**9
    found = history.operations(noted(*((number, "dispatch", number * second, 0, 0) for number in range(73, 89))))
    for failed, listed in (
        (88, [88, 87, 86]), (86, [88, 87, 86]), (85, [88, 87, 86, 85]), (73, [88, 87, 86, 73]), (72, [88, 87, 86]),
        (89, [88, 87, 86]), (None, [88, 87, 86]),
    ):  # fmt: skip
        line = history.describe(3, found, failed)
        parts = line.removeprefix("rank 3, last first: ").replace("...; ", "").split("; ")
        assert [int(part.split(" ep::dispatch ")[0]) for part in parts] == listed, line
        assert line.count("...; ") == len(listed) - 3, line


@pytest.mark.parametrize("reason", [TIMEOUT, MISMATCH, PEER_FAILED])
def test_a_failure_lists_its_operation_on_all_ranks_concerned(reason: int) -> None:
    """The number of the operation comes from the record of the failed wait, for whatever reason it failed. Rank 2 has
    not begun it, and rank 1 raised the alarm."""
    made: Any = object.__new__(Failures)
    made._config, made.broken = SimpleNamespace(name="x", timeout=8.0), None
    made.report = report = object.__new__(Report)
    alarm, shift = 0, 0
    for part, bits in zip((TIMEOUT, FLAGS.index("route"), 1, 2, 0), marks.ALARM_BITS, strict=True):
        alarm, shift = alarm | part << shift, shift + bits
    report._timeout, report._heard, report._now = 8.0, lambda epoch: (alarm, (0, 0, 0)), lambda: 89
    mark = marks.make(73, marks.pack("dispatch", 64))
    report._words = [1, reason, FLAGS.index("route"), 0, 2, 0, mark, 0] + [0] * 56  # type: ignore[assignment]
    made.last_operations = lambda rank: history.operations(
        noted(*((number, "dispatch", number * 10**9, 0, 0) for number in range(73 + (rank == 2), 88)))
    )
    lines = made._failed().split("\n")[1:]
    assert [line[:7] for line in lines] == [
        f"rank {rank}," for rank in ((0, 1, 2) if reason == PEER_FAILED else (0, 2))
    ]
    assert ["...; 73 ep::dispatch" in line for line in lines] == [line[:7] != "rank 2," for line in lines]


def begun(*numbers: int) -> bytes:
    """The marks with which ranks have begun operations of a bank; with 0, none yet."""
    return struct.pack(f"<{len(numbers)}q", *(number << marks.SHIFT | marks.pack("plan", 8) for number in numbers))


def test_counts_of_operations_and_waits() -> None:
    """The host reads the epoch and the sums of waits from where kernels write them."""
    heap = Heap(Problem(3, (2, 2, 2), 2, 64, "bf16", 8, counts_waits=True))
    memory = bytearray(heap.nbytes)
    struct.pack_into("<q", memory, 8 * EPOCH, 2**40 + 8)
    struct.pack_into("<3q", memory, heap.offset["waits"], 5, 3, 2**40 + 1)
    made: Any = object.__new__(Failures)
    made._heap, made._rank = heap, 1
    made._memory = SimpleNamespace(read=lambda rank, first, nbytes: bytes(memory[first : first + nbytes]) * (rank == 1))
    assert made.operations() == 2**40 + 7
    assert made.waited() == pytest.approx([5 * 1.024e-6, 0.0, (2**40 + 1) * 1.024e-6], rel=1e-12)


def test_ranks_that_have_not_begun_are_named() -> None:
    """Ranks that have not begun the last two operations are named, whose marks lie in one bank each; of older ones
    nothing is known."""
    memory = noted(*((number, "dispatch", number * 10**9, 0, 0) for number in (4, 5, 6)))
    found = history.operations(memory, b"", (begun(6, 4, 6, 0), begun(5, 7, 3, 5)))
    assert [(one.number, one.unseen) for one in found] == [(6, (1, 3)), (5, (2,)), (4, ())]
    ends = [line.split(", ")[-1] for line in history.describe(0, found[1:]).split("; ")]
    assert ends == ["has not seen rank 2 in it", "has not seen all ranks in it"]
    assert history.describe(0, found).split("; ")[0].endswith(", has not seen ranks 1, 3 in it")
    many = history.operations(memory, b"", (begun(*[6] * 3, *[4] * 11), begun()))
    line = history.describe(0, many).split("; ")[0]
    assert line.endswith(", has not seen ranks 3, 4, 5, 6, 7, 8, 9, 10 and 3 more in it")


def test_a_failure_is_told_though_notes_cannot_be_read() -> None:
    made: Any = object.__new__(Failures)
    made._config = SimpleNamespace(name="x")
    made.report = SimpleNamespace(
        failed=lambda: "waited 2 s for rank 1", concerned=lambda: (0, 1), timed_out=lambda: False, failed_in=lambda: 5
    )
    made.last_operations = lambda rank: history.operations(noted((rank + 5, "combine", 10**9, 0, 0)))
    first, *lines = made._failed().split("\n")
    assert first == "communicator 'x' failed: waited 2 s for rank 1; destroy it and make a new one"
    assert [line[:24] for line in lines] == ["rank 0, last first: 5 ep", "rank 1, last first: 6 ep"]

    def unmapped(rank: int) -> Any:
        if rank == 0:
            raise RuntimeError("the symmetric memory of rank 0 is not mapped")
        return history.operations(noted((rank + 5, "combine", 10**9, 0, 0)))

    made.last_operations = unmapped
    assert [line[:24] for line in made._failed().split("\n")] == [first[:24], "rank 1, last first: 6 ep"]

    def lost(rank: int) -> Any:
        raise RuntimeError("the device is lost")

    made.last_operations = lost
    assert made._failed() == first


def test_a_rank_that_waits_in_another_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that call the operators of two communicators in different orders wait for each other: both are named."""
    made: list[Any] = [object.__new__(Failures) for _ in range(3)]
    for one, name, members in zip(made, "abc", ([4, 6], [6, 5, 4], [5]), strict=True):
        one._config, one.members = SimpleNamespace(name=name, timeout=8.0), members
        one.last_operations = lambda rank: []
    one, other, _ = made
    one.report = SimpleNamespace(
        failed=lambda: "waited", concerned=lambda: (0, 1), timed_out=lambda: False, failed_in=lambda: 5
    )
    monkeypatch.setattr(watch, "_watched", set(made))
    second, asked = 10**9, []

    def noted_there(met: int) -> Any:
        def read(rank: int) -> Any:
            asked.append(rank)
            return history.operations(noted((5, "combine", 20 * second, met, 0))) if rank == 0 else []

        return read

    line = "\nrank 1 has waited in communicator 'b', operation 5 ep::combine: all must call the operators"
    for met, said in ((0, True), (27 * second, True), (21 * second, False)):
        other.last_operations = noted_there(met)
        assert (line in one._failed()) == said and one._failed().count("'b'") == said, met
    assert set(asked) == {0, 2}


@pytest.mark.parametrize(
    ("across", "failed", "alarm", "tells"),
    [
        (False, FAILED_BY_PEER, 5, True),
        (False, 0, 0, False),
        (True, FAILED_BY_PEER, 5, True),
        (True, 0, 5, True),
        (True, 0, 0, False),
    ],
)
def test_whoever_runs_nothing_hears_of_a_failure(
    across: bool, failed: int, alarm: int, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that runs nothing learns of a failure, by the alarm alone where it came over a wire, on which two words
    may come in any order."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    told: list[tuple[int, int]] = []
    made: Any = object.__new__(Failures)
    made._across, made._rank = across, 3
    made.report = SimpleNamespace(pending=lambda: False, fail_by_peer=lambda rank, epoch: told.append((rank, epoch)))
    made._read = lambda first, nbytes: struct.pack("<2q", 17, failed)
    made._heard = lambda epoch: (alarm, ())
    made.listen()
    assert told == ([(3, 17)] if tells else [])
