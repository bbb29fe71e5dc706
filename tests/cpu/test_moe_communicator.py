"""MoECommunicator against a dense model: every mode, layout and format, on one and two ranks, eager and compiled; where
placements have experts, what is counted, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from calls import counted
from graphs import captured_graphs
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from ep_ops import formats
from ep_ops.formats import FORMATS, LAYOUTS
from ep_ops.moe import (
    DispatchHandle,
    DispatchOutput,
    MoECommunicator,
    MoECommunicatorConfig,
    Quant,
    Stats,
    balanced,
    moves,
    plot_begun,
)
from ep_ops.moe.statistics import begun
from ep_ops.nn import expert_lists, gather_rows, grouped_mm, reduce_rows
from ep_ops.records import Operation

E, H, K, MOST = 5, 128, 2, 12
MODES = ("auto", "latency", "throughput")
ROWS = ("grouped", "padded", "token_major")
REPLICAS = (3, 0, 1, 2, 4, 3, 0, 3)
"""Where experts lie unless a test says otherwise: three replicas of one, two of another."""


def config(**more: Any) -> MoECommunicatorConfig:
    given = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=MOST, dtype=torch.float32)
    return MoECommunicatorConfig(**{**given, **more})


def communicator(**more: Any) -> MoECommunicator:
    return MoECommunicator(config(**more), device="cpu")


@dataclasses.dataclass
class Given:
    """Of one rank: small numbers, which all formats but those with scales of fp32 hold exactly."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def drawn(seed: int, rank: int, tokens: int, grad: bool = False) -> Given:
    draw = torch.Generator().manual_seed(seed + 31 * rank)
    x = torch.randint(-8, 9, (tokens, H), generator=draw).float()
    ids = torch.rand(tokens, E, generator=draw).argsort(1)[:, :K]
    ids[torch.rand(tokens, K, generator=draw) < 0.15] = -1
    weights = torch.rand(tokens, K, generator=draw) + 0.1
    return Given(x.requires_grad_(grad), ids, weights.requires_grad_(grad))


def matrices(seed: int) -> Tensor:
    """[E, H, H] of the logical experts, the same on all ranks."""
    return torch.randn(E, H, H, generator=torch.Generator().manual_seed(seed)) / H**0.5


def dense(given: Given, w: Tensor) -> Tensor:
    out = torch.zeros(given.x.shape)
    for expert in range(E):
        out = out + (given.weights * (given.ids == expert)).sum(1, keepdim=True) * (given.x @ w[expert])
    return out


def computed(moe: MoECommunicator, output: DispatchOutput, w: Tensor) -> Tensor:
    """What the local experts ``w`` [El, H, H] make of what has come."""
    rows, form = output.x.flatten(0, -2), moe.config.quant.format
    if rows.dtype == torch.float8_e4m3fn:
        assert output.scales is not None
        rows = formats.dequantise(rows, output.scales, formats.format_of(form), torch.float32)
    if moe.config.layout == "padded":
        live = torch.arange(output.x.shape[1]) < output.counts[:, None]
        rows = torch.where(live[..., None], rows.view(output.x.shape), 0)
        return torch.where(live[..., None], torch.bmm(rows, w), 0)  # gradients of slots that hold nothing are undefined
    if moe.config.layout == "grouped":
        return grouped_mm(rows, w, output.offs)
    assert output.local_idx is not None
    lists = expert_lists(output.local_idx, w.shape[0])
    return reduce_rows(grouped_mm(gather_rows(rows, lists), w, lists.offs), lists, output.weights)


def layer(moe: MoECommunicator, given: Given, w: Tensor, max_tokens: int | None = None) -> Tensor:
    x, ids, weights = given.x, given.ids, given.weights
    if moe.config.overlap:
        output, handle = moe.dispatch_async(x, ids, weights, max_tokens=max_tokens).wait()
        return moe.combine_async(computed(moe, output, w), handle).wait()
    output, handle = moe.dispatch(x, ids, weights, max_tokens=max_tokens)
    return moe.combine(computed(moe, output, w), handle)


