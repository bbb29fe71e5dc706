"""A combine whose sums travel in a format, on the reference backend, against plain loops that quantize number by number
(tests/quantized.py)."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import cases
import moe_cases
import pytest
import quantized
import torch
import torch.distributed as dist
import toy
from cases import RouteCase
from operate import On, Sizes
from ranks import run_ranks
from test_formats_model import MX, POW2, TOP_K, communicator, inputs
from test_operators_registration import OPS, arguments
from torch import Tensor
from torch.library import opcheck

import ep_ops
from ep_ops import checks
from ep_ops.bench.operators import MAX_ERROR, Calls
from ep_ops.bench.workloads import ALIGNMENT, Workload
from ep_ops.nn.expert_mlp import expert_rows
from ep_ops.nn.gemms import choose
from ep_ops.nn.late import SentTokens
from ep_ops.nn.token_major import How, Rows
from ep_ops.records import Route
from ep_ops.specs import spec_of
from meta_kernels.formats import COMBINE_FORMATS

HIDDEN = {f"wire:{MX}": 64, f"wire:{POW2}": 128}
"""Numbers in a row, by format."""
ROUTES = ("random", "repeated_experts", "over_capacity", "no_tokens_on_last_rank", "padded_over")
WIRE = f"wire:{MX}"


def arrived(sums: Tensor, format: str) -> Tensor:
    """Return the values that arrive for a sum [H]."""
    return quantized.dequantized(
        *quantized.quantized(sums[None], format.removeprefix("wire:e4m3/")), torch.float32
    ).squeeze(0)


@dataclasses.dataclass
class Given:
    """Inputs of one rank: rows, their weights, and what is added last."""

    y: Tensor
    weights: Tensor
    residual: Tensor


def drawn(case: RouteCase, dtype: torch.dtype, seed: int, hidden: int) -> list[Given]:
    """Rows of all magnitudes: some sums of fp16 rows overflow when they are rounded, some cancel, and some hold zeros,
    an Inf or a NaN."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        spread = torch.randint(-20, 15, (shape[0], 1), generator=draw).float().exp2()
        rows = spread * torch.randn(*shape, generator=draw)
        rows[torch.rand(shape[0], generator=draw) < 0.1] = 0
        rows[torch.rand(shape[0], generator=draw) < 0.1, :32] = -0.0
        for special in (torch.inf, torch.nan):
            row = torch.rand(shape[0], generator=draw) < 0.1
            rows[row, torch.randint(shape[1], (1,), generator=draw)] = special
        rows[1:][torch.rand(max(shape[0] - 1, 0), generator=draw) < 0.2] = -rows[:1]
        return rows.to(dtype)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        Given(noise(rows, hidden), torch.randn(rows, generator=draw, dtype=exact), noise(idx.shape[0], hidden))
        for rows, idx in zip(case.capacity, case.topk_idx, strict=True)
    ]


def on_routes(made: list[tuple[RouteCase, list[Given]]], size: int | None, format: str) -> list[dict[str, Tensor]]:
    """Return the results of one rank's combines for each route."""
    rank, found = dist.get_rank(), []
    for case, given in made:
        mine, idx = given[rank], case.topk_idx[rank]
        shape = dict(hidden_size=mine.y.shape[1], dtype=mine.y.dtype, domain_size=size)
        with ep_ops.Communicator(**case.sizes, **shape, backend="reference", device="cpu") as comm:
            sizes = Sizes(case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens, case.layout(rank))
            planned = On(comm.backend).plan(idx, sizes)[:4]
            route = Route(idx, *planned, case.alignment, case.capacity[rank], case.max_tokens)
            started = comm.combine_start(mine.y, route, mine.weights, format=format)
            found.append(
                {
                    "split": comm.combine_wait(started),
                    "plain": comm.combine(mine.y, route, format=format),
                    "residual": comm.combine(mine.y, route, mine.weights, residual=mine.residual, format=format),
                }
            )
    return found


