"""A launcher passes a kernel's arguments in their order. Needs no GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass import Int32, Int64
from launches import PROBLEM, across

from cute_kernels import jit
from cute_kernels.internode.wire import Nvlink, Nvshmem
from cute_kernels.launch import RankArgs, gather, is_address, names
from cute_kernels.throughput.pull import Pull
from cute_kernels.views import View
from ep_ops import symmetric
from ep_ops.backends.cute import launcher
from ep_ops.backends.cute.ahead import latency_kernels, throughput_kernels
from ep_ops.symmetric import nvshmem

KERNELS = {type(kernel): kernel for kernel in [*throughput_kernels(PROBLEM), *latency_kernels(PROBLEM, 16)]}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda k: f"{type(k).__module__}.{type(k).__name__}")
def test_signature_follows_from_the_arguments(kernel: Any) -> None:
    """A signature has the fields in their order, each with the type of its annotation; the host names the same ones in
    that order."""
    fields = kernel.Args.__annotations__
    assert list(fields) == list(kernel.Args._fields) and fields["ranks"] is RankArgs and fields["blocks"] is Int32
    *given, _ = kernel.signature()
    flat = [*RankArgs.__annotations__.values(), *list(fields.values())[1:]]
    assert len(given) == len(flat)
    for value, kind in zip(given, flat, strict=True):
        assert type(value) is (Int64 if is_address(kind) else kind) and type(value) in (Int32, Int64)
    tensors, numbers = names(kernel.Args)
    assert ("ranks", *tensors, *numbers) == kernel.Args._fields, "addresses come first"
    assert len(kernel.signature()) == len(RankArgs._fields) + len(tensors) + len(numbers) + 1

    marked = tuple(range(len(flat)))
    args = gather(kernel.Args, marked)
    assert args.ranks == RankArgs(*marked[:6])
    assert tuple(value.base if isinstance(value, View) else value for value in args[1:]) == marked[6:]
    kinds = [kind if issubclass(kind, View) else int for kind in list(fields.values())[1:]]
    assert [type(value) for value in args[1:]] == kinds


def launcher_of(table: torch.Tensor, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launcher of rank 1, whose kernels append what they are given to ``calls``."""
    monkeypatch.setattr(launcher, "_template", launcher._template.__wrapped__)
    monkeypatch.setattr(jit, "get", lambda kernel, arch, capturing: lambda *given: calls.append(given))
    properties = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, answer in (("_cuda_getDevice", lambda: 1), ("_cuda_getCurrentRawStream", lambda index: 77)):
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    heap = SimpleNamespace(
        local=SimpleNamespace(device=torch.device("cuda", 1)), table=table, addresses=(10, 20, 30)
    )  # fmt: skip
    return launcher.Launcher(PROBLEM, heap, 132, (1, 5, 6))  # type: ignore[arg-type]


def test_a_launcher_passes_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    table = torch.tensor([10, 20, 30])
    made = launcher_of(table, calls, monkeypatch)
    rows = torch.zeros(4)
    bind = made.get(Pull, weights=True, placed=True)
    assert made.get(Pull, weights=True, placed=True) is bind
    numbers = dict(
        blocks=3, joining=4, expected=7, dealt=3, num_rows=8, alignment=2, max_tokens=1, slots=9, zeros=1
    )  # fmt: skip
    launch = bind(9, **numbers)
    launch(arrivals=rows, x=None)
    ranks = (table.data_ptr(), 20, 1, 5, 6, 9)  # the table of all heaps, and this rank's own
    assert calls == [(*ranks, 0, rows.data_ptr(), 0, 0, 0, 0, 0, 1, 2, 8, 9, 1, 3, 7, 4, 3, 77)]
    assert len(calls[0]) == len(KERNELS[Pull].signature())
    launch(None, rows)
    assert calls.pop() == calls[0]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        launch(rows=rows)
    with pytest.raises(TypeError, match="'num_rows', 'slots', 'zeros', and 'blocks'"):
        bind(9, joining=4, expected=7, dealt=3, alignment=2, max_tokens=1)


@pytest.mark.parametrize("dependent", [False, True])
def test_the_launch_of_a_foreign_kernel(dependent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on GPUs occupy multiprocessors with it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "gpu"))
    from foreign import Foreign

    calls: list[tuple[Any, ...]] = []
    table = torch.tensor([10, 20, 30])
    made = object.__new__(Foreign)
    made.launcher, made.end = launcher_of(table, calls, monkeypatch), torch.zeros(1, dtype=torch.int64)
    made.take(5, 1024, dependent)
    assert calls == [(table.data_ptr(), 20, 1, 5, 6, 0, made.end.data_ptr(), 5, 77)]


@pytest.mark.parametrize(("wire", "told"), [(Nvlink(), None), (Nvshmem("lib.bc"), nvshmem.register)])
def test_a_launcher_across_domains(wire: Any, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels find their peers' places behind the addresses, and NVSHMEM is told of those that are linked with it."""
    problem = across(wire)
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
    others: list[Any] = []
    monkeypatch.setattr(launcher, "prepare_all", lambda *given: others.append(given))
    made.compile([Pull(problem, True, False, True)], 16)
    assert others == [([Pull(problem, True, False, True)], "sm_90a", 16)]
    assert asked == [(Pull(problem, True, False, True), told)]