def ways() -> list[dict[str, Any]]:
    """Configurations: every layout with every mode and with every format, as far as they go together, with and without
    replicas and overlap."""
    found = []
    either = itertools.cycle([{}, {"overlap": True}, {"placement": REPLICAS}, {"placement": REPLICAS, "overlap": True}])
    for mode, rows, form in itertools.product(MODES, ROWS, ("", *FORMATS)):
        way = dict(mode=mode, layout=rows, quant=Quant(form))
        if (mode == "auto" or not form) and config(**way).problem() is None:
            found.append({**way, **next(either)})
    found += [dict(layout=rows, capacity="exact", placement=REPLICAS) for rows in ("grouped", "token_major")]
    return found


def test_what_goes_together() -> None:
    """All but token-major rows and scales of whole rows with latency kernels."""
    for mode, rows, form in itertools.product(MODES, ROWS, ("", *FORMATS)):
        apart = mode == "latency" and (rows == "token_major" or "row" in form)
        assert (config(mode=mode, layout=rows, quant=Quant(form)).problem() is None) == (not apart)


def on_ranks(ranks: int, function: Any, *args: Any) -> list[Any]:
    """One rank is this process."""
    return run_ranks(ranks, function, *args) if ranks > 1 else [function(*args)]


def errors(seed: int, tokens: list[int]) -> list[tuple[dict[str, Any], float]]:
    """Of each way, how far the layer is from a dense one."""
    found = []
    w = matrices(seed)
    for turn, way in enumerate(ways()):
        with torch.no_grad(), communicator(**way) as moe:
            rank = moe.comm.rank
            given = drawn(seed + turn, rank, tokens[rank])
            out = layer(moe, given, w[list(moe.local_experts)], max(tokens) if turn % 2 else None)
            expected = dense(given, w)
            found.append((way, float((out - expected).norm() / expected.norm().clamp(min=1e-6))))
    return found


@pytest.mark.parametrize("tokens", [[9], [7, MOST], [0, 5]], ids=str)
def test_every_mode_layout_and_format(tokens: list[int]) -> None:
    for found in on_ranks(len(tokens), errors, cases.fresh_seed(), tokens):
        assert len(found) == len(ways())
        for way, error in found:
            inexact = "fp32" in way.get("quant", Quant()).format
            assert error < (0.04 if inexact else 1e-5), way


# ---------------------------------------------------------------------- gradients, compiled code


def gradients(seed: int, way: dict[str, Any], compiled: bool) -> list[list[Tensor]]:
    """Result and gradients of x, weights and matrices: the layer's, and those of dense ones of all ranks."""
    with communicator(**way) as moe:
        rank, ranks = moe.comm.rank, moe.comm.world_size
        tokens = [MOST - 3 * r for r in range(ranks)]
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        own = drawn(seed, rank, tokens[rank], grad=True)
        w = matrices(seed)[list(moe.local_experts)].requires_grad_()
        out = run(moe, own, w)
        out.sin().sum().backward()
        # Of a logical expert, what its replicas have.
        of_logical = torch.zeros(E, H, H).index_add_(0, torch.tensor(moe.local_experts), w.grad)
        if ranks > 1:
            dist.all_reduce(of_logical)
        everywhere = matrices(seed).requires_grad_()
        givens = [drawn(seed, r, tokens[r], grad=True) for r in range(ranks)]
        outs = [dense(given, everywhere) for given in givens]
        torch.stack([other.sin().sum() for other in outs]).sum().backward()
        mine = givens[rank]
        return [
            [out.detach(), own.x.grad, own.weights.grad, of_logical],
            [outs[rank].detach(), mine.x.grad, mine.weights.grad, everywhere.grad],
        ]


