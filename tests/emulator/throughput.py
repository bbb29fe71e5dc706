"""Checks of the throughput kernels, operation after operation on the same heaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from cases import expected_weight_grads

from .dsl import TILES
from .ranks import Ranks, numbered, same
from .routes import DEPTH, Shape, Truth, drawn, untell, wire_of
from .threads import TICK, Launch, run

STAGING = 2
"""Blocks that stage x behind those of the tiles."""
LATE = 40
"""The most rounds that a dependent kernel's blocks start late."""


class Steps:
    """Operations of all ranks along one route after the other."""

    def __init__(self, shape: Shape, draw: random.Random, joining: int = 2) -> None:
        from cute_kernels.heap import Heap, Problem

        self.shape, self.draw, self.joining = shape, draw, joining
        bound = shape.max_tokens + draw.randint(0, 3)
        self.problem = Problem(
            len(shape.experts), shape.experts, shape.top_k, shape.hidden, "fp32", bound, shape.domains, wire_of(shape),
            counts_waits=shape.counts_waits,
        )  # fmt: skip
        self.ranks = Ranks(
            Heap(self.problem), draw, mapped=shape.wire != "nvshmem", depth=DEPTH * (shape.wire == "adversary")
        )
        self.staging = 5 if shape.domains else STAGING
        self.staged = len(shape.experts) > 1  # a single rank reads its own x where it is

    def inputs(self) -> None:
        """A new route."""
        case = drawn(self.shape, self.draw)
        self.truth = Truth(case, self.shape.hidden, self.draw.getrandbits(31), self.shape.domains)
        self.at: list[dict[str, int]] = []
        for rank in range(self.ranks.world_size):
            self.at.append(self.ranks.along(self.truth, rank))
            self.renew(rank)

    def renew(self, rank: int) -> None:
        """New room for the outputs that have rows."""
        rows, tokens = self.truth.case.capacity[rank], self.truth.case.topk_idx[rank]
        blank, hidden = self.ranks.blank, self.shape.hidden
        self.at[rank].update(
            recv_x=blank(rows * hidden, "recv_x"), recv_weights=blank(rows, "recv_weights"),
            out=blank(tokens.shape[0] * hidden, "out"), out_scalars=blank(tokens.numel(), "out_scalars"),
        )  # fmt: skip

    def launch(self, rank: int, kernel: Any, terms: int, after: int | None = None, **values: Any) -> Launch:
        """Arguments that are not given are those of the route, or the rank's tensor of that name."""
        case = self.truth.case
        usual = {
            "scales": 0, "recv_scales": 0, "recv_idx": 0, "zeros": 1, **self.at[rank],
            "ranks": self.ranks.args(rank, terms), "tokens": case.topk_idx[rank].shape[0],
            "max_tokens": case.max_tokens, "capacity": case.capacity[rank], "num_rows": case.capacity[rank],
            "alignment": case.alignment, "slots": case.slots[rank], "expected": 2, "dealt": 2, "joining": self.joining,
            **values,
        }  # fmt: skip
        args = numbered(kernel.Args, **{name: usual[name] for name in kernel.Args._fields})
        return Launch(kernel, args, after, LATE if after is not None else 0)

    def dispatch(self, known: bool) -> None:
        """Along a new route, with a grid of late blocks that join, or along the route that was found before."""
        launches: list[Launch] = []
        for rank in range(self.ranks.world_size):
            self.launch_dispatch(launches, rank, known)
        self.ranks.run(launches)
        if not known:
            self.truth.check_plan(self.ranks, self.at)
        self.check_received()

    def check_received(self, only: int | None = None) -> None:
        """Check the rows that the last dispatch delivered to all ranks, or to `only` one."""
        self.truth.check_rows(self.ranks, self.of("recv_x"), self.of("recv_weights"), only=only)

    def launch_dispatch(self, launches: list[Launch], rank: int, known: bool, **given: int) -> None:
        """A rank's kernels. `given`: other arguments of the first one."""
        from cute_kernels import marks
        from cute_kernels.throughput.publish import Publish
        from cute_kernels.throughput.pull import Pull

        terms = marks.pack("dispatch_planned" if known else "dispatch", self.truth.case.max_tokens, scalars=True)
        self.renew(rank)
        none = dict.fromkeys(("send_rows", "offs", "counts", "dropped"), 0) if known else {}
        blocks = TILES + self.staging * self.staged
        first = len(launches)
        publish = Publish(self.problem, not known, self.staged, True, False)
        launches.append(self.launch(rank, publish, terms, blocks=blocks, **none, **given))
        pull = Pull(self.problem, True, False, not known, False)
        launches.append(self.launch(rank, pull, terms, first, blocks=2 + self.joining * known))
        if self.joining and not known:
            late = Pull(self.problem, True, False, True, True)
            launches.append(self.launch(rank, late, terms, first + 1, blocks=self.joining))

    def without(self, rank: int, rejects: bool, known: bool = False) -> list[list[tuple[int, int]]]:
        """A dispatch in which a rank does not take part, or that it rejects: what the ranks report. Nobody hangs, or
        reads what nobody wrote (the memory looks at that)."""
        from cute_kernels import sync

        usual = sync.POLLS_PER_CHECK
        sync.POLLS_PER_CHECK, self.ranks.timeout_ns = 8, 1 << 40 if rejects else 200 * TICK
        launches: list[Launch] = []
        for other in range(self.ranks.world_size):
            if other != rank:
                self.launch_dispatch(launches, other, known)
        if rejects:
            launches.append(self.launch_rejection(rank))
        run(launches, self.draw)
        sync.POLLS_PER_CHECK, self.ranks.timeout_ns = usual, 1 << 40
        self.ranks.operations += 1
        return [self.ranks.reported(other) for other in range(self.ranks.world_size)]

    def launch_rejection(self, rank: int, turn: int = 0) -> Launch:
        """Return the launch of a rank in place of an operation, or of one of several that an operator takes."""
        from cute_kernels import marks
        from cute_kernels.heap import REASON_BYTES
        from cute_kernels.rejection import Reject

        text = self.ranks.memory.take(REASON_BYTES, "text", 65)
        args = numbered(Reject.Args, ranks=self.ranks.args(rank, marks.pack_rejection(rank, turn)), text=text, blocks=1)
        return Launch(Reject(self.problem), args)

    def half(self, rank: int) -> None:
        """Run a dispatch of which `rank` launches only the first kernel. The other ranks depend on no more."""
        launches: list[Launch] = []
        for other in range(self.ranks.world_size):
            self.launch_dispatch(launches, other, False)
        rest = [i for i, launch in enumerate(launches) if launch.args.ranks.rank == rank][1:]
        assert [*range(rest[0], rest[-1] + 1)] == rest and rest[-1] == len(launches) - 1, "nothing depends on those"
        run(launches[: rest[0]], self.draw)
        self.ranks.operations += 1
        for other in range(self.ranks.world_size):
            if other != rank:
                self.check_received(other)

    def given_up(self, rank: int, why: bytes) -> list[tuple[int, int]]:
        """Run the next dispatch of the other ranks while the host of `rank` gives up. Return the report of each rank,
        which is long before a deadline."""
        from cute_kernels import sync
        from cute_kernels.alarm import RaiseAlarm

        usual = sync.POLLS_PER_CHECK
        sync.POLLS_PER_CHECK = 8
        launches: list[Launch] = []
        for other in range(self.ranks.world_size):
            if other != rank:
                self.launch_dispatch(launches, other, False)
        text = self.ranks.memory.put(torch.frombuffer(bytearray(why), dtype=torch.uint8).view(torch.int32), "text")
        args = numbered(RaiseAlarm.Args, ranks=self.ranks.args(rank, 0), text=text, blocks=1)
        run([*launches, Launch(RaiseAlarm(self.problem), args, behind=self.draw.randint(0, 200))], self.draw)
        sync.POLLS_PER_CHECK = usual
        return [self.ranks.reported(other)[0] for other in range(self.ranks.world_size)]

    def disagreeing(self, rank: int) -> list[list[tuple[int, int]]]:
        """A combine on one rank, a dispatch on all others: what the ranks report, long before a deadline."""
        from cute_kernels import sync

        usual = sync.POLLS_PER_CHECK
        sync.POLLS_PER_CHECK = 8
        launches: list[Launch] = []
        for other in range(self.ranks.world_size):
            if other == rank:
                launches.append(self.launch_combine(rank))
            else:
                self.launch_dispatch(launches, other, known=False)
        run(launches, self.draw)
        sync.POLLS_PER_CHECK = usual
        self.ranks.operations += 1
        return [self.ranks.reported(other) for other in range(self.ranks.world_size)]

    def combine_blocks(self, joining: int) -> dict[str, int]:
        """The blocks of a combine: across domains one may have to pass sums on, and to add up."""
        return {"pushers": self.draw.choice((1, 2, 3)), "joining": joining, "blocks": 4 + joining}

    def launch_combine(self, rank: int) -> Launch:
        """Return the launch of a weighted combine without a residual."""
        from cute_kernels import marks
        from cute_kernels.throughput.combine import Combine

        self.renew(rank)
        given = {"recv_weights": self.at[rank]["weights"], "row_scalars": 0, "residual": 0, **self.combine_blocks(0)}
        terms = marks.pack("combine", self.truth.case.max_tokens)
        return self.launch(rank, Combine(self.problem, True, True, False, False), terms, **given)

    def late(self, rank: int, warned: bool, known: bool) -> list[tuple[int, int]]:
        """The dispatch that a rank has missed: what it reports. If that is nothing, what came is right. Not `warned`:
        what those that gave up have told it has not come yet."""
        from cute_kernels.heap import FAILED

        if not warned:
            for word in (FAILED * 8, self.ranks.heap.offset["alarm"]):
                self.ranks.memory.store_long(self.ranks.heaps[rank] + word, 0)
        launches: list[Launch] = []
        self.launch_dispatch(launches, rank, known)
        run(launches, self.draw)
        said = self.ranks.reported(rank)
        if not any(reason for reason, _ in said):
            self.check_received(rank)
        return said

    def garbage(self, rank: int) -> list[tuple[int, int]]:
        """A combine of all ranks, in which those that gave up have garbage: what `rank` reports, which did not."""
        from cute_kernels import sync

        usual = sync.POLLS_PER_CHECK
        sync.POLLS_PER_CHECK, self.ranks.timeout_ns = 8, 200 * TICK
        launches = [self.launch_combine(other) for other in range(self.ranks.world_size)]
        run(launches, self.draw)
        sync.POLLS_PER_CHECK, self.ranks.timeout_ns = usual, 1 << 40
        return self.ranks.reported(rank)

    def of(self, name: str) -> list[int]:
        return [at[name] for at in self.at]

    def combine(self, rows: bool, weighted: bool, scalars: bool, residual: bool) -> None:
        """Sums of y, which are also the gradients of x in the backward of dispatch; scalars: those of the weights."""
        from cute_kernels import marks
        from cute_kernels.throughput.combine import Combine

        kind = "dispatch_backward" if scalars else "combine"
        terms = marks.pack(kind, self.truth.case.max_tokens, scalars=scalars, rows=rows)
        launches = []
        for rank, at in enumerate(self.at):
            self.renew(rank)
            given = {
                "recv_weights": at["weights"] if weighted else 0, "row_scalars": at["weights"] if scalars else 0,
                "residual": at["x"] if residual else 0, **self.combine_blocks(self.joining * rows),
            }  # fmt: skip
            launches.append(self.launch(rank, Combine(self.problem, rows, weighted, scalars, residual), terms, **given))
        self.ranks.run(launches)
        if rows:
            self.truth.check_combined(self.ranks, self.of("out"), weighted, residual)
        if scalars:
            grads = expected_weight_grads(self.truth.case, self.truth.plans, self.truth.weights)
            for rank, want in enumerate(grads):
                got = self.ranks.floats(self.at[rank]["out_scalars"], *want.shape)
                same(got, want, f"scalars of rank {rank}")

    def gathered(self) -> None:
        """Sums of y, which the owners fetch."""
        from cute_kernels import marks
        from cute_kernels.throughput.gather import Gather

        memory = self.ranks.memory
        bases = memory.take(8 * self.ranks.world_size, "bases")
        for rank, at in enumerate(self.at):
            memory.store_long(bases + 8 * rank, at["y"])
        terms = marks.pack("combine_gathered", self.truth.case.max_tokens)
        launches = []
        for rank in range(self.ranks.world_size):
            self.renew(rank)
            rows = {"bases": bases, "num_rows": max(self.truth.case.capacity), "blocks": 2}
            launches.append(self.launch(rank, Gather(self.problem), terms, **rows))
        self.ranks.run(launches)
        self.check_sums(self.of("out"))

    def check_sums(self, out: list[int]) -> None:
        self.truth.check_combined(self.ranks, out, weighted=False)

    def scaled_backward(self) -> None:
        """The backward of a weighted combine, where x is the gradient of what it gave."""
        from cute_kernels import marks
        from cute_kernels.throughput.publish import Publish
        from cute_kernels.throughput.pull_scaled import PullScaled

        terms = marks.pack("combine_backward", self.truth.case.max_tokens, scalars=True)
        none = dict.fromkeys(("topk_weights", "send_rows", "offs", "counts", "dropped", "recv_weights"), 0)
        launches: list[Launch] = []
        for rank, at in enumerate(self.at):
            self.renew(rank)
            after = None
            if self.staged:
                after = len(launches)
                publish = Publish(self.problem, False, True, False, False)
                launches.append(self.launch(rank, publish, terms, blocks=self.staging, **none))
            given = {"grad_out": at["x"], "recv_weights": at["weights"], "grad_y": at["recv_x"],
                     "grad_weights": at["recv_weights"], "blocks": 2}  # fmt: skip
            launches.append(self.launch(rank, PullScaled(self.problem, not self.staged), terms, after, **given))
        self.ranks.run(launches)
        self.check_scaled()

    def check_scaled(self) -> None:
        """Check the results of that backward."""
        for rank, at in enumerate(self.at):
            rows, grad_y, grad_weights = self.truth.scaled(rank)
            count = self.truth.case.capacity[rank]
            same(self.ranks.floats(at["recv_x"], count, self.shape.hidden)[rows], grad_y, f"scaled rows of rank {rank}")
            got = self.ranks.floats(at["recv_weights"], count)[rows]
            assert (got - grad_weights).abs().le(1e-3).all(), f"gradients of the weights of rank {rank}"


