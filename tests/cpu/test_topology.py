"""Which ranks map each other's memory, and what is chosen for them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops import agreement, topology
from ep_ops.topology import Fabric, GpuFacts, choose_backend, fabric_of, gpu_facts, several_domains

RACK, OTHER = Fabric("c0ffee", 1), Fabric("c0ffee", 2)


def facts(*places: tuple[str, Fabric | None]) -> list[GpuFacts]:
    return [GpuFacts(host, f"gpu {rank}", fabric, None) for rank, (host, fabric) in enumerate(places)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (facts(("a", None)), ""),
        (facts(("a", None), ("a", None)), ""),
        (facts(("a", RACK), ("a", RACK), ("b", RACK)), ""),
        (
            facts(("a", None), ("b", None), ("a", None), ("a", None)),
            "ranks are in 2 NVLink domains: 0, 2..3 (host a); 1 (host b)",
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
        ([*facts(("a", None)), *facts(("a", None))], "ranks 0 and 1 share a GPU"),
        ([*facts(("a", None)), None], "rank 1 has no GPU"),
        ([*facts(("a", None)), GpuFacts("a", "gpu 1", None, "it is broken")], "rank 1: it is broken"),
    ],
)
def test_choice_of_backend(given: list[GpuFacts | None], why: str) -> None:
    assert choose_backend(given) == ("reference" if why else "cute", why)


def test_no_gpu() -> None:
    assert gpu_facts(torch.device("cpu")) is None
    assert several_domains(facts(("a", None), ("a", None))) is None


class Nvml:
    """As much of NVML as is asked."""

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


def test_without_a_driver() -> None:
    """Nothing is raised: a communicator is being made."""
    if not torch.cuda.is_available():
        assert topology._no_fabric_handles(0)


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert fabric_of("12", 0) == "NVML cannot tell (libnvidia-ml.so.1: cannot open shared object file)"


def apart() -> list[str]:
    """By ranks that say they are on two hosts: what is chosen, warned of and refused."""
    rank, true_facts = dist.get_rank(), agreement.gpu_facts
    agreement.gpu_facts = lambda device: GpuFacts(f"h{rank}", "gpu", None, None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = dict(num_experts=4, hidden_size=32, top_k=2, max_tokens_per_rank=8, device="cpu")
            with ep_ops.Communicator(dist.group.WORLD, **made) as comm:
                config, exchange = comm.config, comm._exchange
        said = [str(warning.message) for warning in caught if "backend" in str(warning.message)]
        try:
            agreement.agree(exchange, dataclasses.replace(config, backend="cute"), None, True)
        except ValueError as error:
            said.append(str(error))
        return [config.backend, *said]
    finally:
        agreement.gpu_facts = true_facts


def test_ranks_of_two_domains() -> None:
    first, second = run_ranks(2, apart)
    where = "ranks are in 2 NVLink domains: 0 (host h0); 1 (host h1)"
    refused = f"{where}; backend 'cute' needs all in one"
    assert first == ["reference", f"backend 'auto' takes 'reference', which is slow: {where}", refused]
    assert second == ["reference", refused]
