"""Checks of alarms that arrive while the blocks of an operation are starting, so that only some of them know that their
rank has given up: every block ends, and the operation ends once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from . import copies, formats, machine
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


class Deciding:
    """A kernel that decides about two tiles and asks about three."""

    def __init__(self, problem: Any) -> None:
        self.problem, self.found = problem, list[bool]()

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    def kernel(self, args: Any) -> None:
        from cutlass import Boolean, Int32

        from cute_kernels import sync
        from cute_kernels.heap import Heap
        from cute_kernels.ids import thread_id

        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
        if thread_id() == 0:
            for tile, good in ((0, True), (1, False)):
                sync.decide(ranks, "placed", Int32(tile), Boolean(good))
            self.found = [bool(sync.decided(ranks, "placed", Int32(tile), tile < 2)) for tile in range(3)]


def decided(shape: Shape, draw: random.Random) -> None:
    """A tile that is not placed is not good, beside one that is, nor is one that nobody has decided about, whether the
    rank has given up or not."""
    from cute_kernels import marks
    from cute_kernels.alarm import AlarmArgs
    from cute_kernels.heap import FAILED

    from .ranks import numbered

    on = Steps(shape, draw)
    for rank, failed in ((0, 0), (1, 1)):
        on.ranks.memory.store_long(on.ranks.heaps[rank] + FAILED * 8, failed)
        args = numbered(AlarmArgs, ranks=on.ranks.args(rank, marks.pack("dispatch", 3)), text=0, blocks=1)
        kernel = Deciding(on.problem)
        run([Launch(kernel, args)], draw)
        assert kernel.found == [True, False, False], f"rank {rank}: {kernel.found}"


def poisoned(shape: Shape, draw: random.Random) -> None:
    """A rank that has given up runs an operation more: its marks are accepted by no wait, and it puts nothing."""
    from cute_kernels import marks
    from cute_kernels.heap import FAILED

    on = Steps(shape, draw)
    on.inputs()
    on.dispatch(known=False)
    on.inputs()
    rank = draw.randrange(on.ranks.world_size)
    on.ranks.memory.store_long(on.ranks.heaps[rank] + FAILED * 8, 1)
    put: list[Any] = []
    for each in machine.networks:
        each.put = lambda *args: put.append(args)  # type: ignore[method-assign]
    launches: list[Launch] = []
    on.launch_dispatch(launches, rank, known=False)
    run(launches, draw, quiet_turns=ROUNDS)
    assert not put, f"rank {rank} puts after it has given up: {put[0]}"
    epoch, hello = 1 + on.ranks.operations, on.ranks.heap.offset["hello"]
    bank = epoch % 2 * on.ranks.heap.distance["hello"]
    mark = marks.make(epoch, int(launches[0].args.ranks.terms))
    domain = next((members for members in shape.domains if rank in members), range(on.ranks.world_size))
    for peer in domain:
        word = on.ranks.memory.load_long(on.ranks.heaps[peer] + hello + bank + 8 * rank)
        assert word != 0 and not marks.same_operation(word, mark), f"rank {peer} accepts the mark of rank {rank}"
        assert marks.epoch_in(word, epoch) == epoch, "the mark differs from a valid one by the bit of its rank's state"


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
    "decided": lambda draw: decided(Shape((2, 2), 2, 6, hidden=64), draw),
    "given_up": lambda draw: poisoned(Shape((3, 1, 2), 3, 3), draw),
    "given_up_across": lambda draw: poisoned(Shape((1, 2, 0, 1), 2, 3, domains=((0, 2), (1, 3)), wire="nvshmem"), draw),
    "alarm_joining": lambda draw: joining(Shape((2, 2), 2, 6, hidden=64), draw),
    "alarm_joining_tokens": lambda draw: joining(Shape((2, 2), 1, 6, hidden=64), draw, copies.Steps),
}  # fmt: skip
