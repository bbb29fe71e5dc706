"""Checks of operations whose epochs are larger than what a mark contains of them: sums and rows, rejections, and a rank
that dies, around each turn of the bits."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import copies, deaths, latency, latency_tokens, throughput
from .routes import Shape

FIRST = (2**36 - 2, 2**36 + 2**35 - 2, 2**37 - 2, 2**44 + 2**36 - 2)
"""The epoch of the first operation. They are so far apart that marks of one would be those of another if they contained
36 bits of the epoch, or fewer."""


def steps_at(shape: Shape, draw: random.Random, make: throughput.Make = throughput.Steps) -> throughput.Steps:
    on = make(shape, draw)
    on.ranks.begin_at(draw.choice(FIRST))
    return on


def tokens_at(shape: Shape, draw: random.Random) -> throughput.Steps:
    return steps_at(shape, draw, copies.Steps)


def pair_of_epochs(draw: random.Random) -> list[int]:
    """Two of them, in order."""
    first = draw.randrange(len(FIRST) - 1)
    return [*FIRST[first : first + 2]]


def many(shape: Shape, draw: random.Random) -> None:
    """Throughput operations along a new route and the same again."""
    on = throughput.Steps(shape, draw)
    for first in pair_of_epochs(draw):
        on.ranks.begin_at(first)
        on.inputs()
        on.dispatch(known=False)
        on.dispatch(known=True)
        on.combine(rows=True, weighted=True, scalars=False, residual=False)


def few(both: latency.Pair, draw: random.Random) -> None:
    """Latency operations, whole or split."""
    pair_of = latency_tokens.pair_of if isinstance(both, latency_tokens.Pair) else latency.pair_of
    for first in pair_of_epochs(draw):
        both.ranks.begin_at(first)
        pair_of(both, 2, draw.random() < 0.3, True)


ACROSS = Shape((2, 2), 2, 3, 64, domains=((0,), (1,)), wire="nvlink")

CHECKS: dict[str, Callable[[random.Random], None]] = {
    "epochs_latency": lambda draw: few(latency.Pair(Shape((2, 2), 2, 3, 64), draw, (1, 1, 3), (1, 1, 2)), draw),
    "epochs_latency_tokens": lambda draw: few(
        latency_tokens.Pair(Shape((2, 2), 2, 3, 64), draw, (1, 1, 3), (1, 1, 2)), draw
    ),
    "epochs_latency_across": lambda draw: few(latency.Pair(ACROSS, draw, (1, 0, 2), (1, 0, 2)), draw),
    "epochs_throughput": lambda draw: many(Shape((2, 2), 2, 3, alignment=2), draw),
    "epochs_throughput_across": lambda draw: many(Shape((2, 2), 2, 3, domains=((0,), (1,)), wire="nvlink"), draw),
    "epochs_rejected": lambda draw: throughput.rejected(Shape((2, 1, 2), 3, 3), draw, steps_at),
    "epochs_rejected_across": lambda draw: throughput.rejected(
        Shape((2, 2), 2, 2, domains=((0,), (1,)), wire="nvshmem"), draw, steps_at
    ),
    "epochs_absent": lambda draw: throughput.absent(Shape((2, 1, 2), 3, 3), draw, False, True, steps_at),
    "epochs_death": lambda draw: deaths.throughput(
        Shape((2, 1, 2), 2, 3), draw, draw.choice(("dispatch", "known", "combine")), steps_at
    ),
    "epochs_death_tokens": lambda draw: deaths.throughput(Shape((2, 1, 2), 2, 3), draw, "dispatch", tokens_at),
}  # fmt: skip
