"""Token-major rows: the operators against plain loops (tests/tokens.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
import quantized
import tokens as oracle
import torch
import toy
from cases import RouteCase, Tokens
from ranks import run_ranks
from test_formats_dispatch import HIDDEN, as_bytes, draw
from test_reference import assert_same, communicator
from torch import Tensor
from torch.library import opcheck

import ep_ops
from ep_ops.nn import expert_of_rows
from ep_ops.operators import OPERATORS

NAN = float("nan")
ROUTES = (
    "random", "random_with_none", "uneven_experts", "top_1", "all_to_one_rank", "nothing_to_last_rank",
    "repeated_experts", "no_tokens_on_last_rank", "no_tokens_anywhere", "no_tokens_allowed", "only_none", "one_expert",
)  # fmt: skip


# ---------------------------------------------------------------------- the operators


@dataclasses.dataclass
class Given:
    """Inputs of one rank."""

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
            sent = comm.dispatch(x, idx, weights, **how, layout="token_major", exact=True)
            out["unweighted"] = comm.dispatch(x, idx, **how, layout="token_major", exact=True)
        else:
            how["capacity"] = capacity[rank]
            sent = comm.dispatch(x, idx, weights, **how, layout="token_major")
            out["unweighted"] = comm.dispatch(x, idx, **how, layout="token_major")
            out["split"] = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **how, layout="token_major"))
        out["sent"], route = sent, sent.route
        out["planned"] = comm.dispatch_planned(mine.again.x, route, mine.again.weights)
        out["planned unweighted"] = comm.dispatch_planned(mine.again.x, route)
        # As a combine sends its gradient: without a layout, and with zeros in padding, which these rows do not have.
        out["planned x"] = comm.dispatch_planned(mine.again.x, route._replace(layout="grouped"), zeros=True)
        out["combine"] = comm.combine(mine.y, route)
        out["combine split"] = comm.combine_wait(comm.combine_start(mine.y, route))
        out["combine residual"] = comm.combine(mine.y, route, residual=mine.residual)
        out["combine gathered"] = comm.combine_gathered(comm.empty_rows(route.num_rows).copy_(mine.y), route)
        along = (*route.tensors, *route.ints, comm.name, "token_major")
        backward = torch.ops.ep.dispatch_backward
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


def assert_sent(got: ep_ops.Dispatched, here: oracle.Copies, x: Tensor, weights: Tensor | None) -> None:
    assert_same(got.x, x)
    assert_same(got.local_idx, here.local_idx)
    assert (got.weights is None) == (weights is None)
    if weights is not None:
        assert_same(got.weights, weights)
    for name in ("send_rows", "arrivals", "offs", "counts"):
        assert_same(getattr(got.route, name), getattr(here, name))
    assert_same(got.dropped, here.dropped)
    assert (got.route.num_rows, got.route.alignment, got.route.slots) == (here.num_rows, 1, 0)
    assert got.route.layout == "token_major" and got.scales is None
    assert_same(got.route.local_idx, here.local_idx)


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
    capacity = oracle.rooms(case, how)
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
        assert got["planned"].scales is None and got["planned unweighted"].weights is None
        assert_same(got["planned"].local_idx, here.local_idx)
        assert_same(got["planned"].dropped, here.dropped)
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
            sent = comm.dispatch(x, idx, weights, **how, **asked, layout="token_major")
            passed = comm.dispatch(codes, idx, scales=scales, **how, **asked, layout="token_major")
            split = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **how, **asked, layout="token_major"))
            planned = comm.dispatch_planned(x, sent.route, weights, **asked)
            exact = comm.dispatch(x, idx, max_tokens=case.max_tokens, **asked, layout="token_major", exact=True)
            wire = comm.dispatch(x, idx, weights, **how, format=f"wire:e4m3/{name}", layout="token_major")
            plain = comm.dispatch(x, idx, weights, **how, layout="token_major")
        same = [(each.x, each.scales) for each in (sent, passed, split)] + [(planned.x, planned.scales)]
        strides = sent.scales.stride()
        results.append({
            "rows": [(as_bytes(x), as_bytes(scales)) for x, scales in same], "strides": strides,
            "exact": (as_bytes(exact.x), as_bytes(exact.scales)), "wire": (wire.x, wire.scales),
            "beside": [(sent.local_idx, plain.local_idx), (sent.weights, plain.weights),
                (planned.weights, plain.weights)],
        })  # fmt: skip
    return results


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["all", "few"])
def test_formats(world_size: int, how: str) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)["random_with_none"]
    capacity = oracle.rooms(case, how)
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
            values = [quantized.dequantized(c, s, torch.bfloat16) for c, s in zip(one.codes, one.scales, strict=True)]
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
            assert scales[row].tolist() == [quantized.byte_of(scale) for scale in wanted.tolist()]
        else:
            assert_same(scales[row].view(-1), wanted.float())
    behind = len(here.rows)  # undefined
    assert (x[behind:] == 0x7F).all()
    assert (scales[behind:] == 255).all() if given.name == "32/mx" else scales[behind:].isnan().all()


@pytest.mark.parametrize("operator", [
    op.name for op in OPERATORS if op.name.startswith("dispatch") and "backward" not in op.name
])  # fmt: skip
@pytest.mark.parametrize(
    ("name", "layout"), [("e4m3/128/pow2", "columns"), ("e4m3/32/mx", ""), ("wire:e4m3/32/mx", "")]
)
def test_opcheck_of_formats(operator: str, name: str, layout: str) -> None:
    """torch's opcheck accepts token-major operators with a format; tests/cpu/test_operators_registration.py has those
    without."""
    op = next(each for each in OPERATORS if each.name == operator)
    with ep_ops.Communicator(
        num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=9, device="cpu", strict=False
    ) as comm:
        x = torch.randn(5, 128).bfloat16()
        _, idx, weights = toy.inputs(5)
        route = comm.dispatch(x, idx, capacity=7, layout="token_major").route
        known = {
            "x": x.requires_grad_("wire" in name), "topk_weights": weights, "flight": 0,
            "ticket": torch.empty(0, requires_grad="wire" in name), **route._asdict(), "capacity": 7, "zeros": True,
            "num_local_experts": 4, "world_size": 1, "comm": comm.name, "scales": None,
            "format": name, "scales_as": layout,
        }  # fmt: skip
        opcheck(op.overload, tuple(known[field] for field in op.arguments._fields))


# ---------------------------------------------------------------------- rejections


@pytest.fixture
def comm() -> Any:
    with ep_ops.Communicator(num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=6, device="cpu") as made:
        yield made


def test_layouts_of_scales_are_rejected_by_name(comm: ep_ops.Communicator) -> None:
    x, idx = torch.ones(3, 128).bfloat16(), torch.zeros(3, 2).int()
    route = comm.dispatch(x, idx, layout="token_major").route
    for name, layout in (("e4m3/128/pow2", "packed"), ("e4m3/32/mx", "swizzled/torch")):
        asked = {"format": name, "scales_as": layout}
        text = rf"scales_as is '{layout}'; allowed for token-major rows: 'rows', 'columns', '' for the first"
        for call in (
            lambda asked: comm.dispatch(x, idx, **asked, layout="token_major"),
            lambda asked: comm.dispatch(x, idx, **asked, layout="token_major", exact=True),
            lambda asked: comm.dispatch_wait(comm.dispatch_start(x, idx, **asked, layout="token_major")),
            lambda asked: comm.dispatch_planned(x, route, **asked),
        ):
            with pytest.raises(ValueError, match=text):
                call(asked)
    with pytest.raises(ValueError, match="allowed for format 'e4m3/32/mx': 'rows'"):
        comm.dispatch(x, idx, format="e4m3/32/mx", scales_as="columns", layout="token_major")


def _mixed_up() -> list[str]:
    """Rank 1 alone takes one kind of route for the other: all are told."""
    said = []
    with toy.communicator() as comm:
        x, idx, weights = toy.inputs(4)
        sent = comm.dispatch(x, idx, weights, layout="token_major")
        rows = sent.weights[:, 0].contiguous()
        wrong = comm.rank == 1
        for call in (
            lambda: comm.combine(sent.x, sent.route, rows if wrong else None),
            lambda: comm.combine_wait(comm.combine_start(sent.x, sent.route, rows if wrong else None)),
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
        assert "weights are given for token-major rows" in here
        assert f"rejected by rank 1: {here}" in there


def _counted() -> str:
    with toy.communicator(overflow="raise") as comm:
        x, idx, _ = toy.inputs(4, seed=comm.rank)
        idx[:] = 0
        comm.dispatch(x, idx, capacity=6 if comm.rank == 0 else 0, layout="token_major")
        try:
            comm.check_errors()
        except ValueError as error:
            return str(error)
    return ""


def test_overflow_is_counted_by_expert() -> None:
    first, second = run_ranks(2, _counted)
    assert "rank 0 dropped 4 rows since" in first and "by expert: 0 (4)" in first and second == ""


def test_a_batch_comes_back_in_its_shape(comm: ep_ops.Communicator) -> None:
    x, idx = torch.randn(2, 3, 128).bfloat16(), torch.tensor([0, 3]).expand(2, 3, 2)
    sent = comm.dispatch(x, idx.contiguous(), torch.ones(2, 3, 2).bfloat16(), layout="token_major")
    assert sent.weights.dtype == torch.float32
    assert torch.equal(comm.combine(sent.x, sent.route), x)


def test_default_capacity_is_the_most_there_can_be(comm: ep_ops.Communicator) -> None:
    x, idx = torch.ones(3, 128).bfloat16(), torch.zeros(3, 2).int()
    assert comm.dispatch(x, idx, layout="token_major").x.shape[0] == 6
    assert comm.dispatch(x, idx, max_tokens=4, layout="token_major").x.shape[0] == 4
