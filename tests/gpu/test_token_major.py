"""Token-major rows: kernels beside the reference (the checking mode compares every number), what is captured and
compiled, gradients, and the layer of docs/token-major.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operators import make_comm, ranks
from sharing import few_processes
from torch import Tensor

import ep_ops
from ep_ops import formats
from ep_ops.nn import expert_lists, gather_mm, places_route, reduce_rows, weights_of_places

WAYS = [("e4m3/128/pow2", "rows"), ("e4m3/128/fp32", "columns"), ("e4m3/32/mx", "rows"), ("e4m3/row/fp32", "rows"),
        ("wire:e4m3/128/pow2", "")]  # fmt: skip
CASES = [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)]
"""Dtype, and whether ranks hold different numbers of experts."""
TOKENS, TOP_K, HIDDEN = 96, 4, 1152
BOUND = 2 * TOKENS
FEW = 24
"""The most tokens that latency kernels take, where they are on."""


def config(world_size: int, dtype: torch.dtype = torch.bfloat16, uneven: bool = False) -> dict[str, Any]:
    held = [(5, 0, 1, 3)[rank % 4] if uneven else 4 for rank in range(world_size)]
    return dict(
        num_experts=sum(held), experts_per_rank=held, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=BOUND,
        dtype=dtype,
    )  # fmt: skip


def wanted(world_size: int) -> Iterator[tuple[dict[str, Any], list[tuple[str, str]]]]:
    """Configurations and formats, for precompile.py."""
    for number, case in enumerate(CASES):
        yield config(world_size, *case), [] if number else WAYS


def drawn(seed: int, comm: ep_ops.Communicator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct experts, but for some that are -1, some that are named twice, and tokens that name none."""
    draw = torch.Generator(device="cuda").manual_seed(seed + 977 * comm.rank)
    idx = torch.rand(tokens, max(comm.num_experts, TOP_K), generator=draw, device="cuda").argsort(1)[:, :TOP_K].int()
    idx = idx % comm.num_experts
    idx[torch.rand(idx.shape, generator=draw, device="cuda") < 0.2] = -1
    again = torch.rand(tokens, generator=draw, device="cuda") < 0.2
    idx[again, 2] = idx[again, 0]
    idx[torch.rand(tokens, generator=draw, device="cuda") < 0.1] = -1
    weights = torch.rand(tokens, TOP_K, generator=draw, device="cuda") - 0.3
    x = torch.randn(tokens, comm.hidden_size, generator=draw, device="cuda").to(comm.dtype)
    return x, idx, weights


def noise(seed: int, like: Tensor) -> Tensor:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(like.shape, generator=draw, device="cuda").to(like.dtype)


