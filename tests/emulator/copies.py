"""Checks of token-major dispatches, and of what runs along their routes, against tests/tokens.py."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from cases import random_tokens
from tokens import Copies, expected_copies, expected_rows, expected_sums, expected_weight_grads
from torch import Tensor

from . import formats, latency, throughput
from .ranks import Ranks, numbered, same
from .routes import Shape, drawn
from .threads import QUIET_TURNS, TICK, Launch, run


class Truth:
    """Inputs of all ranks, and what must come out, for `share` of the rows that there may be."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        case = dataclasses.replace(drawn(shape, draw), alignment=1, slots=(0,) * len(shape.experts))
        most = sum(idx.shape[0] for idx in case.topk_idx)
        rows = [int(most * shape.share) + draw.randint(0, 2) for _ in shape.experts]
        self.case = dataclasses.replace(case, capacity=tuple(rows))
        seed = draw.getrandbits(31)
        self.copies = expected_copies(case, rows)
        self.tokens = random_tokens(case, shape.hidden, torch.float32, seed)
        noise = torch.Generator().manual_seed(seed)
        self.y = [torch.randn(count, shape.hidden, generator=noise) for count in rows]
        self.weights = [torch.randn(count, shape.top_k, generator=noise) for count in rows]
        self.expected = [expected_rows(here, self.tokens) for here in self.copies]
        self.rows = [dataclasses.make_dataclass("Covered", ["covered"])(self.held(here)) for here in self.copies]

    def held(self, copies: Copies) -> Tensor:
        """bool [R]: rows that hold a token."""
        return torch.arange(copies.num_rows) < len(copies.rows)

    def owned(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(row, source rank, token, something) of each of them."""
        return [(row, *whose, 0) for row, whose in enumerate(self.copies[rank].rows)]


class Checked:
    """Inputs of all ranks for one token-major route, room for what comes, and whether it is right."""

    shape: Shape
    draw: random.Random
    ranks: Ranks
    truth: Any
    at: list[dict[str, int]]

    def inputs(self) -> None:
        self.truth = Truth(self.shape, self.draw)
        self.at = []
        for rank in range(self.ranks.world_size):
            self.at.append(self.ranks.along(self.truth, rank))
            self.renew(rank)

    def renew(self, rank: int) -> None:
        """New room for the outputs that have rows."""
        rows, tokens = self.truth.case.capacity[rank], self.truth.case.topk_idx[rank]
        blank, places = self.ranks.blank, rows * self.shape.top_k
        self.at[rank].update(
            recv_x=blank(rows * self.shape.hidden, "recv_x"), recv_weights=blank(places, "recv_weights"),
            recv_idx=blank(places, "recv_idx"), out=blank(tokens.shape[0] * self.shape.hidden, "out"),
            out_scalars=blank(tokens.numel(), "out_scalars"),
        )  # fmt: skip

    def check_plan(self) -> None:
        for rank, (want, at) in enumerate(zip(self.truth.copies, self.at, strict=True)):
            for name in ("send_rows", "offs", "counts", "dropped"):
                right = getattr(want, name)
                same(self.ranks.view(at[name], *right.shape), right, f"{name} of rank {rank}")
            same(
                self.ranks.view(at["arrivals"], want.arrivals.numel()), want.arrivals, f"arrivals of rank {rank}", True
            )
            same(self.ranks.view(at["recv_idx"], *want.local_idx.shape), want.local_idx, f"local ids of rank {rank}")

    def check_rows(self, weighted: bool, rows: bool, only: int | None = None) -> None:
        """Check the rows of all ranks, or of `only` one."""
        for rank, ((x, weights), at) in enumerate(zip(self.truth.expected, self.at, strict=True)):
            if only not in (None, rank):
                continue
            held = self.truth.rows[rank].covered
            if rows:
                same(self.ranks.floats(at["recv_x"], *x.shape)[held], x[held], f"rows of rank {rank}")
            if weighted:
                same(self.ranks.floats(at["recv_weights"], *weights.shape), weights, f"weights of rank {rank}")

    def check_sums(self, out: list[int]) -> None:
        wants = expected_sums(self.truth.case, self.truth.copies, self.truth.y, self.shape.domains)
        for rank, want in enumerate(wants):
            same(self.ranks.floats(out[rank], *want.shape), want, f"sums of rank {rank}")


class Steps(Checked, throughput.Steps):
    """Operations of all ranks along one token-major route after the other."""

    def dispatch(self, known: bool, weighted: bool = True, call: Any = None) -> None:  # type: ignore[override]
        """Along a new route, or along the route that was found before; rows of a `call` travel in a format."""
        launches: list[Launch] = []
        for rank in range(self.ranks.world_size):
            self.launch_dispatch(launches, rank, known, weighted, call)
        self.ranks.run(launches)
        if not known:
            self.check_plan()
        for rank, at in enumerate(self.at):
            if call:
                call.check(self, rank, at)
        self.check_rows(weighted, call is None)

    def check_received(self, only: int | None = None) -> None:
        self.check_rows(True, True, only)

    def launch_dispatch(
        self, launches: list[Launch], rank: int, known: bool, weighted: bool = True, call: Any = None
    ) -> None:
        """A rank's kernels."""
        from cute_kernels import marks
        from cute_kernels.throughput.publish import Publish
        from cute_kernels.throughput.publish_tokens import PublishTokens
        from cute_kernels.throughput.pull import Pull

        form, layout, given = (call.name, call.layout, call.given) if call else ("", "", False)
        kind = "dispatch_planned" if known else "dispatch"
        terms = marks.pack(kind, self.truth.case.max_tokens, weighted, format=form, token_major=True)
        staged, pushed = self.staged or bool(form), self.problem.has_room_for_pushes and not form
        none = dict.fromkeys(("offs", "counts", "dropped", "recv_idx"), 0) if known else {}
        none |= {} if weighted else {"recv_weights": 0}
        self.renew(rank)
        if call:
            self.at[rank].update(call.room(self, rank))
        first = len(launches)
        make: Any = Publish if known and not weighted else PublishTokens
        publish = make(self.problem, not known, staged, weighted, False, form, given, pushed)
        blocks = publish.tile_blocks + self.staging * staged
        launches.append(self.launch(rank, publish, terms, blocks=blocks, **none))
        pull = Pull(self.problem, weighted, False, not known, False, form, layout, pushed)
        launches.append(self.launch(rank, pull, terms, first, blocks=2 + self.joining * known, **{"zeros": 0}))
        if self.joining and not known:
            late = Pull(self.problem, weighted, False, True, True, form, layout, pushed)
            launches.append(self.launch(rank, late, terms, first + 1, blocks=self.joining, **{"zeros": 0}))

    def plan(self) -> None:
        """The first half of a dynamic dispatch."""
        from cute_kernels import marks
        from cute_kernels.throughput.publish_tokens import PublishTokens

        terms = marks.pack("plan", self.truth.case.max_tokens, rows=False, token_major=True)
        publish = PublishTokens(self.problem, True, False, False, True)
        launches = []
        for rank in range(self.ranks.world_size):
            self.renew(rank)
            blocks = throughput.TILES + bool(self.shape.domains)  # one relays
            launches.append(self.launch(rank, publish, terms, blocks=blocks, recv_weights=0))
        self.ranks.run(launches)
        self.check_plan()

    def combine(self, rows: bool, weighted: bool, scalars: bool, residual: bool) -> None:
        """The backward of a dispatch instead, which sums rows as a combine does, without weights or a residual."""
        self.backward(rows, scalars)

    def backward(self, rows: bool, scalars: bool) -> None:
        """Sums of y, and what the owners take of the weights' gradients."""
        from cute_kernels import marks
        from cute_kernels.throughput.combine import Combine

        terms = marks.pack(
            "dispatch_backward", self.truth.case.max_tokens, scalars=scalars, rows=rows, token_major=True
        )
        launches = []
        for rank, at in enumerate(self.at):
            self.renew(rank)
            given = {
                "recv_weights": 0, "row_scalars": at["weights"] if scalars else 0, "residual": 0,
                **self.combine_blocks(self.joining * rows),
            }  # fmt: skip
            kernel = Combine(self.problem, rows, False, scalars, False, scalars)
            launches.append(self.launch(rank, kernel, terms, **given))
        self.ranks.run(launches)
        if rows:
            self.check_sums(self.of("out"))
        if scalars:
            self.check_weight_grads()

    def check_weight_grads(self) -> None:
        grads = expected_weight_grads(self.truth.case, self.truth.copies, self.truth.weights)
        for rank, want in enumerate(grads):
            got = self.ranks.floats(self.at[rank]["out_scalars"], *want.shape)
            same(got, want, f"gradients of the weights of rank {rank}")


def steps(shape: Shape, draw: random.Random, joining: int = 2) -> None:
    """Everything along one route, then half of it along the next."""
    on = Steps(shape, draw, joining)
    on.inputs()
    on.dispatch(known=False)
    on.dispatch(known=True)
    on.backward(rows=True, scalars=True)
    on.gathered()
    on.inputs()
    on.plan()
    if on.staged:
        on.dispatch(known=True, weighted=False)
    on.dispatch(known=True)
    on.backward(rows=True, scalars=False)
    on.backward(rows=False, scalars=True)
    on.dispatch(known=False, weighted=False)


def pushed(shape: Shape, draw: random.Random, late: bool = False) -> None:
    """Dispatches along new and known routes, with weights and without, whose rows are pushed if staging has room for
    them. `late`: one rank is."""
    on = Steps(shape, draw, joining=draw.choice((0, 2)))
    on.ranks.late = draw.randrange(len(shape.experts)) if late else None
    for weighted in (True, False):
        on.inputs()
        on.dispatch(known=False, weighted=weighted)
        for blocks in (1, draw.choice((2, 3))):
            on.staging = blocks + (not on.problem.has_room_for_pushes)  # where rows are staged, one announces them
            on.dispatch(known=True, weighted=False)
    on.dispatch(known=True)


def garbage(shape: Shape, draw: random.Random) -> None:
    """A rank's route is overwritten: in a dispatch along it, kernels read and write nothing outside, and all of them
    end. Ranks report what they find, or that they wait for a row that nobody pushes."""
    from cute_kernels import sync

    on = Steps(shape, draw)
    on.inputs()
    on.dispatch(known=False)
    rank = draw.randrange(on.ranks.world_size)
    rows, tokens = on.truth.case.capacity[rank], on.truth.case.topk_idx[rank]
    sizes = {"arrivals": 4 * rows + on.ranks.world_size + 3, "send_rows": tokens.numel(), "topk_idx": tokens.numel()}
    for name, count in sizes.items():
        ints = on.ranks.view(on.at[rank][name], count)
        for i in range(count):
            if draw.random() < 0.5:
                ints[i] = draw.choice((draw.randint(-3, rows + 3), draw.randint(-(2**31), 2**31 - 1)))
    usual, sync.POLLS_PER_CHECK, on.ranks.timeout_ns = sync.POLLS_PER_CHECK, 8, 500 * TICK
    launches: list[Launch] = []
    for each in range(on.ranks.world_size):
        on.launch_dispatch(launches, each, known=True)
    run(launches, draw, quiet_turns=QUIET_TURNS + 1500)
    sync.POLLS_PER_CHECK = usual
    for each in range(on.ranks.world_size):
        assert on.ranks.reported(each)[0][0] in (0, sync.TIMEOUT, sync.PEER_FAILED)


def across(shape: Shape, draw: random.Random) -> None:
    """Where there are several NVLink domains; half of it, drawn, along a second route."""
    on = Steps(shape, draw)
    on.inputs()
    on.dispatch(known=False, weighted=draw.random() < 0.7)
    on.dispatch(known=True)
    on.backward(rows=True, scalars=True)
    on.inputs()
    on.plan()
    on.dispatch(known=True, weighted=draw.random() < 0.5)
    on.backward(rows=False, scalars=True)
    on.backward(rows=True, scalars=False)


def few(shape: Shape, draw: random.Random) -> None:
    """The latency kernels' combine, whole and split, along the route of a token-major dispatch."""
    from cute_kernels import marks
    from cute_kernels.latency.combine import LatencyCombine
    from cute_kernels.latency.sizes import LatencyHeap

    on = Steps(shape, draw)
    heap = LatencyHeap(on.problem, on.problem.max_tokens)
    on.ranks = latency.Ranks(heap, draw)
    for parts in ([(True, True)], [(True, False), (False, True)]):
        on.inputs()
        on.plan()
        for part in parts:
            launches = []
            for rank, at in enumerate(on.at):
                case = on.truth.case
                values: dict[str, Any] = {
                    **at, "ranks": on.ranks.args(rank, marks.pack("combine", case.max_tokens, latency=True)),
                    "tokens": case.topk_idx[rank].shape[0], "max_tokens": case.max_tokens, "recv_weights": 0,
                    "num_rows": case.capacity[rank], "senders": 1, "first_receiver": 1 if part == (True, True) else 0,
                    "blocks": 1 if part == (True, False) else 3,
                }  # fmt: skip
                args = numbered(LatencyCombine.Args, **{name: values[name] for name in LatencyCombine.Args._fields})
                launches.append(Launch(LatencyCombine(on.problem, heap.tokens, False, *part), args))
            on.ranks.run(launches, ends=part[1])
        on.check_sums(on.of("out"))


def formatted(shape: Shape, draw: random.Random, call: formats.Call) -> None:
    """Along a new route and along the same again."""
    on = Steps(shape, draw)
    on.inputs()
    call.odd(on)
    call.inputs(on)
    on.dispatch(known=False, call=call)
    on.dispatch(known=True, call=call)


CHECKS: dict[str, Callable[[random.Random], None]] = {
    "tokens": lambda draw: steps(Shape((3, 0, 5), 5, 4), draw),
    "tokens_dropping": lambda draw: steps(Shape((2, 3), 4, 7, share=draw.choice((0.0, 0.3, 0.6))), draw, joining=3),
    "tokens_skewed": lambda draw: steps(Shape((1, 4, 2), 6, 5, hidden=36, skewed=True, share=0.8), draw),
    "tokens_one_rank": lambda draw: steps(Shape((4,), 3, 5, share=draw.choice((0.5, 1.0))), draw, joining=0),
    "tokens_few": lambda draw: few(Shape((3, 2), 4, 4, share=draw.choice((0.5, 1.0))), draw),
    "tokens_across": lambda draw: across(
        Shape((2, 0, 3, 2), 3, 3, domains=((0, 3), (1, 2)), wire="nvshmem", share=draw.choice((0.5, 1.0))), draw
    ),
    "tokens_across_alone": lambda draw: across(Shape((3, 4), 5, 4, domains=((0,), (1,)), wire="nvlink"), draw),
    "pushes": lambda draw: pushed(Shape((2, 3), 3, 12, hidden=100), draw),
    "pushes_late": lambda draw: pushed(Shape((2, 1, 2), 3, 3), draw, late=True),
    "pushes_wide": lambda draw: pushed(Shape((2, 0, 1, 3), 4, 3, hidden=264, share=draw.choice((0.5, 1.0))), draw),
    "pushes_garbage": lambda draw: garbage(Shape((2, 3), 3, 4), draw),
    "pushes_rejected": lambda draw: throughput.rejected(Shape((3, 0, 2), 3, 3, share=0.4), draw, Steps),
    "pushes_absent": lambda draw: throughput.absent(
        Shape((3, 0, 2), 3, 3), draw, warned=draw.random() < 0.5, known=draw.random() < 0.5, make=Steps
    ),
    "pushes_half_launched": lambda draw: throughput.half(Shape((2, 2), 2, 2), draw, Steps),
    "tokens_staged": lambda draw: pushed(Shape((2, 3), 1, 3), draw),
    "tokens_columns": lambda draw: formatted(
        Shape((2, 3), 3, 4, hidden=256, share=0.7), draw,
        formats.Call("e4m3/128/pow2", "columns", draw.random() < 0.5, zeros=False),
    ),
    "tokens_mx": lambda draw: formatted(
        Shape((2, 2), 2, 4, hidden=160), draw,
        formats.Call("e4m3/32/mx", draw.choice(["rows", ""]), False, zeros=False),
    ),
}  # fmt: skip
