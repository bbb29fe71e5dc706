"""Checks of operations that go in rounds: a route that is told once, whose rows are moved and added up by several
operations along its parts (`ep_ops.arrivals.part`), each of some tokens of every rank."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import expected_weight_grads

from . import copies, deaths, formats, machine, throughput
from .dsl import TILES
from .ranks import REPORT_WORDS, same
from .routes import Shape
from .threads import TICK, Launch, run


def in_rounds(on: throughput.Steps, tokens: int) -> None:
    """Gives `on`, which has run nothing yet, memory for rounds of so many tokens."""
    from cute_kernels.heap import Heap

    problem = dataclasses.replace(on.problem, max_tokens=tokens, route_tokens=on.problem.max_tokens)
    on.problem, on.ranks = problem, type(on.ranks)(Heap(problem), on.draw, mapped=on.shape.wire != "nvshmem")


def launch_plan(on: throughput.Steps, rank: int) -> Launch:
    from cute_kernels import marks
    from cute_kernels.throughput.publish import Publish

    terms = marks.pack("dispatch", on.truth.case.max_tokens, scalars=True)
    return on.launch(rank, Publish(on.problem, True, False, False, True), terms, blocks=TILES)


def plan(on: throughput.Steps) -> None:
    on.ranks.run([launch_plan(on, rank) for rank in range(on.ranks.world_size)])
    on.truth.check_plan(on.ranks, on.at)


def parts(on: throughput.Steps, row: int = 0, scales: int = 0) -> Iterator[list[dict[str, int]]]:
    """Return the arguments of each rank's kernels for each round. `row`, `scales`: bytes of a token's row in x, and of
    the scales that are given with it; rows have `hidden` numbers of fp32 unless it is said."""
    from ep_ops import arrivals

    case, k, own_row = on.truth.case, on.shape.top_k, 4 * on.shape.hidden
    each = on.problem.max_tokens
    for first in range(0, case.max_tokens, each):
        told = []
        for rank, at in enumerate(on.at):
            rows, own = case.capacity[rank], case.topk_idx[rank].shape[0]
            whole = on.ranks.view(at["arrivals"], arrivals.size(rows, case.world_size))
            tokens = min(each, case.max_tokens - first)
            part = arrivals.part(whole, case.world_size, case.max_tokens, k, first, tokens)
            begin = min(first, own)
            told.append(dict(
                arrivals=on.ranks.memory.put(part, "part"), x=at["x"] + begin * (row or own_row),
                out=at["out"] + begin * own_row, scales=at.get("scales", 0) + begin * scales,
                max_tokens=tokens, tokens=min(max(own - first, 0), tokens),
                **{name: at[name] + begin * k * 4 for name in ("topk_idx", "topk_weights", "send_rows", "out_scalars")},
            ))  # fmt: skip
        yield told


NONE = dict.fromkeys(("offs", "counts", "dropped", "recv_idx"), 0)
"""What the publish kernel of a round does not write."""


class Dispatch:
    """How each round of a dispatch is launched: its kernels, whether the first one clears padding, and what it moves
    rows for."""

    def __init__(
        self, on: throughput.Steps, kind: str, publish: Any, pull: Any, weighted: bool = True, zeros: bool = True
    ) -> None:
        from cute_kernels import marks

        self.on, self.publish, self.pull, self.zeros = on, publish, pull, zeros
        self.terms = marks.pack(kind, on.truth.case.max_tokens, scalars=weighted, format=publish.format)

    def launch(self, launches: list[Launch], rank: int, part: dict[str, int], number: int) -> None:
        """A rank's kernels of the `number`-th round."""
        on, first = self.on, len(launches)
        blocks = on.staging + self.publish.tile_blocks
        told = {**part, **NONE, "capacity": 0}
        launches.append(on.launch(rank, self.publish, self.terms, blocks=blocks, **told))
        told = {**part, "zeros": int(self.zeros and number == 0)}
        launches.append(on.launch(rank, self.pull, self.terms, first, blocks=2 + on.joining, **told))

    def run(self, row: int = 0, scales: int = 0) -> None:
        for number, told in enumerate(parts(self.on, row, scales)):
            launches: list[Launch] = []
            for rank, part in enumerate(told):
                self.launch(launches, rank, part, number)
            self.on.ranks.run(launches)


