"""Compile what a run will launch before it starts: one process of each host compiles, all ranks load from the cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cute_kernels import jit
from cute_kernels.heap import Problem
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from ep_ops.backends.cute import kernels_of
from ep_ops.commands.compile import compile_all
from ep_ops.config import default_experts

from .link import Barrier, LinkCopy, arch_of
from .presets import Preset


def kernels(preset: Preset, world_size: int) -> list[Any]:
    """Of all communicators, and of the link."""
    found: dict[Any, None] = {}
    for cases in preset.groups():
        w = cases[0].workload
        max_tokens = max(case.workload.tokens for case in cases)
        experts = default_experts(w.experts, world_size)
        found |= dict.fromkeys(kernels_of(Problem(world_size, experts, w.top_k, w.hidden, w.dtype, max_tokens)))
        if any("gathered" in case.measure for case in cases):
            by_rank = Problem(world_size, (1,) * world_size, world_size, w.hidden, w.dtype, max_tokens)
            plan, push = Publish(by_rank, True, False, False, True), Combine(by_rank, True, False, False)
            found |= dict.fromkeys((plan, push, Gather(by_rank)))
    if world_size > 1:
        found[Barrier(world_size)] = None
    if preset.link_sms and world_size > 1:
        for row_bytes in preset.row_bytes:
            found |= dict.fromkeys(LinkCopy(world_size, row_bytes, push) for push in (True, False))
    return list(found)


def compile_together(wanted: list[Any], device: torch.device) -> int:
    """Number of kernels compiled or found compiled, by the first rank of each host and all its cores. Collective; does
    nothing without a disk cache."""
    if jit.cache_dir() is None or dist.get_world_size() == 1:
        return 0
    if device.index == 0:
        compile_all(wanted, arch_of(device))
    dist.barrier()
    return len(wanted)
