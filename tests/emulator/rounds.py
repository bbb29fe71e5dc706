"""Checks of operations that go in rounds: a route that is told once, whose rows are moved and added up by several
operations along its parts (`ep_ops.arrivals.part`), each of some tokens of every rank."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

from . import copies, throughput
from .dsl import TILES
from .routes import Shape
from .threads import Launch


def in_rounds(on: throughput.Steps, tokens: int) -> None:
    """Gives `on`, which has run nothing yet, memory for rounds of so many tokens."""
    from cute_kernels.heap import Heap

    problem = dataclasses.replace(on.problem, max_tokens=tokens, route_tokens=on.problem.max_tokens)
    on.problem, on.ranks = problem, type(on.ranks)(Heap(problem), on.draw, mapped=on.shape.wire != "nvshmem")


def plan(on: throughput.Steps) -> None:
    from cute_kernels import marks
    from cute_kernels.throughput.publish import Publish

    terms = marks.pack("dispatch", on.truth.case.max_tokens, scalars=True)
    publish = Publish(on.problem, True, False, False, True)
    on.ranks.run([on.launch(rank, publish, terms, blocks=TILES) for rank in range(on.ranks.world_size)])
    on.truth.check_plan(on.ranks, on.at)


def parts(on: throughput.Steps) -> Iterator[list[dict[str, int]]]:
    """Of each round what each rank's kernels are told of it."""
    from ep_ops import arrivals

    case, k, row = on.truth.case, on.shape.top_k, 4 * on.shape.hidden
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
                arrivals=on.ranks.memory.put(part, "part"), x=at["x"] + begin * row, out=at["out"] + begin * row,
                max_tokens=tokens, tokens=min(max(own - first, 0), tokens),
                **{name: at[name] + begin * k * 4 for name in ("topk_idx", "topk_weights", "send_rows", "out_scalars")},
            ))  # fmt: skip
        yield told


def dispatch(on: throughput.Steps, kind: str, publish: Any, pull: Any, **given: Any) -> None:
    from cute_kernels import marks

    terms = marks.pack(kind, on.truth.case.max_tokens, scalars=True)
    for number, told in enumerate(parts(on)):
        launches: list[Launch] = []
        for rank, part in enumerate(told):
            blocks = publish.tile_blocks + on.staging
            none = dict.fromkeys(("send_rows", "offs", "counts", "dropped"), 0)
            first = len(launches)
            launches.append(on.launch(rank, publish, terms, blocks=blocks, **{**part, **none, **given}))
            zeros = int(number == 0 and not given)
            launches.append(on.launch(rank, pull, terms, first, blocks=2 + on.joining, **{**part, "zeros": zeros}))
        on.ranks.run(launches)


def combine(on: throughput.Steps, kernel: Any, **given: str) -> None:
    """`given`: arguments by the name of what they are."""
    from cute_kernels import marks

    terms = marks.pack("combine", on.truth.case.max_tokens, scalars=kernel.scalars, rows=kernel.rows)
    for rank in range(on.ranks.world_size):
        on.renew(rank)
    for told in parts(on):
        launches = []
        for rank, part in enumerate(told):
            values: dict[str, Any] = {"recv_weights": 0, "row_scalars": 0, "residual": 0}
            values |= {name: {**on.at[rank], **part}[what] for name, what in given.items()}
            dealt = on.dealt(on.joining * kernel.rows)
            launches.append(on.launch(rank, kernel, terms, **{**part, **values, **dealt}))
        on.ranks.run(launches)


def grouped(shape: Shape, draw: random.Random, tokens: int) -> None:
    from cute_kernels.throughput.combine import Combine
    from cute_kernels.throughput.publish import Publish
    from cute_kernels.throughput.pull import Pull

    on = throughput.Steps(shape, draw)
    in_rounds(on, tokens)
    on.inputs()
    plan(on)
    publish = Publish(on.problem, False, True, True, False)
    dispatch(on, "dispatch", publish, Pull(on.problem, True, False, False, False))
    on.truth.check_rows(on.ranks, on.of("recv_x"), on.of("recv_weights"))
    combine(on, Combine(on.problem, True, True, False, True), recv_weights="weights", residual="x")
    on.truth.check_combined(on.ranks, on.of("out"), weighted=True, residual=True)


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
    publish = PublishTokens(on.problem, False, True, True, False)
    pull = Pull(on.problem, True, False, False, False)
    dispatch(on, "dispatch_tokens", publish, pull, recv_idx=0, capacity=0)
    on.check_rows(weighted=True, rows=True)
    combine(on, Combine(on.problem, True, False, True, False, True), row_scalars="weights")
    on.check_sums(on.of("out"))
    on.check_weight_grads()


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "rounds": lambda draw: grouped(Shape((3, 0, 5), 4, 7, alignment=4, share=0.7), draw, draw.choice((2, 3))),
    "rounds_across": lambda draw: grouped(
        Shape((2, 1, 3, 2), 3, 4, domains=((0, 3), (1, 2)), wire="nvshmem"), draw, draw.choice((2, 3))
    ),
    "rounds_tokens": lambda draw: token_major(
        Shape((3, 2), 4, 6, share=0.8, domains=((0,), (1,)), wire="nvshmem"), draw, draw.choice((2, 4))
    ),
}  # fmt: skip
