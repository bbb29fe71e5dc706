"""GPUs, types, experts and ranks that a backend does not support are rejected by name, or left to the other backend."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_communicator import make

import ep_ops
from ep_ops import backends, communicator, creation
from ep_ops.backends.reference import ReferenceBackend
from ep_ops.group.topology import choose_backend, gpu_facts


@pytest.mark.parametrize(
    ("capability", "shared", "said"),
    [
        ((8, 0), 163 * 1024, "capability 8.0) is too old; backend 'cute' needs capability 9.0 or newer"),
        ((12, 0), 99 * 1024, "capability 12.0) has 101376 bytes of shared memory a block; backend 'cute' needs 232448"),
    ],
)
def test_gpus_that_cannot_hold_the_kernels_are_rejected_by_name(
    capability: tuple[int, int], shared: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """backend="cute" rejects GPUs that cannot hold the kernels by name; "auto" selects the reference backend."""
    gpu = SimpleNamespace(
        name="NVIDIA Something", major=capability[0], minor=capability[1], shared_memory_per_block_optin=shared
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=re.escape(f"rank 0: GPU 3 (NVIDIA Something, {said}")):
        make(device="cuda:3", backend="cute")
    facts = gpu_facts(torch.device("cuda", 3))
    assert facts is not None and said in str(facts.lack) and choose_backend([facts])[0] == "reference"


@pytest.mark.parametrize("beyond", [{"dtype": torch.float64}, {"num_experts": 20000}])
def test_auto_leaves_to_reference_what_only_that_takes(beyond: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "choose_backend", lambda facts: ("cute", ""))  # as on a host of GPUs
    monkeypatch.setattr(communicator, "multiprocessors", lambda device: 132)
    chosen = []

    def chose(kind: str, comm: ep_ops.Communicator) -> Any:
        chosen.append(kind)
        return ReferenceBackend(comm)

    monkeypatch.setattr(backends, "make", chose)
    for values in ({}, beyond):
        with make(**values):
            pass
    assert chosen == ["cute", "reference"]


def test_as_many_experts_as_the_kernels_place() -> None:
    sizes: dict[str, Any] = dict(world_size=2, hidden_size=64, top_k=2, max_tokens_per_rank=8)
    text = (
        r"num_experts is 20000, at most 10000 a rank; on 2 ranks backend 'cute' needs [0-9]+ bytes of shared memory to"
        r" place rows; allowed: at most [0-9]+"
    )
    with pytest.raises(ValueError, match=text) as told:
        ep_ops.memory_plan(num_experts=20000, backend="cute", **sizes)
    needed, has = (int(word) for word in re.findall(r"needs (\d+) .* at most (\d+)", str(told.value))[0])
    assert needed > has
    assert ep_ops.memory_plan(num_experts=4096, backend="cute", **sizes)
    assert ep_ops.memory_plan(num_experts=20000, backend="reference", **sizes)


@pytest.mark.parametrize(("world_size", "most"), [(2, 8188), (8, 8179), (32, 8140), (72, 8070)])
def test_as_many_experts_as_the_readme_says(world_size: int, most: int) -> None:
    sizes: dict[str, Any] = dict(world_size=world_size, hidden_size=64, top_k=2, max_tokens_per_rank=8)
    assert ep_ops.memory_plan(num_experts=most, backend="cute", **sizes)
    with pytest.raises(ValueError, match=f"num_experts is {most + 1}, "):
        ep_ops.memory_plan(num_experts=most + 1, backend="cute", **sizes)


def test_as_many_ranks_as_map_each_others_memory() -> None:
    sizes: dict[str, Any] = dict(num_experts=64, hidden_size=64, top_k=2, max_tokens_per_rank=8)
    for world_size in (31, 32, 33, 64, 72):
        assert ep_ops.memory_plan(world_size=world_size, backend="cute", **sizes)
    with pytest.raises(ValueError, match="73 ranks are in one NVLink domain; backend 'cute' takes at most 72 there"):
        ep_ops.memory_plan(world_size=73, backend="cute", **sizes)
    assert ep_ops.memory_plan(world_size=73, backend="reference", **sizes)


def test_as_many_ranks_as_an_alarm_can_name() -> None:
    """Across NVLink domains there are at most as many ranks as an alarm can name."""
    sizes: dict[str, Any] = dict(num_experts=128, hidden_size=64, top_k=2, max_tokens_per_rank=8, backend="cute")
    near, across = (ep_ops.memory_plan(world_size=64, domain_size=size, **sizes) for size in (64, 32))
    for purpose in ("flags", "routes", "gradients of weights", "staged rows", "marked lines"):
        assert across[f"symmetric: {purpose}"] > near[f"symmetric: {purpose}"]
    sizes["num_experts"] = 1088
    assert ep_ops.memory_plan(world_size=1024, domain_size=64, **sizes)
    with pytest.raises(ValueError, match="world_size is 1088; backend 'cute' takes at most 1024 ranks"):
        ep_ops.memory_plan(world_size=1088, domain_size=64, **sizes)
