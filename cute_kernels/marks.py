"""Marks: the value of a flag, or of a marked line, which identifies the operation that it belongs to.

A mark is epoch << SHIFT | terms. The epoch is the operation's number. The terms are what all ranks must pass alike;
they tell a waiting rank why the flag that it waits for never arrives. Marks are only compared for equality. The highest
bit is set in everything that a rank sends after it has given up. No wait accepts such a mark, so no peer accepts data
of that rank as valid.
"""

from typing import Any, NamedTuple

from .formats import FORMATS

KINDS = (
    "none", "plan", "dispatch", "dispatch_planned", "combine", "dispatch_backward", "combine_backward",
    "combine_gathered", "refused",
)  # fmt: skip
"""Kinds of operation. Terms contain the index, followed by the indices of `OF_TOKENS`. The last kind stands for an
operation that a rank rejects; its terms contain the rank in place of `max_tokens` and, above it, the number of the
operation among those of the call."""
OF_TOKENS = ("dispatch", "plan", "dispatch_planned", "dispatch_backward")
"""Kinds that have a second index, for token-major rows."""

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
"""The modulus of `max_tokens`."""
RANK_BITS = 10
"""Number of bits of a rank in marks and alarms."""
_NUMBERED = [*((kind, False) for kind in KINDS), *((kind, True) for kind in OF_TOKENS)]
_INDEX = {kind: index for index, kind in enumerate(_NUMBERED)}


def same_operation(word: Any, mark: Any) -> Any:
    """Return whether two words have the same epoch, whatever their terms."""
    return (word >> SHIFT) == (mark >> SHIFT)


def with_number(mark: Any, number: Any) -> Any:
    """Return the word of the mark's operation that contains a number in place of terms."""
    return ((mark >> SHIFT) << SHIFT) | number


def epoch_in(mark: int) -> int:
    """Return the epoch of a mark, even if its rank has given up. (For the host.)"""
    return (mark & (1 << GIVEN_UP) - 1) >> SHIFT


def number_in(word: Any) -> Any:
    """Return the number that a word contains in place of terms."""
    return word & ((1 << SHIFT) - 1)


def kind_in(mark: Any) -> Any:
    """Return the index of the mark's kind of operation."""
    return mark & ((1 << KIND_BITS) - 1)


class Terms(NamedTuple):
    """What the ranks must agree on. `scalars`: weights, or gradients of weights, are sent. `rows`: rows are sent.
    `latency`: the latency kernels run it. `max_tokens` is modulo 2**17. `format`: format in which rows are sent.
    `token_major`: rows are token-major, and the kind is one of `OF_TOKENS`."""

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
    """Return terms as kernels take them."""
    flags = scalars << 4 | rows << 5 | latency << 6 | FORMATS.index(format) << FORMAT
    return _INDEX[kind, token_major] | flags | max_tokens % MOST_TOKENS << TOKENS


def pack_refusal(rank: int, turn: int = 0) -> int:
    """Return the terms of a rank that rejects an operation; `turn` is the number of the operation among those of the
    call."""
    return pack("refused", turn << RANK_BITS | rank)


def unpack_refusal(terms: Terms) -> tuple[int, int]:
    """Return rank and turn."""
    return terms.max_tokens & (1 << RANK_BITS) - 1, terms.max_tokens >> RANK_BITS


def unpack(mark: int) -> tuple[int, Terms]:
    """Return epoch and terms of a mark, even if its highest bit is set. Invalid kinds and formats, as in a word that
    contains a number in place of terms, are returned as none."""
    scalars, rows, latency = (bool(mark >> i & 1) for i in (4, 5, 6))
    number, form = kind_in(mark), mark >> FORMAT & 7
    kind, token_major = _NUMBERED[number if number < len(_NUMBERED) else 0]
    format, max_tokens = FORMATS[form if form < len(FORMATS) else 0], mark >> TOKENS & MOST_TOKENS - 1
    return epoch_in(mark), Terms(kind, scalars, rows, latency, max_tokens, format, token_major)


class Alarm(NamedTuple):
    """What a rank that gives up sends to all others, in one word."""

    reason: int  # as in its report
    flag: int  # kind of what it waited for
    rank: int  # that one
    peer: int  # whom it waited for
    detail: int  # modulo 2**25: the token, of flags that have one


ALARM_BITS = Alarm(reason=3, flag=4, rank=RANK_BITS, peer=RANK_BITS, detail=25)
"""Number of bits of each part, from the lowest bit on."""


def unpack_alarm(word: int) -> Alarm:
    parts = []
    for bits in ALARM_BITS:
        parts.append(word & (1 << bits) - 1)
        word >>= bits
    return Alarm(*parts)
