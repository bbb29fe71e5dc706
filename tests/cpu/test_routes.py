"""A route knows what it was planned with and what arrives; what belongs to an expert finds its rows; undefined rows
show."""

from __future__ import annotations

import cases
import pytest
import torch
import toy
from cases import expected_plan, route_cases
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import ep_ops
from ep_ops import arrivals
from ep_ops.nn import expert_of_rows, grouped_mm, of_rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", cases.CASE_NAMES)
def test_arrivals_are_what_loops_find(name, world_size):
    case = route_cases(world_size, cases.fresh_seed())[name]
    for exact in (False, True):
        for rank, plan in enumerate(expected_plan(case, exact)):
            rows = arrivals.rows_of(plan.arrivals.numel(), world_size)
            assert rows == (int(plan.offs[-1]) if plan.offs.numel() else 0) if exact else rows == case.capacity[rank]
            assert arrivals.size(rows, world_size) == plan.arrivals.numel()
            numbers = torch.full((world_size, case.max_tokens), 99)
            for source, idx in enumerate(case.topk_idx):
                for token, experts in enumerate(idx.tolist()):
                    if (plan.table[source, token] >= 0).any():
                        numbers[source, token] = cases.copy_number(case, experts, rank)
            assert torch.equal(arrivals.pack(plan.table, rows, numbers), plan.arrivals)
            table = arrivals.table(plan.arrivals, world_size, case.max_tokens, case.top_k)
            assert torch.equal(table, plan.table)
            rows_here = torch.full((rows,), -1, dtype=torch.int32)
            for asker, row in enumerate(plan.table.flatten().tolist()):
                if row >= 0:
                    rows_here[row] = asker
            for lists in (plan.arrivals, with_garbage(plan.arrivals, world_size)):
                assert torch.equal(arrivals.recv_from(lists, rows), rows_here)
                assert torch.equal(arrivals.known(lists, world_size)[:, 0], plan.table[plan.table >= 0])


def with_garbage(lists: torch.Tensor, world_size: int) -> torch.Tensor:
    """Something else in the place of all that is undefined."""
    found = lists.clone()
    copies, owned, sources = arrivals.views(found, arrivals.rows_of(found.numel(), world_size))
    last = int(sources[-1])
    for undefined in (copies[last, 1:], copies[last + 1 :], owned[int(copies[last, 0]) :]):
        undefined.random_(-(2**31), 2**31 - 1)
    return found