def dispatch_of(on: throughput.Steps, kind: str = "dispatch", weighted: bool = True) -> Dispatch:
    """Return the dispatch of rows as they are, grouped by expert."""
    from cute_kernels.throughput.publish import Publish
    from cute_kernels.throughput.pull import Pull

    publish = Publish(on.problem, False, True, weighted, False)
    return Dispatch(on, kind, publish, Pull(on.problem, weighted, False, False, False), weighted)


def combine(on: throughput.Steps, kernel: Any, kind: str = "combine", **given: str) -> None:
    """`given`: arguments by the name of what they are."""
    from cute_kernels import marks

    terms = marks.pack(kind, on.truth.case.max_tokens, scalars=kernel.scalars, rows=kernel.rows)
    for rank in range(on.ranks.world_size):
        on.renew(rank)
    for told in parts(on):
        launches = []
        for rank, part in enumerate(told):
            values: dict[str, Any] = {"recv_weights": 0, "row_scalars": 0, "residual": 0}
            values |= {name: {**on.at[rank], **part}[what] for name, what in given.items()}
            blocks = on.combine_blocks(on.joining * kernel.rows)
            launches.append(on.launch(rank, kernel, terms, **{**part, **values, **blocks}))
        on.ranks.run(launches)


def scaled_backward(on: throughput.Steps) -> None:
    """The backward of a weighted combine, where x is the gradient of what it gave."""
    from cute_kernels import marks
    from cute_kernels.throughput.publish import Publish
    from cute_kernels.throughput.pull_scaled import PullScaled

    terms = marks.pack("combine_backward", on.truth.case.max_tokens, scalars=True)
    publish, pull = Publish(on.problem, False, True, False, False), PullScaled(on.problem, False)
    for rank in range(on.ranks.world_size):
        on.renew(rank)
    for told in parts(on):
        launches: list[Launch] = []
        for rank, part in enumerate(told):
            at, first = on.at[rank], len(launches)
            none = {**NONE, "topk_weights": 0, "recv_weights": 0}
            launches.append(on.launch(rank, publish, terms, blocks=on.staging, **{**part, **none}))
            given = {"grad_out": part["x"], "recv_weights": at["weights"], "grad_y": at["recv_x"],
                     "grad_weights": at["recv_weights"], "blocks": 2}  # fmt: skip
            launches.append(on.launch(rank, pull, terms, first, **{**part, **given}))
        on.ranks.run(launches)
    on.check_scaled()


def begun(shape: Shape, draw: random.Random, tokens: int) -> throughput.Steps:
    on = throughput.Steps(shape, draw)
    in_rounds(on, tokens)
    on.inputs()
    return on


def grouped(shape: Shape, draw: random.Random, tokens: int, late: bool = False) -> None:
    """`late`: a rank is, in every round."""
    from cute_kernels.throughput.combine import Combine

    on = begun(shape, draw, tokens)
    on.ranks.late = draw.randrange(len(shape.experts)) if late else None
    plan(on)
    dispatch_of(on).run()
    on.truth.check_rows(on.ranks, on.of("recv_x"), on.of("recv_weights"))
    combine(on, Combine(on.problem, True, True, False, True), recv_weights="weights", residual="x")
    on.truth.check_combined(on.ranks, on.of("out"), weighted=True, residual=True)


def gradients(shape: Shape, draw: random.Random, tokens: int) -> None:
    """And dispatches along the route, with weights and without, and a gathering combine."""
    from cute_kernels.throughput.combine import Combine

    on = begun(shape, draw, tokens)
    plan(on)
    for weighted in (True, False):
        for rank in range(on.ranks.world_size):
            on.renew(rank)
        dispatch_of(on, "dispatch_planned", weighted).run()
        on.truth.check_rows(on.ranks, on.of("recv_x"), on.of("recv_weights") if weighted else None)
    for rows in (True, False):
        combine(on, Combine(on.problem, rows, False, True, False), "dispatch_backward", row_scalars="weights")
        if rows:
            on.truth.check_combined(on.ranks, on.of("out"), weighted=False)
        for rank, want in enumerate(expected_weight_grads(on.truth.case, on.truth.plans, on.truth.weights)):
            got = on.ranks.floats(on.at[rank]["out_scalars"], *want.shape)
            same(got, want, f"scalars of rank {rank}")
    scaled_backward(on)
    if not shape.domains:
        on.gathered()  # stages nothing: one operation


