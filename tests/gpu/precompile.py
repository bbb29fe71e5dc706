"""Compiles the kernels of test_throughput.py into the disk cache, on all cores: `tests/gpu/precompile.py 1 2 4`.

Optional: without it each rank compiles what it needs. EP_OPS_TEST_SEED must be the one of the test run, since the
routes decide the number of experts.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def problems(world_sizes: list[int], seed: int) -> list:
    import cases
    from test_throughput import CASES, SIZES, WIDEST, case_config, size_config

    from cute_kernels.heap import Problem
    from ep_ops.backends.sizes import DTYPES
    from ep_ops.config import even_experts

    found = {}
    for world_size in world_sizes:
        configs = [case_config(cases.route_cases(world_size, seed)[name], dtype) for name, dtype in CASES]
        for config in [*configs, *(size_config(hidden) for hidden in SIZES), WIDEST]:
            experts = config.get("experts_per_rank") or even_experts(config["num_experts"], world_size)
            dtype = DTYPES[config["dtype"]] if "dtype" in config else "bf16"
            problem = Problem(
                world_size, tuple(experts), config["top_k"], config["hidden_size"], dtype, config["max_tokens_per_rank"]
            )
            found[problem] = None
    return list(found)


def build(kernel, arch: str) -> None:
    from cute_kernels import jit

    jit.get(kernel, arch, lambda: False)


def main() -> None:
    import torch

    from ep_ops.backends.cute import kernels_of

    major, minor = torch.cuda.get_device_capability()
    seed = int(os.environ["EP_OPS_TEST_SEED"])
    kernels = [k for problem in problems([int(a) for a in sys.argv[1:]], seed) for k in kernels_of(problem)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        list(pool.map(build, kernels, [f"sm_{major}{minor}a"] * len(kernels), chunksize=4))
    print(f"{len(kernels)} kernels compiled")


if __name__ == "__main__":
    main()
