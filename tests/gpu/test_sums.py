"""Sums of rows that indices name: kernels beside plain PyTorch on the CPU, bit for bit; gradients, captured, compiled.
No ranks take part."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sharing import one_rank
from torch import Tensor

from ep_ops.nn import expert_lists, gather_rows, reduce_rows
from ep_ops.nn.sums import copy_rows, sum_rows

pytestmark = one_rank
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SIZES = (8, 264, 7168)
"""Less than a lane each, a piece that is not full, several pieces."""
TERMS = (1, 8, 40)
STEP = 384  # of what has gradients, is captured or compiled


def kernels() -> list[Any]:
    """Return the kernels that these tests launch, for precompile.py."""
    from cute_kernels.local.sum_rows import SumRows

    kinds = ((False, False), (True, False), (False, True))  # weighted, alone
    every = [SumRows(size, name, *kind) for size, name, kind in itertools.product(SIZES, NAMES.values(), kinds)]
    copies = [SumRows(size, name, False, True, True) for size, name in itertools.product(SIZES, NAMES.values())]
    return [*every, *copies, *(SumRows(STEP, "bf16", *kind) for kind in kinds)]


def drawn(seed: int, rows: int, terms: int, given: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, indices, weights; rows that nobody names hold NaN, none an infinity (in fp16, whose sums may overflow)."""
    draw = torch.Generator().manual_seed(seed)
    index = torch.randint(-3, given, (rows, terms), generator=draw).int()
    index[torch.rand(rows, generator=draw) < 0.2] = -1
    x = torch.randn(given, hidden, generator=draw) * torch.randn(given, 1, generator=draw).mul(3).exp()
    x.clamp_(-3e4, 3e4)
    x[~torch.isin(torch.arange(given), index)] = torch.nan
    return x.to(dtype), index, torch.randn(rows, terms, generator=draw)


def as_ints(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype", NAMES)
def test_values(dtype, hidden, terms, weighted, seed):
    for rows, given in ((1, 1), (37, 5), (3000, 400)):
        x, index, weights = drawn(seed + rows, rows, terms, given, hidden, dtype)
        weights = weights if weighted else None
        torch.full((rows, hidden), torch.nan, dtype=dtype, device="cuda")  # the next buffer's memory
        got = sum_rows(x.cuda(), index.cuda(), None if weights is None else weights.cuda())
        want = sum_rows(x, index, weights)
        assert got.is_cuda and got.dtype == dtype and not want.isnan().any()
        if terms == 1 and not weighted:
            assert torch.equal(as_ints(got), as_ints(want))
        assert torch.equal(got.cpu(), want)


def test_bytes_are_copied_as_they_are():
    x = torch.tensor([0x7FC1, 0x8000, 0xFFFF, 0x7F80, 0x0001, 0x3F80, 0, 0xFF80], dtype=torch.int32).to(torch.int16)
    index = torch.tensor([[0], [-1], [0]], dtype=torch.int32, device="cuda")
    got = sum_rows(x.view(torch.bfloat16)[None].cuda(), index)
    assert torch.equal(as_ints(got), torch.stack([x, torch.zeros_like(x), x]))


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype", NAMES)
def test_copies(dtype, hidden, seed):
    """Rows of segments are copied, those after them not."""
    for rows, given, ends in ((1, 1, [1]), (37, 5, [0, 9, 9]), (3000, 400, [17, 2900])):
        x, index, _ = drawn(seed + rows, rows, 1, given, hidden, dtype)
        index, offs = index[:, 0].clamp(min=0), torch.tensor(ends, dtype=torch.int32)
        got = copy_rows(x.cuda(), index.cuda(), offs.cuda()).cpu()
        assert torch.equal(as_ints(got[: ends[-1]]), as_ints(x[index[: ends[-1]]]))
        assert copy_rows(x, index, offs)[ends[-1] :].isnan().all()


def layer(x: Tensor, weights: Tensor, lists: Any) -> tuple[Tensor, Tensor]:
    return reduce_rows(gather_rows(x, lists) * 2, lists, weights), reduce_rows(gather_rows(x, lists), lists)


def lists_of(seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return expert_lists(torch.randint(-1, 6, (90, 8), generator=draw).int().cuda(), 6, alignment=4)


def results(run: Any, x: Tensor, weights: Tensor, lists: Any) -> list[Tensor]:
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    outs = run(*leaves, lists)
    return [out.detach() for out in outs] + list(torch.autograd.grad(sum((out * out).sum() for out in outs), leaves))


def test_gradients_and_compiled(seed):
    lists, draw = lists_of(seed), torch.Generator().manual_seed(seed)
    x, weights = torch.randn(90, STEP, generator=draw).bfloat16(), torch.randn(90, 8, generator=draw)
    on_cpu = type(lists)(*(t.cpu() if isinstance(t, Tensor) else t for t in lists))
    want = results(layer, x, weights, on_cpu)
    for run in (layer, torch.compile(layer, fullgraph=True)):
        for got, expected in zip(results(run, x.cuda(), weights.cuda(), lists), want, strict=True):
            torch.testing.assert_close(got.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_captured(seed):
    lists, draw = lists_of(seed), torch.Generator().manual_seed(seed)
    x, weights = torch.randn(90, STEP, generator=draw).bfloat16().cuda(), torch.randn(90, 8, generator=draw).cuda()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        layer(x, weights, lists)
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            outs = layer(x, weights, lists)
        for _ in range(2):
            x.normal_(), weights.normal_()
            [out.fill_(torch.nan) for out in outs]
            graph.replay()
            for out, expected in zip(outs, layer(x, weights, lists), strict=True):
                assert torch.equal(out, expected)
