"""A layer of token-major rows against a dense one and against rows grouped by expert, eager and compiled."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import tokens as oracle
import torch
import torch._dynamo
import torch._inductor.config
import toy
from cases import RouteCase, Tokens
from ranks import run_ranks
from test_reference import assert_same, communicator
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ep_ops
from ep_ops import arrivals
from ep_ops.nn import (
    expert_lists,
    gather_mm,
    gather_rows,
    grouped_mm,
    places_route,
    reduce_rows,
    weights_of_places,
)  # fmt: skip


def layer(
    comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor, up: Tensor, down: Tensor, how: str = "",
    **sizes: Any,
) -> Tensor:  # fmt: skip
    """Token-major rows, gathered for the first GEMM of each expert."""
    if how == "exact":
        sent = comm.dispatch(x, idx, weights, **sizes, layout="token_major", exact=True)
    elif "split" in how:
        sent = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **sizes, layout="token_major"))
    else:
        sent = comm.dispatch(x, idx, weights, **sizes, layout="token_major")
    rows, row_weights = sent.x, sent.weights
    if how == "planned":
        rows, row_weights, *_ = comm.dispatch_planned(x, sent.route, weights)
    lists = expert_lists(sent.local_idx, comm.num_local_experts, alignment=4)
    y = grouped_mm(torch.tanh(gather_mm(rows, up, lists)), down, lists.offs)
    if "places" in how:
        back = y, places_route(comm, sent.route, lists), weights_of_places(row_weights, lists)
    else:
        back = reduce_rows(y, lists, row_weights), sent.route, None
    if "split" in how:
        return comm.combine_wait(comm.combine_start(*back))
    return comm.combine(*back)


def _layer(case: RouteCase, tokens: list[Tokens], up: Tensor, down: Tensor, how: str, room: list[int]) -> list[Tensor]:
    rank = torch.distributed.get_rank()
    with communicator(case, up.shape[1], up.dtype) as comm:
        held = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        learns = [tokens[rank].x, tokens[rank].weights, up[held], down[held]]
        x, weights, up, down = (each.clone().requires_grad_() for each in learns)
        sizes = {"max_tokens": case.max_tokens} | ({} if how == "exact" else {"capacity": room[rank]})
        out = layer(comm, x, case.topk_idx[rank], weights, up, down, how, **sizes)
        out.sin().sum().backward()
        return [out.detach(), x.grad, weights.grad, up.grad, down.grad]


@pytest.mark.parametrize(("world_size", "name", "how", "room"), [
    (1, "random_with_none", "", "all"), (2, "repeated_experts", "", "all"), (2, "random", "", "few"),
    (3, "random_with_none", "planned", "few"), (2, "uneven_experts", "exact", "all"), (2, "random", "split", "few"),
    (2, "no_tokens_on_last_rank", "", "all"), (2, "only_none", "places", "all"), (2, "random", "places", "few"),
    (2, "uneven_experts", "places", "all"),
    (2, "repeated_experts", "split places", "all"),
])  # fmt: skip
def test_equal_to_a_dense_model(world_size: int, name: str, how: str, room: str) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    capacity = oracle.rooms(case, room)
    assert capacity is not None
    copies = oracle.expected_copies(case, None if how == "exact" else capacity)
    tokens = cases.random_tokens(case, 6, torch.float64, seed)
    draw = torch.Generator().manual_seed(seed + 5)
    up, down = (torch.randn(case.num_experts, 6, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    results = run_ranks(world_size, _layer, case, tokens, up, down, how, capacity)

    learns = [up.requires_grad_(), down.requires_grad_()]
    outs, inputs = [], []
    for source, idx in enumerate(case.topk_idx):
        kept = torch.zeros(idx.shape, dtype=torch.bool)
        for here in copies:
            for row, (owner, token) in enumerate(here.rows):
                if owner == source:
                    kept[token] |= here.local_idx[row] >= 0
        x, weights = tokens[source].x.requires_grad_(), tokens[source].weights.requires_grad_()
        inputs += [x, weights]
        outs.append(cases.dense_moe(x, idx, weights, up, down, kept))
    loss = sum(out.sin().sum() for out in outs)
    grads = torch.autograd.grad(loss, [*inputs, *learns], allow_unused=True, materialize_grads=True)
    first = 0
    for rank, got in enumerate(results):
        held = slice(first, first + case.experts_per_rank[rank])
        first += case.experts_per_rank[rank]
        wanted = [outs[rank], *grads[2 * rank : 2 * rank + 2], grads[-2][held], grads[-1][held]]
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other)


def _both(case: RouteCase, tokens: list[Tokens], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Beside rows grouped by expert: rows, places, sums and gradients, each to the bit."""
    rank = torch.distributed.get_rank()
    x, weights, idx = tokens[rank].x, tokens[rank].weights, case.topk_idx[rank]
    with communicator(case, x.shape[1], x.dtype) as comm:
        one, two = ([each.clone().requires_grad_() for each in (x, weights)] for _ in range(2))
        grouped = comm.dispatch(one[0], idx, one[1], max_tokens=case.max_tokens, exact=True)
        sent = comm.dispatch(two[0], idx, two[1], max_tokens=case.max_tokens, layout="token_major")
        num = grouped.route.num_rows
        lists = expert_lists(
            sent.local_idx, comm.num_local_experts, alignment=case.alignment, capacity=max(num, case.alignment)
        )
        rows = gather_rows(sent.x, lists)
        found = [(rows[:num].detach(), grouped.x.detach()), (lists.offs, grouped.route.offs)]
        found.append((lists.counts, grouped.route.counts))
        factor = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed + rank)).exp().to(x.dtype)
        a = comm.combine(grouped.x * factor[:num], grouped.route, grouped.weights)
        b = comm.combine(reduce_rows(rows * factor, lists, sent.weights), sent.route)
        grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed - rank)).to(x.dtype)
        a.backward(grad)
        b.backward(grad)
        found += [(b.detach(), a.detach()), (two[0].grad, one[0].grad)]
        torch.testing.assert_close(two[1].grad, one[1].grad)  # dot products, in whatever order

        lists = expert_lists(sent.local_idx, comm.num_local_experts, alignment=case.alignment)
        route = places_route(comm, sent.route, lists)
        rows = torch.nn.functional.pad((grouped.x * factor[:num]).detach(), (0, 0, 0, route.num_rows - num))
        found.append((comm.combine(rows, route, weights_of_places(sent.weights.detach(), lists)), a.detach()))
        mine = arrivals.defined(route.arrivals, comm.world_size)
        theirs = arrivals.defined(grouped.route.arrivals, comm.world_size)
        found += [(own[: len(other)], other) for own, other in zip(mine, theirs, strict=True)]
        # Where rows lie is known of this rank's own; of all others, that they are there.
        known = torch.where(route.send_rows == 2**31 - 1, grouped.route.send_rows, route.send_rows)
        here = (idx >= comm.first_local_expert) & (idx < comm.first_local_expert + comm.num_local_experts)
        found += [(known, grouped.route.send_rows), (route.send_rows[here], grouped.route.send_rows[here])]
        return found


