"""Split operations: the whole's results and gradients, and what runs between start and wait stays there."""

from __future__ import annotations

import re

import pytest
import torch
import toy
from ranks import run_ranks
from torch._inductor.utils import run_and_get_code


def whole(comm, x, topk_idx, weights, scale, shared):
    rows = comm.dispatch(x, topk_idx, weights)
    beside = torch.tanh(x @ shared)
    out = comm.combine(toy.experts(rows, scale), rows.route, rows.weights)
    return out + torch.tanh(beside @ shared)


def split(comm, x, topk_idx, weights, scale, shared):
    """The shared expert's products stand between starts and waits and are used at the very end."""
    started = comm.dispatch_start(x, topk_idx, weights)
    beside = torch.tanh(x @ shared)
    rows = comm.dispatch_wait(started)
    sent = comm.combine_start(toy.experts(rows, scale), rows.route, rows.weights)
    beside = torch.tanh(beside @ shared)
    return comm.combine_wait(sent) + beside


def arguments(tokens, grad, seed=0):
    shared = torch.randn(toy.HIDDEN, toy.HIDDEN, generator=torch.Generator().manual_seed(3)) / 8
    return *toy.inputs(tokens, seed=seed, grad=grad), toy.scales(grad=grad), shared.requires_grad_(grad)


def step(layer, comm, tokens, grad):
    args = arguments(tokens, grad)
    out = layer(comm, *args)
    if not grad:
        return [out]
    out.sin().sum().backward()
    return [out.detach(), *(arg.grad for arg in args)]


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_split_operations_are_the_whole(backend, grad):
    torch._dynamo.reset()
    with toy.communicator() as comm:
        layer = torch.compile(split, backend=backend, fullgraph=True) if backend else split
        for tokens in (7, 0, 16):
            torch.testing.assert_close(step(layer, comm, tokens, grad), step(whole, comm, tokens, grad))


def order_in(code: str) -> list[str]:
    """Operators of ep and matrix products, in the order in which compiled code runs them."""
    return re.findall(r"torch\.ops\.ep\.(\w+)\.default\(|extern_kernels\.(mm)\(", code)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_inductor_leaves_between_what_stands_between(grad):
    torch._dynamo.reset()
    with toy.communicator() as comm:
        args = arguments(7, grad)
        _, (forward, *_) = run_and_get_code(torch.compile(split, fullgraph=True), comm, *args)
        names = [operator or product for operator, product in order_in(forward)]
        assert names == ["dispatch_start", "mm", "dispatch_wait", "combine_start", "mm", "combine_wait"]


def two_micro_batches(first, second, a, b):
    """The first one's experts run while the second one's rows are under way, and so on."""
    x1, idx1, w1, scale, shared = a
    x2, idx2, w2, *_ = b
    one = first.dispatch_start(x1, idx1, w1)
    two = second.dispatch_start(x2, idx2, w2)
    rows = first.dispatch_wait(one)
    back = first.combine_start(toy.experts(rows, scale), rows.route, rows.weights)
    more = second.dispatch_wait(two)
    other = second.combine_start(toy.experts(more, scale) * 2, more.route, more.weights)
    beside = x2 @ shared
    return second.combine_wait(other) + beside, first.combine_wait(back)


def test_two_micro_batches_on_two_communicators():
    torch._dynamo.reset()
    with toy.communicator() as first, toy.communicator() as second:
        a, b = arguments(7, False), arguments(7, False, seed=1)
        expected = two_micro_batches(first, second, a, b)
        got, code = run_and_get_code(torch.compile(two_micro_batches, fullgraph=True), first, second, a, b)
        torch.testing.assert_close(got, expected)
        assert [operator for operator, _ in order_in(code[0]) if operator] == [
            "dispatch_start", "dispatch_start", "dispatch_wait", "combine_start",
            "dispatch_wait", "combine_start", "combine_wait", "combine_wait",
        ]  # fmt: skip


def _on_a_rank():
    with toy.communicator() as comm:
        local = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        results = []
        for layer in (split, whole):
            x, idx, weights, scale, shared = arguments(5 + comm.rank, True, seed=comm.rank)
            scale = scale.detach()[local].clone().requires_grad_()
            out = layer(comm, x, idx, weights, scale, shared)
            out.sin().sum().backward()
            results.append([out.detach(), x.grad, weights.grad, scale.grad, shared.grad])
        return results


def test_between_ranks():
    for got, expected in run_ranks(2, _on_a_rank):
        torch.testing.assert_close(got, expected)
