"""Kernels of a communicator with statistics add up waits, and those of others contain nothing of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import DRAWN_ARCHS, built, compiled_ptx, count

from cute_kernels.heap import Heap, Problem
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.latency.sizes import LatencyHeap
from cute_kernels.rejection import Reject
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from ep_ops.backends.cute.ahead import throughput_kernels

PLAIN = Problem(4, (64,) * 4, 8, 7168, "bf16", 4096)
COUNTED = dataclasses.replace(PLAIN, counts_waits=True)
LOAD, STORE = "ld.relaxed.gpu.global.b64", "st.relaxed.gpu.global.b64"


def of_kind(kind: type, problem: Problem) -> Any:
    if kind in (LatencyDispatch, LatencyCombine):
        return kind(problem, 256, True)
    if kind is Reject:
        return Reject(problem, 256)
    if kind is Gather:
        return Gather(problem)
    return next(kernel for kernel in throughput_kernels(problem) if type(kernel) is kind)


@pytest.mark.parametrize("arch", DRAWN_ARCHS)
@pytest.mark.parametrize(
    "kind",
    [LatencyDispatch, Publish, *(pytest.param(kind, marks=pytest.mark.drawn) for kind in (LatencyCombine, Combine)),
     *(pytest.param(kind, marks=pytest.mark.drawn) for kind in (Gather, Reject))],
)  # fmt: skip
def test_kernels_add_up_waits(kind: type, arch: str) -> None:
    """A kernel that begins an operation reads a wait and a sum and writes the sum, in no more registers than fit."""
    plain, counted = (compiled_ptx(of_kind(kind, problem), arch) for problem in (PLAIN, COUNTED))
    assert count(counted, LOAD) > count(plain, LOAD) and count(counted, STORE) > count(plain, STORE)
    before, after = (built(of_kind(kind, problem), arch) for problem in (PLAIN, COUNTED))
    assert after.stack_bytes == before.stack_bytes
    assert after.registers <= max(64, before.registers), (before.registers, after.registers)


def test_the_sums_lie_behind_everything_else() -> None:
    """Without statistics the layout of the heap is the same as if there were no sums."""
    for heap, counted in (
        (Heap(PLAIN), Heap(COUNTED)), (LatencyHeap(PLAIN, 256), LatencyHeap(COUNTED, 256)),
    ):  # fmt: skip
        assert "waits" not in heap.section and counted.section["waits"].shape == (4,)
        common = [name for name in heap.offset if heap.offset[name] < counted.offset["waits"]]
        assert [heap.offset[name] for name in common] == [counted.offset[name] for name in common]
        assert counted.nbytes > heap.nbytes
