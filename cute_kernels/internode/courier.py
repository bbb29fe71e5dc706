"""What delivers the puts of an `Adversary`: late, in pieces, in an order of its own, a word only behind its own put."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import EPOCH
from ..launch import Kernel, RankArgs
from .wire import BYTES, HERE, RANK, THERE, VALUE, WORD, record_of


class CourierArgs(NamedTuple):
    ranks: RankArgs
    epoch: Int64  # of the operation that it serves
    seed: Int32
    blocks: Int32


@dataclass(frozen=True)
class Courier(Kernel):
    """Blocks of one warp, beside the kernels of one operation on the same rank, until that has ended and nothing is
    left to deliver; one launch at a time. Each block has the records whose number leaves its own when it is divided by
    the number of blocks."""

    heap: Any  # layout, with room for the records
    depth: int

    NAME, Args = "ep_courier", CourierArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: CourierArgs) -> None:
        ranks = sync.Ranks(self.heap, args.ranks)
        block, _, _ = arch.block_idx()
        draw = Uint32(args.seed + block * 40503)
        going = Int32(2)  # one more round when the operation has ended: all that it has posted is there
        while going > 0:
            ended = ptx.ld_acquire_gpu(ranks.own + EPOCH * 8) > args.epoch
            if arch.vote_all_sync(ended):
                going -= 1
            record = Int32(block)
            while record < self.depth:
                draw = Uint32(draw * 1664525 + 1013904223)
                state = arch.shuffle_sync(Int32(ptx.ld_acquire_gpu(record_of(ranks, record))), 0)
                # What lane 0 acquired comes before what the others read.
                arch.sync_warp()
                if state & 1 != 0 and (going < 2 or (draw >> 29) == 0):
                    deliver(ranks, record_of(ranks, record), Int64(state), draw)
                record += args.blocks


@cute.jit
def deliver(ranks: sync.Ranks, record: Int64, state: Int64, draw: Uint32) -> None:
    """By a whole warp: the bytes from somewhere in the middle, around to there, then the word."""
    there, here = ptx.ld_u64(record + THERE * 8), ptx.ld_u64(record + HERE * 8)
    nbytes = Int32(ptx.ld_u64(record + BYTES * 8))
    word, value = ptx.ld_u64(record + WORD * 8), ptx.ld_u64(record + VALUE * 8)
    heap = ranks.peer(Int32(ptx.ld_u64(record + RANK * 8)))
    vectors = nbytes // 16
    i = Int32(arch.lane_idx())
    while i < vectors:
        if (draw >> (i & 15)) & 1 != 0:  # some lanes are later than others
            arch.inline_ptx("nanosleep.u32 200;")
        at = Int64((i + Int32(draw >> 8)) % vectors) * 16
        ptx.st_v4(heap + there + at, ptx.ld_v4(ranks.own + here + at))
        i += arch.WARP_SIZE
    # The stores of the whole warp come before lane 0's release.
    arch.sync_warp()
    if arch.lane_idx() == 0:
        ptx.st_release_sys(heap + word, value)
        ptx.st_release_gpu(record, state + 1)
    arch.sync_warp()
