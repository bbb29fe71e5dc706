"""Decode layers, compared with a dense layer in fp64: numbers of tokens at the borders of tiles, routes that leave
ranks and experts without rows, alignments and layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

import ep_ops
from ep_ops.nn import few_rows_mlp

MOST, TOP_K, EACH = 256, 3, 6
"""Tokens of a rank, experts of a token, and experts of a rank."""
TOKENS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256)
ROUTES = ("random", "one expert", "one rank", "tokens on one rank")


class Case(NamedTuple):
    tokens: int
    """Largest number of tokens of a rank, and the bound on it."""
    route: str
    alignment: int
    padded: bool


def cases(seed: int, share: int) -> Iterator[Case]:
    """Yield every number of tokens with both alignments, and a route and a layout that are drawn; every route once. One
    in `share` of them."""
    draw = random.Random(seed)
    drawn = [Case(t, draw.choice(ROUTES), a, draw.random() < 0.3) for t in TOKENS for a in (1, 16)]
    drawn += [Case(draw.choice((9, 33, 129)), route, 16, draw.random() < 0.5) for route in ROUTES]
    yield from draw.sample(drawn, len(drawn) // share)


def communicator(backend: str, hidden: int, ranks: int, **options: Any) -> ep_ops.Communicator:
    """With experts whose number of rows differs from rank to rank."""
    return ep_ops.Communicator(
        num_experts=EACH * ranks, hidden_size=hidden, top_k=TOP_K, max_tokens_per_rank=MOST, dtype=torch.bfloat16,
        backend=backend, **options,
    )  # fmt: skip


def weights_of(comm: ep_ops.Communicator, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights of all experts, the same on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (comm.num_experts, comm.hidden_size, 2 * width), (comm.num_experts, width, comm.hidden_size)
    first, second = (torch.randn(shape, generator=draw) * shape[1] ** -0.5 for shape in shapes)
    return first.to(comm.device, comm.dtype), second.to(comm.device, comm.dtype)


def tokens_of(comm: ep_ops.Communicator, case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and routing weights of this rank."""
    tokens = case.tokens
    if case.route == "tokens on one rank" and comm.rank != seed % comm.world_size:
        tokens = 0
    draw = torch.Generator().manual_seed(seed * 72 + comm.rank)
    x = torch.randn(tokens, comm.hidden_size, generator=draw).to(comm.dtype)
    scores = torch.rand(tokens, comm.num_experts, generator=draw)
    chosen = seed % comm.num_experts
    if case.route == "one expert":  # all tokens name it
        scores[:, chosen] += 1
    if case.route == "one rank":
        first = chosen // EACH * EACH
        scores[:, first : first + EACH] += 1
    ids = scores.topk(TOP_K).indices.int()
    weights = torch.rand(tokens, TOP_K, generator=draw) + 0.1
    return x.to(comm.device), ids.to(comm.device), weights.to(comm.device)


def run(comm: ep_ops.Communicator, case: Case, given: tuple[Tensor, ...], w_in: Tensor, w_out: Tensor) -> Tensor:
    """Return the layer's sums. The weights are those of all experts."""
    own = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
    bound = max(case.tokens, 1)
    layout: dict[str, Any] = {}
    if case.padded:
        layout = {"layout": "padded", "slots": -(-bound * comm.world_size // case.alignment) * case.alignment}
    got = comm.dispatch(*given, max_tokens=bound, alignment=case.alignment, zeros=False, **layout)
    y = few_rows_mlp(got.x, w_in[own], w_out[own], got.route, comm.world_size)
    return comm.combine(y, got.route, got.weights)


def assert_right(out: Tensor, given: tuple[Tensor, ...], w_in: Tensor, w_out: Tensor, ranks: int) -> None:
    """Compare with fp64. Numbers between the GEMMs, rows and sums of each rank are rounded to the dtype of x."""
    x, ids, weights = (tensor.cpu() for tensor in given)
    w_in, w_out, out = w_in.cpu().double(), w_out.cpu().double(), out.cpu()
    eps = torch.finfo(x.dtype).eps
    want, bound = torch.zeros(2, *x.shape, dtype=torch.float64)
    for e in ids.unique().tolist():
        t, k = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[t].double() @ w_in[e]).chunk(2, 1)
        inner, weight = silu(gate) * up, weights[t, k, None].double()
        y = inner @ w_out[e]
        want.index_add_(0, t, weight * y)
        bound.index_add_(0, t, weight * eps * (4 * y.abs() + 4 * inner.norm(dim=1, keepdim=True)))
    wrong = (out.double() - want).abs() > bound + (1 + ranks) * eps * want.abs()
    assert out.shape == x.shape and not out.isnan().any() and not wrong.any(), f"{int(wrong.sum())} numbers are wrong"


def check(comm: ep_ops.Communicator, width: int, seed: int, share: int) -> None:
    """Run all cases, or one in `share` of them."""
    w_in, w_out = weights_of(comm, width, seed)
    for i, case in enumerate(cases(seed, share)):
        given = tokens_of(comm, case, seed + i)
        try:
            assert_right(run(comm, case, given, w_in, w_out), given, w_in, w_out, comm.world_size)
        except AssertionError as error:
            raise AssertionError(f"{case}, seed {seed + i}: {error}") from error
    comm.check_errors()
