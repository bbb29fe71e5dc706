"""Combines whose sums are sent in a format, without a GPU: launches, numbers of blocks, the layout of staging, and the
instructions of the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import built, compiled_ptx, count
from launches import PROBLEM, Recorder, across, allocate_on_cpu, noting, throughput
from operate import Delivery, On, row_format

from cute_kernels import marks
from cute_kernels.heap import SHARED_BYTES, Problem
from cute_kernels.internode.wire import Nvlink
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.slices import Slices
from cute_kernels.throughput.combine import Combine
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute import latency
from ep_ops.backends.cute.ahead import latency_kernels, throughput_kernels
from ep_ops.backends.cute.backend import CuteBackend
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.backends.cute.sm_model import OperationSms, TokenTraffic, default_budget
from ep_ops.backends.cute.tuning import Tuning
from ep_ops.records import Route

MX, WIRE = "e4m3/32/mx", "wire:e4m3/32/mx"
LARGE = Problem(4, (64,) * 4, 8, 7168, "bf16", 4096)
PAIRS = Problem(4, (8,) * 4, 4, 7168, "bf16", 512, ((0, 1), (2, 3)), Nvlink())
THREE = Problem(6, (8,) * 6, 4, 7168, "fp32", 512, ((0, 1), (2, 3), (4, 5)), Nvlink())
SMS = 132


def route_of(max_tokens: int) -> Route:
    idx, rows = torch.zeros(7, 4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    return Route(idx, idx, rows, rows, rows, 1, 48, max_tokens)


def test_throughput_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with and without weights and a residual are those that `warmup` compiles. Marks carry the format."""
    path, recorder = throughput(Budget(20, 30), monkeypatch)
    y, x = torch.zeros(48, 64, dtype=torch.bfloat16), torch.zeros(7, 64, dtype=torch.bfloat16)
    for weights in (None, torch.zeros(48)):
        for residual in (None, x):
            assert path.combine(y, weights, route_of(100), residual, MX).shape == x.shape
    launched = {kernel for kernel, _, _ in recorder.launched}
    wanted = throughput_kernels(PROBLEM, row_format(Delivery(None, WIRE)))
    assert launched == {kernel for kernel in wanted if isinstance(kernel, Combine)} and len(launched) == 4
    assert {marks.unpack(terms)[1].format for _, terms, _ in recorder.launched} == {MX}
    assert not any(
        isinstance(kernel, Combine)
        for kernel in throughput_kernels(PROBLEM, row_format(Delivery(None, "e4m3/32/mx", "rows")))
    )


