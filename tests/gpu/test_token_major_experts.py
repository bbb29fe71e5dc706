"""SwiGLU experts on token-major rows: the kernel of their gradient beside plain PyTorch, and whole experts beside those
on grouped rows, eager, compiled, captured and checkpointed, with late ranks."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from operators import make_comm, ranks
from quacks import transposed
from segments import segments
from sharing import few_processes, fewer, one_rank
from test_late_gradients import layer_inputs, sizes
from test_latency import one_is_late
from test_live_rows import NAMES, SIZES, close
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_ops.integrations import quack
from ep_ops.nn import TORCH, expert_mlp
from ep_ops.nn.live_rows import SWIGLU_WEIGHTED_BACKWARD


def kernels() -> list[Any]:
    """Return the kernels that these tests launch, for precompile.py."""
    from cute_kernels.local.swiglu import SwiGLURows

    return [SwiGLURows(size, name, True, weighted=True) for size in SIZES for name in NAMES.values()]


@one_rank
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype", NAMES)
def test_gradient_of_weighted_swiglu(dtype, hidden, seed):
    draw = random.Random(seed)
    of = segments(draw, 0, alignment=4)
    x, grad = of.poisoned(2 * hidden, dtype, draw), of.poisoned(hidden, dtype, draw)
    weights = of.poisoned(1, torch.float32, draw, 0.5)[:, 0].contiguous()
    ints = [torch.tensor(values, dtype=torch.int32) for values in (of.offs, of.counts)]
    wanted = SWIGLU_WEIGHTED_BACKWARD(grad, x, weights, *ints, 4)
    results = [SWIGLU_WEIGHTED_BACKWARD(*(tensor.cuda() for tensor in (grad, x, weights, *ints)), 4) for _ in range(2)]
    live = sorted([*of.kept, *of.padding])
    for got, again in zip(*results, strict=True):
        assert torch.equal(got[live], again[live])
    for got, want in zip(results[0][:2], wanted[:2], strict=True):
        close(got[live], want[live])
    torch.testing.assert_close(results[0][2][live].cpu(), wanted[2][live], rtol=1e-3, atol=1e-3 * hidden**0.5)
    assert not any(result[of.padding].any() for result in results[0])


def far(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=few_processes), "captured", "checkpointed"])
@pytest.mark.parametrize("kind", ["torch", "quack", "gated"])
def test_beside_grouped_rows(kind, how, seed, together):
    """The output of grouped rows, to the bit with the same GEMM; gradients up to rounding; dispatched again and in the
    other order the same bits. "gated": quack's GEMMs with SwiGLU in their epilogues."""
    if kind != "torch":
        pytest.importorskip("quack", reason="needs quack-kernels 0.6.5")
    gemms = TORCH if kind == "torch" else quack.GEMMS
    rank, world_size = ranks()
    delay = one_is_late(seed)
    torch.manual_seed(seed + rank)
    with make_comm("cute", f"experts {kind} {how}", **sizes(world_size)) as comm:
        comm.warmup()
        x, idx, weights, w_in, w_out = layer_inputs(rank, world_size)
        if kind == "gated":
            w_in = transposed(w_in.detach()).requires_grad_()
        grad, leaves = torch.randn_like(x), (x, weights, w_in, w_out)

        def forward(**options) -> Tensor:
            return expert_mlp(comm, x, idx, weights, w_in, w_out, gemms=gemms, **options).out

        def step(run) -> list[Tensor]:
            out = run()
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

        grouped = functools.partial(forward)
        plain = functools.partial(forward, rows="token_major")
        again = functools.partial(forward, rows="token_major", redispatch=True)
        torch._dynamo.reset()
        run: Any = again
        if how == "compiled":
            run = torch.compile(again, fullgraph=True)
        if how == "checkpointed":
            run = functools.partial(checkpoint, again, use_reentrant=False)
        if how == "captured":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step(again)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step(again)
        wrong, worst = torch.zeros((), dtype=torch.int64, device="cuda"), 0.0
        for _ in range(fewer(8, 3)):
            with torch.no_grad():
                x.normal_()
                grad.normal_()
            beside, expected = step(grouped), step(plain)
            delay()
            if how == "captured":
                graph.replay()
                got = captured
            else:
                got = step(run)
            wrong += sum((mine != right).sum() for mine, right in zip(got, expected, strict=True))
            if kind == "torch":  # quack gathers rows with other tiles
                wrong += (beside[0] != expected[0]).sum()
            worst = max(worst, *(far(one, other) for one, other in zip(expected, beside, strict=True)))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(wrong) == 0 and worst < 1e-2, (int(wrong), worst)
            assert all(not t.isnan().any() and t.any() for t in expected)
        if how == "captured":
            del graph, captured
    torch._dynamo.reset()
