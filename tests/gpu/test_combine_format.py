"""Combines whose sums travel in a format: kernels compared with the reference (checking mode compares every number),
what is captured, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import pytest
import torch
from operators import make_comm, ranks
from test_formats import drawn, odd
from torch import Tensor

import ep_ops
from ep_ops.formats import COMBINE_FORMATS

TOKENS, TOP_K = 24, 3
HIDDENS = (128, 7296)
"""Rows that fill half of a warp's first vector, and rows whose last slice is short."""
CASES = [(torch.bfloat16, hidden, format) for hidden in HIDDENS for format in COMBINE_FORMATS]
CASES += [(torch.float16, 1152, COMBINE_FORMATS[0]), (torch.float32, 1152, COMBINE_FORMATS[1])]


def config(world_size: int, dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDENS[1]) -> dict[str, Any]:
    return dict(
        num_experts=4 * world_size, hidden_size=hidden, top_k=TOP_K, max_tokens_per_rank=2 * TOKENS, dtype=dtype
    )


def wanted(world_size: int) -> Iterator[tuple[dict[str, Any], tuple[str, str]]]:
    """Configurations and formats, for precompile.py."""
    for dtype, hidden, format in CASES:
        yield config(world_size, dtype, hidden), (format, "")


def rows_of(comm: ep_ops.Communicator, sent: ep_ops.Dispatched, seed: int) -> Tensor:
    """Outputs of experts: of all magnitudes, some that are not finite, some that cancel the row before; NaN where a row
    belongs to nobody."""
    draw = torch.Generator(device="cuda").manual_seed(seed + 31 * comm.rank)
    y = odd(draw, sent.x.shape[0], comm.hidden_size, comm.dtype)
    y[1::5] = -y[0::5][: y[1::5].shape[0]]
    return torch.where((sent.route.recv_from >= 0)[:, None], y, torch.nan)


@pytest.mark.parametrize("bound", [TOKENS, 2 * TOKENS], ids=["latency", "throughput"])
@pytest.mark.parametrize(("dtype", "hidden", "format"), CASES)
def test_every_combine(format, dtype, hidden, bound, seed, monkeypatch):
    """Combines with a format return the reference's bits, for grouped, padded and token-major rows, with drops,
    weights, a residual, and split. Operations with and without a format alternate; checking mode raises the first
    difference."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    rank, world_size = ranks()
    with make_comm("cute", "sums", latency_max_tokens=TOKENS, **config(world_size, dtype, hidden)) as comm:
        comm.warmup()
        for turn, (alignment, slots, share) in enumerate(((1, 0, 1.0), (16, 0, 0.5), (4, 24, 0.0))):
            tokens = 0 if turn == 1 and rank == world_size - 1 else TOKENS - turn * (rank % 2)
            x, idx, weights = drawn(seed + turn, comm, tokens)
            room = int(world_size * TOKENS * TOP_K * share) + 4 * alignment
            sizes = dict(cases.room(room // alignment * alignment, slots), alignment=alignment, max_tokens=bound)
            sent = comm.dispatch(x, idx, weights, **sizes)
            y = rows_of(comm, sent, seed + turn)
            comm.combine(y, sent.route, format=format)
            comm.combine(y, sent.route, sent.weights)
            comm.combine(y, sent.route, sent.weights, residual=x, format=format)
            comm.combine_wait(comm.combine_start(y, sent.route, sent.weights, format=format))
            copies = comm.dispatch(x, idx, weights, layout="token_major", max_tokens=bound)
            comm.combine(rows_of(comm, copies, seed), copies.route, format=format)
        torch.cuda.synchronize()
        comm.check_errors()


@pytest.mark.parametrize("bound", [TOKENS, 2 * TOKENS], ids=["latency", "throughput"])
@pytest.mark.parametrize("format", COMBINE_FORMATS)
def test_captured(format, bound, seed, together):
    """Replays add up the rows that are there then."""
    _, world_size = ranks()
    with make_comm("cute", "captured sums", latency_max_tokens=TOKENS, **config(world_size)) as comm:
        comm.warmup()
        x, idx, weights = drawn(seed, comm, TOKENS)
        sent = comm.dispatch(x, idx, weights, max_tokens=bound, capacity=2048)
        y = rows_of(comm, sent, seed)
        comm.combine(y, sent.route, sent.weights, format=format)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = comm.combine(y, sent.route, sent.weights, format=format)
        for turn in range(3):
            y.copy_(rows_of(comm, sent, seed + 1 + turn))
            captured.fill_(77)
            graph.replay()
            eager = comm.combine(y, sent.route, sent.weights, format=format)
            torch.cuda.synchronize()
            with together():
                torch.testing.assert_close(captured, eager, rtol=0, atol=0, equal_nan=True)
        comm.check_errors()


@pytest.mark.parametrize("format", COMBINE_FORMATS)
def test_gradients(format, seed, together):
    """Gradients are to the bit those of a combine without a format."""
    _, world_size = ranks()
    with make_comm("cute", "gradients of sums", **config(world_size)) as comm:
        x, idx, weights = drawn(seed, comm, TOKENS)
        x = torch.randn_like(x.float()).bfloat16()
        sent, found = comm.dispatch(x, idx, weights, capacity=2048), []
        assert sent.weights is not None
        rows = torch.where((sent.route.recv_from >= 0)[:, None], sent.x, 0)
        for asked in ("", format):
            y, by = rows.clone().requires_grad_(), sent.weights.clone().requires_grad_()
            comm.combine(y, sent.route, by, format=asked).backward(x)
            found.append((y.grad, by.grad))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
