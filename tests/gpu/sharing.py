"""How many ranks share a GPU, and what that leaves out."""

from __future__ import annotations

import os

import pytest
import torch

SHARING = -(-int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // max(1, torch.cuda.device_count()))
"""Ranks of this host for each GPU: kernels of that many processes take turns on it."""

own_gpu = pytest.mark.skipif(SHARING > 1, reason="needs a GPU for each rank: looks at what runs at the same time")
few_processes = pytest.mark.skipif(SHARING > 4, reason="compiles with Inductor in every process: at most 4 ranks a GPU")


def fewer(count: int, least: int = 1) -> int:
    """``count`` steps, or fewer where ranks share a GPU: each step then takes as many turns as there are ranks."""
    return count if SHARING == 1 else max(least, count // (4 * SHARING * SHARING))
