"""`ep-ops compile`: a communicator's kernels into the disk cache, once for all processes of a host, with all cores.

Needs no GPU, so it can be a step of building an image. Without it each kernel is compiled when it is first needed, or
in `Communicator.warmup`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ep_ops.arguments import bundle
from ep_ops.backends import no_device_library
from ep_ops.backends.cute.sizing import across, problem_with
from ep_ops.config import Config, consecutive_domains, even_experts
from ep_ops.formats import format_of, layout_of
from ep_ops.formats.quantise import refuse_hidden


def config_of(
    ranks: int, num_experts: int, hidden_size: int, top_k: int, max_tokens: int, dtype: torch.dtype,
    experts_per_rank: Sequence[int] | None = None, latency_max_tokens: int | None = None,
    *, domain_size: int | None = None, wire: str = "nvshmem", staging_bytes: int | None = None,
) -> Config:  # fmt: skip
    """The configuration of a communicator, as far as its kernels depend on it. `domain_size`: ranks of each NVLink
    domain, which follow each other (None: all are in one); `wire`: what kernels reach other domains by; the environment
    says whether rows are bundled there. ValueError, in the communicator's words, for what it would refuse."""
    experts = even_experts(num_experts, ranks) if experts_per_rank is None else tuple(experts_per_rank)
    config = Config(
        name="ahead", world_size=ranks, num_experts=num_experts, hidden_size=hidden_size, top_k=top_k,
        max_tokens_per_rank=max_tokens, dtype=dtype, experts_per_rank=experts, alignment=16, backend="cute",
        device_type="cuda", timeout=1.0, latency_max_tokens=latency_max_tokens, domain_size=domain_size, wire=wire,
        staging_bytes=staging_bytes, bundle=bundle(),
    )  # fmt: skip
    problem = config.problem()
    if problem is None:
        config = dataclasses.replace(config, domains=consecutive_domains(ranks, domain_size))
        problem = problem_with(config)
        if problem is None and across(config) and wire == "nvshmem":
            problem = no_device_library()
    if problem is not None:
        raise ValueError(problem)
    return config


def formats_of(texts: Sequence[str], hidden_size: int) -> list[tuple[str, str]]:
    """Formats and layouts of scales, of "NAME=LAYOUT" or "NAME". ValueError for what a dispatch would refuse."""
    found = []
    for text in texts:
        name, _, layout = text.partition("=")
        refuse_hidden(hidden_size, format_of(name))
        layout_of(format_of(name), layout)
        found.append((name, layout))
    return found


def compile_communicator(config: Config, arch: str, formats: Sequence[tuple[str, str]] = ()) -> int:
    """Compiles a communicator's kernels, those of rows in these formats included, into the disk cache, and returns how
    many there are. RuntimeError where there is no folder that keeps them."""
    from ep_ops.backends.cute import all_kernels

    wanted = all_kernels(config, formats)
    folder()
    compile_all(wanted, arch)
    return len(wanted)


def folder() -> Path:
    """The folder of compiled kernels. RuntimeError if there is none."""
    from cute_kernels import jit

    found = jit.cache_dir()
    if found is None:
        raise RuntimeError("EP_OPS_CACHE_DIR is empty: there is no folder to keep compiled kernels in")
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = jit.refusal(found)
    except OSError as error:
        why = str(error)
    if why is not None:
        raise RuntimeError(f"{found} cannot keep compiled kernels: {why}; EP_OPS_CACHE_DIR names another folder")
    return found


def compile_all(wanted: Sequence[Any], arch: str) -> None:
    """Compiles kernels into the disk cache, by as many processes as there are cores; what is there already is left
    alone."""
    from cute_kernels import jit

    wanted = [kernel for kernel in wanted if not jit.prepared(kernel, arch)]
    if not wanted:
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(_compile, wanted, [arch] * len(wanted)))


def _compile(kernel: Any, arch: str) -> None:
    from cute_kernels import jit

    jit.prepare(kernel, arch)


def arch_here() -> str | None:
    """The arch of this host's first GPU, if there is one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}a"