@pytest.mark.parametrize("few", [0, FEW], ids=["throughput", "latency"])
@pytest.mark.parametrize(("dtype", "uneven"), CASES)
def test_every_operator(dtype, uneven, few, seed, together, monkeypatch):
    """All dispatches, with and without weights and drops, their gradients, and what runs along their routes, those of
    places too; the checking mode raises the first difference. With `few` the latency kernels dispatch, whole and split,
    and combine."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    rank, world_size = ranks()
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    most, bound = (few, few) if few else (TOKENS, BOUND)
    with make_comm("cute", "tokens", latency_max_tokens=few, **config(world_size, dtype, uneven)) as comm:
        comm.warmup()
        for turn, share in enumerate((1.0, 0.5, 0.0)):
            tokens = 0 if turn == 1 and rank == world_size - 1 else most - turn * (rank % 2)
            x, idx, weights = drawn(seed + turn, comm, tokens)
            capacity = int(world_size * bound * share) if comm.num_local_experts else 0
            sizes = dict(capacity=capacity, max_tokens=bound)
            sent = comm.dispatch(x, idx, weights, **sizes, layout="token_major")
            plain = comm.dispatch(x, idx, **sizes, layout="token_major")
            comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **sizes, layout="token_major"))
            exact = comm.dispatch(x, idx, weights, max_tokens=bound, layout="token_major", exact=True)
            comm.dispatch(x, idx, max_tokens=bound, layout="token_major", exact=True)
            for got in (sent, plain, exact):
                along = (*got.route.tensors, *got.route.ints, comm.name)
                comm.dispatch_planned(x, got.route, weights)
                comm.dispatch_planned(x, got.route)
                comm.dispatch_planned(x, got.route._replace(layout="grouped"))  # as the backward of a combine does
                y, row_weights = noise(seed, got.x), noise(seed + 1, got.local_idx.float())
                torch.ops.ep.dispatch_backward(y, row_weights, *along, "token_major")
                torch.ops.ep.dispatch_backward(y, None, *along, "token_major")
                torch.ops.ep.dispatch_backward(None, row_weights, *along, "token_major")
                comm.combine(y, got.route)
                comm.combine_wait(comm.combine_start(y, got.route))
                comm.combine(y, got.route, residual=x)
                lists = expert_lists(got.local_idx, comm.num_local_experts, alignment=1 + 15 * (turn % 2))
                places = places_route(comm, got.route, lists)
                z = noise(seed + 2, y.new_empty(places.num_rows, HIDDEN))
                given = z, places, weights_of_places(row_weights, lists)
                fused = comm.combine(*given)
                unequal += (fused != comm.combine(reduce_rows(z, lists, row_weights), got.route)).sum()
                comm.combine_wait(comm.combine_start(*given))
                comm.combine(*given, residual=x)
                along = (*places.tensors, places.num_rows, *places.ints, comm.name)
                torch.ops.ep.combine_backward(x, z, given[2], *along)
                torch.ops.ep.dispatch_planned(x, None, *along)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(unequal) == 0


@pytest.mark.parametrize("few", [0, FEW], ids=["throughput", "latency"])
@pytest.mark.parametrize(("name", "layout"), WAYS)
def test_every_format(name, layout, few, seed, monkeypatch):
    """Rows that are quantized on the way, and such as are already. With `few` the latency kernels dispatch all but
    those with a scale of the whole row."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    _, world_size = ranks()
    tokens, bound = (few, few) if few else (TOKENS, BOUND)
    with make_comm("cute", "tokens_formats", latency_max_tokens=few, **config(world_size)) as comm:
        comm.warmup([(name, layout)])
        form, how = formats.format_of(name), dict(format=name, scales_as=layout)
        for turn, share in enumerate((1.0, 0.4)):
            x, idx, weights = drawn(seed + turn, comm, tokens)
            sizes = dict(capacity=int(world_size * tokens * share) + 1, max_tokens=bound)
            sent = comm.dispatch(x, idx, weights, **sizes, **how, layout="token_major")
            comm.dispatch(x, idx, **sizes, **how, layout="token_major")
            comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **sizes, **how, layout="token_major"))
            comm.dispatch(x, idx, weights, max_tokens=bound, **how, layout="token_major", exact=True)
            comm.dispatch_planned(x, sent.route, weights, **how)
            comm.dispatch_planned(x, sent.route, **how)
            if not form.wire:
                codes, scales = formats.quantize(x, form)
                comm.dispatch(codes, idx, weights, scales=scales, **sizes, **how, layout="token_major")
                comm.dispatch_planned(codes, sent.route, weights, scales=scales, **how)
        torch.cuda.synchronize()
        comm.check_errors()


@pytest.mark.parametrize("few", [0, FEW], ids=["throughput", "latency"])
def test_captured(few, seed, together):
    """Replays of a dispatch and a combine bring what is there then, along the route that is asked for then."""
    _, world_size = ranks()
    tokens, bound = (few, few) if few else (TOKENS, BOUND)
    with make_comm("cute", "tokens_captured", latency_max_tokens=few, **config(world_size)) as comm:
        comm.warmup()
        x, idx, weights = drawn(seed, comm, tokens)

        def step() -> tuple[Tensor, ...]:
            sent = comm.dispatch(x, idx, weights, max_tokens=bound, layout="token_major")
            again, more, *_ = comm.dispatch_planned(x, sent.route, weights)
            held = (torch.arange(sent.x.shape[0], device="cuda") < sent.route.sources[-1])[:, None]
            rows = (torch.where(held, values, 0) for values in (sent.x, again))
            out = comm.combine(sent.x, sent.route)
            return (
                *rows,
                sent.weights,
                more,
                sent.local_idx,
                sent.route.send_rows,
                *sent.route.tensors[3:],
                sent.dropped,
                out,
            )

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for turn in range(3):
            for mine, fresh in zip((x, idx, weights), drawn(seed + 1 + turn, comm, tokens), strict=True):
                mine.copy_(fresh)
            for tensor in captured:
                tensor.fill_(77)
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            with together():
                for number, (mine, theirs) in enumerate(zip(captured, eager, strict=True)):
                    assert torch.equal(mine, theirs), (turn, number)
        comm.check_errors()


