"""Speeds of a GPU, of its links and of one of its multiprocessors (SMs). Two things follow from them: the times that
`ep-ops bench model` prints, and the numbers of SMs that operations take (sm_model.py).

Time is a constant for each operation plus its bytes at the speed of the bottleneck: of the link, or of the memory. The
numbers were measured on H200s (18 links of NVLink 4, 132 SMs); H100s have the same links. benchmarks/scale_model.py
derives those of `H200` from recorded runs and compares the times with measured ones.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Bytes per second, and constants in µs by operation."""

    name: str
    pull: float  # over NVLink, in one direction: fetched
    push: float  # stored
    memory: float  # read and written
    flag: float  # µs until a flag that was set at a peer is seen there
    constants: dict[str, float]
    source: str  # where these numbers come from

    def us(self, op: str, crossing: float, passing: float) -> float:
        """Return the µs that bytes take over NVLink and through memory."""
        link = self.push if op == "combine" else self.pull
        return 1e6 * max(crossing / link, passing / self.memory)


MEMORY = 3.7e12
"""Bytes per second that an H200 reads and writes in its memory while it copies x to staging."""

H200 = Gpu(
    "NVIDIA H200",
    pull=328.9e9,
    push=352.91e9,
    memory=MEMORY,
    flag=0.7366880018264055,
    constants={
        "dispatch": 26.184195804195767,
        "dispatch_planned": 13.189195804195819,
        "combine": 30.947018078263582,
        "combine_gathered": 4.8041958041957855,
        "few dispatch": 5.375200892500407,
        "few combine": 3.616245971982428,
    },
    source="measured on 4 x NVIDIA H200: fetching 329 GB/s, storing 353 GB/s over NVLink, memory 3.7 TB/s, a flag"
    " 0.74 µs",
)
"""What `measured_gpu` of benchmarks/scale_model.py derives from the recorded runs."""


@dataclasses.dataclass(frozen=True)
class Sm:
    """Work of one SM, waits included, where the SMs of an operation just keep up with the link. Bytes per second, and
    seconds."""

    copies: float = 66.7e9
    """Bytes that bulk copies of a dispatch move in and out."""
    gathers: float = 56.7e9
    """Bytes that a gathering combine fetches and writes."""
    under_way: float = 2.2e6
    """Bytes of loads from peers that all SMs of a dispatch together must have in flight to saturate the link."""
    adds: float = 135e9
    """Bytes of rows that a combine adds, if a slice took no time of its own."""
    add_slice: float = 31.4e-9
    """Seconds for each slice of a row that a combine adds."""
    add_item: float = 26e-9
    """Seconds to check whether a token has rows of a rank."""
    sums: float = 1.204
    """How much longer SMs take that sum what has arrived than SMs that push, because they wait for flags."""
    encodes: float = 0.9
    """Cost of quantizing a sum that a combine sends in a format, relative to adding a row."""
    decodes: float = 1.5
    """Cost of adding such a sum at its owner, relative to adding a row. Both follow from numbers of instructions."""
    scale_slice: float = 135e-9
    """Seconds for a slice in the backward of a weighted combine, which processes a row for each expert and half a row
    for each rank reached."""


SM = Sm()


def passing_rows(op: str, copies: float, reached: float, expanded: float, tokens: float) -> float:
    """Return the rows that a rank reads and writes in its memory: it receives `copies`, and `reached` copies of its
    tokens are sent."""
    if op == "combine":
        return expanded + copies + reached + tokens
    if op == "combine_gathered":
        return reached + tokens
    return 2 * tokens + copies + expanded


def _kept_up(op: str, link: float) -> float:
    """Return the bytes per second over the link of a whole operation, its constant included: with 4096 tokens of 14 KiB
    on each of 4 ranks, which choose 8 of 256 experts."""
    reached = 4 * (1 - math.comb(192, 8) / math.comb(256, 8))
    crossing = 4096 * 14336 * reached * 3 / 4
    return crossing / (crossing / link + H200.constants[op] / 1e6)


PULL, PUSH = _kept_up("dispatch_planned", H200.pull), _kept_up("combine", H200.push)
"""Bytes per second that the SMs of an operation have to keep up with when they fetch, and when they push."""
