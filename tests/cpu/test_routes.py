"""A route knows what it was planned with; what belongs to an expert finds its rows; undefined rows show."""

from __future__ import annotations

import cases
import pytest
import torch
import toy
from cases import expected_plan, route_cases
from ranks import run_ranks

import ep_ops
from ep_ops.nn import expert_of_rows, grouped_mm, of_rows


def test_alignment_of_a_dispatch_is_that_of_its_backward():
    """Padding is cleared where the dispatch put it, or weight gradients would read what is undefined there."""
    with toy.communicator() as comm:
        assert comm.alignment != 8
        x, topk_idx, weights = toy.inputs(7, seed=cases.fresh_seed(), grad=True)
        w = torch.randn(comm.num_local_experts, toy.HIDDEN, toy.HIDDEN, requires_grad=True)
        sent = comm.dispatch(x, topk_idx, weights, alignment=8)
        assert sent.route.alignment == 8 and sent.route.num_rows == sent.x.shape[0]
        home = comm.combine(grouped_mm(sent.x, w, sent.route.offs), sent.route, sent.weights)
        home.sin().sum().backward()
        got = x.grad, weights.grad, w.grad
        dense_x, _, dense_weights = toy.inputs(7, grad=True)
        dense_x, dense_weights = (t.detach().clone().requires_grad_() for t in (x, weights))
        dense_w = w.detach().clone().requires_grad_()
        chosen = torch.einsum("th,tkhi->tki", dense_x, dense_w[topk_idx.clamp(min=0).long()])
        (chosen * torch.where(topk_idx >= 0, dense_weights, 0)[..., None]).sum(1).sin().sum().backward()
        for one, other in zip(got, (dense_x.grad, dense_weights.grad, dense_w.grad), strict=True):
            torch.testing.assert_close(one, other)


def check_expert_of_rows(name: str, seed: int) -> None:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    case = route_cases(world_size, seed)[name]
    plan = expected_plan(case)[rank]
    with ep_ops.Communicator(
        num_experts=case.num_experts, experts_per_rank=case.experts_per_rank, hidden_size=8, top_k=case.top_k,
        max_tokens_per_rank=max(1, case.max_tokens), alignment=case.alignment, device="cpu", dtype=torch.float32,
    ) as comm:  # fmt: skip
        sizes = dict(capacity=case.capacity[rank], slots=case.slots[rank], max_tokens=case.max_tokens)
        route, _ = comm.plan(case.topk_idx[rank], **sizes)
        expected = torch.full((case.capacity[rank],), -1)
        for source, idx in enumerate(case.topk_idx):
            for token, experts in enumerate(idx.tolist()):
                for k, expert in enumerate(experts):
                    row = int(plan.recv_rows[source, token, k])
                    if row >= 0:
                        expected[row] = case.holder(expert)[1]
        assert torch.equal(expert_of_rows(route), expected)
        values = torch.randn(comm.num_local_experts, 3)
        wanted = torch.zeros(case.capacity[rank], 3)
        wanted[expected >= 0] = values[expected[expected >= 0]]
        assert torch.equal(of_rows(values, route), wanted)


@pytest.mark.parametrize("name", cases.CASE_NAMES)
def test_expert_of_rows(name):
    run_ranks(2, check_expert_of_rows, name, cases.fresh_seed())


@pytest.mark.parametrize("compiled", [False, True])
def test_biases_and_scales_of_experts(compiled):
    """Values and gradients as in a dense model, though rows that nobody owns hold NaN."""
    torch._dynamo.reset()
    with toy.communicator() as comm:
        x, topk_idx, weights = toy.inputs(6, seed=cases.fresh_seed(), grad=True)
        bias, scale = (torch.randn(toy.EXPERTS, toy.HIDDEN, requires_grad=True) for _ in range(2))

        def layer(x, weights, bias, scale):
            sent = comm.dispatch(x, topk_idx, weights)
            y = torch.tanh(sent.x) * of_rows(scale, sent.route) + of_rows(bias, sent.route)
            return comm.combine(y, sent.route, sent.weights)

        def dense(x, weights, bias, scale):
            at = topk_idx.clamp(min=0).long()
            y = torch.tanh(x)[:, None] * scale[at] + bias[at]
            return (y * torch.where(topk_idx >= 0, weights, 0)[..., None]).sum(1)

        given = (x, weights, bias, scale)
        results = []
        for run in (torch.compile(layer, fullgraph=True) if compiled else layer, dense):
            out = run(*given)
            results.append([out, *torch.autograd.grad(out.sin().sum(), given)])
        torch.testing.assert_close(*results)
        sent = comm.dispatch(x, topk_idx, weights)
        assert sent.x[expert_of_rows(sent.route) < 0].isnan().any()


