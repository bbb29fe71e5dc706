"""Checks of wires: batches of rows to all ranks, operation after operation on the same heaps."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

from . import machine
from .deaths import die
from .ranks import Ranks, numbered, same
from .threads import TICK, Launch, run

HIDDEN = 16
COURIERS = 2


@dataclasses.dataclass
class Step:
    """How many rows go from each rank to each rank, the most that may go, and addresses of the rows that arrive."""

    counts: Tensor
    x: Tensor
    outs: list[tuple[int, int]]


class Exchange:
    """`kind` of wire: "nvlink", "nvshmem" or "adversary"."""

    def __init__(self, draw: random.Random, world_size: int, kind: str, max_tokens: int = 8) -> None:
        from batches import Batches, BatchHeap, depth_of, problem_of
        from courier import Adversary, Courier

        from cute_kernels.internode import wire

        self.draw, self.max_tokens = draw, max_tokens
        depth = depth_of(world_size)
        made = {"nvlink": wire.Nvlink(), "nvshmem": wire.Nvshmem("library"), "adversary": Adversary(depth)}
        problem = problem_of(world_size, HIDDEN, "fp32", max_tokens, made[kind])
        heap = BatchHeap(problem)
        self.kernel = Batches(problem)
        depth = depth if kind == "adversary" else 0
        self.courier = Courier(problem, depth) if depth else None
        self.ranks = Ranks(heap, draw, mapped=kind != "nvshmem", depth=depth)
        self.noise = torch.Generator().manual_seed(draw.getrandbits(31))
        self.steps: list[Step] = []

    def inputs(self) -> None:
        """Draw the inputs of another step."""
        world_size, most = self.ranks.world_size, self.max_tokens
        busy = self.draw.choice([0.0, 0.3, 1.0])  # how many rows go, as a part of all
        counts = torch.randint(0, 1 + int(most * busy), (world_size, world_size), generator=self.noise).int()
        x = torch.randn(world_size, world_size, most, HIDDEN, generator=self.noise)
        outs = [(self.ranks.blank(row.numel(), "out"), self.ranks.blank(world_size, "came")) for row in x]
        self.steps.append(Step(counts, x, outs))

    def launches(self, rank: int) -> list[Launch]:
        """A rank's kernels of the last step: the second one, if there is one, runs beside the first."""
        from cute_kernels import marks

        step, put = self.steps[-1], self.ranks.memory.put
        args = self.ranks.args(rank, marks.pack("dispatch", self.max_tokens))
        values: dict[str, Any] = dict(
            ranks=args, x=put(step.x[rank], "x"), counts=put(step.counts[rank], "counts"), out=step.outs[rank][0],
            came=step.outs[rank][1], blocks=2,
        )  # fmt: skip
        made = [Launch(self.kernel, numbered(self.kernel.Args, **values))]
        if self.courier is not None:
            made.append(self.ranks.courier(rank, self.courier, len(self.steps), COURIERS))
        return made

    def check(self, rank: int, number: int = -1) -> None:
        """Check that the rows that arrived at a rank in a step are those that were sent, to the bit."""
        step, world_size = self.steps[number], self.ranks.world_size
        out, came = step.outs[rank]
        same(self.ranks.view(came, world_size), step.counts[:, rank], f"numbers of rows at rank {rank}, step {number}")
        got = self.ranks.floats(out, world_size, self.max_tokens, HIDDEN)
        for source in range(world_size):
            rows = int(step.counts[source, rank])
            want = step.x[source, rank, :rows]
            same(got[source, :rows], want, f"rows from {source} at rank {rank}, step {number}")


def steps(draw: random.Random, world_size: int, kind: str, times: int = 6) -> None:
    """Ranks wait for each other in the kernels alone: some are an operation ahead."""
    on = Exchange(draw, world_size, kind)
    launches: list[Launch] = []
    before: dict[tuple[int, int], int] = {}  # the launch that a stream's next one waits for
    for _ in range(times):
        on.inputs()
        for rank in range(world_size):
            for stream, launch in enumerate(on.launches(rank)):
                launches.append(dataclasses.replace(launch, after=before.get((rank, stream))))
                before[rank, stream] = len(launches) - 1
    run(launches, draw)
    for rank in range(world_size):
        assert not any(reason for reason, _ in on.ranks.reported(rank)), f"rank {rank} reports something"
        for number in range(times):
            on.check(rank, number)


def death(draw: random.Random, world_size: int, kind: str) -> None:
    """A rank stops for ever: all others end, with what is right or with a report that names it."""
    on = Exchange(draw, world_size, kind)
    on.inputs()
    since = machine.clock
    run([launch for rank in range(world_size) for launch in on.launches(rank)], draw)
    lasted = (machine.clock - since) // TICK
    on.inputs()

    def build(launches: list[Launch], rank: int) -> None:
        launches += on.launches(rank)

    die(on.ranks, draw, build, build, on.check, lasted)


CHECKS = {
    "wire_nvlink": lambda draw: steps(draw, 3, "nvlink"),
    "wire_nvshmem": lambda draw: steps(draw, 3, "nvshmem"),
    "wire_adversary": lambda draw: steps(draw, 3, "adversary"),
    "wire_34_ranks": lambda draw: steps(draw, 34, "nvlink", 1),
    "wire_death": lambda draw: death(draw, 3, "nvshmem"),
}
