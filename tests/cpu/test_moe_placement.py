"""Placements and statistics of MoECommunicator: replicas, loads, counts, stragglers."""

from __future__ import annotations

import itertools
import random
import xml.etree.ElementTree
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
from moe_cases import (
    MOST,
    REPLICAS,
    ROWS,
    E,
    H,
    K,
    communicator,
    drawn,
    layer,
    matrices,
)
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from ep_ops.moe import (
    Quant,
    Stats,
    balanced,
    moves,
    plot_begun,
    plot_waits,
)
from ep_ops.moe.placement import _swap
from ep_ops.moe.statistics import last
from ep_ops.records import Operation

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


# ---------------------------------------------------------------------- statistics


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


def counts(seed: int, rows: str) -> tuple[Stats, list[Tensor], list[int]]:
    rank = dist.get_rank()
    capacity = {"grouped": 16, "padded": 3, "token_major": 9}[rows]
    way = dict(layout=rows, alignment=1, capacity=capacity, placement=REPLICAS, statistics=True, overlap=True)
    loads = []
    with communicator(**way, quant=Quant("e4m3/32/mx")) as moe, torch.no_grad():
        moe.reset_stats()
        for turn, placement in enumerate((REPLICAS, REPLICAS, REPLICAS[::-1])):
            moe.place(placement)
            given = drawn(seed + turn, rank, MOST)
            output, handle = moe.dispatch(given.x, given.ids, given.weights)
            y = torch.zeros(handle.route.num_rows, H)
            _ = moe.combine_async(y, handle).wait() if turn == 1 else moe.combine(y, handle)
            loads.append(moe.load())
        stats = moe.stats()
        moe.reset_stats()
        fresh = moe.stats()
        assert fresh.dispatches == 0 and not any(t.any() for t in (*fresh[2:6], moe.load()))
    return stats, loads, list(REPLICAS)