@pytest.mark.parametrize("two_domains", [False, True])
def test_latency_launches(two_domains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and split combines launch kernels that are compiled. A sum has fewer packets than a row, so half of the
    blocks send for more tokens."""
    allocate_on_cpu(monkeypatch)
    problem = PAIRS if two_domains else Problem(4, (8,) * 4, 4, 7168, "bf16", 512)
    recorder: Any = Recorder(problem, SMS)
    path = On(latency.LatencyPath(recorder, Outputs(problem, 8, recorder.device), 64))
    y = torch.zeros(48, 7168, dtype=torch.bfloat16)
    for weights in (None, torch.zeros(48)):
        assert path.combine(y, weights, route_of(8), None, MX).shape == (7, 7168)
        path.send_combine(y, weights, route_of(8), MX)
        path.combine(y, weights, route_of(8), None, MX, send=False)
    launched = {kernel for kernel, _, _ in recorder.launched}
    wanted = latency_kernels(problem, 64, row_format(Delivery(None, WIRE)))
    assert launched == {kernel for kernel in wanted if isinstance(kernel, LatencyCombine)} and len(launched) == 6
    assert {marks.unpack(terms)[1].format for _, terms, _ in recorder.launched} == {MX}
    if not two_domains:
        senders = []
        for format in ("", MX):
            path.combine(y, None, route_of(12), None, format)
            senders.append(recorder.launched[-1][2]["senders"])
        assert senders == [SMS, SMS // 2]  # 12 tokens x 3 ranks x 30 or 16 packets, 16 warps each of 66 blocks


def test_who_takes_combines() -> None:
    """Latency kernels run combines up to their bound of tokens, unless there is a residual."""
    made: Any = On(object.__new__(CuteBackend))
    took: list[tuple[str, Any]] = []
    made._problem = PROBLEM
    noting(made, PROBLEM, 16, took)
    y = torch.zeros(48, 64)
    made.combine(y, None, route_of(16), None, WIRE)
    made.combine(y, None, route_of(17), None, WIRE)
    made.combine(y, None, route_of(16), y, WIRE)
    assert [(name, spec.sent_as) for name, spec in took] == [("latency", MX), ("throughput", MX), ("throughput", MX)]
    pairs = across(Nvlink())
    assert latency.takes_sums(pairs, MX) and not latency.takes_sums(pairs, "e4m3/128/pow2")
    assert latency.takes_sums(PROBLEM, "e4m3/128/pow2")


@pytest.mark.parametrize("hidden", [32, 64, 128, 1056, 2048, 4096, 7168, 7296, 16384])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("problem", [LARGE, PAIRS, THREE], ids=["one", "two", "three"])
def test_room_for_sums(problem: Problem, dtype: str, hidden: int) -> None:
    """Rows of sums fit in staging, whose size is that of rows of the dtype. Bulk copies need multiples of 16 bytes."""
    of = dataclasses.replace(problem, hidden_size=hidden, dtype=dtype)
    kernel = Combine(of, True, False, False, True, False, MX)
    wire = kernel.in_format
    assert wire is not None and wire.plain.slices * wire.scale_bytes + hidden == kernel.sum_bytes <= of.row_bytes
    assert kernel.sum_bytes % 16 == 0 and wire.slice_bytes % 16 == 0 and wire.codes // 32 <= wire.scale_bytes
    ring = kernel.sum_ring
    assert ring.stages >= 2 and ring.pieces == wire.plain.slices and ring.stride >= ring.piece_bytes
    assert ring.warps * ring.stages * ring.stride < SHARED_BYTES
    few = LatencyCombine(of, 64, False, format=MX)
    assert few.row_packets <= LatencyCombine(of, 64, False).row_packets


def test_throughput_kernel() -> None:
    """Pushers encode and owners decode; only the last sum is rounded to bf16; flags are those of a combine without a
    format. One block of 512 threads on a multiprocessor leaves 128 registers for each thread."""
    kernel = Combine(LARGE, True, True, False, False, False, MX)
    ptx = compiled_ptx(kernel, "sm_90a")
    slices = Slices(LARGE.row_bytes, "bf16")
    for conversion in ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2", "cvt.rn.bf16x2.f32"):
        assert ptx.count(conversion) == 4 * slices.vectors, conversion
    assert "fma.rn.f32" not in ptx and "div.rn.f32" not in ptx and ".local" not in ptx
    plain = compiled_ptx(Combine(LARGE, True, True, False), "sm_90a")
    for instruction in ("st.release.sys", "ld.acquire.sys", "cp.async.bulk.shared", "fence.proxy.async"):
        assert count(ptx, instruction) == count(plain, instruction), instruction
    made = built(kernel, "sm_90a")
    assert made.registers <= 128 and made.stack_bytes == 0, (made.registers, made.stack_bytes)


@pytest.mark.drawn
@pytest.mark.parametrize("problem", [LARGE, PAIRS, THREE], ids=["one", "two", "three"])
def test_registers_with_a_residual(problem: Problem) -> None:
    """One loop adds the rows in the format and the residual; with three domains in two parts."""
    made = built(Combine(problem, True, True, False, True, False, MX), "sm_90a")
    assert made.registers <= 128 and made.stack_bytes <= 64, (made.registers, made.stack_bytes)


@pytest.mark.parametrize(
    ("problem", "stack"), [(LARGE, 0), pytest.param(PAIRS, 144, marks=pytest.mark.drawn)], ids=["one", "two"]
)
def test_latency_kernel(problem: Problem, stack: int) -> None:
    """Two blocks fit on a multiprocessor; a packet is sent by one store, as without a format."""
    kernel = LatencyCombine(problem, 256, True, format=MX)
    ptx, made = compiled_ptx(kernel, "sm_90a"), built(kernel, "sm_90a")
    assert made.registers <= 64 and made.stack_bytes <= stack, (made.registers, made.stack_bytes)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx and "fma.rn.f32" not in ptx
    plain = compiled_ptx(LatencyCombine(problem, 256, True), "sm_90a")
    assert count(ptx, "prefetch.global.L2") > 0 == count(plain, "prefetch.global.L2")
    for instruction in ("st.volatile.global.v4.b32", "griddepcontrol.launch_dependents", "fence.acq_rel"):
        assert count(ptx, instruction) == count(plain, instruction), instruction


def test_blocks() -> None:
    """A sum in a format takes half the time on the link, so more blocks are needed, most of them to encode. A budget
    that the user sets remains a limit."""
    traffic = TokenTraffic.of(LARGE, 4)
    kernel = Combine(LARGE, True, False, False, False, False, MX)
    quantized = traffic.in_format(kernel.sum_bytes)
    assert kernel.sum_bytes == 4 * 64 + 7168 and traffic.in_format(0) is traffic
    plain, more = traffic.combine_sms(SMS), quantized.combine_sms(SMS)
    assert plain < more == SMS // 2
    tuning = Tuning("", LARGE.world_size)
    knobs = tuning.knobs("combine")
    assert quantized.pushers(110, knobs) > traffic.pushers(110, knobs)
    for budget, want in ((Budget(20, 30), 30), (default_budget(traffic, tuning, SMS, 100, None, None), 110)):
        pushing = OperationSms(LARGE, budget, traffic, tuning, SMS).pushing(quantized, 64, True)
        assert (pushing["blocks"], pushing["pushers"]) == (want, quantized.pushers(want, knobs))
