"""Compiles what a run will launch, shared out between the ranks: all of them load it from the disk cache afterwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cute_kernels import jit
from cute_kernels.heap import Problem
from ep_ops.backends import latency
from ep_ops.backends.cute import kernels_of
from ep_ops.backends.sizes import problem_of, token_bound
from ep_ops.config import Config, even_experts

from .link import LinkCopy, arch_of
from .presets import Preset


def kernels(preset: Preset, world_size: int) -> list[Any]:
    """Of all communicators, and of the link."""
    found: dict[Any, None] = {}
    for cases in preset.groups():
        w = cases[0].workload
        max_tokens = max(case.workload.tokens for case in cases)
        experts = even_experts(w.experts, world_size)
        found |= dict.fromkeys(kernels_of(Problem(world_size, experts, w.top_k, w.hidden, w.dtype, max_tokens)))
    if preset.link_sms and world_size > 1:
        for row_bytes in preset.row_bytes:
            found |= dict.fromkeys(LinkCopy(world_size, row_bytes, push) for push in (True, False))
    return list(found)


def kernels_of_communicator(config: Config) -> list[Any]:
    """Of a communicator of the cute backend, those for few tokens too."""
    problem = problem_of(config)
    tokens = token_bound(config, problem)
    return [*kernels_of(problem), *(latency.kernels_of(problem, tokens) if tokens else ())]


def compile_together(wanted: list[Any], device: torch.device) -> int:
    """Number of kernels compiled or found compiled. Collective; does nothing without a disk cache."""
    if jit.cache_dir() is None or dist.get_world_size() == 1:
        return 0
    for kernel in wanted[dist.get_rank() :: dist.get_world_size()]:
        jit.get(kernel, arch_of(device), lambda: False)
    dist.barrier()
    return len(wanted)