def steps(
    shape: Shape, draw: random.Random, joining: int = 2, times: int = 1, known: bool = True, late: bool = False
) -> None:
    """Everything along one route, then along the next. `late`: one rank is."""
    on = Steps(shape, draw, joining)
    for _ in range(times):
        on.ranks.late = draw.randrange(len(shape.experts)) if late else None
        on.inputs()
        on.dispatch(known=False)
        on.gathered()
        if draw.random() < 0.5:
            untell(on.ranks, on.truth.case, on.at)
        if known:
            on.dispatch(known=True)
        on.combine(rows=True, weighted=True, scalars=False, residual=True)
        on.combine(rows=True, weighted=False, scalars=True, residual=False)
        on.combine(rows=False, weighted=False, scalars=True, residual=False)
        on.scaled_backward()


def across(shape: Shape, draw: random.Random, times: int = 1, known: bool = True, late: bool = False) -> None:
    """Where there are several NVLink domains. `late`: one rank is."""
    on = Steps(shape, draw)
    for _ in range(times):
        on.ranks.late = draw.randrange(len(shape.experts)) if late else None
        on.inputs()
        on.dispatch(known=False)
        if known:
            on.dispatch(known=True)
            on.scaled_backward()
        on.combine(rows=True, weighted=True, scalars=False, residual=True)
        on.combine(rows=True, weighted=False, scalars=True, residual=False)
        on.combine(rows=False, weighted=False, scalars=True, residual=False)


