"""How many multiprocessors (SMs) kernels need so that all their waits end.

Blocks that wait for others keep their place on the GPU, so those that they wait for must find one. Of a throughput
dispatch these are the tile blocks of all ranks, the announcing block and one that stages, and across NVLink domains the
relaying block and one that sends; latency kernels have no more blocks than there are SMs, small enough for two on one.
"""

from __future__ import annotations

from cute_kernels.heap import Problem

MARGIN = 2
"""SMs that are left free, so that a block of somebody else's kernel delays nothing."""


def needed(problem: Problem) -> int:
    """The fewest multiprocessors: for the blocks that wait for others, for those that stage and send and for one that
    pulls."""
    return problem.tiles + row_blocks(problem) + 1 + MARGIN


def row_blocks(problem: Problem) -> int:
    """The fewest blocks beside the tile blocks that bring rows to where others find them: one that announces and one
    that stages; across NVLink domains one that relays and one that sends, too."""
    return 4 if problem.domains else 2


def too_small(problem: Problem, found: int) -> str | None:
    """What is to be said of a GPU, or a part of one, that has fewer than are needed."""
    least = needed(problem)
    if found >= least:
        return None
    return (
        f"the GPU has {found} multiprocessors for this process; the cute backend needs {least} with these sizes, so"
        " that blocks that wait for each other run at once. Give it a larger part of the GPU, or use"
        " backend='reference'"
    )