@pytest.mark.parametrize(
    ("rows", "compiled", "ranks"),
    [*((rows, False, 2) for rows in ROWS), ("grouped", True, 2), ("padded", True, 1), ("token_major", True, 1)],
)
def test_gradients(rows: str, compiled: bool, ranks: int) -> None:
    """With replicas, statistics and split operations; rows quantised on the wire, to what they are."""
    way = dict(layout=rows, placement=REPLICAS, statistics=True, overlap=rows != "grouped")
    way["quant"] = Quant("wire:e4m3/128/pow2" if rows == "padded" else "")
    torch._dynamo.reset()
    for got, expected in on_ranks(ranks, gradients, cases.fresh_seed(), way, compiled):
        for mine, theirs in zip(got, expected, strict=True):
            assert theirs.abs().max() > 0.1
            assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_handles_are_tensors() -> None:
    """From one compiled function to another, to a second dispatch, and back; siblings and other placements take the
    code that is there."""
    seed = cases.fresh_seed()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = lambda function: torch.compile(function, fullgraph=True, dynamic=False, backend=counter)  # noqa: E731
    with communicator(placement=REPLICAS, statistics=True) as first:

        @compiled
        def there(
            moe: MoECommunicator, x: Tensor, ids: Tensor, weights: Tensor
        ) -> tuple[DispatchOutput, DispatchHandle]:
            return moe.dispatch(x, ids, weights)

        @compiled
        def again(moe: MoECommunicator, x: Tensor, handle: DispatchHandle) -> tuple[DispatchOutput, DispatchHandle]:
            return moe.dispatch(x, None, previous_handle=handle)

        @compiled
        def back(moe: MoECommunicator, rows: Tensor, handle: DispatchHandle, offs: Tensor, w: Tensor) -> Tensor:
            return moe.combine(grouped_mm(rows, w, offs), handle)

        placements = [REPLICAS, (4, 1, 0, 2, 2, 2, 3, 1), tuple(range(E)) + (0, 0, 0)]
        with torch.no_grad():
            for turn, (placement, moe) in enumerate(itertools.product(placements, (first, first.sibling()))):
                given, w = drawn(seed + turn, 0, MOST), matrices(seed)
                moe.place(placement)
                assert moe.local_experts == moe.placement == placement
                local = w[list(placement)]
                output, handle = there(moe, given.x, given.ids, given.weights)
                assert_close(back(moe, output.x, handle, output.offs, local), dense(given, w))
                output, more = again(moe, given.x + 1, handle)
                plain = dataclasses.replace(given, x=given.x + 1, weights=torch.ones(MOST, K))
                assert more.weights is None
                assert_close(back(moe, output.x, more, output.offs, local), dense(plain, w))
                assert moe.stats().dispatches == 2 * (turn // 2 + 1)  # each counts for itself
        # there, again, and back with weights and without
        assert counter.frame_count == 4


OTHERS = 2
"""Calls that other releases than Python 3.11 and torch 2.13 may take more."""


def test_it_costs_nothing_over_the_operators() -> None:
    """Without a placement and statistics: the same operators, and a few calls of Python."""
    given = drawn(0, 0, MOST)
    with communicator() as moe, torch.no_grad():

        def by_hand(x: Tensor) -> Tensor:
            sent = moe.comm.dispatch(x, given.ids.int(), given.weights)
            return moe.comm.combine(sent.x, sent.route, sent.weights)

        def by_moe(x: Tensor) -> Tensor:
            output, handle = moe.dispatch(x, given.ids.int(), given.weights)
            return moe.combine(output.x, handle)

        assert captured_graphs(by_hand, given.x) == captured_graphs(by_moe, given.x)
        torch._dynamo.reset()
        for run in (by_hand, by_moe):  # the first calls fill caches
            run(given.x)
        few, many = (counted(lambda run=run: run(given.x)) for run in (by_hand, by_moe))
        print(few, many)
        assert 0 < many[0] - few[0] <= 11 + OTHERS and many[1] - few[1] <= 5 + OTHERS


def test_modes_and_sizes() -> None:
    """What the communicator beneath is told, and how large buffers are, for all tokens and for few."""
    for mode, bound in (("auto", 7), ("throughput", 0), ("latency", MOST)):
        with communicator(mode=mode, latency_max_tokens=7 if mode == "auto" else None) as moe:
            assert moe.comm.config.latency_max_tokens == bound
    rows = {
        # layout, capacity: rows of 12 tokens, of 2
        ("grouped", None): ((112, H), (80, H)),  # 24 + 5 * 15, and 4 + 5 * 15, in multiples of 16
        ("grouped", 96): ((96, H), (80, H)),
        ("padded", None): ((E, 16, H), (E, 16, H)),
        ("padded", 4): ((E, 4, H), (E, 2, H)),
        ("token_major", None): ((MOST, H), (2, H)),
        ("token_major", 5): ((5, H), (2, H)),
        ("grouped", "exact"): (None, None),
    }
    given = drawn(0, 0, 2)
    for (layout, capacity), shapes in rows.items():
        alignment = 2 if (layout, capacity) == ("padded", 4) else 16
        with communicator(layout=layout, capacity=capacity, alignment=alignment) as moe, torch.no_grad():
            for max_tokens, shape in zip((None, 2), shapes, strict=True):
                output, handle = moe.dispatch(given.x, given.ids, max_tokens=max_tokens)
                if shape is None:
                    assert output.x.shape == (int(output.offs[-1]), H)
                else:
                    assert output.x.shape == shape, (layout, capacity, max_tokens)
                assert handle.route.max_tokens == (max_tokens or MOST)


# ---------------------------------------------------------------------- placement


def test_replicas_take_turns() -> None:
    """Straight from the definition, in loops; int32 and int64, and tokens of several dimensions."""
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
    skewed = balanced([90, 1, 1, 1], [3, 3])
    assert sorted(skewed).count(0) == 2 and 0 in skewed[:3] and 0 in skewed[3:]
    assert sorted(balanced([5, 5], [3])) in ([0, 0, 1], [0, 1, 1])  # more replicas than ranks
    with pytest.raises(ValueError, match="load has 4 logical experts; allowed: at most 3"):
        balanced([1, 1, 1, 1], [2, 1])
    with pytest.raises(ValueError, match="placements have 3 and 2 places"):
        moves([0, 1, 2], [0, 1], [2, 1])


# ---------------------------------------------------------------------- statistics


def counts(seed: int, rows: str) -> tuple[Stats, list[Tensor], list[int]]:
    rank = dist.get_rank()
    capacity = {"grouped": 16, "padded": 3, "token_major": 9}[rows]
    way = dict(layout=rows, alignment=1, capacity=capacity, placement=REPLICAS, statistics=True)
    loads = []
    with communicator(**way, quant=Quant("e4m3/32/mx")) as moe, torch.no_grad():
        moe.reset_stats()
        for turn, placement in enumerate((REPLICAS, REPLICAS, REPLICAS[::-1])):
            moe.place(placement)
            given = drawn(seed + turn, rank, MOST)
            output, handle = moe.dispatch(given.x, given.ids, given.weights)
            moe.combine(torch.zeros(handle.route.num_rows, H), handle)
            loads.append(moe.load())
        stats = moe.stats()
        moe.reset_stats()
        fresh = moe.stats()
        assert fresh.dispatches == 0 and not any(t.any() for t in (*fresh[2:6], moe.load()))
    return stats, loads, list(REPLICAS)


@pytest.mark.parametrize("rows", ROWS)
def test_stats(rows: str) -> None:
    """Against loops over what ranks have asked for, over a change of the placement."""
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
        assert not stats.waits.any() and not stats.late.any()


def test_what_is_made_in_inference_mode_goes_on_behind_it() -> None:
    given = drawn(0, 0, MOST)
    with torch.inference_mode():
        moe = communicator(placement=REPLICAS, statistics=True)
    with moe:
        moe.place(REPLICAS[::-1])
        moe.dispatch(given.x, given.ids)
        assert int(moe.load().sum()) == int((given.ids >= 0).sum())


def test_recomputed_dispatches_count_once() -> None:
    given, w = drawn(0, 0, MOST, grad=True), matrices(0)
    with communicator(statistics=True) as moe:
        checkpoint(layer, moe, given, w, use_reentrant=False).sum().backward()
        assert moe.stats().dispatches == 1 and int(moe.load().sum()) == int((given.ids >= 0).sum())


def noted(number: int, begun: float) -> Operation:
    return Operation(number, "dispatch", True, True, False, 8, "", begun, None)


def test_a_straggler_shows(tmp_path: Path) -> None:
    """Operations that all ranks have noted; rank 2 begins 30 us late in each."""
    late = [2e-6, 0.0, 30e-6]
    ops = [[noted(n, 100.0 + n + own) for n in range(5 + r, 9 + r)] for r, own in enumerate(late)]
    numbers, times = begun([list(reversed(own)) for own in ops])
    assert numbers == (7, 8)
    zero = torch.zeros(1, dtype=torch.int64)
    of_first, of_last = (Stats(rank, 1, zero, zero, zero, zero, numbers, times) for rank in (0, 2))
    assert_close(of_first.late, torch.tensor(late, dtype=torch.float64), rtol=0, atol=1e-9)
    assert_close(of_first.waits, torch.tensor([0, 0, 28e-6], dtype=torch.float64), rtol=0, atol=1e-9)
    assert not of_last.waits.any()
    text = plot_begun(of_first, tmp_path / "begun.svg").read_text(encoding="utf-8")
    assert "latest on average: rank 2, 30.0 µs" in text
    cells = [c for c in xml.etree.ElementTree.fromstring(text).iter() if "fill-opacity" in c.attrib]
    assert [float(c.attrib["fill-opacity"]) for c in cells] == pytest.approx([1 / 15, 1 / 15, 0, 0, 1, 1], abs=2e-3)
    none = of_first._replace(operations=(), begun=torch.zeros(3, 0))
    with pytest.raises(ValueError, match="no operations that all ranks have noted"):
        plot_begun(none, tmp_path / "none.svg")


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


# ---------------------------------------------------------------------- refusals

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(mode="fast"), "mode is 'fast'; it must be one of 'auto', 'latency', 'throughput'"),
    (dict(layout="flat"), "layout is 'flat'; it must be one of"),
    (dict(capacity="all"), "capacity is 'all'; it must be None, 'exact' or an int"),
    (dict(capacity="exact", layout="padded"), "layout 'padded' has as many slots for each expert"),
    (dict(quant="e4m3"), "quant is 'e4m3'; allowed: an ep_ops.moe.Quant"),
    (dict(quant=Quant("e5m2")), "format is 'e5m2'; allowed"),
    (dict(quant=Quant("e4m3/row/fp32", "columns")), "scales_as is 'columns'; allowed for format"),
    (dict(quant=Quant("e4m3/32/mx", "", torch.ones(1))), "quant has scales; allowed"),
    (dict(mode="throughput", latency_max_tokens=8), "latency_max_tokens is 8; mode 'throughput' has no bound"),
    (dict(mode="latency", layout="token_major"), "mode 'latency' has no kernels for its dispatches"),
    (dict(mode="latency", capacity="exact"), "mode 'latency' has no kernels for exact sizes"),
    (dict(mode="latency", quant=Quant("e4m3/row/fp32")), "mode 'latency' has no kernels for a scale of the row"),
    (dict(mode="latency", max_tokens_per_rank=100_000), "mode 'latency' takes at most [1-9][0-9]* of"),
    (dict(placement=5), "placement is 5; it must hold"),
    (dict(placement=(0, 1, 2, 3, 5)), r"placement\[4\] is 5; allowed: logical experts, 0..4"),
    (dict(placement=(0, 1, 2, 4, 4)), "placement leaves out logical expert 3"),
    (dict(top_k=0), "top_k is 0; it must be an int of at least 1"),
)  # fmt: skip


