"""A kernel that sends rows over a wire, a batch at a time, to every rank: for tests of wires and of what may be made of
them. It is compiled, emulated and, where there are GPUs, run.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from cute_kernels import operation, sync
from cute_kernels.heap import Heap, Problem, records, words
from cute_kernels.internode.sending import word_of
from cute_kernels.internode.wire import copy_by_warp
from cute_kernels.launch import Kernel, RankArgs
from cute_kernels.marks import NUMBER_BITS
from cute_kernels.views import Ints, Records

WARPS = 2
BATCH_ROWS = 3
LAST = 1 << (NUMBER_BITS - 1)
"""Set in a batch's word, beside its number of rows, if the sender has no more."""


class BatchHeap(Heap):
    """A rank's heap. By [rank][batch]: batches on their way out; [rank][row]: rows that came; [rank][batch]: words."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        ranks, rows = problem.world_size, problem.max_tokens
        self.batches = max(1, -(-rows // BATCH_ROWS))
        self.take(
            outgoing=records(BATCH_ROWS * problem.row_bytes, ranks, self.batches),
            incoming=records(problem.row_bytes, ranks, rows),
            words=words(ranks, self.batches),
        )


def problem_of(world_size: int, hidden_size: int, dtype: str, max_tokens: int, wire: Any) -> Problem:
    """Every rank is a domain of its own."""
    domains = tuple((rank,) for rank in range(world_size))
    return Problem(world_size, (1,) * world_size, 1, hidden_size, dtype, max_tokens, domains, wire)


def depth_of(world_size: int) -> int:
    """Return the depth of an adversary's mailbox: fewer than an operation's puts."""
    return 4 * world_size


def batch_word(ranks: sync.Ranks, rows: Int32, last: Int32) -> Int64:
    """Return the word of a batch of this operation."""
    return word_of(ranks, Int64(rows) | (Int64(last) * LAST))


class BatchesArgs(NamedTuple):
    """Arguments of :class:`Batches`."""

    ranks: RankArgs
    x: Int64  # [W, max_tokens, H] rows for each rank
    counts: Ints  # [W] how many of them go
    out: Int64  # [W, max_tokens, H] rows from each rank
    came: Ints  # [W] how many of them came
    blocks: Int32


@dataclass(frozen=True)
class Batches(Kernel):
    """Warps deal the batches of all ranks among them, send theirs, and then deal the senders."""

    NAME, Args = "ep_test_batches", BatchesArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * WARPS, 1, 1)}

    @cute.kernel
    def kernel(self, args: BatchesArgs) -> None:
        wire = self.problem.wire
        problem, heap = self.problem, BatchHeap(self.problem)
        ranks = sync.Ranks(heap, args.ranks)
        world_size, batches = problem.world_size, heap.batches
        row_bytes = problem.row_bytes
        tid, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        lane = arch.lane_idx()
        warp = arch.make_warp_uniform(tid // 32)
        if block == 0:
            operation.say_hello(ranks, tid, 32 * WARPS, False)

        item = Int32(warp * args.blocks + block)
        while item < world_size * batches:
            peer = item // batches
            batch = item - peer * batches
            total = args.counts[peer]
            first = batch * BATCH_ROWS
            rows = total - first
            last = Int32(rows <= BATCH_ROWS)
            if rows > BATCH_ROWS:
                rows = Int32(BATCH_ROWS)
            word = ranks.offsets("words").at(ranks.rank, batch)
            if rows > 0:
                given = Records(args.x, row_bytes, problem.max_tokens).at(peer, first)
                here = ranks.offsets("outgoing").at(peer, batch)
                copy_by_warp(ranks.own + here, given, rows * row_bytes)
                there = ranks.offsets("incoming").at(ranks.rank, first)
                wire.put_signal(ranks, peer, there, here, rows * row_bytes, word, batch_word(ranks, rows, last))
            elif batch == 0 and lane == 0:
                wire.put_value(ranks, peer, word, batch_word(ranks, Int32(0), Int32(1)))
            item += args.blocks * WARPS

        source = Int32(warp * args.blocks + block)
        while source < world_size:
            total, batch, more = Int32(0), Int32(0), Int32(1)
            while more != 0:
                found = Int32(-1)
                word = ranks.offsets("words").at(source, batch)
                if lane == 0:
                    found = Int32(sync.await_word(ranks, ranks.own + word, source, batch))
                wire.arrived(ranks, word, lane == 0)
                found = arch.shuffle_sync(found, 0)
                more = Int32(0)
                if found >= 0:
                    rows = found & (LAST - 1)
                    to = Records(args.out, row_bytes, problem.max_tokens).at(source, batch * BATCH_ROWS)
                    copy_by_warp(to, ranks.view("incoming").at(source, batch * BATCH_ROWS), rows * row_bytes)
                    total += rows
                    more = Int32((found & LAST) == 0)
                batch += 1
            if lane == 0:
                args.came[source] = total
            source += args.blocks * WARPS
        operation.finish(ranks, args.blocks)