def token_major(shape: Shape, draw: random.Random, tokens: int) -> None:
    from cute_kernels.throughput.combine import Combine
    from cute_kernels.throughput.publish_tokens import PublishTokens
    from cute_kernels.throughput.pull import Pull

    on = copies.Steps(shape, draw)
    in_rounds(on, tokens)
    on.inputs()
    on.plan()
    for rank, at in enumerate(on.at):  # what a round does not clear
        on.ranks.view(at["recv_weights"], on.truth.case.capacity[rank] * shape.top_k).zero_()
    pushes = on.problem.has_room_for_pushes
    publish = PublishTokens(on.problem, False, True, True, False, pushes=pushes)
    Dispatch(on, "dispatch", publish, Pull(on.problem, True, False, False, False, pushed=pushes), zeros=False).run()
    on.check_rows(weighted=True, rows=True)
    combine(on, Combine(on.problem, True, False, True, False, True), row_scalars="weights")
    on.check_sums(on.of("out"))
    on.check_weight_grads()


def formatted(shape: Shape, draw: random.Random, tokens: int, call: formats.Call) -> None:
    """Rows in a format; padding, and the scales of it, are cleared by the first round alone."""
    from cute_kernels.throughput.publish import Publish
    from cute_kernels.throughput.pull import Pull

    on = begun(shape, draw, tokens)
    call.odd(on)
    call.inputs(on)
    plan(on)
    for rank, at in enumerate(on.at):
        at.update(call.room(on, rank))
    publish = Publish(on.problem, False, True, True, False, call.name, call.given)
    pull = Pull(on.problem, True, False, False, False, call.name, call.layout)
    count = call.scales[0].shape[1]
    row, scales = (shape.hidden, count * (1 if call.short == "32/mx" else 4)) if call.given else (0, 0)
    Dispatch(on, "dispatch", publish, pull, zeros=call.zeros).run(row, scales)
    for rank, at in enumerate(on.at):
        call.check(on, rank, at)
        formats.check_weights(on, rank, at, call.zeros)


def sizes(on: throughput.Steps, rank: int) -> dict[str, tuple[int, int]]:
    """Return the sizes of a rank's route: how many ints, and how large they may be."""
    case = on.truth.case
    rows, held = case.capacity[rank], case.experts_per_rank[rank]
    return {
        "arrivals": (4 * rows + case.world_size + 3, rows), "send_rows": (case.topk_idx[rank].numel(), rows),
        "offs": (held, rows), "counts": (held, rows), "dropped": (held, rows),
    }  # fmt: skip


def rejected(shape: Shape, draw: random.Random, tokens: int) -> None:
    """A rank rejects a dispatch, as many operations as the others make of it. They say so, and nothing else: of a route
    that is rejected nothing is placed, and rounds take nothing for a part of it. The next dispatch is as ever."""
    from cute_kernels import sync
    from ep_ops import arrivals

    on = begun(shape, draw, tokens)
    usual, sync.POLLS_PER_CHECK = sync.POLLS_PER_CHECK, 8
    rejects = draw.randrange(on.ranks.world_size)
    others = [rank for rank in range(on.ranks.world_size) if rank != rejects]

    def end(launches: list[Launch], turn: int) -> None:
        run([*launches, on.launch_rejection(rejects, turn)], draw)
        on.ranks.operations += 1
        assert not any(network.puts for network in machine.networks), "a put that nobody has waited for"
        for rank in others:
            words = on.ranks.view(on.ranks.reports[rank], 2 * REPORT_WORDS).view(2, -1)[0, ::2].tolist()
            of = len(words) // 4
            failed, value, rejection = (words[of * record : of * (record + 1)] for record in range(3))
            assert not any(failed) and not any(value) and rejection[1] == sync.REJECTION, (turn, rank, words)
            on.ranks.view(on.ranks.reports[rank], REPORT_WORDS).zero_()
        for rank in range(on.ranks.world_size):
            assert on.ranks.memory.load_long(on.ranks.epoch_of(rank)) == 1 + on.ranks.operations

    for rank in others:  # what stands there is anything
        for name, (count, most) in sizes(on, rank).items():
            there = [draw.randint(-2, most) for _ in range(count)]
            on.ranks.view(on.at[rank][name], count)[:] = torch.tensor(there, dtype=torch.int32)
    end([launch_plan(on, rank) for rank in others], 0)
    dispatch = dispatch_of(on)
    for rank in others:
        held = on.truth.case.experts_per_rank[rank]
        assert not any(on.ranks.view(on.at[rank][name], held).any() for name in ("offs", "counts"))
    for number, told in enumerate(parts(on)):
        launches: list[Launch] = []
        for rank in others:
            ints, rows = sizes(on, rank)["arrivals"]
            lists = arrivals.views(on.ranks.view(told[rank]["arrivals"], ints), rows)
            assert not lists.sources.any(), f"copies of a route that was rejected, rank {rank}"
            dispatch.launch(launches, rank, told[rank], number)
        end(launches, 1 + number)
    sync.POLLS_PER_CHECK = usual
    on.inputs()
    plan(on)
    dispatch_of(on).run()
    on.truth.check_rows(on.ranks, on.of("recv_x"), on.of("recv_weights"))


