"""How much memory a communicator and its calls take, before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from . import arrivals, backends
from .config import Config, consecutive_domains, even_experts, worst_case_rows


class MemoryPlan(dict[str, int]):
    """Bytes by purpose; prints as a table."""

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
    *,
    world_size: int,
    num_experts: int,
    hidden_size: int,
    top_k: int,
    max_tokens_per_rank: int,
    dtype: torch.dtype = torch.bfloat16,
    experts_per_rank: Sequence[int] | None = None,
    alignment: int = 16,
    backend: str = "cute",
    capacity: int | None = None,
    dispatch_sms: int | None = None,
    combine_sms: int | None = None,
    latency_max_tokens: int | None = None,
    symmetric_rows: int = 0,
    domain_size: int | None = None,
    staging_bytes: int | None = None,
    rank: int = 0,
) -> MemoryPlan:
    """Bytes that ``rank`` of such a communicator takes; nothing is allocated and no GPU is needed.

    Entries named ``call: ...`` are the fresh outputs of one ``dispatch`` and one ``combine`` of ``max_tokens_per_rank``
    tokens into ``capacity`` rows (default: the worst case without drops); all others are held by the communicator.
    ``domain_size``: ranks of each NVLink domain; None: all are in one.
    Raises ValueError for values that no communicator accepts.
    """
    if backend not in ("cute", "reference"):
        raise ValueError(f"backend is {backend!r}; allowed: 'cute' or 'reference'")
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; it must be a positive int")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r}; allowed: 0..{world_size - 1}")
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise ValueError(f"capacity is {capacity!r}; it must be None or an int from 0 on")
    if experts_per_rank is None:
        experts = even_experts(num_experts, world_size) if isinstance(num_experts, int) else ()
    elif isinstance(experts_per_rank, Sequence):
        experts = tuple(experts_per_rank)
    else:
        raise ValueError(f"experts_per_rank is {experts_per_rank!r}; it must hold one int for each rank")
    device_type = "cpu" if backend == "reference" else "cuda"
    config = Config(
        name="plan", world_size=world_size, num_experts=num_experts, hidden_size=hidden_size, top_k=top_k,
        max_tokens_per_rank=max_tokens_per_rank, dtype=dtype, experts_per_rank=experts, alignment=alignment,
        backend=backend, device_type=device_type, timeout=1.0, dispatch_sms=dispatch_sms, combine_sms=combine_sms,
        latency_max_tokens=latency_max_tokens, symmetric_rows=symmetric_rows, domain_size=domain_size,
        staging_bytes=staging_bytes,
    )  # fmt: skip
    problem = config.problem()
    if problem is None:
        config = dataclasses.replace(config, domains=consecutive_domains(world_size, domain_size))
        problem = backends.problem(config)
    if problem is not None:
        raise ValueError(problem)
    return plan_of(config, rank, capacity)


def plan_of(config: Config, rank: int, capacity: int | None = None) -> MemoryPlan:
    """:func:`memory_plan` of a checked configuration."""
    local = config.experts_per_rank[rank]
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    if capacity is None:
        capacity = worst_case_rows(config.world_size, tokens, top_k, local, config.alignment)
    row = config.hidden_size * config.dtype.itemsize
    weight = 8 if config.dtype == torch.float64 else 4
    plan = MemoryPlan(backends.held_bytes(config))
    plan["call: recv_x"] = capacity * row
    plan["call: recv_weights"] = capacity * weight
    plan["call: route"] = 4 * (tokens * top_k + arrivals.size(capacity, config.world_size) + 3 * local)
    plan["call: combined out"] = tokens * row
    return plan
