"""Memory that a communicator and its calls need, computed before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import arrivals, backends
from .config import Config, configured, consecutive_domains, is_int, worst_case_rows
from .formats import exact_dtype


class MemoryPlan(dict[str, int]):
    """Bytes by purpose. ``str()`` returns them as a table."""

    def __str__(self) -> str:
        width = max(map(len, self), default=5)
        lines = [f"{purpose:<{width}} {_readable(size):>12}" for purpose, size in self.items()]
        return "\n".join(lines)


def _readable(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def memory_plan(
    config: Config | None = None, *, world_size: int, rank: int = 0, capacity: int | None = None, **options: Any
) -> MemoryPlan:
    """Return the bytes that one rank of a communicator needs. Allocates nothing and needs no GPU.

    Entries named ``call: ...`` are the outputs of one ``dispatch`` and one ``combine`` of ``max_tokens_per_rank``
    tokens. The communicator holds all others.

    Args:
        config: the communicator's options. They can also be passed as keyword arguments, as for
            :class:`ep_ops.Communicator`. Backend "auto" means "cute" here. NVLink domains are ``domain_size``
            consecutive ranks; None: one domain.
        world_size: number of ranks, at least 1.
        rank: the rank whose memory is returned, 0..world_size - 1.
        capacity: rows of the receive buffer. None: the worst case, without drops.

    Returns:
        MemoryPlan: bytes by purpose.

    Raises:
        TypeError: options are unknown or missing.
        ValueError: no communicator accepts a value.
    """
    config = planned(configured("memory_plan", config, options), world_size)
    if not is_int(rank) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r}; allowed: 0..{world_size - 1}")
    if capacity is not None and (not is_int(capacity) or capacity < 0):
        raise ValueError(f"capacity is {capacity!r}; allowed: None or an int of at least 0")
    return plan_of(config, rank, capacity)


def planned(config: Config, world_size: int) -> Config:
    """Return the configuration that ``world_size`` ranks would agree on, with "auto" as cute and NVSHMEM.

    Raises:
        ValueError: no communicator accepts a value.
    """
    if not is_int(world_size) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; allowed: an int of at least 1")
    backend = "cute" if config.backend == "auto" else config.backend
    wire = "nvshmem" if config.wire == "auto" else config.wire
    device = "cpu" if backend == "reference" else "cuda"
    config = config.on(world_size, backend=backend, wire=wire, device_type=device, name=config.name or "planned")
    problem = config.problem()
    if problem is None:
        config = dataclasses.replace(config, domains=consecutive_domains(world_size, config.domain_size))
        problem = backends.problem(config)
    if problem is not None:
        raise ValueError(problem)
    return config


def plan_of(config: Config, rank: int, capacity: int | None = None) -> MemoryPlan:
    """Return :func:`memory_plan` of a configuration that ranks have agreed on."""
    local = config.experts_per_rank[rank]
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    if capacity is None:
        capacity = worst_case_rows(config.world_size, tokens, top_k, local, config.alignment)
    row = config.hidden_size * config.dtype.itemsize
    plan = MemoryPlan(backends.held_bytes(config))
    plan["call: recv_x"] = capacity * row
    plan["call: recv_weights"] = capacity * exact_dtype(config.dtype).itemsize
    plan["call: route"] = 4 * (tokens * top_k + arrivals.size(capacity, config.world_size) + 3 * local)
    plan["call: combined out"] = tokens * row
    return plan
