"""Lists of token-major rows, and the route of their places: kernels beside plain PyTorch on the CPU, without ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from places import local_ids, token_major
from sharing import one_rank
from torch import Tensor

from ep_ops import arrivals
from ep_ops.nn import expert_lists
from ep_ops.nn.list_operators import places_route

pytestmark = one_rank
EXPERTS = (1, 6, 64, 200)
ROWS = (1, 40, 1000, 16384)
NAMES = ("rows", "flat", "places", "offs", "counts", "dropped")


def kernels() -> list[Any]:
    """Return the kernels that these tests launch, for precompile.py."""
    from cute_kernels.local.expert_lists import MakeExpertLists
    from cute_kernels.local.places_route import PlacesRoute

    return [*map(MakeExpertLists, EXPERTS), PlacesRoute()]


def poison(*sizes: int) -> None:
    """The memory that results get next."""
    for size in sizes:
        torch.full((size,), -7, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_lists(experts: int, rows: int, alignment: int, seed: int) -> None:
    draw = random.Random(seed)
    for top_k in (1, 3, 8):
        for capacity in (None, max(1, rows // 3) * alignment):
            ids = local_ids(draw, rows, top_k, experts)
            want = expert_lists(ids, experts, alignment=alignment, capacity=capacity)
            poison(want.rows.numel(), want.rows.numel(), ids.numel())
            got = expert_lists(ids.cuda(), experts, alignment=alignment, capacity=capacity)
            for name in NAMES:
                ours, theirs = getattr(got, name), getattr(want, name)
                assert ours.is_cuda and ours.dtype == torch.int32 and torch.equal(ours.cpu(), theirs), (name, top_k)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 8, 72])
def test_route_of_places(ranks: int, rows: int, seed: int) -> None:
    draw = random.Random(seed)
    for each in (1, 6):
        of = token_major(draw, ranks, each, rows, most_tokens=max(9, rows // ranks))
        made = expert_lists(of.local_idx, each, alignment=4)
        rest: tuple[Any, ...] = (made.rows.shape[0], of.rank, [each] * ranks)
        want, want_rows = places_route(*of.tensors, made.places, *rest)
        poison(want.numel(), want_rows.numel())
        got, got_rows = places_route(*(t.cuda() for t in (*of.tensors, made.places)), *rest)
        assert got.is_cuda and torch.equal(got_rows.cpu(), want_rows)
        for ours, theirs in zip(*(arrivals.defined(t.cpu(), ranks) for t in (got, want)), strict=True):
            assert torch.equal(ours, theirs)


def test_captured(seed: int) -> None:
    """Replays find the ids of that replay."""
    draw = random.Random(seed)

    def drawn() -> Tensor:
        return local_ids(draw, 1000, 8, 64).cuda()

    ids, graph, stream = drawn(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    expert_lists(ids, 64)
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        got = expert_lists(ids, 64)
    for _ in range(3):
        ids.copy_(drawn())
        for name in NAMES:
            getattr(got, name).fill_(-7)
        graph.replay()
        want = expert_lists(ids.cpu(), 64)
        for name in NAMES:
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
