"""Many operations back to back and from captured graphs, without a host synchronization in between."""

from __future__ import annotations

import os

import pytest
import torch
from operators import make_comm, of_kernels, ranks
from sharing import few_processes, fewer
from torch import Tensor

import ep_ops

STEPS = int(os.environ.get("EP_OPS_TEST_STEPS", fewer(500, 24)))
HIDDEN, EXPERTS, TOP_K, TOKENS = 1024, 64, 8, 256
CONFIG = dict(num_experts=EXPERTS, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS, latency_max_tokens=0)


def draw(seed: int, step: int, most: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh tokens of this rank, a random number up to `most`: x, topk_idx (some -1, some skewed), topk_weights."""
    gen = torch.Generator(device="cuda").manual_seed(seed + 7919 * step + ranks()[0])
    host = torch.Generator().manual_seed(seed + 104729 * step + ranks()[0])
    tokens = int(torch.randint(0, most + 1, (), generator=host))
    x = torch.randn(tokens, HIDDEN, generator=gen, device="cuda").bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=gen, device="cuda")
    scores[:, : step % EXPERTS] *= 0.5
    idx = scores.argsort(1)[:, :TOP_K].int()
    idx[torch.rand(idx.shape, generator=gen, device="cuda") < 0.1] = -1
    return x, idx, torch.rand(idx.shape, generator=gen, device="cuda")


def added(rows: Tensor, idx: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the combine of a row for each (token, k), float32 `rows` [T, K, H], in plain PyTorch on this rank alone,
    to the bit: rank by rank, k by k."""
    world_size = ranks()[1]
    holder = idx.div(EXPERTS // world_size, rounding_mode="floor")  # below 0 where there is none
    here = holder == torch.arange(world_size, device=idx.device)[:, None, None]  # [W, T, K]
    partial = rows.new_zeros(world_size, idx.shape[0], HIDDEN)
    for k in range(TOP_K):
        partial = partial + torch.where(here[:, :, k, None], rows[:, k], 0.0)
    total = torch.zeros_like(partial[0])
    for pushed in partial.bfloat16():
        total = total + pushed.float()
    return (total if residual is None else total + residual.float()).bfloat16()


def expected(x: Tensor, idx: Tensor, weights: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """combine(dispatch(x)), to the bit."""
    scale = torch.ones(idx.shape, device=idx.device) if weights is None else weights
    return added(x.float()[:, None] * scale[..., None], idx, residual)


def wrong_gradients(grads: tuple[Tensor, ...], x: Tensor, idx: Tensor, weights: Tensor, grad_out: Tensor) -> Tensor:
    """How many elements of the gradients of x (to the bit) and of the weights (sums in any order) are wrong."""
    rows = (grad_out.float()[:, None] * weights[..., None]).bfloat16().float()
    dots = (x.float() * grad_out.float()).sum(1, keepdim=True)
    near = (grads[1] - torch.where(idx >= 0, dots, 0.0)).abs() < 1e-2
    return wrong(grads[0], added(rows, idx)) + (~near).sum()


def wrong(out: Tensor, want: Tensor) -> Tensor:
    return (out != want).sum() + out.isnan().sum()


def test_back_to_back(seed, together):
    """Dispatches, combines and both backwards; tokens and their bound change from step to step."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make_comm("cute", "steps", **CONFIG) as comm:
        for step in range(STEPS):
            bound = 9 if step % 3 == 2 else TOKENS
            x, idx, drawn = draw(seed, step, bound)
            weights = drawn if step % 2 else None
            residual = x.flip(0) if step % 7 == 3 else None
            sent = comm.dispatch(x, idx, weights, max_tokens=bound)
            out = comm.combine(sent.x, sent.route, sent.weights, residual=residual)
            bad += wrong(out, expected(x, idx, weights, residual)) + sent.dropped.sum()
            if step % 5 == 0:
                again = comm.dispatch_planned(x, sent.route).x
                bad += wrong(comm.combine(again, sent.route), expected(x, idx, None))
            if step % 5 == 2:
                leaf, scale = x.detach().requires_grad_(), drawn.detach().requires_grad_()
                sent = comm.dispatch(leaf, idx, scale, max_tokens=bound)
                out = comm.combine(sent.x, sent.route, sent.weights)
                grads = torch.autograd.grad(out, (leaf, scale), x.flip(0))
                bad += wrong_gradients(grads, x, idx, drawn, x.flip(0))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0


def test_graph_replay(seed, together):
    """One graph of a forward and a backward pass, replayed on fresh inputs."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make_comm("cute", "graph", **CONFIG) as comm:
        comm.warmup()
        x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        idx = torch.full((TOKENS, TOP_K), -1, dtype=torch.int32, device="cuda")
        weights = torch.zeros(TOKENS, TOP_K, device="cuda")

        def step() -> tuple[Tensor, ...]:
            leaf, scale = x.detach().requires_grad_(), weights.detach().requires_grad_()
            sent = comm.dispatch(leaf, idx, scale)
            out = comm.combine(sent.x, sent.route, sent.weights)
            return (out, *torch.autograd.grad(out, (leaf, scale), x))

        def fill(number: int) -> None:
            fresh, chosen, scale = draw(seed, number)
            x.zero_()[: fresh.shape[0]] = fresh
            idx.fill_(-1)[: fresh.shape[0]] = chosen
            weights.zero_()[: fresh.shape[0]] = scale

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        dispatch = min(8, of_kernels(comm).budget.most_dispatch)  # a part of a GPU may leave it one multiprocessor
        with torch.cuda.graph(graph), comm.sm_budget(dispatch=dispatch, combine=16):
            results = step()
        for number in range(STEPS):
            fill(number)
            graph.replay()
            bad += wrong(results[0], expected(x, idx, weights))
            if number % 10 == 0:
                replayed = [result.clone() for result in results]
                for one, other in zip(replayed, step(), strict=True):
                    bad += wrong(one, other)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0
        del graph


@few_processes
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layer(mode, seed, together):
    """Forward and backward of the compiled layer equal eager ones, on changing inputs."""
    with make_comm("cute", f"layer-{mode}", **CONFIG) as comm:
        comm.warmup()
        torch.manual_seed(seed)
        layer = ep_ops.nn.MoELayer(comm, 512).cuda()
        compiled = torch.compile(layer, mode=mode, fullgraph=True)
        for number in range(8):
            x = draw(seed, number)[0]
            if mode == "reduce-overhead" or x.shape[0] < 2:
                x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
            results = []
            for run in (compiled, layer):
                torch.compiler.cudagraph_mark_step_begin()
                leaf = x.clone().requires_grad_()
                out = run(leaf)
                grads = torch.autograd.grad(out.float().square().sum(), [leaf, *layer.parameters()])
                results.append([t.clone() for t in (out, *grads)])
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                for one, other in zip(*results, strict=True):
                    scale = float(other.abs().max()) if other.numel() else 0.0
                    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * scale + 1e-6)
        torch.compiler.reset()
        del compiled
