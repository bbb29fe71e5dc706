"""The log of the latest operations that each rank keeps in its memory (cute_kernels/heap.py, NOTES)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from datetime import datetime

from cute_kernels import marks
from cute_kernels.heap import BEGUN, GAVE_UP, MET, NOTE_WORDS, NOTES, WAIT_BITS, WAIT_UNIT

from ...records import Operation

LISTED_OPERATIONS = 3
"""Number of operations of a rank that an error lists."""

LISTED_RANKS = 8
"""Number of absent ranks that an error lists."""


def operations(memory: bytes, waited: bytes = b"", hellos: Sequence[bytes] = (), now: int = 0) -> list[Operation]:
    """Return the operations in a rank's log, newest first.

    Args:
        memory: the `NOTES` entries of the log.
        waited: how long the rank waited for each other rank in each of them.
        hellos: both banks of the marks with which ranks have begun operations at that rank.
        now: the rank's current epoch.
    """
    found = []
    words_of = struct.unpack(f"<{len(waited) // 8}Q", waited)
    ranks = len(words_of) // NOTES
    for words in struct.iter_unpack(f"<{NOTE_WORDS}q", memory):
        mark, begun, met = words[0], words[BEGUN], words[MET]
        if mark == 0:
            continue
        number, terms = marks.unpack(mark, now)
        seen = met >= begun > words[GAVE_UP]
        use, place = divmod(number, NOTES)
        waits = tuple(_seconds(word, use) for word in words_of[place * ranks : (place + 1) * ranks])
        found.append(Operation(number, *terms, begun * 1e-9, met * 1e-9 if seen else None, waits))
    found.sort(reverse=True)
    if hellos:
        found[:2] = [one._replace(unseen=_unseen(hellos[one.number % 2], one.number, now)) for one in found[:2]]
    return found


def _unseen(hellos: bytes, number: int, now: int) -> tuple[int, ...]:
    """Return the ranks that have not begun operation `number`: their marks belong to earlier operations."""
    found = struct.unpack(f"<{len(hellos) // 8}q", hellos)
    return tuple(rank for rank, mark in enumerate(found) if marks.epoch_in(mark, now) < number)


def _seconds(word: int, use: int) -> float:
    """Return how long a rank was waited for, in seconds; 0 if the word was written in an earlier `use` of the entry,
    for another operation."""
    return ((word & (1 << WAIT_BITS) - 1) << WAIT_UNIT) * 1e-9 if word >> WAIT_BITS == use else 0.0


def seconds(waits: bytes) -> list[float]:
    """Return a rank's sums of waits (`Problem.counts_waits`), in seconds."""
    return [(word << WAIT_UNIT) * 1e-9 for (word,) in struct.iter_unpack("<q", waits)]


def describe(rank: int, noted: Iterable[Operation], failed: int | None = None) -> str:
    """Return a line that describes the latest operations of a rank, and operation ``failed`` if the log has it: other
    operations may have been launched behind it before the host saw that it had failed."""
    listed = list(noted)
    lines = [_of_one(operation) for operation in listed[:LISTED_OPERATIONS]]
    lines += [f"...; {_of_one(operation)}" for operation in listed[LISTED_OPERATIONS:] if operation.number == failed]
    return f"rank {rank}, last first: {'; '.join(lines) or 'nothing'}"


def _of_one(noted: Operation) -> str:
    if noted.kind == "rejected":
        return f"{noted.number} rejected"
    begun = datetime.fromtimestamp(noted.begun).strftime("%H:%M:%S.%f")
    met = f"has not seen {_ranks(noted.unseen)} in it"
    if noted.met is not None:
        met = f"has seen all ranks in it {1e6 * (noted.met - noted.begun):.0f} us later"
    rows = f"{', token-major' * noted.token_major}{f', format {noted.format}' * bool(noted.format)}"
    return f"{noted.number} ep::{noted.kind} (max_tokens {noted.max_tokens}{rows}) begun at {begun}, {met}"


def _ranks(unseen: Sequence[int]) -> str:
    """Return the absent ranks by number, or "all ranks" if they are unknown."""
    if not unseen:
        return "all ranks"
    if len(unseen) == 1:
        return f"rank {unseen[0]}"
    more = len(unseen) - LISTED_RANKS
    return f"ranks {', '.join(map(str, unseen[:LISTED_RANKS]))}{f' and {more} more' * (more > 0)}"
