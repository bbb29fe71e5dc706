"""The wires compile without a GPU, to NVSHMEM's calls or to none of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from batches import Batches, depth_of, problem_of
from built import ARCHS, compiled_ptx, count
from courier import Adversary, Courier, Gate

from cute_kernels.heap import Problem
from cute_kernels.internode import wire

LIBRARY = wire.find_library()
needs_library = pytest.mark.skipif(
    LIBRARY is None, reason="needs NVSHMEM's device library: nvidia-nvshmem-cu12 or cu13"
)


def problem(made: wire.Wire) -> Problem:
    return problem_of(4, 64, "bf16", 10, made)


def kernels() -> dict[str, Any]:
    adversary = problem(Adversary(depth_of(4)))
    return {
        "nvlink": Batches(problem(wire.Nvlink())),
        "adversary": Batches(adversary),
        "courier": Courier(adversary, depth_of(4)),
        "gate": Gate(adversary),
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", kernels())
def test_without_nvshmem(name: str, arch: str) -> None:
    ptx = compiled_ptx(kernels()[name], arch)
    assert "nvshmem" not in ptx
    # What an adversary is told, and its courier tells it, stays on the GPU.
    assert (count(ptx, "st.release.gpu.global.b64") > 0) == (name in ("adversary", "courier"))


@needs_library
@pytest.mark.parametrize("arch", ARCHS[:1])
def test_nvshmem(arch: str) -> None:
    ptx = compiled_ptx(Batches(problem(wire.Nvshmem(LIBRARY))), arch)
    assert "nvshmemi_device_state_d" in ptx  # which the library is told of before the kernel is launched
    declared = set(re.findall(r"^\.extern \.func .*?(\w+)\s*$", ptx, re.M))
    assert not {name for name in declared if "nvshmem" in name}, "a call that nothing defines"
    assert count(ptx, "st.release.gpu.global.b64") == 0


@pytest.mark.parametrize(("version", "taken"), [("3.7.2", True), ("3.10.0", True), ("3.4.5", False), (None, True)])
def test_library_is_found(version: str | None, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is found in the first folder that has one, of whatever version if none is requested."""
    folder = tmp_path / "nvidia" / "nvshmem" / "lib"
    folder.mkdir(parents=True)
    library = folder / "libnvshmem_device_sm_90.bc"
    monkeypatch.setattr("sys.path", [str(tmp_path / "nothing"), str(tmp_path)])
    assert wire.find_library() is None
    library.touch()
    if version is not None:
        (tmp_path / f"nvidia_nvshmem_cu13-{version}.dist-info").mkdir()
    assert wire.find_library() == (str(library) if taken else None)
