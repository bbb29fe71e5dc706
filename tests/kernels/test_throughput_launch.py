"""The throughput path passes the right arguments to its kernels. Needs no GPU."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import NO_FAILURES, PROBLEM, across, joins, throughput
from operate import Delivery, On, Sizes

from cute_kernels import marks, sync
from cute_kernels.heap import EPOCH, REASON_BYTES, Heap
from cute_kernels.internode.wire import Nvlink
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.pull import Pull
from ep_ops import arrivals, symmetric
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute.ahead import throughput_kernels
from ep_ops.backends.cute.backend import CuteBackend
from ep_ops.backends.cute.failures import Failures, pack_reason
from ep_ops.backends.cute.report import Report
from ep_ops.backends.split import FlightOrder
from ep_ops.records import UNBOUNDED, Placed, Route
from meta_kernels.arguments import PlanArgs


@pytest.mark.parametrize("beyond", [0, 66], ids=["fixed", "joining"])
def test_launches(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, recorder = throughput(Budget(20, 30, beyond=beyond), monkeypatch)
    dispatch = ["dispatch"] * (3 if beyond else 2)  # where blocks may join, they are a grid of their own
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    weights = torch.zeros(7, 4)
    sizes = Sizes(48, 16, 0, 100)
    kinds = []
    for given in (None, weights):
        recv_x, _, recv_weights, *placed = path.dispatch(x, given, idx, sizes, Delivery())
        route = Route(idx, *placed[:4], 16, 48, 100)
        row_weights = None if given is None else recv_weights
        path.along("dispatch_planned", x, given, route, Delivery())
        assert path.combine(recv_x, row_weights, route, None).shape == x.shape
        path.combine(recv_x, row_weights, route, x)
        path.dispatch_backward(recv_x, row_weights, route)
        kinds += dispatch + ["dispatch_planned"] * 2 + ["combine"] * 2 + ["dispatch_backward"]
    path.dispatch_backward(None, recv_weights, route)
    path.plan(idx, sizes)
    path.combine_backward(x, recv_x, recv_weights, route)
    path.combine_gathered(route, torch.zeros(3, dtype=torch.int64), 40)
    kinds += ["dispatch_backward", "plan", "combine_backward", "combine_backward", "combine_gathered"]
    first = len(kinds)
    whole, along = dispatch, ["dispatch_planned"] * 2
    sizes = Sizes(48, 1, 0, 100, "token_major")
    for given in (None, weights):
        recv_x, _, recv_weights, *placed, recv_idx = path.dispatch(x, given, idx, sizes, Delivery())
        assert recv_weights.shape == ((0,) if given is None else (48, 4))
        assert recv_idx.shape == (48, 4) and recv_idx.dtype == torch.int32 and recv_x.shape == (48, 64)
        route = Route(idx, *placed[:4], 1, 48, 100, layout="token_major")
        again = path.along("dispatch_planned", x, given, route, Delivery())
        assert again.recv_weights.shape == recv_weights.shape
        row_weights = None if given is None else recv_weights
        grads = path.dispatch_backward(recv_x, row_weights, route)
        assert [tuple(grad.shape) for grad in grads] == [(7, 64), (0,) if given is None else (7, 4)]
        kinds += whole + along + ["dispatch_backward"]
    path.dispatch_backward(None, recv_weights, route)
    assert path.plan(idx, sizes).recv_idx.shape == (48, 4)
    kinds += ["dispatch_backward", "plan"]
    agreed = [marks.unpack(terms)[1] for _, terms, _ in recorder.launched]
    assert [terms.kind for terms in agreed] == kinds
    assert [terms.token_major for terms in agreed] == [False] * first + [True] * (len(kinds) - first)
    wanted = {kernel for kernel in throughput_kernels(PROBLEM) if beyond or not joins(kernel)}
    assert {kernel for kernel, _, _ in recorder.launched} == wanted
    for kernel, terms, given in recorder.launched:
        assert marks.unpack(terms)[1].max_tokens == 100
        assert given["tokens" if "tokens" in given else "max_tokens"] in (7, 100)
        # Whatever it is given, a kernel knows how many rows there are.
        assert {given[name] for name in ("num_rows", "capacity") if name in given} <= {48, 40}, kernel
        assert "num_rows" in given or "capacity" in given
        if isinstance(kernel, Publish):
            assert given["capacity"] == given["num_rows"] == 48, "of the lists"
        if isinstance(kernel, Pull):
            assert given["zeros"] == (not marks.unpack(terms)[1].token_major), "of padding"


@pytest.mark.parametrize("weighted", [False, True])
def test_dynamic_token_major(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for as many rows as there can be, moved into as many as there are copies."""
    path, recorder = throughput(Budget(20, 30), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    made: Any = On(object.__new__(CuteBackend))
    made._problem, made._local_experts, made.throughput, made._flights = PROBLEM, 3, path, FlightOrder("name")
    made._failures, made._state = NO_FAILURES, path._state
    ids = torch.arange(3 * 100 * 4, dtype=torch.int32).view(300, 4)

    def plan(a: PlanArgs) -> Placed:
        assert (a.capacity, a.alignment, a.slots, a.max_tokens, a.layout) == (300, 1, 0, 100, "token_major")
        return Placed(idx, torch.arange(4 * 300 + 6, dtype=torch.int32) * 0 + 11, *[idx.new_zeros(3)] * 3, ids)

    monkeypatch.setattr(path.target, "plan", plan)
    weights = torch.zeros(7, 4) if weighted else None
    sizes = Sizes(UNBOUNDED, 1, 0, 100, "token_major")
    recv_x, _, recv_weights, _, arrivals, *_, recv_idx = made.dispatch_dynamic(x, weights, idx, sizes, Delivery())
    assert recv_x.shape == (11, 64) and recv_weights.shape == ((11, 4) if weighted else (0,))
    assert arrivals.shape == (4 * 11 + 6,) and torch.equal(recv_idx, ids[:11]) and recv_idx._base is None
    publish, pull = (given for _, _, given in recorder.launched)
    assert publish["num_rows"] == pull["num_rows"] == 11 and pull["arrivals"] is arrivals


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(("epoch", "goes_on"), [(7, False), (6, True), (None, True)])
def test_a_dynamic_dispatch_that_is_rejected(
    epoch: int | None, goes_on: bool, token_major: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected dynamic dispatch ends with its plan, which has ended on all ranks; the reason of another operation is
    reported later."""
    path, recorder = throughput(Budget(20, 30), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    made: Any = On(object.__new__(CuteBackend))
    made._problem, made._local_experts, made.throughput, made._flights = PROBLEM, 3, path, FlightOrder("name")
    made._failures = failures = object.__new__(Failures)
    made._state = path._state
    failures._config, failures._rank, failures._heap = SimpleNamespace(name="name", world_size=4), 1, Heap(PROBLEM)  # type: ignore
    image = bytearray(failures._heap.nbytes)
    image[EPOCH * 8 : EPOCH * 8 + 8] = struct.pack("<q", 8)  # behind operation 7
    for bank, text in enumerate(("an older one", "why")):  # where operations 6 and 7 leave reasons
        at = failures._heap.offset["reason"] + bank * failures._heap.distance["reason"] + 2 * REASON_BYTES
        image[at : at + REASON_BYTES] = pack_reason(text, 1)
    failures._memory = SimpleNamespace(  # type: ignore[assignment]
        read=lambda rank, first, nbytes: bytes(image[first : first + nbytes])
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    failures.report = report = object.__new__(Report)
    report.reported, report._words = 0, [0] * 64  # type: ignore[assignment]
    plan = Placed(idx, torch.zeros(4 * 336 + 6, dtype=torch.int32), *[idx.new_zeros(3)] * 3, idx)

    def planned(*_: Any) -> Any:
        if epoch is not None:
            mark, other = (
                e << marks.SHIFT | terms
                for e, terms in ((epoch, marks.pack("plan", 100)), (epoch, marks.pack_rejection(2)))
            )
            report._words[32:40] = [1, sync.REJECTION, 0, 0, 2, 0, mark, other]  # type: ignore[assignment]
        return plan

    monkeypatch.setattr(path.target, "plan", planned)
    monkeypatch.setattr(arrivals, "cut", lambda lists, most, rows: lists.new_zeros(6))
    sizes = Sizes(UNBOUNDED, 1, 0, 100, "token_major") if token_major else Sizes(UNBOUNDED, 16, 0, 100)
    args = x, None, idx, sizes, Delivery()
    if goes_on:
        made.dispatch_dynamic(*args)
        assert recorder.launched
        return
    with pytest.raises(ValueError, match=r"'name': ep::plan \(operation 7\): rejected by rank 2: why"):
        made.dispatch_dynamic(*args)
    assert not recorder.launched


def test_operators_across_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators across domains launch kernels that are compiled ahead; rows are copied where nobody can fetch them."""
    problem = across(Nvlink())
    made: Any = On(object.__new__(CuteBackend))
    made.throughput, recorder = throughput(Budget(20, 30, beyond=66), monkeypatch, problem)
    made._problem, made._local_experts, made._flights, made._rank = problem, 2, FlightOrder("name"), 1
    made.latency, made._across = SimpleNamespace(takes=lambda spec, a: False), True
    made._config = SimpleNamespace(name="name", symmetric_rows=48)  # type: ignore[assignment]
    made._failures, made._state = NO_FAILURES, recorder.state
    held = torch.zeros(48 * 64 * 2, dtype=torch.uint8)
    made._rows = symmetric.SymmetricBuffer(held, (held.data_ptr(),))  # it is of this rank alone
    x, idx, sizes = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32), Sizes(48, 16, 0, 1)
    for weights in (None, torch.zeros(7, 4)):
        recv_x, _, recv_weights, *placed = made.dispatch(x, weights, idx, sizes, Delivery())
        route = Route(idx, *placed[:4], 16, 48, 1)
        row_weights = None if weights is None else recv_weights
        made.combine(recv_x, row_weights, route)
        made.combine(recv_x, row_weights, route, x)
        made.dispatch_planned(x, weights, route, Delivery())
        made.dispatch_backward(recv_x, row_weights, route)
        made.combine_backward(x, recv_x, row_weights, route)
    made.dispatch_backward(None, recv_weights, route)
    made.plan(idx, sizes)
    for weights in (None, torch.zeros(7, 4)):
        recv_x, _, recv_weights, *placed = made.dispatch(x, weights, idx, Sizes(48, 1, 0, 1, "token_major"), Delivery())
        along = Route(idx, *placed[:4], 1, 48, 1, layout="token_major")
        made.dispatch_planned(x, weights, along, Delivery())
    made.dispatch_backward(recv_x, recv_weights, along)
    made.dispatch_backward(None, recv_weights, along)
    made.plan(idx, Sizes(48, 1, 0, 1, "token_major"))
    assert recorder.launched[-1][2]["blocks"] == problem.tiles + 1, "ids are relayed"
    assert {kernel for kernel, _, _ in recorder.launched} == set(throughput_kernels(problem))
    made.combine_gathered(held.view(torch.bfloat16).view(48, 64), route)
    kernel, terms, given = recorder.launched[-1]
    assert type(kernel).__name__ == "CombineAcross" and marks.unpack(terms)[1].kind == "combine"
    assert given["y"].data_ptr() == held.data_ptr() and given["recv_weights"] is given["residual"] is None
    monkeypatch.setattr(made.target, "reject", lambda *why, **more: None)
    made.combine_gathered(recv_x, route)
    assert recorder.launched[-1][2]["y"] is recv_x
    with pytest.raises(ValueError, match="y lies in symmetric memory, and not at its beginning"):
        made.combine_gathered(held.view(torch.bfloat16).view(48, 64)[4:], route)
