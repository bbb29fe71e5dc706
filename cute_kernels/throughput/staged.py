"""What kernels share that fetch staged rows: which rows, when they are there, and the padding that goes with them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import ptx, sync
from ..route import local_range
from ..rows import zero_row


@cute.jit
def token_of(problem: cutlass.Constexpr, rank, item):
    """Token and rank of an item. A token's ranks follow each other, rotated, so that all links are busy all the time
    and no warp meets one rank only."""
    token = item // problem.world_size
    return token, (item + token + token // 4 + token // 16 + rank + 1) % problem.world_size


@cute.jit
def await_rows(problem: cutlass.Constexpr, ranks, known, source, token):
    """By a whole warp, before bulk copies of a staged row: 0 if it never came (reported), and the updated `known`, the
    bit mask of the ranks whose rows are all staged."""
    ready = Int32(1)
    if (known >> source) & 1 == 0:
        ready = Int32(0)
        if arch.lane_idx() == 0:
            if ranks.seen("staged", source):
                ready = Int32(2)
            elif ranks.wait("chunk", source * ranks.heap.chunks + token // problem.chunk_tokens, source, token):
                ready = Int32(1)
            # Bulk copies come after what was acquired.
            sync.fence_async()
        ready = arch.shuffle_sync(ready, 0)
        if ready == 2:
            known = known | (Int32(1) << source)
    return ready, known


@cute.jit
def source_row(problem: cutlass.Constexpr, ranks, x, source, token):
    """Address of a token's row: this rank's own lies in x."""
    base = x
    if source != ranks.rank:
        base = ranks.at(sync.select(ranks.peers, source), "rows")
    return base + Int64(token) * problem.row_bytes


@cute.jit
def clear_padding(problem: cutlass.Constexpr, ranks, offs, counts, rows, scalars, alignment, scalar: cutlass.Constexpr):
    """One warp of each block: zeroes the rows between each segment's last row and its padded end, and with `scalar`
    the scalars that go with them."""
    lane = arch.lane_idx()
    bid, _, _ = arch.block_idx()
    blocks, _, _ = arch.grid_dim()
    first_local, end_local = local_range(problem, ranks.rank)
    e = bid
    while e < end_local - first_local:
        count = ptx.ld_i32(counts + Int64(e) * 4)
        end = ptx.ld_i32(offs + Int64(e) * 4)
        row = end - ((count + alignment - 1) // alignment * alignment - count)
        while row < end:
            zero_row(problem.row_bytes, rows + Int64(row) * problem.row_bytes, lane)
            if const_expr(scalar):
                if lane == 0:
                    ptx.st_f32(scalars + Int64(row) * 4, Float32(0.0))
            row += 1
        e += blocks
