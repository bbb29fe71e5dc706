"""Checks of alarms that arrive while the blocks of an operation are starting, so that only some of them know that their
rank has given up: every block ends, and the operation ends once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from . import copies, formats
from .routes import Shape
from .threads import Launch, run
from .throughput import Make, Steps

ROUNDS = 2000
"""The most rounds that a dispatch may take in which a rank gives up."""


def give_up(on: Steps, rank: int, behind: int) -> Launch:
    """The host of a rank gives up, and tells all ranks."""
    from cute_kernels.alarm import RaiseAlarm
    from cute_kernels.heap import REASON_BYTES

    from .ranks import numbered

    text = on.ranks.memory.put(torch.zeros(REASON_BYTES // 4, dtype=torch.int32), "text")
    args = numbered(RaiseAlarm.Args, ranks=on.ranks.args(rank, 0), text=text, blocks=1)
    return Launch(RaiseAlarm(on.problem), args, behind=behind)


def check_ended(on: Steps) -> None:
    """The operation has ended once at every rank: its epoch is over, and its counts are 0."""
    from cute_kernels.heap import CLAIMS, PUSHES, TICKET

    on.ranks.operations += 1
    for rank in range(on.ranks.world_size):
        state = on.ranks.heaps[rank]
        left = [on.ranks.memory.load_long(state + word * 8) for word in (TICKET, CLAIMS, PUSHES)]
        epoch = on.ranks.memory.load_long(on.ranks.epoch_of(rank))
        assert left == [0, 0, 0] and epoch == 1 + on.ranks.operations, f"rank {rank}: {left}, epoch {epoch}"


def staging(
    shape: Shape, draw: random.Random, known: bool = False, make: Make = Steps, call: formats.Call | None = None
) -> None:
    """The alarm arrives when a rank's announcing block runs, and its staging blocks do not yet."""
    on = make(shape, draw)
    on.inputs()
    while min(len(idx) for idx in on.truth.case.topk_idx) == 0:
        on.inputs()
    more: tuple[Any, ...] = ()
    if call is not None:
        call.inputs(on)
        more = True, call
    if known:
        on.dispatch(False, *more)
    launches: list[Launch] = []
    for rank in range(on.ranks.world_size):
        on.launch_dispatch(launches, rank, known, *more)
    late = draw.randrange(on.ranks.world_size)
    for launch in launches:
        if launch.args.ranks.rank == late and launch.after is None:
            first = launch.kernel.tile_blocks + 1  # behind the announcing block
            launch.begins.update({block: 80 for block in range(first, launch.args.blocks)})
    launches.append(give_up(on, draw.randrange(on.ranks.world_size), 40))
    run(launches, draw, quiet_turns=ROUNDS, rounds=ROUNDS)
    check_ended(on)


def joining(shape: Shape, draw: random.Random, make: Make = Steps) -> None:
    """Some blocks of a pull have begun when the alarm arrives, and count all blocks that take part in the operation;
    one that takes part begins behind it."""
    on = make(shape, draw)
    on.inputs()
    while min(len(idx) for idx in on.truth.case.topk_idx) < shape.max_tokens:  # so many rows that others join
        on.inputs()
    launches: list[Launch] = []
    for rank in range(on.ranks.world_size):
        on.launch_dispatch(launches, rank, False)
    for launch in launches:
        if getattr(launch.kernel, "joins", False):
            launch.begins[0] = 600
    launches.append(give_up(on, draw.randrange(on.ranks.world_size), 400))
    run(launches, draw, quiet_turns=ROUNDS, rounds=ROUNDS)
    check_ended(on)


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "alarm_staging": lambda draw: staging(Shape((2, 2), 2, 8, hidden=64), draw),
    "alarm_staging_known": lambda draw: staging(Shape((2, 2), 2, 8, hidden=64), draw, True),
    "alarm_staging_tokens": lambda draw: staging(
        Shape((2, 2), 1, 8, hidden=64), draw, draw.random() < 0.5, copies.Steps
    ),
    "alarm_staging_format": lambda draw: staging(
        Shape((2, 2), 2, 8, hidden=64), draw, draw.random() < 0.5, copies.Steps,
        formats.Call("e4m3/32/mx", "rows", False),
    ),
    "alarm_joining": lambda draw: joining(Shape((2, 2), 2, 6, hidden=64), draw),
    "alarm_joining_tokens": lambda draw: joining(Shape((2, 2), 1, 6, hidden=64), draw, copies.Steps),
}  # fmt: skip
