"""SwiGLU experts with few rows each, on the CPU: values against fp64, bits that depend on no other row, gradients, and
which GEMMs a layer selects."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import decode_cases
import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from ranks import run_ranks
from segments import Drawn
from test_live_rows import LAYOUTS, UNUSED
from test_live_rows import case as drawn_rows
from test_live_rows import route_of as route_of_rows
from torch import Tensor
from torch.library import opcheck

import ep_ops
from ep_ops.nn import TORCH, Experts, MoELayer, expert_mlp, few_rows_mlp, grouped_mm, quack_mm, swiglu_rows
from ep_ops.nn.gemms import Choice, choose
from ep_ops.records import Route

H, F = 48, 24
DTYPES = (torch.bfloat16, torch.float16)


def route_of(*args: Any, **options: Any) -> Route:
    return route_of_rows(*args, **options)._replace(topk_idx=UNUSED[:, None])


def case(*args: Any, **options: Any) -> tuple[Drawn, Route]:
    of, route = drawn_rows(*args, **options)
    return of, route._replace(topk_idx=UNUSED[:, None])


def weights_of(experts: int, dtype: torch.dtype, transposed: bool = False) -> tuple[Tensor, Tensor]:
    made = (torch.randn(experts, H, 2 * F) * H**-0.5).to(dtype), (torch.randn(experts, F, H) * F**-0.5).to(dtype)
    if transposed:
        return made[0].mT.contiguous().mT, made[1].mT.contiguous().mT
    return made


def expected(x: Tensor, w_in: Tensor, w_out: Tensor, of: Drawn, alignment: int) -> Tensor:
    """fp64 [R, H], NaN where no row is kept. Numbers between the GEMMs have the dtype of x."""
    out = torch.full((of.rows, H), torch.nan, dtype=torch.float64)
    for e, (end, count) in enumerate(zip(of.offs, of.counts, strict=True)):
        begin = end - -(-count // alignment) * alignment
        gate, up = (x[begin : begin + count].double() @ w_in[e].double()).chunk(2, 1)
        inner = (gate / (1 + (-gate).exp()) * up).to(x.dtype)
        out[begin : begin + count] = inner.double() @ w_out[e].double()
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype, layout: str) -> None:
    """Kept rows within rounding, NaN elsewhere; the same bits for both orders of weights."""
    draw = random.Random(fresh_seed())
    torch.manual_seed(draw.getrandbits(31))
    of, route = case(draw, **LAYOUTS[layout])
    x = of.poisoned(H, dtype, draw, 1.0)
    w_in, w_out = weights_of(len(of.counts), dtype)
    got = few_rows_mlp(x, w_in, w_out, route, 1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got[of.kept].double(), expected(x, w_in, w_out, of, route.alignment)[of.kept], rtol=eps, atol=8 * eps
    )
    assert got.dtype == dtype and got[of.padding + of.dead].isnan().all()
    turned = w_in.mT.contiguous().mT, w_out.mT.contiguous().mT
    assert torch.equal(few_rows_mlp(x, *turned, route, 1)[of.kept], got[of.kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_are_its_own(dtype: torch.dtype) -> None:
    draw = random.Random(fresh_seed())
    torch.manual_seed(draw.getrandbits(31))
    of, route = case(draw, experts=3)
    x, weights = of.poisoned(H, dtype, draw, 1.0), weights_of(3, dtype)
    whole = few_rows_mlp(x, *weights, route, 1)
    for e, (end, count) in enumerate(zip(of.offs, of.counts, strict=True)):
        for i in range(count):
            row = end - -(-count // 4) * 4 + i
            counts = [int(e == other) for other in range(3)]
            alone = Drawn(counts, [int(e <= other) for other in range(3)], [0], [], 1)
            one = few_rows_mlp(x[row : row + 1], *weights, route_of(alone, 1), 1)
            assert torch.equal(one[0], whole[row])


def test_gradients() -> None:
    """Gradients are those of the ordinary GEMMs, whatever undefined rows hold. Values have the bits of a call without
    gradients."""
    draw = random.Random(fresh_seed())
    torch.manual_seed(draw.getrandbits(31))
    of, route = case(draw)
    dtype = torch.bfloat16
    x, grad = of.poisoned(H, dtype, draw, 1.0), of.poisoned(H, dtype, draw, 1.0)
    x[of.padding] = grad[of.padding] = 0
    found = []
    for run in (
        lambda x, w_in, w_out: few_rows_mlp(x, w_in, w_out, route, 1),
        lambda x, w_in, w_out: grouped_mm(swiglu_rows(grouped_mm(x, w_in, route.offs), route), w_out, route.offs),
    ):
        torch.manual_seed(3)
        leaves = [leaf.clone().requires_grad_() for leaf in (x, *weights_of(len(of.counts), dtype))]
        with torch.no_grad():
            values = run(*leaves)
        out = run(*leaves)
        assert torch.equal(out[of.kept], values[of.kept])
        found.append(torch.autograd.grad(out, leaves, grad))
    of_one, of_other = found
    assert torch.equal(of_one[0][of.live], of_other[0][of.live])
    assert all(torch.equal(*pair) for pair in zip(of_one[1:], of_other[1:], strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled(dynamic: bool, transposed: bool) -> None:
    """In a compiled graph the operator returns the same bits, with weights in both orders."""
    torch._dynamo.reset()

    def step(x: Tensor, w_in: Tensor, w_out: Tensor, route: Route) -> Tensor:
        return few_rows_mlp(x * 2, w_in, w_out, route, 1)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="inductor" if transposed else "aot_eager")
    draw = random.Random(fresh_seed())
    for _ in range(2):
        of, route = case(draw)
        x, weights = of.poisoned(H, torch.bfloat16, draw, 1.0), weights_of(5, torch.bfloat16, transposed)
        got, want = compiled(x, *weights, route), step(x, *weights, route)
        assert torch.equal(got[of.kept], want[of.kept])


def test_opcheck() -> None:
    """torch's opcheck accepts the operator on rows without undefined values, because it compares all of them."""
    draw = random.Random(fresh_seed())
    of = Drawn([4, 8], [4, 12], list(range(12)), [], 12)
    route = route_of(of)
    x, weights = of.poisoned(H, torch.bfloat16, draw, 1.0), weights_of(2, torch.bfloat16)
    leaves = [leaf.requires_grad_() for leaf in (x, *weights)]
    opcheck(torch.ops.ep.few_rows_mlp.default, (*leaves, route.offs, route.counts, 4, 12, 1, 1))


