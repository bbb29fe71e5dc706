"""Checking mode: kernels run beside the reference and pass; results that are changed on purpose are named on all ranks.

On the CPU tests/cpu/test_checked.py changes every result of every operator; here are kernels, streams and captures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import torch
from changed import using
from operators import Call, make_comm, ranks, run_all
from sharing import few_processes
from test_throughput import case_config, inputs
from torch import Tensor

import ep_ops

ROUTES = ("random_with_none", "repeated_experts", "over_capacity", "padded_over", "no_tokens_on_last_rank")
TOKENS = 24


def config(world_size: int) -> dict[str, Any]:
    return dict(
        num_experts=4 * world_size, hidden_size=256, top_k=3, max_tokens_per_rank=64,
        symmetric_rows=3 * TOKENS * world_size + 64,
    )  # fmt: skip


@pytest.fixture(params=[0, None], ids=["throughput", "latency"])
def comm(request, monkeypatch) -> Iterator[ep_ops.Communicator]:
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    with make_comm("cute", "checked", latency_max_tokens=request.param, **config(ranks()[1])) as comm:
        comm.warmup()
        yield comm


def drawn(comm: ep_ops.Communicator, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(device="cuda").manual_seed(seed + 977 * comm.rank)
    x = torch.randn(TOKENS, comm.hidden_size, generator=draw, device="cuda").to(comm.dtype)
    order = torch.rand(TOKENS, comm.num_experts, generator=draw, device="cuda")
    order[0, -1] = -1.0  # something for the last rank
    idx = order.argsort(1)[:, : comm.top_k].int()
    return x, idx, torch.rand(TOKENS, comm.top_k, generator=draw, device="cuda")


def covered(sent: ep_ops.Dispatched) -> Tensor:
    """Rows with those that are undefined as zeros; keeps the graph of autograd."""
    row = torch.arange(sent.x.shape[0], device="cuda")
    return torch.where((row < sent.route.offs[-1])[:, None], sent.x, 0)


SIZES = dict(max_tokens=TOKENS)


def whole(comm, x, idx, weights):
    sent = comm.dispatch(x, idx, weights, **SIZES)
    return comm.combine(covered(sent) * 2, sent.route, sent.weights)


def split(comm, x, idx, weights):
    sent = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **SIZES))
    return comm.combine_wait(comm.combine_start(covered(sent) * 2, sent.route, sent.weights))


def dynamic(comm, x, idx, weights):
    sent = comm.dispatch(x, idx, weights, **SIZES, exact=True)
    return comm.combine(covered(sent) * 2, sent.route, sent.weights, residual=x)


def gathered(comm, x, idx, weights):
    sent = comm.dispatch(x, idx, capacity=comm.symmetric_rows // 16 * 16, **SIZES)
    y = comm.empty_rows(sent.x.shape[0]).copy_(covered(sent) * 2)
    return comm.combine_gathered(y, sent.route) * weights.sum(1, keepdim=True).to(x.dtype)


LAYERS = {
    whole: ["dispatch", "combine", "combine_backward", "dispatch_backward"],
    split: ["dispatch_wait", "combine_wait", "combine_backward_wait", "dispatch_backward_wait"],
    dynamic: ["dispatch_dynamic", "combine", "combine_backward", "dispatch_backward"],
    gathered: ["dispatch", "combine_gathered", "dispatch_planned", "dispatch_backward"],
}
"""What each layer runs, forward and backward."""


def step(layer, comm: ep_ops.Communicator, seed: int) -> list[Tensor]:
    x, idx, weights = drawn(comm, seed)
    x.requires_grad_(), weights.requires_grad_()
    out = layer(comm, x, idx, weights)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weights))]


def text_of(call: Callable[..., Any], *args: Any) -> str:
    """Return the text of the error that a call raises. A rank that raises nothing, where others do, says so later: see
    `together`."""
    try:
        call(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("name", ROUTES)
def test_every_operator_passes(name, seed, together, monkeypatch):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    sizes = case_config(case, torch.bfloat16)
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    given = inputs(seed, call.topk_idx.shape[0], sizes["hidden_size"], case.top_k, call.capacity, torch.bfloat16)
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    seen: list[str] = []

    def note(operator: str, results: list[Tensor]) -> list[Tensor]:
        seen.append(operator)
        return results

    with make_comm("cute", f"checked {name}", **sizes) as comm, using(comm, note):
        got = run_all(comm, call, *given)
    with together():
        assert len(seen) == len(got)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_layers_pass(layer, comm, seed, together, monkeypatch):
    """Forward and backward give what they give without checking."""
    seen: list[str] = []

    def note(operator: str, results: list[Tensor]) -> list[Tensor]:
        seen.append(operator)
        return results

    with using(comm, note):
        got = step(layer, comm, seed)
    monkeypatch.delenv("EP_OPS_CHECK")
    with make_comm("cute", "plain", comm.config.latency_max_tokens, **config(comm.world_size)) as plain:
        expected = step(layer, plain, seed)
        torch.cuda.synchronize()
    with together():
        assert seen == LAYERS[layer]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_what_is_wrong_is_named(layer, comm, seed, together):
    """One number of the last rank, in its last bit, after the kernels; all ranks raise it and go on."""
    texts = []
    for operator in LAYERS[layer]:

        def change(name: str, results: list[Tensor], operator: str = operator) -> list[Tensor]:
            if name == operator and comm.rank == comm.world_size - 1:
                bits = results[0].view(torch.int16)
                bits[0, 1] ^= 1
            return results

        with using(comm, change):
            texts.append(text_of(step, layer, comm, seed))
        step(layer, comm, seed)
    with together():
        for text, operator in zip(texts, LAYERS[layer], strict=True):
            assert f"ep::{operator}, operation " in text, text
            where = rf"\[0, 1\] is .* on rank {comm.world_size - 1}, the reference has .* \(1 of "
            assert re.search(where, text), text


@few_processes
def test_compiled(comm, seed, together):
    compiled = torch.compile(whole, fullgraph=True)
    got, expected = step(compiled, comm, seed), step(whole, comm, seed)

    def change(name: str, results: list[Tensor]) -> list[Tensor]:
        return [results[0] + 1, *results[1:]] if name == "combine" else results

    with using(comm, change):
        text = text_of(step, compiled, comm, seed)
    torch.compiler.reset()
    with together():
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
        assert "ep::combine, operation " in text, text


def test_capture_is_rejected(comm, seed, together):
    _, idx, _ = drawn(comm, seed)
    graph = torch.cuda.CUDAGraph()
    with together():
        with pytest.raises(RuntimeError, match="ep::plan cannot be captured in a CUDA graph while EP_OPS_CHECK is 1"):
            with torch.cuda.graph(graph):
                comm.plan(idx)
    comm.plan(idx)


def test_what_one_rank_rejects(comm, seed, together):
    """All raise in that very call, what the kernels find included, and go on."""
    x, idx, weights = drawn(comm, seed)
    bad = idx.clone()
    bad[3, 1] = comm.num_experts
    odd = comm.rank == 0
    calls = {
        "x has dtype": lambda: comm.dispatch(x.float() if odd else x, idx, **SIZES),
        "topk_idx": lambda: comm.dispatch(x, bad if odd else idx, **SIZES),
        "x has dtype ": lambda: comm.dispatch_wait(comm.dispatch_start(x.float() if odd else x, idx, **SIZES)),
    }
    for reason, call in calls.items():
        text = text_of(call)
        with together():
            assert reason in text and (odd or "rejected by rank 0: " in text), text
        step(whole, comm, seed)