def same(got: Tensor, want: Tensor) -> bool:
    """To the bit; NaN is NaN."""
    ints = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.shape == want.shape and bool(((got.view(ints) == want.view(ints)) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize(
    ("world_size", "size", "dtype", "format"),
    [
        (1, None, torch.float16, WIRE), (2, None, torch.bfloat16, WIRE), (2, 1, torch.float32, WIRE),
        (4, None, torch.float16, WIRE), (4, 2, torch.bfloat16, WIRE), (4, 1, torch.bfloat16, WIRE),
        (1, None, torch.bfloat16, f"wire:{POW2}"), (4, 2, torch.float32, f"wire:{POW2}"),
    ],
)  # fmt: skip
def test_sums(world_size: int, size: int | None, dtype: torch.dtype, format: str) -> None:
    """Domains of one rank each give the bits of one domain: what is quantized again stays as it is."""
    seed = cases.fresh_seed()
    chosen = [cases.route_cases(world_size, seed)[name] for name in ROUTES]
    made = [(case, drawn(case, dtype, seed, HIDDEN[format])) for case in chosen]
    domains = None if size in (None, 1) else tuple(itertools.zip_longest(*[iter(range(world_size))] * size))
    results = run_ranks(world_size, on_routes, made, size, format)
    for number, (case, given) in enumerate(made):
        plans = cases.expected_plan(case)
        y, weights = [one.y for one in given], [one.weights for one in given]
        sent = functools.partial(arrived, format=format)
        plain = cases.expected_combine(case, plans, y, None, None, domains, sent)
        weighted = cases.expected_combine(case, plans, y, weights, None, domains, sent)
        added = cases.expected_combine(case, plans, y, weights, [one.residual for one in given], domains, sent)
        wanted = {"split": weighted, "plain": plain, "residual": added}
        for rank, found in enumerate(results):
            for what, out in found[number].items():
                assert same(out, wanted[what][rank]), f"{what} of rank {rank}, route {case.name}"


def of_benchmark() -> dict[str, float]:
    sizes = Workload(tokens=16, hidden=128, experts=8, top_k=3)
    with ep_ops.Communicator(
        num_experts=sizes.experts, hidden_size=sizes.hidden, top_k=sizes.top_k, max_tokens_per_rank=sizes.tokens,
        alignment=ALIGNMENT, dtype=sizes.torch_dtype, device="cpu", domain_size=2,
    ) as comm:  # fmt: skip
        return Calls(comm, sizes).errors()


def test_what_the_benchmark_expects() -> None:
    """The benchmark expects what arrives of quantized sums, also across domains, where sums are quantized twice."""
    for errors in run_ranks(4, of_benchmark):
        assert max(errors.values()) <= MAX_ERROR and {"combine_fp8", "combine_token_major_fp8"} <= errors.keys()


def by_token(format: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of token-major rows, and the rows and where they belong."""
    with communicator(max_tokens_per_rank=16) as comm:
        x, idx, weights = inputs(9 - comm.rank, seed + comm.rank)
        sent = comm.dispatch(x, idx, weights, layout="token_major")
        y = torch.where(sent.route.recv_from[:, None] >= 0, sent.x * 3, torch.nan)
        return comm.combine(y, sent.route, format=format), x, idx


@pytest.mark.parametrize("format", [WIRE])
def test_token_major(format: str) -> None:
    """One row for each rank that a token reaches, which all have x: as many times what arrives of it."""
    for out, x, idx in run_ranks(2, by_token, format, cases.fresh_seed()):
        for token, experts in enumerate(idx.tolist()):
            reached = len({expert // 2 for expert in experts if expert >= 0})
            one = arrived((x[token] * 3).float(), format)
            assert same(out[token], sum([one] * reached, torch.zeros_like(one)).bfloat16())


def disagreeing() -> str:
    y, idx = torch.ones(32, 256).bfloat16(), torch.zeros(3, TOP_K).int()
    with communicator() as comm:
        route, _ = comm.plan(idx, capacity=32)
        with pytest.raises(ValueError, match="ranks disagree on format") as error:
            comm.combine(y, route, format=WIRE if comm.rank else "")
        comm.combine(y, route, format=WIRE)
        return str(error.value)


def test_ranks_that_disagree() -> None:
    """The error is raised on all ranks, and the communicator remains usable."""
    assert (
        run_ranks(2, disagreeing)
        == ["combine: ranks disagree on format: ['', 'e4m3/32/mx'] by rank; all ranks must pass the same"] * 2
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("grad_format", ["", f"wire:{POW2}"])
def test_gradients_go_straight_through(split: bool, grad_format: str) -> None:
    """Gradients of a combine are those of unquantized sums; what backward sends follows ``grad_format`` alone."""
    if split and grad_format:
        return
    with communicator() as comm:
        x, idx, weights = inputs(7)
        sent, found, sums = comm.dispatch(x, idx, weights), [], []
        assert sent.weights is not None
        rows = torch.where((sent.route.recv_from >= 0)[:, None], sent.x, 0)
        for format in ("", WIRE):
            y, by, residual = (t.clone().requires_grad_() for t in (rows, sent.weights, x))
            if split:
                out = comm.combine_wait(comm.combine_start(y, sent.route, by, format=format))
            else:
                out = comm.combine(y, sent.route, by, residual=residual, format=format, grad_format=grad_format)
            out.backward(x)
            found.append((y.grad, by.grad, residual.grad))
            sums.append(out)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(*sums), "sums travel as they are"


def _step(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    sent = comm.dispatch(x, idx, weights)
    rows = torch.where((sent.route.recv_from >= 0)[:, None], sent.x, 0)
    out = comm.combine(rows * 2, sent.route, sent.weights, format=WIRE)
    return out + comm.combine_wait(comm.combine_start(rows * 3, sent.route, sent.weights, format=WIRE))


def test_compiled() -> None:
    """One graph, the same numbers as eager code."""
    torch._dynamo.reset()
    with communicator() as comm:
        x, idx, weights = inputs(7)
        found = []
        for run in (_step, torch.compile(_step, backend="aot_eager", fullgraph=True)):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = run(comm, leaves[0], idx, leaves[1])
            out.backward(x)
            found.append([out, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_exported() -> None:
    """A program that was exported has the format."""

    class Step(torch.nn.Module):
        def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            sent = comm.dispatch(x, idx, weights)
            return comm.combine(torch.where((sent.route.recv_from >= 0)[:, None], sent.x, 0), sent.route, format=WIRE)

    with communicator() as comm, torch.no_grad():
        given = inputs(7)
        torch.testing.assert_close(torch.export.export(Step(), given).module()(*given), Step()(*given), rtol=0, atol=0)


@pytest.mark.parametrize("split", [False, True])
def test_layer(split: bool) -> None:
    """A layer's sums travel in its ``combine_format``, in split operations too; its gradients are those of a layer
    without one."""
    found, grads = [], []
    with communicator() as comm:
        x = inputs(7)[0]
        for format in (WIRE, ""):
            layer = ep_ops.nn.MoELayer(comm, 32, combine_format=format)
            given = x.clone().requires_grad_()
            out = next(filter(torch.is_tensor, layer.steps(given))) if split else layer(given)
            out.float().sum().backward()
            found.append(out)
            grads.append([given.grad, *(weight.grad for weight in layer.parameters())])
        idx, weights, _ = layer.router(x)
        sent = comm.dispatch(x, idx, weights)
        w_in, w_out = (layer.experts.local_weight(name) for name in ("w_in", "w_out"))
        tokens, how = SentTokens(comm, x, weights), How(Rows())
        y, *_ = expert_rows(sent, w_in, w_out, choose(comm, layer.experts.gemms, 32), tokens, how)
        for out, format in zip(found, (WIRE, ""), strict=True):
            assert same(out, comm.combine(y, sent.route, sent.weights, format=format))
        torch.testing.assert_close(*grads, rtol=0, atol=0)
        assert not torch.equal(*found)
        with pytest.raises(ValueError, match=f"combine_format is '{MX}'; allowed for a combine: ''"):
            ep_ops.nn.MoELayer(comm, 32, combine_format=MX)
    with communicator(hidden_size=96) as comm:
        for name in ("format", "combine_format"):
            with pytest.raises(ValueError, match=f"hidden_size is 96; format 'wire:{POW2}' takes multiples"):
                ep_ops.nn.Experts(comm, 32, **{name: f"wire:{POW2}"})


@pytest.mark.parametrize("overlap", [False, True])
def test_moe_communicator(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Combines of a MoECommunicator have its format, statistics count its bytes, and its kernels are compiled ahead."""
    given, asked = moe_cases.drawn(0, 0, 9), []
    with moe_cases.communicator(combine_format=WIRE, overlap=overlap, statistics=True) as moe, torch.no_grad():
        output, handle = moe.dispatch(given.x, given.ids, given.weights)
        y = torch.where((handle.route.recv_from >= 0)[:, None], output.x / 3, 0)
        got = moe.combine_async(y, handle).wait() if overlap else moe.combine(y, handle)
        copies = int((given.ids >= 0).any(1).sum())
        assert moe.comm.statistics().returned.tolist() == [copies * (128 + 4)]
        assert same(got, moe.comm.combine(y, handle.route, handle.weights, format=WIRE))
        assert not torch.equal(got, moe.comm.combine(y, handle.route, handle.weights))
        monkeypatch.setattr(moe.comm, "warmup", asked.extend)
        moe.warmup()
    assert asked == [(WIRE, "")]


@pytest.mark.parametrize("name", ["combine", "combine_start", "combine_wait"])
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "HIDDEN", 32)
    with toy.communicator(strict=False) as comm:
        given = arguments(comm, name, "")
        assert OPS[name].arguments._fields[-1] == "format"
        opcheck(OPS[name].overload, (*given[:-1], WIRE))


def test_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators name the allowed formats; the checks accept an allowed format on backend cute too."""
    y, idx = torch.ones(32, 256).bfloat16(), torch.zeros(3, TOP_K).int()
    allowed = "allowed for a combine: '' (sums are sent unquantized), " + ", ".join(map(repr, COMBINE_FORMATS))
    with communicator() as comm:
        route, _ = comm.plan(idx, capacity=32)
        for name in (MX, POW2, "wire:e5m2", "wire:e4m3/128/fp32", "wire:e4m3/row/fp32"):
            for run in (comm.combine, comm.combine_start):
                with pytest.raises(ValueError) as error:
                    run(y, route, format=name)
                assert f"format is {name!r}; {allowed}" in str(error.value)
        with pytest.raises(TypeError, match="format is None; allowed: a str"):
            comm.combine(y, route, format=None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="combine_gathered got unknown arguments format"):
            comm.combine_gathered(y, route, format=WIRE)  # type: ignore[call-arg]
        monkeypatch.setattr(comm, "config", dataclasses.replace(comm.config, backend="cute"))
        for operator in ("combine", "combine_start"):
            given = OPS[operator].arguments(y, None, *route.tensors, *route.ints, comm.name, format=WIRE)
            checks.combine(comm, given)  # type: ignore[arg-type]
            checks.spec(comm, spec_of(given))  # type: ignore[arg-type]
    with communicator(dtype=torch.float64) as comm:
        route, _ = comm.plan(idx, capacity=32)
        with pytest.raises(ValueError, match="format is 'wire:e4m3/32/mx', and rows are torch.float64"):
            comm.combine(y.double(), route, format=WIRE)
    with communicator(hidden_size=48) as comm:
        route, _ = comm.plan(idx, capacity=32)
        with pytest.raises(ValueError, match="hidden_size is 48; format 'wire:e4m3/32/mx' takes multiples of 32"):
            comm.combine(y[:, :48].contiguous(), route, format=WIRE)


def test_torchao_quantizes_the_sums_alike():
    """On one rank what arrives of a sum is torchao's MXFP8 of it."""
    pytest.importorskip("torchao.prototype.mx_formats", reason="needs torchao, whose numbers these are")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    tokens, hidden, experts = 16, 7168, 8
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    with ep_ops.Communicator(
        num_experts=experts, hidden_size=hidden, top_k=TOP_K, max_tokens_per_rank=tokens, dtype=torch.float32,
        backend="reference",
    ) as comm:  # fmt: skip
        idx = torch.rand(tokens, experts, generator=draw).topk(TOP_K).indices.int()
        sent = comm.dispatch(torch.zeros(tokens, hidden), idx, torch.rand(tokens, TOP_K, generator=draw))
        y = torch.randn(sent.x.shape, generator=draw) * torch.randn(sent.x.shape[0], 1, generator=draw).exp()
        exact = comm.combine(y, sent.route, sent.weights)
        out = comm.combine(y, sent.route, sent.weights, format=WIRE)
    scales, codes = to_mx(exact, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    powers = (scales.view(torch.uint8).float() - 127).exp2()
    assert torch.equal(out, (codes.float().view(tokens, -1, 32) * powers.view(tokens, -1, 1)).flatten(1))
