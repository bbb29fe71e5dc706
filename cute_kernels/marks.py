"""Marks: the value of a flag, and of a marked line, says which operation it belongs to.

A mark is epoch << SHIFT | terms. The epoch is the operation's number; the terms are what all ranks must pass alike, so
that a rank that waits finds out why what it waits for never comes. Only equality counts: an epoch that outgrows its
37 bits does no harm.
"""

from typing import NamedTuple

KINDS = (
    "none", "plan", "dispatch", "dispatch_planned", "combine", "dispatch_backward", "combine_backward",
    "combine_gathered", "refused",
)  # fmt: skip
"""Kinds of operation; terms carry the index. `refused` is what a rank does instead of an operation that it refuses; its
terms carry that rank where others have `max_tokens`."""

SHIFT = 27
"""The lowest bit of the epoch in a mark: how many bits the terms have."""
TOKENS = 7
"""The lowest bit of `max_tokens` in a mark."""
_INDEX = {name: index for index, name in enumerate(KINDS)}


class Terms(NamedTuple):
    """What the ranks must agree on. `scalars`: weights, or gradients of weights, travel. `rows`: rows travel. `few`:
    the latency kernels do it. `max_tokens` counts modulo 2**20."""

    kind: str
    scalars: bool
    rows: bool
    few: bool
    max_tokens: int


def pack(kind: str, max_tokens: int, scalars: bool = False, rows: bool = True, few: bool = False) -> int:
    """Terms as the kernels take them."""
    return _INDEX[kind] | scalars << 4 | rows << 5 | few << 6 | (max_tokens & 0xFFFFF) << TOKENS


def unpack(mark: int) -> tuple[int, Terms]:
    """Epoch and terms of a mark."""
    scalars, rows, few = (bool(mark >> i & 1) for i in (4, 5, 6))
    return mark >> SHIFT, Terms(KINDS[mark & 15], scalars, rows, few, mark >> TOKENS & 0xFFFFF)
