"""The latency path passes every argument to its kernels, and numbers of blocks that make sense. Needs no GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import Recorder, allocate_on_cpu, noting
from operate import Delivery, On, Sizes, row_format
from recorded import FEW, IDX, IN_THREE, MANY, WEIGHTS, X

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.internode.wire import Nvlink
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.latency.sizes import WARPS, packets
from ep_ops.backends.cute import latency
from ep_ops.backends.cute.ahead import latency_kernels
from ep_ops.backends.cute.backend import CuteBackend
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.config import consecutive_domains
from ep_ops.records import Route
from ep_ops.specs import spec_of
from meta_kernels.arguments import CombineBackwardArgs, DispatchBackwardArgs, DispatchStartArgs

SMS = 132
OF_ROUTE = "topk_idx", "send_rows", "arrivals"


@pytest.fixture(params=[(1, 1), (4, 4), (4, 2)], ids=["alone", "one_domain", "two_domains"])
def recorder(request) -> Recorder:
    ranks, size = request.param
    domains = consecutive_domains(ranks, size) if size < ranks else ()
    wire = Nvlink() if domains else None
    return Recorder(Problem(ranks, (8,) * ranks, 4, 64, "bf16", 512, domains, wire), SMS)


@pytest.fixture
def path(recorder, monkeypatch):
    allocate_on_cpu(monkeypatch)
    return On(latency.LatencyPath(recorder, Outputs(recorder.problem, 8, recorder.device), 256))


@pytest.mark.parametrize("max_tokens", [1, 8, 16, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_launches(path, recorder, max_tokens: int, weighted: bool) -> None:
    alone = recorder.problem.world_size == 1
    x, idx = torch.zeros(max_tokens, 64, dtype=torch.bfloat16), torch.zeros(max_tokens, 4, dtype=torch.int32)
    weights = torch.zeros(max_tokens, 4) if weighted else None
    sizes, plain = Sizes(32, 1, 0, max_tokens), Delivery()
    recv_x, _, recv_weights, *placed = path.dispatch(x, weights, idx, sizes, plain)
    assert recv_x.shape == (32, 64) and recv_weights.shape == (32 * weighted,)
    route = Route(idx, *placed[:4], 1, 32, max_tokens)
    row_weights = recv_weights if weighted else None
    assert path.combine(recv_x, row_weights, route).shape == x.shape
    path.send_dispatch(x, weights, idx, sizes, plain)
    assert len(path.dispatch(x, weights, idx, sizes, plain, send=False)) == 9
    path.send_combine(recv_x, row_weights, route)
    assert path.combine(recv_x, row_weights, route, send=False).shape == x.shape

    kernels = [kernel for kernel, _, _ in recorder.launched]
    assert set(kernels) <= set(latency_kernels(recorder.problem, 256))
    dispatch, combine = LatencyDispatch.NAME, LatencyCombine.NAME
    assert [k.NAME for k in kernels] == [dispatch, combine, dispatch, dispatch, combine, combine]
    for kernel, terms, given in recorder.launched:
        agreed = marks.unpack(terms)[1]
        assert agreed.kind == ("dispatch" if isinstance(kernel, LatencyDispatch) else "combine") and agreed.latency
        assert given["capacity" if isinstance(kernel, LatencyDispatch) else "num_rows"] == 32
        assert 0 <= given["senders"] <= given["blocks"] and 1 <= given["blocks"] <= SMS
        assert not kernel.send or alone or given["senders"] > 0
        if kernel.receive:  # one block of a dispatch writes the route, at least one stores rows
            assert given["blocks"] - given["first_receiver"] >= 2


@pytest.mark.parametrize("name", ["", "e4m3/128/pow2", "wire:e4m3/32/mx"])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_major_launches(name: str, weighted: bool, monkeypatch) -> None:
    """Rows of a dispatch of few tokens, whole and split, in a format and without. What only sends is a kernel of both
    kinds of rows; local ids come last."""
    allocate_on_cpu(monkeypatch)
    problem = Problem(4, (8,) * 4, 4, 128, "bf16", 512)
    recorder = Recorder(problem, SMS)
    path = On(latency.LatencyPath(recorder, Outputs(problem, 8, recorder.device), 256))  # type: ignore[arg-type]
    layout = "columns" if name.startswith("e4m3") else ""
    delivery = Delivery(None, name, layout)
    x, idx = torch.zeros(7, 128, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    given = x, torch.zeros(7, 4) if weighted else None, idx, Sizes(48, 1, 0, 9, "token_major"), delivery
    path.send_dispatch(*given)
    for send in (False, True):
        out = path.dispatch(*given, send=send)
        recv_x, scales, recv_weights, send_rows, arrivals, offs, counts, dropped, recv_idx = out
        assert (scales.numel() > 0) == bool(layout) and send_rows.shape == (7, 4)
        assert recv_x.shape == (48, 128) and (recv_x.dtype == torch.float8_e4m3fn) == bool(layout)
        assert recv_weights.shape == ((48, 4) if weighted else (0,)) and recv_idx.shape == (48, 4)
        _, _, values = recorder.launched[-1]
        names = dict(arrivals=arrivals, offs=offs, counts=counts, dropped=dropped, recv_idx=recv_idx, recv_x=recv_x)
        assert all(values[name] is tensor for name, tensor in names.items())
        assert values["alignment"] == 1 and values["slots"] == 0 and values["capacity"] == 48
    parts = [(kernel.send, kernel.receive, kernel.token_major) for kernel, _, _ in recorder.launched]
    assert parts == [(True, False, False), (False, True, True), (True, True, True)]
    compiled = set(latency_kernels(problem, 256))
    if name:
        compiled = set(latency_kernels(problem, 256, row_format(delivery)))
    for kernel, terms, _ in recorder.launched:
        agreed = marks.unpack(terms)[1]
        assert kernel in compiled and agreed.kind == "dispatch" and agreed.token_major and agreed.latency


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("name", ["", "wire:e4m3/32/mx"])
def test_bound_calls(name: str, weights: torch.Tensor | None, backend: Any, monkeypatch) -> None:
    """Bound calls launch what the operators launch, with every tensor in its place."""
    launched = backend._launcher.launched
    sizes, how = FEW._replace(alignment=1), Delivery(None, name, "", False)
    dispatch = backend.bound(backend.dispatch_args(X, weights, IDX, sizes, how))
    route = Route(IDX, *backend.dispatch(X, weights, IDX, sizes, how)[3:7], 1, 32, 8)
    out = dispatch()
    (kernel, terms, one), (other_kernel, other_terms, other) = launched
    assert kernel == other_kernel and terms == other_terms and set(one) == set(other) == set(kernel.Args._fields[1:])
    given = dict(x=X, topk_weights=weights, topk_idx=IDX, scales=None, **out._asdict())
    assert all(other[name] is tensor for name, tensor in given.items())
    numbers = {name: value for name, value in one.items() if type(value) is int}
    assert numbers == {name: other[name] for name in numbers} and numbers["tokens"] == 5

    launched.clear()
    y, by = out.recv_x, None if weights is None else out.recv_weights
    combine = backend.bound(backend.combine_args(y, by, route, None, name))
    backend.combine(y, by, route, None, name)
    sums = combine()
    (kernel, terms, one), (other_kernel, other_terms, other) = launched
    assert kernel == other_kernel and terms == other_terms and set(one) == set(other) == set(kernel.Args._fields[1:])
    given = dict(y=y, recv_weights=by, out=sums, **{name: getattr(route, name) for name in OF_ROUTE})
    assert all(other[name] is tensor for name, tensor in given.items())
    numbers = {name: value for name, value in one.items() if type(value) is int}
    assert numbers == {name: other[name] for name in numbers}

    backend.start(0, "dispatch", X, weights, IDX, sizes, how)
    for call in (dispatch, combine):
        with pytest.raises(RuntimeError, match="before an operator that is not split"):
            call()


@pytest.mark.parametrize("sizes", [FEW, MANY, IN_THREE], ids=["few", "many", "in rounds"])
def test_bound_calls_keep_no_tensors(sizes: Sizes, backend: Any) -> None:
    """A remembered call does not keep its tensors alive, which may lie in the memory of a CUDA graph."""
    kept: list[Any] = []

    def of(sent: torch.Tensor) -> None:
        x, idx = X.clone(), IDX.clone()
        a = backend.dispatch_args(x, None, idx, sizes)
        run, start = backend.bind(spec_of(a), a), backend.bind_start(spec_of(a), a)
        out = run(a)
        start(DispatchStartArgs(*a))
        backend.wait(0, "dispatch")
        b = backend.combine_args(out.recv_x, None, Route(idx, *out[3:7], 16, 32, sizes.max_tokens))
        back = backend.bind(spec_of(b), b)
        back(b)
        kept.append((run, start, back, [weakref.ref(tensor) for tensor in (x, idx, out.recv_x)]))

    of(X)
    for launcher in (backend._launcher, backend.side):
        launcher.launched.clear()
    gc.collect()
    ((*_, tensors),) = kept
    assert [tensor() for tensor in tensors] == [None] * 3


@pytest.mark.parametrize("sizes", [MANY, IN_THREE], ids=["whole", "in rounds"])
@pytest.mark.parametrize("scalars", [False, True], ids=["", "weighted"])
def test_bound_gradients(sizes: Sizes, scalars: bool, backend: Any) -> None:
    """Gradients that are bound once launch for other tensors, and under another budget, what newly bound ones launch.
    They keep no tensors."""
    launched = backend._launcher.launched

    def given() -> list[Any]:
        idx = IDX.clone()
        y, by = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(32) if scalars else None
        placed = backend.plan(idx, sizes)
        along = *Route(idx, *placed[:4], 16, 32, sizes.max_tokens).tensors, 16, sizes.max_tokens, "ep"
        known = *along[:5], 32, *along[5:]
        found: list[Any] = [DispatchBackwardArgs(y, by, *along), CombineBackwardArgs(X.clone(), y, by, *known)]
        if scalars:
            found += [DispatchBackwardArgs(None, by, *along), CombineBackwardArgs(X.clone(), None, by, *known)]
        return found

    def bound(a: Any) -> Any:
        return backend.bind(spec_of(a), a)

    def launches(run: Any, a: Any) -> list[Any]:
        launched.clear()
        shapes = [(made.shape, made.dtype) for made in run(a)]
        inputs = {id(tensor) for tensor in a if isinstance(tensor, torch.Tensor)}
        noted = [
            (
                kernel,
                terms,
                {
                    k: v if type(v) is int else (id(v) if id(v) in inputs else getattr(v, "shape", v))
                    for k, v in on.items()
                },
            )
            for kernel, terms, on in launched
        ]
        return [shapes, noted]

    first = given()
    calls = [bound(a) for a in first]
    for call, a in zip(calls, first, strict=True):
        call(a)
    for call, a in zip(calls, given(), strict=True):
        before = launches(call, a)
        assert before == launches(bound(a), a) and len(before[1]) >= (3 if sizes is IN_THREE else 1)
        with backend.throughput.sms.budget.changed(7, 9):
            within = launches(call, a)
            assert within == launches(bound(a), a) and within != before
        assert launches(call, a) == before
    tensors = [weakref.ref(tensor) for a in first for tensor in a if isinstance(tensor, torch.Tensor)]
    launched.clear()
    del first, a
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def test_formats_that_token_major_rows_do_not_have() -> None:
    """Have no kernels for them."""
    problem = Problem(2, (8,) * 2, 4, 128, "bf16", 512)
    for layout, there in (("rows", True), ("packed", False)):
        found = latency_kernels(problem, 64, row_format(Delivery(None, "e4m3/128/pow2", layout)))
        assert len(found) == len(set(found)) and any(kernel.token_major for kernel in found) == there


@pytest.mark.parametrize("few", [True, False])
def test_who_takes_token_major_dispatches(few: bool) -> None:
    """Latency kernels up to the bound of tokens, throughput kernels beyond it and for scales of a whole row."""
    made: Any = On(object.__new__(CuteBackend))
    took: list[tuple[str, Any]] = []
    made._problem = problem = Problem(2, (8,) * 2, 4, 128, "bf16", 512)
    noting(made, problem, 16, took)
    x, idx = torch.zeros(1, 128), torch.zeros(1, 4, dtype=torch.int32)
    by_token = Sizes(8, 1, 0, 16, "token_major")
    made.dispatch(x, None, idx, by_token._replace(max_tokens=16 if few else 17), Delivery())
    made.dispatch(x, None, idx, by_token, Delivery(None, "e4m3/row/fp32", "rows"))
    assert [name for name, _ in took] == ["latency" if few else "throughput", "throughput"]
    assert all(spec.token_major for _, spec in took)


def test_a_rank_alone_wastes_no_block(path, recorder) -> None:
    if recorder.problem.world_size > 1:
        pytest.skip("not alone")
    assert path._dispatch_deal(8, True, True) == path._combine_deal(8, 4, True, True) == (0, 0, SMS)


def test_puts_find_a_block_each(path, recorder) -> None:
    """Each put has a block of its own as far as there are so many; blocks that send also receive only if all do."""
    far = recorder.problem.world_size - recorder.problem.domain_ranks
    for tokens in (1, 8, 20, 40, 256):
        deals = (path._dispatch_deal(tokens, True, True), path._combine_deal(tokens, 4, True, True))
        for puts, (senders, first, blocks) in zip((far + far * tokens, far * tokens), deals, strict=True):
            assert blocks == SMS and senders >= min(puts, SMS) * (far > 0)
            assert first == senders or (senders, first) == (SMS, 0)


def test_all_blocks_push_sums_that_halves_would_push_in_turns(path, recorder) -> None:
    """Where the warps of half the blocks have a packet each, or less, the others receive from the start."""
    problem = recorder.problem
    if problem.world_size == 1 or problem.world_size > problem.domain_ranks:
        pytest.skip("for one domain of several ranks")
    for row_packets in (1, packets(problem.row_bytes)):
        fit = SMS // 2 * WARPS // (min(problem.top_k, problem.world_size - 1) * row_packets)
        assert path._combine_deal(fit, row_packets, True, True) == (SMS // 2, SMS // 2, SMS)
        assert path._combine_deal(fit + 1, row_packets, True, True) == (SMS, 0, SMS)
