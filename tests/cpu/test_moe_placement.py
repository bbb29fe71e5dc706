"""Placements of MoECommunicator: replicas and loads."""

from __future__ import annotations

import itertools
import random

import cases
import pytest
import torch
import torch.distributed as dist
from moe_cases import (
    MOST,
    REPLICAS,
    ROWS,
    E,
    K,
    communicator,
    drawn,
    layer,
    matrices,
)
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ep_ops.moe import Quant, balanced, moves
from ep_ops.moe.placement import _swap

# ---------------------------------------------------------------------- placement


def test_replicas_take_turns() -> None:
    """Replicas take turns as the definition says, computed in loops; int32 and int64, and tokens of several
    dimensions."""
    from ep_ops.moe.placement import ReplicaMap

    seed = cases.fresh_seed()
    ids = drawn(seed, 0, 70).ids
    for rank, dtype in itertools.product((0, 1, 59, 71), (torch.int32, torch.int64)):
        found = ReplicaMap(REPLICAS, E, 70, rank, torch.device("cpu"))
        for placement in (REPLICAS, (0, 1, 2, 3, 4, 4, 4, 4)):
            found.set(placement)
            got = found.of(ids.to(dtype).view(7, 10, K))
            assert got.dtype == torch.int32 and got.shape == (7, 10, K)
            for token, own in enumerate(ids.tolist()):
                for k, expert in enumerate(own):
                    places = [place for place, there in enumerate(placement) if there == expert]
                    wanted = places[(token + rank) % 60 % len(places)] if expert >= 0 else -1
                    assert got.view(70, K)[token, k] == wanted
        odd = torch.tensor([[-9, -2], [E, 99]], dtype=dtype)
        assert found.of(odd).tolist() == [[-2, -2], [len(REPLICAS)] * 2]  # what no operator takes


