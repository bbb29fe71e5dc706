"""With how many blocks dispatches and combines of different rows are launched, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import Recorder, allocate_on_cpu
from operate import Delivery, On, Sizes, row_format

from cute_kernels.heap import SEND, Problem
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.backends.cute.sm_model import OperationSms, TokenTraffic, default_budget
from ep_ops.backends.cute.throughput import ThroughputPath
from ep_ops.records import Route

TOKENS, SMS = 64, 132
PROBLEM = Problem(2, (128, 128), 8, 7168, "bf16", TOKENS)
TRAFFIC = TokenTraffic.of(PROBLEM.experts_per_rank, PROBLEM.top_k, PROBLEM.row_bytes, 4)
FORMATS = ("", ""), ("e4m3/128/pow2", "packed"), ("e4m3/128/pow2", "columns"), ("wire:e4m3/32/mx", "")
X, IDX = torch.zeros(TOKENS, 7168, dtype=torch.bfloat16), torch.zeros(TOKENS, 8, dtype=torch.int32)


def blocks_of(monkeypatch: pytest.MonkeyPatch, token_major: bool, asked: tuple[int | None, int | None]) -> list[Any]:
    """Return the blocks of the pulls and combines of a dispatch, a known route and a combine, there and back."""
    allocate_on_cpu(monkeypatch)
    recorder = Recorder(PROBLEM, SMS)
    budget = default_budget(TRAFFIC, SMS, 100, *asked)
    made = Outputs(PROBLEM, 128, recorder.device)
    path = On(ThroughputPath(recorder, made, budget, TRAFFIC))  # type: ignore[arg-type]
    rows = 2 * TOKENS * (1 if token_major else 8)
    layout = "token_major" if token_major else "grouped"
    y, _, _, *placed = path.dispatch(X, None, IDX, Sizes(rows, 1, 0, TOKENS, layout), Delivery())
    route = Route(IDX, *placed[:4], 1, rows, TOKENS)  # as combines make it: they are not told what its rows are
    along = route._replace(layout=layout)
    path.along("dispatch_planned", X, None, along, Delivery())
    path.along("combine_backward", X, None, route, Delivery())
    path.combine(y, None, route, None)
    path.dispatch_backward(y, None, along)
    return [
        (given["blocks"], given["pushers"]) if isinstance(kernel, Combine) else (given["dealt"], given["expected"])
        for kernel, _, given in recorder.launched
        if isinstance(kernel, Combine) or (isinstance(kernel, Pull) and not kernel.joins)
    ]


def test_blocks_follow_the_rows_that_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch of one row for each copy takes as many blocks as where the experts are the ranks. A combine takes
    five sixths of the GPU, of which fewer push such rows."""
    load = TRAFFIC.expected(TOKENS)
    # The grid that joins has a block of its own, which a dispatch deals none to.
    assert blocks_of(monkeypatch, False, (None, None)) == [(47, load), *[(48, load)] * 2, *[(110, 42)] * 2]
    copies = TokenTraffic.of((1, 1), 2, PROBLEM.row_bytes, 4)
    found = blocks_of(monkeypatch, True, (None, None))
    assert [given[0] for given in found] == [29, 30, 30, 110, 110] and copies.dispatch_sms(SMS) == 30
    assert [given[1] for given in found[3:]] == [29, 29] and copies.pushers(110, TOKENS) == 29
    assert [given[1] for given in found[:3]] == pytest.approx([4 * TOKENS] * 3, rel=0.01)