def test_a_bias_that_is_added_everywhere_is_found_out():
    """What is undefined on a GPU is NaN here: a gradient that sums over all rows shows it. Zeros hid this."""
    for strict in (True, False):
        with toy.communicator(strict=strict) as comm:
            x, topk_idx, weights = toy.inputs(6, grad=True)
            bias = torch.zeros(toy.EXPERTS, toy.HIDDEN, requires_grad=True)
            sent = comm.dispatch(x, topk_idx, weights)
            row = torch.arange(sent.route.num_rows)
            expert = torch.searchsorted(sent.route.offs, row, right=True).clamp(max=toy.EXPERTS - 1)
            comm.combine(torch.tanh(sent.x) + bias[expert], sent.route, sent.weights).sum().backward()
            assert bool(bias.grad.isnan().any()) == strict


def test_split_operations_are_not_interrupted():
    """As on GPUs."""
    with toy.communicator() as comm:
        x, topk_idx, weights = toy.inputs(4)
        started = comm.dispatch_start(x, topk_idx, weights)
        for other in (lambda: comm.plan(topk_idx), lambda: comm.dispatch_start(x, topk_idx)):
            with pytest.raises(RuntimeError, match="dispatch_start must be followed by ep::dispatch_wait"):
                other()
        rows = comm.dispatch_wait(started)
        with pytest.raises(RuntimeError, match="ep::dispatch_wait, but nothing was started"):
            comm.dispatch_wait(started)
        sent = comm.combine_start(rows.x, rows.route, rows.weights)
        with pytest.raises(RuntimeError, match="ep::dispatch_wait, but ep::combine_start was called"):
            comm.dispatch_wait(started)
        comm.combine_wait(sent)


REFUSALS = {
    "tokens": "topk_idx has 6 tokens; allowed: at most max_tokens 5",
    "dtype": "x has dtype torch.float64; allowed: torch.float32",
    "num_rows": "num_rows is -1",
    "gathered": "y does not lie in symmetric memory",
    "start": "x has shape (3, 8); allowed: [4 (rows as topk_idx has), hidden_size 8]",
}


def check_refusal(kind: str) -> str:
    """Rank 1 alone gets an argument wrong; then all go on."""
    with toy.communicator(max_tokens=5, symmetric_rows=100) as comm:
        wrong = comm.rank == 1
        x, topk_idx, weights = toy.inputs(4, seed=comm.rank)
        sent = comm.dispatch(x, topk_idx)
        y = comm.empty_rows(sent.x.shape[0]).copy_(sent.x)
        more = toy.inputs(6)
        calls = {
            "tokens": lambda: comm.plan(more[1] if wrong else topk_idx),
            "dtype": lambda: comm.dispatch(x.double() if wrong else x, topk_idx),
            "num_rows": lambda: comm.dispatch_planned(x, sent.route._replace(num_rows=-1) if wrong else sent.route),
            "gathered": lambda: comm.combine_gathered(sent.x if wrong else y, sent.route),
            "start": lambda: comm.dispatch_wait(comm.dispatch_start(x[:3] if wrong else x, topk_idx)),
        }
        with pytest.raises((TypeError, ValueError)) as raised:
            calls[kind]()
        again = comm.dispatch(x, topk_idx, weights)
        valid = torch.where(topk_idx >= 0, weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(comm.combine(again.x, again.route, again.weights), x * valid)
        return str(raised.value)


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_reach_everybody(kind):
    other, own = run_ranks(2, check_refusal, kind)
    assert REFUSALS[kind] in own
    assert "refused by rank 1: " + REFUSALS[kind] in other
