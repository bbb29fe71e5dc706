"""Dispatch in every format against plain loops (tests/cases.py, tests/quantized.py), on 1, 2 and 4 ranks.

Rows and scales that are undefined hold NaN on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cases
import pytest
import quantized
import torch
from cases import RouteCase
from ranks import run_ranks
from torch import Tensor
from torch.testing import assert_close

import ep_ops
from ep_ops.formats import FORMATS

HIDDEN = {"128/pow2": 384, "128/fp32": 256, "32/mx": 160, "row/fp32": 48}
LAYOUTS = {
    "128/pow2": ("rows", "columns", "packed"),
    "128/fp32": ("rows", "columns"),
    "32/mx": ("rows", "packed", "swizzled/torch", "swizzled/quack", "swizzled/flashinfer"),
    "row/fp32": ("rows",),
}
ROUTES = {
    # ranks: routes
    1: ("repeated_experts", "padded", "one_expert"),
    2: (
        "random_with_none", "uneven_experts", "top_1", "all_to_one_expert", "no_tokens_on_last_rank", "over_capacity",
        "padded", "no_tokens_anywhere", "no_tokens_allowed", "only_none", "no_capacity",
    ),
    4: ("uneven_experts", "no_tokens_on_last_rank", "all_to_one_expert", "padded_over"),
}  # fmt: skip


def test_all_formats_are_here() -> None:
    assert {name: form.layouts for name, form in FORMATS.items() if not form.wire} == {
        f"e4m3/{name}": layouts for name, layouts in LAYOUTS.items()
    }
    assert {name for name, form in FORMATS.items() if form.wire} == {f"wire:e4m3/{name}" for name in LAYOUTS}


def communicator(case: RouteCase, hidden: int, dtype: torch.dtype, **more: Any) -> ep_ops.Communicator:
    return ep_ops.Communicator(**case.sizes, hidden_size=hidden, dtype=dtype, backend="reference", device="cpu", **more)


@dataclasses.dataclass
class Given:
    """Tokens of all ranks, quantized too."""

    name: str
    tokens: list[cases.Tokens]
    codes: list[Tensor]
    scales: list[Tensor]

    def passed(self, rank: int) -> tuple[Tensor, Tensor]:
        """x as it was quantized elsewhere, and its scales."""
        scales = self.scales[rank]
        if self.name == "32/mx":
            byte = [[quantized.byte_of(scale) for scale in row] for row in scales.tolist()]
            given = torch.tensor(byte, dtype=torch.uint8).view(scales.shape).view(torch.float8_e8m0fnu)
        else:
            given = scales.float()
        return self.codes[rank].view(torch.float8_e4m3fn), given[:, 0] if self.name == "row/fp32" else given


def draw(case: RouteCase, name: str, dtype: torch.dtype, seed: int) -> Given:
    tokens = cases.random_tokens(case, HIDDEN[name], dtype, seed)
    for rank, own in enumerate(tokens):
        for token, row in enumerate(own.x):
            row.mul_(2.0 ** ((token % 7) - 4))
            if token % 5 == 3:
                row[: 32 * (rank + 1)] = (0.0, torch.inf, torch.nan, 1e-5)[token // 5 % 4]
    made = [quantized.quantized(own.x, name) for own in tokens]
    return Given(name, tokens, [codes for codes, _ in made], [scales for _, scales in made])


def _dispatched(case: RouteCase, given: list[Given], dtype: torch.dtype) -> dict[tuple[Any, ...], Any]:
    """Return the results of the operators on this rank, by (format, layout, which way)."""
    rank, out = torch.distributed.get_rank(), {}
    for one in given:
        x, weights = one.tokens[rank].x, one.tokens[rank].weights
        idx, name = case.topk_idx[rank], f"e4m3/{one.name}"
        codes, scales = one.passed(rank)
        with communicator(case, x.shape[1], dtype) as comm, torch.no_grad():
            place = comm.num_local_experts, comm.world_size, comm.name, case.layout(rank)
            sizes = case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens
            route, _ = comm.plan(idx, **case.room(rank), max_tokens=sizes[3])
            along = (*route.tensors, route.num_rows, *route.ints, comm.name, route.layout, route.slots)
            for layout in LAYOUTS[one.name]:
                for zeros in (True, False):
                    asked = None, name, layout, zeros
                    out[one.name, layout, zeros] = torch.ops.ep.dispatch(x, weights, idx, *sizes, *place, *asked)
                given_scales = scales, name, layout, True
                out[one.name, layout, "passed"] = torch.ops.ep.dispatch(codes, None, idx, *sizes, *place, *given_scales)
                out[one.name, layout, "dynamic"] = torch.ops.ep.dispatch_dynamic(
                    x, weights, idx, case.alignment, case.max_tokens, *place[:3], "grouped", None, name, layout
                )
                out[one.name, layout, "planned"] = torch.ops.ep.dispatch_planned(
                    x, weights, *along, None, name, layout, True
                )
            started = comm.dispatch_start(
                x, idx, weights, **case.room(rank), max_tokens=sizes[3], format=name, zeros=True
            )
            out[one.name, "rows", "split"] = comm.dispatch_wait(started)
            wire = None, f"wire:{name}", ""
            for zeros in (True, False):
                out[one.name, "wire", zeros] = torch.ops.ep.dispatch(x, weights, idx, *sizes, *place, *wire, zeros)
            out[one.name, "wire", "planned"] = torch.ops.ep.dispatch_planned(x, None, *along, *wire)
    # Tensors of one byte a number travel as bytes: pickle knows them, but comparing them is torch's affair.
    return {key: [as_bytes(t) for t in tensors(value)] for key, value in out.items()}


def tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, ep_ops.Dispatched):
        route = value.route
        return [
            value.x,
            value.scales,
            value.weights,
            route.send_rows,
            route.arrivals,
            route.offs,
            route.counts,
            value.dropped,
        ]
    return value


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def expected(
    case: RouteCase, given: Given, plan: cases.Plan, rank: int, rows: int, layout: str, zeros: bool, exact: bool
) -> tuple[Tensor, Tensor]:
    """recv_x and recv_scales of one rank, bytes as they lie."""
    sources = [(s, t, k) for s, t, k, e in cases.named(case) if case.holder(e)[0] == rank]
    scales = torch.full((rows, given.scales[0].shape[1]), torch.nan, dtype=torch.float64)
    codes = torch.full((rows, given.codes[0].shape[1]), 0x7F, dtype=torch.uint8)
    kept, padding = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    for source, token, k in sources:
        row = int(plan.table[source, token, k])
        if row >= 0:
            codes[row], scales[row], kept[row] = given.codes[source][token], given.scales[source][token], True
    sizes = [quantized.up(count, case.alignment) for count in plan.counts.tolist()]
    for end, size, count in zip(plan.offs.tolist(), sizes, plan.counts.tolist(), strict=True):
        padding[end - size + count : end] = True
    if zeros:
        codes[padding], scales[padding] = 0, 0
    known = kept | padding if zeros else kept
    slots = 0 if exact else case.slots[rank]
    if layout != "rows":
        return codes, as_bytes(quantized.laid(scales, known, layout, sizes, slots, zeros, torch.nan))
    if given.name == "32/mx":
        lines = torch.full(scales.shape, 255, dtype=torch.uint8)
        for row in known.nonzero().flatten().tolist():
            lines[row] = torch.tensor([quantized.byte_of(scale) for scale in scales[row].tolist()], dtype=torch.uint8)
        return codes, lines
    return codes, scales.float()[:, 0] if given.name == "row/fp32" else scales.float()


def same(got: Tensor, wanted: Tensor) -> None:
    assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.drawn
@pytest.mark.parametrize(("world_size", "route"), [(n, route) for n, routes in ROUTES.items() for route in routes])
def test_every_format_and_layout(world_size: int, route: str) -> None:
    _check(world_size, route, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    _check(2, "random_with_none", dtype)


def _check(world_size: int, route: str, dtype: torch.dtype) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[route]
    given = [draw(case, name, dtype, seed + i) for i, name in enumerate(LAYOUTS)]
    plans, exact_plans = cases.expected_plan(case), cases.expected_plan(case, exact=True)
    results = run_ranks(world_size, _dispatched, case, given, dtype)
    for rank, got in enumerate(results):
        exact_rows = int(exact_plans[rank].offs[-1]) if exact_plans[rank].offs.numel() else 0
        for one in given:
            weights = cases.expected_dispatch(case, plans, one.tokens)[rank].weights
            for layout in LAYOUTS[one.name]:
                for which in (True, False, "passed", "dynamic", "planned", *(["split"] if layout == "rows" else [])):
                    exact = which == "dynamic"
                    plan, rows = (exact_plans[rank], exact_rows) if exact else (plans[rank], case.capacity[rank])
                    recv_x, recv_scales = expected(case, one, plan, rank, rows, layout, which is not False, exact)
                    tensors = got[one.name, layout, which]
                    same(tensors[0], recv_x)
                    same(tensors[1], recv_scales)
                    if which == "passed":
                        assert tensors[2].shape == (0,)
                    elif which in (True, "split"):
                        same(tensors[2], weights)
                    if which != "planned":
                        for tensor, field in zip(
                            tensors[3:8], ("send_rows", "arrivals", "offs", "counts", "dropped"), strict=True
                        ):
                            same(tensor, getattr(plan, field))
            values = [quantized.dequantized(c, s, dtype) for c, s in zip(one.codes, one.scales, strict=True)]
            tokens = [cases.Tokens(x, own.weights) for x, own in zip(values, one.tokens, strict=True)]
            rows_ = cases.expected_dispatch(case, plans, tokens)[rank]
            for which in (True, False, "planned"):
                recv_x, recv_scales, *_ = got[one.name, "wire", which]
                wanted = rows_.x.clone()
                if which is False:
                    wanted[rows_.padding] = torch.nan
                same(recv_x, wanted)
                assert recv_scales.shape == (0,) and recv_scales.dtype == torch.float32


# ---------------------------------------------------------------------- what ranks agree on


def _agreeing(asked: list[dict[str, Any]]) -> Any:
    """Some ranks pass x through that others have quantized here."""
    rank = torch.distributed.get_rank()
    case = cases.route_cases(len(asked), 0)["random"]
    x = cases.random_tokens(case, 128, torch.bfloat16, 1)[rank].x
    with communicator(case, 128, torch.bfloat16) as comm:
        how = dict(asked[rank])
        if how.pop("passed", False):
            codes, scales = quantized.quantized(x, "128/pow2")
            x, how["scales"] = codes.view(torch.float8_e4m3fn), scales.float() * how.pop("times", 1.0)
        try:
            sent = comm.dispatch(x, case.topk_idx[rank], max_tokens=case.max_tokens, **how)
        except ValueError as error:
            again = comm.dispatch(x, case.topk_idx[rank], max_tokens=case.max_tokens) if "scales" not in how else None
            return str(error), again is None or bool((again.route.counts > 0).any())
        return sent.x if how["format"].startswith("wire:") else as_bytes(sent.x), sent.scales


POW2 = "e4m3/128/pow2"


@pytest.mark.parametrize(("first", "second", "text"), [
    ({"format": POW2}, {}, f"ranks disagree on format: ['{POW2}', ''] by rank"),
    ({"format": POW2}, {"format": "wire:e4m3/32/mx"}, f"ranks disagree on format: ['{POW2}', 'e4m3/32/mx'] by rank"),
])  # fmt: skip
def test_ranks_that_disagree_are_told(first: dict[str, Any], second: dict[str, Any], text: str) -> None:
    for error, usable in run_ranks(2, _agreeing, [first, second]):
        assert isinstance(error, str) and text in error and usable


def test_passing_through_may_differ_between_ranks() -> None:
    asked = {"format": POW2}
    both = run_ranks(2, _agreeing, [asked, asked])
    mixed = run_ranks(2, _agreeing, [asked, asked | {"passed": True}])
    for one, other in zip(both, mixed, strict=True):
        same(one[0], other[0])
        same(one[1], other[1])


def test_what_becomes_of_rows_may_differ_between_ranks() -> None:
    """Ranks may ask for different layouts of scales, because the rows that travel are the same."""
    asked = {"format": POW2}
    (codes, scales), (_, packed) = run_ranks(2, _agreeing, [asked, asked | {"scales_as": "packed"}])
    (mine, same_scales), (numbers, none) = run_ranks(2, _agreeing, [asked, {"format": f"wire:{POW2}"}])
    same(codes, mine)
    same(scales, same_scales)
    assert packed.dtype == torch.int32 and none is None and numbers.dtype == torch.bfloat16


def test_scales_that_are_no_powers_of_two_are_rejected_everywhere() -> None:
    asked = {"format": POW2, "passed": True}
    errors = run_ranks(2, _agreeing, [asked, asked | {"times": 1.5}])
    for error, _ in errors:
        assert "scales[0, 0] is " in error and "format 'e4m3/128/pow2' takes powers of two" in error
    assert "rejected by rank 1" in errors[0][0]
