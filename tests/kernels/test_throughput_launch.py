"""What the throughput path hands to its kernels, without a GPU, and what a launcher makes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass import Int32, Int64
from launches import NO_FAILURES, Recorder, allocate_on_cpu

from cute_kernels import jit, marks, sync
from cute_kernels.heap import Problem
from cute_kernels.internode.wire import Nvlink, Nvshmem
from cute_kernels.launch import RankArgs, gather, names
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from ep_ops import arrivals, symmetric
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute import CuteBackend, latency, launcher, residency
from ep_ops.backends.cute.budget import Traffic
from ep_ops.backends.cute.failures import Failures
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.backends.cute.report import Report
from ep_ops.backends.cute.sent import sent
from ep_ops.backends.cute.throughput import STAGING_BLOCKS, ThroughputPath, kernels_of, kernels_of_format
from ep_ops.backends.split import Order
from ep_ops.formats import format_of, quantise
from ep_ops.records import Delivery, Placed, Route, Sizes
from ep_ops.symmetric import nvshmem

PROBLEM = Problem(3, (3, 0, 5), 4, 64, "bf16", 512)
KERNELS = {type(kernel): kernel for kernel in [*kernels_of(PROBLEM), *latency.kernels_of(PROBLEM, 16)]}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: f"{type(k).__module__}.{type(k).__name__}")
def test_signature_follows_from_the_arguments(kernel: Any) -> None:
    """In the order of the fields, each with the type of its annotation; the host names the same ones in that order."""
    fields = kernel.Args.__annotations__
    assert list(fields) == list(kernel.Args._fields) and fields["ranks"] is RankArgs and fields["blocks"] is Int32
    *given, _ = kernel.signature()
    flat = [*RankArgs.__annotations__.values(), *list(fields.values())[1:]]
    assert len(given) == len(flat)
    for value, kind in zip(given, flat, strict=True):
        assert type(value) is kind and kind in (Int32, Int64)
    tensors, numbers = names(kernel.Args)
    assert ("ranks", *tensors, *numbers) == kernel.Args._fields, "addresses come first"
    assert len(kernel.signature()) == len(RankArgs._fields) + len(tensors) + len(numbers) + 1

    marked = tuple(range(len(flat)))
    args = gather(kernel.Args, marked)
    assert args.ranks == RankArgs(*marked[:6]) and tuple(args[1:]) == marked[6:]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(PROBLEM, 132)


def path_of(recorder: Recorder, budget: Budget, monkeypatch: pytest.MonkeyPatch) -> ThroughputPath:
    allocate_on_cpu(monkeypatch)
    traffic = Traffic.of(PROBLEM.experts_per_rank, PROBLEM.top_k, PROBLEM.row_bytes, 1)
    return ThroughputPath(recorder, Outputs(PROBLEM, 3, recorder.device), budget, traffic)  # type: ignore[arg-type]


def joins(kernel: Any) -> bool:
    return isinstance(kernel, Pull) and kernel.joins


@pytest.mark.parametrize("beyond", [(0, 0), (66, 99)], ids=["fixed", "joining"])
def test_launches(beyond: tuple[int, int], recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(recorder, Budget(20, 30, beyond=beyond), monkeypatch)
    dispatch = ["dispatch"] * (3 if any(beyond) else 2)  # where blocks may join, they are a grid of their own
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    weights = torch.zeros(7, 4)
    sizes = Sizes(48, 16, 0, 100)
    kinds = []
    for given in (None, weights):
        recv_x, recv_weights, *placed = path.dispatch(x, given, idx, sizes)
        route = Route(idx, *placed[:4], 16, 48, 100)
        row_weights = None if given is None else recv_weights
        path.along("dispatch_planned", x, given, route)
        assert path.combine(recv_x, row_weights, route, None).shape == x.shape
        path.combine(recv_x, row_weights, route, x)
        path.dispatch_backward(recv_x, row_weights, route)
        kinds += dispatch + ["dispatch_planned"] * 2 + ["combine"] * 2 + ["dispatch_backward"]
    path.dispatch_backward(None, recv_weights, route)
    path.plan(idx, sizes)
    path.combine_backward(x, recv_x, recv_weights, route)
    path.combine_gathered(recv_x, route, torch.zeros(3, dtype=torch.int64), 40)
    kinds += ["dispatch_backward", "plan", "combine_backward", "combine_backward", "combine_gathered"]
    whole, along = ["dispatch_tokens"] * len(dispatch), ["dispatch_tokens_planned"] * 2
    sizes = Sizes(48, 1, 0, 100)
    for given in (None, weights):
        recv_x, recv_weights, *placed, recv_idx = path.dispatch(x, given, idx, sizes, token_major=True)
        assert recv_weights.shape == ((0,) if given is None else (48, 4))
        assert recv_idx.shape == (48, 4) and recv_idx.dtype == torch.int32 and recv_x.shape == (48, 64)
        route = Route(idx, *placed[:4], 1, 48, 100, token_major=True)
        assert path.along("dispatch_tokens_planned", x, given, route, token_major=True)[1].shape == recv_weights.shape
        row_weights = None if given is None else recv_weights
        grads = path.dispatch_backward(recv_x, row_weights, route, token_major=True)
        assert [tuple(grad.shape) for grad in grads] == [(7, 64), (0,) if given is None else (7, 4)]
        kinds += whole + along + ["dispatch_tokens_backward"]
    path.dispatch_backward(None, recv_weights, route, token_major=True)
    assert path.plan_tokens(idx, sizes)[1].shape == (48, 4)
    kinds += ["dispatch_tokens_backward", "dispatch_tokens_dynamic"]
    assert [marks.unpack(terms)[1].kind for _, terms, _ in recorder.launched] == kinds
    wanted = {kernel for kernel in kernels_of(PROBLEM) if any(beyond) or not joins(kernel)}
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
            assert given["zeros"] == (not marks.unpack(terms)[1].kind.startswith("dispatch_tokens")), "of padding"


def test_rounds(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a route is told of all tokens, once; rows go by as many as the memory takes at a time."""
    recorder.problem = dataclasses.replace(PROBLEM, max_tokens=32, route_tokens=512)
    path = path_of(recorder, Budget(20, 30), monkeypatch)
    x, weights = torch.zeros(70, 64, dtype=torch.bfloat16), torch.zeros(70, 4)
    idx = torch.zeros(70, 4, dtype=torch.int32)
    recv_x, recv_weights, *placed = path.dispatch(x, weights, idx, Sizes(480, 16, 0, 100))
    plan, *moving = recorder.launched
    assert plan[0] == Publish(recorder.problem, True, False, False, True) and plan[2]["tokens"] == 70
    assert [type(kernel) for kernel, *_ in moving] == [Publish, Pull] * 4
    assert [given["tokens"] for kernel, _, given in moving if isinstance(kernel, Publish)] == [32, 32, 6, 0]
    pulls = [given for kernel, _, given in moving if isinstance(kernel, Pull)]
    assert [given["max_tokens"] for given in pulls] == [32, 32, 32, 4]
    assert [given["zeros"] for given in pulls] == [1, 0, 0, 0], "padding is cleared once"
    assert len({id(given["recv_x"]) for given in pulls}) == 1 and pulls[0]["recv_x"] is recv_x
    assert pulls[1]["x"].data_ptr() == x[32:].data_ptr() and pulls[1]["arrivals"] is not placed[1]

    route = Route(idx, *placed[:4], 16, 480, 100)
    first = len(recorder.launched)
    out = path.combine(recv_x, recv_weights, route, x)
    path.dispatch_backward(recv_x, recv_weights, route)
    path.combine_backward(x, recv_x, recv_weights, route)
    adding = [given for kernel, _, given in recorder.launched[first:] if isinstance(kernel, Combine)]
    assert [given["tokens"] for given in adding] == 2 * [32, 32, 6, 0]
    assert adding[1]["out"].data_ptr() == out[32:].data_ptr()
    assert adding[2]["residual"].data_ptr() == x[64:].data_ptr() and adding[1]["y"] is recv_x
    assert len(recorder.launched) == first + 4 + 4 + 8
    path.combine_gathered(recv_x, route, torch.zeros(3, dtype=torch.int64), 480)
    assert len(recorder.launched) == first + 17 and recorder.launched[-1][2]["tokens"] == 70, "nothing is staged"
    # Ranks that passed other bounds find out, whichever round they are in.
    assert {marks.unpack(terms)[1].max_tokens for _, terms, _ in recorder.launched} == {100}
    recorder.launched.clear()
    path.dispatch(x[:9], None, idx[:9], Sizes(480, 16, 0, 32))
    assert [type(kernel) for kernel, *_ in recorder.launched] == [Publish, Pull], "of few enough there is one round"


