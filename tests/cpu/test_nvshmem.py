"""Symmetric memory from NVSHMEM: what ranks agree on before they call it, on a library that only pretends."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ep_ops import symmetric
from ep_ops.symmetric import nvshmem

CPU = torch.device("cpu")


class Words(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * 128),)

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)


class Bindings(types.ModuleType):
    """A stand-in for the functions of nvshmem.bindings that are called, in the memory of one process; records every
    call."""

    Flags = types.SimpleNamespace(INIT_WITH_UNIQUEID=8)
    uniqueid = InitAttr = Words

    def __init__(self, version: tuple[int, int, int], room: int) -> None:
        super().__init__("nvshmem.bindings")
        self.version, self.room = version, room
        self.blocks: dict[int, Any] = {}
        self.calls: list[Any] = []

    def vendor_get_version_info(self, *places: int) -> None:
        for place, number in zip(places, self.version, strict=True):
            ctypes.c_int.from_address(place).value = number

    def get_uniqueid(self, place: int) -> None:
        ctypes.memset(place, 77, 128)

    def set_attr_uniqueid_args(self, rank: int, ranks: int, unique: int, attributes: int) -> None:
        self.calls.append(("init", rank, ranks, ctypes.string_at(unique, 128) == b"M" * 128))

    def hostlib_init_attr(self, flags: int, attributes: int) -> None:
        assert flags == 8

    def malloc(self, nbytes: int) -> int:
        if nbytes > self.room:
            return 0
        block = ctypes.create_string_buffer(b"x" * nbytes)
        self.blocks[ctypes.addressof(block)] = block
        self.calls.append(("malloc", nbytes))
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        self.calls.append(("free", len(self.blocks.pop(address)) - 1))

    def ptr(self, address: int, pe: int) -> int:
        return address if pe == dist.get_rank() else 0


def pretend(version: tuple[int, int, int] = (3, 7, 2), room: int = 1000) -> Bindings:
    """In this process, until the end of the call."""
    bindings = Bindings(version, room)
    package = types.ModuleType("nvshmem")
    package.bindings = bindings  # type: ignore[attr-defined]
    package.__spec__ = importlib.util.spec_from_loader("nvshmem", None)
    pathfinder = types.ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = lambda name: types.SimpleNamespace(abs_path=f"/lib/{name}")  # type: ignore
    sys.modules.update({"nvshmem": package, "nvshmem.bindings": bindings, "cuda.pathfinder": pathfinder})
    nvshmem._view = lambda address, nbytes, device: torch.frombuffer(
        (ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8
    )
    nvshmem._heaps.clear()
    return bindings


def said(nbytes: int, group: Any = None, near: tuple[int, ...] = ()) -> str:
    """Return what an allocation raises."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        symmetric.allocate(nbytes, group or dist.group.WORLD, CPU, True, near)
    return f"{raised.type.__name__}: {raised.value}"


def given_back() -> list[Any]:
    bindings, rank = pretend(), dist.get_rank()
    both, first, last = (symmetric.allocate(size, dist.group.WORLD, CPU, over_domains=True) for size in (16, 32, 48))
    for buffer, size in ((both, 16), (first, 32), (last, 48)):
        assert buffer.local.tolist() == [0] * size
        assert [bool(address) for address in buffer.addresses] == [other == rank for other in range(2)]
        assert buffer.addresses[rank] == buffer.local.data_ptr()
    with pytest.raises(RuntimeError, match=f"memory of rank {1 - rank} is not mapped"):
        both.read(1 - rank, 0, 8)
    (last.free(), both.free()) if rank == 0 else (both.free(), last.free())
    both.free()
    if rank == 0:
        first.free()
    symmetric.allocate(64, dist.group.WORLD, CPU, over_domains=True)
    if rank == 1:
        first.free()
    symmetric.allocate(80, dist.group.WORLD, CPU, over_domains=True)
    return bindings.calls


def test_what_all_have_freed_is_given_back() -> None:
    """Memory that all ranks have freed is returned in the same order on all ranks, by those that allocate."""
    for rank, calls in enumerate(run_ranks(2, given_back)):
        assert calls == [
            ("init", rank, 2, True), ("malloc", 16), ("malloc", 32), ("malloc", 48), ("free", 16), ("free", 48),
            ("malloc", 64), ("free", 32), ("malloc", 80),
        ]  # fmt: skip


def rejected() -> list[str]:
    rank = dist.get_rank()
    pretend(version=(3, 4, 5) if rank == 1 else (3, 8, 0))
    texts = [said(16)]
    pretend(room=100 if rank == 0 else 1000)
    texts.append(said(16 + rank))
    texts.append(said(200))
    texts.append(said(16, near=(rank, 2) if rank == 1 else (rank,)))
    kept = symmetric.allocate(16, dist.group.WORLD, CPU, over_domains=True)
    pair = dist.new_group([0, 1])
    if rank < 2:
        texts.append(said(16, pair))
    if rank == 1:
        nvshmem._heaps.clear()
    texts.append(said(16))
    assert kept.local.numel() == 16
    return texts


def test_rejected_on_every_rank() -> None:
    for rank, texts in enumerate(run_ranks(3, rejected)):
        old, sizes, room, unmapped, *group, fresh = texts
        assert unmapped.startswith(
            "RuntimeError: NVSHMEM does not map the memory of all ranks of their NVLink domains on"
        )
        assert "on ranks [1]; NVSHMEM_DISABLE_P2P" in unmapped
        assert old.startswith("RuntimeError: rank 1: NVSHMEM 3.4.5 is loaded (/lib/nvshmem_host, possibly by torch)")
        assert "version 3.7.2 or newer is needed: pip install --no-deps 'nvidia-nvshmem-cu13>=3.7.2,<4'" in old
        assert sizes == "ValueError: ranks ask for different sizes of symmetric memory: [16, 17, 18] bytes by rank"
        assert room.startswith("RuntimeError: NVSHMEM has no 200 bytes of symmetric memory left on ranks [0]")
        assert len(group) == (rank < 2)
        for text in group:
            assert text.startswith("ValueError: rank 0 cannot use NVSHMEM for group [0, 1] (global ranks)")
            assert "which was initialized for group [0, 1, 2]" in text
        assert fresh.startswith("ValueError: rank ") and "cannot use NVSHMEM for group [0, 1, 2]" in fresh


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert nvshmem.problem() == "nvshmem4py is not installed: pip install 'ep_ops[nvshmem-cu13]'"


def test_alone() -> None:
    """A single rank reaches nobody."""
    assert symmetric.allocate(16, None, CPU, over_domains=True).local.tolist() == [0] * 16


def test_the_library_itself() -> None:
    """The library is found where it is installed; it needs no GPU for that."""
    pytest.importorskip("nvshmem.bindings", reason="needs nvshmem4py")
    assert nvshmem.problem() is None
    version, path = nvshmem.loaded()
    assert version >= nvshmem.NEEDED and "nvshmem_host" in path