def wide(shape: Shape, draw: random.Random) -> None:
    """Rows of several slices, in the sums of owners that add in two parts too; stages of the rings hold whole ones."""
    from cute_kernels import heap

    heap.RING_BYTES = 4 * (4 * shape.hidden + 200)
    across(shape, draw, known=False)


def of_many_ranks(shape: Shape, draw: random.Random) -> None:
    """Run kernels as for so many ranks that registers hold no sets of them."""
    from cute_kernels import copies

    copies.MOST_WORDS = 0
    across(shape, draw)


Make = Callable[[Shape, random.Random], Steps]


def begun(shape: Shape, draw: random.Random, known: bool = False, make: Make = Steps) -> Steps:
    """Behind a dispatch, and before one along a new route or, with `known`, the same."""
    on = make(shape, draw)
    on.inputs()
    on.dispatch(known=False)
    if not known:
        on.inputs()
    return on


def rejected(shape: Shape, draw: random.Random, make: Make = Steps) -> None:
    """A rank rejects a dispatch: all others say so, and the operations behind it are as ever."""
    from cute_kernels.sync import REJECTION

    on = begun(shape, draw, make=make)
    told = on.without(1, rejects=True)
    on.ranks.check_wire()
    assert all(said[0] == (0, 0) for said in told), told
    assert all(said[1][0] == REJECTION for rank, said in enumerate(told) if rank != 1), told
    on.dispatch(known=False)
    on.combine(rows=True, weighted=True, scalars=False, residual=False)


