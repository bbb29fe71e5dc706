"""SwiGLU experts with few rows each: kernels beside fp64, bits that depend on no other row, what is captured and
compiled, and whole layers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import decode_cases
import e4m3_experts
import pytest
import torch
from operators import make_comm, ranks
from segments import Drawn
from sharing import TURNS, few_processes
from test_live_rows import drawn, on_cpu
from torch import Tensor

from ep_ops import formats
from ep_ops.nn import Experts, few_rows_mlp, few_rows_mlp_e4m3
from ep_ops.nn.gemms import choose
from ep_ops.records import Route

DTYPES = (torch.bfloat16, torch.float16)
SIZES = ((72, 40, 8), (256, 136, 30), (1024, 768, 200))
"""Hidden size and width, with a tail of K and of columns or without, and a bound on tokens, which selects tiles."""
LAYOUTS = {"flat": {}, "slots": {"slots": 40}, "unpadded": {"alignment": 1}, "many": {"experts": 150},
           "more": {"most": 150, "experts": 3}}  # fmt: skip


VALUES = [*((DTYPES[0], *sizes) for sizes in SIZES), (DTYPES[1], *SIZES[0])]
BOUNDS = (1, 7, 12, 20, 40, 80, 256)
"""Bounds on tokens that select all tiles."""
TOP_K = 4
LAYER_TOKENS = (0, 1, 7, 64, 256)
LAYER_EXPERTS = 6
BORDERS_WIDTH = 136
E4M3 = (384, 128), (512, 256)
"""Hidden size and width: K ends within a stage, or at the end of one."""
E4M3_FORMAT = "e4m3/128/fp32"
E4M3_LAYOUTS = {**LAYOUTS, "many": {"experts": 40}}


def config(world_size: int) -> dict[str, Any]:
    return dict(num_experts=LAYER_EXPERTS * world_size, hidden_size=256, top_k=3, max_tokens_per_rank=256)


def kernels(world_size: int) -> list[Any]:
    """Return the kernels of these tests that need no communicator, for precompile.py."""
    from ep_ops.backends.cute.local_kernels import Share, few_rows_e4m3_kernels, few_rows_kernels
    from ep_ops.backends.cute.sizing import DTYPES as NAMES

    bf16, fp16 = (NAMES[dtype] for dtype in DTYPES)
    sizes = [(e, hidden, width, NAMES[dtype], tokens) for dtype, hidden, width, tokens in VALUES for e in (5, 150, 3)]
    sizes += [(5, 72, 40, name, 8) for name in (bf16, fp16)]
    sizes += [(5, 512, 384, bf16, tokens) for tokens in BOUNDS]
    sizes += [(5, 256, 128, bf16, tokens) for tokens in (8, 12)]
    shares = [(given, Share(tokens, TOP_K, 1)) for *given, tokens in sizes]
    layer = (LAYER_EXPERTS, 256, 128, bf16)
    shares += [(layer, Share(max(tokens, 1), 3, world_size)) for tokens in LAYER_TOKENS]
    layer = (decode_cases.EACH, 256, BORDERS_WIDTH, bf16)
    shares += [(layer, Share(max(tokens, 1), decode_cases.TOP_K, world_size)) for tokens in decode_cases.TOKENS]
    found = [
        kernel
        for given, share in shares
        for transposed in (False, True)
        for kernel in few_rows_kernels(*given, share, (transposed, transposed))
    ]
    shares = [((e, *sizes), Share(t, TOP_K, 1)) for e in (5, 40, 3) for sizes in E4M3 for t in (8, 30)]
    shares += [((5, *E4M3[0]), Share(tokens, TOP_K, 1)) for tokens in BOUNDS]
    shares += [((LAYER_EXPERTS, 256, 128), Share(tokens, 3, world_size)) for tokens in LAYER_TOKENS if tokens]
    return found + [kernel for given, share in shares for kernel in few_rows_e4m3_kernels(*given, share)]


def case(draw: random.Random, tokens: int, **options: int) -> tuple[Drawn, Route]:
    """`tokens`: the bound on the tokens of a rank, which selects tiles."""
    of, route = drawn(draw, **options)
    return of, route._replace(max_tokens=tokens, topk_idx=torch.zeros(1, TOP_K, dtype=torch.int32, device="cuda"))


def weights_of(experts: int, hidden: int, width: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = (experts, hidden, 2 * width), (experts, width, hidden)
    return [(torch.randn(shape, generator=generator, device="cuda") * shape[1] ** -0.5).to(dtype) for shape in shapes]


def turned(weights: list[Tensor]) -> list[Tensor]:
    """The same, in the other order in memory."""
    return [w.mT.contiguous().mT for w in weights]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "hidden", "width", "tokens"), VALUES)
def test_values(dtype, hidden, width, tokens, layout, seed):
    """Values equal the definition on the CPU. Rows that nobody may read hold NaN, and weights of experts without
    rows."""
    draw = random.Random(seed)
    of, route = case(draw, tokens, **LAYOUTS[layout])
    x = of.poisoned(hidden, dtype, draw, 1.0).cuda()
    weights = weights_of(len(of.counts), hidden, width, dtype, seed)
    for w in weights:
        w[(torch.tensor(of.counts) == 0).cuda()] = torch.nan
    got = few_rows_mlp(x, *weights, route, 1)
    assert torch.equal(few_rows_mlp(x, *turned(weights), route, 1)[of.kept], got[of.kept])
    exact = x[of.kept].double()
    begin = 0
    for e, (end, count) in enumerate(zip(of.offs, of.counts, strict=True)):
        gate, up = (exact[begin : begin + count] @ weights[0][e].double()).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        want = inner @ weights[1][e].double()
        first = end - -(-count // route.alignment) * route.alignment
        rows = got[first : first + count].double()
        eps = torch.finfo(dtype).eps
        assert ((rows - want).abs() <= 2 * eps * want.abs() + 4 * eps * inner.norm(dim=1, keepdim=True)).all()
        begin += count
    assert begin == len(of.kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_written(dtype, seed):
    """Rows that are not kept stay as they are in memory."""
    from ep_ops.backends.cute.local_kernels import Share, few_rows

    draw = random.Random(seed)
    of, route = case(draw, 8, behind=20)
    x, weights = of.poisoned(72, dtype, draw).cuda(), weights_of(len(of.counts), 72, 40, dtype, seed)
    out = torch.full((of.rows, 72), torch.nan, dtype=dtype, device="cuda")
    few_rows(x, *weights, out, route.segments, Share(8, TOP_K, 1))
    others = torch.ones(of.rows, dtype=torch.bool, device="cuda")
    others[of.kept] = False
    assert out[others].isnan().all() and not out[~others].isnan().any()


def test_bits_do_not_depend_on_tiles(seed):
    """The bits of a row are the same for all sizes that select tiles, and for the row alone."""
    draw = random.Random(seed)
    of, route = case(draw, 1, most=40, alignment=1)
    x, weights = of.poisoned(512, torch.bfloat16, draw, 1.0).cuda(), weights_of(5, 512, 384, torch.bfloat16, seed)
    first = few_rows_mlp(x, *weights, route, 1)
    for tokens, given in itertools.product(BOUNDS, (weights, turned(weights))):
        got = few_rows_mlp(x, *given, route._replace(max_tokens=tokens), 1)
        assert torch.equal(got[of.kept], first[of.kept])
    for row in draw.sample(of.kept, 6):
        e = next(e for e, end in enumerate(of.offs) if row < end)
        ints = torch.tensor([[int(e <= other), int(e == other)] for other in range(5)], dtype=torch.int32).cuda()
        alone = route._replace(offs=ints[:, 0].contiguous(), counts=ints[:, 1].contiguous(), num_rows=1)
        assert torch.equal(few_rows_mlp(x[row : row + 1], *weights, alone, 1)[0], first[row])


def test_captured(seed):
    """Replayed with other rows: other experts, none, and as many as there is room for."""
    draw = random.Random(seed)
    cases = [case(draw, 12, slots=12) for _ in range(3)]
    first, route = cases[0]
    nothing = first._replace(counts=[0] * 5, offs=[12 * e for e in range(5)], kept=[], padding=[])
    ints = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in (nothing.offs, nothing.counts)]
    cases.append((nothing, route._replace(offs=ints[0], counts=ints[1])))
    weights = weights_of(5, 256, 128, torch.bfloat16, seed)
    x = torch.zeros(60, 256, dtype=torch.bfloat16, device="cuda")
    few_rows_mlp(x, *weights, route, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = few_rows_mlp(x, *weights, route, 1)
    for of, other in (*cases[1:], cases[1]):
        x.copy_(of.poisoned(256, torch.bfloat16, draw, 1.0))
        route.offs.copy_(other.offs)
        route.counts.copy_(other.counts)
        out.fill_(torch.nan)
        graph.replay()
        want = few_rows_mlp(x.cpu(), *(w.cpu() for w in weights), on_cpu(other), 1)
        torch.testing.assert_close(out[of.kept].cpu(), want[of.kept], rtol=0.02, atol=0.02)


@few_processes
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, seed):
    """One operator of a graph; the same numbers, and gradients of the ordinary GEMMs."""

    def step(x: Tensor, w_in: Tensor, w_out: Tensor, route: Route) -> Tensor:
        return few_rows_mlp(x * 2, w_in, w_out, route, 1) * 2

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    draw = random.Random(seed)
    for behind in (9, 40):
        of, route = case(draw, 8, behind=behind)
        x = of.poisoned(256, torch.bfloat16, draw, 1.0).cuda()
        x[of.padding] = 0
        weights = turned(weights_of(5, 256, 128, torch.bfloat16, seed))
        found = []
        for run in (step, compiled):
            leaves = [leaf.clone().requires_grad_() for leaf in (x, *weights)]
            y = run(*leaves, route)
            grad = torch.zeros_like(y)
            grad[of.kept] = 1
            found.append((y[of.kept], *torch.autograd.grad(y, leaves, grad)))
        (one, of_x, *of_w), (other, other_x, *other_w) = found
        assert torch.equal(one, other) and torch.equal(of_x[of.live], other_x[of.live])
        assert all(torch.equal(*pair) for pair in zip(of_w, other_w, strict=True))


def test_layers(seed):
    """A token's result has the same bits in every batch and with gradients. "auto" runs the same kernels if rows are
    few."""
    rank, world_size = ranks()
    with make_comm("cute", "few_rows", None, **config(world_size)) as comm:
        memory, auto = (Experts(comm, 128, gemms=gemms, seed=seed) for gemms in ("memory", "auto"))
        generator = torch.Generator(device="cuda").manual_seed(seed + rank)
        x = torch.randn(256, 256, generator=generator, device="cuda").bfloat16()
        weights, ids = torch.rand(256, comm.num_experts, generator=generator, device="cuda").topk(3)
        whole = memory(x, ids, weights).detach()
        most = choose(comm, "auto", 128).tokens
        assert 64 <= most < 256
        with torch.no_grad():
            for tokens in LAYER_TOKENS:
                for layer in (memory, auto) if tokens <= most else (memory,):
                    out = layer(x[:tokens], ids[:tokens], weights[:tokens], max_tokens=max(tokens, 1))
                    assert torch.equal(out, whole[:tokens])
        comm.check_errors()


def test_layers_of_all_sizes(seed, together):
    """0 to 256 tokens, at the borders of tiles; experts and ranks without rows, or with all of them; alignments and
    layouts; against fp64."""
    _, world_size = ranks()
    with decode_cases.communicator("cute", 256, world_size, device="cuda", timeout=10.0 * TURNS) as comm:
        with torch.no_grad(), together():
            decode_cases.check(comm, BORDERS_WIDTH, seed, share=1 if TURNS == 1 else 6)


# ---------------------------------------------------------------------- e4m3 weights


def codes_of(draw: random.Random, tokens: int, hidden: int, **options: int) -> tuple[Drawn, Route, Tensor, Tensor]:
    """Rows that are drawn, their route, codes and scales."""
    of, route = case(draw, tokens, **options)
    x = of.poisoned(hidden, torch.bfloat16, draw, 1.0)
    return of, route, *(tensor.cuda() for tensor in formats.quantize(x, formats.format_of(E4M3_FORMAT)))


@pytest.mark.parametrize("layout", E4M3_LAYOUTS)
@pytest.mark.parametrize("tokens", [8, 30])
@pytest.mark.parametrize(("hidden", "width"), E4M3)
def test_e4m3_values(hidden, width, tokens, layout, seed):
    """Within the stated bound of fp64. Weights of experts without rows hold NaN, and rows that nobody may read."""
    draw = random.Random(seed)
    of, route, x, scales = codes_of(draw, tokens, hidden, **E4M3_LAYOUTS[layout])
    weights = e4m3_experts.weights_of(len(of.counts), hidden, width, seed)
    for scale in weights[1::2]:
        scale[torch.tensor(of.counts) == 0] = torch.nan
    got = few_rows_mlp_e4m3(x, scales, *(w.cuda() for w in weights), route, 1)
    e4m3_experts.assert_right(got.cpu(), x.cpu(), scales.cpu(), weights, of, route.alignment)


def test_e4m3_bits(seed):
    """The bits of e4m3 rows depend neither on tiles nor on other rows, and are the same when a graph is replayed with
    other rows."""
    draw = random.Random(seed)
    hidden, width = E4M3[0]
    of, route, x, scales = codes_of(draw, 1, hidden, most=40, alignment=1)
    weights = [w.cuda() for w in e4m3_experts.weights_of(5, hidden, width, seed)]
    first = few_rows_mlp_e4m3(x, scales, *weights, route, 1)
    for tokens in BOUNDS:
        got = few_rows_mlp_e4m3(x, scales, *weights, route._replace(max_tokens=tokens), 1)
        assert torch.equal(got[of.kept], first[of.kept])
    graph, given = torch.cuda.CUDAGraph(), [torch.zeros_like(x[:1]), torch.zeros_like(scales[:1])]
    offs, counts = torch.ones(2, 5, dtype=torch.int32, device="cuda")
    alone = route._replace(offs=offs, counts=counts, num_rows=1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = few_rows_mlp_e4m3(*given, *weights, alone, 1)
    for row in draw.sample(of.kept, 6):
        e = next(e for e, end in enumerate(of.offs) if row < end)
        given[0].copy_(x[row : row + 1])
        given[1].copy_(scales[row : row + 1])
        offs.copy_(torch.tensor([int(e <= other) for other in range(5)]))
        counts.copy_(torch.tensor([int(e == other) for other in range(5)]))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out[0], first[row])


def test_e4m3_layers(seed):
    """A token that is sent in e4m3 has the same bits in every batch, also in `Experts` that hold the weights."""
    rank, world_size = ranks()
    with make_comm("cute", "few_rows", None, **config(world_size)) as comm, torch.no_grad():
        generator = torch.Generator(device="cuda").manual_seed(seed + rank)
        x = torch.randn(256, 256, generator=generator, device="cuda").bfloat16()
        weights, ids = torch.rand(256, comm.num_experts, generator=generator, device="cuda").topk(3)
        experts = [w.cuda() for w in e4m3_experts.weights_of(comm.num_local_experts, 256, 128, seed + rank)]
        module = Experts(comm, 128, dtype=torch.float8_e4m3fn).bfloat16()  # which converts nothing
        for name, w in zip(("w_in", "in_scales", "w_out", "out_scales"), experts, strict=True):
            module.local_weight(name, convert=False).copy_(w)
        found = {}
        for tokens in reversed(LAYER_TOKENS):
            given = x[:tokens], ids[:tokens], weights[:tokens]
            got = comm.dispatch(*given, max_tokens=max(tokens, 1), format=E4M3_FORMAT, scales_as="rows", zeros=False)
            y = few_rows_mlp_e4m3(got.x, got.scales, *experts, got.route, world_size)
            found[tokens] = comm.combine(y, got.route, got.weights)
            assert torch.equal(found[tokens], found[256][:tokens]) and found[tokens].isfinite().all()
            assert torch.equal(module(*given, max_tokens=max(tokens, 1)), found[tokens])
        comm.check_errors()