@pytest.mark.parametrize("rows", ROWS)
def test_stats(rows: str) -> None:
    """Statistics equal loops over what ranks have requested, over a change of the placement."""
    seed = cases.fresh_seed()
    found = run_ranks(2, counts, seed, rows)
    kept, dropped = torch.zeros(2, E, dtype=torch.int64), torch.zeros(2, E, dtype=torch.int64)
    copies = torch.zeros(2, 2, dtype=torch.int64)  # there, from
    asked = torch.zeros(E, dtype=torch.int64)
    for turn, placement in enumerate((REPLICAS, REPLICAS, REPLICAS[::-1])):
        used, by_place = [0, 0], [0] * len(placement)
        for source in range(2):
            for token, ids in enumerate(drawn(seed + turn, source, MOST).ids.tolist()):
                rest: dict[int, list[int]] = {0: [], 1: []}
                for expert in ids:
                    if expert >= 0:
                        places = [place for place, there in enumerate(placement) if there == expert]
                        place = places[(token + source) % 60 % len(places)]
                        rest[place // 4].append(place)
                        asked[expert] += 1
                for there, named in rest.items():
                    came = False
                    for place in named:
                        if rows == "token_major":
                            fits = used[there] < 9
                        else:
                            fits = by_place[place] < (3 if rows == "padded" else 99)
                        by_place[place] += 1
                        came |= fits
                        (kept if fits else dropped)[there, placement[place]] += 1
                    used[there] += bool(named)
                    copies[there, source] += came
        assert torch.equal(found[0][1][turn], asked) and torch.equal(found[1][1][turn], asked)
    for rank, (stats, _, _) in enumerate(found):
        assert stats.rank == rank and stats.dispatches == 3
        assert torch.equal(stats.rows + stats.dropped, kept[rank] + dropped[rank])
        assert stats.dropped.any() and stats.operations == ()
        if rows != "grouped":  # what is cut of segments that follow each other: tests/cpu/test_reference.py
            assert torch.equal(stats.rows, kept[rank])
            assert torch.equal(stats.received, copies[rank] * (H + H // 32))
            assert torch.equal(stats.returned, copies[rank] * H * 4)
        assert not stats.awaited.any() and not stats.late.any()


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
    run_ranks(2, gone, timeout=30)


def test_recomputed_dispatches_count_once() -> None:
    given, w = drawn(0, 0, MOST, grad=True), matrices(0)
    with communicator(statistics=True) as moe:
        checkpoint(layer, moe, given, w, use_reentrant=False).sum().backward()
        assert moe.stats().dispatches == 1 and int(moe.load().sum()) == int((given.ids >= 0).sum())


def test_bytes_of_rows_of_several_sizes() -> None:
    """One after the other in formats of a communicator; what is counted of each is added up, and forgotten with it."""
    given, rows = drawn(0, 0, MOST), [H * 4, H + H // 32, H * 4]
    copies = int((given.ids >= 0).any(1).sum())
    assert copies > 0 and rows[0] != rows[1]
    with communicator(statistics=True) as moe, torch.no_grad():
        for quant in (None, Quant("wire:e4m3/32/mx"), None):
            _, handle = moe.dispatch(given.x, given.ids, given.weights, quant)
            moe.combine(torch.zeros(handle.route.num_rows, H), handle)
        stats = moe.stats()
        assert stats.dispatches == 3 and int(stats.rows.sum()) == 3 * int((given.ids >= 0).sum())
        assert stats.received.tolist() == [copies * sum(rows)] and stats.returned.tolist() == [3 * copies * H * 4]
        moe.reset_stats()
        assert not moe.stats().received.any()


def noted(number: int, begun: float, waits: tuple[float, ...], met: float | None = None) -> Operation:
    return Operation(number, "dispatch", True, True, False, 8, "", False, begun, met, waits)


def test_a_straggler_shows(tmp_path: Path) -> None:
    """Operations that all ranks have noted; rank 2 begins 30 us late in each, and is waited for, once longer. How long
    a rank waits for its own blocks does not count."""
    late = [2e-6, 0.0, 30e-6]
    waits = [(9e-5, 1e-6, 28e-6), (3e-6, 0.0, 30e-6), (0.0, 2e-6, 9e-5)]
    more = {(8, 1): (3e-6, 0.0, 50e-6)}
    ops = [
        [noted(n, 100.0 + n + own, more.get((n, r), waits[r])) for n in range(5 + r, 9 + r)]
        for r, own in enumerate(late)
    ]
    numbers, times, found = last([list(reversed(own)) for own in ops])
    assert numbers == (7, 8) and found.shape == (3, 3, 2) and found[1, 2].tolist() == [30e-6, 50e-6]
    zero = torch.zeros(1, dtype=torch.int64)
    of_first, of_last = (Stats(rank, 1, zero, zero, zero, zero, numbers, times, found) for rank in (0, 2))
    assert_close(of_first.late, torch.tensor(late, dtype=torch.float64), rtol=0, atol=1e-9)
    for stats in (of_first, of_last):
        assert_close(stats.awaited, torch.tensor([3e-6, 2e-6, 40e-6], dtype=torch.float64), rtol=0, atol=1e-9)
    text = plot_begun(of_first, tmp_path / "begun.svg").read_text(encoding="utf-8")
    assert "latest on average: rank 2, 30.0 µs" in text
    cells = [c for c in xml.etree.ElementTree.fromstring(text).iter() if "fill-opacity" in c.attrib]
    assert [float(c.attrib["fill-opacity"]) for c in cells] == pytest.approx([1 / 15, 1 / 15, 0, 0, 1, 1], abs=2e-3)
    text = plot_waits(of_first, tmp_path / "waits.svg").read_text(encoding="utf-8")
    assert "waited for most: rank 2, 40.0 µs" in text
    cells = [c for c in xml.etree.ElementTree.fromstring(text).iter() if "fill-opacity" in c.attrib]
    shown = [0, 1 / 40, 28 / 40, 3 / 40, 0, 1, 0, 2 / 40, 0]
    assert [float(c.attrib["fill-opacity"]) for c in cells] == pytest.approx(shown, abs=2e-3)
    none = of_first._replace(operations=(), begun=torch.zeros(3, 0))
    with pytest.raises(ValueError, match="no operations that all ranks have recorded"):
        plot_begun(none, tmp_path / "none.svg")
    with pytest.raises(ValueError, match="no operations that all ranks have recorded"):
        plot_waits(none, tmp_path / "none.svg")


def test_clocks_that_differ() -> None:
    """Each rank's clock is ahead or behind by up to 5 ms. Times are exact to what a rank takes to observe that all have
    begun, if each rank was once the last. Without corrections they would be wrong by milliseconds."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    ranks, count, seen = 6, 12, 4e-6
    begun = 100 + torch.rand((ranks, count), generator=draw, dtype=torch.float64) * 1e-3
    begun[torch.arange(count) % ranks, torch.arange(count)] += 2e-3  # the last one
    begun[4] += 1e-3
    ahead = (torch.rand((ranks, 1), generator=draw, dtype=torch.float64) - 0.5) * 1e-2
    met = begun.amax(0) + seen * torch.rand((ranks, count), generator=draw, dtype=torch.float64)
    waits = (0.0,) * ranks

    def found(ahead: torch.Tensor, met: torch.Tensor | None) -> torch.Tensor:
        times = (begun + ahead).tolist()
        seen = (met + ahead).tolist() if met is not None else [[None] * count] * ranks
        ops = [[noted(n, times[r][n], waits, seen[r][n]) for n in range(count)] for r in range(ranks)]
        return last(ops)[1]

    truth = begun - begun.amin(0)
    assert_close(found(ahead, met), truth, rtol=0, atol=2 * seen)
    # Clocks that agree are not corrected, nor those of which nothing is known.
    assert_close(found(torch.zeros(1), met), truth, rtol=0, atol=1e-9)
    wrong = begun + ahead
    assert_close(found(ahead, None), wrong - wrong.amin(0), rtol=0, atol=1e-9)
    # A rank that is the last each time cannot tell others that its clock is behind: it appears less late than it is.
    begun[0] = begun[1:].amax(0) + 1e-3
    met = begun.amax(0) + seen
    for behind in (-2e-3, 0.0, 2e-3):
        late = found(torch.tensor([[behind], *[[0.0]] * (ranks - 1)]), met)
        assert bool((late[0] >= late[1:].amax(0) - 2 * seen).all()) and bool((late >= 0).all())


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
