"""The location of ranks: their GPUs, the NVLink domains that these form, and the resulting choice of backend.

An NVLink domain is a set of ranks whose GPUs map each other's memory. It is a host or, if an NVLink fabric joins hosts
(NVL72), all GPUs of one clique of one fabric cluster. A communicator's ``domain_size`` declares smaller domains, so
that one host can act as several.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .exchange import Exchange

NEEDED_CAPABILITY = 9
"""Major version of the oldest supported compute capability."""
NEEDED_SHARED_BYTES = 227 * 1024
"""Shared memory of a block, in bytes, that kernels need."""

Domains = tuple[tuple[int, ...], ...]
"""The ranks of each NVLink domain, in ascending order. Domains have equal sizes and are ordered by their lowest ranks.
"""


class Fabric(NamedTuple):
    """A clique of an NVLink fabric, in which GPUs of several hosts map each other's memory."""

    cluster: str
    clique: int


class GpuFacts(NamedTuple):
    """Facts about the GPU of a rank that other ranks need."""

    host: str
    gpu: str  # UUID
    fabric: Fabric | None  # None: memory can be mapped on this host alone
    lack: str | None  # why kernels cannot run there; None: they can
    no_nvlink: frozenset[str] | None = frozenset()  # UUIDs of this host's GPUs without NVLink to it; None: unknown

    @property
    def domain(self) -> Fabric | str:
        """Return a value that is equal on ranks of one NVLink domain."""
        return self.fabric or self.host


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """Return the facts of a GPU, or None for any other device."""
    if device.type != "cuda":
        return None
    lack = lack_of_kernels(device)
    if lack is None and (closed := unreachable(device)):
        lack = f"GPU {device.index} cannot map the memory of GPUs {closed}"
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
    fabric = fabric_of(uuid, device.index or 0)
    return GpuFacts(_host(), uuid, fabric if isinstance(fabric, Fabric) else None, lack, no_nvlink(uuid))


def lack_of_kernels(device: torch.device) -> str | None:
    """Return what a GPU or its environment lacks to run kernels that reach no peer, or None."""
    lack = gpu_problem(device)
    if lack is None and importlib.util.find_spec("cutlass") is None:
        lack = "nvidia-cutlass-dsl is not installed: pip install 'ep_ops[cu12]' or 'ep_ops[cu13]'"
    return lack


def gpu_problem(device: torch.device) -> str | None:
    """Return what a GPU lacks for the kernels of backend "cute", or None."""
    gpu = torch.cuda.get_device_properties(device)
    name = f"GPU {device.index} ({gpu.name}, capability {gpu.major}.{gpu.minor})"
    if gpu.major < NEEDED_CAPABILITY:
        return f"{name} is too old; backend 'cute' needs capability {NEEDED_CAPABILITY}.0 or newer"
    # Some newer GPUs have less: sm_120 and sm_121 have 99 KiB.
    shared: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < NEEDED_SHARED_BYTES:
        return f"{name} has {shared} bytes of shared memory a block; backend 'cute' needs {NEEDED_SHARED_BYTES}"
    return None


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the current context: fewer than the GPU has in a green context or under
    MPS, 0 if there is no GPU that runs the kernels."""
    if device.type != "cuda" or gpu_problem(device) is not None:
        return 0
    total: int = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        from cuda.bindings import driver

        with torch.cuda.device(device):
            torch.cuda.synchronize()  # creates the context
            _, context = driver.cuCtxGetCurrent()
            error, resource = driver.cuCtxGetDevResource(context, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    except (ImportError, AttributeError):  # driver or bindings without green contexts
        return total
    return min(total, int(resource.sm.smCount)) if int(error) == 0 else total


def unreachable(device: torch.device) -> list[int]:
    """Return the visible GPUs of this host whose memory a GPU cannot map."""
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    return [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]


def choose_backend(facts: Sequence[GpuFacts | None]) -> tuple[str, str]:
    """Return the backend that "auto" selects, and why it is not "cute", which needs a GPU for each rank that can run
    the kernels. Several NVLink domains have further requirements (creation.py)."""
    for rank, fact in enumerate(facts):
        if fact is None:
            return "reference", f"rank {rank} has no GPU"
        if fact.lack is not None:
            return "reference", f"rank {rank}: {fact.lack}"
    known = [fact for fact in facts if fact is not None]
    first: dict[tuple[str, str], int] = {}
    for rank, fact in enumerate(known):
        if (other := first.setdefault((fact.host, fact.gpu), rank)) != rank:
            return "reference", f"ranks {other} and {rank} share a GPU"
    return "cute", ""


def choose_wire(facts: Sequence[GpuFacts | None], asked: str) -> tuple[str, str | None]:
    """Return the wire between NVLink domains, and why the requested wire cannot be used. The wire is "nvlink" if the
    domains are declared ones and all ranks map each other's memory, otherwise "nvshmem"."""
    found = {None if fact is None else fact.domain for fact in facts}
    if asked == "nvlink" and len(found) > 1:
        return "nvshmem", "EP_OPS_WIRE is nvlink, but not all ranks map each other's memory; allowed: auto, nvshmem"
    return ("nvlink" if len(found) == 1 else "nvshmem") if asked == "auto" else asked, None


