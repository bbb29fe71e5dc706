"""Formats as models use them: methods, compiled graphs, gradients, and what is rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import quantized
import torch
from ranks import run_ranks
from scales import in_rows
from torch import Tensor
from torch.library import opcheck

import ep_ops
from ep_ops import checks
from ep_ops.formats import FORMATS, Grid, ScaleLayout, dequantize, format_of, quantize
from ep_ops.operators import OPERATORS
from ep_ops.records import NoElements
from ep_ops.specs import spec_of

HIDDEN, TOP_K, EXPERTS, ALIGNMENT = 256, 2, 4, 8
QUANTISED = tuple(name for name, form in FORMATS.items() if not form.wire)
ASKED = [(name, layout) for name in QUANTISED for layout in format_of(name).layouts]
POW2, MX, ROW = "e4m3/128/pow2", "e4m3/32/mx", "e4m3/row/fp32"


def communicator(**more: Any) -> ep_ops.Communicator:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "top_k": TOP_K, "max_tokens_per_rank": 16} | more
    return ep_ops.Communicator(**sizes, alignment=ALIGNMENT, device="cpu", backend="reference")


@pytest.fixture(scope="module")
def comm() -> Iterator[ep_ops.Communicator]:
    with communicator() as made:
        yield made


@pytest.fixture(scope="module")
def lenient() -> Iterator[ep_ops.Communicator]:
    with communicator(strict=False) as made:
        yield made


def inputs(tokens: int = 9, seed: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], topk_idx, topk_weights. The first token names an expert at least."""
    draw = torch.Generator().manual_seed(cases.fresh_seed() if seed is None else seed)
    idx = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :TOP_K].int()
    none = torch.rand(tokens, TOP_K, generator=draw) < 0.2
    none[:1, 0] = False
    idx[none] = -1
    x = torch.randn(tokens, HIDDEN, generator=draw) * torch.randn(tokens, 1, generator=draw).mul(3).exp2()
    return x.bfloat16(), idx, torch.rand(tokens, TOP_K, generator=draw)


def as_operators_return(scales: Tensor, layout: str) -> Tensor:
    """Return scales as operators return them, given the view of columns or packed scales that a method returns."""
    if layout not in ("columns", "packed"):
        return scales
    shape = [*scales.shape[:-2], scales.shape[-1], quantized.up(scales.shape[-2], 4)]
    return scales.as_strided(shape, torch.empty(shape, device="meta").stride())


def decoded(rows: Tensor, scales: Tensor, route: ep_ops.Route, name: str, layout: str) -> Tensor:
    """fp32 [R, H] of what a method returned; NaN where undefined."""
    form = format_of(name)
    grid = Grid(route.num_rows, route.slots, route.offs.numel(), rows.shape[1])
    exact = in_rows(ScaleLayout(form, layout, grid, route.segments), as_operators_return(scales, layout))
    blocks = rows.float().view(route.num_rows, exact.shape[1], -1)
    return (blocks * exact[..., None]).view(rows.shape)


# ---------------------------------------------------------------------- methods


