"""With how many blocks dispatches and combines of different rows are launched, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction
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
from ep_ops.backends.cute.backend import CuteBackend
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.backends.cute.sm_model import OperationSms, TokenTraffic, default_budget
from ep_ops.backends.cute.throughput import ThroughputPath
from ep_ops.backends.cute.tuning import Row, Tuning
from ep_ops.records import Route

TOKENS, SMS = 64, 132
PROBLEM = Problem(2, (128, 128), 8, 7168, "bf16", TOKENS)
TRAFFIC = TokenTraffic.of(PROBLEM, 4)
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
FORMATS = ("", ""), ("e4m3/128/pow2", "packed"), ("e4m3/128/pow2", "columns"), ("wire:e4m3/32/mx", "")
X, IDX = torch.zeros(TOKENS, 7168, dtype=torch.bfloat16), torch.zeros(TOKENS, 8, dtype=torch.int32)


def blocks_of(monkeypatch: pytest.MonkeyPatch, token_major: bool, asked: tuple[int | None, int | None]) -> list[Any]:
    """Return the blocks of the pulls and combines of a dispatch, a known route and a combine, there and back."""
    allocate_on_cpu(monkeypatch)
    recorder = Recorder(PROBLEM, SMS, H100)
    budget = default_budget(TRAFFIC, recorder.tuning, SMS, 100, *asked)
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
    copies = TokenTraffic.of(dataclasses.replace(PROBLEM, experts_per_rank=(1, 1), top_k=2), 4)
    found = blocks_of(monkeypatch, True, (None, None))
    assert [given[0] for given in found] == [29, 30, 30, 110, 110] and copies.dispatch_sms(SMS) == 30
    knobs = Tuning(H100, 2).knobs("combine", "token_major")
    assert [given[1] for given in found[3:]] == [29, 29] and copies.pushers(110, knobs) == 29
    assert [given[1] for given in found[:3]] == pytest.approx([4 * TOKENS] * 3, rel=0.01)


def test_a_budget_that_was_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that was set is used for rows of any kind; the number of blocks that push still follows the rows."""
    assert [given[0] for given in blocks_of(monkeypatch, True, (40, 64))] == [40, 40, 40, 64, 64]
    assert [given[0] for given in blocks_of(monkeypatch, True, (None, 64))] == [29, 30, 30, 64, 64]
    assert [given[0] for given in blocks_of(monkeypatch, True, (40, None))] == [40, 40, 40, 110, 110]
    assert [given[1] for given in blocks_of(monkeypatch, True, (40, 64))[3:]] == [17, 17]


