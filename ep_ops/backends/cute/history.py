"""What ranks have noted of their last operations (cute_kernels/heap.py, NOTES)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import datetime

from cute_kernels import marks
from cute_kernels.heap import BEGUN, GAVE_UP, MET, NOTE_WORDS, NOTES, WAIT_BITS, WAIT_UNIT

from ...records import Operation

TOLD = 3
"""Of how many operations of a rank an error tells."""


def operations(memory: bytes, waited: bytes = b"") -> list[Operation]:
    """Of a rank's notes (`NOTES` of them) and of what it has waited, the last one first."""
    found = []
    words_of = struct.unpack(f"<{len(waited) // 8}q", waited)
    ranks = len(words_of) // NOTES
    for words in struct.iter_unpack(f"<{NOTE_WORDS}q", memory):
        mark, begun, met = words[0], words[BEGUN], words[MET]
        if mark == 0:
            continue
        number, terms = marks.unpack(mark)
        seen = met >= begun > words[GAVE_UP]
        use, place = divmod(number, NOTES)
        waits = tuple(_seconds(word, use) for word in words_of[place * ranks : (place + 1) * ranks])
        found.append(Operation(number, *terms, begun * 1e-9, met * 1e-9 if seen else None, waits))
    return sorted(found, reverse=True)


def _seconds(word: int, use: int) -> float:
    """Of a word of the note's `use`; an older one tells of an operation that is over."""
    return ((word & (1 << WAIT_BITS) - 1) << WAIT_UNIT) * 1e-9 if word >> WAIT_BITS == use else 0.0


def told(rank: int, noted: Iterable[Operation]) -> str:
    """A line about a rank, for people."""
    lines = [_of_one(operation) for operation in list(noted)[:TOLD]]
    return f"rank {rank}, last first: {'; '.join(lines) or 'nothing'}"


def _of_one(noted: Operation) -> str:
    if noted.kind == "refused":
        return f"{noted.number} refused"
    begun = datetime.fromtimestamp(noted.begun).strftime("%H:%M:%S.%f")
    met = "has not seen all ranks in it"
    if noted.met is not None:
        met = f"has seen all ranks in it {1e6 * (noted.met - noted.begun):.0f} us later"
    rows = f", format {noted.format}" if noted.format else ""
    return f"{noted.number} ep::{noted.kind} (max_tokens {noted.max_tokens}{rows}) begun at {begun}, {met}"