def pair_without_nvlink(facts: Sequence[GpuFacts | None]) -> tuple[int, int] | None:
    """Return the first two ranks whose GPUs map each other's memory without NVLink (over PCIe), or None. Ranks that
    share a GPU, and ranks of several hosts on one fabric, need no NVLink of this host."""
    for second, fact in enumerate(facts):
        for first, other in enumerate(facts[:second]):
            if fact is None or other is None or fact.host != other.host:
                continue
            if _plain(other.gpu) in (fact.no_nvlink or ()) or _plain(fact.gpu) in (other.no_nvlink or ()):
                return first, second
    return None


# ---------------------------------------------------------------------- domains


def divide(facts: Sequence[GpuFacts | None], domain_size: int | None) -> Domains:
    """Return the NVLink domains of ranks with these facts: those that were detected, or, with ``domain_size``, declared
    domains of consecutive ranks of a detected one. Ranks without GPUs form one domain. Raises ValueError unless all
    domains have the same number of ranks."""
    ranks: dict[Fabric | str | None, list[int]] = {}
    for rank, fact in enumerate(facts):
        ranks.setdefault(None if fact is None else fact.domain, []).append(rank)
    found = tuple(map(tuple, ranks.values()))  # by their lowest ranks
    sizes = [len(members) for members in found]
    if domain_size is None:
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{describe(facts, found)}; all domains must have the same number of ranks; "
                f"domain_size={math.gcd(*sizes)} divides them into equal ones"
            )
        return found
    if any(size % domain_size for size in sizes):
        raise ValueError(
            f"domain_size is {domain_size}; {describe(facts, found)}, and it must divide the number of ranks of each"
        )
    return tuple(
        sorted(members[at : at + domain_size] for members in found for at in range(0, len(members), domain_size))
    )


def rails_of(domains: Domains) -> Domains:
    """Return the ranks of each rail, by domain."""
    return tuple(zip(*domains, strict=True))


def describe(facts: Sequence[GpuFacts | None], domains: Domains) -> str:
    """Describe which ranks are in which NVLink domain."""

    def place(rank: int) -> str:
        fact = facts[rank]
        return "" if fact is None else f" ({domain_name(fact.domain)})"

    each = "; ".join(f"{_spans(members)}{place(members[0])}" for members in domains)
    return f"ranks are in {len(domains)} NVLink domains: {each}" if len(domains) > 1 else f"one NVLink domain: {each}"


def domain_name(domain: Fabric | str) -> str:
    if isinstance(domain, Fabric):
        return f"fabric cluster {domain.cluster}, clique {domain.clique}"
    return f"host {domain}"


