"""Kernels across NVLink domains compile without a GPU, for wires of both kinds."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import assert_in_registers, built, compiled_ptx, count
from test_linked import LIBRARY, needs_library

from cute_kernels.heap import Problem
from cute_kernels.internode import wire
from cute_kernels.latency import combine as latency_combine
from cute_kernels.latency import dispatch as latency_dispatch
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.cute.ahead import throughput_kernels
from ep_ops.config import consecutive_domains
from ep_ops.group.topology import NEEDED_SHARED_BYTES

DOMAINS = consecutive_domains(16, 8)
LARGE = Problem(16, (16,) * 16, 8, 7168, "bf16", 4096, DOMAINS, wire.Nvlink())
LARGEST = dataclasses.replace(
    LARGE, world_size=512, experts_per_rank=(2,) * 88 + (1,) * 424, domains=consecutive_domains(512, 8)
)
"""One expert more on some ranks."""
ALONE = Problem(2, (128, 128), 8, 7168, "bf16", 4096, consecutive_domains(2, 1), wire.Nvlink())
FEW = Problem(4, (64,) * 4, 8, 7168, "bf16", 4096, consecutive_domains(4, 2), wire.Nvlink())

BUNDLED = dataclasses.replace(FEW, wire=wire.Nvlink(rows=wire.BUNDLE))


OVER_NVLINK = {
    "publish": (PublishTokens(LARGEST, True, True, True, False), "sm_90a"),
    "combine": (Combine(LARGE, True, True, False, True), "sm_100a"),
    "alone": (Combine(ALONE, True, True, False), "sm_90a"),
    "scalars": (Combine(LARGEST, True, False, True, False, True), "sm_90a"),
    "pull": (Pull(LARGE, True, False, True), "sm_90a"),
}


@pytest.mark.parametrize("name", OVER_NVLINK)
def test_over_nvlink(name: str) -> None:
    kernel, arch = OVER_NVLINK[name]
    made = built(kernel, arch)
    ptx = made.ptx
    assert f".target {arch}" in ptx and "nvshmem" not in ptx
    assert_in_registers(kernel, arch)
    assert made.shared_bytes <= NEEDED_SHARED_BYTES
    assert_blocks_agree(ptx)
    if name == "publish":
        assert_relays_behind_a_fence(ptx)

    if name == "combine":
        assert_hands_requests_on(ptx)


def assert_blocks_agree(ptx: str) -> None:
    """Before its first branch on it, a block agrees whether its rank goes on, which decides who comes to barriers."""
    first = ptx[ptx.index("ld.relaxed.gpu.global.v2.b64") :]
    assert re.match(r"[^@]*barrier\.cta\.red\.popc\.aligned", first)


def assert_hands_requests_on(ptx: str) -> None:
    """The lanes of a warp read an owner's request behind a barrier of the warp. One of them has acquired the request's
    word, and the shuffle that says whether it came orders no loads."""
    words = r"ld\.acquire\.sys|shfl\.sync\.idx\.b32 \s*%r\d+, %r\d+, 0,|bar\.warp\.sync|ld\.global\.b32"
    found = re.findall(words, ptx)
    shuffle = next(i for i, word in enumerate(found) if word.startswith("shfl") and found[i - 1].startswith("ld.acq"))
    assert found[shuffle + 1 : shuffle + 3] == ["bar.warp.sync", "ld.global.b32"]


def assert_relays_behind_a_fence(ptx: str) -> None:
    """A word that the relaying block has acquired is passed on behind a fence, which orders what came with the word."""
    passed_on = 0
    for store in re.finditer(r"st\.relaxed\.sys\.global\.b64 \[%rd\d+\], (%rd\d+);", ptx):
        load = ptx.rfind(f"ld.acquire.sys.global.b64 {store[1]},", 0, store.start())
        if load >= 0:
            passed_on += 1
            assert "fence.acq_rel.sys" in ptx[load : store.start()]
    assert passed_on > 0


@needs_library
@pytest.mark.parametrize(
    ("kind", "problem", "variant", "arch"),
    [
        pytest.param(Pull, LARGE, (True, False, True), "sm_100a", id="pull"),
        pytest.param(latency_combine.LatencyCombine, FEW, (128, True), "sm_90a", id="few", marks=pytest.mark.drawn),
    ],
)
def test_over_nvshmem(kind: Any, problem: Problem, variant: Any, arch: str) -> None:
    ptx = compiled_ptx(kind(dataclasses.replace(problem, wire=wire.Nvshmem(str(LIBRARY))), *variant), arch)
    assert "nvshmemi_device_state_d" in ptx  # which the library is told of before the kernel is launched
    declared = set(re.findall(r"^\.extern \.func .*?(\w+)\s*$", ptx, re.M))
    assert not {name for name in declared if "nvshmem" in name}, "a call that nothing defines"


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        (latency_dispatch.LatencyDispatch(FEW, 128, True), "sm_90a"),
        (latency_combine.LatencyCombine(FEW, 128, True), "sm_100a"),
        (latency_dispatch.LatencyDispatch(BUNDLED, 128, True), "sm_100a"),
        pytest.param(latency_combine.LatencyCombine(BUNDLED, 128, True), "sm_90a", marks=pytest.mark.drawn),
    ],
    ids=["dispatch", "combine", "dispatch bundled", "combine bundled"],
)  # fmt: skip
def test_few_tokens(kernel: Any, arch: str) -> None:
    """Lines are stored at peers of the domain and in the send area. Two blocks fit on a multiprocessor."""
    ptx = compiled_ptx(kernel, arch)
    routes = 2 * isinstance(kernel, latency_dispatch.LatencyDispatch)
    assert count(ptx, "st.volatile.global.v4.b32") >= 2 + routes
    assert "fma.rn.f32" not in ptx, "products and sums are rounded one by one"
    assert_blocks_agree(ptx)
    made = built(kernel, arch)
    assert made.registers <= 64 and made.stack_bytes <= 128, (made.registers, made.stack_bytes)


def test_which_there_are() -> None:
    """Each kernel is of the domains and their wire; those that gather are not among them."""
    kernels = throughput_kernels(LARGE)
    kinds = {type(kernel).__name__ for kernel in kernels}
    assert kinds == {"PublishAcross", "PublishTokensAcross", "Pull", "CombineAcross", "PullScaled"}
    near = throughput_kernels(dataclasses.replace(LARGE, domains=(), wire=None))
    assert len(kernels) == len(set(kernels)) < len(near)
    assert {kernel.problem for kernel in kernels} == {LARGE}
