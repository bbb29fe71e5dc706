"""Symmetric memory of NVSHMEM, which ranks of other NVLink domains access through NVSHMEM's calls.

A process initializes NVSHMEM once, over the first group that allocates memory, and never finalizes it: finalizing is
collective and would wait for dead ranks. Allocating and freeing are collective over that group as well. Other groups
are therefore rejected, and freed memory is returned at the next allocation, once all ranks have freed it. If a peer is
dead, memory is not returned before the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..group.exchange import Exchange
from .buffer import SymmetricBuffer

NEEDED = (3, 7, 2)
"""The oldest NVSHMEM whose device library holds what the kernels call."""
UNIQUE_ID_BYTES = 128


class SymmetricHeap:
    """The state of NVSHMEM in this process."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members  # global ranks that initialized it, by their numbers in NVSHMEM
        self.numbered = 0  # allocations so far
        self.blocks: dict[int, int] = {}  # number -> address of each allocation that was not released
        self.freed: set[int] = set()  # numbers of allocations that this rank has freed


_heaps: list[SymmetricHeap] = []  # at most one


def problem() -> str | None:
    """Return what this process lacks and what to install, or None."""
    if importlib.util.find_spec("nvshmem") is None:
        return f"nvshmem4py is not installed: pip install 'ep_ops[nvshmem-{_cuda()}]'"
    try:
        version, path = loaded()
    except (ImportError, OSError, RuntimeError) as error:
        return f"NVSHMEM cannot be loaded ({error}): {install()}"
    if version < NEEDED:
        return (
            f"NVSHMEM {'.'.join(map(str, version))} is loaded ({path}, possibly by torch); version"
            f" {'.'.join(map(str, NEEDED))} or newer is needed: {install()}"
        )
    return None


def install() -> str:
    """Return the command that installs NVSHMEM over the version that torch has installed."""
    return f"pip install --no-deps 'nvidia-nvshmem-{_cuda()}>={'.'.join(map(str, NEEDED))},<4'"


def _cuda() -> str:
    return f"cu{(torch.version.cuda or '13').partition('.')[0]}"


def loaded() -> tuple[tuple[int, ...], str]:
    """Return version and path of the library. It is loaded unless torch for CUDA has loaded its own."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvshmem_host").abs_path
    numbers = [ctypes.c_int() for _ in NEEDED]
    _bindings().vendor_get_version_info(*map(ctypes.addressof, numbers))
    return tuple(number.value for number in numbers), str(path)


def allocate(nbytes: int, group: Any, device: torch.device, near: Sequence[int]) -> SymmetricBuffer:
    """See :func:`ep_ops.symmetric.allocate`. The address of a rank that is not mapped is 0."""
    exchange = Exchange(group, device)
    members = tuple(dist.get_process_group_ranks(group))
    heap = _heaps[0] if _heaps else None
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        freed = _agree(exchange, nbytes, heap, members)
        if heap is None:
            _initialize(exchange)
            heap = SymmetricHeap(members)
            _heaps.append(heap)
        for number in freed:
            heap.freed.remove(number)
            _bindings().free(heap.blocks.pop(number))
        address = _bindings().malloc(nbytes)
        lacking = [rank for rank, lacks in enumerate(exchange.all_gather_object(address == 0)) if lacks]
        if lacking:  # other ranks keep their memory, because releasing it is collective
            raise RuntimeError(
                f"NVSHMEM has no {nbytes} bytes of symmetric memory left on ranks {lacking};"
                " NVSHMEM_MAX_MEMORY_PER_GPU and NVSHMEM_SYMMETRIC_SIZE set the size of its heap"
            )
        number = heap.numbered
        heap.numbered += 1
        heap.blocks[number] = address
        memory = _view(address, nbytes, device)
        memory.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        addresses = tuple(_bindings().ptr(address, pe) for pe in range(exchange.world_size))
    # This exchange is also the barrier between zeroing and the first write of a peer.
    unmapped = any(addresses[rank] == 0 for rank in near)
    ranks = [rank for rank, lacks in enumerate(exchange.all_gather_object(unmapped)) if lacks]
    if ranks:
        raise RuntimeError(
            f"NVSHMEM does not map the memory of all ranks of their NVLink domains on ranks {ranks};"
            " NVSHMEM_DISABLE_P2P and NVSHMEM_DISABLE_MNNVL must not be set there"
        )

    return SymmetricBuffer(memory, addresses, functools.partial(heap.freed.add, number))


def register(library: int) -> None:
    """Register a loaded CUDA library (its handle), whose kernels call NVSHMEM, before they are launched."""
    if status := _bindings().culibrary_init(library):
        raise RuntimeError(f"nvshmemx_culibrary_init returned {status}")


def _agree(exchange: Exchange, nbytes: int, heap: SymmetricHeap | None, members: tuple[int, ...]) -> list[int]:
    """Return the allocations that all ranks have freed. Every rank raises if one cannot go on. Collective."""
    known = None if heap is None else heap.members
    words = exchange.all_gather_object((nbytes, problem(), known, sorted(heap.freed) if heap else []))
    problems = [f"rank {rank}: {problem}" for rank, (_, problem, _, _) in enumerate(words) if problem]
    if problems:
        raise RuntimeError("; ".join(problems))
    for rank, (_, _, others, _) in enumerate(words):
        if others not in (None, members) or (others is None) != (known is None):
            initialized = next(found for _, _, found, _ in words if found is not None)
            raise ValueError(
                f"rank {rank} cannot use NVSHMEM for group {list(members)} (global ranks): a process has one NVSHMEM,"
                f" which was initialized for group {list(initialized)}. All communicators that span several NVLink"
                " domains must use the same group"
            )
    sizes = [size for size, _, _, _ in words]
    if len(set(sizes)) > 1:
        raise ValueError(f"ranks ask for different sizes of symmetric memory: {sizes} bytes by rank")
    return sorted(set.intersection(*(set(freed) for _, _, _, freed in words)))


def _initialize(exchange: Exchange) -> None:
    """Initialize NVSHMEM with rank 0's unique id. Collective."""
    bindings = _bindings()
    unique = bindings.uniqueid()
    if exchange.rank == 0:
        bindings.get_uniqueid(unique.ptr)
    own = torch.tensor(list(ctypes.string_at(unique.ptr, UNIQUE_ID_BYTES)), dtype=torch.uint8, device="cpu")
    received = bytes(exchange.all_gather(own)[0].tolist())
    ctypes.memmove(unique.ptr, received, UNIQUE_ID_BYTES)
    attributes = bindings.InitAttr()
    bindings.set_attr_uniqueid_args(exchange.rank, exchange.world_size, unique.ptr, attributes.ptr)
    bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)


def _bindings() -> Any:
    import nvshmem.bindings

    return nvshmem.bindings


def _view(address: int, nbytes: int, device: torch.device) -> Tensor:
    """Return a tensor of memory that torch does not own."""

    class Memory:
        __cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    return torch.as_tensor(Memory(), device=device)