def test_rejections() -> None:
    draw = random.Random(fresh_seed())
    of, route = case(draw)
    x, (w_in, w_out) = of.poisoned(H, torch.bfloat16, draw), weights_of(5, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x has shape .*; allowed: \[\d+, H\], the rows of the route"):
        few_rows_mlp(x[1:], w_in, w_out, route, 1)
    with pytest.raises(ValueError, match="ranks is 0; allowed: 1 or more"):
        few_rows_mlp(x, w_in, w_out, route, 0)
    with pytest.raises(TypeError, match="x has dtype torch.float32; allowed: torch.bfloat16, torch.float16"):
        few_rows_mlp(x.float(), w_in, w_out, route, 1)
    with pytest.raises(ValueError, match=r"w_in has shape \(4, 48, 48\); allowed: \[5, 48, 2F\]"):
        few_rows_mlp(x, w_in[1:], w_out, route, 1)
    with pytest.raises(ValueError, match=r"w_out has shape \(5, 48, 24\); allowed: \[5, 24, 48\], after w_in"):
        few_rows_mlp(x, w_in, w_out.mT, route, 1)
    with pytest.raises(TypeError, match="w_out has dtype torch.float32; allowed: torch.bfloat16, the dtype of x"):
        few_rows_mlp(x, w_in, w_out.float(), route, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert few_rows_mlp(x, w_in.float(), w_out.float(), route, 1).dtype == torch.bfloat16


# ---------------------------------------------------------------------- layers


def communicator(**options) -> ep_ops.Communicator:
    sizes = dict(num_experts=6, hidden_size=H, top_k=2, max_tokens_per_rank=24, device="cpu", backend="reference")
    return ep_ops.Communicator(**{"dtype": torch.bfloat16, **sizes, **options})


def tokens(comm: ep_ops.Communicator, count: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(256, H, generator=draw).to(comm.dtype)
    weights, ids = torch.rand(256, 6, generator=draw).topk(2)
    return x[:count], ids[:count], weights[:count]


BATCHES = (1, 7, 64, 256)


def outputs() -> list[Tensor]:
    """Return the outputs of a layer with "memory": tokens of this rank in batches of several sizes, without and with
    gradients."""
    with communicator(alignment=4, max_tokens_per_rank=BATCHES[-1]) as comm:
        layer = Experts(comm, F, gemms="memory", seed=3)
        found = []
        for count in BATCHES:
            with torch.no_grad():
                found.append(layer(*tokens(comm, count), max_tokens=count))
        found.append(layer(*tokens(comm, BATCHES[-1])).detach())
        *_, done = layer.steps(*tokens(comm, 64))
        found.append(done.out.detach())
        return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bits_of_a_token_are_its_own(ranks: int) -> None:
    """A token's bits are the same in every batch, with gradients and without, and on whichever rank it is. Of 4 ranks
    one has no expert."""
    results = run_ranks(ranks, outputs) if ranks > 1 else [outputs()]
    whole = results[0][BATCHES.index(256)]
    for found in results:
        for out in found:
            assert out.isfinite().all() and torch.equal(out, whole[: out.shape[0]])


def checked(seed: int) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with decode_cases.communicator("reference", H, ranks, device="cpu") as comm:
        decode_cases.check(comm, F, seed, share=1)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.drawn), 4])
