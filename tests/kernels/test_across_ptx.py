"""Throughput kernels across NVLink domains compile without a GPU, for wires of both kinds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from test_linked import LIBRARY, needs_library
from test_ptx import compiled_ptx

from cute_kernels.heap import Problem
from cute_kernels.internode import wire
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.cute.throughput import kernels_of
from ep_ops.config import consecutive_domains

DOMAINS = consecutive_domains(16, 8)
LARGE = Problem(16, (16,) * 16, 8, 7168, "bf16", 4096, DOMAINS, wire.Nvlink())


@pytest.fixture(autouse=True)
def dumps_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [(Publish(LARGE, True, True, True, False), "sm_90a"), (Combine(LARGE, True, True, False, True), "sm_100a")],
    ids=["publish", "combine"],
)
def test_over_nvlink(kernel: Any, arch: str) -> None:
    ptx = compiled_ptx(kernel, arch)
    assert f".target {arch}" in ptx and "nvshmem" not in ptx
    assert ".local" not in ptx, f"{kernel} uses local memory"


@needs_library
def test_over_nvshmem() -> None:
    assert LIBRARY is not None
    ptx = compiled_ptx(Pull(dataclasses.replace(LARGE, wire=wire.Nvshmem(LIBRARY)), True, False, True), "sm_100a")
    assert "nvshmemi_device_state_d" in ptx  # which the library is told of before the kernel is launched
    declared = set(re.findall(r"^\.extern \.func .*?(\w+)\s*$", ptx, re.M))
    assert not {name for name in declared if "nvshmem" in name}, "a call that nothing defines"


def test_which_there_are() -> None:
    """Each kernel is of the domains and their wire; token-major and gathering ones are not among them."""
    kernels = kernels_of(LARGE)
    kinds = {type(kernel).__name__ for kernel in kernels}
    assert kinds == {"Publish", "Pull", "Combine", "PullScaled"}
    assert len(kernels) == len(set(kernels)) < len(kernels_of(dataclasses.replace(LARGE, domains=(), wire=None)))
    assert not any(getattr(kernel, "token_major", False) for kernel in kernels)
    assert {kernel.problem for kernel in kernels} == {LARGE}