@pytest.mark.parametrize(("way", "text"), WRONG, ids=lambda value: "" if isinstance(value, str) else str(value)[:40])
def test_configurations_that_cannot_be(way: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        communicator(**way)
    with communicator():  # nothing is left of it
        pass


def refused() -> list[str]:
    """On each rank, what calls raise that one rank or all ranks get wrong; each by itself."""
    rank, said = dist.get_rank(), []

    def note(call: Any) -> None:
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))

    given = drawn(0, rank, MOST)
    note(lambda: communicator(mode="auto" if rank else "slow"))
    note(lambda: communicator(placement=REPLICAS if rank else REPLICAS[::-1]))
    with communicator(placement=REPLICAS) as moe, torch.no_grad():
        note(lambda: moe.place(REPLICAS if rank else (0, 1, 2)))
        note(lambda: moe.place(REPLICAS if rank else REPLICAS[::-1]))
        note(lambda: moe.sibling((0, 1, 2, 3, 4)))
        assert moe.placement == REPLICAS
        bad = given.ids.clone()
        bad[3, 1] = E if rank else bad[3, 1]
        note(lambda: moe.dispatch(given.x, bad))
        many = torch.zeros(MOST + 1, K, dtype=torch.int64)
        note(lambda: moe.dispatch(torch.zeros(MOST + 1, H), many) if rank else moe.dispatch(given.x, given.ids))
        note(lambda: moe.dispatch(given.x, given.ids, quant=None if rank else "e4m3/32/mx"))  # type: ignore[arg-type]
        output, handle = moe.dispatch(given.x, given.ids)
        note(lambda: moe.dispatch(given.x, None if rank else given.ids, previous_handle=handle))
        note(moe.stats)
        assert moe.combine(output.x, handle).shape == (MOST, H)  # it goes on
    with communicator(mode="latency") as few, torch.no_grad():
        note(lambda: few.place(range(E)))
        _, handle = few.dispatch(given.x, given.ids)
        note(lambda: few.dispatch(given.x, None, previous_handle=handle))
        note(lambda: few.dispatch(given.x, given.ids, quant=Quant("wire:e4m3/row/fp32")))
    return said


