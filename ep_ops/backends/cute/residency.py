"""Multiprocessors (SMs) that this process has, and how many kernels need so that all their waits end.

Blocks that wait for others keep their place on the GPU, so those that they wait for must find one. Of a throughput
dispatch these are the tile blocks of all ranks, the announcing block and one that stages; latency kernels have no more
blocks than there are SMs, small enough for two on one.
"""

from __future__ import annotations

import torch

from cute_kernels.heap import Problem

MARGIN = 2
"""SMs that are left free, so that a block of somebody else's kernel delays nothing."""


def available(device: torch.device) -> int:
    """Those of the context that is current: a green context, or a client of MPS, has some of the GPU's only."""
    total: int = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        from cuda.bindings import driver

        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context
            _, context = driver.cuCtxGetCurrent()
            error, resource = driver.cuCtxGetDevResource(context, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    except (ImportError, AttributeError):  # a driver or bindings that know of no such contexts
        return total
    return min(total, int(resource.sm.smCount)) if int(error) == 0 else total


def needed(problem: Problem) -> int:
    """The fewest: beside the blocks that wait for others, one that stages and one that pulls."""
    return problem.tiles + 3 + MARGIN


def too_small(problem: Problem, device: torch.device) -> str | None:
    """What is to be said of a GPU, or a part of one, that has fewer than are needed."""
    found, least = available(device), needed(problem)
    if found >= least:
        return None
    return (
        f"{device} has {found} multiprocessors for this process; the cute backend needs {least} with these sizes, so"
        " that blocks that wait for each other run at once. Give it a larger part of the GPU, or use"
        " backend='reference'"
    )