@pytest.mark.parametrize("name", cases.CASE_NAMES)
def test_parts_of_a_route(name):
    """The lists of some tokens are those of a route of these alone, but that rows keep their places."""
    world_size, seed = 3, cases.fresh_seed()
    case, draw = route_cases(world_size, seed)[name], torch.Generator().manual_seed(seed)
    bound = max(1, case.max_tokens)
    each = int(torch.randint(1, bound + 1, (), generator=draw))
    for plan in expected_plan(case):
        lists, rows = with_garbage(plan.arrivals, world_size), arrivals.rows_of(plan.arrivals.numel(), world_size)
        homes = arrivals.defined(plan.arrivals, world_size).copies[:, 1]
        numbers = torch.zeros(world_size, case.max_tokens, dtype=torch.int64)
        most = min(case.top_k, world_size)
        numbers.view(-1)[homes[homes >= 0].long() // most] = homes[homes >= 0].long() % most
        for first in range(0, case.max_tokens, each):
            here = slice(first, first + each)
            want = arrivals.pack(plan.table[:, here], rows, numbers[:, here])
            tokens = plan.table[:, here].shape[1]
            got = arrivals.part(lists, world_size, case.max_tokens, case.top_k, first, tokens)
            pairs = zip(arrivals.defined(got, world_size), arrivals.defined(want, world_size), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs), (seed, first, tokens)


@pytest.mark.parametrize("bad", [-(2**31), -1, 13, 14, 2**31 - 1])
def test_parts_read_nothing_outside_of_the_lists(bad):
    """Parts read nothing outside of the lists, whatever integers these hold: each number of a route is wrong in turn,
    and then all."""
    rows, world_size, top_k, most = 12, 3, 2, 8
    for wrong in (*range(arrivals.size(rows, world_size)), slice(None)):
        lists = torch.zeros(arrivals.size(rows, world_size), dtype=torch.int32)
        arrivals.views(lists, rows).sources[-1] = 3
        lists[wrong] = bad
        got = arrivals.part(lists, world_size, most, top_k, 2, 4)
        copies, owned, sources = arrivals.views(got, rows)
        assert 0 <= int(sources.min()) and int(sources.max()) <= rows
        assert 0 <= int(copies[int(sources[-1]), 0]) <= rows


def test_parts_ask_nothing_of_the_device():
    """Parts need no values on the host, which graphs could not capture: they are made of tensors without values."""
    with FakeTensorMode():
        lists = torch.empty(arrivals.size(12, 3), dtype=torch.int32)
        assert arrivals.part(lists, 3, 8, 4, 2, 2).shape == lists.shape


@pytest.mark.parametrize("name", cases.CASE_NAMES)
def test_only_what_is_defined_is_compared(name):
    world_size = 3
    case = route_cases(world_size, cases.fresh_seed())[name]
    for plan in expected_plan(case):
        expected = arrivals.defined(plan.arrivals.clone(), world_size)
        got = arrivals.defined(with_garbage(plan.arrivals, world_size), world_size)
        assert all(map(torch.equal, got, expected))
        assert torch.equal(torch.cat([part.flatten() for part in expected]), plan.arrivals)  # which holds -1 there
        lists = arrivals.views(plan.arrivals, arrivals.rows_of(plan.arrivals.numel(), world_size))
        last = int(lists.sources[-1])
        places = [(lists.owned.view(-1), at) for at in range(2 * int(lists.copies[last, 0]))]
        places += [(lists.copies.view(-1), at) for at in range(2 * last + 1)]
        places += [(lists.sources, at) for at in range(world_size + 1)]
        for part, at in places:
            before = int(part[at])
            part[at] = before + 1000
            assert not all(map(torch.equal, arrivals.defined(plan.arrivals, world_size), expected))
            part[at] = before


def test_arrivals_fit_whole_numbers_of_rows():
    for world_size in (1, 2, 31):
        fits = {arrivals.size(rows, world_size): rows for rows in range(5)}
        assert all(arrivals.rows_of(numel, world_size) == fits.get(numel, -1) for numel in range(max(fits) + 1))


def test_nothing_undefined_is_read():
    with toy.communicator(symmetric_rows=44) as comm:
        x, topk_idx, weights = toy.inputs(7, seed=cases.fresh_seed())
        sent = comm.dispatch(x, topk_idx, weights, capacity=44)
        other = sent.route._replace(arrivals=with_garbage(sent.route.arrivals, 1))
        assert not torch.equal(other.arrivals, sent.route.arrivals)
        for one, two in zip(comm.dispatch_planned(x, other, weights)[:2], (sent.x, sent.weights), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(comm.combine(sent.x, other, sent.weights), comm.combine(sent.x, sent.route, sent.weights))
        y = comm.empty_rows(44).copy_(sent.x)
        assert torch.equal(comm.combine_gathered(y, other), comm.combine(sent.x, sent.route))


def test_a_route_shows_its_lists():
    """One rank, three experts, padded to 4: token 0 is here twice, token 1 not at all, of token 2 a row is dropped."""
    with ep_ops.Communicator(
        num_experts=3, hidden_size=8, top_k=2, max_tokens_per_rank=5, alignment=1, device="cpu"
    ) as comm:  # fmt: skip
        topk_idx = torch.tensor([[2, 0], [-1, -1], [1, 2]], dtype=torch.int32)
        route, dropped = comm.plan(topk_idx, capacity=4, max_tokens=4)
        assert route.max_tokens == 4 and route.ints == (1, 4) and dropped.tolist() == [0, 0, 0]
        assert route.recv_from.tolist() == [1, 4, 0, 5]  # by expert
        assert route.owned.tolist() == [[2, 0], [0, 1], [1, 4], [3, 5]]  # by (token, k)
        assert route.copies[:2].tolist() == [[0, 0], [2, 2]] and int(route.copies[2, 0]) == 4
        assert route.copies.shape == (5, 2) and route.sources.tolist() == [0, 2]
        route, dropped = comm.plan(topk_idx, capacity=3, max_tokens=4)
        assert dropped.tolist() == [0, 0, 1] and route.owned.tolist() == [[2, 0], [0, 1], [1, 4]]
        assert route.copies[:2].tolist() == [[0, 0], [2, 2]] and int(route.copies[2, 0]) == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_lists_in_a_compiled_graph(dynamic):
    """Compiled lists are right for a given capacity, and for a number of rows that only the data determine."""
    torch._dynamo.reset()
    with toy.communicator(strict=False) as comm:
        x, topk_idx, _ = toy.inputs(6, seed=cases.fresh_seed())

        def lists(x, topk_idx):
            sent = comm.dispatch(x, topk_idx, exact=True) if dynamic else comm.dispatch(x, topk_idx)
            route = sent.route
            return route.copies + 1, route.owned + 1, route.recv_from, route.recv_from >= 0, route.sources + 1

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            got = torch.compile(lists, fullgraph=True)(x, topk_idx)
        torch.testing.assert_close(got, lists(x, topk_idx), rtol=0, atol=0)


def test_alignment_of_a_dispatch_is_that_of_its_backward():
    """Padding is cleared where the dispatch put it, or weight gradients would read what is undefined there."""
    with toy.communicator() as comm:
        assert comm.alignment != 8
        x, topk_idx, weights = toy.inputs(7, seed=cases.fresh_seed(), grad=True)
        w = torch.randn(comm.num_local_experts, toy.HIDDEN, toy.HIDDEN, requires_grad=True)
        sent = comm.dispatch(x, topk_idx, weights, alignment=8)
        assert sent.route.alignment == 8 and sent.route.num_rows == sent.x.shape[0]
        home = comm.combine(grouped_mm(sent.x, w, sent.route.offs), sent.route, sent.weights)
        home.sin().sum().backward()
        got = x.grad, weights.grad, w.grad
        dense_x, _, dense_weights = toy.inputs(7, grad=True)
        dense_x, dense_weights = (t.detach().clone().requires_grad_() for t in (x, weights))
        dense_w = w.detach().clone().requires_grad_()
        chosen = torch.einsum("th,tkhi->tki", dense_x, dense_w[topk_idx.clamp(min=0).long()])
        (chosen * torch.where(topk_idx >= 0, dense_weights, 0)[..., None]).sum(1).sin().sum().backward()
        for one, other in zip(got, (dense_x.grad, dense_weights.grad, dense_w.grad), strict=True):
            torch.testing.assert_close(one, other)


def check_expert_of_rows(name: str, seed: int) -> None:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    case = route_cases(world_size, seed)[name]
    plan = expected_plan(case)[rank]
    with ep_ops.Communicator(**case.sizes, hidden_size=8, device="cpu", dtype=torch.float32) as comm:
        sizes = dict(**case.room(rank), max_tokens=case.max_tokens)
        route, _ = comm.plan(case.topk_idx[rank], **sizes)
        expected = torch.full((case.capacity[rank],), -1)
        for source, idx in enumerate(case.topk_idx):
            for token, experts in enumerate(idx.tolist()):
                for k, expert in enumerate(experts):
                    row = int(plan.table[source, token, k])
                    if row >= 0:
                        expected[row] = case.holder(expert)[1]
        assert torch.equal(expert_of_rows(route), expected)
        assert torch.equal(route.recv_from >= 0, expected >= 0)
        values = torch.randn(comm.num_local_experts, 3)
        wanted = torch.zeros(case.capacity[rank], 3)
        wanted[expected >= 0] = values[expected[expected >= 0]]
        assert torch.equal(of_rows(values, route), wanted)


@pytest.mark.parametrize("name", cases.CASE_NAMES)
def test_expert_of_rows(name):
    run_ranks(2, check_expert_of_rows, name, cases.fresh_seed())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.drawn)])
