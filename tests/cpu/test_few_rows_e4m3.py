"""SwiGLU experts with e4m3 weights and few rows each, on the CPU: values against fp64 within the stated bound, bits
that depend on no other row, layers, and what is rejected."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from e4m3_experts import assert_right, weights_of
from ranks import run_ranks
from segments import Drawn
from test_few_rows import case, route_of
from test_live_rows import LAYOUTS
from torch import Tensor
from torch.library import opcheck

import ep_ops
from ep_ops import formats
from ep_ops.nn import few_rows_mlp_e4m3
from ep_ops.records import Route

H, F = 256, 128
FORM = formats.format_of("e4m3/128/fp32")


def quantized(seed: int, dtype: torch.dtype = torch.bfloat16, **options: int) -> tuple[Drawn, Route, Tensor, Tensor]:
    """Rows that are drawn, their route, codes and scales. Rows that are not kept are NaN."""
    draw = random.Random(seed)
    of, route = case(draw, **options)
    return of, route, *formats.quantize(of.poisoned(H, dtype, draw, 1.0), FORM)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(layout: str, powers: bool) -> None:
    """Kept rows within the stated bound, NaN elsewhere; scales of weights in fp32, and as powers of two in bytes."""
    seed = fresh_seed()
    of, route, x, scales = quantized(seed, **LAYOUTS[layout])
    weights = weights_of(len(of.counts), H, F, seed, powers=powers)
    got = few_rows_mlp_e4m3(x, scales, *weights, route, 1)
    assert_right(got, x, scales, weights, of, route.alignment)
    assert got[of.padding + of.dead].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_are_not_quantized(dtype: torch.dtype) -> None:
    """Rows that are not quantized yet are quantized as a dispatch quantizes them."""
    seed = fresh_seed()
    draw = random.Random(seed)
    of, route = case(draw)
    x, weights = of.poisoned(H, dtype, draw, 1.0), weights_of(5, H, F, seed)
    got = few_rows_mlp_e4m3(x, None, *weights, route, 1)
    assert torch.equal(got[of.kept], few_rows_mlp_e4m3(*formats.quantize(x, FORM), *weights, route, 1)[of.kept])


def test_bits_of_a_row_are_its_own() -> None:
    seed = fresh_seed()
    of, route, x, scales = quantized(seed, experts=3)
    weights = weights_of(3, H, F, seed)
    whole = few_rows_mlp_e4m3(x, scales, *weights, route, 1)
    for e, (end, count) in enumerate(zip(of.offs, of.counts, strict=True)):
        for i in range(count):
            row = end - -(-count // 4) * 4 + i
            alone = Drawn([int(e == o) for o in range(3)], [int(e <= o) for o in range(3)], [0], [], 1)
            one = few_rows_mlp_e4m3(x[row : row + 1], scales[row : row + 1], *weights, route_of(alone, 1), 1)
            assert torch.equal(one[0], whole[row])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """A compiled graph returns the same bits."""
    torch._dynamo.reset()
    compiled = torch.compile(few_rows_mlp_e4m3, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for _ in range(2):
        of, route, x, scales = quantized(fresh_seed())
        weights = weights_of(5, H, F, 3)
        want = few_rows_mlp_e4m3(x, scales, *weights, route, 1)
        assert torch.equal(compiled(x, scales, *weights, route, 1)[of.kept], want[of.kept])


def test_opcheck() -> None:
    """With nothing undefined, since it is compared."""
    draw = random.Random(fresh_seed())
    of = Drawn([4, 8], [4, 12], list(range(12)), [], 12)
    route = route_of(of)
    x, scales = formats.quantize(of.poisoned(H, torch.bfloat16, draw, 1.0), FORM)
    given = (x, scales, *weights_of(2, H, F, 3), route.offs, route.counts, 4, 12, 1, 1)
    # Without test_schema, which compares inputs of a dtype that PyTorch cannot compare.
    opcheck(
        torch.ops.ep.few_rows_mlp_e4m3.default, given,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


def outputs(batches: tuple[int, ...]) -> list[Tensor]:
    """Return results of a layer that sends rows in e4m3: of the first tokens of a batch, the same on all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with ep_ops.Communicator(
        num_experts=8, hidden_size=H, top_k=2, max_tokens_per_rank=256, dtype=torch.bfloat16, backend="reference",
        device="cpu",
    ) as comm:  # fmt: skip
        draw = torch.Generator().manual_seed(7)
        x = torch.randn(batches[-1], H, generator=draw).bfloat16()
        weights, ids = torch.rand(batches[-1], 8, generator=draw).topk(2)
        first = comm.first_local_expert
        own = [w[first : first + comm.num_local_experts] for w in weights_of(8, H, F, 3)]
        found = []
        for tokens in batches:
            got = comm.dispatch(
                x[:tokens], ids[:tokens], weights[:tokens], max_tokens=tokens, format=FORM.name, scales_as="rows"
            )
            y = few_rows_mlp_e4m3(got.x, got.scales, *own, got.route, ranks)
            found.append(comm.combine(y, got.route, got.weights))
        return found


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.drawn)])
def test_layers(ranks: int) -> None:
    """A token has the same bits in every batch and on every rank."""
    batches = (1, 7, 64)
    results = run_ranks(ranks, outputs, batches) if ranks > 1 else [outputs(batches)]
    whole = results[0][-1]
    assert whole.isfinite().all()
    for found in results:
        for out in found:
            assert torch.equal(out, whole[: out.shape[0]])


