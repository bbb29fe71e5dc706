"""Checks of the latency kernels: dispatch and combine, each as one kernel or as two halves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from . import machine
from .ranks import BEHIND, Ranks, numbered
from .routes import DEPTH, Shape, Truth, drawn, untell, wire_of
from .threads import Launch, run

LATE = 1500
"""The most rounds that blocks of a kernel start later than its first: others have done all that they can do alone."""

KINDS, TIMES = ("dispatch", "combine"), 3
"""What is run, and how often."""

Blocks = tuple[int, int, int]
"""Senders, the first receiver, and all blocks."""


class Pair:
    """A dispatch and a combine of all ranks, again and again on the same heaps. Bound: of the tokens."""

    token_major = False
    late = 0  # the most rounds that blocks but the first begin later

    def __init__(self, shape: Shape, draw: random.Random, dispatch: Blocks, combine: Blocks) -> None:
        from cute_kernels.heap import Problem
        from cute_kernels.latency.sizes import LatencyHeap

        self.shape, self.draw = shape, draw
        self.dispatch_blocks, self.combine_blocks = dispatch, combine
        bound = shape.max_tokens + draw.randint(0, 2)
        problem = Problem(
            len(shape.experts), shape.experts, shape.top_k, shape.hidden, "fp32", bound + 3, shape.domains,
            wire_of(shape), counts_waits=shape.counts_waits,
        )  # fmt: skip
        self.heap = LatencyHeap(problem, bound)
        depth = DEPTH * (shape.wire == "adversary")
        self.ranks = Ranks(self.heap, draw, mapped=shape.wire != "nvshmem", depth=depth)
        machine.networks[-1].late = draw.choice((0.03, 0.3))
        self.variant: tuple[Any, ...] = ("", "", False)  # of dispatch kernels: format, layout of scales, given
        self.given: list[dict[str, int]] = [{}] * len(shape.experts)  # of each rank, in place of what is usual

    def inputs(self) -> None:
        """A new route."""
        case, blank, hidden = drawn(self.shape, self.draw), self.ranks.blank, self.shape.hidden
        self.truth = Truth(case, self.shape.hidden, self.draw.getrandbits(31), self.shape.domains)
        self.at: list[dict[str, int]] = []
        for rank, rows in enumerate(case.capacity):
            self.at.append(self.ranks.along(self.truth, rank) | {
                "recv_x": blank(rows * hidden, "recv_x"), "recv_weights": blank(rows, "recv_weights"),
                "out": blank(case.topk_idx[rank].shape[0] * hidden, "out"),
            })  # fmt: skip

    def launches(self, kind: str, weighted: bool, parts: tuple[bool, bool], **given: int) -> list[Launch]:
        """Return the launches of "dispatch" or "combine"; `parts`: whether it sends, whether it receives. `given`:
        other arguments."""
        from cute_kernels import marks
        from cute_kernels.latency.combine import LatencyCombine, LatencyCombineArgs
        from cute_kernels.latency.dispatch import LatencyDispatch, LatencyDispatchArgs

        case = self.truth.case
        senders, first, blocks = self.dispatch_blocks if kind == "dispatch" else self.combine_blocks
        if parts != (True, True):
            first, blocks = 0, (max(senders, 1) if parts[0] else blocks)
        kernel, args = (
            (LatencyDispatch, LatencyDispatchArgs) if kind == "dispatch" else (LatencyCombine, LatencyCombineArgs)
        )
        variant: tuple[Any, ...] = ()
        if kind == "dispatch":
            variant = (*self.variant, self.token_major and parts[1])
        made = []
        for rank, at in enumerate(self.at):
            by_token, scalars = self.token_major and kind == "dispatch", weighted and kind == "dispatch"
            terms = marks.pack(kind, case.max_tokens, scalars, latency=True, token_major=by_token)
            values: dict[str, Any] = {
                "ranks": self.ranks.args(rank, terms), "tokens": case.topk_idx[rank].shape[0],
                "max_tokens": case.max_tokens, "capacity": case.capacity[rank], "num_rows": case.capacity[rank],
                "alignment": case.alignment, "slots": case.slots[rank],
                "senders": senders, "first_receiver": first, "blocks": blocks,
                "scales": 0, "recv_scales": 0, "recv_idx": 0, "zeros": 1, **at, **self.given[rank], **given,
            }  # fmt: skip
            if kind == "combine":
                values["recv_weights"] = at["weights"] if weighted else 0
            values = {name: values[name] for name in args._fields}
            made.append(
                Launch(
                    kernel(self.heap.problem, self.heap.tokens, weighted, *parts, *variant),
                    numbered(args, **values),
                    late=self.late,
                )
            )
        return made

    def run(self, kind: str, weighted: bool, split: bool) -> None:
        if split:
            self.ranks.run(self.launches(kind, weighted, (True, False)), ends=False)
            self.ranks.run(self.launches(kind, weighted, (False, True)))
        else:
            self.ranks.run(self.launches(kind, weighted, (True, True)))


def pair(shape: Shape, draw: random.Random, dispatch: Blocks, combine: Blocks, split: bool = False,
         weighted: bool = True, times: int = 2, late: bool = False) -> None:  # fmt: skip
    """Dispatches, checks everything that came, combines other rows and checks the sums. `late`: one rank is."""
    pair_of(Pair(shape, draw, dispatch, combine), times, split, weighted, late)


def pair_of(both: Pair, times: int, split: bool, weighted: bool, late: bool = False) -> None:
    for _ in range(times):
        both.ranks.late = both.draw.randrange(both.ranks.world_size) if late else None
        both.inputs()
        both.run("dispatch", weighted, split)
        both.truth.check_plan(both.ranks, both.at)
        weights = [at["recv_weights"] for at in both.at] if weighted else None
        both.truth.check_rows(both.ranks, [at["recv_x"] for at in both.at], weights)
        if both.draw.random() < 0.5:
            untell(both.ranks, both.truth.case, both.at)
        both.run("combine", weighted, split)
        both.truth.check_combined(both.ranks, [at["out"] for at in both.at], weighted)


def ahead(shape: Shape, draw: random.Random, dispatch: Blocks, combine: Blocks, kinds: Sequence[str] = KINDS) -> None:
    """Dispatches and combines, or one of them, behind one another, for whose ends the kernels alone wait: ranks are
    ahead of others, and many puts are late."""
    both = Pair(shape, draw, dispatch, combine)
    ranks, machine.networks[-1].late = both.ranks, 0.3
    launches: list[Launch] = []
    before: dict[int, int] = {}
    steps = []
    for _ in range(TIMES):
        both.inputs()
        steps.append((both.truth, both.at))
        for kind in kinds:
            for rank, launch in enumerate(both.launches(kind, True, (True, True))):
                launches.append(
                    dataclasses.replace(
                        launch, after=before.get(rank), late=draw.choice((0, LATE)), behind=draw.choice((0, 0, BEHIND))
                    )
                )
                before[rank] = len(launches) - 1
    run(launches, draw)
    ranks.operations += TIMES * len(kinds)
    ranks.check_wire()
    ranks.check_epochs()
    for truth, at in steps:
        truth.check_plan(ranks, at)
        truth.check_rows(ranks, [here["recv_x"] for here in at], [here["recv_weights"] for here in at])
        if "combine" in kinds:
            truth.check_combined(ranks, [here["out"] for here in at], weighted=True)


def garbage(shape: Shape, draw: random.Random, times: int) -> None:
    """The sending half of a combine takes whatever stands in the lists without touching what it may not touch."""
    for turn in range(times):
        both = Pair(shape, draw, (1, 0, 3), (1, 0, 2))  # the operation before did not end
        both.inputs()
        case = both.truth.case
        both.run("dispatch", True, False)
        for rank, at in enumerate(both.at):
            rows = case.capacity[rank]
            lists = both.ranks.view(at["arrivals"], 4 * rows + case.world_size + 3)
            numbers = case.world_size * case.max_tokens * case.top_k + 3
            for i in range(lists.numel()):
                if draw.random() < (0.2 if turn % 2 else 0.9):
                    lists[i] = draw.randint(-3, numbers)
            lists[-1] = draw.choice([rows, 5, 2**31 - 1, -1, rows // 2])
        run(both.launches("combine", True, (True, False)), draw)  # it may report what it found


def rejected(shape: Shape, draw: random.Random, dispatch: Blocks, combine: Blocks) -> None:
    """A rank rejects an operation: all others say so, and the operations behind it are as ever."""
    from cute_kernels import marks, sync
    from cute_kernels.heap import REASON_BYTES
    from cute_kernels.rejection import Reject

    both = Pair(shape, draw, dispatch, combine)
    ranks = both.ranks
    text = ranks.memory.take(REASON_BYTES, "text", 65)
    for kind in ("dispatch", "combine"):
        both.inputs()
        both.run("dispatch", True, False)
        if kind == "dispatch":
            both.inputs()
        usual, sync.POLLS_PER_CHECK = sync.POLLS_PER_CHECK, 8
        launches = both.launches(kind, True, (True, True))
        args = numbered(Reject.Args, ranks=ranks.args(1, marks.pack("rejected", 1)), text=text, blocks=1)
        launches[1] = Launch(Reject(both.heap.problem, both.heap.tokens), args)
        run(launches, draw)
        sync.POLLS_PER_CHECK = usual
        ranks.operations += 1
        ranks.check_wire()
        told = [ranks.reported(rank) for rank in range(ranks.world_size)]
        assert all(said[0] == (0, 0) for said in told), told
        assert all(said[1][0] == sync.REJECTION for rank, said in enumerate(told) if rank != 1), told
    pair_of(both, 1, False, True)
