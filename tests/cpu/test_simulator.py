"""The protocols across NVLink domains, on a network that delays, reorders, splits and stalls."""

from __future__ import annotations

import collections
import os
from typing import Any

import cases as loops
import pytest
import torch
from cases import fresh_seed
from simulator import cases, network, reference
from simulator.mutations import MUTATIONS, WAITS
from simulator.shape import Operation, Shape

SHARE = 1 if os.environ.get("EP_OPS_ALL_CHECKS") == "1" else 2
SCHEDULES = {"": 600 // SHARE, **dict.fromkeys(cases.FAULTS[1:], 250 // SHARE)}
"""Others in each run: seeds are fresh."""
UNTIL_FOUND = 8000
"""Schedules for a broken rule. The rarest finds take some 300."""


def told(case: cases.Case | None, mutant: cases.Mutant = cases.SOUND) -> str:
    return "" if case is None else "\n".join(map(str, cases.smallest(case, mutant)))


@pytest.mark.parametrize("fault", cases.FAULTS)
def test_promises_are_kept(fault: str) -> None:
    """Every result is the reference's, nothing is read that is not there, everybody ends and hears of failures."""
    seed = fresh_seed()
    became: collections.Counter[str] = collections.Counter()
    run: collections.Counter[tuple[str, bool]] = collections.Counter()

    def each(case: cases.Case, what: str) -> None:
        became[what] += 1
        run.update((op.kind, len(case.shape.domains) > 1) for op in case.operations)

    bad = cases.search(range(seed, seed + SCHEDULES[fault]), fault, each=each)
    assert bad is None, told(bad)
    if fault in cases.STRIKES:
        assert became["failed"] > SCHEDULES[fault] // 2 and became["done"]  # some are struck when they have done
    else:
        assert became == {"failed" if fault == "differs" else "done": SCHEDULES[fault]}
    kinds = ("dispatch", "dispatch_planned", "combine", "few_dispatch", "few_combine")
    assert all(run[kind, True] for kind in kinds) and any(not several for _, several in run)


@pytest.mark.drawn
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_rule_is_needed(name: str) -> None:
    """The simulator finds an error when a rule of the protocol is removed."""
    seed, (mutant, fault) = fresh_seed(), MUTATIONS[name]
    assert cases.search(range(seed, seed + UNTIL_FOUND), fault, mutant) is not None


@pytest.mark.parametrize(
    "name",
    [
        "no wait: come", "running count, set", "running count, added", "finish flag",
        "last batch for all", "told by the source", "a word that nobody waits for", "hello without banks",
        "meets its domain and its rail alone", "send area without banks",
    ],
)  # fmt: skip
def test_a_network_in_order_would_not_do(name: str) -> None:
    """A network that keeps the order does not show these mutations: not everything that is changed makes a run fail."""
    seed, ((kind, rank), fault) = fresh_seed(), MUTATIONS[name]
    patient = type("Patient", (kind,), {"kind_of_temper": network.Patience})
    assert cases.search(range(seed, seed + 30), fault, (patient, rank)) is None


def test_no_wait_is_forgotten() -> None:
    """Each has a mutation that leaves it out; but for that of a rank for its own tasks."""
    met = set()

    class Hurried(cases.SOUND[1]):  # what is there already is not waited for
        def wait_for(self, rule: str, *rest: Any) -> network.Steps:
            met.add(rule)
            return super().wait_for(rule, *rest)

    class Listening(network.Network):
        def _advance(self, task: network.Task) -> None:
            super()._advance(task)
            met.update(wait.rule for waits in self.waiting for wait in waits.values())

    seed = fresh_seed()
    for fault in cases.FAULTS:
        assert cases.search(range(seed, seed + 30), fault, (Listening, Hurried)) is None
    assert met == {*WAITS, "tasks"}


def test_the_same_seed_is_the_same_run() -> None:
    """The same seed repeats the same run, so that a failure can be examined."""
    mutant, fault = MUTATIONS["hello without banks"]
    seed = fresh_seed()
    bad = cases.search(range(seed, seed + UNTIL_FOUND), fault, mutant)
    assert bad is not None
    assert cases.violation(bad, mutant) == cases.violation(bad, mutant) != cases.violation(bad)
    small, what = cases.smallest(bad, mutant, schedules=5)
    assert cases.violation(small, mutant) == what
    assert len(small.operations) <= len(bad.operations)


# ---------------------------------------------------------------------- what the simulator takes for right


@pytest.mark.parametrize("name", ["random_with_none", "top_8_wide", "over_capacity", "no_tokens_on_last_rank"])
def test_reference_is_the_libraries(name: str) -> None:
    """The simulator's reference equals plain loops in numbers, which tests of the reference backend use too. Domains of
    one rank each, and one of all, have the same sums."""
    case = loops.route_cases(4, fresh_seed())[name]
    plans, held = loops.expected_plan(_unaligned(case)), case.experts_per_rank[0]
    ids = tuple(tuple(map(tuple, idx.tolist())) for idx in case.topk_idx)
    op = Operation(0, "combine", ids, case.capacity)
    y = [torch.randn(capacity, 8).to(torch.bfloat16) for capacity in case.capacity]
    expected = loops.expected_combine(_unaligned(case), plans, y, None)
    for domains in (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))):
        shape = Shape(domains, held, case.top_k, case.max_tokens, 1, 1)
        for rank, (_, send_rows) in enumerate(reference.dispatched(shape, op, op)):
            assert list(map(list, send_rows)) == plans[rank].send_rows.tolist()
        for rank, tokens in enumerate(reference.combined(shape, op, op)):
            for token, (tree, _) in enumerate(tokens):
                found = evaluated(tree, y) if tree else torch.zeros(8)
                assert torch.equal(found.to(torch.bfloat16), expected[rank][token])


def _unaligned(case: loops.RouteCase) -> loops.RouteCase:
    return loops.RouteCase(**{**vars(case), "alignment": 1})


def evaluated(tree: Any, y: list[torch.Tensor]) -> torch.Tensor:
    """The sum that is written down, in fp32."""
    if tree[0] == "y":
        return y[tree[2]][tree[3]].float()
    if tree[0] == "rounded":
        return evaluated(tree[1], y).to(torch.bfloat16).float()
    return evaluated(tree[1], y) + evaluated(tree[2], y)
