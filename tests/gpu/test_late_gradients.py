"""Weight gradients in the late order: the bits of the ordinary order, eager, compiled, captured and with activation
checkpointing, with late ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from operators import make_comm, ranks
from sharing import few_processes, fewer
from test_latency import BF16, one_is_late
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_ops.integrations import quack
from ep_ops.nn import TORCH, expert_mlp

HIDDEN, INNER, TOP_K, TOKENS, HELD = 1024, 512, 4, 500, 4


def sizes(world_size: int) -> dict[str, int]:
    """Return the options of the communicators of layers."""
    return dict(num_experts=HELD * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS)


def layer_inputs(rank: int, world_size: int) -> tuple[Tensor, ...]:
    """Return x, ids and routing weights of a rank's tokens, and w_in and w_out of its experts."""
    x = torch.randn(TOKENS - rank, HIDDEN, device="cuda").to(BF16).requires_grad_()
    idx = torch.rand(x.shape[0], HELD * world_size, device="cuda").argsort(1)[:, :TOP_K].int()
    idx[idx % HELD == 1] = -1  # one expert of each rank gets no token
    weights = torch.rand(x.shape[0], TOP_K, device="cuda", requires_grad=True)
    w_in = (torch.randn(HELD, HIDDEN, 2 * INNER, device="cuda") / HIDDEN**0.5).to(BF16).requires_grad_()
    w_out = (torch.randn(HELD, INNER, HIDDEN, device="cuda") / INNER**0.5).to(BF16).requires_grad_()
    return x, idx, weights, w_in, w_out


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=few_processes), "captured", "checkpointed"])
@pytest.mark.parametrize("kind", ["torch", "quack"])
def test_the_same_bits(kind, how, seed, together):
    if kind == "quack":
        pytest.importorskip("quack", reason="needs quack-kernels 0.6.5")
    ordinary = (TORCH if kind == "torch" else quack.GEMMS)._replace(late=False)
    late = ordinary._replace(late=True)
    rank, world_size = ranks()
    delay = one_is_late(seed)
    torch.manual_seed(seed + rank)
    with make_comm("cute", f"late {kind} {how}", **sizes(world_size)) as comm:
        comm.warmup()
        x, idx, weights, w_in, w_out = layer_inputs(rank, world_size)
        grad, leaves = torch.randn_like(x), (x, weights, w_in, w_out)

        def forward(gemms):
            return expert_mlp(comm, x, idx, weights, w_in, w_out, gemms=gemms).out

        def step(gemms, forward=forward) -> list[Tensor]:
            out = forward(gemms)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

        torch._dynamo.reset()
        run = torch.compile(forward, fullgraph=True) if how == "compiled" else forward
        if how == "checkpointed":
            run = functools.partial(checkpoint, forward, use_reentrant=False)
        if how == "captured":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step(late)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step(late)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(fewer(12, 3)):
            with torch.no_grad():
                x.normal_()
                grad.normal_()
            expected = step(ordinary)
            delay()
            if how == "captured":
                graph.replay()
                got = captured
            else:
                got = step(late, run)
            wrong += sum((mine != right).sum() for mine, right in zip(got, expected, strict=True))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(wrong) == 0 and all(not t.isnan().any() and t.any() for t in expected)
        if how == "captured":
            del graph, captured
    torch._dynamo.reset()