def test_a_budget_that_was_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that was set is used for rows of any kind; the number of blocks that push still follows the rows."""
    assert [given[0] for given in blocks_of(monkeypatch, True, (40, 64))] == [40, 40, 40, 64, 64]
    assert [given[0] for given in blocks_of(monkeypatch, True, (None, 64))] == [29, 30, 30, 64, 64]
    assert [given[0] for given in blocks_of(monkeypatch, True, (40, None))] == [40, 40, 40, 110, 110]
    assert [given[1] for given in blocks_of(monkeypatch, True, (40, 64))[3:]] == [17, 17]


def test_concurrent_combines_take_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Combines of split operations leave the rest to computation: 30 SMs with a row for each copy, of which 9 push."""
    budget, copies = default_budget(TRAFFIC, SMS, 100, None, None), TRAFFIC.copies
    aside = OperationSms(PROBLEM, budget, TRAFFIC, SMS, aside=True)
    load = TRAFFIC.expected(TOKENS, SEND)
    assert aside.pushing(TRAFFIC, TOKENS, True) == {"pushers": 24, "expected": load, "joining": 0, "blocks": 64}
    assert (aside.pushing(copies, TOKENS, True)["pushers"], aside.pushing(copies, TOKENS, True)["blocks"]) == (9, 30)
    with budget.changed(None, 70):
        assert aside.pushing(copies, TOKENS, True)["blocks"] == 70


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_rows_in_a_format_are_fetched_by_more_blocks(fast: bool) -> None:
    """Most of all with packed scales and fast memory. A budget that was set is taken."""
    budget, traffic = default_budget(TRAFFIC, SMS, 100, None, None), dataclasses.replace(TRAFFIC, fast_memory=fast)
    sms = OperationSms(PROBLEM, budget, traffic, SMS)
    of = [sms.pulling(traffic, row_format(Delivery(None, name, layout))) for name, layout in FORMATS]
    assert of == [48, 66 if fast else 60, 60, 60] and max(of) <= budget.most_dispatch
    with budget.changed(20, None):
        assert {sms.pulling(traffic, row_format(Delivery(None, name, layout))) for name, layout in FORMATS} == {20}
    aside = OperationSms(PROBLEM, budget, traffic, SMS, aside=True)
    assert aside.pulling(traffic, row_format(Delivery(None, *FORMATS[1]))) == 48


def test_ranks_with_more_rows_push_with_more_blocks() -> None:
    """Ranks with more rows push with all blocks that need not sum; across domains, with a small budget, and where
    owners add rows and memory is slow, with no more than others."""
    problem = dataclasses.replace(PROBLEM, world_size=4, experts_per_rank=(64,) * 4)
    traffic = TokenTraffic.of(problem.experts_per_rank, problem.top_k, problem.row_bytes, 4)

    def joining(traffic: TokenTraffic, budget: Budget, rows: bool = True) -> int:
        return OperationSms(problem, budget, traffic, SMS).pushing(traffic, TOKENS, rows)["joining"]

    budget = default_budget(traffic, SMS, 100, None, None)
    pushers = traffic.pushers(110, TOKENS)
    assert joining(traffic, budget) == 110 - pushers - traffic.summers > 0
    assert joining(traffic, budget, False) == joining(dataclasses.replace(traffic, across=True), budget) == 0
    assert joining(TRAFFIC, budget) == 0
    fast = dataclasses.replace(TRAFFIC, fast_memory=True)
    assert joining(fast, budget) == 110 - fast.pushers(110, TOKENS) - fast.summers > 30
    with budget.changed(None, 16):
        assert joining(traffic, budget) == 0


def test_sums_in_a_format_are_pushed_by_more_blocks() -> None:
    """Two ranks: owners add their own rows. Encoding takes longer than rounding, and the link less time."""
    in_format = TRAFFIC.in_format(7616)
    assert TRAFFIC.adds_own and in_format.adds_own
    assert TRAFFIC.pushers(110, TOKENS) < in_format.pushers(110, TOKENS)
    assert all(Combine(PROBLEM, True, True, False, format=form).adds_own for form in ("", "e4m3/32/mx"))
    assert not Combine(dataclasses.replace(PROBLEM, world_size=1, experts_per_rank=(256,)), True, True, False).adds_own
