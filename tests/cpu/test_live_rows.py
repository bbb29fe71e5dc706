"""SwiGLU of the rows of a route, on the CPU: against fp64, row by row, with what nobody may read poisoned."""

from __future__ import annotations

import argparse
import math
import random

import pytest
import quantized
import torch
from cases import fresh_seed
from segments import Drawn, segments
from torch import Tensor
from torch.library import opcheck
from torch.utils import _pytree as pytree

from benchmarks import live_rows
from ep_ops.nn import swiglu_quantized, swiglu_rows
from ep_ops.records import Route

POW2, FP32, MX = "e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx"
UNUSED = torch.zeros(1, dtype=torch.int32)


def route_of(of: Drawn, alignment: int = 4, slots: int = 0) -> Route:
    ints = [torch.tensor(values, dtype=torch.int32) for values in (of.offs, of.counts)]
    return Route(
        UNUSED, UNUSED, UNUSED, *ints, alignment, of.rows, 1, slots=slots, layout="padded" if slots else "grouped"
    )


def case(draw: random.Random, slots: int = 0, alignment: int = 4, **options: int) -> tuple[Drawn, Route]:
    of = segments(draw, slots, alignment=alignment, **options)
    return of, route_of(of, alignment, slots)


def expected(row: list[float]) -> list[float]:
    half = len(row) // 2
    return [g / (1 + math.exp(-g)) * u for g, u in zip(row[:half], row[half:], strict=True)]


def rounding(dtype: torch.dtype) -> float:
    """Return the error of one rounding, and of fp32 before it."""
    return torch.finfo(dtype).eps / 2 + (4e-7 if dtype != torch.float64 else 1e-15)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1.01 * rounding(dtype), atol=torch.finfo(dtype).tiny)


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LAYOUTS = {"flat": {}, "slots": {"slots": 12}, "unpadded": {"alignment": 1}, "one": {"experts": 1}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype, layout: str) -> None:
    """Kept rows to a rounding, zeros in padding, NaN elsewhere; nothing is read but kept rows."""
    draw = random.Random(fresh_seed())
    of, route = case(draw, **LAYOUTS[layout])
    x = of.poisoned(20, dtype, draw)
    got = swiglu_rows(x, route)
    want = torch.tensor([expected(row) for row in x[of.kept].double().tolist()], dtype=torch.float64)
    close(got[of.kept], want, dtype)
    assert (got[of.padding] == 0).all()
    assert got[of.dead].isnan().all() and got.shape == (of.rows, 10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient(dtype: torch.dtype, layout: str) -> None:
    """Gradients equal the derivative of the expression in fp64, whatever the gradient of other rows holds."""
    draw = random.Random(fresh_seed())
    of, route = case(draw, **LAYOUTS[layout])
    x, grad = of.poisoned(16, dtype, draw), of.poisoned(8, dtype, draw)
    x.requires_grad_()
    swiglu_rows(x, route).backward(grad)
    ours = x.grad
    exact = x.detach()[of.kept].double().requires_grad_()
    gate, up = exact[:, :8], exact[:, 8:]
    (gate / (1 + (-gate).exp()) * up).backward(grad[of.kept].double())
    assert ours is not None and ours.dtype == dtype
    # 1 + gate (1 - s) cancels near gate = -1.28: there the error is one of fp32's, of what is cancelled.
    torch.testing.assert_close(
        ours[of.kept].double(), exact.grad, rtol=1.01 * rounding(dtype), atol=5e-5 if dtype != torch.float64 else 1e-13
    )
    assert (ours[of.padding] == 0).all()


def test_gradcheck() -> None:
    """Gradients of rows that are all kept agree with numerical ones."""
    draw = random.Random(fresh_seed())
    of, route = case(draw, alignment=1, behind=0)
    x = of.poisoned(6, torch.float64, draw).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu_rows(x, route), x)


WAYS = [(POW2, "rows"), (POW2, "columns"), (POW2, "packed"), (FP32, "columns"), (MX, "rows"), (MX, "packed")]