@few_processes
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_few_compiled(split, seed, together):
    """Decode steps of 1 to FEW tokens, eager and compiled into graphs, beside the throughput kernels': the same route,
    rows, ids, weights and sums, to the bit."""
    _, world_size = ranks()
    unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    with (
        make_comm("cute", "tokens_few", latency_max_tokens=FEW, **config(world_size)) as fast,
        make_comm("cute", "tokens_many", **config(world_size)) as slow,
        torch.no_grad(),
    ):
        fast.warmup()
        slow.warmup()

        def step(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            if split:
                sent = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, max_tokens=FEW, layout="token_major"))
                y = sent.x * 2  # what lies behind the last copy goes nowhere
                out = comm.combine_wait(comm.combine_start(y, sent.route))
            else:
                sent = comm.dispatch(x, idx, weights, max_tokens=FEW, layout="token_major")
                out = comm.combine(sent.x * 2, sent.route)
            held = (torch.arange(sent.x.shape[0], device="cuda") < sent.route.sources[-1])[:, None]
            rows = torch.where(held, sent.x, 0)
            return rows, sent.weights, sent.local_idx, sent.route.send_rows, sent.route.counts, sent.dropped, out

        for tokens in (1, 8, FEW):
            for run in (step, torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead")):
                for turn in range(4):
                    given = drawn(seed + 16 * tokens + turn, fast, tokens)
                    got = run(fast, *given)
                    for mine, theirs in zip(got, step(slow, *given), strict=True):
                        unequal += (mine != theirs).sum()
        torch.cuda.synchronize()
        torch._dynamo.reset()
        for comm in (fast, slow):
            comm.check_errors()
        with together():
            assert int(unequal) == 0


@few_processes
def test_layer(seed, together):
    """A layer, as the reference has it: eager and compiled, values and gradients of rows, weights and matrices."""
    _, world_size = ranks()
    with (
        make_comm("cute", "tokens_layer", **config(world_size)) as comm,
        make_comm("reference", "tokens_layer", **config(world_size)) as ref,
    ):
        comm.warmup()
        x, idx, weights = drawn(seed, comm, TOKENS)
        draw = torch.Generator(device="cuda").manual_seed(seed + comm.rank)
        matrices = torch.randn(comm.num_local_experts, HIDDEN, HIDDEN, generator=draw, device="cuda") / HIDDEN**0.5

        def layer(where: ep_ops.Communicator, x: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
            sent = where.dispatch(x, idx, weights, max_tokens=BOUND, layout="token_major")
            lists = expert_lists(sent.local_idx, comm.num_local_experts, alignment=16)
            y, places = gather_mm(sent.x, matrices, lists), places_route(where, sent.route, lists)
            return where.combine(y, places, weights_of_places(sent.weights, lists), residual=x)

        def step(run: Any, where: ep_ops.Communicator) -> tuple[Tensor, ...]:
            leaves = [leaf.clone().requires_grad_() for leaf in (x, weights, matrices.bfloat16())]
            out = run(where, *leaves)
            out.float().square().sum().backward()
            return (out.detach(), *(leaf.grad for leaf in leaves))

        expected = step(layer, ref)
        for run in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
            got = step(run, comm)
            with together():
                for mine, theirs in zip(got, expected, strict=True):
                    assert float(theirs.float().abs().max()) > 0
                    difference = (mine.float() - theirs.float()).norm() / theirs.float().norm()
                    assert difference < 2e-2, float(difference)
        comm.check_errors()
