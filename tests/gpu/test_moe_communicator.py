"""MoECommunicator on kernels: every mode and layout beside the reference (the checking mode compares every number), a
captured graph whose placement changes between replays, compiled code likewise, and what is noted of late ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operators import ranks
from sharing import AT_ONCE, TURNS, few_processes
from torch import Tensor

from ep_ops.moe import (
    DispatchHandle,
    DispatchOutput,
    MoECommunicator,
    MoECommunicatorConfig,
    Quant,
)
from ep_ops.nn import expert_lists, gather_rows, interleave, of_rows, reduce_rows
from ep_ops.statistics import plot_begun, plot_waits

TOKENS, TOP_K, HIDDEN, EACH = 24, 3, 1152, 4
BOUND = 2 * TOKENS
QUANT = Quant("e4m3/128/pow2", "rows")
WAYS = [("latency", "grouped"), ("latency", "padded"), ("throughput", "grouped"), ("throughput", "padded"),
        ("auto", "token_major")]  # fmt: skip
"""Mode and layout. In mode "auto" all calls are few here, unless a test says otherwise."""


def sizes(world_size: int) -> dict[str, Any]:
    """Return the sizes of the inner communicator, with as many physical experts."""
    return dict(
        num_experts=EACH * world_size,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=BOUND,
        dtype=torch.bfloat16,
        statistics=True,
    )


def wanted(world_size: int) -> tuple[dict[str, Any], int, list[tuple[str, str]]]:
    """A configuration, the bound of its latency kernels and formats, for precompile.py."""
    return sizes(world_size), BOUND, [QUANT[:2]]


def logical(world_size: int) -> int:
    """Experts of the router: so many that two are left for replicas, and no fewer than a token names."""
    return max(TOP_K, EACH * world_size - 2)


def placements(world_size: int) -> list[tuple[int, ...]]:
    experts, places = logical(world_size), EACH * world_size
    first = [*range(experts), *range(places - experts)]
    return [tuple(first), tuple(first[::-1]), tuple((e + 1) % experts for e in first)]


def made(world_size: int, mode: str = "auto", layout: str = "grouped", **more: Any) -> MoECommunicator:
    given = {**sizes(world_size), "num_experts": logical(world_size), "placement": placements(world_size)[0], **more}
    if mode == "auto":
        given.setdefault("latency_max_tokens", BOUND)
    config = MoECommunicatorConfig(mode=mode, layout=layout, backend="cute", timeout=10.0 * TURNS, **given)
    return MoECommunicator(config, device="cuda")


def drawn(seed: int, rank: int, world_size: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Small numbers, of which every sum is exact in bfloat16: x, logical ids (some -1), weights."""
    draw = torch.Generator().manual_seed(seed + 977 * rank)
    x = torch.randint(-4, 5, (tokens, HIDDEN), generator=draw).bfloat16()
    ids = torch.rand(tokens, logical(world_size), generator=draw).argsort(1)[:, :TOP_K].int()
    ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
    weights = 0.5 + 0.5 * torch.randint(0, 2, ids.shape, generator=draw).float()
    return x.cuda(), ids.cuda(), weights.cuda()


def factor(expert: Tensor) -> Tensor:
    """Return the factor that an expert multiplies rows by."""
    return (2.0 ** (expert % 3)).bfloat16()