def test_concurrent_combines_take_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Combines of split operations leave the rest to computation: 30 SMs with a row for each copy, of which 9 push."""
    tuning, copies = Tuning(H100, 2), TRAFFIC.copies
    budget = default_budget(TRAFFIC, tuning, SMS, 100, None, None)
    aside = OperationSms(PROBLEM, budget, TRAFFIC, tuning, SMS, aside=True)
    load = TRAFFIC.expected(TOKENS, SEND)
    assert aside.pushing(TRAFFIC, TOKENS, True) == {"pushers": 24, "expected": load, "joining": 0, "blocks": 64}
    assert (aside.pushing(copies, TOKENS, True)["pushers"], aside.pushing(copies, TOKENS, True)["blocks"]) == (9, 30)
    with budget.changed(None, 70):
        assert aside.pushing(copies, TOKENS, True)["blocks"] == 70


@pytest.mark.parametrize("gpu", [H100, H200])
def test_rows_in_a_format_are_fetched_by_more_blocks(gpu: str) -> None:
    """Most of all with packed scales on H200s. A budget that was set is taken."""
    tuning = Tuning(gpu, 2)
    budget = default_budget(TRAFFIC, tuning, SMS, 100, None, None)
    sms = OperationSms(PROBLEM, budget, TRAFFIC, tuning, SMS)

    def pulling(name: str, layout: str) -> int:
        return sms.pulling(TRAFFIC, row_format(Delivery(None, name, layout)), TOKENS)

    of = [pulling(*named) for named in FORMATS]
    assert of == [48, 66 if gpu == H200 else 60, 60, 60] and max(of) <= budget.most_dispatch
    with budget.changed(20, None):
        assert {pulling(*named) for named in FORMATS} == {20}
    sms = OperationSms(PROBLEM, budget, TRAFFIC, tuning, SMS, aside=True)
    assert pulling(*FORMATS[1]) == 48


def test_ranks_with_more_rows_push_with_more_blocks() -> None:
    """Ranks with more rows push with all blocks that need not sum; across domains, with a small budget, and on two
    H100s, with no more than others."""
    problem = dataclasses.replace(PROBLEM, world_size=4, experts_per_rank=(64,) * 4)
    traffic = TokenTraffic.of(problem, 4)

    def joining(traffic: TokenTraffic, budget: Budget, rows: bool = True, gpu: str = H100) -> int:
        tuning = Tuning(gpu, traffic.ranks)
        return OperationSms(problem, budget, traffic, tuning, SMS).pushing(traffic, TOKENS, rows)["joining"]

    knobs = Tuning(H100, 4).knobs("combine")
    budget = default_budget(traffic, Tuning(H100, 4), SMS, 100, None, None)
    pushers = traffic.pushers(110, knobs)
    assert joining(traffic, budget) == 110 - pushers - traffic.summers > 0
    assert joining(traffic, budget, False) == joining(dataclasses.replace(traffic, across=True), budget) == 0
    assert joining(TRAFFIC, budget) == 0
    assert joining(TRAFFIC, budget, gpu=H200) == 110 - TRAFFIC.pushers(110, knobs) - TRAFFIC.summers > 30
    with budget.changed(None, 16):
        assert joining(traffic, budget) == 0


def test_sums_in_a_format_are_pushed_by_more_blocks() -> None:
    """Two ranks: owners add their own rows. Encoding takes longer than rounding, and the link less time."""
    in_format = TRAFFIC.in_format(7616)
    assert TRAFFIC.adds_own and in_format.adds_own
    knobs = Tuning(H100, 2).knobs("combine")
    assert TRAFFIC.pushers(110, knobs) < in_format.pushers(110, knobs)
    assert all(Combine(PROBLEM, True, True, False, format=form).adds_own for form in ("", "e4m3/32/mx"))
    assert not Combine(dataclasses.replace(PROBLEM, world_size=1, experts_per_rank=(256,)), True, True, False).adds_own


def test_rows_that_are_put_count_from_then_on() -> None:
    """`ep-ops bench tune` puts rows of knobs before all others: later calls have them, and none once they are taken
    back."""
    backend: Any = object.__new__(CuteBackend)
    backend.tuning = tuning = Tuning(H200, 2)
    backend._default_budget = functools.partial(default_budget, TRAFFIC, tuning, SMS, 100, None, None)
    backend.budget = backend._default_budget()
    sms = OperationSms(PROBLEM, backend.budget, TRAFFIC, tuning, SMS)
    packed = row_format(Delivery(None, *FORMATS[1]))

    def chosen() -> tuple[int, ...]:
        pushing = sms.pushing(TRAFFIC, 4096, True)
        budget = backend.budget.combine, backend.budget.beyond
        return *budget, pushing["blocks"], pushing["pushers"], sms.pulling(TRAFFIC, packed, 4096)

    before = chosen()
    assert before == (110, 56, 110, 26, 66)
    rows = [
        Row("combine", {"sms": Fraction(1, 1)}), Row("combine", {"spare": Fraction(1, 4)}, tokens=4096),
        Row("dispatch", {"surplus": 40}), Row("dispatch", {"sms": 80}, format="*=packed"),
    ]  # fmt: skip
    backend.tune(*rows)
    assert chosen() == (132, 40, 132, 42, 80)
    backend.tune()
    assert chosen() == before
    backend.tune(Row("combine", {"sms": None, "spare": 0}))
    assert chosen() == (64, 56, 64, 24, 66), "the model's"