@pytest.mark.parametrize("slots", [0, 24])
@pytest.mark.parametrize(("name", "layout"), ASKED)
def test_every_way_gives_what_decodes_to_x(comm: ep_ops.Communicator, name: str, layout: str, slots: int) -> None:
    x, idx, weights = inputs()
    form = format_of(name)
    codes, scales = quantize(x, form)
    values = dequantize(codes, scales, form, torch.float32)
    asked: dict[str, Any] = {"format": name, "scales_as": "" if layout == "rows" else layout}
    padded = cases.room(None, slots)
    sent = [
        comm.dispatch(x, idx, weights, **padded, **asked),
        comm.dispatch(codes, idx, weights, **padded, scales=scales, **asked),
        comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **padded, **asked)),
        comm.dispatch_wait(comm.dispatch_start(codes, idx, weights, **padded, scales=scales, **asked)),
    ]
    if not slots:
        sent += [
            comm.dispatch(x, idx, weights, **asked, exact=True),
            comm.dispatch(codes, idx, weights, scales=scales, **asked, exact=True),
        ]
    route, dropped = comm.plan(idx, **padded)
    for given, its_scales in ((x, None), (codes, scales)):
        again = comm.dispatch_planned(given, route, weights, scales=its_scales, **asked)
        assert again.route is route and again.dropped is dropped and again.local_idx is None
        sent.append(again)
    for got in sent:
        assert got.x.dtype == torch.float8_e4m3fn and got.scales is not None
        owner = got.route.recv_from
        held = owner >= 0
        assert held.sum() == (idx >= 0).sum()
        rows = decoded(got.x, got.scales, got.route, name, layout)
        assert torch.equal(rows[held], values[owner[held] // TOP_K])
        assert got.weights is not None and torch.equal(got.weights[held], weights.view(-1)[owner[held]])


def test_what_grouped_gemms_take_beside_rows(comm: ep_ops.Communicator) -> None:
    x, idx, _ = inputs()
    for sent in (comm.dispatch(x, idx, format=POW2), comm.dispatch(x, idx, **cases.room(None, 24), format=POW2)):
        route = sent.route
        owner = route.recv_from.tolist()
        expected = [-1 if asker < 0 else int(idx.view(-1)[asker]) for asker in owner]
        assert route.m_indices.dtype == torch.int32 and route.m_indices.tolist() == expected
        last = {expert: row + 1 for row, expert in enumerate(expected) if expert >= 0}
        for expert, end in enumerate(route.psum.tolist()):
            assert end == last.get(expert, int(route.offs[expert]))  # an empty segment ends where it begins


def test_tokens_of_several_dimensions_and_int64_ids(comm: ep_ops.Communicator) -> None:
    x, idx, weights = inputs(12)
    flat = comm.dispatch(x, idx, weights, format=MX)
    codes, scales = quantize(x, format_of(MX))
    shaped = [t.view(3, 4, -1) for t in (x, idx.long(), weights)]
    batched = [
        comm.dispatch(*shaped, format=MX),
        comm.dispatch(codes.view(3, 4, -1), *shaped[1:], scales=scales.view(3, 4, -1), format=MX),
    ]
    whole = quantize(x, format_of(ROW))
    rows = comm.dispatch(whole[0].view(3, 4, -1), shaped[1], scales=whole[1].view(3, 4), format=ROW)
    held = flat.route.recv_from >= 0
    assert torch.equal(rows.scales[held], whole[1][flat.route.recv_from[held] // TOP_K])
    for sent in batched:
        assert sent.route.batch == (3, 4)
        for got, wanted in ((sent.x, flat.x), (sent.scales, flat.scales)):
            assert torch.equal(got.view(torch.uint8)[held], wanted.view(torch.uint8)[held])


def test_autocast_leaves_quantized_rows_alone(comm: ep_ops.Communicator) -> None:
    x, idx, _ = inputs()
    codes, scales = quantize(x, format_of(POW2))
    plain = comm.dispatch(x, idx, format=POW2)
    with torch.autocast("cpu", torch.bfloat16):
        wide = comm.dispatch(x.float(), idx, format=POW2)
        passed = comm.dispatch(codes, idx, scales=scales, format=POW2)
    for sent in (wide, passed):
        assert torch.equal(sent.x.view(torch.uint8), plain.x.view(torch.uint8))


def test_padding_that_is_not_zeroed(comm: ep_ops.Communicator) -> None:
    """Padding that is not zeroed is NaN, in x's own format too; kept rows and weights are unchanged."""
    x, idx, weights = inputs()
    for zeros in (True, False):
        sent = comm.dispatch(x, idx, weights, zeros=zeros)
        assert sent.scales is None and sent.weights is not None
        route = sent.route
        held, covered = route.recv_from >= 0, torch.arange(route.num_rows) < route.offs[-1]
        assert torch.equal(sent.x[held], x[route.recv_from[held] // TOP_K])
        padding = sent.x[covered & ~held], sent.weights[covered & ~held]
        assert padding[1].numel() > 0
        for values in padding:
            assert bool((values == 0).all() if zeros else values.isnan().all())
        assert sent.x[~covered].isnan().all()


def test_lenient_communicators_show_zeros(lenient: ep_ops.Communicator) -> None:
    x, idx, _ = inputs()
    for name, layout in ASKED:
        sent = lenient.dispatch(x, idx, format=name, scales_as=layout, zeros=False)
        lost = sent.route.recv_from < 0
        assert not sent.x.view(torch.uint8)[lost].any()
        assert sent.scales is not None and not sent.scales.float().isnan().any()


# ---------------------------------------------------------------------- compiled


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Decode(torch.autograd.Function):
    """Stands for a GEMM that takes quantized rows: code times scale; its backward gives rows of x's dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor, route_rows: Tensor) -> Tensor:
        blocks = rows.float().view(rows.shape[0], scales.shape[1], -1) * scales[..., None]
        return torch.where((route_rows >= 0)[:, None], blocks.view(rows.shape), 0).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def layer(comm: ep_ops.Communicator, format: str, x: Tensor, idx: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    sent = comm.dispatch(x, idx, weights, format=format)
    rows = sent.x
    if sent.scales is not None:
        rows = Decode.apply(rows, sent.scales, sent.route.recv_from)
    held = (sent.route.recv_from >= 0)[:, None]
    y = torch.where(held, torch.where(held, rows, 0) * scale, 0)
    return comm.combine(y, sent.route, sent.weights)


def step(run: Callable[..., Tensor], comm: ep_ops.Communicator, format: str, seed: int, tokens: int) -> list[Tensor]:
    x, idx, weights = inputs(tokens, seed)
    scale = torch.linspace(-2, 2, HIDDEN).round().exp2().bfloat16()  # products with it are exact, fused or not
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    out = run(comm, format, x, idx, weights, scale)
    (out.float() * torch.linspace(1, 2, HIDDEN)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _steps(backend: str, format: str, seed: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Compiled and eager, for two numbers of tokens, on this rank."""
    rank = torch.distributed.get_rank()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    with communicator() as comm:
        made = []
        for tokens in (5 + rank, 11 - 3 * rank):
            both = (step(run, comm, format, seed + rank, tokens) for run in (compiled, layer))
            made.append(tuple(both))
    return made


@pytest.mark.parametrize(("ranks", "backend", "format"), [
    *(pytest.param(1, "inductor", how, marks=pytest.mark.drawn) for how in ("e4m3/128/fp32", f"wire:{MX}")),
    (2, "aot_eager", "e4m3/128/fp32"),
    (2, "aot_eager", f"wire:{POW2}"),
])  # fmt: skip
def test_compiled(ranks: int, backend: str, format: str) -> None:
    """One graph, forward and backward, the same numbers as eager code."""
    for steps in run_ranks(ranks, _steps, backend, format, cases.fresh_seed()):
        for got, wanted in steps:
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
                assert one.any()


@pytest.mark.parametrize("size", ["flat", "slots", "exact"])
@pytest.mark.parametrize(("name", "layout"), ASKED)
def test_scales_in_a_graph(comm: ep_ops.Communicator, name: str, layout: str, size: str) -> None:
    """Scales in a compiled graph have the strides of eager ones, also for a number of rows that only the data
    determine."""

    def scales(x: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
        if size == "exact":
            sent = comm.dispatch(x, idx, format=name, scales_as=layout, exact=True)
        else:
            sent = comm.dispatch(x, idx, **cases.room(None, 24 * (size == "slots")), format=name, scales_as=layout)
        assert sent.scales is not None
        return sent.x, sent.scales

    x, idx, _ = inputs()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(scales, backend="aot_eager", fullgraph=True)(x, idx)
    for one, other in zip(got, scales(x, idx), strict=True):
        assert one.stride() == other.stride() and one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "operator", ["dispatch", "dispatch_dynamic", "dispatch_planned", "dispatch_start", "dispatch_wait"]
)
@pytest.mark.parametrize(("name", "layout"), [
    (POW2, "columns"), (MX, "swizzled/quack"), (ROW, "rows"), (f"wire:{MX}", ""),
])  # fmt: skip
def test_opcheck(lenient: ep_ops.Communicator, operator: str, name: str, layout: str) -> None:
    """Schemas, fakes and registration, of both layouts of rows; x asks for a gradient where rows can be summed."""
    op = next(each for each in OPERATORS if each.name == operator)
    x, idx, weights = inputs(5, 0)
    if not layout:
        x.requires_grad_()
    for slots in (0, 24) if operator != "dispatch_dynamic" else (0,):
        capacity = EXPERTS * slots or 48
        route, _ = lenient.plan(idx, **cases.room(capacity, slots))
        known = {
            "x": x, "topk_weights": weights, "ticket": torch.empty(0, requires_grad=x.requires_grad), "flight": 0,
            **route._asdict(),
            "capacity": capacity, "slots": slots, "num_local_experts": EXPERTS, "world_size": 1, "comm": lenient.name,
            "scales": None, "format": name, "scales_as": layout, "zeros": True,
        }  # fmt: skip
        opcheck(op.overload, tuple(known[field] for field in op.arguments._fields))
        if layout:
            codes, scales = quantize(x, format_of(name))
            known |= {"x": codes, "scales": scales}
            utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # others compare x
            opcheck(op.overload, tuple(known[field] for field in op.arguments._fields), test_utils=utils)


# ---------------------------------------------------------------------- gradients


def _gradients(format: str, slots: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of x and weights, quantized and not, for the same gradients of rows on this rank."""
    rank, results = torch.distributed.get_rank(), []
    with communicator() as comm:
        for asked in (format, ""):
            x, idx, weights = inputs(7 - 3 * rank, seed + rank)
            x.requires_grad_()
            weights.requires_grad_()
            sent = comm.dispatch(x, idx, weights, **cases.room(None, slots), format=asked)
            draw = torch.Generator().manual_seed(seed + 100 + rank)
            grad = torch.randn(sent.x.shape, generator=draw).bfloat16()
            torch.autograd.backward([Rows.apply(sent.x, grad), sent.weights.nan_to_num().sum()])
            results.append([x.grad, weights.grad])
    return tuple(results)


class Rows(torch.autograd.Function):
    """Has a gradient that was drawn."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return rows.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("slots", [0, 16])
@pytest.mark.parametrize("format", list(FORMATS))
def test_gradients_go_straight_through(format: str, slots: int) -> None:
    """Gradients are to the bit those of a dispatch without a format: in x's dtype, never rounded to e4m3."""
    for got, plain in run_ranks(2, _gradients, format, slots, cases.fresh_seed()):
        for one, other in zip(got, plain, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other) and bool(one.any())


def test_gradients_of_another_dtype_are_brought_to_that_of_x(comm: ep_ops.Communicator) -> None:
    x, idx, _ = inputs(5)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        x.grad = None
        sent = comm.dispatch(x.requires_grad_(), idx, format=POW2)
        grad = torch.linspace(-3, 3, sent.x.numel()).view(sent.x.shape).bfloat16()
        Rows.apply(sent.x, grad.to(dtype)).backward()
        grads.append(x.grad)
    assert grads[0].dtype == torch.bfloat16 and torch.equal(*grads)


def test_rows_that_are_quantized_already_have_no_gradient(comm: ep_ops.Communicator) -> None:
    x, idx, weights = inputs(5)
    codes, scales = quantize(x, format_of(POW2))
    sent = comm.dispatch(codes, idx, weights.requires_grad_(), scales=scales, format=POW2)
    assert not sent.x.requires_grad and sent.weights is not None
    sent.weights.nan_to_num().sum().backward()
    assert torch.equal(weights.grad, (idx >= 0).float())
    with pytest.raises(NotImplementedError, match="x is torch.float8_e4m3fn and requires a gradient"):
        comm.dispatch(codes.requires_grad_(), idx, scales=scales, format=POW2)


# ---------------------------------------------------------------------- rejections


def rejections() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Return what is changed in dispatch(x, idx, format=POW2), the error, and its text."""
    codes, scales = quantize(torch.ones(9, HIDDEN), format_of(POW2))
    return {
        "unknown": ({"format": "e5m2/128/pow2"}, ValueError, r"format is 'e5m2/128/pow2'; allowed: '' .*'e4m3/32/mx'"),
        "layout": ({"scales_as": "swizzled/torch"}, ValueError, r"scales_as is 'swizzled/torch'; allowed for format"),
        "unknown layout": ({"scales_as": "diagonal"}, ValueError, r"scales_as is 'diagonal'; allowed .* 'packed'"),
        "wire layout": (
            {"format": f"wire:{POW2}", "scales_as": "rows"}, ValueError, "returns no scales; allowed: ''",
        ),
        "wire and scales": (
            {"format": f"wire:{POW2}", "x": codes, "scales": scales}, ValueError, "quantizes x itself; allowed: none",
        ),
        "scales without format": ({"format": "", "scales": scales}, ValueError, "format is '' and scales are given"),
        "layout without format": ({"format": "", "scales_as": "rows"}, ValueError, "'' and scales_as is 'rows'"),
        "codes without scales": ({"x": codes}, TypeError, "x has dtype torch.float8_e4m3fn; allowed: torch.bfloat16"),
        "scales of numbers": ({"scales": scales}, TypeError, "x has dtype torch.bfloat16, and scales are given"),
        "dtype of scales": ({"x": codes, "scales": scales.double()}, TypeError, "scales has dtype torch.float64"),
        "shape of scales": (
            {"x": codes, "scales": scales[:, :1].contiguous()}, ValueError, r"has shape \(9, 1\); allowed: \[9, 2\]",
        ),
        "scales apart": (
            {"x": codes, "scales": scales.t().contiguous().t()}, ValueError, "scales has strides .*: contiguous",
        ),
        "scales of MX": ({"x": codes, "scales": scales, "format": MX}, TypeError, "allowed: torch.float8_e8m0fnu"),
        "no powers": ({"x": codes, "scales": scales * 3}, ValueError, "takes powers of two, 0 and Inf"),
    }  # fmt: skip


@pytest.mark.parametrize("case", rejections())
def test_rejected_by_name(comm: ep_ops.Communicator, case: str) -> None:
    changed, error, text = rejections()[case]
    x, idx, weights = inputs(9, 0)
    given = {"x": x, "topk_idx": idx, "topk_weights": weights, "format": POW2} | changed
    with pytest.raises(error, match=text):
        comm.dispatch(**given)
    with pytest.raises(error, match=text):
        comm.dispatch(**given, exact=True)
    with pytest.raises(error, match=text):
        comm.dispatch_wait(comm.dispatch_start(**given))
    route, _ = comm.plan(idx)
    given["route"] = route
    del given["topk_idx"]
    with pytest.raises(error, match=text):
        comm.dispatch_planned(**given)
    assert comm.dispatch(x, idx).scales is None  # it goes on


@pytest.mark.parametrize(("name", "hidden", "multiple"), [
    (POW2, 192, 128), (f"wire:{POW2}", 192, 128), ("e4m3/128/fp32", 64, 128), (MX, 48, 32), (ROW, 24, 16),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_rejected(name: str, hidden: int, multiple: int) -> None:
    with communicator(hidden_size=hidden) as comm:
        x, idx = torch.ones(3, hidden).bfloat16(), torch.zeros(3, TOP_K, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"hidden_size is {hidden}; format '{name}' takes multiples of {multiple}"):
            comm.dispatch(x, idx, format=name)
        op = next(each for each in OPERATORS if each.name == "dispatch")  # before ranks meet: nobody waits for this one
        ints = (16, ALIGNMENT, 0, 16, EXPERTS, 1, comm.name)
        with pytest.raises(ValueError, match=f"hidden_size is {hidden}"):
            checks.spec(comm, spec_of(op.arguments(x, None, idx, *ints, format=name)))


def test_float64_rows_have_no_format() -> None:
    with communicator(dtype=torch.float64) as comm:
        x, idx = torch.ones(3, HIDDEN).double(), torch.zeros(3, TOP_K, dtype=torch.int32)
        with pytest.raises(ValueError, match="rows are torch.float64"):
            comm.dispatch(x, idx, format=POW2)
        assert comm.dispatch(x, idx, zeros=False, exact=True).x.dtype == torch.float64


def test_what_the_cute_backend_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that its kernels do not take, before anything runs; it takes every format and layout."""
    with communicator() as comm:
        monkeypatch.setattr(comm, "config", dataclasses.replace(comm.config, backend="cute"))
        x, idx, _ = inputs(5)
        for form in FORMATS.values():
            for layout in ("",) if form.wire else form.layouts:
                comm.dispatch(x, idx, format=form.name, scales_as=layout)
    with communicator(hidden_size=2**16 + 128) as comm:
        monkeypatch.setattr(comm, "config", dataclasses.replace(comm.config, backend="cute"))
        x, idx = torch.ones(3, 2**16 + 128).bfloat16(), torch.zeros(3, TOP_K, dtype=torch.int32)
        with pytest.raises(ValueError, match="hidden_size 65664; allowed on backend 'cute': at most 65536"):
            comm.dispatch(x, idx, format=POW2)


def test_padding_is_cleared_by_default_where_gradients_are_on(comm: ep_ops.Communicator) -> None:
    x, idx, weights = inputs(5)
    sizes = dict(capacity=64, alignment=16)

    def padding(**asked: Any) -> list[Tensor]:
        ways = [comm.dispatch(x, idx, weights, **sizes, **asked)]
        ways.append(comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **sizes, **asked)))
        rows = [sent.x for sent in ways]
        rows += [comm.dispatch_planned(x, ways[0].route, weights, **asked).x]
        rows += [comm.dispatch(x, idx, weights, alignment=16, **asked, exact=True).x]
        expert = ways[0].route.m_indices
        behind = torch.arange(64) >= ways[0].route.offs[-1]
        return [row[(expert < 0)[: row.shape[0]] & ~behind[: row.shape[0]]] for row in rows]

    assert all(rows.numel() and not rows.any() for rows in padding())
    with torch.no_grad():
        assert all(rows.isnan().all() for rows in padding())
        assert not any(rows.any() for rows in padding(zeros=True))
    assert all(rows.isnan().all() for rows in padding(zeros=False))


def test_no_scales_can_be_used_everywhere(comm: ep_ops.Communicator) -> None:
    """The tensor that stands for missing scales is made once, maybe in inference mode, and can be used outside of
    it."""
    x, idx, _ = inputs(5)
    with torch.inference_mode():
        made = NoElements(torch.float32)[torch.device("cpu")]
        assert not made.is_inference() and made.shape == (0,) and made.dtype == torch.float32
    assert comm.dispatch(x.requires_grad_(), idx).scales is None
