"""Ranks compare their configurations and choose one backend, before anything is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .config import Config
from .exchange import Exchange

GpuFacts = tuple[str, str]  # host, GPU

NEEDED_CAPABILITY = 9
"""The oldest compute capability that kernels are made for: its first number."""
NEEDED_SHARED_BYTES = 227 * 1024
"""Bytes of shared memory that a block of a kernel may ask for."""


def agree(exchange: Exchange, own: Config, problem: str | None, cute: bool) -> Config:
    """The configuration of all ranks, with "auto" resolved. Collective.

    ``problem``: what is wrong with this rank's; ``cute``: whether that backend takes the values. ValueError on every
    rank if one has a problem or if they differ.
    """
    word = (own, problem, gpu_facts(exchange.device) if own.backend == "auto" else None)
    words: list[Any] = [word]
    if exchange.world_size > 1:
        words = [None] * exchange.world_size
        on_gpu = exchange.device.type == "cuda"
        with torch.cuda.device(exchange.device) if on_gpu else contextlib.nullcontext():
            dist.all_gather_object(words, word, group=exchange.group)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(words) if problem]
    if problems:
        raise ValueError("; ".join(problems))
    if difference := disagreement([config for config, _, _ in words]):
        raise ValueError(difference)
    if own.backend != "auto":
        return own
    backend = choose_backend([facts for _, _, facts in words]) if cute else "reference"
    return dataclasses.replace(own, backend=backend)


def disagreement(configs: Sequence[Config]) -> str | None:
    """The first field that differs between ranks, with every value and the ranks that gave it; None if all agree."""
    for field in dataclasses.fields(Config):
        ranks_by_value: dict[Any, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks_by_value.setdefault(getattr(config, field.name), []).append(rank)
        if len(ranks_by_value) > 1:
            given = "; ".join(f"{value!r} on ranks {ranks}" for value, ranks in ranks_by_value.items())
            hint = "; pass name= where ranks have made different numbers of them" if field.name == "name" else ""
            return f"ranks disagree on {field.name}: {given}{hint}"
    return None


def choose_backend(facts: Sequence[GpuFacts | None]) -> str:
    """What "auto" means for values that both take, given the facts of all ranks: cute where every rank has a GPU of its
    own on one host."""
    if None in facts or len(set(facts)) < len(facts):
        return "reference"
    hosts = {fact[0] for fact in facts if fact is not None}
    return "cute" if len(hosts) == 1 else "reference"


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """(host, GPU) if this rank can run kernels that reach every GPU it sees, else None."""
    if device.type != "cuda" or gpu_problem(device) is not None:
        return None
    if importlib.util.find_spec("cutlass") is None:
        return None
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return None
    return _host(), str(torch.cuda.get_device_properties(device).uuid)


def gpu_problem(device: torch.device) -> str | None:
    """What a GPU lacks that the kernels of backend "cute" need, whatever else there is; None: nothing."""
    gpu = torch.cuda.get_device_properties(device)
    name = f"GPU {device.index} ({gpu.name}, capability {gpu.major}.{gpu.minor})"
    if gpu.major < NEEDED_CAPABILITY:
        return f"{name} is too old; backend 'cute' needs capability {NEEDED_CAPABILITY}.0 or newer"
    # Not all that is newer has as much: sm_120 and sm_121 have 99 KiB.
    shared: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < NEEDED_SHARED_BYTES:
        return f"{name} has {shared} bytes of shared memory a block; backend 'cute' needs {NEEDED_SHARED_BYTES}"
    return None


def _host() -> str:
    """Different on every running machine, and equal in its containers."""
    boot = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(boot):
        return socket.gethostname()
    with open(boot) as file:
        return file.read().strip()
