"""Rows and weights of ranks of other NVLink domains, which stagers hold for the ranks of their own. With one domain
these functions add nothing to a kernel."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import sync
from ..domains import is_near, slot_of, stager_of
from ..views import Floats, Records


def row_in(mask: Int32, token: Int32 | int) -> Int32:
    """Return the index of a token's row in its batch, which contains the rows of `mask`. `token` counts within the
    batch."""
    return Int32(arch.popc(mask & ((Int32(1) << token) - 1)))


@cute.jit
def await_relayed(
    ranks: sync.Ranks, source: Int32, token: Int32, ready: Int32, staged: Boolean
) -> tuple[Int32, Boolean]:
    """By a whole warp: wait for a token's row if its rank is in another domain. Return what `relayed_row` takes,
    2 × (bit mask of the tokens whose rows the batch has) + 1, or 0 if the row never arrived, and False; else what was
    given: 1, and whether the row is `staged` in this domain."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        if not is_near(ranks, source):
            staged = Boolean(False)
            if arch.lane_idx() == 0:
                batch = token // ranks.heap.problem.batch_tokens
                flag = ranks.view("relayed").at(source, batch)
                ready = Int32(sync.await_word(ranks, flag, source, token)) * 2 + 1
                if ready < 0:
                    ready = Int32(0)
                # Bulk copies come after what was acquired.
                sync.fence_async()
            ready = arch.shuffle_sync(ready, 0)
    return ready, staged


@cute.jit
def relayed_row(
    ranks: sync.Ranks, source: Int32, token: Int32, nbytes: cutlass.Constexpr[int], ready: Int32, at: Int64
) -> Int64:
    """Return the address of a token's row with its rank's stager; that of the row in this domain, `at`, if its rank is
    here. `ready`: what `await_relayed` gave."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        slot = slot_of(ranks, source)
        if slot > 0:
            batch = token // ranks.heap.problem.batch_tokens
            row = row_in(ready >> 1, token - batch * ranks.heap.problem.batch_tokens)
            rows = ranks.peer(stager_of(ranks, source)) + ranks.offsets("rows_in").at(slot - 1, batch)
            at = Records(rows, nbytes).at(row)
    return at


@cute.jit
def weights_of(ranks: sync.Ranks, source: Int32) -> Floats:
    """Return a source rank's weights: at that rank, or at its stager."""
    at = ranks.offsets("weights").base
    if const_expr(ranks.heap.problem.num_domains > 1):
        slot = slot_of(ranks, source)
        if slot > 0:
            at = ranks.offsets("weights_in").part(slot - 1).base
    return Floats(ranks.peer(stager_of(ranks, source)) + at)
