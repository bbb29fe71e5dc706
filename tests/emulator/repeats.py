"""Checks of dispatches whose tokens must name distinct experts: entries that repeat are reported and not sent."""

from __future__ import annotations

import dataclasses
import random

from torch import Tensor

from .latency import Pair
from .ranks import Ranks
from .routes import Shape, Truth, drawn
from .threads import run
from .throughput import Steps

DISTINCT = -1
"""`slots` of such a dispatch."""


def without_repeats(topk_idx: Tensor) -> Tensor:
    again = (topk_idx[:, :, None] == topk_idx[:, None, :]).tril(-1).any(2)
    return topk_idx.masked_fill(again, -1)


def replace_ids(both: Pair | Steps, ranks: Ranks, shape: Shape, draw: random.Random) -> list[set[tuple[int, int]]]:
    """Give the kernels drawn ids, some of which repeat, and expect what is right without those. Returns the flat index
    and the expert of each entry that repeats, by rank."""
    case = drawn(shape, draw)
    clean = tuple(map(without_repeats, case.topk_idx))
    both.truth = Truth(dataclasses.replace(case, topk_idx=clean), shape.hidden, draw.getrandbits(31), shape.domains)
    repeated = []
    for rank, (given, kept) in enumerate(zip(case.topk_idx, clean, strict=True)):
        rows, outputs = case.capacity[rank], given.shape[0] * shape.hidden
        both.at[rank].update(ranks.along(both.truth, rank) | {
            "topk_idx": ranks.memory.put(given, "topk_idx"), "recv_x": ranks.blank(rows * shape.hidden, "recv_x"),
            "recv_weights": ranks.blank(rows, "recv_weights"), "out": ranks.blank(outputs, "out"),
        })  # fmt: skip
        flat, left = given.flatten().tolist(), kept.flatten().tolist()
        repeated.append({(i, e) for i, (e, own) in enumerate(zip(flat, left, strict=True)) if e != own})
    return repeated


def check_reports(ranks: Ranks, repeated: list[set[tuple[int, int]]]) -> None:
    """Each rank with repeated entries reports one of them, and nothing else."""
    from cute_kernels.sync import BAD_EXPERT, REPORT_WORDS, Record

    for rank, entries in enumerate(repeated):
        said = ranks.view(ranks.reports[rank], 6 * REPORT_WORDS)[::2].tolist()
        record = Record(*said[REPORT_WORDS : REPORT_WORDS + len(Record._fields)])
        assert record.reason == (BAD_EXPERT if entries else 0), f"rank {rank} reports {record}, and repeats {entries}"
        if entries:
            assert (record.detail, record.seen) in entries, f"rank {rank} reports {record}, and repeats {entries}"
        assert ranks.reported(rank) == [(0, 0), (0, 0)], f"rank {rank} reports a failure"


def latency(shape: Shape, draw: random.Random, send: int = 2) -> None:
    both = Pair(shape, draw, (send, 0, 3), (1, 0, 2))
    both.inputs()
    repeated = replace_ids(both, both.ranks, shape, draw)
    run([*both.launches("dispatch", True, (True, True), slots=DISTINCT), *both.ranks.couriers()], draw)
    both.ranks.operations += 1
    check_reports(both.ranks, repeated)
    both.truth.check_plan(both.ranks, both.at)
    both.truth.check_rows(both.ranks, [at["recv_x"] for at in both.at], [at["recv_weights"] for at in both.at])
    both.run("combine", True, False)
    both.truth.check_combined(both.ranks, [at["out"] for at in both.at], True)


def throughput(shape: Shape, draw: random.Random) -> None:
    on = Steps(shape, draw)
    on.inputs()
    repeated = replace_ids(on, on.ranks, shape, draw)
    launches = []
    for rank in range(on.ranks.world_size):
        on.launch_dispatch(launches, rank, False, slots=DISTINCT)
    run(launches, draw)
    on.ranks.operations += 1
    check_reports(on.ranks, repeated)
    on.truth.check_plan(on.ranks, on.at)
    on.check_received()
    on.combine(rows=True, weighted=True, scalars=False, residual=False)


CHECKS = {
    "repeats_latency": lambda draw: latency(Shape((3, 0, 5), draw.choice((2, 4, 8)), 4, 64), draw),
    "repeats_latency_across_lanes": lambda draw: latency(Shape((2, 5), draw.choice((3, 5, 6, 9)), 5, 64), draw),
    "repeats_latency_one_rank": lambda draw: latency(Shape((8,), draw.choice((3, 16, 32)), 3, 64), draw, send=0),
    "repeats_throughput": lambda draw: throughput(Shape((3, 0, 5), draw.choice((2, 5, 8)), 4, alignment=4), draw),
}