def test_rejections() -> None:
    of, route, x, scales = quantized(3)
    w_in, in_scales, w_out, out_scales = given = weights_of(5, H, F, 3)
    with pytest.raises(ValueError, match=r"x has shape .*; allowed: \[\d+, H\], the rows of the route, with H a multi"):
        few_rows_mlp_e4m3(x[:, :200], scales, *given, route, 1)
    with pytest.raises(ValueError, match="ranks is 0; allowed: 1 or more"):
        few_rows_mlp_e4m3(x, scales, *given, route, 0)
    with pytest.raises(ValueError, match=r"w_in has shape \(5, 128, 256\); allowed: \[5, 2F, 256\], with F a multiple"):
        few_rows_mlp_e4m3(x, scales, w_in[:, 128:], in_scales, w_out, out_scales, route, 1)
    with pytest.raises(ValueError, match=r"w_out has shape \(5, 128, 256\); allowed: \(5, 256, 128\), after w_in"):
        few_rows_mlp_e4m3(x, scales, w_in, in_scales, w_out.mT, out_scales, route, 1)
    with pytest.raises(ValueError, match=r"in_scales has shape \(5, 2, 1\); allowed: \(5, 2, 2\)"):
        few_rows_mlp_e4m3(x, scales, w_in, in_scales[..., :1], w_out, out_scales, route, 1)
    with pytest.raises(ValueError, match=r"scales have shape .*; allowed: \(\d+, 2\), after x"):
        few_rows_mlp_e4m3(x, scales[:, :1], *given, route, 1)
    with pytest.raises(TypeError, match="w_in has dtype torch.bfloat16; allowed: torch.float8_e4m3fn"):
        few_rows_mlp_e4m3(x, scales, w_in.bfloat16(), in_scales, w_out, out_scales, route, 1)
    with pytest.raises(TypeError, match="x without scales has dtype torch.float8_e4m3fn; allowed: torch.bfloat16"):
        few_rows_mlp_e4m3(x, None, *given, route, 1)
    with pytest.raises(TypeError, match="x with scales has dtype torch.bfloat16; allowed: torch.float8_e4m3fn"):
        few_rows_mlp_e4m3(x.bfloat16(), scales, *given, route, 1)
    with pytest.raises(NotImplementedError, match="few_rows_mlp_e4m3 has no gradient; x must not require one"):
        few_rows_mlp_e4m3(x.bfloat16().requires_grad_(), None, *given, route, 1)