def test_balanced() -> None:
    """No rank has much more than the mean; every expert is somewhere; weights stay where they may."""
    draw = random.Random(cases.fresh_seed())
    for _ in range(30):
        ranks, each = draw.choice([1, 2, 4, 8]), draw.choice([4, 6, 9])
        experts = ranks * each - draw.randint(ranks, 2 * ranks)
        held = [each] * ranks
        load = [draw.randint(50, 100) * (1 + 3 * (expert < 2)) for expert in range(experts)]
        placement = balanced(load, held)
        assert placement == balanced(load, held) and set(placement) == set(range(experts))
        other = balanced(load[::-1], held, placement)
        for rows, where in ((load, placement), (load[::-1], other)):
            shares = [rows[expert] / where.count(expert) for expert in where]
            by_rank = [sum(shares[rank * each : (rank + 1) * each]) for rank in range(ranks)]
            assert sum(by_rank) == pytest.approx(sum(load))
            assert max(by_rank) * ranks <= 1.15 * sum(load)
        near = [rows * draw.uniform(0.99, 1.01) for rows in load]
        assert len(moves(placement, balanced(near, held, placement), held)) <= len(placement) // 2
        weights = list(placement)
        for move in moves(placement, other, held):
            assert placement[move.source] == move.expert == other[move.place] != placement[move.place]
            assert move.crosses == (move.source // each != move.place // each)
            weights[move.place] = placement[move.source]
        assert tuple(weights) == other
    assert moves([1, 0, 1, 2], [0, 1, 1, 2], [2, 2]) == [(0, 1, 0, False), (1, 0, 1, False)]  # from the same rank
    spread = moves([0, 0, 1, 1, 2, 2], [0, 1, 0, 0, 0, 2], [2, 2, 2])
    assert spread == [(1, 3, 1, True), (0, 0, 2, True), (0, 1, 3, True), (0, 0, 4, True)]  # from replicas in turn
    skewed = balanced([90, 1, 1, 1], [3, 3])
    assert sorted(skewed).count(0) == 2 and 0 in skewed[:3] and 0 in skewed[3:]
    idle = balanced([0, 0, 0], [2, 2])  # no load tells the ranks apart
    assert len(set(idle[:2])) == len(set(idle[2:])) == 2
    assert sorted(balanced([5, 5], [3])) in ([0, 0, 1], [0, 1, 1])  # more replicas than ranks
    with pytest.raises(ValueError, match="load has 4 logical experts; allowed: at most 3"):
        balanced([1, 1, 1, 1], [2, 1])
    with pytest.raises(ValueError, match="placements have 3 and 2 places"):
        moves([0, 1, 2], [0, 1], [2, 1])


def test_experts_are_placed_by_decreasing_load() -> None:
    """The expert with most rows comes first, so that those with few fill up the ranks with less."""
    assert balanced([1, 1, 1, 3], [2, 2]) == (2, 3, 0, 1)
    assert balanced([1, 2, 4, 8, 16, 32], [2, 2, 2]) == (0, 5, 1, 4, 2, 3)


@pytest.mark.parametrize(
    ("there", "swapped"),
    [
        # Rank 0 would do well to take expert 0 for its 1, or to give its 0 for the other's 2: it would have 0 twice,
        # or the other one.
        ([[0, 1], [0, 2]], [[0, 1], [0, 2]]),
        ([[3, 1], [0, 2]], [[2, 1], [0, 3]]),
    ],
)
def test_a_swap_leaves_no_rank_with_an_expert_twice(there: list[list[int]], swapped: list[list[int]]) -> None:
    _swap(there, share=[1.0, 5.0, 0.0, 1.0])
    assert there == swapped


def loads(seed: int, rows: str) -> list[Tensor]:
    rank = dist.get_rank()
    capacity = {"grouped": 16, "padded": 3, "token_major": 9}[rows]
    way = dict(layout=rows, alignment=1, capacity=capacity, placement=REPLICAS, statistics=True, overlap=True)
    found = []
    with communicator(**way, quant=Quant("e4m3/32/mx")) as moe, torch.no_grad():
        moe.reset_load()
        for turn, placement in enumerate((REPLICAS, REPLICAS, REPLICAS[::-1])):
            moe.place(placement)
            given = drawn(seed + turn, rank, MOST)
            moe.dispatch_async(given.x, given.ids, given.weights).wait() if turn else moe.dispatch(given.x, given.ids)
            found.append(moe.load())
        assert moe.comm.statistics().dropped.any()
        moe.reset_load()
        assert not moe.load().any()
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_loads(rows: str) -> None:
    """Loads are what ranks have requested, dropped or not, over a change of the placement."""
    seed = cases.fresh_seed()
    asked = torch.zeros(E, dtype=torch.int64)
    wanted = []
    for turn in range(3):
        for source in range(2):
            ids = drawn(seed + turn, source, MOST).ids
            asked += torch.bincount(ids[ids >= 0].long(), minlength=E)
        wanted.append(asked.clone())
    for found in run_ranks(2, loads, seed, rows):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_what_is_made_in_inference_mode_goes_on_behind_it() -> None:
    given = drawn(0, 0, MOST)
    with torch.inference_mode():
        moe = communicator(placement=REPLICAS, statistics=True)
    with moe:
        moe.place(REPLICAS[::-1])
        moe.dispatch(given.x, given.ids)
        assert int(moe.load().sum()) == int((given.ids >= 0).sum())


def gone() -> None:
    with communicator(placement=REPLICAS, statistics=True) as moe:
        other = moe.sibling()
    if dist.get_rank() == 0:  # alone: the other rank would be waited for, in whatever group is the default one
        for call in (lambda: moe.place(REPLICAS[::-1]), moe.sibling, moe.load, other.load):
            with pytest.raises(RuntimeError, match="was destroyed"):
                call()


def test_what_is_gone_waits_for_nobody() -> None:
    run_ranks(2, gone)


def test_recomputed_dispatches_count_once() -> None:
    given, w = drawn(0, 0, MOST, grad=True), matrices(0)
    with communicator(statistics=True) as moe:
        checkpoint(layer, moe, given, w, use_reentrant=False).sum().backward()
        assert moe.comm.statistics().dispatches == 1 and int(moe.load().sum()) == int((given.ids >= 0).sum())


def test_ranges_have_names() -> None:
    given, w = drawn(0, 0, MOST), matrices(0)
    with communicator(overlap=True) as moe, profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(moe, given, w)
        output, handle = moe.dispatch(given.x, given.ids)
        moe.combine(output.x, handle)
    names = {event.name for event in seen.events() or ()}
    wanted = {"dispatch", "combine", "dispatch_async", "combine_async", "dispatch_wait", "combine_wait"}
    assert {f"ep_ops.moe.{name}" for name in wanted} <= names
    split = {f"ep::{operator}_{part}" for operator in ("dispatch", "combine") for part in ("start", "wait")}
    assert split <= names
    with communicator() as moe, profile(activities=[ProfilerActivity.CPU]) as seen:
        finished = [moe.dispatch_async(given.x, given.ids), moe.dispatch_async(given.x, given.ids)]  # one by one
        output, handle = finished[0].wait()
        moe.combine_async(output.x, handle).wait()
    assert not split & {event.name for event in seen.events() or ()}


def doubles(placement: tuple[int, ...], held: list[int]) -> int:
    ends = [sum(held[: rank + 1]) for rank in range(len(held))]
    ranks = [placement[end - count : end] for end, count in zip(ends, held, strict=True)]
    return sum(len(own) - len(set(own)) for own in ranks)


def test_replicas_lie_on_different_ranks_after_rebalancing() -> None:
    assert doubles(balanced([8, 8, 1, 8], [2, 2, 2], (3, 0, 0, 2, 2, 1)), [2, 2, 2]) == 0
    draw = random.Random(cases.fresh_seed())
    for ranks, experts, extra in ((2, 8, 2), (4, 16, 8), (8, 64, 8), (16, 96, 32)):
        held, before = [(experts + extra) // ranks] * ranks, None
        for _ in range(12):
            load = [draw.paretovariate(1.2) * 1000 for _ in range(experts)]
            after = balanced(load, held, before)
            assert doubles(after, held) == 0 and set(after) == set(range(experts)) and len(after) == sum(held)
            before = after
    unequal = [4, 1, 1]  # more replicas than ranks have room for elsewhere
    found = balanced([100, 1], unequal, (0, 1, 0, 1, 0, 1))
    assert len(found) == 6 and set(found) == {0, 1}