ROUND = 32
"""Tokens of a round."""


def in_rounds(problem: Problem, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> ThroughputPath:
    recorder.problem = problem = dataclasses.replace(problem, max_tokens=ROUND, route_tokens=problem.max_tokens)
    allocate_on_cpu(monkeypatch)
    traffic = Traffic.of(problem.experts_per_rank, problem.top_k, problem.row_bytes, 1)
    return ThroughputPath(recorder, Outputs(problem, 3, recorder.device), Budget(20, 30), traffic)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [3, 1])
@pytest.mark.parametrize("name", ["", "e4m3/128/pow2", "wire:e4m3/32/mx"])
def test_rounds_of_all_kinds(name: str, ranks: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever format, grouped by expert or token-major, with weights or without: kernels that are compiled before,
    each told of its round's tokens, of theirs alone, and of outputs that are those of all rounds."""
    experts = (3, 0, 5) if ranks == 3 else (8,)
    path = in_rounds(Problem(ranks, experts, 4, 128, "bf16", 512), recorder, monkeypatch)
    x, idx = torch.zeros(70, 128, dtype=torch.bfloat16), torch.zeros(70, 4, dtype=torch.int32)
    layout = "" if not name or ":" in name else "columns"
    inputs = [(x, None), quantise(x, format_of(name))] if layout else [(x, None)]
    for token_major, weighted, (rows, scales) in itertools.product((False, True), (False, True), inputs):
        recorder.launched.clear()
        weights = torch.zeros(70, 4) if weighted else None
        sizes, delivery = Sizes(480, 1 if token_major else 16, 0, 100), Delivery(scales, name, layout)
        given = delivery if name else None
        recv_x, *rest = path.dispatch(rows, weights, idx, sizes, given, token_major)
        recv_scales, recv_weights, *placed = rest if name else (None, *rest)
        route = Route(idx, *placed[:4], sizes.alignment, 480, 100, None, 0, token_major)
        kind = "dispatch_tokens_planned" if token_major else "dispatch_planned"
        plan, *moving = recorder.launched
        assert plan[0] == (PublishTokens if token_major else Publish)(recorder.problem, True, False, False, True)
        path.along(kind, rows, weights, route, given, token_major)
        compiled = {*kernels_of(recorder.problem), *kernels_of_format(recorder.problem, sent(delivery))}
        assert {kernel for kernel, *_ in recorder.launched} <= (compiled if name else set(kernels_of(recorder.problem)))
        published = [told for kernel, _, told in moving if not isinstance(kernel, Pull)]
        pulled = [told for kernel, _, told in moving if isinstance(kernel, Pull)]
        assert len(pulled) == 4 and len(published) == (4 if ranks > 1 or name or weighted else 0)
        for number, told in enumerate(published):
            here = slice(ROUND * number, ROUND * (number + 1))
            for argument, whole in (("x", rows), ("topk_idx", idx), ("topk_weights", weights), ("scales", scales)):
                want = None if whole is None else whole[here]
                got = told.get(argument)
                assert (got is None) == (want is None), argument
                assert want is None or (got.shape == want.shape and got.data_ptr() == want.data_ptr()), argument
            assert told["capacity"] == 0, "a round clears nothing behind the last copy"
        for told in pulled:
            assert told["recv_x"] is recv_x and told["num_rows"] == 480 and told["slots"] == 0
            assert told["recv_weights"] is recv_weights and (not layout or told["recv_scales"] is recv_scales)
            assert told["offs"] is placed[2] and told["counts"] is placed[3]
        assert [told["max_tokens"] for told in pulled] == [ROUND] * 3 + [4]
        assert [told["zeros"] for told in pulled] == [int(not token_major), 0, 0, 0]
        if weighted and token_major:
            assert not recv_weights.any(), "what no round clears"


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(("epoch", "goes_on"), [(7, False), (6, True), (None, True)])
def test_a_dynamic_dispatch_that_is_refused(
    epoch: int | None, goes_on: bool, token_major: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with its plan, which has ended on all ranks; what another operation was refused for is told later."""
    path = path_of(recorder, Budget(20, 30), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    made: Any = object.__new__(CuteBackend)
    made._problem, made._local_experts, made.throughput, made._order = PROBLEM, 3, path, Order("name")
    made._failures = failures = object.__new__(Failures)
    failures._config, failures._reason = SimpleNamespace(name="name"), lambda peer, epoch: "why"
    failures._read = lambda first, nbytes: struct.pack("<q", 8)  # behind operation 7
    failures.report = report = object.__new__(Report)
    report._told, report._words = 0, [0] * 64  # type: ignore[assignment]
    plan = Placed(idx, torch.zeros(4 * 336 + 6, dtype=torch.int32), *[idx.new_zeros(3)] * 3)

    def planned(*_: Any) -> Any:
        if epoch is not None:
            mark, other = (e << marks.SHIFT | terms for e, terms in ((epoch, 1), (epoch, marks.pack_refusal(2))))
            report._words[32:40] = [1, sync.REFUSAL, 0, 0, 2, 0, mark, other]  # type: ignore[assignment]
        return (plan, idx) if token_major else plan

    monkeypatch.setattr(path, "plan_tokens" if token_major else "plan", planned)
    monkeypatch.setattr(arrivals, "cut", lambda lists, most, rows: lists.new_zeros(6))
    call = made.dispatch_tokens_dynamic if token_major else made.dispatch_dynamic
    args = (x, None, idx, 100) if token_major else (x, None, idx, 16, 100)
    if goes_on:
        call(*args)
        assert recorder.launched
        return
    with pytest.raises(ValueError, match=r"'name': ep::plan \(operation 7\): refused by rank 2: why"):
        call(*args)
    assert not recorder.launched


def test_blocks_that_join(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of an operation are told of the same blocks; there are as many as the budget allows, no more."""
    path = path_of(recorder, Budget(20, 30, 22, 24, beyond=(66, 99)), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    recv_x, recv_weights, *placed = path.dispatch(x, torch.zeros(7, 4), idx, Sizes(48, 16, 0, 100))
    route = Route(idx, *placed[:4], 16, 48, 100)
    _, first, second = recorder.launched
    assert not joins(first[0]) and joins(second[0]) and first[1] == second[1], "one operation"
    # One block of the grid that joins takes part in any case: the budget of 20 holds it.
    assert (first[2]["blocks"], second[2]["blocks"]) == (19, 1 + 66 - 20)
    assert {**first[2], "blocks": 0} == {**second[2], "blocks": 0}
    assert (first[2]["dealt"], first[2]["joining"]) == (19, second[2]["blocks"])

    recorder.launched.clear()
    path.along("dispatch_planned", x, None, route)
    path.combine(recv_x, recv_weights, route, None)
    path.dispatch_backward(recv_x, recv_weights, route)
    path.dispatch_backward(None, recv_weights, route)
    path.combine_backward(x, recv_x, recv_weights, route)
    given = [(given["dealt"], given["blocks"]) for _, _, given in recorder.launched if "dealt" in given]
    assert given == [(20, 66), (30, 99), (30, 99), (30, 30)]  # scalars alone: nobody joins
    (pull,) = (given for kernel, _, given in recorder.launched if isinstance(kernel, Pull))
    assert pull["joining"] == 66 - 20

    recorder.launched.clear()
    single = path_of(recorder, Budget(1, 2, beyond=(66, 99)), monkeypatch)
    single.dispatch(x, None, idx, Sizes(48, 16, 0, 100))
    _, (kernel, _, given) = recorder.launched
    assert not joins(kernel) and (given["dealt"], given["joining"], given["blocks"]) == (1, 0, 1), "none to give away"


def test_beside_computation(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody joins, and few multiprocessors stage; a budget is followed."""
    budget = Budget(20, 30, 22, 24, beyond=(66, 99))
    whole = path_of(recorder, budget, monkeypatch)
    path = ThroughputPath(recorder, whole._outputs, budget, whole._traffic, side=object())  # type: ignore[arg-type]
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    for asked, (dispatch, combine) in (((None, None), (20, 30)), ((8, 12), (8, 12))):
        recorder.launched.clear()
        with budget.changed(*asked):
            recv_x, recv_weights, *placed = path.dispatch(x, torch.zeros(7, 4), idx, Sizes(48, 16, 0, 100))
            route = Route(idx, *placed[:4], 16, 48, 100)
            path.combine(recv_x, recv_weights, route, None)
            path.dispatch_backward(recv_x, recv_weights, route)
            path.along("combine_backward", x, None, route)
        publish, pull, add, add_back, publish_back, pull_back = (given for _, _, given in recorder.launched)
        staging = 1 + min(STAGING_BLOCKS, dispatch)
        assert publish["blocks"] == PROBLEM.tiles + staging and publish_back["blocks"] == staging
        assert pull["blocks"] == pull["dealt"] == pull_back["blocks"] == dispatch
        assert pull["joining"] == pull_back["joining"] == 0
        assert add["blocks"] == add["dealt"] == add_back["blocks"] == combine


def test_a_launcher_passes_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launcher, "_template", launcher._template.__wrapped__)
    monkeypatch.setattr(jit, "get", lambda kernel, arch, capturing: lambda *given: calls.append(given))
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, answer in (("_cuda_getDevice", lambda: 1), ("_cuda_getCurrentRawStream", lambda index: 77)):
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    table = torch.tensor([10, 20, 30])
    heap = SimpleNamespace(
        local=SimpleNamespace(device=torch.device("cuda", 1)), table=table, addresses=(10, 20, 30)
    )  # fmt: skip
    made = launcher.Launcher(PROBLEM, heap, 132, (1, 5, 6))  # type: ignore[arg-type]
    rows = torch.zeros(4)
    launch = made.get(Pull, True, False, True)
    assert made.get(Pull, True, False, True) is launch
    launch(
        9,
        blocks=3,
        joining=4,
        expected=7,
        dealt=3,
        num_rows=8,
        alignment=2,
        max_tokens=1,
        slots=9,
        zeros=1,
        arrivals=rows,
        x=None,
    )
    ranks = (table.data_ptr(), 20, 1, 5, 6, 9)  # the table of all heaps, and this rank's own
    assert calls == [(*ranks, 0, rows.data_ptr(), 0, 0, 0, 0, 0, 1, 2, 8, 9, 1, 3, 7, 4, 3, 77)]
    assert len(calls[0]) == len(KERNELS[Pull].signature())
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        launch(
            9,
            blocks=3,
            joining=4,
            expected=7,
            dealt=3,
            num_rows=8,
            alignment=2,
            max_tokens=1,
            slots=9,
            zeros=1,
            rows=rows,
        )
    with pytest.raises(TypeError, match="'num_rows', 'slots', 'zeros', and 'blocks'"):
        launch(9, joining=4, expected=7, dealt=3, alignment=2, max_tokens=1, x=rows)


@pytest.mark.parametrize(("wire", "told"), [(Nvlink(), None), (Nvshmem("lib.bc"), nvshmem.register)])
def test_a_launcher_across_domains(wire: Any, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels find their peers' places behind the addresses, and NVSHMEM is told of those that are linked with it."""
    problem = dataclasses.replace(PROBLEM, world_size=4, experts_per_rank=(2,) * 4, domains=DOMAINS, wire=wire)
    asked: list[Any] = []
    monkeypatch.setattr(jit, "get", lambda kernel, arch, capturing, register=None: asked.append((kernel, register)))
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    heap = symmetric.SymmetricBuffer(torch.zeros(8, dtype=torch.uint8), (10, 0, 0, 40))
    made = launcher.Launcher(problem, heap, 132, (3, 5, 6))
    assert made._ranks == (made._table.data_ptr(), 40, 3, 5, 6)
    # Domain and index of each rank in two halves of a word; then the ranks by domain and index.
    places = [0, 1 << 32, (1 << 32) + 1, 1]
    assert made._table.tolist() == [10, 0, 0, 40, *places, 0, 3, 1, 2]
    made.compile([Pull(problem, True, False, True)])
    assert asked == [(Pull(problem, True, False, True), told)]


DOMAINS = ((0, 3), (1, 2))


def test_blocks_across_domains(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside tiles and what pulls: one block each that relays, announces, sends and stages, however few there are."""
    problem = dataclasses.replace(PROBLEM, world_size=4, experts_per_rank=(2,) * 4, domains=DOMAINS, wire=Nvlink())
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    allocate_on_cpu(monkeypatch)
    traffic = Traffic.of(problem.experts_per_rank, problem.top_k, problem.row_bytes, 1)
    least = residency.needed(problem)
    assert least == residency.needed(dataclasses.replace(problem, domains=())) + 2
    for blocks, pulling in ((least, 1), (least, 3), (132, 20)):
        recorder = Recorder(problem, blocks)
        path = ThroughputPath(recorder, Outputs(problem, 2, recorder.device), Budget(pulling, 4), traffic)  # type: ignore
        path.dispatch(x, None, idx, Sizes(48, 16, 0, 100))
        (publish, *_) = (given["blocks"] for _, _, given in recorder.launched)
        assert publish == max(problem.tiles + 4, blocks - residency.MARGIN - pulling)
        path.plan(idx, Sizes(48, 16, 0, 100))
        assert recorder.launched[-1][2]["blocks"] == problem.tiles


def test_operators_across_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """They launch what is compiled ahead; rows are copied where nobody can fetch them."""
    problem = dataclasses.replace(PROBLEM, world_size=4, experts_per_rank=(2,) * 4, domains=DOMAINS, wire=Nvlink())
    recorder = Recorder(problem, 132)
    allocate_on_cpu(monkeypatch)
    traffic = Traffic.of(problem.experts_per_rank, problem.top_k, problem.row_bytes, 1)
    made = object.__new__(CuteBackend)
    made.throughput = ThroughputPath(
        recorder, Outputs(problem, 2, recorder.device), Budget(20, 30, beyond=(66, 99)), traffic,  # type: ignore
    )  # fmt: skip
    made._problem, made._local_experts, made._order, made._rank = problem, 2, Order("name"), 1
    made._latency_tokens, made._across = -1, True
    made._config = SimpleNamespace(name="name", symmetric_rows=48)  # type: ignore[assignment]
    made._failures = NO_FAILURES
    held = torch.zeros(48 * 64 * 2, dtype=torch.uint8)
    made._rows = symmetric.SymmetricBuffer(held, (held.data_ptr(),))  # it is of this rank alone
    x, idx, sizes = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32), Sizes(48, 16, 0, 1)
    for weights in (None, torch.zeros(7, 4)):
        recv_x, recv_weights, *placed = made.dispatch(x, weights, idx, sizes)
        route = Route(idx, *placed[:4], 16, 48, 1)
        row_weights = None if weights is None else recv_weights
        made.combine(recv_x, row_weights, route)
        made.combine(recv_x, row_weights, route, x)
        made.dispatch_planned(x, weights, route)
        made.dispatch_backward(recv_x, row_weights, route)
        made.combine_backward(x, recv_x, row_weights, route)
    made.dispatch_backward(None, recv_weights, route)
    made.plan(idx, sizes)
    for weights in (None, torch.zeros(7, 4)):
        recv_x, recv_weights, *placed = made.dispatch_tokens(x, weights, idx, Sizes(48, 1, 0, 1))
        along = Route(idx, *placed[:4], 1, 48, 1)
        made.dispatch_tokens_planned(x, weights, along)
    made.dispatch_tokens_backward(recv_x, recv_weights, along)
    made.dispatch_tokens_backward(None, recv_weights, along)
    made.throughput.plan_tokens(idx, Sizes(48, 1, 0, 1))
    assert recorder.launched[-1][2]["blocks"] == problem.tiles + 1, "ids are relayed"
    assert {kernel for kernel, _, _ in recorder.launched} == set(kernels_of(problem))
    made.combine_gathered(held.view(torch.bfloat16).view(48, 64), route)
    kernel, terms, given = recorder.launched[-1]
    assert type(kernel).__name__ == "Combine" and marks.unpack(terms)[1].kind == "combine"
    assert given["y"].data_ptr() == held.data_ptr() and given["recv_weights"] is given["residual"] is None
    monkeypatch.setattr(made, "refuse", lambda *why, **more: None)
    made.combine_gathered(recv_x, route)
    assert recorder.launched[-1][2]["y"] is recv_x
    with pytest.raises(ValueError, match="y lies in symmetric memory, and not at its beginning"):
        made.combine_gathered(held.view(torch.bfloat16).view(48, 64)[4:], route)


@pytest.mark.parametrize("beyond", [(0, 0), (66, 99)], ids=["fixed", "joining"])
def test_launches_in_a_format(beyond: tuple[int, int], recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel knows what rows travel as; those that are told to be compiled ahead are those that run."""
    path = path_of(recorder, Budget(20, 30, beyond=beyond), monkeypatch)
    name = "e4m3/32/mx"
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    codes, scales = quantise(x, format_of(name))
    sizes = Sizes(48, 16, 0, 100)
    for weights in (None, torch.zeros(7, 4)):
        for rows, given in ((x, None), (codes, scales)):
            delivery = Delivery(given, name, "packed")
            recv_x, recv_scales, recv_weights, *placed = path.dispatch(rows, weights, idx, sizes, delivery)
            assert recv_x.dtype == torch.float8_e4m3fn and recv_scales.shape == (1, 48)
            assert recv_weights.shape == (0 if weights is None else 48,)
            route = Route(idx, *placed[:4], 16, 48, 100)
            assert len(path.along("dispatch_planned", rows, weights, route, delivery)) == 3
    wanted = kernels_of_format(PROBLEM, sent(Delivery(None, name, "packed")))
    # A format takes all blocks that may join from the beginning.
    assert {kernel for kernel, _, _ in recorder.launched} == {kernel for kernel in wanted if not joins(kernel)}
    for kernel, terms, values in recorder.launched:
        assert marks.unpack(terms)[1].format == name
        if isinstance(kernel, Publish):
            assert (values["scales"] is not None) == kernel.given
        else:
            assert values["dealt"] == max(20, beyond[0]) and values["zeros"] == 1 and values["recv_scales"] is not None


def test_padding_on_request(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(recorder, Budget(20, 30), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    out = path.dispatch(x, None, idx, Sizes(48, 16, 0, 100), Delivery(zeros=False))
    assert out[0].dtype == torch.bfloat16 and out[1].shape == (0,)
    assert [values["zeros"] for kernel, _, values in recorder.launched if isinstance(kernel, Pull)] == [0]


@pytest.mark.parametrize("name", ["e4m3/128/pow2", "wire:e4m3/32/mx"])
def test_token_major_launches_in_a_format(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(3, (3, 0, 5), 4, 128, "bf16", 512)
    recorder.problem = problem
    allocate_on_cpu(monkeypatch)
    traffic = Traffic.of(problem.experts_per_rank, problem.top_k, problem.row_bytes, 1)
    path = ThroughputPath(recorder, Outputs(problem, 3, recorder.device), Budget(20, 30), traffic)  # type: ignore[arg-type]
    x, idx, wire = torch.zeros(7, 128, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32), ":" in name
    layout = "" if wire else "columns"
    inputs = [(x, None)] if wire else [(x, None), quantise(x, format_of(name))]
    for weights in (None, torch.zeros(7, 4)):
        for rows, given in inputs:
            delivery = Delivery(given, name, layout)
            out = path.dispatch(rows, weights, idx, Sizes(48, 1, 0, 100), delivery, token_major=True)
            recv_x, recv_scales, recv_weights, *placed, recv_idx = out
            assert recv_x.dtype == (torch.bfloat16 if wire else torch.float8_e4m3fn) and recv_idx.shape == (48, 4)
            assert recv_scales.shape == ((0,) if wire else (1, 48))
            route = Route(idx, *placed[:4], 1, 48, 100, token_major=True)
            assert len(path.along("dispatch_tokens_planned", rows, weights, route, delivery, token_major=True)) == 3
    compiled = set(kernels_of_format(problem, sent(Delivery(None, name, layout))))
    launched = {kernel for kernel, _, _ in recorder.launched}
    assert launched <= compiled
    tokens = {kernel for kernel in compiled if isinstance(kernel, PublishTokens)}
    assert tokens and tokens <= launched and all(kernel.format == name.removeprefix("wire:") for kernel in tokens)


@pytest.mark.parametrize("weighted", [False, True])
def test_dynamic_token_major(weighted: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for as many rows as there can be, moved into as many as there are copies."""
    path = path_of(recorder, Budget(20, 30), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    made = object.__new__(CuteBackend)
    made._problem, made._local_experts, made.throughput, made._order = PROBLEM, 3, path, Order("name")
    made._failures = NO_FAILURES
    ids = torch.arange(3 * 100 * 4, dtype=torch.int32).view(300, 4)

    def plan_tokens(topk_idx: torch.Tensor, sizes: Sizes) -> tuple[Placed, torch.Tensor]:
        assert sizes == Sizes(300, 1, 0, 100)
        return Placed(idx, torch.arange(4 * 300 + 6, dtype=torch.int32) * 0 + 11, *[idx.new_zeros(3)] * 3), ids

    monkeypatch.setattr(path, "plan_tokens", plan_tokens)
    weights = torch.zeros(7, 4) if weighted else None
    recv_x, recv_weights, _, arrivals, *_, recv_idx = made.dispatch_tokens_dynamic(x, weights, idx, 100)
    assert recv_x.shape == (11, 64) and recv_weights.shape == ((11, 4) if weighted else (0,))
    assert arrivals.shape == (4 * 11 + 6,) and torch.equal(recv_idx, ids[:11]) and recv_idx._base is None
    publish, pull = (given for _, _, given in recorder.launched)
    assert publish["num_rows"] == pull["num_rows"] == 11 and pull["arrivals"] is arrivals