def test_biases_and_scales_of_experts(compiled):
    """Values and gradients as in a dense model, though rows that nobody owns hold NaN."""
    torch._dynamo.reset()
    with toy.communicator() as comm:
        x, topk_idx, weights = toy.inputs(6, seed=cases.fresh_seed(), grad=True)
        bias, scale = (torch.randn(toy.EXPERTS, toy.HIDDEN, requires_grad=True) for _ in range(2))

        def layer(x, weights, bias, scale):
            sent = comm.dispatch(x, topk_idx, weights)
            y = torch.tanh(sent.x) * of_rows(scale, sent.route) + of_rows(bias, sent.route)
            return comm.combine(y, sent.route, sent.weights)

        def dense(x, weights, bias, scale):
            at = topk_idx.clamp(min=0).long()
            y = torch.tanh(x)[:, None] * scale[at] + bias[at]
            return (y * torch.where(topk_idx >= 0, weights, 0)[..., None]).sum(1)

        given = (x, weights, bias, scale)
        results = []
        for run in (torch.compile(layer, fullgraph=True) if compiled else layer, dense):
            out = run(*given)
            results.append([out, *torch.autograd.grad(out.sin().sum(), given)])
        torch.testing.assert_close(*results)
        sent = comm.dispatch(x, topk_idx, weights)
        assert sent.x[expert_of_rows(sent.route) < 0].isnan().any()