def disagreeing(shape: Shape, draw: random.Random) -> None:
    """A rank that calls another operator: all are told so, by what they see or by one that has seen it."""
    from cute_kernels.sync import MISMATCH, PEER_FAILED

    on = begun(shape, draw, known=True)
    told = on.disagreeing(1)
    assert all(said[0][0] in (MISMATCH, PEER_FAILED) and said[1] == (0, 0) for said in told), told
    assert any(said[0][0] == MISMATCH for said in told), told


def half(shape: Shape, draw: random.Random, make: Make = Steps) -> None:
    """A rank launches the first kernel of a dispatch but not the second. When its host gives up, all ranks report that
    and have its reason. If the rank begins another operation, that operation ends immediately."""
    from cute_kernels.heap import REASON_BYTES
    from cute_kernels.sync import HALF, PEER_FAILED

    on = begun(shape, draw, make=make)
    victim, why = len(shape.experts) - 1, b"no room".ljust(REASON_BYTES, b"\0")
    on.half(victim)
    on.inputs()
    told = on.given_up(victim, why)
    assert all(said[0] == (HALF if rank == victim else PEER_FAILED) for rank, said in enumerate(told)), told
    heap, reasons = on.ranks.heap, []
    for rank in range(on.ranks.world_size):
        banks = (on.ranks.heaps[rank] + heap.offset["reason"] + bank * heap.distance["reason"] for bank in range(2))
        at = [bank + victim * REASON_BYTES for bank in banks]
        reasons.append(any(on.ranks.view(a, REASON_BYTES // 4).numpy().tobytes() == why for a in at))
    assert all(reasons), reasons
    launches: list[Launch] = []
    on.launch_dispatch(launches, victim, False)
    run(launches, draw)


def absent(shape: Shape, draw: random.Random, warned: bool, known: bool, make: Make = Steps) -> None:
    """A rank comes when all others have given up: they say whom they waited for, and so does it in the end, which takes
    nothing from them for good. What it has not been warned of is right."""
    from cute_kernels.marks import unpack_alarm
    from cute_kernels.sync import PEER_FAILED, TIMEOUT

    on = begun(shape, draw, known, make)
    told = on.without(1, rejects=False, known=known)
    for rank, said in enumerate(told):
        assert rank == 1 or said[0][0] in (TIMEOUT, PEER_FAILED), told
    first = next(said[0] for said in told if said[0][0] == TIMEOUT)
    assert first[1] == 1, told
    late = on.late(1, warned, known)
    assert late[0][0] == (PEER_FAILED if warned else 0), late
    behind = on.garbage(1)[0][0]
    assert behind == 0 if warned else behind in (TIMEOUT, PEER_FAILED), behind  # what is told is told once
    who = unpack_alarm(on.ranks.memory.load_long(on.ranks.heaps[1] + on.ranks.heap.offset["alarm"]))
    assert who.reason == TIMEOUT and (not warned or (who.rank != 1 and who.peer == 1)), who
