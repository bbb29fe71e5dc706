"""How many blocks the throughput path's kernels get."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import PROBLEM, across, joins, throughput
from operate import Delivery, On, Sizes

from cute_kernels.heap import Problem
from cute_kernels.internode.wire import Nvlink
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute import residency
from ep_ops.backends.cute.throughput import ThroughputPath, pushes
from ep_ops.records import Route


def test_blocks_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of an operation are told of the same blocks; there are as many as the budget allows, no more."""
    path, recorder = throughput(Budget(20, 30, 22, 24, beyond=66), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    recv_x, _, recv_weights, *placed = path.dispatch(x, torch.zeros(7, 4), idx, Sizes(48, 16, 0, 100), Delivery())
    route = Route(idx, *placed[:4], 16, 48, 100)
    _, first, second = recorder.launched
    assert not joins(first[0]) and joins(second[0]) and first[1] == second[1], "one operation"
    # One block of the grid that joins takes part in any case: the budget of 20 holds it.
    assert (first[2]["blocks"], second[2]["blocks"]) == (19, 1 + 66 - 20)
    assert {**first[2], "blocks": 0} == {**second[2], "blocks": 0}
    assert (first[2]["dealt"], first[2]["joining"]) == (19, second[2]["blocks"])

    recorder.launched.clear()
    path.along("dispatch_planned", x, None, route, Delivery())
    path.combine(recv_x, recv_weights, route, None)
    path.dispatch_backward(recv_x, recv_weights, route)
    path.dispatch_backward(None, recv_weights, route)
    path.combine_backward(x, recv_x, recv_weights, route)
    (pull,) = (given for kernel, _, given in recorder.launched if isinstance(kernel, Pull))
    assert (pull["dealt"], pull["joining"], pull["blocks"]) == (20, 66 - 20, 66)
    combines = [given["blocks"] for kernel, _, given in recorder.launched if isinstance(kernel, Combine)]
    assert combines == [30] * 3

    single, recorder = throughput(Budget(1, 2, beyond=66), monkeypatch)
    single.dispatch(x, None, idx, Sizes(48, 16, 0, 100), Delivery())
    _, (kernel, _, given) = recorder.launched
    assert not joins(kernel) and (given["dealt"], given["joining"], given["blocks"]) == (1, 0, 1), "none to give away"


def test_beside_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody joins, and few multiprocessors stage; a budget is followed."""
    budget = Budget(20, 30, 22, 24, beyond=66)
    whole, recorder = throughput(budget, monkeypatch)
    path = On(ThroughputPath(recorder, whole._outputs, budget, whole.sms.average, side=object()))  # type: ignore
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    for asked, (dispatch, combine) in (((None, None), (20, 30)), ((8, 12), (8, 12))):
        recorder.launched.clear()
        with budget.changed(*asked):
            recv_x, _, recv_weights, *placed = path.dispatch(
                x, torch.zeros(7, 4), idx, Sizes(48, 16, 0, 100), Delivery()
            )
            route = Route(idx, *placed[:4], 16, 48, 100)
            path.combine(recv_x, recv_weights, route, None)
            path.dispatch_backward(recv_x, recv_weights, route)
            path.along("combine_backward", x, None, route, Delivery())
        publish, pull, add, add_back, publish_back, pull_back = (given for _, _, given in recorder.launched)
        staging = 1 + min(residency.STAGING_BLOCKS, dispatch)
        assert publish["blocks"] == PROBLEM.tiles + staging and publish_back["blocks"] == staging
        assert pull["blocks"] == pull["dealt"] == pull_back["blocks"] == dispatch
        assert pull["joining"] == pull_back["joining"] == 0
        assert add["blocks"] == add_back["blocks"] == combine


@pytest.mark.parametrize("aside", [False, True])
def test_blocks_that_push(aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token-major rows without a format are pushed by as many blocks as the table says. No other rows are pushed."""
    budget = Budget(20, 30, 22, 24)
    path, recorder = throughput(budget, monkeypatch)
    if aside:
        path = On(ThroughputPath(recorder, path._outputs, budget, path.sms.average, side=object()))  # type: ignore
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)

    def published(layout: str) -> list[tuple[bool, int]]:
        recorder.launched.clear()
        recv_x, _, _, *placed = path.dispatch(x, None, idx, Sizes(48, 1, 0, 100, layout), Delivery())
        route = Route(idx, *placed[:4], 1, 48, 100, layout=layout)
        path.along("dispatch_planned", x, None, route, Delivery())
        path.combine_backward(x, recv_x, torch.zeros(48), route)
        publish = [(kernel, given) for kernel, _, given in recorder.launched if isinstance(kernel, Publish)]
        return [(kernel.pushes, given["blocks"]) for kernel, given in publish]

    pushing = 12
    new, known, backward = published("token_major")
    assert new == (True, PROBLEM.tiles + pushing) and known == (True, pushing)
    assert not backward[0] and not any(pushed for pushed, _ in published("grouped"))
    narrow = dataclasses.replace(PROBLEM, top_k=PROBLEM.world_size - 1)  # staging has no room
    assert not any(pushes(problem, "", True) for problem in (narrow, across(Nvlink())))
    assert pushes(PROBLEM, "", True) and not pushes(PROBLEM, "e4m3/32/mx", True)


def test_blocks_across_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides tiles and pulls there is one block each that relays, announces, sends and stages, however few there
    are."""
    problem = across(Nvlink())
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    least = residency.needed(problem)
    assert least == residency.needed(dataclasses.replace(problem, domains=())) + 2
    for blocks, pulling in ((least, 1), (least, 3), (132, 20)):
        path, recorder = throughput(Budget(pulling, 4), monkeypatch, problem, blocks)
        path.dispatch(x, None, idx, Sizes(48, 16, 0, 100), Delivery())
        (publish, *_) = (given["blocks"] for _, _, given in recorder.launched)
        assert publish == max(problem.tiles + 4, blocks - residency.MARGIN - pulling)
        path.plan(idx, Sizes(48, 16, 0, 100))
        assert recorder.launched[-1][2]["blocks"] == problem.tiles


@pytest.mark.parametrize("problem", [PROBLEM, across(Nvlink())], ids=["one domain", "two"])
def test_the_fewest_multiprocessors(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest multiprocessors hold the smallest publish kernel, a block that pulls and the margin, and nothing else;
    the largest budget of pulls leaves room for all blocks that stage rows."""
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)

    def publish(pulling: int, blocks: int) -> int:
        path, recorder = throughput(Budget(pulling, 4), monkeypatch, problem, blocks)
        path.dispatch(x, None, idx, Sizes(48, 16, 0, 100), Delivery())
        return recorder.launched[0][2]["blocks"]

    least = residency.needed(problem)
    assert publish(1, least) == problem.tiles + residency.row_blocks(problem) == least - 1 - residency.MARGIN
    assert residency.too_small(problem, least) is None
    assert f"needs {least} with these sizes" in str(residency.too_small(problem, least - 1))
    most = residency.most_pulling(problem, 132)
    assert publish(most, 132) == problem.tiles + residency.STAGING_BLOCKS


def test_the_number_that_the_documentation_names() -> None:
    """docs/progress.md: 21, of the most tiles in one domain."""
    problem = dataclasses.replace(PROBLEM, max_tokens=1 << 16)
    assert (problem.tiles, residency.needed(problem)) == (16, 21)
