"""Checks of the latency kernels with token-major rows, against tests/tokens.py."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import copies, formats, latency
from .routes import Shape


class Pair(copies.Checked, latency.Pair):
    """A token-major dispatch, and a combine of one row for each copy. Some rows come long after the routes."""

    token_major = True
    late = 300


def pair(shape: Shape, draw: random.Random, dispatch: latency.Blocks, combine: latency.Blocks, split: bool = False,
         weighted: bool = True, times: int = 2) -> None:  # fmt: skip
    """Dispatches, checks everything that came, combines other rows and checks the sums."""
    pair_of(Pair(shape, draw, dispatch, combine), times, split, weighted)


def pair_of(on: Pair, times: int, split: bool, weighted: bool) -> None:
    for _ in range(times):
        on.inputs()
        on.run("dispatch", weighted, split)
        on.check_plan()
        on.check_rows(weighted, True)
        on.run("combine", False, split)
        on.check_sums([at["out"] for at in on.at])


def formatted(shape: Shape, draw: random.Random, call: formats.Call, split: bool) -> None:
    """Dispatches in a format."""
    on = Pair(shape, draw, (2, 0, 3), (1, 0, 2))
    on.variant = (call.name, call.layout, call.given)
    for _ in range(2):
        on.inputs()
        call.odd(on)
        call.inputs(on)
        for rank, at in enumerate(on.at):
            at.update(call.room(on, rank))
        on.run("dispatch", True, split)
        on.check_plan()
        for rank, at in enumerate(on.at):
            call.check(on, rank, at)
        on.check_rows(True, False)


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "latency_tokens": lambda draw: pair(
        Shape((3, 0, 5), 5, 4, 128, share=draw.choice((0.5, 1.0))), draw, (3, 0, 4), (2, 0, 2)
    ),
    "latency_tokens_roles": lambda draw: pair(Shape((4, 4), 8, 3, 128), draw, (1, 1, 5), (1, 1, 3)),
    "latency_tokens_split": lambda draw: pair(
        Shape((2,) * 3, 3, 4, 64, share=draw.choice((0.3, 1.0))), draw, (1, 0, 2), (1, 0, 2), split=True,
        weighted=draw.random() < 0.7, times=1,
    ),
    "latency_tokens_one_rank": lambda draw: pair(Shape((8,), 32, 3, 64, share=0.7), draw, (0, 0, 3), (0, 0, 2)),
    "latency_tokens_few_experts": lambda draw: pair(
        Shape((1, 0, 0, 1), 1, 12, 64, share=draw.choice((0.0, 0.4))), draw, (1, 1, 3), (1, 1, 2), times=1
    ),
    "latency_tokens_format": lambda draw: formatted(
        Shape((2, 3), 5, 3, hidden=256, share=draw.choice((0.5, 1.0))), draw,
        formats.Call(
            draw.choice(["e4m3/128/pow2", "e4m3/128/fp32"]), draw.choice(["rows", "columns", ""]),
            False, zeros=False,
        ), draw.random() < 0.5,
    ),
    # So many that warps place several times 32 tokens, and go through several groups of tokens.
    "latency_tokens_many": lambda draw: pair(
        Shape((2, 3), 2, 300, 32, share=draw.choice((0.6, 1.0))), draw, (1, 0, 3), (2, 0, 2), times=1
    ),
    "latency_across_tokens": lambda draw: pair(
        Shape((3, 0, 2, 2), 3, 4, 64, share=draw.choice((0.5, 1.0)), domains=((0, 2), (1, 3)), wire="nvshmem"),
        draw, (2, 1, 4), (1, 1, 3),
    ),
    "latency_across_bundled_tokens": lambda draw: pair(
        Shape((3, 0, 2, 2), 3, 4, 64, share=draw.choice((0.5, 1.0)), domains=((0, 2), (1, 3)), wire="nvshmem", rows=2),
        draw, (2, 1, 4), (1, 1, 3),
    ),
}  # fmt: skip