@pytest.mark.parametrize(("world_size", "name"), [(1, "random"), (2, "repeated_experts"), (3, "random_with_none")])
def test_equal_to_rows_grouped_by_expert(world_size: int, name: str) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    tokens = cases.random_tokens(case, 8, torch.bfloat16, seed)
    for found in run_ranks(world_size, _both, case, tokens, seed):
        for one, other in found:
            assert_same(one, other)


def test_rejections() -> None:
    with toy.communicator(symmetric_rows=200) as comm:
        x, idx, weights = toy.inputs(5)
        sent, grouped = comm.dispatch(x, idx, weights, layout="token_major"), comm.dispatch(x, idx)
        lists = expert_lists(sent.local_idx, 4, alignment=4)
        with pytest.raises(ValueError, match=r"route has 44 rows in layout 'grouped'; allowed: the route of the"):
            places_route(comm, grouped.route, lists)
        with pytest.raises(
            ValueError, match=r"route has 16 rows in layout 'token_major'; .* lists of 15 rows belong to"
        ):
            places_route(comm, sent.route, expert_lists(sent.local_idx[:15], 4))
        with pytest.raises(ValueError, match=r"lists have 40 places, and 16 rows can take 44; allowed: lists without"):
            places_route(comm, sent.route, expert_lists(sent.local_idx, 4, alignment=4, capacity=40))