def _spans(ranks: Sequence[int]) -> str:
    """Return `0..3, 6` for [0, 1, 2, 3, 6]."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in spans)


def others_of_host(exchange: Exchange, value: Any) -> list[Any]:
    """Return the values, which can be pickled, of the other ranks that run on this rank's host. Collective."""
    host = _host()
    values = exchange.all_gather_object((host, value))
    return [other for rank, (place, other) in enumerate(values) if place == host and rank != exchange.rank]


def _host() -> str:
    """Return an id that differs between running machines and is equal in all containers of one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


# ---------------------------------------------------------------------- fabric


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of NVML."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


NVML_GPU_FABRIC_STATE_COMPLETED = 3


def fabric_of(uuid: str, device: int) -> Fabric | str:
    """Return the fabric clique of a GPU (its UUID and local index), or why it only maps memory of its own host."""
    try:
        with _nvml() as nvml:
            handle, info = _handle(nvml, uuid), _FabricInfo()
            unknown = handle is None or nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except (OSError, AttributeError) as error:
        return f"NVML cannot tell ({error})"
    if unknown or info.state != NVML_GPU_FABRIC_STATE_COMPLETED or info.status != 0:
        return "it is registered with no NVLink fabric"
    if not any(info.cluster):
        return "its NVLink fabric is this host's own"
    if (why := _no_fabric_handles(device)) is not None:
        return f"its memory cannot be exported to other hosts: {why}"
    return Fabric(bytes(info.cluster).hex(), int(info.clique))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if code := nvml.nvmlInit_v2():
        raise OSError(f"nvmlInit_v2 returned {code}")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return None if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) else handle


def _no_fabric_handles(device: int) -> str | None:
    """Return why memory cannot be exported with a fabric handle, as torch's symmetric memory does, or None."""
    try:
        return _export(device)
    except (ImportError, RuntimeError) as error:  # no bindings, or no driver
        return str(error)


def _export(device: int) -> str | None:
    from cuda.bindings import driver

    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.requestedHandleTypes = kind
    granularity = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    code, size = driver.cuMemGetAllocationGranularity(prop, granularity)
    if code == driver.CUresult.CUDA_SUCCESS:
        code, handle = driver.cuMemCreate(size, prop, 0)
    if code == driver.CUresult.CUDA_SUCCESS:
        code, _ = driver.cuMemExportToShareableHandle(handle, kind, 0)
        driver.cuMemRelease(handle)
    return None if code == driver.CUresult.CUDA_SUCCESS else f"{code.name} (is there an IMEX channel?)"


# ---------------------------------------------------------------------- NVLink

NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


def no_nvlink(uuid: str) -> frozenset[str] | None:
    """Return the UUIDs, without `GPU-`, of the GPUs of this host that a GPU does not reach over NVLink or NVSwitch.
    Includes GPUs that this process does not see. None if NVML cannot tell."""
    try:
        with _nvml() as nvml:
            return _no_nvlink(nvml, uuid)
    except (OSError, AttributeError):
        return None


def _no_nvlink(nvml: Any, uuid: str) -> frozenset[str] | None:
    own, count = _handle(nvml, uuid), ctypes.c_uint()
    if own is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    missing = set()
    for index in range(count.value):
        other, name, status = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(other)):
            continue  # a GPU that this process may not use
        if nvml.nvmlDeviceGetUUID(other, name, _UUID_BYTES):
            return None
        found = _plain(name.value.decode())
        if found == _plain(uuid):
            continue
        if nvml.nvmlDeviceGetP2PStatus(own, other, NVML_P2P_CAPS_INDEX_NVLINK, ctypes.byref(status)):
            return None
        if status.value != NVML_P2P_STATUS_OK:
            missing.add(found)
    return frozenset(missing)


def _plain(uuid: str) -> str:
    """Return a UUID as some releases of torch write it."""
    return uuid.removeprefix("GPU-")
