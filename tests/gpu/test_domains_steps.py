"""Across NVLink domains: many steps, eager and captured, and steps that are compiled or compared."""

from __future__ import annotations

import os

import domains
import torch
import torch.distributed as dist
from domains import HIDDEN, TOKENS, TOP_K, added, drawn, expected, in_rounds, step_of, wrong
from operators import ranks
from sharing import few_processes, fewer
from torch import Tensor

import ep_ops

STEPS = int(os.environ.get("EP_OPS_TEST_STEPS", fewer(300, 8)))
SOAK = int(os.environ.get("EP_OPS_TEST_SOAK", fewer(500, 20)))
FEW = 9

make, few = domains.make, domains.few  # fixtures


def wrong_gradients(
    comm: ep_ops.Communicator, grads: tuple[Tensor, ...], x: Tensor, idx: Tensor, weights: Tensor, grad_out: Tensor
) -> Tensor:
    """How many elements of the gradients of x (to the bit) and of the weights (sums in any order) are wrong."""
    rows = (grad_out.float()[:, None] * weights[..., None]).bfloat16().float()
    dots = (x.float() * grad_out.float()).sum(1, keepdim=True)
    near = (grads[1] - torch.where(idx >= 0, dots, 0.0)).abs() < 1e-2
    return wrong(grads[0], added(comm, rows, idx)) + (~near).sum()


@in_rounds
def test_steps(half, make, few, seed, together):
    """Back to back, without a host synchronization, some of them in two halves; tokens and their bound change from step
    to step."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    host = torch.Generator().manual_seed(seed + ranks()[0])
    with make("cute", "steps", half, latency_max_tokens=few) as comm:
        for step in range(STEPS // 6 if half else STEPS):
            bound = FEW if step % 3 == 2 else TOKENS
            x, idx, scale = drawn(seed, step, int(torch.randint(0, bound + 1, (), generator=host)))
            weights = scale if step % 2 else None
            residual = x.flip(0) if step % 7 == 3 else None
            if step % 4 == 1 and residual is None:
                sent = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, max_tokens=bound))
                out = comm.combine_wait(comm.combine_start(sent.x, sent.route, sent.weights))
            else:
                sent = comm.dispatch(x, idx, weights, max_tokens=bound)
                out = comm.combine(sent.x, sent.route, sent.weights, residual=residual)
            bad += wrong(out, expected(comm, x, idx, weights, residual)) + sent.dropped.sum()
            if step % 5 == 0:
                again = comm.dispatch_planned(x, sent.route).x
                bad += wrong(comm.combine(again, sent.route), expected(comm, x, idx, None))
            if step % 5 == 2:
                leaf, leaf_weights = x.detach().requires_grad_(), scale.detach().requires_grad_()
                sent = comm.dispatch(leaf, idx, leaf_weights, max_tokens=bound)
                out = comm.combine(sent.x, sent.route, sent.weights)
                grads = torch.autograd.grad(out, (leaf, leaf_weights), x.flip(0))
                bad += wrong_gradients(comm, grads, x, idx, scale, x.flip(0))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0


@in_rounds
def test_captured(half, make, few, seed, together):
    """One graph of a forward and a backward pass, replayed on other inputs than were captured."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make("cute", "captured", half, latency_max_tokens=few) as comm:
        comm.warmup()
        x, idx, weights = drawn(seed, 0, TOKENS)

        def step() -> tuple[Tensor, ...]:
            leaf, scale = x.detach().requires_grad_(), weights.detach().requires_grad_()
            sent = comm.dispatch(leaf, idx, scale)
            out = comm.combine(sent.x, sent.route, sent.weights)
            return (out, *torch.autograd.grad(out, (leaf, scale), x))

        step()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out, *grads = step()
        for number in range(1, 1 + fewer(40, 4)):
            for kept, fresh in zip((x, idx, weights), drawn(seed, number, TOKENS), strict=True):
                kept.copy_(fresh)
            graph.replay()
            bad += wrong(out, expected(comm, x, idx, weights))
            bad += wrong_gradients(comm, tuple(grads), x, idx, weights, x)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0
        del graph


def test_soak(make, seed, together):
    """Steps of a graph that draws its tokens itself, so that no host is waited for: forward and backward of many,
    forward of few. Each time other experts are named, by more or less of them, mostly by low or by high ids."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make("cute", "soak") as comm:

        def step(bound: int, backward: bool) -> None:
            x = torch.randn(bound, HIDDEN, device="cuda").bfloat16().requires_grad_()
            lean = torch.linspace(-1, 1, comm.num_experts, device="cuda") * torch.randn((), device="cuda")
            chosen = (torch.rand(bound, comm.num_experts, device="cuda") + lean).argsort(1)[:, :TOP_K].int()
            named = torch.rand(chosen.shape, device="cuda") < 2 * torch.rand((), device="cuda")
            idx, weights = torch.where(named, chosen, -1), torch.rand(chosen.shape, device="cuda").requires_grad_()
            sent = comm.dispatch(x, idx, weights, max_tokens=bound)
            out = comm.combine(sent.x, sent.route, sent.weights)
            bad.add_(wrong(out.detach(), expected(comm, x.detach(), idx, weights.detach())))
            if backward:
                grads = torch.autograd.grad(out, (x, weights), x.detach())
                bad.add_(wrong_gradients(comm, grads, x.detach(), idx, weights.detach(), x.detach()))

        comm.warmup()
        step(TOKENS, True)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step(TOKENS, True)
            step(FEW, False)
        for _ in range(SOAK // 2):
            graph.replay()
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0
        del graph


def layer(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    sent = comm.dispatch(x, idx, weights, max_tokens=TOKENS)
    row = torch.arange(sent.x.shape[0], device="cuda")
    covered = torch.where((row < sent.route.offs[-1])[:, None], sent.x, 0)
    return comm.combine(covered * 2, sent.route, sent.weights, residual=x)


@few_processes
@in_rounds
def test_compiled(half, make, seed, together):
    with make("cute", "compiled", half) as comm:
        got, want = (step_of(run, comm, seed) for run in (torch.compile(layer, fullgraph=True), layer))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
        torch.compiler.reset()


def test_checked(make, seed, together, monkeypatch):
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    with make("cute", "checked") as comm:
        with together():
            step_of(layer, comm, seed)
