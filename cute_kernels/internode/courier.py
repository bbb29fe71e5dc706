"""What delivers the puts of an `Adversary`: late, in pieces, in an order of its own, a word only behind its own put."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute import arch

from .. import ptx, sync
from ..heap import EPOCH, Heap
from ..launch import Kernel, RankArgs
from .wire import BYTES, CAME, HERE, LATEST, RANK, TAKEN, THERE, VALUE, WORD, mailbox_of, record_of

ROUNDS = 12
"""In how many looks at all records, behind the operation's end, the last ones are delivered."""
PATIENCE = 4
"""How many deadlines of a wait a courier stays at most: an operation that ends at all has ended by then."""


ENDED, FOLLOWED, PATIENT = 1, 2, 3
"""Why a courier went: its operation had ended, the next one had begun, or it had been there for too long."""


class CourierArgs(NamedTuple):
    ranks: RankArgs
    served: Int64  # address of the epoch of the operation that it serves
    log: Int64  # 4 words: when it came and went (globaltimer), how often it looked, why it went
    seed: Int32
    blocks: Int32


@dataclass(frozen=True)
class Courier(Kernel):
    """Blocks of one warp, beside the kernels of one operation on the same rank, until that has ended and nothing is
    left to deliver, or until the next operation has begun, which has a courier of its own. Each block has the records
    whose number leaves its own when it is divided by the number of blocks.

    They want as much of a multiprocessor to be shared memory as the kernels of few tokens do, beside which they run: a
    block may have to wait for a multiprocessor whose memory is shared out otherwise."""

    depth: int

    NAME, Args = "ep_courier", CourierArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1), "preferred_smem_carveout": 100}

    @cute.kernel
    def kernel(self, args: CourierArgs) -> None:
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        block, _, _ = arch.block_idx()
        mailbox, served = mailbox_of(ranks), ptx.ld_u64(args.served)
        draw = Uint32(args.seed + block * 40503 + Int32(served) * 7919)
        start = Int64(arch.globaltimer())
        if arch.lane_idx() == 0 and served != 0:
            ptx.st_release_gpu(mailbox + (CAME + block) * 8, served + 1)
        going, looks, why = Int32(ROUNDS), Int32(0), Int32(ENDED)
        while going > 0:
            looks += 1
            if arch.vote_all_sync(ptx.ld_acquire_gpu(ranks.own + EPOCH * 8) > served):
                going -= 1
            # One that serves no operation (0) is followed by none.
            followed = served != 0 and ptx.ld_acquire_gpu(mailbox + LATEST * 8) > served
            if arch.vote_any_sync(followed):
                going, why = Int32(0), Int32(FOLLOWED)
            if arch.vote_any_sync(arch.globaltimer() - start > PATIENCE * ranks.timeout_ns):
                going, why = Int32(0), Int32(PATIENT)
            record = Int32(block)
            while record < self.depth and going > 0:
                draw = Uint32(draw * 1664525 + 1013904223)
                state = arch.shuffle_sync(Int32(ptx.ld_acquire_gpu(record_of(mailbox, record))), 0)
                # What lane 0 acquired comes before what the others read.
                arch.sync_warp()
                if state & 1 != 0 and (going == 1 or (draw >> 29) == 0):
                    deliver(ranks, record_of(mailbox, record), Int64(state), draw)
                record += args.blocks
        if block == 0 and arch.lane_idx() == 0:
            for i, word in enumerate((start, Int64(arch.globaltimer()), Int64(looks), Int64(why))):
                ptx.st_u64(args.log + i * 8, word)


class GateArgs(NamedTuple):
    ranks: RankArgs
    served: Int64  # address of the epoch of the operation that comes next
    couriers: Int32  # blocks of its courier
    blocks: Int32


@dataclass(frozen=True)
class Gate(Kernel):
    """Comes before an operation in its stream, and ends when the operation's courier has come. An operation that began
    before might take every multiprocessor, and wait for what only that courier delivers."""

    NAME, Args = "ep_courier_gate", GateArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: GateArgs) -> None:
        ranks = sync.Ranks(Heap(self.problem), args.ranks)
        if arch.lane_idx() < args.couriers:
            served, start = ptx.ld_u64(args.served), Int64(arch.globaltimer())
            came = mailbox_of(ranks) + (CAME + arch.lane_idx()) * 8
            waiting = True
            while waiting:
                waiting = ptx.ld_acquire_gpu(came) <= served
                if arch.globaltimer() - start > PATIENCE * ranks.timeout_ns:
                    waiting = False


@cute.jit
def deliver(ranks: sync.Ranks, record: Int64, state: Int64, draw: Uint32) -> None:
    """By a whole warp, unless another courier does: the bytes from somewhere in the middle, around to there, then the
    word."""
    before = Int64(0)
    if arch.lane_idx() == 0:
        before = ptx.atom_claim(record + TAKEN * 8, state)
    if arch.shuffle_sync(Int32(before), 0) < Int32(state):
        carry(ranks, record, draw)
        # The stores of the whole warp come before lane 0's release.
        arch.sync_warp()
        if arch.lane_idx() == 0:
            heap = ranks.peer(Int32(ptx.ld_u64(record + RANK * 8)))
            ptx.st_release_sys(heap + ptx.ld_u64(record + WORD * 8), ptx.ld_u64(record + VALUE * 8))
            ptx.st_release_gpu(record, state + 1)
    arch.sync_warp()


@cute.jit
def carry(ranks: sync.Ranks, record: Int64, draw: Uint32) -> None:
    there, here = ptx.ld_u64(record + THERE * 8), ptx.ld_u64(record + HERE * 8)
    vectors = Int32(ptx.ld_u64(record + BYTES * 8)) // 16
    heap = ranks.peer(Int32(ptx.ld_u64(record + RANK * 8)))
    i = Int32(arch.lane_idx())
    while i < vectors:
        if (draw >> (i & 15)) & 1 != 0:  # some lanes are later than others
            arch.inline_ptx("nanosleep.u32 200;")
        at = Int64((i + Int32(draw >> 8)) % vectors) * 16
        ptx.st_v4(heap + there + at, ptx.ld_v4(ranks.own + here + at))
        i += arch.WARP_SIZE