@pytest.mark.parametrize("slots", [0, 12])
@pytest.mark.parametrize(("name", "layout"), WAYS)
def test_quantized(name: str, layout: str, slots: int) -> None:
    """Codes and scales are those of the rounded result, by tests/quantized.py, and 0 in padding; gradients go straight
    through."""
    draw = random.Random(fresh_seed())
    of, route = case(draw, slots)
    x = of.poisoned(2 * 640, torch.bfloat16, draw, scale=10.0 ** draw.uniform(-4, 3)).requires_grad_()
    codes, scales = swiglu_quantized(x, route, name, layout)
    rows = swiglu_rows(x, route).detach()
    want_codes, want_scales = quantized.quantized(rows[of.kept].float(), name.removeprefix("e4m3/"))
    assert torch.equal(codes.view(torch.uint8)[of.kept], want_codes)
    assert (codes.view(torch.uint8)[of.padding] == 0).all()

    every = torch.zeros(of.rows, want_scales.shape[1], dtype=torch.float64)
    every[of.kept] = want_scales
    live = torch.zeros(of.rows, dtype=torch.bool)
    live[of.live] = True
    if layout == "rows":
        if name == MX:
            own, want = scales.view(torch.uint8), every.clone().apply_(quantized.byte_of).to(torch.uint8)
        else:
            own, want = scales, every.float()
        assert torch.equal(own[live], want[live])
    else:
        sizes = [-(-count // route.alignment) * route.alignment for count in of.counts]
        memory = quantized.laid(every, live, layout, sizes, slots, True, math.nan).transpose(-1, -2)
        taken = memory[..., : slots or of.rows, :].reshape(-1, memory.shape[-1])
        assert torch.equal(scales.reshape(taken.shape)[live], taken[live])
        assert scales.stride(-2) == 1

    grad = of.poisoned(640, torch.bfloat16, draw)
    (through,) = torch.autograd.grad(swiglu_rows(x, route), x, grad)
    (ours,) = torch.autograd.grad(codes, x, grad)
    assert torch.equal(ours[of.live], through[of.live])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """In a compiled graph, with a number of rows that is known late, numbers and gradients are the same."""

    def step(x: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        return swiglu_rows(x * 2, route), *swiglu_quantized(x * 2, route, POW2, "columns")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    draw = random.Random(fresh_seed())
    for _ in range(2):
        of, route = case(draw)
        x = of.poisoned(256, torch.float32, draw)
        grads = []
        for run in (step, compiled):
            own = x.clone().requires_grad_()
            y, codes, scales = run(own, route)
            y[of.live].square().sum().backward()
            grads.append((own.grad[of.live], y[of.live], codes.view(torch.uint8)[of.live], scales[of.live]))
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("slots", [0, 12])
def test_opcheck(slots: int) -> None:
    """torch's opcheck accepts the operators on rows without undefined values, because it compares all of them."""
    draw = random.Random(fresh_seed())
    counts = [slots or 4, slots or 8]
    of = Drawn(counts, [counts[0], sum(counts)], list(range(sum(counts))), [], sum(counts))
    route = route_of(of, 4, slots)
    x = of.poisoned(256, torch.float32, draw).requires_grad_()
    along = (route.offs, route.counts, 4, slots)
    opcheck(torch.ops.ep.swiglu.default, (x, *along))
    opcheck(torch.ops.ep.swiglu_backward.default, (x.detach()[:, :128].contiguous(), x.detach(), *along))
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")  # gradients of codes have another dtype
    opcheck(torch.ops.ep.swiglu_quantized.default, (x, *along, POW2, "rows"), test_utils=utils)


def test_second_derivatives_are_rejected() -> None:
    of, route = case(random.Random(fresh_seed()))
    x = torch.randn(of.rows, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu_rows(x, route).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="ep::swiglu does not support second derivatives"):
        torch.autograd.grad(grad.sum() + x.sum(), x)


def test_functional_derivatives_are_rejected() -> None:
    of, route = case(random.Random(fresh_seed()))
    x = torch.randn(of.rows, 256)
    for run in (lambda x: swiglu_rows(x, route), lambda x: swiglu_quantized(x, route)[0].float()):
        with pytest.raises(NotImplementedError, match="does not support forward-mode"):
            torch.func.jvp(run, (x,), (x,))
        with pytest.raises(NotImplementedError, match="does not support the transforms"):
            torch.func.vjp(run, x)


def test_rejections() -> None:
    draw = random.Random(fresh_seed())
    of, route = case(draw)
    x = of.poisoned(512, torch.bfloat16, draw)
    with pytest.raises(ValueError, match="rows of the route"):
        swiglu_rows(x[1:], route)
    with pytest.raises(ValueError, match="rows of the route"):
        swiglu_rows(x[:, 1:], route)
    with pytest.raises(ValueError, match="token-major"):
        swiglu_rows(x, route._replace(layout="token_major"))
    with pytest.raises(TypeError, match="gate_and_up has dtype torch.int32"):
        swiglu_rows(x.int(), route)
    with pytest.raises(ValueError, match="format is 'e4m3/row/fp32'"):
        swiglu_quantized(x, route, "e4m3/row/fp32")
    with pytest.raises(ValueError, match="scales_as is 'packed'"):
        swiglu_quantized(x, route, FP32, "packed")
    with pytest.raises(ValueError, match="scales_as is 'swizzled/torch'"):
        swiglu_quantized(x, route, MX, "swizzled/torch")
    with pytest.raises(ValueError, match="multiples of 128"):
        swiglu_quantized(x[:, :320], route)
    with pytest.raises(TypeError, match="float64"):
        swiglu_quantized(x.double(), route)


def test_benchmark_compares_the_same() -> None:
    """All variants that the benchmark compares return the same live rows."""
    sizes = dict(live=24, times=2, hidden=128, experts=3, dtype="fp32", seed=fresh_seed())
    route, x, grad = live_rows.made(argparse.Namespace(**sizes), torch.device("cpu"))
    assert route.offs.tolist() == [8, 16, 24] and x.shape == (48, 256)
    for what in ("forward", "forward and backward"):
        by = live_rows.ways(route, x, grad)[what]
        ours, theirs = (pytree.tree_leaves(by[who](0))[0][:24] for who in (live_rows.OURS, "PyTorch, eager"))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
