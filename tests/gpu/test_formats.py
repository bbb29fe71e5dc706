"""Rows in a format: kernels beside the reference (checking mode compares every code and every scale), what is captured
and compiled, gradients, and a GEMM that takes what arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import pytest
import torch
from operators import make_comm, ranks
from sharing import few_processes
from torch import Tensor

import ep_ops
from ep_ops import formats

POW2, FP32, MX, ROW = "e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx", "e4m3/row/fp32"
WAYS = [(POW2, "rows"), (POW2, "columns"), (POW2, "packed"), (FP32, "rows"), (FP32, "columns"), (MX, "rows"),
        (MX, "packed"), *((MX, f"swizzled/{consumer}") for consumer in ("torch", "quack", "flashinfer")), (ROW, "rows"),
        *((f"wire:{name}", "") for name in (POW2, FP32, MX, ROW))]  # fmt: skip
CASES = [(torch.bfloat16, *way) for way in WAYS]
CASES += [(torch.float16, POW2, "columns"), (torch.float16, MX, "swizzled/torch")]
CASES += [(torch.float32, MX, "packed"), (torch.float32, f"wire:{FP32}", "")]
TOKENS, TOP_K = 24, 3
HIDDEN = 1152
"""9 blocks of 128 and 36 of 32: no whole number of int32 with four exponents; rows of three packets, the last one with
half of a block first."""


def config(world_size: int, dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN) -> dict[str, Any]:
    return dict(
        num_experts=4 * world_size, hidden_size=hidden, top_k=TOP_K, max_tokens_per_rank=2 * TOKENS, dtype=dtype
    )


def wanted(world_size: int) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
    """Configurations and formats, for precompile.py."""
    for dtype, name, layout in CASES:
        yield config(world_size, dtype), (name, layout)


def odd(draw: torch.Generator, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, some with numbers that rounding and scales are about."""
    x = torch.randn(tokens, hidden, generator=draw, device="cuda")
    x *= 10 ** (torch.rand(tokens, 1, generator=draw, device="cuda") * 9 - 5)
    for row, value in enumerate((float("inf"), float("nan"), -float("inf"), 0.0, -0.0, 448.0, 1e-30, 3e38, 60000.0)):
        if row < tokens:
            x[row, row * 32 : row * 32 + (1 if row < 3 else 128)] = value
    return x.to(dtype)


