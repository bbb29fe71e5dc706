"""What the throughput path hands to its kernels, without a GPU, and what a launcher makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass import Int32, Int64
from launches import Recorder, allocate_on_cpu

from cute_kernels import jit, marks
from cute_kernels.heap import Problem
from cute_kernels.launch import Addresses, RankArgs, gather, names
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute import latency, launcher
from ep_ops.backends.cute.budget import Traffic
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.backends.cute.throughput import ThroughputPath, kernels_of
from ep_ops.records import Route, Sizes

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
        if kind is Addresses:
            assert isinstance(value, tuple) and [type(v) for v in value] == [Int64] * PROBLEM.world_size
        else:
            assert type(value) is kind and kind in (Int32, Int64)
    tensors, numbers = names(kernel.Args)
    assert ("ranks", *tensors, *numbers) == kernel.Args._fields, "addresses come first"
    assert len(kernel.signature()) == len(RankArgs._fields) + len(tensors) + len(numbers) + 1

    marked = tuple(range(len(flat)))
    args = gather(kernel.Args, marked)
    assert args.ranks == RankArgs(*marked[:5]) and tuple(args[1:]) == marked[5:]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(PROBLEM, 132)


@pytest.fixture
def path(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> ThroughputPath:
    allocate_on_cpu(monkeypatch)
    traffic = Traffic.of(PROBLEM.experts_per_rank, PROBLEM.top_k, PROBLEM.row_bytes, 1)
    return ThroughputPath(recorder, Outputs(PROBLEM, 3, recorder.device), Budget(20, 30), traffic)  # type: ignore[arg-type]


def test_launches(path: ThroughputPath, recorder: Recorder) -> None:
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    weights = torch.zeros(7, 4)
    sizes = Sizes(48, 16, 0, 100)
    kinds = []
    for given in (None, weights):
        recv_x, recv_weights, *placed = path.dispatch(x, given, idx, sizes)
        route = Route(idx, *placed[:4], 16, 48)
        row_weights = None if given is None else recv_weights
        path.along("dispatch_planned", x, given, route)
        assert path.combine(recv_x, row_weights, route, None).shape == x.shape
        path.combine(recv_x, row_weights, route, x)
        path.dispatch_backward(recv_x, row_weights, route)
        kinds += ["dispatch"] * 2 + ["dispatch_planned"] * 2 + ["combine"] * 2 + ["dispatch_backward"]
    path.dispatch_backward(None, recv_weights, route)
    path.plan(idx, sizes)
    path.combine_backward(x, recv_x, recv_weights, route)
    path.combine_gathered(recv_x, route, (0, 0, 0), 40)
    kinds += ["dispatch_backward", "plan", "combine_backward", "combine_backward", "combine_gathered"]
    assert [marks.unpack(terms)[1].kind for _, terms, _ in recorder.launched] == kinds
    assert {kernel for kernel, _, _ in recorder.launched} == set(kernels_of(PROBLEM))
    for kernel, terms, given in recorder.launched:
        assert marks.unpack(terms)[1].max_tokens == 100
        assert given["tokens" if "tokens" in given else "max_tokens"] in (7, 100)
        # Whatever it is given, a kernel knows how many rows there are.
        assert {given[name] for name in ("num_rows", "capacity") if name in given} <= {48, 40}, kernel
        assert "num_rows" in given or "capacity" in given


def test_a_launcher_passes_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launcher, "_template", launcher._template.__wrapped__)
    monkeypatch.setattr(jit, "get", lambda kernel, arch, capturing: lambda *given: calls.append(given))
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, answer in (("_cuda_getDevice", lambda: 1), ("_cuda_getCurrentRawStream", lambda index: 77)):
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    made = launcher.Launcher(PROBLEM, torch.device("cuda", 1), ((10, 20, 30), 1, 5, 6))
    rows = torch.zeros(4)
    launch = made.get(Pull, True, False, True)
    assert made.get(Pull, True, False, True) is launch
    launch(9, blocks=3, num_rows=8, alignment=2, max_tokens=1, recv_rows=rows, x=None)
    assert calls == [((10, 20, 30), 1, 5, 6, 9, 0, rows.data_ptr(), 0, 0, 0, 0, 1, 2, 8, 3, 77)]
    assert len(calls[0]) == len(KERNELS[Pull].signature())
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        launch(9, blocks=3, num_rows=8, alignment=2, max_tokens=1, rows=rows)
    with pytest.raises(TypeError, match="'num_rows' and 'blocks'"):
        launch(9, alignment=2, max_tokens=1, x=rows)
