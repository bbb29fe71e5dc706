"""Numbers of blocks that correctness requires, whatever is tuned.

Blocks that wait for others keep their place on the GPU, so those that they wait for must find one. In a throughput
dispatch these are the tile blocks of all ranks, the announcing block and one that stages, and across NVLink domains the
relaying block and one that sends. A combine needs a block that pushes and one that sums. Latency kernels have no more
blocks than there are multiprocessors (SMs), and two fit on one.
"""

from __future__ import annotations

from cute_kernels.heap import Problem

MARGIN = 2
"""SMs that are left free, so that a block of another kernel delays nothing."""
STAGING_BLOCKS = 16
"""SMs that the budget of a dispatch leaves to staging and announcing."""


def most_pulling(problem: Problem, sms: int) -> int:
    """Return the most SMs that may pull: blocks that place the route and some that stage rows run at the same time."""
    return sms - problem.tiles - STAGING_BLOCKS - MARGIN


def needed(problem: Problem) -> int:
    """Return the smallest number of multiprocessors: for the blocks that wait for others, those that stage and send,
    and one that pulls."""
    return problem.tiles + row_blocks(problem) + 1 + MARGIN


def row_blocks(problem: Problem) -> int:
    """Return the smallest number of blocks, in addition to the tile blocks, that stage and announce rows: one of each
    kind; across NVLink domains also one that relays and one that sends."""
    return 4 if problem.domains else 2


def too_small(problem: Problem, found: int) -> str | None:
    """Return the error text for a GPU, or a part of one, with too few multiprocessors."""
    least = needed(problem)
    if found >= least:
        return None
    return (
        f"the GPU has {found} multiprocessors for this process; the cute backend needs {least} with these sizes, so"
        " that blocks that wait for each other run at once. Give it a larger part of the GPU, or use"
        " backend='reference'"
    )