def test_what_is_refused_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, refused)
    wanted = [
        ("mode is 'slow'", "refused by rank 0: mode is 'slow'"),
        ("ranks disagree on placement", "ranks disagree on placement"),
        ("placement leaves out logical expert 3", "refused by rank 0: placement leaves out"),
        ("ranks disagree on placement", "ranks disagree on placement"),
        ("placement has 5 places; allowed: 8, as at first",) * 2,
        ("refused by rank 1: topk_idx[3, 1] is 8 on rank 1", "topk_idx[3, 1] is 8 on rank 1"),
        ("refused by rank 1: topk_idx has 13 tokens", "topk_idx has 13 tokens"),
        ("quant is 'e4m3/32/mx'; allowed", "refused by rank 0: quant is"),
        ("topk_ids is given with previous_handle", "refused by rank 0: topk_ids is given"),
        ("statistics is False in the configuration",) * 2,
        ("placement is given, but the configuration has none",) * 2,
        ("previous_handle is given; mode 'latency'",) * 2,
        ("format is 'wire:e4m3/row/fp32'; mode 'latency'",) * 2,
    ]
    assert len(first) == len(second) == len(wanted)
    for mine, theirs, (here, there) in zip(first, second, wanted, strict=True):
        assert here in mine and there in theirs, (mine, theirs)


def test_all_layouts_of_scales_are_known() -> None:
    """Views of padded rows and of scales fit together, whatever the layout."""
    given = drawn(0, 0, MOST)
    for scales_as in LAYOUTS:
        form = "e4m3/128/pow2" if scales_as == "columns" else "e4m3/32/mx"
        with communicator(layout="padded", quant=Quant(form, scales_as)) as moe, torch.no_grad():
            output, handle = moe.dispatch(given.x, given.ids, given.weights)
            assert output.x.shape == (E, 16, H) and output.x.dtype == torch.float8_e4m3fn
            assert output.weights is not None and output.weights.shape == (E, 16) and output.scales is not None
            codes, scales = formats.quantise(given.x, formats.format_of(form))
            passed, _ = moe.dispatch(codes, given.ids, None, Quant(form, scales_as, scales))
            live = torch.arange(16) < output.counts[:, None]
            assert torch.equal(passed.x.view(torch.uint8)[live], output.x.view(torch.uint8)[live])
            assert passed.weights is None and torch.equal(handle.dropped, torch.zeros(E, dtype=torch.int32))
