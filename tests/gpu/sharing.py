"""How many ranks share a GPU, whether they run at the same time, and what that leaves out."""

from __future__ import annotations

import os

import pytest
import torch

SHARING = -(-int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // max(1, torch.cuda.device_count()))
"""Ranks of this host for each GPU."""

MPS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
AT_ONCE = SHARING == 1 or MPS
"""Whether the kernels of all ranks run at the same time. Under MPS they do, each rank on a part of the multiprocessors.
Otherwise the processes that share a GPU take turns on it."""

TURNS = (1 if AT_ONCE else SHARING) * int(os.environ.get("EP_OPS_GPU_SLOWER", 1))
"""How many times as long the slowest rank takes. The variable is for tools that make kernels slower."""

own_gpu = pytest.mark.skipif(not AT_ONCE, reason="needs a GPU for each rank, or MPS: tests what runs at the same time")
one_rank = pytest.mark.skipif(os.environ.get("WORLD_SIZE", "1") != "1", reason="no ranks take part: runs on 1 rank")
few_processes = pytest.mark.skipif(SHARING > 4, reason="compiles with Inductor in every process: at most 4 ranks a GPU")


def fewer(count: int, least: int = 1) -> int:
    """``count`` steps, or fewer where ranks take turns: each step then takes as many turns as there are ranks."""
    return count if TURNS == 1 else max(least, count // (4 * TURNS * TURNS))
