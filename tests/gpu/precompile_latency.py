"""Compiles the kernels of test_latency.py into the disk cache with all cores: `python precompile_latency.py 4`.

As precompile.py does for test_throughput.py; EP_OPS_TEST_SEED must be the one of the test run.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def kernels(world_size: int, seed: int) -> list:
    """Everything where whole steps are compared; of other communicators what their few calls launch."""
    import cases
    import torch
    from test_latency import CASES, case_config, size_config

    from cute_kernels.heap import Problem
    from ep_ops.backends import cute, latency, sizes
    from ep_ops.config import even_experts

    configs = [(case_config(cases.route_cases(world_size, seed)[name], dtype), False) for name, dtype in CASES]
    configs += [(size_config(hidden), hidden > 120) for hidden in (120, 1024, 2880, 7168)]
    found = {}
    for config, everything in configs:
        experts = config.get("experts_per_rank") or even_experts(config["num_experts"], world_size)
        dtype = sizes.DTYPES[config.get("dtype", torch.bfloat16)]
        tokens = config["max_tokens_per_rank"]
        problem = Problem(world_size, tuple(experts), config["top_k"], config["hidden_size"], dtype, tokens)
        bound = min(sizes.DEFAULT_TOKENS, sizes.most_tokens(problem))
        whole = [k for k in latency.kernels_of(problem, bound) if everything or (k.send and k.receive)]
        slow = [k for k in cute.kernels_of(problem) if everything or "Combine" in type(k).__name__]
        found |= dict.fromkeys(whole + slow)
    return list(found)


def build(kernel, arch: str) -> None:
    from cute_kernels import jit

    jit.get(kernel, arch, lambda: False)


def main() -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    seed = int(os.environ["EP_OPS_TEST_SEED"])
    wanted = [k for world_size in sys.argv[1:] for k in kernels(int(world_size), seed)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(build, wanted, [f"sm_{major}{minor}a"] * len(wanted)))
    print(f"{len(wanted)} kernels compiled")


if __name__ == "__main__":
    main()
