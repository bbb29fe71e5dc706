"""`python -m emulator.main NAME SEED` runs one check, in a process of its own, with `tests/` on PYTHONPATH."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable

import torch

from . import (
    alarms,
    batches,
    combine,
    copies,
    deaths,
    dsl,
    epochs,
    few_rows,
    formats,
    given,
    latency,
    latency_tokens,
    lists,
    machine,
    parts,
    rejected,
    repeats,
    rounds,
    sum_rows,
    sums,
    swiglu,
    throughput,
)
from .routes import Shape

CHECKS: dict[str, Callable[[random.Random], None]] = {
    "latency": lambda draw: latency.pair(Shape((3, 0, 5), 5, 4, 128), draw, (2, 0, 3), (2, 0, 2)),
    "latency_roles": lambda draw: latency.pair(Shape((4, 4), 8, 3, 128), draw, (1, 1, 4), (1, 1, 3)),
    "latency_dropping": lambda draw: latency.pair(
        Shape((2, 3, 1, 2), 3, 4, 64, alignment=4, slots=(0, 4, 8), share=0.3), draw, (1, 1, 3), (1, 1, 2)
    ),
    "latency_one_rank": lambda draw: latency.pair(Shape((8,), 32, 6, 64), draw, (0, 0, 3), (0, 0, 2)),
    "latency_split": lambda draw: latency.pair(
        Shape((2,) * 5, 9, 3, 64, alignment=2), draw, (1, 0, 2), (1, 0, 1), split=True, times=1
    ),
    "latency_unweighted": lambda draw: latency.pair(
        Shape((2, 2), 1, 4, 64), draw, (1, 1, 4), (1, 1, 2), weighted=False
    ),
    "latency_34_ranks": lambda draw: latency.pair(
        Shape((2,) * 34, 6, 1, 32), draw, (1, 0, 2), (1, 0, 1), times=1
    ),
    "latency_waits": lambda draw: latency.pair(
        Shape((2,) * 3, 3, 2, 64, counts_waits=True), draw, (1, 0, 2), (1, 0, 2), times=3, late=True
    ),
    "latency_garbage": lambda draw: latency.garbage(Shape((4,) * 3, 5, 3, 64, share=0.5), draw, 2),
    "latency_across": lambda draw: latency.pair(
        Shape((3, 4), 5, 4, 128, domains=((0,), (1,)), wire="nvshmem"), draw, (2, 0, 3), (2, 0, 2)
    ),
    "latency_across_pairs": lambda draw: latency.pair(
        Shape((3, 0, 2, 2), 3, 4, 128, alignment=2, share=0.4, domains=((0, 2), (1, 3)), wire="nvshmem"),
        draw, (2, 1, 4), (1, 1, 3),
    ),
    "latency_across_three": lambda draw: latency.pair(
        Shape((2,) * 3, 3, 5, 64, domains=((0,), (1,), (2,)), wire="nvlink"), draw, (1, 0, 2), (1, 0, 2), split=True
    ),
    "latency_across_rejected": lambda draw: latency.rejected(
        Shape((3, 2, 2), 3, 3, 64, domains=((0,), (1,), (2,)), wire="nvshmem"), draw, (1, 1, 3), (1, 0, 2)
    ),
    "latency_across_ahead": lambda draw: latency.ahead(
        Shape((2, 2), 2, 2, 64, domains=((0,), (1,)), wire="nvshmem"), draw, (1, 0, 3), (1, 0, 3)
    ),
    "latency_across_routes": lambda draw: latency.ahead(
        Shape((2, 2), 8, 12, domains=((0,), (1,)), wire="nvshmem"), draw, (1, 0, 2), (1, 0, 2), ("dispatch",)
    ),
    "latency_across_bundled": lambda draw: latency.pair(
        Shape((3, 4), 5, 5, 128, domains=((0,), (1,)), wire="nvshmem", rows=2), draw, (2, 0, 3), (2, 0, 2)
    ),
    "latency_across_bundled_pairs": lambda draw: latency.pair(
        Shape((3, 0, 2, 2), 3, 4, 128, alignment=2, share=0.4, domains=((0, 2), (1, 3)), wire="nvshmem", rows=3),
        draw, (2, 1, 4), (1, 1, 3),
    ),
    "latency_across_bundled_dropping": lambda draw: latency.pair(
        Shape((4, 4), 3, 8, alignment=4, share=0.12, domains=((0,), (1,)), wire="nvlink", rows=3),
        draw, (2, 2, 4), (2, 2, 4),
    ),
    "latency_across_bundled_three": lambda draw: latency.pair(
        Shape((2,) * 3, 3, 5, 64, domains=((0,), (1,), (2,)), wire="nvlink", rows=2), draw, (1, 0, 2), (1, 0, 2),
        split=True,
    ),
    "latency_across_bundled_ahead": lambda draw: latency.ahead(
        Shape((2, 2), 2, 3, 64, domains=((0,), (1,)), wire="nvshmem", rows=2), draw, (1, 0, 2), (1, 0, 2)
    ),
    "latency_across_bundled_rejected": lambda draw: latency.rejected(
        Shape((3, 2, 2), 3, 3, 64, domains=((0,), (1,), (2,)), wire="nvshmem", rows=2), draw, (1, 1, 3), (1, 0, 2)
    ),
    "throughput": lambda draw: throughput.steps(Shape((3, 0, 5), 5, 4, alignment=4, share=0.5), draw, known=False),
    "throughput_skewed": lambda draw: throughput.steps(
        Shape((4, 3), 7, 6, hidden=36, alignment=4, skewed=True), draw, joining=3
    ),
    "throughput_dropping": lambda draw: throughput.steps(
        Shape((2, 5), 3, 5, alignment=4, slots=(0, 4, 8), share=0.4), draw, times=1
    ),
    "half_launched": lambda draw: throughput.half(Shape((2, 2), 2, 2), draw),
    "throughput_one_rank": lambda draw: throughput.steps(Shape((8,), 32, 3), draw, joining=0),
    "throughput_rejected": lambda draw: throughput.rejected(Shape((3, 0, 2), 3, 3, slots=(0, 2, 3), share=0.4), draw),
    "throughput_disagreeing": lambda draw: throughput.disagreeing(Shape((3, 2, 2), 3, 2, alignment=4), draw),
    "throughput_absent": lambda draw: throughput.absent(
        Shape((3, 0, 2), 3, 3, slots=(0, 2, 3), share=0.4), draw, warned=True, known=False
    ),
    "throughput_late": lambda draw: throughput.absent(
        Shape((3, 1, 2), 3, 3, alignment=4), draw, warned=False, known=True
    ),
    "throughput_four_ranks": lambda draw: throughput.steps(Shape((2,) * 4, 2, 3, alignment=2), draw, known=False),
    "throughput_waits": lambda draw: throughput.steps(
        Shape((2,) * 3, 2, 3, alignment=2, counts_waits=True), draw, late=True
    ),
    "across_two": lambda draw: throughput.across(
        Shape((3, 4), 7, 4, hidden=36, alignment=4, domains=((0,), (1,)), wire="nvshmem"), draw
    ),
    "across_pairs": lambda draw: throughput.across(
        Shape((2, 0, 3, 2), 3, 5, alignment=2, domains=((0, 3), (1, 2)), wire="nvshmem"), draw, known=False
    ),
    "across_three": lambda draw: throughput.of_many_ranks(
        Shape((2,) * 3, 3, 5, domains=((0,), (1,), (2,)), wire="nvlink"), draw
    ),
    "across_wide": lambda draw: throughput.wide(
        Shape((2, 1, 1), 2, 2, draw.choice((520, 1100)), domains=((1,), (0,), (2,)), wire="nvlink"), draw
    ),
    "across_small": lambda draw: throughput.across(
        Shape((2, 2), 4, 3, domains=((0,), (1,)), wire="nvshmem"), draw, known=False
    ),
    "across_pairs_small": lambda draw: throughput.across(
        Shape((1, 2, 1, 2), 3, 3, domains=((0, 2), (1, 3)), wire="nvshmem"), draw, known=False
    ),
    "across_pairs_late": lambda draw: throughput.across(
        Shape((1, 2, 1, 2), 3, 3, domains=((0, 2), (1, 3)), wire="nvshmem"), draw, known=False, late=True
    ),
    "across_rejected_small": lambda draw: throughput.rejected(
        Shape((2, 2), 2, 2, domains=((0,), (1,)), wire="nvshmem"), draw
    ),
    "across_adversary": lambda draw: throughput.across(
        Shape((2, 3), 4, 4, alignment=2, domains=((0,), (1,)), wire="adversary"), draw
    ),
    "across_rejected": lambda draw: throughput.rejected(
        Shape((3, 0, 2, 2), 3, 3, slots=(0, 2, 3), share=0.4, domains=((0, 2), (1, 3)), wire="nvshmem"), draw
    ),
    "across_absent": lambda draw: throughput.absent(
        Shape((3, 0, 2), 3, 3, domains=((0,), (1,), (2,)), wire="nvshmem"), draw, warned=True, known=False
    ),
}  # fmt: skip
for part in (
    alarms, copies, epochs, rejected, latency_tokens, formats, deaths, batches, combine, rounds, lists, parts,
    given, repeats, sum_rows, sums, swiglu, few_rows,
):  # fmt: skip
    assert CHECKS.keys().isdisjoint(part.CHECKS), f"two checks have one name: {CHECKS.keys() & part.CHECKS.keys()}"
    CHECKS |= part.CHECKS


def main(name: str, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # lanes behind a row's end add up whatever stands there
    dsl.install()
    machine.draw.seed(seed)
    CHECKS[name](machine.draw)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