def test_a_bias_that_is_added_everywhere_is_found_out():
    """A gradient that sums over all rows becomes NaN, because rows that are undefined on a GPU are NaN here."""
    for strict in (True, False):
        with toy.communicator(strict=strict) as comm:
            x, topk_idx, weights = toy.inputs(6, grad=True)
            bias = torch.zeros(toy.EXPERTS, toy.HIDDEN, requires_grad=True)
            sent = comm.dispatch(x, topk_idx, weights)
            row = torch.arange(sent.route.num_rows)
            expert = torch.searchsorted(sent.route.offs, row, right=True).clamp(max=toy.EXPERTS - 1)
            comm.combine(torch.tanh(sent.x) + bias[expert], sent.route, sent.weights).sum().backward()
            assert bool(bias.grad.isnan().any()) == strict


def test_split_operations_are_not_interrupted():
    """An operator between start and wait raises, as on GPUs."""
    with toy.communicator() as comm:
        x, topk_idx, weights = toy.inputs(4)
        started = comm.dispatch_start(x, topk_idx, weights)
        for other in (lambda: comm.plan(topk_idx), lambda: comm.dispatch_start(x, topk_idx)):
            with pytest.raises(RuntimeError, match="dispatch_start must be followed by ep::dispatch_wait"):
                other()
        rows = comm.dispatch_wait(started)
        with pytest.raises(RuntimeError, match="ep::dispatch_wait was called, but nothing was started"):
            comm.dispatch_wait(started)
        sent = comm.combine_start(rows.x, rows.route, rows.weights)
        with pytest.raises(RuntimeError, match="ep::dispatch_wait was called, but ep::combine_start was called"):
            comm.dispatch_wait(started)
        comm.combine_wait(sent)


REJECTIONS = {
    "tokens": "topk_idx has 6 tokens; allowed: at most max_tokens_per_rank 5",
    "dtype": "x has dtype torch.float64; allowed: torch.float32",
    "num_rows": "num_rows is -1",
    "rows": "y has shape (5, 8); allowed: [28, 8] (the rows of the route, hidden_size)",
    "max_tokens": "max_tokens is 6; allowed: 0..max_tokens_per_rank 5",
    "gathered": "y lies in symmetric memory, and not at its beginning",
    "start": "x has shape (3, 8); allowed: [4, 8] (the tokens of topk_idx, hidden_size)",
}


def check_rejection(kind: str) -> str:
    """Rank 1 alone gets an argument wrong; then all go on."""
    with toy.communicator(max_tokens=5, symmetric_rows=100) as comm:
        wrong = comm.rank == 1
        x, topk_idx, weights = toy.inputs(4, seed=comm.rank)
        sent = comm.dispatch(x, topk_idx)
        y = comm.empty_rows(sent.x.shape[0]).copy_(sent.x)
        more = toy.inputs(6)
        calls = {
            "tokens": lambda: comm.plan(more[1] if wrong else topk_idx),
            "dtype": lambda: comm.dispatch(x.double() if wrong else x, topk_idx),
            "num_rows": lambda: comm.dispatch_planned(x, sent.route._replace(num_rows=-1) if wrong else sent.route),
            "rows": lambda: comm.combine(sent.x[:5] if wrong else sent.x, sent.route),
            "max_tokens": lambda: comm.combine(sent.x, sent.route._replace(max_tokens=6) if wrong else sent.route),
            "gathered": lambda: comm.combine_gathered(comm.empty_rows(len(y) + 1)[1:] if wrong else y, sent.route),
            "start": lambda: comm.dispatch_wait(comm.dispatch_start(x[:3] if wrong else x, topk_idx)),
        }
        with pytest.raises((TypeError, ValueError)) as raised:
            calls[kind]()
        again = comm.dispatch(x, topk_idx, weights)
        valid = torch.where(topk_idx >= 0, weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(comm.combine(again.x, again.route, again.weights), x * valid)
        return str(raised.value)


@pytest.mark.parametrize("kind", REJECTIONS)
def test_rejections_reach_everybody(kind):
    other, own = run_ranks(2, check_rejection, kind)
    assert REJECTIONS[kind] in own
    assert "rejected by rank 1: " + REJECTIONS[kind] in other
