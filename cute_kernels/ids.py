"""Indices of the current thread within its block and grid."""

from cutlass import Int32
from cutlass.cute import arch


def thread_id() -> Int32:
    """Return the thread's index in its block."""
    tid, _, _ = arch.thread_idx()
    return tid


def warp_id() -> Int32:
    """Return the index of the thread's warp in its block, uniform in the warp."""
    return arch.make_warp_uniform(thread_id() // 32)


def block_id() -> Int32:
    """Return the block's index in the grid."""
    bid, _, _ = arch.block_idx()
    return bid


def num_blocks() -> Int32:
    """Return the number of blocks of the grid."""
    blocks, _, _ = arch.grid_dim()
    return blocks


def block_ids() -> tuple[Int32, Int32]:
    """Return the block's index in the grid, and the number of blocks."""
    return block_id(), num_blocks()
