"""The wires compile without a GPU, to NVSHMEM's calls or to none of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from batches import Batches, BatchHeap
from test_ptx import ARCHS, assert_no_spills, compiled_ptx, count, needs_assembler

from cute_kernels.heap import Problem
from cute_kernels.internode import wire
from cute_kernels.internode.combine import Combine
from cute_kernels.internode.courier import Courier

PROBLEM = Problem(4, (2,) * 4, 2, 64, "bf16", 10)
LIBRARY = wire.find_library()
needs_library = pytest.mark.skipif(
    LIBRARY is None, reason="needs NVSHMEM's device library: nvidia-nvshmem-cu12 or cu13"
)


@pytest.fixture(autouse=True)
def dumps_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def kernels() -> dict[str, Any]:
    heap = BatchHeap(PROBLEM)
    return {
        "nvlink": Batches(PROBLEM, wire.Nvlink()),
        "adversary": Batches(PROBLEM, wire.Adversary(heap.depth)),
        "courier": Courier(PROBLEM, heap, heap.depth),
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", kernels())
def test_without_nvshmem(name: str, arch: str) -> None:
    ptx = compiled_ptx(kernels()[name], arch)
    assert "nvshmem" not in ptx
    # What an adversary is told, and its courier tells it, stays on the GPU.
    assert (count(ptx, "st.release.gpu.global.b64") > 0) == (name != "nvlink")


@needs_library
@pytest.mark.parametrize("arch", ARCHS[:1])
def test_nvshmem(arch: str) -> None:
    ptx = compiled_ptx(Batches(PROBLEM, wire.Nvshmem(LIBRARY)), arch)
    assert "nvshmemi_device_state_d" in ptx  # which the library is told of before the kernel is launched
    declared = set(re.findall(r"^\.extern \.func .*?(\w+)\s*$", ptx, re.M))
    assert not {name for name in declared if "nvshmem" in name}, "a call that nothing defines"
    assert count(ptx, "st.release.gpu.global.b64") == 0


@needs_library
@needs_assembler
@pytest.mark.parametrize("arch", ARCHS[:1])
def test_nvshmem_assembles(arch: str, tmp_path: Path) -> None:
    assert_no_spills(compiled_ptx(Batches(PROBLEM, wire.Nvshmem(LIBRARY)), arch), arch, tmp_path)


@pytest.mark.parametrize(("ranks", "arch"), [(16, "sm_90a"), (16, "sm_100a"), (576, "sm_90a")])
def test_combine(ranks: int, arch: str) -> None:
    """8 domains of 72 ranks are as one."""
    problem = Problem(ranks, (2,) * ranks, 8, 7168, "bf16", 128)
    ptx = compiled_ptx(Combine(problem, wire.Nvlink(), 128, True, True), arch)
    # 16 bytes of numbers are rounded on the expert's rank, between domains, and at the end; loops are unrolled.
    assert count(ptx, "cvt.rn.bf16x2.f32") % (3 * 4) == 0 < count(ptx, "cvt.rn.bf16x2.f32")
    assert count(ptx, "fma.rn.f32") == 0, "products and sums are rounded one by one"


@needs_library
@needs_assembler
def test_combine_over_nvshmem(tmp_path: Path) -> None:
    """For Blackwell a kernel of tests/kernels/test_across_ptx.py is linked with it."""
    problem = Problem(16, (16,) * 16, 8, 7168, "bf16", 128)
    ptx = compiled_ptx(Combine(problem, wire.Nvshmem(LIBRARY), 128, True, True), "sm_90a")
    assert_no_spills(ptx, "sm_90a", tmp_path)


@pytest.mark.parametrize(("version", "taken"), [("3.7.2", True), ("3.10.0", True), ("3.4.5", False), (None, True)])
def test_library_is_found(version: str | None, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first folder that has one, of whatever version if that is not told."""
    folder = tmp_path / "nvidia" / "nvshmem" / "lib"
    folder.mkdir(parents=True)
    library = folder / "libnvshmem_device_sm_90.bc"
    monkeypatch.setattr("sys.path", [str(tmp_path / "nothing"), str(tmp_path)])
    assert wire.find_library() is None
    library.touch()
    if version is not None:
        (tmp_path / f"nvidia_nvshmem_cu13-{version}.dist-info").mkdir()
    assert wire.find_library() == (str(library) if taken else None)


def test_words() -> None:
    """How many rows a batch has, and whether it is the last, fit beside the epoch."""
    assert wire.LAST | wire.MOST_ROWS == (1 << wire.SHIFT) - 1
    assert wire.LAST & wire.MOST_ROWS == 0
