"""A rank dies in the middle of an operation: its threads stop for ever, wherever they are. All others end, with right
results or with a report that names it, and know of it after one operation more."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import copies, machine
from .latency import Blocks, Pair
from .network import LATE, network
from .ranks import Ranks
from .routes import Shape
from .threads import QUIET_TURNS, TICK, Launch, run
from .throughput import Make, Steps, begun

TIMEOUT = 500
"""Rounds. Ranks that live wait for each other for less, on a network that is not `SLOW`."""
SLOW = 0.3
"""Networks are no slower where a rank dies: how often one moves anything."""

Build = Callable[[list[Launch], int], None]
"""Appends a rank's launches of an operation."""


def throughput(shape: Shape, draw: random.Random, kind: str, make: Make = Steps) -> None:
    """In a "dispatch", one along a "known" route, or a "combine"."""
    since = machine.clock
    on: Steps = begun(shape, draw, kind != "dispatch", make)

    def combine(launches: list[Launch], rank: int) -> None:
        launches.append(on.launch_combine(rank))

    def dispatch(launches: list[Launch], rank: int) -> None:
        on.launch_dispatch(launches, rank, kind == "known")

    def check(rank: int) -> None:
        if kind == "combine":
            on.truth.check_combined(on.ranks, on.of("out"), weighted=True, only=rank)
        else:
            on.check_received(rank)

    die(on.ranks, draw, combine if kind == "combine" else dispatch, combine, check, (machine.clock - since) // TICK)


def rejected(shape: Shape, draw: random.Random) -> None:
    """In an operation that another one rejects: nobody waits for ever for what was put, or for what the dead put."""
    on: Steps = begun(shape, draw)
    since = machine.clock
    on.dispatch(known=False)
    lasted = (machine.clock - since) // TICK
    on.inputs()
    rejects = draw.randrange(on.ranks.world_size)

    def build(launches: list[Launch], rank: int) -> None:
        if rank == rejects:
            launches.append(on.launch_rejection(rank))
        else:
            on.launch_dispatch(launches, rank, False)

    def then(launches: list[Launch], rank: int) -> None:
        on.launch_dispatch(launches, rank, False)

    die(on.ranks, draw, build, then, lambda rank: None, lasted)


def few(shape: Shape, draw: random.Random, kind: str, dispatch: Blocks, combine: Blocks) -> None:
    """In a "dispatch" or a "combine" of the latency kernels."""
    on = Pair(shape, draw, dispatch, combine)
    since = machine.clock
    on.inputs()
    on.run("dispatch", True, False)
    lasted = (machine.clock - since) // TICK

    def of(kind: str) -> Build:
        return lambda launches, rank: launches.append(on.launches(kind, True, (True, True))[rank])

    def check(rank: int) -> None:
        if kind == "combine":
            on.truth.check_combined(on.ranks, [at["out"] for at in on.at], weighted=True, only=rank)
        else:
            weights = [at["recv_weights"] for at in on.at]
            on.truth.check_rows(on.ranks, [at["recv_x"] for at in on.at], weights, only=rank)

    die(on.ranks, draw, of(kind), of("combine"), check, lasted)


def die(ranks: Ranks, draw: random.Random, build: Build, then: Build, check: Callable[[int], None], lasts: int) -> None:
    """Some rank does, within `lasts` rounds of one operation, as many as one before took, and is not there in the
    next."""
    from cute_kernels import sync

    for each in machine.networks:
        each.rate = max(each.rate, SLOW)
    deadline = TIMEOUT + 2 * lasts + 2 * LATE * (network().late > 0)
    usual, sync.POLLS_PER_CHECK, ranks.timeout_ns = sync.POLLS_PER_CHECK, 8, deadline * TICK
    victim = draw.randrange(ranks.world_size)
    living = [rank for rank in range(ranks.world_size) if rank != victim]
    launches: list[Launch] = []
    for rank in living:
        build(launches, rank)
    first = len(launches)
    build(launches, victim)
    run(launches, draw, range(first, len(launches)), draw.randint(0, lasts), QUIET_TURNS + 3 * deadline)
    told = {}
    for rank in living:
        told[rank] = ranks.reported(rank, clear=False)[0]
        if told[rank][0] == 0:
            check(rank)
    launches = []
    for rank in living:
        then(launches, rank)
    run(launches, draw, quiet_turns=QUIET_TURNS + 3 * deadline)
    sync.POLLS_PER_CHECK, ranks.timeout_ns = usual, 1 << 40
    for rank in living:
        reason, peer = ranks.reported(rank)[0]
        assert reason == sync.PEER_FAILED or (reason == sync.TIMEOUT and peer == victim), (
            f"rank {rank} reports reason {reason}, peer {peer}; rank {victim} died; in the operation: {told}"
        )


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "death_dispatch": lambda draw: throughput(Shape((3, 0, 2), 3, 3, slots=(0, 2, 3), share=0.4), draw, "dispatch"),
    "death_known": lambda draw: throughput(Shape((3, 1, 2), 3, 3, alignment=4), draw, "known"),
    "death_tokens": lambda draw: throughput(
        Shape((3, 1, 2), 3, 3), draw, draw.choice(("dispatch", "known")), copies.Steps
    ),
    "death_combine": lambda draw: throughput(Shape((3, 1, 2), 3, 3, alignment=4), draw, "combine"),
    "death_across": lambda draw: throughput(
        Shape((1, 2, 0, 1), 2, 3, domains=((0, 2), (1, 3)), wire="nvshmem"), draw, draw.choice(("dispatch", "combine"))
    ),
    "death_rejected": lambda draw: rejected(Shape((2, 2), 2, 2, domains=((0,), (1,)), wire="nvshmem"), draw),
    "death_few_dispatch": lambda draw: few(Shape((3, 0, 5), 3, 3, 64), draw, "dispatch", (1, 1, 4), (1, 1, 3)),
    "death_few_combine": lambda draw: few(Shape((2, 2, 1), 3, 3, 64), draw, "combine", (1, 1, 4), (1, 1, 3)),
    "death_few_across": lambda draw: few(
        Shape((2, 2, 1), 3, 3, 64, domains=((0,), (1,), (2,)), wire="nvshmem"),
        draw, draw.choice(["dispatch", "combine"]), (1, 1, 4), (1, 0, 3),
    ),
    "death_few_bundled": lambda draw: few(
        Shape((2, 2, 1), 3, 3, 64, domains=((0,), (1,), (2,)), wire="nvshmem", rows=2),
        draw, draw.choice(["dispatch", "combine"]), (1, 1, 4), (1, 0, 3),
    ),
}  # fmt: skip
