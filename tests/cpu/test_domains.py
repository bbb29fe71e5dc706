"""Sums over several NVLink domains, on the reference backend, against plain loops."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from cases import RouteCase, fresh_seed
from operate import On, Sizes
from ranks import run_ranks
from torch import Tensor

import ep_ops
from ep_ops import creation
from ep_ops.group.topology import Domains, GpuFacts
from ep_ops.records import Route

HIDDEN = 24
ROUTES = ("random", "repeated_experts", "all_to_one_rank", "over_capacity", "no_tokens_on_last_rank", "padded_over")


@dataclasses.dataclass
class Given:
    """Inputs of one rank: rows and their weights, and what is added last."""

    y: Tensor
    weights: Tensor
    residual: Tensor


def drawn(case: RouteCase, dtype: torch.dtype, seed: int) -> list[Given]:
    """Draw numbers of very unequal size, so that the order of additions and roundings shows."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        spread = torch.randn(shape[0], 1, generator=draw).mul(2).exp()
        return (spread * torch.randn(*shape, generator=draw)).to(dtype)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        Given(noise(rows, HIDDEN), torch.randn(rows, generator=draw, dtype=exact), noise(idx.shape[0], HIDDEN))
        for rows, idx in zip(case.capacity, case.topk_idx, strict=True)
    ]


def summed(
    case: RouteCase, given: list[Given], dtype: torch.dtype, hosts: str | None, size: int | None
) -> dict[str, Any]:
    """Return the results of the operators that add up, and the domains. ``hosts``: where ranks say they are."""
    rank, true_facts = dist.get_rank(), creation.gpu_facts
    if hosts is not None:
        creation.gpu_facts = lambda device: GpuFacts(hosts[rank], f"gpu {rank}", None, None)
    try:
        more = dict(symmetric_rows=max(1, *case.capacity), domain_size=size, backend="reference", device="cpu")
        comm = ep_ops.Communicator(**case.sizes, hidden_size=HIDDEN, dtype=dtype, **more)
    finally:
        creation.gpu_facts = true_facts
    mine, run, idx = given[rank], On(comm.backend), case.topk_idx[rank]
    with comm:
        sizes = Sizes(case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens, case.layout(rank))
        route = Route(idx, *run.plan(idx, sizes)[:4], case.alignment, case.capacity[rank], case.max_tokens)
        started = comm.combine_start(mine.y, route, mine.weights)
        out = {
            "split": comm.combine_wait(started),
            "plain": run.combine(mine.y, None, route),
            "weighted": run.combine(mine.y, mine.weights, route),
            "residual": run.combine(mine.y, mine.weights, route, mine.residual),
            "gathered": run.combine_gathered(comm.empty_rows(route.num_rows).copy_(mine.y), route),
            "backward": run.dispatch_backward(mine.y, mine.weights, route)[0],
            "domains": comm.domains,
        }
        if dtype != torch.float64:  # through autograd
            x = torch.zeros(idx.shape[0], HIDDEN, dtype=dtype, requires_grad=True)
            sent = comm.dispatch_planned(x, route).x
            sent.backward(mine.y)
            out["autograd"] = x.grad
    return out


def check(name: str, dtype: torch.dtype, hosts: str | None, size: int | None, domains: Domains) -> None:
    seed, world_size = fresh_seed(), sum(map(len, domains))
    case = cases.route_cases(world_size, seed)[name]
    given = drawn(case, dtype, seed)
    plans = cases.expected_plan(case)
    y, weights = [one.y for one in given], [one.weights for one in given]
    plain = cases.expected_combine(case, plans, y, None, domains=domains)
    weighted = cases.expected_combine(case, plans, y, weights, domains=domains)
    added = cases.expected_combine(case, plans, y, weights, [one.residual for one in given], domains)
    for rank, got in enumerate(run_ranks(world_size, summed, case, given, dtype, hosts, size)):
        assert got.pop("domains") == domains
        wanted = dict(split=weighted, weighted=weighted, residual=added)
        for what, out in got.items():
            assert torch.equal(out, wanted.get(what, plain)[rank]), f"{what} of rank {rank}"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ROUTES)
def test_declared(name: str, size: int) -> None:
    check(name, torch.bfloat16, None, size, tuple(itertools.zip_longest(*[iter(range(4))] * size)))


@pytest.mark.parametrize(("hosts", "domains"), [("abab", ((0, 2), (1, 3))), ("abba", ((0, 3), (1, 2)))])
def test_found(hosts: str, domains: Domains) -> None:
    """Any numbering of ranks."""
    check("random", torch.bfloat16, hosts, None, domains)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check("random", dtype, None, 2, ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("hosts", "size", "domains"), [(None, 3, ((0, 1, 2), (3, 4, 5))), ("abccba", None, ((0, 5), (1, 4), (2, 3)))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_six_ranks(dtype: torch.dtype, hosts: str | None, size: int | None, domains: Domains) -> None:
    """Enough ranks in a domain, and domains, for their order to show: in fp32 every addition rounds."""
    check("top_8_wide", dtype, hosts, size, domains)


def test_the_order_shows() -> None:
    """Each map of domains rounds elsewhere: the tests above tell them apart."""
    seed = fresh_seed()
    case = cases.route_cases(4, seed)["top_8_wide"]
    y = [one.y for one in drawn(case, torch.bfloat16, seed)]
    plans = cases.expected_plan(case)
    maps: list[Domains] = [
        ((0, 1, 2, 3),),
        ((0, 1), (2, 3)),
        ((0, 2), (1, 3)),
        ((0, 3), (1, 2)),
        ((0,), (1,), (2,), (3,)),
    ]
    outs = [cases.expected_combine(case, plans, y, None, domains=domains) for domains in maps]
    # Domains of one rank each add up what one domain does: no sum is rounded that was not rounded already.
    assert all(torch.equal(one, other) for one, other in zip(outs[0], outs[4], strict=True))
    for one, other in itertools.combinations(outs[:4], 2):
        assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def shrunk(domain_size: int, left: list[int]) -> Any:
    comm = ep_ops.Communicator(
        num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=4, device="cpu", domain_size=domain_size
    )
    group = dist.new_group(left)
    if comm.rank not in left:
        comm._destroy(meet=False)
        return None
    try:
        with comm.shrink(group) as fewer:
            return fewer.domains
    except ValueError as error:
        assert not comm.destroyed
        comm._destroy(meet=False)
        return str(error)


@pytest.mark.parametrize(
    ("size", "left", "domains"),
    [
        (2, [0, 1], ((0, 1),)),
        (2, [1, 2], ((0,), (1,))),
        (1, [0, 2, 3], ((0,), (1,), (2,))),
        (4, [0, 1, 3], ((0, 1, 2),)),
    ],
)
def test_shrunk(size: int, left: list[int], domains: Domains) -> None:
    assert run_ranks(4, shrunk, size, left) == [domains if rank in left else None for rank in range(4)]


def test_shrunk_to_unequal_domains() -> None:
    said = run_ranks(4, shrunk, 2, [0, 1, 3])[0]
    assert "group leaves [2, 1] ranks of the NVLink domains ((0, 1), (2, 3))" in said
