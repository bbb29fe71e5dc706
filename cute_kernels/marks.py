"""Marks: the value of a flag, or of a marked line, which identifies the operation that it belongs to.

A mark is `base_of(epoch) ^ terms`. From the lowest bit on, its 64 bits are:

    7   highest bits of max_tokens  ┐ (of a rejected operation: its number among those of the call)
    4   kind of the operation       │
    3   scalars, rows, latency      │ terms
    3   format                      │
    10  lowest bits of max_tokens   ┘ (of a rejected operation: the rank that rejects)
    37  lowest bits of the epoch; the highest one is inverted after the rank has given up

The epoch is the operation's number. Its next bits are combined with the terms by exclusive or, so that marks of the
same terms never repeat. The terms are what all ranks must pass alike; they tell a waiting rank why the flag that it
waits for never arrives. Marks are only compared for equality. No wait accepts what a rank sends after it has given up:
its marks are those of an operation 2**36 operations away.
"""

from typing import Any, NamedTuple

from .formats import FORMATS

KINDS = (
    "none", "plan", "dispatch", "dispatch_planned", "combine", "dispatch_backward", "combine_backward",
    "combine_gathered", "rejected",
)  # fmt: skip
"""Kinds of operation. Terms contain the index, followed by the indices of `OF_TOKENS`. The last kind stands for an
operation that a rank rejects; its terms contain the rank in place of `max_tokens` and, above it, the number of the
operation among those of the call."""
OF_TOKENS = ("dispatch", "plan", "dispatch_planned", "dispatch_backward")
"""Kinds that have a second index, for token-major rows."""

SHIFT = 27
"""The lowest bit of the epoch in a mark: how many bits the terms have."""
GIVEN_UP = 63
"""The bit of a mark that is inverted after its rank has given up."""
NUMBER, NUMBER_BITS = 7, 20
"""The lowest bit of a number in place of terms, and how many bits it has."""
KIND, KIND_BITS = 7, 4
"""The lowest bit of the kind's index, and how many bits it has."""
FLAGS = 11
"""The lowest one of the bits of scalars, rows and latency."""
FORMAT = 14
"""The lowest bit of the format's index in a mark."""
TOKENS, LOW_TOKENS = 17, 10
"""The lowest bit of the lowest bits of `max_tokens`, and how many these are."""
MOST_TOKENS = 1 << LOW_TOKENS + KIND
"""The modulus of `max_tokens`."""
RANK_BITS = 10
"""Number of bits of a rank in marks and alarms."""
_NUMBERED = [*((kind, False) for kind in KINDS), *((kind, True) for kind in OF_TOKENS)]
_INDEX = {kind: index for index, kind in enumerate(_NUMBERED)}


def base_of(epoch: Any) -> Any:
    """Return the mark of an epoch without terms: the epoch, rotated by SHIFT bits."""
    return (epoch << SHIFT) | ((epoch >> 64 - SHIFT) & ((1 << SHIFT) - 1))


def make(epoch: int, terms: int) -> int:
    """Return the mark of an operation as a signed number. (For the host.)"""
    mark = (base_of(epoch) ^ terms) & (1 << 64) - 1
    return mark - (mark >> GIVEN_UP << 64)


def same_operation(word: Any, mark: Any) -> Any:
    """Return whether a word that is set in every operation has the epoch of a mark, whatever its terms."""
    return (((word ^ mark) >> SHIFT) == 0) & (word != 0)


def with_number(base: Any, number: Any) -> Any:
    """Return the word of an operation that contains a number in place of terms."""
    return base ^ (number << NUMBER)


def has_number(word: Any, base: Any) -> Any:
    """Return whether a word is one of that operation which contains a number in place of terms."""
    return beside_number(word ^ base) == 0


def beside_number(word: Any) -> Any:
    """Return a word without the bits that may contain a number in place of terms."""
    return word & ~((1 << NUMBER_BITS) - 1 << NUMBER)


def number_in(word: Any, base: Any) -> Any:
    """Return the number that a word of that operation contains in place of terms."""
    return ((word ^ base) >> NUMBER) & ((1 << NUMBER_BITS) - 1)


def kind_in(terms: Any) -> Any:
    """Return the index of the kind of operation in terms."""
    return (terms >> KIND) & ((1 << KIND_BITS) - 1)


def epoch_in(mark: int, now: int = 0) -> int:
    """Return the epoch of a mark, even if its rank has given up. `now`: an epoch less than 2**35 operations before or
    after it. (For the host.)"""
    turn = 1 << GIVEN_UP - SHIFT
    epoch = now + ((mark >> SHIFT) - now + turn // 2) % turn - turn // 2
    return epoch if epoch >= 0 else epoch + turn


class Terms(NamedTuple):
    """Properties of an operation that the ranks must agree on. `scalars`: weights, or gradients of weights, are sent.
    `rows`: rows are sent. `latency`: the latency kernels run it. `max_tokens` is modulo 2**17. `format`: format in
    which rows are sent. `token_major`: rows are token-major, and the kind is one of `OF_TOKENS`."""

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
    high, low = divmod(max_tokens % MOST_TOKENS, 1 << LOW_TOKENS)
    flags = scalars << FLAGS | rows << FLAGS + 1 | latency << FLAGS + 2 | FORMATS.index(format) << FORMAT
    return high | _INDEX[kind, token_major] << KIND | flags | low << TOKENS


def pack_rejection(rank: int, turn: int = 0) -> int:
    """Return the terms of a rank that rejects an operation; `turn` is the number of the operation among those of the
    call."""
    return pack("rejected", turn << RANK_BITS | rank)


def unpack_rejection(max_tokens: int) -> tuple[int, int]:
    """Return rank and turn, which the terms of a rejection contain in place of `max_tokens`."""
    return max_tokens & (1 << RANK_BITS) - 1, max_tokens >> RANK_BITS


def unpack(mark: int, now: int = 0) -> tuple[int, Terms]:
    """Return epoch (see `epoch_in`) and terms of a mark, even if its highest bit is set. Invalid kinds and formats, as
    in a word that contains a number in place of terms, are returned as none."""
    epoch = epoch_in(mark, now)
    terms = (mark ^ base_of(epoch)) & (1 << SHIFT) - 1
    scalars, rows, latency = (bool(terms >> FLAGS + i & 1) for i in range(3))
    number, form = kind_in(terms), terms >> FORMAT & 7
    kind, token_major = _NUMBERED[number if number < len(_NUMBERED) else 0]
    format = FORMATS[form if form < len(FORMATS) else 0]
    max_tokens = (terms & (1 << KIND) - 1) << LOW_TOKENS | terms >> TOKENS
    return epoch, Terms(kind, scalars, rows, latency, max_tokens, format, token_major)


class Alarm(NamedTuple):
    """The message of a rank that gives up to all others, in one word."""

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
