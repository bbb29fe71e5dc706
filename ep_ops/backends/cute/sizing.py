"""What the cute backend holds, by its configuration alone: needs neither a GPU nor the CuTe DSL."""

from __future__ import annotations

import dataclasses
import functools

import torch

from cute_kernels.heap import MOST_RANKS, MOST_RANKS_ACROSS, SHARED_BYTES, Heap, Problem
from cute_kernels.latency.sizes import LatencyHeap, most_tokens
from cute_kernels.marks import NUMBER_BITS

from ...config import Config

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

MOST_ROUNDS = 64
"""Largest number of rounds of an operation: with the operation that publishes the route, as many as a rejection can
number."""
MOST_TOKENS_ACROSS = (1 << NUMBER_BITS) // 2 - 64
"""Largest number of tokens of an operation across NVLink domains, whose ranks count each other's puts in `NUMBER_BITS`
bits: at most one put for the rows of a token and one for its weights, and one for each tile. Routes of the latency
kernels are in shared memory, which bounds their tokens much further."""
DEFAULT_TOKENS = 256
"""The largest `max_tokens` of calls that run on the latency kernels, if the communicator does not say otherwise."""


def problem_with(config: Config) -> str | None:
    """Return which of these values, although valid, the kernels do not support, or None."""
    if config.dtype == torch.float64:
        return "dtype torch.float64 is supported by backend 'reference' only"
    if config.world_size > MOST_RANKS_ACROSS:
        return f"world_size is {config.world_size}; backend 'cute' takes at most {MOST_RANKS_ACROSS} ranks"
    if config.domains and len(config.domains[0]) > MOST_RANKS:
        each = len(config.domains[0])
        return f"{each} ranks are in one NVLink domain; backend 'cute' takes at most {MOST_RANKS} there"
    problem = sizes_of(config)
    if not problem.fits:
        return (
            f"num_experts is {config.num_experts}, at most {problem.local_experts} a rank; on {config.world_size} ranks"
            f" backend 'cute' needs {problem.placing_bytes} bytes of shared memory to place rows;"
            f" allowed: at most {SHARED_BYTES - 1024}"
        )
    if across(config) and problem.max_tokens > MOST_TOKENS_ACROSS:
        return (
            f"an operation has {problem.max_tokens} tokens of a rank; across NVLink domains backend 'cute' takes at"
            f" most {MOST_TOKENS_ACROSS}: pass a smaller max_tokens_per_rank, or staging_bytes, for several rounds"
        )
    if config.staging_bytes is not None and round_tokens(config) is None:
        least = _in_rounds_of(config, least_round(config))
        held = _heap_of(config, least).nbytes
        return (
            f"staging_bytes is {config.staging_bytes}; in {MOST_ROUNDS} rounds of {least.max_tokens} tokens"
            f" backend 'cute' holds {held} bytes of symmetric memory; allowed: at least as many"
        )
    return None


def across(config: Config) -> bool:
    """Return whether there are several NVLink domains."""
    return len(config.domains) > 1


def problem_of(config: Config) -> Problem:
    """Return the compile-time parameters of such a communicator's kernels."""
    sizes = sizes_of(config)
    if not across(config):
        return sizes
    from cute_kernels.internode import wire

    rows = rows_of_a_put(config)
    if config.wire == "nvlink":
        return dataclasses.replace(sizes, wire=wire.Nvlink(rows=rows))
    library = wire.find_library()
    if library is None:
        raise RuntimeError("NVSHMEM's device library is not installed")
    return dataclasses.replace(sizes, wire=wire.Nvshmem(library, rows=rows))


def rows_of_a_put(config: Config) -> int:
    """Return the largest number of rows that a put of the latency kernels to another domain contains."""
    from cute_kernels.internode.wire import BUNDLE

    return BUNDLE if config.bundle == "1" else 1


def sizes_of(config: Config) -> Problem:
    """Return `problem_of` without the wire between NVLink domains."""
    tokens = config.max_tokens_per_rank if config.staging_bytes is None else round_tokens(config)
    return _in_rounds_of(config, tokens or least_round(config))


@functools.cache
def round_tokens(config: Config) -> int | None:
    """Return the largest number of tokens of a round, for the fewest rounds that keep symmetric memory within
    `staging_bytes`. None if that takes too many rounds."""
    for rounds in range(1, MOST_ROUNDS + 1):
        tokens = -(-config.max_tokens_per_rank // rounds)
        if _heap_of(config, _in_rounds_of(config, tokens)).nbytes <= (config.staging_bytes or 0):
            return tokens
    return None


def least_round(config: Config) -> int:
    """Return the smallest number of tokens of a round."""
    return -(-config.max_tokens_per_rank // MOST_ROUNDS)


def _in_rounds_of(config: Config, tokens: int) -> Problem:
    return Problem(
        world_size=config.world_size,
        experts_per_rank=config.experts_per_rank,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        dtype=DTYPES[config.dtype],
        max_tokens=tokens,
        domains=config.domains if across(config) else (),
        route_tokens=config.max_tokens_per_rank if tokens < config.max_tokens_per_rank else 0,
        counts_waits=config.statistics,
    )


def token_bound(config: Config, problem: Problem) -> int:
    """Return the largest `max_tokens` of a call on the latency kernels, equal on all ranks; 0 if there is none."""
    asked = DEFAULT_TOKENS if config.latency_max_tokens is None else config.latency_max_tokens
    return min(asked, most_tokens(problem))


def heap_of(config: Config) -> Heap:
    """Return the layout of a rank's symmetric memory."""
    return _heap_of(config, sizes_of(config))


def _heap_of(config: Config, problem: Problem) -> Heap:
    tokens = token_bound(config, problem)
    return LatencyHeap(problem, tokens) if tokens else Heap(problem)


def memory_plan(config: Config) -> dict[str, int]:
    """Return the bytes that each rank's backend allocates, by purpose."""
    sizes = heap_of(config).sizes()
    if config.symmetric_rows:
        sizes["rows to be gathered"] = rows_bytes(config)
    return {f"symmetric: {purpose}": size for purpose, size in sizes.items()}


def rows_bytes(config: Config) -> int:
    """Return the size in bytes of the rows that `empty_rows` returns."""
    return config.symmetric_rows * config.hidden_size * config.dtype.itemsize
