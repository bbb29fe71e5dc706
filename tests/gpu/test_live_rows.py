"""SwiGLU of the rows of a route: kernels beside plain PyTorch, gradients, what is captured and compiled, and the two
grouped GEMMs around it. No ranks take part."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from segments import Drawn, segments
from sharing import one_rank
from torch import Tensor

from ep_ops import formats
from ep_ops.nn import grouped_mm, swiglu, swiglu_quantized, swiglu_rows
from ep_ops.records import Route

pytestmark = one_rank
POW2, FP32, MX = "e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx"
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SIZES = (8, 264, 2048)
"""Less than a lane each, a piece that is not full, several pieces."""
LAID = [(POW2, "rows"), (POW2, "columns"), (POW2, "packed"), (FP32, "rows"), (FP32, "columns"), (MX, "rows"),
        (MX, "packed")]  # fmt: skip
WAYS = [(torch.bfloat16, *way) for way in LAID]
WAYS += [(torch.float16, POW2, "packed"), (torch.float32, MX, "packed"), (torch.float32, POW2, "columns")]
WIDE = 1152  # 9 blocks of 128: no whole number of int32 with four exponents
STEP = 384  # of what is captured or compiled
SENTINEL = 0x5A


def kernels() -> list[Any]:
    """Return the kernels that these tests launch, for precompile.py."""
    from cute_kernels.local.swiglu import SwiGLURows

    plain = [
        SwiGLURows(size, NAMES[dtype], back) for size, dtype, back in itertools.product(SIZES, NAMES, (False, True))
    ]
    plain += [SwiGLURows(size, "bf16", back) for size, back in itertools.product((STEP, WIDE), (False, True))]
    plain += [SwiGLURows(WIDE, name) for name in ("fp16", "fp32")]
    plain += [SwiGLURows(24, name, back) for name, back in itertools.product(NAMES.values(), (False, True))]
    wide = [SwiGLURows(WIDE, NAMES[dtype], False, name, layout) for dtype, name, layout in WAYS]
    return [*plain, *wide, SwiGLURows(STEP, "bf16", False, POW2, "columns")]


LAYOUTS = {"flat": {}, "slots": {"slots": 12}, "unpadded": {"alignment": 1}, "many": {"experts": 150}, "room": {
    "behind": 3000}}  # fmt: skip


def drawn(draw: random.Random, slots: int = 0, alignment: int = 4, **options: int) -> tuple[Drawn, Route]:
    of = segments(draw, slots, alignment=alignment, **options)
    unused = torch.zeros(1, dtype=torch.int32, device="cuda")
    ints = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in (of.offs, of.counts)]
    return of, Route(
        unused, unused, unused, *ints, alignment, of.rows, 1, slots=slots, layout="padded" if slots else "grouped"
    )


def on_cpu(route: Route) -> Route:
    return route._replace(offs=route.offs.cpu(), counts=route.counts.cpu())


def close(got: Tensor, want: Tensor) -> None:
    """To the neighboring number of the dtype, or 2e-6 of fp32 (exponentials are not the CPU's)."""
    rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[got.dtype]
    # A derivative that is a small difference of large numbers has an error of those.
    atol = {torch.bfloat16: 1e-4, torch.float16: 1e-4, torch.float32: 5e-5}[got.dtype]
    torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype", NAMES)
def test_values_and_gradients(dtype, hidden, layout, seed):
    """Values and gradients equal the definition on the CPU; operands that nobody may read hold NaN."""
    draw = random.Random(seed)
    of, route = drawn(draw, **LAYOUTS[layout])
    x, grad = of.poisoned(2 * hidden, dtype, draw), of.poisoned(hidden, dtype, draw)
    results = []
    for device, along in (("cuda", route), ("cpu", on_cpu(route))):
        own = x.to(device, copy=True).requires_grad_()
        y = swiglu_rows(own, along)
        y.backward(grad.to(device))
        results.append((y.detach(), own.grad))
    for got, want in zip(*results, strict=True):
        assert got.dtype == dtype and got.is_cuda
        close(got[of.kept], want[of.kept])
        assert (got[of.padding] == 0).all()


@pytest.mark.parametrize("dtype", NAMES)
def test_extremes(dtype):
    """Gates that saturate, Inf and NaN, as the definition has them."""
    gates = [0.0, -0.0, 80.0, -80.0, 88.5, -88.5, 104.0, -104.0, 3e4, -3e4, float("inf"), float("-inf"), float("nan")]
    gate = torch.tensor((gates * 8)[:104], dtype=dtype).view(4, 26)[:, :24].contiguous()
    x = torch.cat([gate, torch.full_like(gate, 1.5)], 1)
    ints = [torch.tensor([4], dtype=torch.int32, device="cuda")] * 2
    route = Route(ints[0], ints[0], ints[0], *ints, 1, 4, 1)
    results = []
    for device, along in (("cuda", route), ("cpu", on_cpu(route))):
        own = x.to(device, copy=True).requires_grad_()
        y = swiglu_rows(own, along)
        y.backward(torch.ones_like(y))
        # The derivative at an infinite gate is that of no number.
        defined = torch.cat([gate.isfinite(), gate.isfinite()], 1)
        results.append((y.detach().cpu(), torch.where(defined, own.grad.cpu(), 0)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7 if dtype != torch.float32 else 2e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("slots", [0, 12])
@pytest.mark.parametrize(("dtype", "name", "layout"), WAYS)
def test_quantized(dtype, name, layout, slots, seed):
    """Bit for bit what the definition makes of the kernel's own result without a format."""
    draw = random.Random(seed)
    of, route = drawn(draw, slots)
    x = of.poisoned(2 * WIDE, dtype, draw, scale=10 ** draw.uniform(-2, 1))
    for row, value in zip(of.kept, (float("inf"), float("nan"), 0.0, 60000.0), strict=False):
        x[row, WIDE + 32 * row % 1024] = value
    x = x.cuda()
    codes, scales = swiglu_quantized(x, route, name, layout)
    form = formats.format_of(name)
    rows = swiglu_rows(x, route)
    want_codes, want = formats.quantize(rows[of.kept].cpu(), form)
    assert torch.equal(as_bytes(codes)[of.kept].cpu(), as_bytes(want_codes))
    assert (as_bytes(codes)[of.padding] == 0).all()

    # All scales in rows, those of padding 0, as the layout has them.
    every = torch.zeros(of.rows, as_bytes(want).shape[1], dtype=torch.uint8)
    every[of.kept] = as_bytes(want)
    grid = formats.Grid(of.rows, slots, len(of.counts), WIDE)
    along = on_cpu(route)
    packed = formats.ScaleLayout(form, layout, grid, along.segments).pack(every.view(want.dtype), True, 0.0)
    taken = formats.view(packed, layout, grid)
    assert scales.shape == taken.shape and scales.stride() == taken.stride() and scales.dtype == taken.dtype
    ours, theirs = (t.view(torch.uint8) if name == MX and layout == "rows" else t for t in (scales.cpu(), taken))
    ours, theirs = (t.reshape(of.rows, -1) for t in (ours, theirs))
    assert torch.equal(ours[of.live], theirs[of.live])


def test_gradient_of_quantized(seed):
    """The gradient of quantized rows is that of the result without a format."""
    draw = random.Random(seed)
    of, route = drawn(draw)
    x = of.poisoned(2 * WIDE, torch.bfloat16, draw).cuda().requires_grad_()
    grad = of.poisoned(WIDE, torch.bfloat16, draw).cuda()
    codes, _ = swiglu_quantized(x, route)
    (ours,) = torch.autograd.grad(codes, x, grad)
    (through,) = torch.autograd.grad(swiglu_rows(x, route), x, grad)
    assert torch.equal(ours[of.live], through[of.live])


@pytest.mark.parametrize("slots", [0, 12])
def test_nothing_else_is_written(slots, seed):
    """Results that hold a sentinel keep it in rows that are in no segment."""
    from cute_kernels.local.swiglu import SwiGLURows
    from ep_ops.backends.cute.local_kernels import swiglu as launch

    draw = random.Random(seed)
    of, route = drawn(draw, slots)
    x, grad = (of.poisoned(width, torch.bfloat16, draw).cuda() for width in (2 * WIDE, WIDE))

    def filled(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), SENTINEL, dtype=torch.uint8, device="cuda").view(
            dtype
        )

    y, back, codes = filled(of.rows, WIDE), filled(of.rows, 2 * WIDE), filled(of.rows, WIDE, dtype=torch.float8_e4m3fn)
    scales = filled(of.rows, WIDE // 128, dtype=torch.float32)
    launch(SwiGLURows(WIDE, "bf16"), x, y, route.segments, slots)
    launch(SwiGLURows(WIDE, "bf16", True), x, back, route.segments, slots, grad=grad)
    launch(SwiGLURows(WIDE, "bf16", False, POW2, "rows"), x, codes, route.segments, slots, scales=scales)
    for tensor in (y, back, codes, scales):
        raw = tensor.view(torch.uint8)
        assert (raw[of.dead] == SENTINEL).all()
        assert (raw[of.padding] == 0).all()
        assert not tensor.float()[of.kept].isnan().any()


def test_captured(seed):
    """A graph whose replays find other segments than it was captured with, of more rows and of fewer."""
    draw = random.Random(seed)
    experts, rows = 6, 400
    drawings = [segments(draw, experts=experts, most=most) for most in (40, 3, 60, 1)]
    offs, counts = (torch.zeros(experts, dtype=torch.int32, device="cuda") for _ in range(2))
    route = Route(offs, offs, offs, offs, counts, 4, rows, 1)
    x = torch.zeros(rows, 2 * STEP, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.zeros(rows, STEP, dtype=torch.bfloat16, device="cuda")

    def put(of: Drawn) -> None:
        assert of.rows <= rows
        offs.copy_(torch.tensor(of.offs, dtype=torch.int32))
        counts.copy_(torch.tensor(of.counts, dtype=torch.int32))
        with torch.no_grad():
            for tensor in (x, grad):
                tensor.fill_(float("nan"))
                tensor[of.kept] = of.poisoned(tensor.shape[1], torch.bfloat16, draw)[of.kept].cuda()

    def step() -> tuple[Tensor, ...]:
        y = swiglu_rows(x, route)
        (back,) = torch.autograd.grad(y, x, grad)
        return y.detach(), back, *swiglu_quantized(x.detach(), route, POW2, "columns")

    put(drawings[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for of in drawings:
        put(of)
        graph.replay()
        expected = step()
        for got, want in zip(replayed, expected, strict=True):
            got, want = (as_bytes(t) if t.dtype == torch.float8_e4m3fn else t for t in (got, want))
            assert torch.equal(got[of.live], want[of.live])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, seed):
    """In one graph, between kernels that Inductor makes, numbers and gradients are the same."""

    def step(x: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        y = swiglu_rows(x * 2, route)
        codes, scales = swiglu_quantized(x * 2, route, POW2, "columns")
        return y * 2, codes, scales

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    draw = random.Random(seed)
    for behind in (9, 40):
        of, route = drawn(draw, behind=behind)
        x = of.poisoned(2 * STEP, torch.bfloat16, draw).cuda()
        found = []
        for run in (step, compiled):
            own = x.clone().requires_grad_()
            y, codes, scales = run(own, route)
            torch.where(torch.isfinite(y), y.float().square(), 0).sum().backward()
            assert own.grad is not None
            found.append((y[of.live], own.grad[of.live], as_bytes(codes.detach())[of.live], scales[of.live]))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_between_grouped_gemms(seed):
    """Gradients of both weights beside those of fp32 over kept rows alone, whatever stands in padding and behind."""
    draw = random.Random(seed)
    of, route = drawn(draw, alignment=16, most=70, behind=64)
    while not all(of.counts):
        of, route = drawn(draw, alignment=16, most=70, behind=64)
    hidden, experts = 256, len(of.counts)
    x = of.poisoned(hidden, torch.bfloat16, draw, 1.0).cuda()
    grad = of.poisoned(hidden, torch.bfloat16, draw, 1.0).cuda()
    for tensor in (x, grad):  # what a dispatch brings: zeros in padding
        tensor[of.padding] = 0
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = ((experts, hidden, 2 * STEP), (experts, STEP, hidden))
    weights = [torch.randn(shape, generator=generator, device="cuda") * shape[1] ** -0.5 for shape in shapes]
    w_in, w_out = (w.bfloat16().requires_grad_() for w in weights)
    y = grouped_mm(swiglu_rows(grouped_mm(x, w_in, route.offs), route), w_out, route.offs)
    y.backward(grad)

    exact_in, exact_out = (w.detach().float().requires_grad_() for w in (w_in, w_out))
    begin = 0
    for expert, (end, count) in enumerate(zip(of.offs, of.counts, strict=True)):
        own = slice(begin, begin + count)
        plain = swiglu(x[own].float() @ exact_in[expert]) @ exact_out[expert]
        plain.backward(grad[own].float())
        assert (y[own].float() - plain).norm() <= 0.02 * plain.norm()
        begin = end
    for got, want in ((w_in.grad, exact_in.grad), (w_out.grad, exact_out.grad)):
        assert got is not None and want is not None and got.isfinite().all()
        assert (got.float() - want).norm() <= 0.02 * want.norm()
