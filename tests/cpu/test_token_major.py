"""Token-major rows: the operators against plain loops (tests/tokens.py), the layer against a dense one and against rows
grouped by expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
import quantised
import tokens as oracle
import torch
import torch._dynamo
import toy
from cases import RouteCase, Tokens
from ranks import run_ranks
from test_formats_dispatch import HIDDEN, as_bytes, draw
from test_reference import assert_same, communicator
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.library import opcheck

import ep_ops
from ep_ops.nn import expert_lists, expert_of_rows, gather_rows, grouped_mm, reduce_rows
from ep_ops.operators import OPERATORS

NAN = float("nan")
ROUTES = (
    "random", "random_with_none", "uneven_experts", "top_1", "all_to_one_rank", "nothing_to_last_rank",
    "repeated_experts", "no_tokens_on_last_rank", "no_tokens_anywhere", "no_tokens_allowed", "only_none", "one_expert",
)  # fmt: skip


def rooms(case: RouteCase, how: str) -> list[int] | None:
    """Rows of each rank."""
    most = case.world_size * case.max_tokens
    if how == "exact":
        return None
    few = [3 + 2 * rank for rank in range(case.world_size)]
    return {"all": [most] * case.world_size, "few": few, "none": [0] * case.world_size}[how]


# ---------------------------------------------------------------------- the operators


@dataclasses.dataclass
class Given:
    """Of one rank."""

    tokens: Tokens
    again: Tokens  # for a second dispatch along the route
    y: Tensor  # [R, H], NaN in rows without a token
    row_grads: Tensor  # [R, K], NaN where there is no local id
    residual: Tensor


def _operators(case: RouteCase, given: list[Given], capacity: list[int] | None) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    mine = given[rank]
    x, weights, idx = mine.tokens.x, mine.tokens.weights, case.topk_idx[rank]
    with communicator(case, x.shape[1], x.dtype, symmetric_rows=1000) as comm, torch.no_grad():
        how: dict[str, Any] = {"max_tokens": case.max_tokens}
        out: dict[str, Any] = {}
        if capacity is None:
            sent = comm.dispatch_tokens_dynamic(x, idx, weights, **how)
            out["unweighted"] = comm.dispatch_tokens_dynamic(x, idx, **how)
        else:
            how["capacity"] = capacity[rank]
            sent = comm.dispatch_tokens(x, idx, weights, **how)
            out["unweighted"] = comm.dispatch_tokens(x, idx, **how)
            out["split"] = comm.dispatch_tokens_wait(comm.dispatch_tokens_start(x, idx, weights, **how))
        out["sent"], route = sent, sent.route
        out["planned"] = comm.dispatch_tokens_planned(mine.again.x, route, mine.again.weights)
        out["planned unweighted"] = comm.dispatch_tokens_planned(mine.again.x, route)
        out["planned x"] = comm.dispatch_planned(mine.again.x, route)
        out["combine"] = comm.combine(mine.y, route)
        out["combine split"] = comm.combine_wait(comm.combine_start(mine.y, route))
        out["combine residual"] = comm.combine(mine.y, route, residual=mine.residual)
        out["combine gathered"] = comm.combine_gathered(comm.empty_rows(route.num_rows).copy_(mine.y), route)
        along = (*route.tensors, *route.ints, comm.name)
        backward = torch.ops.ep.dispatch_tokens_backward
        out["backward"] = backward(mine.y, mine.row_grads, *along)
        out["backward x"], out["backward w"] = backward(mine.y, None, *along), backward(None, mine.row_grads, *along)
    return out


def _given(case: RouteCase, copies: list[oracle.Copies], dtype: torch.dtype, hidden: int, seed: int) -> list[Given]:
    tokens, again = (cases.random_tokens(case, hidden, dtype, seed + i) for i in range(2))
    draw = torch.Generator().manual_seed(seed + 2)
    given = []
    for here, own, other in zip(copies, tokens, again, strict=True):
        kept = len(here.rows)
        y = torch.full((here.num_rows, hidden), NAN, dtype=dtype)
        spread = torch.randn(kept, 1, generator=draw).mul(3).exp()  # the order of additions shows
        y[:kept] = (spread * torch.randn(kept, hidden, generator=draw)).to(dtype)
        grads = torch.randn(here.local_idx.shape, generator=draw).to(own.weights.dtype)
        grads[here.local_idx < 0] = NAN
        given.append(Given(own, other, y, grads, torch.randn(own.x.shape, generator=draw).to(dtype)))
    return given


def assert_sent(got: ep_ops.records.DispatchedTokens, here: oracle.Copies, x: Tensor, weights: Tensor | None) -> None:
    assert_same(got.x, x)
    assert_same(got.local_idx, here.local_idx)
    assert (got.weights is None) == (weights is None)
    if weights is not None:
        assert_same(got.weights, weights)
    for name in ("send_rows", "arrivals", "offs", "counts"):
        assert_same(getattr(got.route, name), getattr(here, name))
    assert_same(got.dropped, here.dropped)
    assert (got.route.num_rows, got.route.alignment, got.route.slots) == (here.num_rows, 1, 0)
    assert got.route.token_major and got.scales is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ROUTES)
def test_operators(world_size: int, name: str) -> None:
    for how in ("all", "few", "exact") if name in ("random", "repeated_experts", "random_with_none") else ("all",):
        _check_operators(world_size, name, how, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    _check_operators(2, "random_with_none", "few", dtype)


def test_no_room_at_all() -> None:
    _check_operators(2, "random", "none", torch.bfloat16)


def _check_operators(world_size: int, name: str, how: str, dtype: torch.dtype) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    capacity = rooms(case, how)
    copies = oracle.expected_copies(case, capacity)
    given = _given(case, copies, dtype, 8, seed)
    results = run_ranks(world_size, _operators, case, given, capacity)
    y = [one.y for one in given]
    sums = oracle.expected_sums(case, copies, y)
    weight_grads = oracle.expected_weight_grads(case, copies, [one.row_grads for one in given])
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    for rank, got in enumerate(results):
        here = copies[rank]
        x, weights = oracle.expected_rows(here, [one.tokens for one in given])
        assert_sent(got["sent"], here, x, weights)
        assert_sent(got["unweighted"], here, x, None)
        if how != "exact":
            assert_sent(got["split"], here, x, weights)
        x, weights = oracle.expected_rows(here, [one.again for one in given])
        assert_same(got["planned"][0], x)
        assert_same(got["planned"][1], weights)
        assert_same(got["planned unweighted"][0], x)
        assert_same(got["planned x"][0], x)
        assert got["planned"][2] is None and got["planned unweighted"][1] is None
        for way in ("combine", "combine split", "combine gathered"):
            assert_same(got[way], sums[rank])
        assert_same(got["backward"][0], sums[rank])
        assert_same(got["backward x"][0], sums[rank])
        assert_same(got["backward"][1], weight_grads[rank])
        assert_same(got["backward w"][1], weight_grads[rank])
        assert got["backward x"][1].shape == got["backward w"][0].shape == (0,)
    # With a residual, which is added before anything is rounded.
    for rank, got in enumerate(results):
        wide = oracle.expected_sums(case, copies, [one.to(exact) for one in y])[rank]
        assert_same(got["combine residual"], (wide + given[rank].residual.to(exact)).to(dtype))


# ---------------------------------------------------------------------- formats

FORMATS = [
    ("128/pow2", "rows"), ("128/pow2", "columns"), ("128/fp32", "rows"), ("128/fp32", "columns"), ("32/mx", "rows"),
    ("row/fp32", "rows"),
]  # fmt: skip


def _formats(case: RouteCase, given: list[Any], capacity: list[int]) -> list[dict[str, Any]]:
    rank, results = torch.distributed.get_rank(), []
    for (name, layout), one in zip(FORMATS, given, strict=True):
        x, weights, idx = one.tokens[rank].x, one.tokens[rank].weights, case.topk_idx[rank]
        codes, scales = one.passed(rank)
        asked = {"format": f"e4m3/{name}", "scales_as": layout}
        how = {"max_tokens": case.max_tokens, "capacity": capacity[rank]}
        with communicator(case, x.shape[1], x.dtype) as comm, torch.no_grad():
            sent = comm.dispatch_tokens(x, idx, weights, **how, **asked)
            passed = comm.dispatch_tokens(codes, idx, scales=scales, **how, **asked)
            split = comm.dispatch_tokens_wait(comm.dispatch_tokens_start(x, idx, weights, **how, **asked))
            planned = comm.dispatch_tokens_planned(x, sent.route, weights, **asked)
            exact = comm.dispatch_tokens_dynamic(x, idx, max_tokens=case.max_tokens, **asked)
            wire = comm.dispatch_tokens(x, idx, weights, **how, format=f"wire:e4m3/{name}")
            plain = comm.dispatch_tokens(x, idx, weights, **how)
        same = [(each.x, each.scales) for each in (sent, passed, split)] + [(planned[0], planned[2])]
        strides = sent.scales.stride()
        results.append({
            "rows": [(as_bytes(x), as_bytes(scales)) for x, scales in same], "strides": strides,
            "exact": (as_bytes(exact.x), as_bytes(exact.scales)), "wire": (wire.x, wire.scales),
            "beside": [(sent.local_idx, plain.local_idx), (sent.weights, plain.weights), (planned[1], plain.weights)],
        })  # fmt: skip
    return results


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["all", "few"])
def test_formats(world_size: int, how: str) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)["random_with_none"]
    capacity = rooms(case, how)
    assert capacity is not None
    given = [draw(case, name, torch.bfloat16, seed + i) for i, (name, _) in enumerate(FORMATS)]
    copies, exact = oracle.expected_copies(case, capacity), oracle.expected_copies(case, None)
    for rank, results in enumerate(run_ranks(world_size, _formats, case, given, capacity)):
        for (name, layout), one, got in zip(FORMATS, given, results, strict=True):
            for x, scales in got["rows"]:
                _same_codes(copies[rank], one, x, scales)
            _same_codes(exact[rank], one, *got["exact"])
            rows = capacity[rank]
            if layout == "columns":
                assert got["strides"] == (1, -(-rows // 4) * 4)
            values = [quantised.dequantised(c, s, torch.bfloat16) for c, s in zip(one.codes, one.scales, strict=True)]
            tokens = [Tokens(x, own.weights) for x, own in zip(values, one.tokens, strict=True)]
            assert_same(got["wire"][0], oracle.expected_rows(copies[rank], tokens)[0])
            assert got["wire"][1] is None and HIDDEN[name] == tokens[0].x.shape[1]
            for mine, plain in got["beside"]:
                assert_same(mine, plain)


def _same_codes(here: oracle.Copies, given: Any, x: Tensor, scales: Tensor) -> None:
    """[R, H] of codes and [R, G] of scales, in whatever layout."""
    assert x.dtype == torch.uint8 and x.shape[0] == scales.shape[0] == here.num_rows
    for row, (source, token) in enumerate(here.rows):
        assert torch.equal(x[row], given.codes[source][token])
        wanted = given.scales[source][token]
        if given.name == "32/mx":
            assert scales[row].tolist() == [quantised.byte_of(scale) for scale in wanted.tolist()]
        else:
            assert_same(scales[row].view(-1), wanted.float())
    behind = len(here.rows)  # undefined
    assert (x[behind:] == 0x7F).all()
    assert (scales[behind:] == 255).all() if given.name == "32/mx" else scales[behind:].isnan().all()


# ---------------------------------------------------------------------- lists


def same_lists(got: Any, wanted: oracle.Lists) -> None:
    for name in ("rows", "flat", "places", "offs", "counts", "dropped"):
        assert_same(getattr(got, name), getattr(wanted, name))


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("shape", [(9, 3), (40, 8), (1, 1), (0, 3), (5, 1)])
@pytest.mark.parametrize("experts", [1, 3, 8])
def test_lists(shape: tuple[int, int], experts: int, alignment: int) -> None:
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    for low in (-1, -3, 0):
        local_idx = torch.randint(low, experts, shape, generator=draw).clamp(min=-1).int()
        got = expert_lists(local_idx, experts, alignment=alignment)
        assert got.rows.shape[0] % alignment == 0 and not got.dropped.any()
        assert got.rows.shape[0] <= shape[0] * shape[1] + experts * (alignment - 1)
        same_lists(got, oracle.expected_lists(local_idx, experts, alignment, got.rows.shape[0]))
        for share in (1, 2):
            capacity = alignment * share
            got = expert_lists(local_idx, experts, alignment=alignment, capacity=capacity)
            assert got.rows.shape[0] <= capacity
            same_lists(got, oracle.expected_lists(local_idx, experts, alignment, got.rows.shape[0]))


def test_no_experts_and_none_named() -> None:
    assert expert_lists(torch.full((3, 2), -1).int(), 0).offs.shape == (0,)
    got = expert_lists(torch.full((3, 2), -1).int(), 2, alignment=4)
    assert got.offs.tolist() == [0, 0] and (got.flat == 6).all() and (got.places == -1).all() and (got.rows == 0).all()


def test_what_consumers_take_beside_lists() -> None:
    """As quack's and Triton's fused MoE do, in loops over what they are told."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    local_idx = torch.randint(-1, 5, (17, 3), generator=draw).int()
    x, w = torch.randn(17, 4, generator=draw), torch.randn(5, 4, 6, generator=draw)
    lists = expert_lists(local_idx, 5, alignment=4)
    y = torch.full((17, 3, 6), NAN)
    padded = int(lists.offs[-1:])
    for block, expert in enumerate(lists.blocks.tolist()):
        assert (expert >= 0) == (4 * block < padded)
        for place in range(4 * block, 4 * block + 4):
            flat = int(lists.flat[place])
            if expert >= 0 and flat < local_idx.numel():
                y[flat // 3, flat % 3] = x[flat // 3] @ w[expert]
    by_place = torch.full((lists.rows.shape[0], 6), NAN)
    for expert in range(5):
        begin, end = lists.cu_seqlens[expert : expert + 2].tolist()
        by_place[begin:end] = x[lists.rows[begin:end].long()] @ w[expert]
    for row in range(17):
        for k in range(3):
            expert, place = int(local_idx[row, k]), int(lists.places[row, k])
            if expert >= 0:
                torch.testing.assert_close(y[row, k], x[row] @ w[expert])
                torch.testing.assert_close(by_place[place], x[row] @ w[expert])
            else:
                assert place == -1 and y[row, k].isnan().all()


@pytest.mark.parametrize(("alignment", "capacity", "text"), [
    (0, None, "alignment is 0; allowed: from 1 on"), (1, 0, "capacity is 0"), (1, -2, "capacity is -2"),
    (4, 6, "capacity is 6; allowed: positive multiples of alignment 4"),
])  # fmt: skip
def test_lists_that_are_refused(alignment: int, capacity: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        expert_lists(torch.zeros(2, 2).int(), 2, alignment=alignment, capacity=capacity)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce_rows(dtype: torch.dtype, weighted: bool) -> None:
    """To the bit: fp32, k ascending, rounded once; what holds nothing is not read."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    local_idx = torch.randint(-1, 4, (30, 6), generator=draw).int()
    lists = expert_lists(local_idx, 4, alignment=4, capacity=100)
    y = (torch.randn(100, 1, generator=draw).mul(3).exp() * torch.randn(100, 8, generator=draw)).to(dtype)
    y[lists.flat == local_idx.numel()] = NAN
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.randn(30, 6, generator=draw).to(exact) if weighted else None
    assert_same(reduce_rows(y, lists, weights), oracle.expected_reduced(y, lists.places, weights))


def test_gradients_of_lists() -> None:
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    local_idx = torch.randint(-1, 3, (7, 3), generator=draw).int()
    lists = expert_lists(local_idx, 3, alignment=2, capacity=14)
    assert lists.dropped.any() or lists.counts.sum() == (local_idx >= 0).sum()
    double = {"generator": draw, "dtype": torch.float64}
    x, y = (torch.randn(rows, 2, **double).requires_grad_() for rows in (7, 14))
    weights = torch.randn(7, 3, **double).requires_grad_()
    assert gradcheck(lambda x: gather_rows(x, lists), x)
    assert gradcheck(lambda y, w: reduce_rows(y, lists, w), (y, weights))
    assert gradcheck(lambda y: reduce_rows(y, lists), y)
    assert gradcheck(lambda w: reduce_rows(y.detach(), lists, w), weights)


def test_what_is_undefined_reaches_no_gradient() -> None:
    """NaN in rows without a token, in places that hold nothing, and in their gradients."""
    local_idx = torch.tensor([[0, -1], [2, 0], [-1, -1]]).int()
    lists = expert_lists(local_idx, 3, alignment=4)
    nothing = (lists.flat == local_idx.numel())[:, None]
    x = torch.ones(3, 2)
    x[2] = NAN
    x.requires_grad_()
    weights = torch.full((3, 2), 2.0).requires_grad_()
    y = torch.where(nothing, NAN, gather_rows(x, lists))
    reduce_rows(y, lists, weights).sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [4.0, 4.0], [0.0, 0.0]]
    assert weights.grad.tolist() == [[2.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


# ---------------------------------------------------------------------- a layer


def layer(
    comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor, up: Tensor, down: Tensor, how: str = "",
    **sizes: Any,
) -> Tensor:  # fmt: skip
    """Token-major rows, gathered for the first GEMM of each expert."""
    if how == "exact":
        sent = comm.dispatch_tokens_dynamic(x, idx, weights, **sizes)
    elif how == "split":
        sent = comm.dispatch_tokens_wait(comm.dispatch_tokens_start(x, idx, weights, **sizes))
    else:
        sent = comm.dispatch_tokens(x, idx, weights, **sizes)
    rows, row_weights = sent.x, sent.weights
    if how == "planned":
        rows, row_weights, _ = comm.dispatch_tokens_planned(x, sent.route, weights)
    lists = expert_lists(sent.local_idx, comm.num_local_experts, alignment=4)
    y = grouped_mm(torch.tanh(grouped_mm(gather_rows(rows, lists), up, lists.offs)), down, lists.offs)
    y = reduce_rows(y, lists, row_weights)
    if how == "split":
        return comm.combine_wait(comm.combine_start(y, sent.route))
    return comm.combine(y, sent.route)


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
    (2, "no_tokens_on_last_rank", "", "all"), (2, "only_none", "", "all"),
])  # fmt: skip
def test_equal_to_a_dense_model(world_size: int, name: str, how: str, room: str) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    capacity = rooms(case, room)
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
        grouped = comm.dispatch_dynamic(one[0], idx, one[1], max_tokens=case.max_tokens)
        sent = comm.dispatch_tokens(two[0], idx, two[1], max_tokens=case.max_tokens)
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
        return found


@pytest.mark.parametrize(("world_size", "name"), [(1, "random"), (2, "repeated_experts"), (3, "random_with_none")])
def test_equal_to_rows_grouped_by_expert(world_size: int, name: str) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    tokens = cases.random_tokens(case, 8, torch.bfloat16, seed)
    for found in run_ranks(world_size, _both, case, tokens, seed):
        for one, other in found:
            assert_same(one, other)


# ---------------------------------------------------------------------- compiled


def _steps(backend: str, how: str, seed: int) -> list[list[list[Tensor]]]:
    """Eager and compiled, with several numbers of tokens on this rank."""
    rank, results = torch.distributed.get_rank(), []
    torch._dynamo.reset()
    with toy.communicator() as comm:
        draw = torch.Generator().manual_seed(seed)
        shape = comm.num_local_experts, toy.HIDDEN, toy.HIDDEN
        up, down = (torch.randn(shape, generator=draw).requires_grad_() for _ in range(2))
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
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
    (1, "inductor", "planned"), (1, "aot_eager", "exact"), (2, "aot_eager", ""), (1, "aot_eager", "split"),
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


def test_quantised_rows_are_gathered_too() -> None:
    """And their scales."""
    local_idx = torch.tensor([[0, 1], [1, -1], [-1, -1]]).int()
    lists = expert_lists(local_idx, 2, alignment=2)
    codes = torch.randn(3, 8).to(torch.float8_e4m3fn)
    rows = gather_rows(codes, lists)
    assert rows.dtype == codes.dtype
    for place, row in enumerate([0, None, 0, 1]):
        assert torch.equal(as_bytes(rows)[place], as_bytes(codes)[row] if row is not None else torch.zeros(8).byte())


@pytest.mark.parametrize("operator", [
    op.name for op in OPERATORS if op.name.startswith("dispatch_tokens") and "backward" not in op.name
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "layout"), [("e4m3/128/pow2", "columns"), ("e4m3/32/mx", ""), ("wire:e4m3/32/mx", "")]
)
def test_opcheck_of_formats(operator: str, name: str, layout: str) -> None:
    """Without a format: tests/cpu/test_operators_registration.py."""
    op = next(each for each in OPERATORS if each.name == operator)
    with ep_ops.Communicator(
        num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=9, device="cpu", strict=False
    ) as comm:
        x = torch.randn(5, 128).bfloat16()
        _, idx, weights = toy.inputs(5)
        route = comm.dispatch_tokens(x, idx, capacity=7).route
        known = {
            "x": x.requires_grad_("wire" in name), "topk_weights": weights, "ticket": torch.empty(0).long(),
            **route._asdict(), "capacity": 7, "num_local_experts": 4, "world_size": 1, "comm": comm.name,
            "scales": None, "format": name, "scales_as": layout,
        }  # fmt: skip
        opcheck(op.overload, tuple(known[field] for field in op.arguments._fields))


# ---------------------------------------------------------------------- refusals


@pytest.fixture
def comm() -> Any:
    with ep_ops.Communicator(num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=6, device="cpu") as made:
        yield made


def test_layouts_of_scales_are_refused_by_name(comm: ep_ops.Communicator) -> None:
    x, idx = torch.ones(3, 128).bfloat16(), torch.zeros(3, 2).int()
    route = comm.dispatch_tokens(x, idx).route
    for name, layout in (("e4m3/128/pow2", "packed"), ("e4m3/32/mx", "swizzled/torch")):
        asked = {"format": name, "scales_as": layout}
        text = rf"scales_as is '{layout}'; allowed for token-major rows: 'rows', 'columns', '' for the first"
        for call in (
            lambda asked: comm.dispatch_tokens(x, idx, **asked),
            lambda asked: comm.dispatch_tokens_dynamic(x, idx, **asked),
            lambda asked: comm.dispatch_tokens_wait(comm.dispatch_tokens_start(x, idx, **asked)),
            lambda asked: comm.dispatch_tokens_planned(x, route, **asked),
        ):
            with pytest.raises(ValueError, match=text):
                call(asked)
    with pytest.raises(ValueError, match="allowed for format 'e4m3/32/mx': 'rows'"):
        comm.dispatch_tokens(x, idx, format="e4m3/32/mx", scales_as="columns")


def _mixed_up() -> list[str]:
    """Rank 1 alone takes one kind of route for the other: all are told."""
    said = []
    with toy.communicator() as comm:
        x, idx, weights = toy.inputs(4)
        grouped, sent = comm.dispatch(x, idx, weights), comm.dispatch_tokens(x, idx, weights)
        rows = sent.weights[:, 0].contiguous()
        wrong = comm.rank == 1
        for call in (
            lambda: comm.combine(sent.x, sent.route, rows if wrong else None),
            lambda: comm.combine_wait(comm.combine_start(sent.x, sent.route, rows if wrong else None)),
            lambda: comm.dispatch_planned(x, sent.route, weights if wrong else None),
            lambda: comm.dispatch_tokens_planned(x, grouped.route if wrong else sent.route),
        ):
            with pytest.raises(ValueError) as error:
                call()
            said.append(str(error.value))
        comm.combine(sent.x, sent.route)  # it goes on
        for wrong_call in (
            lambda: expert_of_rows(sent.route), lambda: sent.route.m_indices, lambda: sent.route.psum,
        ):  # fmt: skip
            with pytest.raises(ValueError, match="token-major"):
                wrong_call()
    return said


def test_routes_are_not_mixed_up() -> None:
    others, own = run_ranks(2, _mixed_up)
    for here, there in zip(own, others, strict=True):
        assert ("weights are given for the rows of a token-major route" in here) or "grouped by expert" in here
        assert f"refused by rank 1: {here}" in there


def _counted() -> str:
    with toy.communicator(overflow="raise") as comm:
        x, idx, _ = toy.inputs(4, seed=comm.rank)
        idx[:] = 0
        comm.dispatch_tokens(x, idx, capacity=6 if comm.rank == 0 else 0)
        try:
            comm.check_errors()
        except ValueError as error:
            return str(error)
    return ""


def test_overflow_is_counted_by_expert() -> None:
    first, second = run_ranks(2, _counted)
    assert "4 rows did not fit into what rank 0 had" in first and "by expert: 0 (4)" in first and second == ""


def test_a_batch_comes_back_in_its_shape(comm: ep_ops.Communicator) -> None:
    x, idx = torch.randn(2, 3, 128).bfloat16(), torch.tensor([0, 3]).expand(2, 3, 2)
    sent = comm.dispatch_tokens(x, idx.contiguous(), torch.ones(2, 3, 2).bfloat16())
    assert sent.weights.dtype == torch.float32
    assert torch.equal(comm.combine(sent.x, sent.route), x)


def test_default_capacity_is_the_most_there_can_be(comm: ep_ops.Communicator) -> None:
    x, idx = torch.ones(3, 128).bfloat16(), torch.zeros(3, 2).int()
    assert comm.dispatch_tokens(x, idx).x.shape[0] == 6
    assert comm.dispatch_tokens(x, idx, max_tokens=4).x.shape[0] == 4