def test_layers_of_all_sizes(ranks: int) -> None:
    """0 to 256 tokens, at the borders of tiles; experts and ranks without rows, or with all of them; alignments and
    layouts; against fp64."""
    seed = fresh_seed()
    run_ranks(ranks, checked, seed) if ranks > 1 else checked(seed)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layer(dynamic: bool) -> None:
    """A layer compiles to one graph, without gradients and with them, and returns the same bits and gradients as an
    eager one."""
    torch._dynamo.reset()
    with communicator(alignment=4) as comm:
        layer = Experts(comm, F, gemms="memory", seed=3)
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        with torch.no_grad():
            for count in (3, 7):
                given = tokens(comm, count)
                assert torch.equal(compiled(*given, max_tokens=8), layer(*given, max_tokens=8))
        x, ids, weights = tokens(comm, 24)
        found = []
        for run in (layer, compiled):
            leaves = [x.clone().requires_grad_(), *layer.parameters()]
            out = run(leaves[0], ids, weights)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_which_gemms_run() -> None:
    """Names, sizes and gradients select the GEMMs; "auto" selects few-row GEMMs on the backend of kernels alone."""
    with communicator() as comm:
        assert choose(comm, "auto", F) == choose(comm, "torch", F) == choose(comm, TORCH, F) == Choice(TORCH)
        assert choose(comm, "quack", F) == Choice(quack_mm.GEMMS)
        memory = choose(comm, "memory", F)
        x, ids, weights = tokens(comm, 24)
        w_in, w_out = (w.requires_grad_() for w in weights_of(6, torch.bfloat16))
        received = comm.dispatch(x, ids, weights)
        assert memory.runs_few_rows(received, w_in, w_out)
        auto = memory._replace(tokens=23, gradients=False)
        assert not auto.runs_few_rows(received, w_in, w_out)
        small = comm.dispatch(x[:4], ids[:4], weights[:4], max_tokens=23)
        assert not auto.runs_few_rows(small, w_in, w_out)
        with torch.no_grad():
            assert auto.runs_few_rows(small, w_in, w_out) and not auto.runs_few_rows(received, w_in, w_out)
        assert [str(one) for one in (memory, auto, choose(comm, "quack", F), Choice(TORCH._replace(late=True)))] == [
            "memory", "memory without gradients up to max_tokens=23, else torch", "quack", "given GEMMs",
        ]  # fmt: skip


class Cute:
    """A communicator whose ranks run kernels, as far as `choose` looks at it."""

    class backend:
        name = "cute"

    num_experts, top_k, world_size, hidden_size, dtype = 128, 8, 2, 2048, torch.bfloat16


def test_what_auto_selects_on_gpus() -> None:
    """The kernels for few rows up to 64 rows an expert on average; PyTorch's GEMM for what kernels do not accept."""
    comm = Cute()
    assert choose(comm, "auto", 768) == Choice(TORCH, 512, False, 2)
    assert choose(comm, "memory", 768) == Choice(TORCH, sys.maxsize, True, 2), "the ranks bound the rows of an expert"
    assert choose(comm, "auto", 768, "e4m3/row/fp32") == choose(comm, "auto", 764) == Choice(TORCH)
    comm.dtype = torch.float32
    assert choose(comm, "auto", 768) == Choice(TORCH)


def test_what_layers_reject(caplog: pytest.LogCaptureFixture) -> None:
    with communicator() as comm:
        with pytest.raises(ValueError, match="gemms is 'fast'; allowed: 'auto', 'torch', 'quack', 'memory', or ep_ops"):
            MoELayer(comm, F, gemms="fast")
        with pytest.raises(TypeError, match="gemms is a int; allowed: one of auto, torch, quack, memory, or"):
            Experts(comm, F, gemms=3)
        with pytest.raises(ValueError, match="gemms is 'memory', but hidden_size is 48 and the experts' width is 20"):
            Experts(comm, 20, gemms="memory")
        with pytest.raises(ValueError, match="gemms is 'memory', but format is 'e4m3/row/fp32', whose rows"):
            Experts(comm, F, gemms="memory", format="e4m3/row/fp32")
        with pytest.raises(ValueError, match="gemms is 'fast'; allowed"):
            expert_mlp(comm, *tokens(comm, 3), *weights_of(6, comm.dtype), gemms="fast")
        with caplog.at_level(logging.INFO, logger="ep_ops"):
            layer = MoELayer(comm, F, gemms="memory")
        assert "gemms='memory' selects memory" in caplog.text
        out = layer(torch.randn(5, H).to(comm.dtype))
        out.float().sum().backward()
        assert layer.experts.w_in.grad is not None and layer.experts.w_in.grad.isfinite().all()
    with communicator(dtype=torch.float32) as comm:
        with pytest.raises(ValueError, match="gemms is 'memory', but the communicator's dtype is torch.float32"):
            Experts(comm, F, gemms="memory")