def _gathers() -> None:
    with toy.communicator(symmetric_rows=200) as comm:
        x, idx, weights = toy.inputs(5)
        sent = comm.dispatch(x, idx, layout="token_major")
        route = places_route(comm, sent.route, expert_lists(sent.local_idx, comm.num_local_experts))
        with pytest.raises(ValueError, match="the route of places does not contain the rows"):
            comm.combine_gathered(comm.empty_rows(route.num_rows), route)


def test_places_are_not_gathered() -> None:
    run_ranks(2, _gathers)


# ---------------------------------------------------------------------- compiled


def _steps(backend: str, how: str, seed: int) -> list[list[list[Tensor]]]:
    """Eager and compiled, with several numbers of tokens on this rank."""
    rank, results = torch.distributed.get_rank(), []
    torch._dynamo.reset()
    with toy.communicator() as comm:
        draw = torch.Generator().manual_seed(seed)
        shape = comm.num_local_experts, toy.HIDDEN, toy.HIDDEN
        up, down = (torch.randn(shape, generator=draw).requires_grad_() for _ in range(2))
        calls_torch = torch._inductor.config.patch(fallback_by_default=True)  # no C++ is compiled
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), calls_torch:
            compiled = torch.compile(layer, backend=backend, fullgraph=True)
            for tokens in (7, 0):
                both = []
                for run in (layer, compiled):
                    x, idx, weights = toy.inputs(tokens + rank, seed=seed + rank, grad=True)
                    out = run(comm, x, idx, weights, up, down, how)
                    out.sin().sum().backward()
                    both.append([out.detach(), x.grad, weights.grad, up.grad, down.grad])
                    up.grad = down.grad = None
                results.append(both)
    return results


@pytest.mark.parametrize(("ranks", "backend", "how"), [
    (1, "aot_eager", "exact"), (2, "aot_eager", "places"),
    pytest.param(1, "aot_eager", "split", marks=pytest.mark.drawn),
    pytest.param(1, "inductor", "planned", marks=pytest.mark.drawn),
])  # fmt: skip
def test_compiled(ranks: int, backend: str, how: str) -> None:
    """One graph, forward and backward."""
    for steps in run_ranks(ranks, _steps, backend, how, cases.fresh_seed()):
        for eager, compiled in steps:
            for one, other in zip(compiled, eager, strict=True):
                torch.testing.assert_close(one, other)


def test_one_compilation_for_all_numbers_of_tokens() -> None:
    """Capacity and lists follow the number of tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with toy.communicator() as comm:
        shape = comm.num_local_experts, toy.HIDDEN, toy.HIDDEN
        up, down = torch.randn(shape).requires_grad_(), torch.randn(shape)

        def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            tokens = x.shape[0]
            return layer(comm, x, idx, weights, up, down, capacity=tokens, max_tokens=tokens)

        compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
        for tokens in (5, 16, 3, 11):
            x, idx, weights = toy.inputs(tokens, grad=True)
            one, two = compiled(x, idx, weights), step(x, idx, weights)
            torch.testing.assert_close(one, two)
            grads = [torch.autograd.grad(out.sin().sum(), (x, weights, up)) for out in (one, two)]
            torch.testing.assert_close(*grads)
    assert counter.frame_count == 1
