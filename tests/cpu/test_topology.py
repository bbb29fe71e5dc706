"""Which ranks map each other's memory, and what is chosen for them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ep_ops import backends, creation
from ep_ops.config import Config
from ep_ops.group import topology
from ep_ops.group.exchange import Exchange
from ep_ops.group.topology import (
    Fabric,
    GpuFacts,
    choose_backend,
    choose_wire,
    describe,
    divide,
    fabric_of,
    gpu_facts,
    no_nvlink,
    pair_without_nvlink,
    rails_of,
)  # fmt: skip
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig, communicator

RACK, OTHER = Fabric("c0ffee", 1), Fabric("c0ffee", 2)


def facts(*places: tuple[str, Fabric | None]) -> list[GpuFacts]:
    return [GpuFacts(host, f"gpu {rank}", fabric, None) for rank, (host, fabric) in enumerate(places)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (facts(("a", None)), ""),
        (facts(("a", None), ("a", None)), ""),
        (facts(("a", RACK), ("a", RACK), ("b", RACK)), ""),
        (facts(("a", None), ("b", None)), ""),  # what several domains need is another question
        ([*facts(("a", None)), *facts(("a", None))], "ranks 0 and 1 share a GPU"),
        ([None, None], "rank 0 has no GPU"),
        ([*facts(("a", None)), GpuFacts("a", "gpu 1", None, "it is broken")], "rank 1: it is broken"),
    ],
)
def test_choice_of_backend(given: list[GpuFacts | None], why: str) -> None:
    assert choose_backend(given) == ("reference" if why else "cute", why)


APART = [
    (
        facts(*(("a" if rank in (0, 2, 3) else "b", None) for rank in range(6))),
        "ranks are in 2 NVLink domains: 0, 2..3 (host a); 1, 4..5 (host b)",
    ),
    (
        facts(("a", RACK), ("b", OTHER)),
        "ranks are in 2 NVLink domains: 0 (fabric cluster c0ffee, clique 1); 1 (fabric cluster c0ffee, clique 2)",
    ),
    # One process may export to other hosts and the other may not: torch would mix two kinds of handles.
    (
        facts(("a", RACK), ("a", None)),
        "ranks are in 2 NVLink domains: 0 (fabric cluster c0ffee, clique 1); 1 (host a)",
    ),
]


@pytest.mark.parametrize(("given", "where"), APART)
def test_wire_between_found_domains(given: list[GpuFacts], where: str) -> None:
    assert describe(given, divide(given, None)) == where
    for asked in ("auto", "nvshmem"):
        assert choose_wire(given, asked) == ("nvshmem", None)
    assert choose_wire(given, "nvlink")[1] == (
        "EP_OPS_WIRE is nvlink, but not all ranks map each other's memory; allowed: auto, nvshmem"
    )


@pytest.mark.parametrize("given", [facts(("a", None), ("a", None)), facts(("a", RACK), ("b", RACK))])
def test_wire_between_declared_domains(given: list[GpuFacts]) -> None:
    assert [choose_wire(given, asked) for asked in ("auto", "nvlink", "nvshmem")] == [
        ("nvlink", None), ("nvlink", None), ("nvshmem", None),
    ]  # fmt: skip


def test_no_gpu() -> None:
    assert gpu_facts(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("hosts", "size", "domains"),
    [
        ("aaaa", None, ((0, 1, 2, 3),)),
        ("aaaa", 4, ((0, 1, 2, 3),)),
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("aaaa", 1, ((0,), (1,), (2,), (3,))),
        ("abab", None, ((0, 2), (1, 3))),
        ("abab", 2, ((0, 2), (1, 3))),
        ("abba", None, ((0, 3), (1, 2))),
        ("bbaa", 1, ((0,), (1,), (2,), (3,))),
        ("abababab", 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("aab", 1, ((0,), (1,), (2,))),
        ("----", None, ((0, 1, 2, 3),)),  # without GPUs
        ("----", 2, ((0, 1), (2, 3))),
    ],
)
def test_domains(hosts: str, size: int | None, domains: topology.Domains) -> None:
    given = [
        None if host == "-" else fact for host, fact in zip(hosts, facts(*((h, None) for h in hosts)), strict=True)
    ]
    assert divide(given, size) == domains
    rails = rails_of(domains)
    assert all(rails[i][d] == rank for d, ranks in enumerate(domains) for i, rank in enumerate(ranks))
    assert len(rails) == len(domains[0])


@pytest.mark.parametrize(("domains", "size"), [(64, 8), (8, 72)])
def test_many_domains(domains: int, size: int) -> None:
    """Ranks dealt out to the domains in turn."""
    given = facts(*((f"h{rank % domains}", None) for rank in range(domains * size)))
    assert divide(given, None) == tuple(tuple(range(d, domains * size, domains)) for d in range(domains))


@pytest.mark.parametrize(
    ("hosts", "size", "said"),
    [
        (
            "aaaaba",
            None,
            "ranks are in 2 NVLink domains: 0..3, 5 (host a); 4 (host b); all domains must have the same",
        ),
        ("aaaabb", None, "domain_size=2 divides them into equal ones"),
        (
            "aabb",
            4,
            "domain_size is 4; ranks are in 2 NVLink domains: 0..1 (host a); 2..3 (host b), and it must divide the"
            " number of ranks of each",
        ),
        ("aaab", 2, "domain_size is 2; ranks are in 2 NVLink domains"),
        ("----", 3, "domain_size is 3; one NVLink domain: 0..3, and it must divide"),
    ],
)
def test_unequal_domains(hosts: str, size: int | None, said: str) -> None:
    given = [
        None if host == "-" else fact for host, fact in zip(hosts, facts(*((h, None) for h in hosts)), strict=True)
    ]
    with pytest.raises(ValueError) as raised:
        divide(given, size)
    assert said in str(raised.value)


class Nvml:
    """A stand-in for the functions of NVML that are called."""

    def __init__(self, **info: Any) -> None:
        self.info = {"cluster": b"\1" * 16, "status": 0, "clique": 32766, "state": 3} | info

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        assert name == b"GPU-12"
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, info: Any) -> int:
        found = ctypes.cast(info, ctypes.POINTER(topology._FabricInfo)).contents
        for name, value in self.info.items():
            setattr(found, name, (ctypes.c_ubyte * 16)(*value) if name == "cluster" else value)
        return 0


@pytest.mark.parametrize("uuid", ["12", "GPU-12"])
def test_fabric(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(why: str | None = None, **info: Any) -> Fabric | str:
        @contextlib.contextmanager
        def nvml() -> Iterator[Nvml]:
            yield Nvml(**info)

        monkeypatch.setattr(topology, "_nvml", nvml)
        monkeypatch.setattr(topology, "_no_fabric_handles", lambda device: why)
        return fabric_of(uuid, 0)

    assert ask() == Fabric("01" * 16, 32766)
    assert ask(state=2) == ask(status=9) == "it is registered with no NVLink fabric"
    assert ask(cluster=bytes(16)) == "its NVLink fabric is this host's own"
    assert ask("CUDA_ERROR_NOT_PERMITTED") == "its memory cannot be exported to other hosts: CUDA_ERROR_NOT_PERMITTED"


class Links:
    """NVML on a host of three GPUs, of which 0 and 1 are joined by NVLink; it numbers them as it likes."""

    ORDER = (b"GPU-c", b"GPU-a", b"GPU-b")

    def __init__(self, status_code: int = 0) -> None:
        self.status_code = status_code

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 1 + self.ORDER.index(name)
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 1 + index
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, name: Any, size: int) -> int:
        name.value = self.ORDER[handle.value - 1]
        assert len(name.value) < size
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, index: int, status: Any) -> int:
        assert index == 2  # NVLink; 0 is reading over anything
        joined = {self.ORDER[one.value - 1], self.ORDER[other.value - 1]} == {b"GPU-a", b"GPU-b"}
        status._obj.value = 0 if joined else 5
        return self.status_code


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_nvlink_by_uuid(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_nvml", lambda: contextlib.nullcontext(Links()))
    assert [no_nvlink(prefix + gpu) for gpu in "abc"] == [{"c"}, {"c"}, {"a", "b"}]
    monkeypatch.setattr(topology, "_nvml", lambda: contextlib.nullcontext(Links(status_code=3)))
    assert no_nvlink("a") is None


def linked(*gpus: tuple[str, str, Fabric | None, str | None]) -> list[GpuFacts | None]:
    """Ranks by host, GPU, fabric and the GPUs without NVLink to theirs (None: unknown)."""
    return [GpuFacts(h, gpu, f, None, None if no is None else frozenset(no)) for h, gpu, f, no in gpus]


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        (linked(("h", "a", None, ""), ("h", "b", None, "")), None),
        (linked(("h", "a", None, "c"), ("h", "b", None, "c"), ("h", "c", None, "ab")), (0, 2)),
        (linked(("h", "a", None, "c"), ("h", "b", None, "c")), None),  # no rank has the other GPU
        (linked(("h", "a", None, None), ("h", "b", None, "a")), (0, 1)),  # one of the two can tell
        (linked(("h", "a", None, None), ("h", "b", None, None)), None),
        (linked(("h", "a", None, "b"), ("h", "a", None, "b")), None),  # they share a GPU
        (linked(("h", "a", RACK, "b"), ("i", "b", RACK, "a")), None),  # another host's, on the fabric
        ([None, None], None),
    ],
)
def test_pairs_without_nvlink(given: list[GpuFacts | None], pair: tuple[int, int] | None) -> None:
    assert pair_without_nvlink(given) == pair


@pytest.mark.parametrize(
    ("missing", "asked", "latency", "warned"),
    [("", None, None, False), ("b", None, 0, False), ("b", 0, 0, False), (None, None, None, True), (None, 0, 0, False)],
)
def test_latency_kernels_need_nvlink(missing: str | None, asked: int | None, latency: int | None, warned: bool) -> None:
    given = linked(("h", "a", None, missing), ("h", "b", None, missing and "a"))
    config, exchange = dataclasses.replace(CONFIG, latency_max_tokens=asked), Exchange(None, torch.device("cpu"))
    for exchange.rank in (0, 1):  # of which the first one warns
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = creation._with_latency_kernels(exchange, config, given)
        assert found == dataclasses.replace(config, latency_max_tokens=latency)
        texts = [str(warning.message)[:16] for warning in caught]
        assert texts == ["NVML cannot tell"] * (warned and exchange.rank == 0)


def test_ranks_that_share_a_gpu_need_no_nvlink(recwarn: pytest.WarningsRecorder) -> None:
    """Without NVML there is no warning, and latency kernels stay, if no two ranks have different GPUs."""
    given = linked(("h", "a", None, None), ("h", "a", None, None))
    assert creation._with_latency_kernels(Exchange(None, torch.device("cpu")), CONFIG, given) == CONFIG
    assert not recwarn.list


def test_latency_kernels_that_were_asked_for() -> None:
    given = linked(("h", "a", None, "b"), ("h", "b", None, "a"))
    with pytest.raises(ValueError, match="latency_max_tokens is 64, .* between the GPUs of ranks 0 and 1, .* None, 0"):
        creation._with_latency_kernels(
            Exchange(None, torch.device("cpu")), dataclasses.replace(CONFIG, latency_max_tokens=64), given
        )


def test_ranks_without_nvlink_agree_on_no_latency_kernels() -> None:
    assert run_ranks(2, agreed_latency) == [0, 0]


def agreed_latency() -> int | None:
    rank, true_facts = dist.get_rank(), creation.gpu_facts
    creation.gpu_facts = lambda device: GpuFacts("h", "ab"[rank], None, None, frozenset({"ba"[rank]}))
    try:
        own = dataclasses.replace(CONFIG, backend="cute")
        exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
        return creation.agree(exchange, own, None, None, 132).latency_max_tokens
    finally:
        creation.gpu_facts = true_facts


@pytest.mark.parametrize(("served", "bound", "device", "expected"), [
    (("cuda",), None, "cpu", "cuda:3"), (("cuda",), "cuda:1", "cpu", "cuda:1"),
    (("cuda",), "cuda:1", "cuda:2", "cuda:2"), (("cpu", "cuda"), "cuda:1", "cpu", "cpu"),
    (("cpu",), None, "cuda:2", "cpu"),
])  # fmt: skip
def test_device_of_collectives(
    served: tuple[str, ...], bound: str | None, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors go by a device that the process group serves: NCCL's groups do not send those of the CPU."""
    group = mock.Mock(
        _device_types=[torch.device(kind) for kind in served], bound_device_id=bound and torch.device(bound)
    )
    for name, value in (("get_backend", "nccl"), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(dist, name, lambda group, value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Exchange(group, torch.device(device)).wire_device == torch.device(expected)


def test_creation_uses_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """MoECommunicator compares configurations by the device that it is given, of which NCCL takes one for each rank."""
    used = []

    class Stop(Exception):
        pass

    def exchange(group: Any, device: torch.device) -> Any:
        used.append(device)
        raise Stop

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(communicator, "Exchange", exchange)
    config = MoECommunicatorConfig(num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=4)
    with pytest.raises(Stop):
        MoECommunicator(config, device="cuda:2")
    assert used == [torch.device("cuda", 2)]


def test_without_a_driver() -> None:
    """Nothing is raised: a communicator is being made."""
    if not torch.cuda.is_available():
        assert topology._no_fabric_handles(0)


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert no_nvlink("12") is None
    assert fabric_of("12", 0) == "NVML cannot tell (libnvidia-ml.so.1: cannot open shared object file)"


def agreed(hosts: str, lacks: dict[int, str], asked: dict[str, Any], unfit: str | None = None) -> list[Any]:
    """By ranks that say they are on these hosts, of which some lack something for kernels across domains: backend,
    domains and wire that all agree on, and what is warned of; or what is raised."""
    rank, true_facts, true_lack = dist.get_rank(), creation.gpu_facts, backends.lack
    creation.gpu_facts = lambda device: GpuFacts(hosts[rank], f"gpu {rank}", None, None)
    asks: list[Config] = []

    def lack(config: Config, multiprocessors: int) -> str | None:
        asks.append(config)
        return lacks.get(rank)

    backends.lack = lack
    own = dataclasses.replace(CONFIG, world_size=len(hosts), experts_per_rank=(2,) * len(hosts), **asked)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = creation.agree(Exchange(dist.group.WORLD, torch.device("cpu")), own, None, unfit, 132)
        said = [str(warning.message) for warning in caught if "backend" in str(warning.message)]
        assert all(config == dataclasses.replace(found, backend=config.backend) for config in asks)
        assert len(asks) == (own.backend != "reference" and unfit is None)
        return [found.backend, found.domains, found.wire, *said]
    except ValueError as error:
        return [str(error)]
    finally:
        creation.gpu_facts, backends.lack = true_facts, true_lack


CONFIG = Config(
    name="name", world_size=2, num_experts=4, hidden_size=32, top_k=2, max_tokens_per_rank=8, dtype=torch.bfloat16,
    experts_per_rank=(2, 2), alignment=16, backend="auto", device_type="cuda", timeout=300.0,
)  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "cute", "reference"])
def test_ranks_of_two_domains(backend: str) -> None:
    """Kernels run if no rank lacks anything; else the first that does is named."""
    asked = {"backend": backend, "domain_size": 1}
    where = "ranks are in 2 NVLink domains: 0 (host a); 1 (host b)"
    rejected = f"{where}; backend 'cute' cannot run across them: rank 1: no wire"
    taken = "reference" if backend == "reference" else "cute"
    wires = {"ab": "nvshmem", "aa": "nvlink"} if backend != "reference" else {"ab": "auto", "aa": "auto"}
    for hosts, wire in wires.items():
        assert run_ranks(2, agreed, hosts, {}, asked) == [[taken, ((0,), (1,)), wire]] * 2
    first, second = run_ranks(2, agreed, "ab", {1: "no wire"}, asked)
    if backend == "reference":
        assert first == second == ["reference", ((0,), (1,)), "auto"]
    elif backend == "cute":
        assert first == second == [rejected]
    else:
        assert first == [*second, f"backend 'auto' selects 'reference', which is slow: {rejected}"]
        assert second[0] == "reference"


def test_values_that_kernels_do_not_take() -> None:
    """A value that kernels cannot run, such as a bound of memory, makes "auto" select the reference backend, with a
    warning."""
    why = "staging_bytes is 1000; in 64 rounds"
    first, second = run_ranks(2, agreed, "aa", {}, {"backend": "auto"}, why)
    assert second == ["reference", ((0, 1),), "auto"]
    assert first == [*second, f"backend 'auto' selects 'reference', which is slow: {why}"]


def test_the_wire_that_was_asked_for() -> None:
    given = {"backend": "cute", "wire": "nvlink"}
    (text,) = run_ranks(2, agreed, "ab", {}, given)[0]
    assert text.endswith(
        "rank 0: EP_OPS_WIRE is nvlink, but not all ranks map each other's memory; allowed: auto, nvshmem"
    )
    given = {"backend": "cute", "wire": "nvshmem", "domain_size": 1}
    assert run_ranks(2, agreed, "aa", {}, given)[1] == ["cute", ((0,), (1,)), "nvshmem"]


def test_one_domain_asks_nobody() -> None:
    assert run_ranks(2, agreed, "aa", {0: "", 1: ""}, {"backend": "cute"})[0] == ["cute", ((0, 1),), "auto"]
