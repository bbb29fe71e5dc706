"""Marks: the value of a flag, and of a marked line, says which operation it belongs to.

A mark is epoch << SHIFT | terms. The epoch is the operation's number; the terms are what all ranks must pass alike, so
that a rank that waits finds out why what it waits for never comes. Only equality counts. The highest bit is set in
what a rank sends that has given up: nobody waits for such a mark, so nobody accepts its data as valid.
"""

from typing import Any, NamedTuple

from .formats import FORMATS

KINDS = (
    "none", "plan", "dispatch", "dispatch_planned", "combine", "dispatch_backward", "combine_backward",
    "combine_gathered", "refused",
)  # fmt: skip
"""Kinds of operation; terms carry the index, and behind these the index in `OF_TOKENS`. `refused` is what a rank does
instead of an operation that it refuses; its terms carry that rank where others have `max_tokens`, and above it, of an
operator that takes several operations, which of them it is."""
OF_TOKENS = ("dispatch", "plan", "dispatch_planned", "dispatch_backward")
"""Kinds that have a number of their own for token-major rows."""

SHIFT = 27
"""The lowest bit of the epoch in a mark: how many bits the terms have."""
GIVEN_UP = 63
"""The bit of a mark whose rank has given up."""
KIND_BITS = 4
"""Bits of the kind's index, the lowest ones of a mark."""
FORMAT = 7
"""The lowest bit of the format's index in a mark."""
TOKENS = 10
"""The lowest bit of `max_tokens` in a mark."""
MOST_TOKENS = 1 << SHIFT - TOKENS
"""What `max_tokens` counts modulo."""
RANK_BITS = 10
"""Bits of a rank in marks and alarms."""
_NUMBERED = [*((kind, False) for kind in KINDS), *((kind, True) for kind in OF_TOKENS)]
_INDEX = {kind: index for index, kind in enumerate(_NUMBERED)}


def same_operation(word: Any, mark: Any) -> Any:
    """Whether two words carry the same epoch, whatever their terms."""
    return (word >> SHIFT) == (mark >> SHIFT)


def with_number(mark: Any, number: Any) -> Any:
    """The word of the mark's operation that carries a number in place of terms."""
    return ((mark >> SHIFT) << SHIFT) | number


def epoch_in(mark: int) -> int:
    """The epoch of a mark, also of one whose rank has given up. (For the host.)"""
    return (mark & (1 << GIVEN_UP) - 1) >> SHIFT


def number_in(word: Any) -> Any:
    """The number that a word carries in place of terms."""
    return word & ((1 << SHIFT) - 1)


def kind_in(mark: Any) -> Any:
    """The index of the mark's kind of operation."""
    return mark & ((1 << KIND_BITS) - 1)


class Terms(NamedTuple):
    """What the ranks must agree on. `scalars`: weights, or gradients of weights, travel. `rows`: rows travel.
    `latency`: the latency kernels do it. `max_tokens` counts modulo 2**17. `format`: what rows travel as.
    `token_major`: rows are, and the kind is one of `OF_TOKENS`."""

    kind: str
    scalars: bool
    rows: bool
    latency: bool
    max_tokens: int
    format: str = ""
    token_major: bool = False


def pack(
    kind: str, max_tokens: int, scalars: bool = False, rows: bool = True, latency: bool = False, format: str = "",
    token_major: bool = False,
) -> int:  # fmt: skip
    """Terms as the kernels take them."""
    flags = scalars << 4 | rows << 5 | latency << 6 | FORMATS.index(format) << FORMAT
    return _INDEX[kind, token_major] | flags | max_tokens % MOST_TOKENS << TOKENS


def pack_refusal(rank: int, turn: int = 0) -> int:
    """Terms of a rank that refuses; `turn`: of an operator that takes several operations, which of them it is."""
    return pack("refused", turn << RANK_BITS | rank)


def unpack_refusal(terms: Terms) -> tuple[int, int]:
    """Rank and turn."""
    return terms.max_tokens & (1 << RANK_BITS) - 1, terms.max_tokens >> RANK_BITS


def unpack(mark: int) -> tuple[int, Terms]:
    """Epoch and terms of a mark, also of one that has the highest bit set; what is no kind or format, as in a word that
    carries a number in the place of terms, counts as none."""
    scalars, rows, latency = (bool(mark >> i & 1) for i in (4, 5, 6))
    number, form = kind_in(mark), mark >> FORMAT & 7
    kind, token_major = _NUMBERED[number if number < len(_NUMBERED) else 0]
    format, max_tokens = FORMATS[form if form < len(FORMATS) else 0], mark >> TOKENS & MOST_TOKENS - 1
    return epoch_in(mark), Terms(kind, scalars, rows, latency, max_tokens, format, token_major)


class Alarm(NamedTuple):
    """The word with which a rank that gives up raises the alarm at all others."""

    reason: int  # as in its report
    flag: int  # kind of what it waited for
    rank: int  # that one
    peer: int  # whom it waited for
    detail: int  # modulo 2**25: the token, of flags that have one


ALARM_BITS = Alarm(reason=3, flag=4, rank=RANK_BITS, peer=RANK_BITS, detail=25)
"""How wide each part is, from the lowest bit on."""


def unpack_alarm(word: int) -> Alarm:
    parts = []
    for bits in ALARM_BITS:
        parts.append(word & (1 << bits) - 1)
        word >>= bits
    return Alarm(*parts)