def drawn(seed: int, comm: ep_ops.Communicator, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(device="cuda").manual_seed(seed + 977 * comm.rank)
    idx = torch.rand(tokens, comm.num_experts, generator=draw, device="cuda").argsort(1)[:, : comm.top_k].int()
    idx[torch.rand(idx.shape, generator=draw, device="cuda") < 0.1] = -1
    if tokens:
        idx[0, 1] = idx[0, 0]
    weights = torch.rand(tokens, comm.top_k, generator=draw, device="cuda")
    return odd(draw, tokens, comm.hidden_size, comm.dtype), idx, weights


@pytest.mark.parametrize("bound", [TOKENS, 2 * TOKENS], ids=["latency", "throughput"])
@pytest.mark.parametrize(("dtype", "name", "layout"), CASES)
def test_every_format(dtype, name, layout, bound, seed, monkeypatch):
    """All dispatches, of rows that are quantized on the way and of such as are already, in every layout of rows; the
    checking mode raises the first difference."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    rank, world_size = ranks()
    with make_comm("cute", "formats", latency_max_tokens=TOKENS, **config(world_size, dtype)) as comm:
        comm.warmup([(name, layout)])
        for turn, (alignment, slots, share) in enumerate(((1, 0, 1.0), (16, 0, 0.5), (4, 24, 0.0), (1, 7, 0.0))):
            tokens = 0 if turn == 1 and rank == world_size - 1 else TOKENS - turn * (rank % 2)
            x, idx, weights = drawn(seed + turn, comm, tokens)
            room = int(world_size * TOKENS * TOP_K * share) + 4 * alignment
            sizes = dict(cases.room(room // alignment * alignment, slots), alignment=alignment, max_tokens=bound)
            how = dict(format=name, scales_as=layout)
            sent = comm.dispatch(x, idx, weights, **sizes, **how)
            comm.dispatch(x, idx, **sizes, **how, zeros=False)
            comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **sizes, **how))
            comm.dispatch_planned(x, sent.route, weights, **how)
            if not slots:
                comm.dispatch(x, idx, weights, alignment=alignment, max_tokens=bound, **how, exact=True)
            form = formats.format_of(name)
            if not form.wire:
                codes, scales = formats.quantize(x, form)
                comm.dispatch(codes, idx, weights, scales=scales, **sizes, **how)
                comm.dispatch_wait(comm.dispatch_start(codes, idx, weights, scales=scales, **sizes, **how))
                comm.dispatch_planned(codes, sent.route, scales=scales, **how)
        torch.cuda.synchronize()
        comm.check_errors()


@pytest.mark.parametrize("bound", [TOKENS, 2 * TOKENS], ids=["latency", "throughput"])
@pytest.mark.parametrize(("name", "layout"), [(POW2, "columns"), (f"wire:{POW2}", "")])
def test_captured(name, layout, bound, seed, together):
    """Replays bring the codes and scales of the x that is there then."""
    rank, world_size = ranks()
    with make_comm("cute", "captured", latency_max_tokens=TOKENS, **config(world_size)) as comm:
        comm.warmup([(name, layout)])
        x, idx, weights = drawn(seed, comm, TOKENS)

        def step() -> ep_ops.Dispatched:
            return comm.dispatch(
                x, idx, weights, max_tokens=bound, alignment=16, capacity=1024 * 4, format=name, scales_as=layout
            )

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for turn in range(3):
            x.copy_(drawn(seed + 1 + turn, comm, TOKENS)[0])
            for tensor in (captured.x.view(torch.uint8), *([] if captured.scales is None else [captured.scales])):
                tensor.fill_(77)
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            owned = eager.route.recv_from >= 0
            with together():
                for mine, theirs in ((captured.x, eager.x), (captured.scales, eager.scales)):
                    if mine is not None:
                        assert torch.equal(mine[owned].view(torch.uint8), theirs[owned].view(torch.uint8)), turn
        comm.check_errors()


@few_processes
@pytest.mark.parametrize("bound", [TOKENS, 2 * TOKENS], ids=["latency", "throughput"])
@pytest.mark.parametrize("grad_format", ["", f"wire:{POW2}"])
def test_gradients_compiled(grad_format, bound, seed, together):
    """Through a format on the wire, as the reference has them: values and gradients of a whole step. Gradients of sums
    travel in the format, too, or as they are."""
    _, world_size = ranks()
    name = f"wire:{POW2}"
    with (
        make_comm("cute", "gradients", latency_max_tokens=TOKENS, **config(world_size)) as comm,
        make_comm("reference", "gradients", **config(world_size)) as ref,
    ):
        comm.warmup([(name, "")])
        _, idx, weights = drawn(seed, comm, TOKENS)
        draw = torch.Generator(device="cuda").manual_seed(seed + comm.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=draw, device="cuda").bfloat16()

        def layer(where: ep_ops.Communicator, x: Tensor, weights: Tensor) -> Tensor:
            sent = where.dispatch(x, idx, weights, max_tokens=bound, alignment=16, capacity=1024 * 4, format=name)
            row = torch.arange(sent.x.shape[0], device="cuda")
            rows = torch.where((row < sent.route.offs[-1])[:, None], sent.x, 0)
            y = rows * 2 + rows * rows.sigmoid()
            return where.combine(y, sent.route, sent.weights, grad_format=grad_format)

        def step(run: Any, where: ep_ops.Communicator) -> tuple[Tensor, ...]:
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            out = run(where, *leaves)
            out.square().sum().backward()
            return (out.detach(), *(leaf.grad for leaf in leaves))

        expected = step(layer, ref)
        # Compiled, what stands between dispatch and combine is rounded once instead of after every operation; what is
        # rounded to a code behind that may become the next one.
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)
        for run, most in ((layer, 1e-4), (compiled, 5e-2 if grad_format else 1e-2)):
            got = step(run, comm)
            with together():
                for mine, theirs in zip(got, expected, strict=True):
                    error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
                    assert error <= most, f"{float(error):.2g} from the reference"
        comm.check_errors()


def test_row_wise_grouped_gemm(seed, together):
    """torch's grouped GEMM of e4m3 rows takes rows and scales as they arrive."""
    _, world_size = ranks()
    out_features = 256
    with make_comm("cute", "gemm", **config(world_size)) as comm:
        comm.warmup([(ROW, "")])
        _, idx, _ = drawn(seed, comm, TOKENS)
        draw = torch.Generator(device="cuda").manual_seed(seed + comm.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=draw, device="cuda").bfloat16()
        experts = torch.randn(comm.num_local_experts, out_features, HIDDEN, generator=draw, device="cuda")
        codes, by = formats.quantize(experts.view(-1, HIDDEN), formats.format_of(ROW))
        codes, by = codes.view(experts.shape), by.view(experts.shape[:2])
        sent = comm.dispatch(x, idx, max_tokens=2 * TOKENS, alignment=16, capacity=2048, format=ROW)
        got = torch._scaled_grouped_mm(
            sent.x, codes.transpose(1, 2), sent.scales, by, sent.route.offs, out_dtype=torch.bfloat16
        )
        rows = formats.dequantize(sent.x, sent.scales, formats.format_of(ROW), torch.float32)
        matrices = formats.dequantize(codes.view(-1, HIDDEN), by.view(-1), formats.format_of(ROW), torch.float32)
        expert = sent.route.m_indices.long()
        held = expert >= 0
        want = torch.einsum("rh,roh->ro", rows[held], matrices.view(experts.shape)[expert[held]])
        plain = comm.dispatch(x, idx, max_tokens=2 * TOKENS, alignment=16, capacity=2048)
        full = torch.einsum("rh,roh->ro", plain.x[held].float(), experts[expert[held]])
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            torch.testing.assert_close(got[held].float(), want, rtol=1e-2, atol=0.5)
            error = (got[held].float() - full).norm() / full.norm()
            assert error < 0.06, f"{float(error):.3f} from unquantized rows and weights"
