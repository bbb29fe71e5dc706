"""The lists by which GEMMs gather token-major rows (ep_ops.nn.lists), against plain loops (tests/tokens.py)."""

from __future__ import annotations

import random
import types
from typing import Any

import cases
import pytest
import quacks
import tokens as oracle
import torch
from places import token_major
from test_formats_dispatch import as_bytes
from test_reference import assert_same
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from ep_ops import nn
from ep_ops.integrations import quack
from ep_ops.nn import expert_lists, gather_rows, reduce_rows
from ep_ops.nn.sums import copy_rows, sum_rows
from ep_ops.nn.token_major import How, Rows, _lists

NAN = float("nan")


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


@pytest.mark.parametrize("ranks", [1, 3])
def test_operators(ranks: int) -> None:
    draw = random.Random(cases.fresh_seed())
    of = token_major(draw, ranks, 4, 20)
    opcheck(torch.ops.ep.expert_lists.default, (of.local_idx, 4, 4, 40))
    made = expert_lists(of.local_idx, 4)
    for held in ([4] * ranks, [*range(4, 4 + ranks)]):
        given = (*of.tensors, made.places, made.rows.shape[0], of.rank, held)
        opcheck(torch.ops.ep.places_route.default, given)


def test_no_experts_and_none_named() -> None:
    assert expert_lists(torch.full((3, 2), -1).int(), 0).offs.shape == (0,)
    got = expert_lists(torch.full((3, 2), -1).int(), 2, alignment=4)
    assert got.offs.tolist() == [0, 0] and (got.flat == 6).all() and (got.places == -1).all() and (got.rows == 0).all()


def test_what_consumers_take_beside_lists() -> None:
    """Lists contain what quack's and Triton's fused MoE read from them, as loops over their definitions show."""
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
    (0, None, "alignment is 0; allowed: an int of at least 1"), (1, 0, "capacity is 0"), (1, -2, "capacity is -2"),
    (4, 6, "capacity is 6; allowed: positive multiples of alignment 4"),
])  # fmt: skip
def test_lists_that_are_rejected(alignment: int, capacity: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        expert_lists(torch.zeros(2, 2).int(), 2, alignment=alignment, capacity=capacity)


def test_lists_of_global_ids_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"local_idx has 5; allowed: local experts, 0\.\.1, or -1 for none"):
        expert_lists(torch.tensor([[-1, 5], [0, 1]]).int(), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce_rows(dtype: torch.dtype, weighted: bool) -> None:
    """Sums are right to the bit: fp32, k ascending, rounded once; undefined rows are not read."""
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


def test_sums_of_rows() -> None:
    """The operator that both are made of: gradients of their gradients, too, though it has none itself."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    x, index = torch.randn(5, 8, generator=draw), torch.randint(-1, 5, (9, 3), generator=draw).int()
    weights = torch.randn(9, 3, generator=draw)
    for given in ((x, index, None), (x, index, weights), (x, index[:, :1], None), (x[:0], index.clamp(max=-1), None)):
        opcheck(torch.ops.ep.sum_rows.default, given)
    out = torch.zeros(9, 8)
    for row, own in enumerate(index.tolist()):
        for k, named in enumerate(own):
            out[row] += x[named] * weights[row, k] if named >= 0 else 0
    assert_same(sum_rows(x, index, weights), out)
    with pytest.raises(NotImplementedError, match="allowed: ep_ops.nn.gather_rows"):
        sum_rows(x.clone().requires_grad_(), index).sum().backward()
    offs, named = torch.tensor([0, 5, 9], dtype=torch.int32), index[:, 0].clamp(min=0)
    opcheck(torch.ops.ep.copy_rows.default, (x, named, offs))  # which compares all rows
    copies = copy_rows(x, named, offs[:2])
    assert torch.equal(copies[:5], x[named[:5]]) and copies[5:].isnan().all()
    assert copy_rows(x, named, offs[:0]).isnan().all() and copy_rows(x[:0], named, offs[:1]).isnan().all()

    lists = expert_lists(torch.randint(-1, 3, (4, 2), generator=draw).int(), 3)
    wide = [torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in ((4, 2), (8, 2))]
    assert gradgradcheck(lambda x: gather_rows(x, lists), wide[0])
    assert gradgradcheck(lambda y, w: reduce_rows(y, lists, w), (wide[1], torch.rand_like(wide[0]).requires_grad_()))


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


def test_quantized_rows_are_gathered_too() -> None:
    """Quantized rows and their scales are gathered as other rows are."""
    local_idx = torch.tensor([[0, 1], [1, -1], [-1, -1]]).int()
    lists = expert_lists(local_idx, 2, alignment=2)
    codes = torch.randn(3, 8).to(torch.float8_e4m3fn)
    rows = gather_rows(codes, lists)
    assert rows.dtype == codes.dtype
    for place, row in enumerate([0, None, 0, 1]):
        assert torch.equal(as_bytes(rows)[place], as_bytes(codes)[row] if row is not None else torch.zeros(8).byte())


@pytest.mark.parametrize("alignment", [1, 4])
def test_quacks_products(alignment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for quack's GEMM, products and gradients are those of gathered rows."""
    quacks.install(monkeypatch, checks=False)
    local_idx = torch.tensor([[0, 3, -1], [3, 1, 1], [-1, -1, -1], [0, -1, 3]]).int()  # nobody names expert 2
    lists = expert_lists(local_idx, 4, alignment=alignment)
    nothing = (lists.flat == local_idx.numel())[:, None]
    x, w, results = torch.randn(4, 8), torch.randn(4, 8, 6), []
    x[2] = NAN
    factor = torch.randn(lists.rows.shape[0], 6)
    for gather_mm in (quack.gather_mm, nn.gather_mm):
        leaves = [each.clone().requires_grad_() for each in (x, w)]
        y = torch.where(nothing, 0, gather_mm(*leaves, lists))
        results.append([y.detach(), *torch.autograd.grad((y * factor).sin().sum(), leaves)])
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="x has 3 rows; allowed: 4, the rows of the lists"):
        quack.gather_mm(x[:3], w, lists)
    with pytest.raises(ValueError, match="w has 5 experts; allowed: 4, which the lists have"):
        quack.gather_mm(x, torch.randn(5, 8, 6), lists)


@pytest.mark.parametrize("held", range(5))
@pytest.mark.parametrize("rows", [0, 6])
def test_places_without_a_bound(rows: int, held: int) -> None:
    """There is room for all that distinct ids of the rows can name, in lists padded to a multiple of 4, and no more."""
    comm: Any = types.SimpleNamespace(num_local_experts=held, alignment=4)
    ids = torch.full((rows, 3), -1, dtype=torch.int32)
    named = min(held, 3)
    ids[:, :named] = torch.arange(named)
    lists = _lists(ids, comm, How(Rows("token_major")))
    most = -(-rows // 4) * 4 * held if held < 3 else (rows * 3 + min(held, rows * 3) * 3) // 4 * 4
    assert lists.rows.shape[0] <= max(most, 4) and not lists.dropped.any()
    assert lists.counts.tolist() == [rows] * named + [0] * (held - named)
