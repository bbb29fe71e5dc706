"""Sizes, operations and faults of a run, drawn from a seed; the run; and the smallest case that goes wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

from . import reference
from .network import Network, Violation
from .rank import Rank
from .shape import ANOTHER, REJECTED, Ids, Operation, Shape

DEADLINE = "deadline"
FAULTS = ("", "dies", "gives up", "cut", "rejects", "rejected, and dies", "differs")

DEADLY = ("dies", "rejected, and dies")
STRIKES = (*DEADLY, "gives up", "cut")
"""Faults of some moment."""


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    operations: tuple[Operation, ...]
    fault: str = ""  # one of FAULTS
    victim: int = 0
    after: int = 0  # turns before the fault
    seed: int = 0  # of the schedule


def draw_case(seed: int, fault: str = "") -> Case:
    draw = random.Random(seed)
    size, count = draw.choice(((1, 2), (1, 2), (2, 2), (2, 2), (1, 3), (2, 3), (3, 2), (1, 4), (2, 1)))
    ranks = list(range(size * count))
    if draw.random() < 0.5:
        draw.shuffle(ranks)  # any numbering
    domains = sorted(tuple(sorted(ranks[d * size : (d + 1) * size])) for d in range(count))
    tokens = draw.choice((1, 2, 3, 4))
    shape = Shape(
        tuple(domains), draw.choice((1, 2)), draw.choice((1, 2, 3)), tokens, draw.choice((1, 2, 4)),
        draw.choice((1, 1, 2)), draw.choice((1, 2)), draw.choice((1, 1, 2, 3)),
    )  # fmt: skip
    operations = draw_operations(draw, shape, draw.randint(2, 6))
    if fault in ("rejects", "rejected, and dies"):
        number = draw.randrange(len(operations))
        operations[number] = operations[number]._replace(rejected_by=draw.randrange(shape.world_size))
        operations = [op for op in operations if op.along != number]
    if fault == "differs":
        combines = [op.number for op in operations if op.kind == "combine"]
        number = draw.choice(combines) if combines and draw.random() < 0.5 else draw.randrange(len(operations))
        domain, rail = draw.choice(shape.domains), draw.choice(list(zip(*shape.domains, strict=True)))
        differs = draw.choice(((draw.choice(domain),), domain, rail, rail))
        if len(differs) == shape.world_size:
            differs = differs[:1]
        kind = operations[number].kind
        if shape.world_size > 1:
            operations[number] = operations[number]._replace(
                differs=differs, instead=draw.choice((kind, ANOTHER[kind]))
            )
    victim, after = draw.randrange(shape.world_size), draw.randrange(20 + 40 * shape.world_size * len(operations))
    return Case(shape, tuple(operations), fault, victim, after, draw.randrange(2**30))


def draw_operations(draw: random.Random, shape: Shape, count: int) -> list[Operation]:
    operations: list[Operation] = []
    for number in range(count):
        routes = [op.number for op in operations if op.kind in ("dispatch", "few_dispatch")]
        along = draw.choice([routes[-1], draw.choice(routes)]) if routes and draw.random() < 0.6 else -1
        if along < 0:
            kind, ids = draw.choice(("dispatch", "few_dispatch")), draw_ids(draw, shape)
            most = shape.world_size * shape.tokens * shape.top_k
            capacity = tuple(draw.choice((most, most, draw.randint(0, most))) for _ in range(shape.world_size))
        else:
            kind = draw.choice(("combine", "combine", "dispatch_planned", "few_combine"))
            ids, capacity = operations[along].ids, operations[along].capacity
        operations.append(Operation(number, kind, ids, capacity, along))
    return operations


def draw_ids(draw: random.Random, shape: Shape) -> tuple[Ids, ...]:
    """Draw the ids of all ranks: even, all to one rank, none at all, or few."""
    experts = shape.experts * shape.world_size
    style, hot = draw.choice(("even", "even", "skewed", "sparse")), draw.randrange(shape.world_size)

    def choose() -> tuple[int, ...]:
        if style == "skewed" and draw.random() < 0.8:
            known = [hot * shape.experts + e for e in range(shape.experts)]
        else:
            known = list(range(experts))
        chosen = draw.sample(known, min(len(known), shape.top_k))
        none = 0.7 if style == "sparse" else 0.1
        chosen = [-1 if draw.random() < none else e for e in chosen]
        return tuple(chosen + [-1] * (shape.top_k - len(chosen)))

    counts = [draw.choice((0, shape.tokens, draw.randint(0, shape.tokens))) for _ in range(shape.world_size)]
    return tuple(tuple(choose() for _ in range(count)) for count in counts)


Mutant = tuple[type[Network], type[Rank]]
SOUND: Mutant = (Network, Rank)


def run(case: Case, mutant: Mutant = SOUND) -> str:
    """Raises a Violation if anything was not as promised; else says what became of it."""
    kind_of_network, kind_of_rank = mutant
    network = kind_of_network(case.shape.world_size, case.seed)
    ranks: list[Rank] = []
    ranks += [kind_of_rank(network, case.shape, rank, ranks) for rank in range(case.shape.world_size)]
    living = [rank for rank in ranks if case.fault not in DEADLY or rank.rank != case.victim]

    def heard(rank: int, word: Any, value: Any) -> None:
        if rank not in network.dead:
            ranks[rank].hear(word, value)

    def fault() -> None:
        if case.fault in DEADLY:
            network.dead.add(case.victim)
        elif case.fault == "gives up" and network.waiting[case.victim]:
            ranks[case.victim].give_up("gives up")
        elif case.fault == "cut":
            network.cut |= {(case.victim, rank.rank) for rank in ranks}

    def stuck() -> bool:
        """Deadlines pass, where there is a reason to."""
        waiting = [rank for rank in living if network.waiting[rank.rank]]
        if case.fault not in (*DEADLY, "cut") or all(rank.failed for rank in waiting):
            return False
        network.draw.choice([rank for rank in waiting if not rank.failed]).give_up(DEADLINE)
        return True

    network.heard = heard
    try:
        for rank in ranks:
            network.spawn(rank.rank, [rank.run(list(case.operations))])
        network.run((case.after, fault) if case.fault in STRIKES else None, stuck)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # what was read is something else
        raise Violation(f"{type(error).__name__}: {error}") from error
    return judge(case, living)


def judge(case: Case, living: list[Rank]) -> str:
    causes = {rank.failed for rank in living if rank.failed}
    told = [rank for rank in living if rank.failed]
    if case.fault == "differs" and len(told) < len(living):
        raise Violation("a rank has not heard that others are in another operation")
    if causes and case.fault in ("", "rejects"):
        raise Violation(f"ranks have failed, and nothing was wrong: {causes}")
    if told and len(told) < len(living):
        raise Violation(f"of all ranks only {[rank.rank for rank in told]} know of a failure")
    if case.fault == "gives up" and len(causes) > 1:
        raise Violation(f"a failure has several causes: {causes}")
    for op in case.operations:
        expected = expected_of(case, op)
        for rank in living:
            got = rank.results.get(op.number)
            if got is None and not rank.failed:
                raise Violation(f"rank {rank.rank} has not finished {op.kind} {op.number}")
            if got is not None and op.differs:
                raise Violation(f"rank {rank.rank} has finished {op.kind} {op.number}, and others were in another one")
            if got is not None and got != expected[rank.rank]:
                raise Violation(
                    f"{op.kind} {op.number} gave rank {rank.rank} {got}, and should give {expected[rank.rank]}"
                )
    return "failed" if told else "done"


def expected_of(case: Case, op: Operation) -> list[Any]:
    if op.rejected_by >= 0:
        return [REJECTED] * case.shape.world_size
    route = op if op.along < 0 else next(other for other in case.operations if other.number == op.along)
    if op.kind in ("combine", "few_combine"):
        return reference.combined(case.shape, op, route)
    return reference.dispatched(case.shape, op, route)


# ---------------------------------------------------------------- what goes wrong


def violation(case: Case, mutant: Mutant = SOUND) -> str | None:
    try:
        run(case, mutant)
    except Violation as found:
        return str(found)
    return None


def smallest(case: Case, mutant: Mutant = SOUND, schedules: int = 50) -> tuple[Case, str]:
    """A case that goes wrong with as few operations and tokens as were found, and how. Each smaller case is run with
    several schedules: seeds do not say the same of another case."""
    found = violation(case, mutant) or ""
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in smaller_than(case):
            for seed in range(schedules):
                attempt = dataclasses.replace(smaller, seed=seed)
                if told := violation(attempt, mutant):
                    case, found, shrunk = attempt, told, True
                    break
            if shrunk:
                break
    return case, found


def smaller_than(case: Case) -> Iterator[Case]:
    for gone in reversed(case.operations):
        left = tuple(op for op in case.operations if gone.number not in (op.number, op.along))
        if left and not gone.differs:
            yield dataclasses.replace(case, operations=left)
    for number, op in enumerate(case.operations):
        if op.along >= 0:
            continue
        for rank, ids in enumerate(op.ids):
            if ids:
                fewer = (*op.ids[:rank], ids[:-1], *op.ids[rank + 1 :])
                changed = [o._replace(ids=fewer) if op.number in (o.number, o.along) else o for o in case.operations]
                assert changed[number].ids == fewer
                yield dataclasses.replace(case, operations=tuple(changed))


def search(
    seeds: range, fault: str = "", mutant: Mutant = SOUND, each: Callable[[Case, str], None] | None = None
) -> Case | None:
    """The first case that goes wrong; ``each`` hears of all others what became of them."""
    for seed in seeds:
        case = draw_case(seed, fault)
        try:
            became = run(case, mutant)
        except Violation:
            return case
        if each:
            each(case, became)
    return None
