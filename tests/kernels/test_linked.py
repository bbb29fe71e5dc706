"""Kernels that are linked with NVSHMEM are compiled without a GPU, kept on disk, loaded and called as any other."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels import jit, linked
from cute_kernels.alarm import RaiseAlarm
from cute_kernels.heap import Problem
from cute_kernels.internode import wire

LIBRARY = wire.find_library()
needs_library = pytest.mark.skipif(
    LIBRARY is None, reason="needs NVSHMEM's device library: nvidia-nvshmem-cu12 or cu13"
)
ARCH = "sm_90a"


def problem(library: str) -> Problem:
    return Problem(4, (2,) * 4, 2, 64, "bf16", 10, domains=((0, 1), (2, 3)), wire=wire.Nvshmem(library))


@needs_library
def test_kept_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linked kernels are kept and loaded up to the CUDA library, which needs a driver: the machine code is in the
    file."""
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path))
    kernel = RaiseAlarm(problem(str(LIBRARY)))
    jit.prepare(kernel, ARCH)
    (path,) = tmp_path.glob("*.o")
    assert path.stem == jit.object_name(kernel, ARCH)
    assert b"nvshmemi_device_state_d" in path.read_bytes() and b"ep_alarm" in path.read_bytes()
    monkeypatch.setattr(jit, "compile_kernel", lambda *args, **more: pytest.fail("compiled once more"))
    with pytest.raises(ValueError, match="RaiseAlarm is linked with .*, which needs its handle"):
        jit.get(kernel, ARCH, lambda: False)
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jit, "LinkedFunction", lambda *given: made.append(given) or made)
    assert jit.get(kernel, ARCH, lambda: False, print) is made
    ((function, count, register),) = made
    assert count == len(kernel.signature()) == len(function.execution_args.signature.parameters)
    assert register is print and hasattr(type(function), "library") and function.capi_func.restype is ctypes.c_int32


def test_the_librarys_bytes_have_a_part_in_the_name(tmp_path: Path) -> None:
    names = set()
    for content in (b"3.7.2", b"3.8.0"):
        path = tmp_path / "library.bc"
        path.write_bytes(content)
        linked.digest_of.cache_clear()
        names.add(jit.object_name(RaiseAlarm(problem(str(path))), ARCH))
    linked.digest_of.cache_clear()
    assert len(names) == 2
    assert RaiseAlarm(Problem(4, (2,) * 4, 2, 64, "bf16", 10)).linked == ""


def test_calls() -> None:
    """Values by their addresses, then the place of the result, which is looked at; the library is told of before."""
    told: list[int] = []
    seen: list[list[int]] = []

    def launch(places: Any) -> int:
        seen.append([ctypes.c_int64.from_address(place).value for place in places[:3]])
        ctypes.c_int32.from_address(places[3]).value = 98 if seen[-1][0] == 7 else 0
        return 0

    function = linked.LinkedFunction(SimpleNamespace(library=4321, capi_func=launch), 3, told.append)
    assert told == [4321]
    function(2**62 + 5, -1, 0)
    function(1, 2, 3)
    assert seen == [[2**62 + 5, -1, 0], [1, 2, 3]]
    with pytest.raises(RuntimeError, match="a kernel could not be launched: cudaErrorInvalidDeviceFunction"):
        function(7, 0, 0)
    function(8, 0, 0)
    with pytest.raises(ValueError):
        function(1, 2)