def expected(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    each = torch.where(ids >= 0, weights * factor(ids).float(), 0)
    return (x.float() * each.sum(1, keepdim=True)).bfloat16()


def physical(ids: Tensor, placement: tuple[int, ...], rank: int) -> Tensor:
    """Straight from the definition, in loops."""
    rows = []
    for token, own in enumerate(ids.tolist()):
        places = [[p for p, there in enumerate(placement) if there == expert] for expert in own]
        rows.append([at[(token + rank) % 60 % len(at)] if at else -1 for at in places])
    return torch.tensor(rows, dtype=torch.int32, device=ids.device).view(ids.shape)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_beside_the_reference(mode: str, layout: str, seed: int, monkeypatch: Any) -> None:
    """Results equal the reference's: whole and asynchronous, with and without a format, and along a handle, with
    another placement in every turn."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    rank, world_size = ranks()
    with torch.no_grad(), made(world_size, mode, layout, quant=QUANT, overlap=True) as moe:
        moe.warmup()
        for turn, placement in enumerate(placements(world_size)):
            moe.place(placement)
            x, ids, weights = drawn(seed + turn, rank, world_size, 0 if turn == 1 and rank else BOUND - rank % 2)
            for quant in (None, Quant()):
                _, handle = moe.dispatch(x, ids, weights, quant)
                output, _ = moe.dispatch_async(x, ids, weights, quant).wait()
                if mode != "latency":
                    moe.dispatch(x, None, weights, quant, handle)
                y = torch.randn(output.x.shape, device="cuda").bfloat16()
                moe.combine(y, handle)
                moe.combine_async(y, handle).wait()
        moe.comm.statistics()
        moe.check_errors()


def layer(
    moe: MoECommunicator, x: Tensor, ids: Tensor, weights: Tensor, of_local: Tensor
) -> tuple[Tensor, DispatchHandle]:
    """``of_local`` [El, 1]: factors of the experts here."""
    output, handle = moe.dispatch(x, ids, weights)
    return moe.combine(computed(output, handle, of_local), handle), handle


def computed(output: DispatchOutput, handle: DispatchHandle, of_local: Tensor) -> Tensor:
    """Return the outputs of the experts here: each row times its expert's factor."""
    if output.local_idx is None:
        return output.x.flatten(0, -2) * of_rows(of_local, handle.route)
    lists = expert_lists(output.local_idx, of_local.shape[0])
    at = torch.searchsorted(lists.offs, torch.arange(lists.rows.shape[0], device=of_local.device), right=True)
    y = gather_rows(output.x, lists) * of_local[at.clamp(max=of_local.shape[0] - 1)]
    return reduce_rows(y, lists, output.weights)


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_placement_changes_between_replays(mode: str, layout: str, seed: int, together: Any, tmp_path: Path) -> None:
    """Each replay of one graph sends ids to the places of its placement, and its sums are right to the bit."""
    rank, world_size = ranks()
    with torch.no_grad(), made(world_size, mode, layout) as moe:
        moe.warmup()
        x, ids, weights = drawn(seed, rank, world_size, BOUND)
        here = torch.tensor(moe.local_experts, device="cuda")
        of_local = factor(here)[:, None].contiguous()

        def step() -> tuple[Tensor, DispatchHandle]:
            return layer(moe, x, ids, weights, of_local)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, handle = step()
        moe.reset_load()
        torch.cuda.synchronize()
        first = moe.comm.statistics()
        load = torch.zeros(logical(world_size), dtype=torch.int64)
        turns = 2 * placements(world_size)
        for turn, placement in enumerate(turns):
            moe.place(placement)
            of_local.copy_(factor(torch.tensor(moe.local_experts, device="cuda"))[:, None])  # the weights move
            for mine, fresh in zip((x, ids, weights), drawn(seed + turn, rank, world_size, BOUND), strict=True):
                mine.copy_(fresh)
            out.fill_(77)
            graph.replay()
            torch.cuda.synchronize()
            for source in range(world_size):
                asked = drawn(seed + turn, source, world_size, BOUND)[1]
                load += torch.bincount(asked[asked >= 0].long().cpu(), minlength=load.numel())
            with together():
                assert torch.equal(handle.route.topk_idx, physical(ids, placement, rank)), turn
                assert torch.equal(out, expected(x, ids, weights)), turn
        counts, times, counted = moe.comm.statistics(), moe.comm.lateness(), moe.load()
        with together():
            assert torch.equal(counted, load) and counts.dispatches - first.dispatches == len(turns)
            assert counts.operations - first.operations == 2 * len(turns)
            received, returned = (counts.received - first.received).sum(), (counts.returned - first.returned).sum()
            assert received == returned > 0 and not counts.dropped.any()
            assert 1 < len(times.operations) <= 16 and times.begun.shape == (world_size, len(times.operations))
            assert (times.begun >= 0).all() and (times.begun.amin(0) == 0).all()
            assert times.waits.shape == (world_size, *times.begun.shape) and (times.waits >= 0).all()
            assert "latest on average: rank" in plot_begun(times, tmp_path / "begun.svg").read_text(encoding="utf-8")
        moe.check_errors()


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_a_late_rank_shows(mode: str, seed: int, together: Any, tmp_path: Path) -> None:
    """One that is busy with something else before each of its operations: it begins late, and is waited for."""
    rank, world_size = ranks()
    with torch.no_grad(), made(world_size, mode) as moe:
        moe.warmup()
        x, ids, weights = drawn(seed, rank, world_size, TOKENS)
        slowest = world_size - 1
        torch.cuda.synchronize()
        before = moe.comm.statistics()
        for _ in range(10):
            if rank == slowest:
                torch.cuda._sleep(4_000_000)  # some 2 ms
            _, handle = moe.dispatch(x, ids, weights)
            moe.combine(torch.zeros(handle.route.num_rows, HIDDEN, dtype=x.dtype, device="cuda"), handle)
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        stats, waited = moe.comm.lateness(), moe.comm.statistics().waited - before.waited
        longest = [float(waited.max())] * world_size
        if dist.is_initialized():
            dist.all_gather_object(longest, longest[0])
        with together():
            assert (waited >= 0).all() and waited[rank] == 0
            if world_size > 1 and AT_ONCE:
                if rank == slowest:
                    assert longest[rank] < min(longest[:slowest]), longest
                else:
                    assert int(waited.argmax()) == slowest and longest[rank] > 8 * 2e-4, waited
                assert int(stats.late.argmax()) == slowest and stats.late[slowest] > 2e-4
                # Every other rank has waited for it most, and it for nobody so long.
                own = stats.waits.mean(2).tolist()
                for waiting, for_others in enumerate(own):
                    late = max(range(world_size), key=for_others.__getitem__)
                    assert waiting == slowest or late == slowest and for_others[slowest] > 2e-4, own
                assert int(stats.awaited.argmax()) == slowest and max(own[slowest]) < stats.awaited[slowest], own
                text = plot_waits(stats, tmp_path / "waits.svg").read_text(encoding="utf-8")
                assert f"waited for most: rank {slowest}" in text
        moe.check_errors()


@pytest.mark.parametrize(("mode", "layout"), WAYS)
def test_two_requests_under_way(mode: str, layout: str, seed: int, together: Any) -> None:
    """Two micro-batches go in turns, each in a flight of its own; one takes no second request."""
    rank, world_size = ranks()
    with torch.no_grad(), made(world_size, mode, layout, overlap=True) as moe:
        moe.warmup()
        of_local = factor(torch.tensor(moe.local_experts, device="cuda"))[:, None]

        def turns(flight: int, x: Tensor, ids: Tensor, weights: Tensor) -> Iterator[Tensor | None]:
            request = moe.dispatch_async(x, ids, weights, flight=flight)
            yield None
            output, handle = request.wait()
            back = moe.combine_async(computed(output, handle, of_local), handle, flight=flight)
            yield None
            yield back.wait()

        for turn in range(3):
            given = [drawn(seed + 10 * turn + batch, rank, world_size, BOUND - batch * TOKENS) for batch in range(2)]
            outs = interleave(*(turns(flight, *batch) for flight, batch in enumerate(given)))
            with together():
                for out, batch in zip(outs, given, strict=True):
                    assert torch.equal(out, expected(*batch)), turn
        request = moe.dispatch_async(*given[0], flight=1)
        with together(), pytest.raises(RuntimeError, match="flight 1 is in use"):
            moe.dispatch_async(*given[0], flight=1)
        request.wait()
        moe.check_errors()


@few_processes
@pytest.mark.parametrize("layout", ["grouped", "token_major"])
def test_compiled(layout: str, seed: int, together: Any) -> None:
    """A layer compiles to one graph with gradients; another placement does not compile it again."""
    rank, world_size = ranks()
    with made(world_size, layout=layout) as moe:
        moe.warmup()
        run = torch.compile(layer, fullgraph=True, dynamic=False)
        of_local = torch.empty(moe.comm.num_local_experts, 1, dtype=torch.bfloat16, device="cuda")
        for turn, placement in enumerate(placements(world_size)):
            moe.place(placement)
            of_local.copy_(factor(torch.tensor(moe.local_experts, device="cuda"))[:, None])
            x, ids, weights = drawn(seed + turn, rank, world_size, BOUND)
            found = []
            with torch._dynamo.config.patch(error_on_recompile=turn > 0):
                for where in (run, layer):
                    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
                    out, _ = where(moe, leaves[0], ids, leaves[1], of_local)
                    out.float().square().sum().backward()
                    found.append((out.detach(), *(leaf.grad for leaf in leaves)))
            with together():
                assert torch.equal(found[0][0], expected(x, ids, weights)), turn
                for mine, theirs in zip(*found, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        moe.check_errors()


@few_processes
@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_compiled_graphs_count(mode: str, seed: int, together: Any) -> None:
    """With mode="reduce-overhead", counts do not prevent CUDA graphs, and are right after each call and replay."""
    rank, world_size = ranks()
    skips = torch._dynamo.utils.counters["inductor"]
    with torch.no_grad(), made(world_size, mode) as moe:
        moe.warmup()
        run = torch.compile(layer, fullgraph=True, dynamic=False, mode="reduce-overhead")
        of_local = factor(torch.tensor(moe.local_experts, device="cuda"))[:, None].contiguous()
        load, skipped = torch.zeros(logical(world_size), dtype=torch.int64), skips["cudagraph_skips"]
        torch.cuda.synchronize()
        first = moe.comm.statistics()
        for turn in range(1, 7):
            x, ids, weights = drawn(seed + turn, rank, world_size, BOUND)
            out = run(moe, x, ids, weights, of_local)[0].clone()
            torch.cuda.synchronize()
            for source in range(world_size):
                asked = drawn(seed + turn, source, world_size, BOUND)[1]
                load += torch.bincount(asked[asked >= 0].long().cpu(), minlength=load.numel())
            counts, counted = moe.comm.statistics(), moe.load()
            with together():
                assert torch.equal(out, expected(x, ids, weights)), turn
                assert torch.equal(counted, load) and counts.dispatches - first.dispatches == turn
                assert counts.operations - first.operations == 2 * turn
                assert (counts.rows - first.rows).sum() > 0 and not counts.dropped.any()
                assert skips["cudagraph_skips"] == skipped
        moe.check_errors()
        torch._dynamo.reset()


def test_what_modes_take(seed: int, together: Any) -> None:
    """Mode latency names its bound, and kernels run as the mode says: the operations' notes tell."""
    rank, world_size = ranks()
    with together(), pytest.raises(ValueError, match="mode 'latency' takes at most"):
        made(world_size, "latency", max_tokens_per_rank=2**16, hidden_size=8)
    modes: tuple[tuple[str, bool | None, dict[str, Any]], ...] = (
        ("latency", True, {}), ("throughput", False, {}), ("auto", None, {"latency_max_tokens": TOKENS}),
    )  # fmt: skip
    for (mode, few, more), bound in itertools.product(modes, (TOKENS, BOUND)):
        with torch.no_grad(), made(world_size, mode, **more) as moe:
            x, ids, weights = drawn(seed, rank, world_size, TOKENS)
            output, handle = moe.dispatch(x, ids, weights, max_tokens=bound)
            moe.combine(output.x, handle)
            torch.cuda.synchronize()
            noted = moe.comm.last_operations()[:2]
            with together():
                assert [one.kind for one in noted] == ["combine", "dispatch"]
                assert {one.latency for one in noted} == {bound == TOKENS if few is None else few}, (mode, bound)
            moe.check_errors()