def death(shape: Shape, draw: random.Random, tokens: int) -> None:
    """A rank dies in the second round, and is not there in the one behind it."""
    on = begun(shape, draw, tokens)
    plan(on)
    dispatch, (first, second, third) = dispatch_of(on), list(parts(on))[:3]
    since, launches = machine.clock, list[Launch]()
    for rank, part in enumerate(first):
        dispatch.launch(launches, rank, part, 0)
    on.ranks.run(launches)

    def of(told: list[dict[str, int]]) -> deaths.Build:
        return lambda launches, rank: dispatch.launch(launches, rank, told[rank], 1)

    deaths.die(on.ranks, draw, of(second), of(third), lambda rank: None, (machine.clock - since) // TICK)


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "rounds": lambda draw: grouped(Shape((3, 0, 5), 4, 7, alignment=4, share=0.7), draw, draw.choice((2, 3))),
    "rounds_across": lambda draw: grouped(
        Shape((2, 1, 3, 2), 3, 4, domains=((0, 3), (1, 2)), wire="nvshmem"), draw, draw.choice((2, 3))
    ),
    "rounds_late": lambda draw: grouped(Shape((2,) * 3, 2, 4, alignment=2), draw, 2, late=True),
    "rounds_gradients": lambda draw: gradients(
        Shape((3, 0, 5), 3, 5, alignment=4, share=0.7, slots=draw.choice(((0,), (0, 4, 8)))), draw, 2
    ),
    "rounds_gradients_across": lambda draw: gradients(
        Shape((3, 2), 3, 5, domains=((0,), (1,)), wire="nvshmem"), draw, draw.choice((2, 3))
    ),
    "rounds_tokens": lambda draw: token_major(
        Shape((3, 2), 4, 6, share=0.8, domains=((0,), (1,)), wire="nvshmem"), draw, draw.choice((2, 4))
    ),
    "rounds_pushed": lambda draw: token_major(Shape((3, 0, 2), 4, 5, share=0.8), draw, draw.choice((2, 3))),
    "rounds_formats": lambda draw: formatted(
        Shape((2, 2), 2, 5, hidden=160, alignment=4), draw, draw.choice((2, 3)),
        formats.Call(
            "e4m3/32/mx", draw.choice(("rows", "packed", formats.swizzled(draw))), draw.random() < 0.5,
            zeros=draw.random() < 0.7,
        ),
    ),
    "rounds_formats_across": lambda draw: formatted(
        Shape((2, 2), 3, 5, hidden=256, alignment=2, domains=((0,), (1,)), wire="nvshmem"), draw, 2,
        formats.Call("e4m3/128/pow2", draw.choice(("", "columns", "rows")), draw.random() < 0.3),
    ),
    "rounds_rejected": lambda draw: rejected(Shape((3, 2), 3, 6), draw, 3),
    "rounds_rejected_across": lambda draw: rejected(
        Shape((2, 2), 3, 4, domains=((0,), (1,)), wire="nvshmem"), draw, 2
    ),
    "death_rounds": lambda draw: death(Shape((3, 1, 2), 3, 6, alignment=4), draw, 2),
    "death_rounds_across": lambda draw: death(Shape((2, 1), 2, 6, domains=((0,), (1,)), wire="nvshmem"), draw, 2),
}  # fmt: skip
