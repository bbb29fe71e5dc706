"""Compiles the kernels of the tests beside it into the disk cache, on all cores: `tests/gpu/precompile.py 1 2 4`, or,
of test_many.py alone, `many16 many72`, of test_token_major.py alone, `tokens2`, of test_combine_format.py alone,
`sums2`, of test_deep_ep.py alone, `clients2`, of test_domains*.py alone, `domains4` (the last two are compiled by no
other argument).

Optional: without it each rank compiles what it needs. EP_OPS_TEST_SEED must be the one of the test run, since the
routes decide the number of experts.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


class Wanted:
    """Kernels by the configurations of communicators, each once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.kernels: dict[Any, None] = {}

    def add(
        self, config: dict[str, Any], bound: int = 0, only: tuple[str, ...] = (), split: bool = True,
        formats: Sequence[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        """All kernels, or those of the named classes; latency kernels for at most `bound` tokens, whole or split; and
        those of rows in `formats`."""
        import torch

        from cute_kernels.heap import Problem
        from cute_kernels.latency.sizes import most_tokens
        from ep_ops.backends.cute import latency, sizing, throughput
        from ep_ops.backends.cute.row_format import row_format
        from ep_ops.config import default_experts
        from ep_ops.records import Delivery

        experts = config.get("experts_per_rank") or default_experts(config["num_experts"], self.world_size)
        dtype = sizing.DTYPES[config.get("dtype", torch.bfloat16)]
        tokens = config["max_tokens_per_rank"]
        problem = Problem(self.world_size, tuple(experts), config["top_k"], config["hidden_size"], dtype, tokens)
        found = [k for k in throughput.kernels_of(problem) if not only or type(k).__name__ in only]
        if bound:
            few = latency.kernels_of(problem, min(bound, most_tokens(problem)))
            found += [k for k in few if split or (k.send and k.receive)]
        for name, layout in formats:
            how = row_format(Delivery(None, name, layout))
            found += throughput.kernels_of_format(problem, how)
            if how.latency and bound:
                found += latency.kernels_of_format(problem, min(bound, most_tokens(problem)), how)
        self.kernels.update(dict.fromkeys(found))


def kernels(world_size: int, seed: int) -> list[Any]:
    """What every test launches."""
    import cases
    import test_checking
    import test_failures
    import test_formats
    import test_gather
    import test_latency
    import test_lists
    import test_live_rows
    import test_moe_communicator
    import test_progress
    import test_steps
    import test_sums
    import test_throughput

    from ep_ops.backends.cute.sizing import DEFAULT_TOKENS

    routes = cases.route_cases(world_size, seed)
    want = Wanted(world_size)
    for name, dtype in test_throughput.CASES:
        want.add(test_throughput.case_config(routes[name], dtype))
    for config in (*map(test_throughput.size_config, test_throughput.SIZES), test_throughput.WIDEST):
        want.add(config)
    for name, dtype in test_latency.CASES:
        config = test_latency.case_config(routes[name], dtype)
        want.add(config, DEFAULT_TOKENS, only=("Combine",), split=False)  # with a residual, and dispatch's backward
    for hidden in (*test_latency.SIZES, 1024):
        want.add(test_latency.size_config(hidden), DEFAULT_TOKENS)
    for name, dtype in test_gather.CASES:
        want.add(test_gather.case_config(routes[name], dtype), only=("Gather", "Combine", "Publish"))
    for tokens in test_gather.TOKENS:
        want.add(test_gather.by_rank_config(world_size, tokens), only=("Gather", "Combine", "Publish"))
    want.add(test_gather.steps_config(world_size))
    want.add(test_steps.CONFIG)
    for bound in (32, 64):
        want.add(test_failures.CONFIG, bound)
    for few in (0, test_progress.TOKENS):
        want.add(test_progress.config(world_size), few)
    want.add(test_checking.config(world_size), DEFAULT_TOKENS)
    for config, how in test_formats.wanted(world_size):
        want.add(config, test_formats.TOKENS, formats=[how])
    config, bound, formats = test_moe_communicator.wanted(world_size)
    want.add(config, bound, formats=formats)
    return [
        *want.kernels,
        *test_live_rows.kernels(),
        *test_sums.kernels(),
        *test_lists.kernels(),
        *of_tokens(world_size, seed),
        *of_sums(world_size, seed),
        *of_many(world_size, seed),
    ]


def of_tokens(world_size: int, seed: int) -> list[Any]:
    """What test_token_major launches on so many ranks."""
    import test_token_major

    want = Wanted(world_size)
    for config, formats in test_token_major.wanted(world_size):
        want.add(config, test_token_major.FEW, formats=formats)
    return list(want.kernels)


def of_sums(world_size: int, seed: int) -> list[Any]:
    """What test_combine_format launches on so many ranks."""
    import test_combine_format

    want = Wanted(world_size)
    for config, how in test_combine_format.wanted(world_size):
        want.add(config, test_combine_format.TOKENS, formats=[how])
    return list(want.kernels)


def of_clients(world_size: int, seed: int) -> list[Any]:
    """What test_deep_ep launches."""
    import test_deep_ep

    want = Wanted(world_size)
    if world_size == test_deep_ep.RANKS:
        for config, bound, formats in test_deep_ep.wanted():
            want.add(config, bound, split=False, formats=formats)
    return list(want.kernels)


def of_many(world_size: int, seed: int) -> list[Any]:
    """What test_many launches on so many ranks."""
    import test_many

    want = Wanted(world_size)
    for config in test_many.configs(world_size, seed):
        want.add(config, test_many.FEW)
    return list(want.kernels)


def of_domains(world_size: int, seed: int) -> list[Any]:
    """What test_domains*.py launch on so many ranks; the longest to compile first."""
    import adversary
    import domains

    from ep_ops.backends import no_device_library
    from ep_ops.config import Config
    from ep_ops.memory import planned

    adversary.install(setattr)
    lacking = no_device_library()
    given = Config(**domains.config(world_size) | {"latency_max_tokens": 0})
    found: list[Any] = []

    def add(formats: Any = (), **more: Any) -> None:
        kernels = adversary.kernels_of(planned(dataclasses.replace(given, **more), world_size), formats)
        found.extend(k for k in kernels if not formats or getattr(k, "format", ""))

    for size, wire in domains.overs(world_size):
        if wire != "nvshmem" or lacking is None:
            over: dict[str, Any] = {"domain_size": size, "wire": wire}
            half = {"staging_bytes": domains.half_of_the_memory(world_size, size)}
            short = {"hidden_size": domains.FORMAT_HIDDEN}
            add(**over, latency_max_tokens=domains.TOKENS)
            add(**over, latency_max_tokens=domains.TOKENS, bundle="1")
            add(**over, **half)
            add(domains.FORMATS, **over, **short, latency_max_tokens=domains.TOKENS)
            add(domains.FORMATS, **over, **short, **half)
    add(staging_bytes=domains.half_of_the_memory(world_size, None))
    return sorted(found, key=lambda kernel: not kernel.linked)


def build(kernel: Any, arch: str) -> None:
    from cute_kernels import jit

    jit.prepare(kernel, arch)


def main() -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    seed = int(os.environ["EP_OPS_TEST_SEED"])
    parts = {
        "": kernels,
        "many": of_many,
        "tokens": of_tokens,
        "sums": of_sums,
        "clients": of_clients,
        "domains": of_domains,
    }
    asked = [(parts[text.rstrip(string.digits)], int(text.lstrip(string.ascii_lowercase))) for text in sys.argv[1:]]
    wanted = list(dict.fromkeys(kernel for of, world_size in asked for kernel in of(world_size, seed)))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(build, wanted, [f"sm_{major}{minor}a"] * len(wanted)))
    print(f"{len(wanted)} kernels compiled")


if __name__ == "__main__":
    main()
