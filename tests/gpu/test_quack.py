"""quack's grouped GEMMs on token-major rows, gathered by them or copied before: products, gradients, those with SwiGLU
in their epilogues, and a layer end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operators import make_comm, ranks
from sharing import one_rank
from torch import Tensor

import ep_ops
from ep_ops import nn
from ep_ops.backends.cute.tuning import GEMMS, KNOBS, Row
from ep_ops.nn import quack_mm

pytest.importorskip("quack", reason="needs quack-kernels 0.6.5, whose grouped GEMM gathers rows")

from ep_ops.integrations import quack  # noqa: E402

BF16 = torch.bfloat16
HIDDEN, INNER, TOP_K, TOKENS, HELD = 1024, 512, 4, 200, 4


def config(world_size: int) -> dict[str, Any]:
    return dict(
        num_experts=HELD * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS, alignment=1,
    )  # fmt: skip


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device="cuda").manual_seed(seed), device="cuda")


def far(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


ROWS, EXPERTS = 300, 6


def lists_of(seed: int, alignment: int) -> tuple[Tensor, nn.ExpertLists]:
    """Return local ids and lists: nobody names expert 2, and rows after 250 none."""
    local_idx = (drawn(seed, ROWS, 8).argsort(1)[:, :TOP_K] - 1).int()  # -1 .. 6
    local_idx[(local_idx == 2) | (local_idx >= EXPERTS)] = -1
    local_idx[250:] = -1
    return local_idx, nn.expert_lists(local_idx, EXPERTS, alignment=alignment)


@pytest.fixture(params=["copies 256x128 2x1", "gathers", "gathers 128x256 2x1"])
def choices(request):
    """Every GEMM with this configuration."""
    gathers, _, tile = request.param.partition(" ")
    tuning = quack_mm.tuning(torch.device("cuda", torch.cuda.current_device()))
    both = {"tile": tile, "gathers": gathers == "gathers"}
    rows = [{knob: both[knob] for knob in KNOBS[name]} for name in GEMMS]
    tuning.put(*(Row(name, row) for name, row in zip(GEMMS, rows, strict=True)))
    yield
    tuning.put()


@one_rank
@pytest.mark.parametrize("alignment", [1, 16])
def test_products(alignment, choices, seed, together):
    """Products equal a loop over (row, k) in fp32: of an expert that nobody names, of rows of none, and of rows with
    NaN behind all lists."""
    rows, experts = ROWS, EXPERTS
    local_idx, lists = lists_of(seed, alignment)
    x = torch.where(torch.arange(rows, device="cuda")[:, None] < 250, drawn(seed + 1, rows, HIDDEN), torch.nan).to(BF16)
    w = (drawn(seed + 2, experts, HIDDEN, INNER) / HIDDEN**0.5).to(BF16)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = quack.gather_mm(*leaves, lists)
    held = (lists.flat < rows * TOP_K)[:, None]
    grad = torch.where(held, drawn(seed + 3, *y.shape), 0).to(BF16)
    y.backward(grad)

    expert = torch.where(held[:, 0], local_idx.flatten()[lists.flat.clamp(max=rows * TOP_K - 1).long()], -1)
    wide, expected, grad_x = (
        x.nan_to_num().float(),
        torch.zeros_like(y, dtype=torch.float32),
        torch.zeros_like(x).float(),
    )
    grad_w = torch.zeros_like(w, dtype=torch.float32)
    for e in range(experts):
        at = (expert == e).nonzero().squeeze(1)
        row = lists.rows[at].long()
        expected[at] = wide[row] @ w[e].float()
        grad_x.index_add_(0, row, grad[at].float() @ w[e].float().t())
        grad_w[e] = wide[row].t() @ grad[at].float()
    with together():
        assert far(torch.where(held, y, 0), expected) < 1e-2
        assert far(leaves[0].grad, grad_x) < 1e-2 and not leaves[0].grad.isnan().any()
        assert far(leaves[1].grad, grad_w) < 1e-2 and not leaves[1].grad[2].any()


@one_rank
@pytest.mark.parametrize("alignment", [1, 16])
def test_swiglu_in_epilogues(alignment, choices, seed, together):
    """SwiGLU, its gradient, that of the weights of places, and of the matrices, against autograd in fp64. Padding has
    zeros; twice the same bits."""
    local_idx, lists = lists_of(seed, alignment)
    end, held = int(lists.offs[-1]), (lists.flat < local_idx.numel())[:, None]
    x = torch.where(torch.arange(ROWS, device="cuda")[:, None] < 250, drawn(seed + 1, ROWS, HIDDEN), torch.nan).to(BF16)
    w_in = (drawn(seed + 2, EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(BF16).transpose(1, 2)
    w_out = (drawn(seed + 3, EXPERTS, INNER, HIDDEN) / INNER**0.5).to(BF16)
    grad = torch.where(held, drawn(seed + 4, lists.rows.shape[0], HIDDEN), 0).to(BF16)
    weights = torch.where(held[:, 0], drawn(seed + 5, lists.rows.shape[0]), 0)
    gated, offs, rows = quack_mm.GEMMS.gated, lists.offs, lists.rows

    def run() -> list[Tensor]:
        h, a = gated.product(x, w_in, offs, rows)
        grad_h, weighted, dots = gated.gradient(grad, w_out, h, weights, offs)
        for tensor in (grad_h, weighted):
            tensor[end:] = torch.nan
        results = a, weighted, dots, gated.rows_gradient(grad_h, w_in.transpose(1, 2), offs)
        return [*(one[:end] for one in results), gated.weights_gradient(x, grad_h, offs, rows)]

    first, second = run(), run()
    leaves = [x[rows.long()].double().nan_to_num(), w_in.double(), weights.double()]
    wide_x, wide_w, by = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    outs, inner, begin = [], [], 0
    for e, last in enumerate(offs.tolist()):
        gate, up = (wide_x[begin:last] @ wide_w[e]).chunk(2, 1)
        inner.append(torch.nn.functional.silu(gate) * up)
        outs.append(by[begin:last, None] * (inner[-1] @ w_out[e].double()))
        begin = last
    loss = (torch.cat(outs) * grad[:end].double()).sum()
    grad_x, grad_w, grad_by = torch.autograd.grad(loss, [wide_x, wide_w, by])
    a = torch.cat(inner).detach()
    kept = held[:end]
    wanted = a, a * by.detach()[:end, None], grad_by[:end], grad_x[:end], grad_w
    with together():
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        for i, (one, other) in enumerate(zip(first, wanted, strict=True)):
            here = kept[:, 0] if i == 2 else kept
            live = one if i == 4 else torch.where(here, one, 0)
            assert far(live, other if i == 4 else torch.where(here, other, 0)) < 1e-2, i
        for padding in (first[1], first[3]):
            assert not torch.where(kept, 0, padding).any()
        assert first[4].stride() == w_in.stride() and not first[4][2].any()


def layer(
    comm: ep_ops.Communicator, gather_mm: Any, x: Tensor, idx: Tensor, weights: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    sent = comm.dispatch(x, idx, weights, layout="token_major")
    lists = nn.expert_lists(sent.local_idx, comm.num_local_experts)
    places = nn.places_route(comm, sent.route, lists)
    y = nn.swiglu_rows(gather_mm(sent.x, up, lists), places)
    return comm.combine(nn.grouped_mm(y, down, lists.offs), places, nn.weights_of_places(sent.weights, lists))


def test_layer(seed, together):
    """Twenty steps: losses fall; outputs, gradients and losses are those of the layer whose products plain PyTorch
    gathers for."""
    rank, world_size = ranks()
    with make_comm("cute", "quack", **config(world_size)) as comm:
        comm.warmup()
        own = seed + 977 * rank
        x = drawn(own, TOKENS, HIDDEN).to(BF16)
        scores = drawn(own + 1, TOKENS, HELD * world_size).softmax(1).topk(TOP_K)
        idx, weights = scores.indices.int(), scores.values
        idx[drawn(own + 2, *idx.shape) > 1.5] = -1
        target = drawn(own + 3, TOKENS, HIDDEN) * 0.1
        shapes = (HELD, HIDDEN, 2 * INNER), (HELD, INNER, HIDDEN)
        start = [(drawn(own + 4 + i, *shape) / shape[1] ** 0.5).to(BF16) for i, shape in enumerate(shapes)]
        results = []
        for gather_mm in (quack.gather_mm, nn.gather_mm):
            leaves = [each.clone().requires_grad_() for each in (x, weights, *start)]
            losses, first = [], None
            for _ in range(20):
                out = layer(comm, gather_mm, leaves[0], idx, *leaves[1:])
                loss = (out.float() - target).square().sum(1).mean()
                grads = torch.autograd.grad(loss, leaves)
                first = first or [out.detach(), *grads]
                with torch.no_grad():
                    for leaf, grad in zip(leaves[2:], grads[2:], strict=True):
                        leaf -= 0.05 * grad
                losses.append(float(loss))
            results.append((losses, first))
        torch.cuda.synchronize()
        comm.check_errors()
        (losses, got), (plain, expected) = results
        with together():
            for mine, theirs in zip(got, expected, strict=True):
                assert not mine.isnan().any() and far(mine, theirs) < 2e-2
            assert losses[-1] < 0.9 * losses[0]
            assert all(abs(a - b) < 0.02 * b for a, b in zip(losses, plain, strict=True))
