"""A wire and a kernel for tests: puts between ranks that are delivered late, in pieces and out of order.

`Adversary` takes the place of NVSHMEM in a `Problem`. `Courier` delivers its puts while an operation runs; a put's word
is set after the bytes of that put, and nothing else is ordered. `Gate` holds an operation back until its courier runs.
"""

# No "from __future__ import annotations": the kernels' annotations are read as types.

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute import arch

from cute_kernels import ptx, sync
from cute_kernels.heap import EPOCH, Heap
from cute_kernels.internode.wire import Wire, copy_by_block, copy_by_warp, count_put
from cute_kernels.launch import Kernel, RankArgs
from cute_kernels.sync import Ranks

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
"""Part of what compiled kernels are named by: the cache of `cute_kernels.jit` knows only its own package's sources."""

STATE, THERE, HERE, BYTES, WORD, VALUE, RANK, TAKEN = range(8)
RECORD_WORDS = 8
"""Words (8 bytes each) of what is left for a courier. The state is twice as large as the number of puts that were left
there and delivered, and one more while one is to be delivered; behind it are the arguments of that put, and the state
in which a courier took it last."""
POSTED, LATEST, CAME = 0, 1, 2
"""Words of a mailbox before its records: how many puts were left there, the epoch of the last operation that has a
courier of its own, and, for each of a courier's blocks (6 at most), one more than the epoch of the last operation for
which it has come."""
HEADER_WORDS = 8


def mailbox_bytes(depth: int) -> int:
    return 8 * (HEADER_WORDS + depth * RECORD_WORDS)


@dataclass(frozen=True)
class Adversary(Wire):
    """A wire that delivers nothing itself. It leaves every put in a mailbox of the sender, and a :class:`Courier`
    delivers it as late, and as much out of order, as the contract of :class:`Wire` allows.

    Ranks map each other's memory. A mailbox holds `depth` puts; its address is the last word of the table of heaps. If
    that word is 0, puts are plain stores, so that a kernel can be launched once, and thereby loaded, before any courier
    runs: loading a kernel may wait for kernels that are running.
    """

    depth: int
    source: str = field(default=SOURCE, init=False)

    def put_signal(
        self, ranks: Ranks, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64, value: Int64
    ) -> None:
        post_by_warp(self.depth, ranks, (there, here, Int64(nbytes), word, value, Int64(rank)))

    def put_signal_by_block(
        self, ranks: Ranks, threads: int, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64,
        value: Int64,
    ) -> None:  # fmt: skip
        post_by_block(self.depth, threads, ranks, (there, here, Int64(nbytes), word, value, Int64(rank)))

    def put_value(self, ranks: Ranks, rank: Int32, word: Int64, value: Int64) -> None:
        none = Int64(0)
        post(self.depth, ranks, (none, none, none, word, value, Int64(rank)))


def mailbox_of(ranks: Ranks) -> Int64:
    """Behind the addresses of heaps and the places of ranks (places.py)."""
    return ptx.ld_constant(ranks.peers + Int64(3 * ranks.world_size) * 8)


@cute.jit
def post(depth: cutlass.Constexpr[int], ranks: Ranks, words: Any) -> None:
    """By one thread: leaves a record, when all that were left there before have been delivered. Without a mailbox the
    word is set, behind bytes that others have copied."""
    mailbox = mailbox_of(ranks)
    _, _, _, word, value, rank = words
    count_put(ranks, Int32(rank), Int32(0))
    if mailbox == 0:
        ptx.st_release_sys(ranks.peer(Int32(rank)) + word, value)
    else:
        ticket = ptx.atom_inc(mailbox + POSTED * 8)
        record = record_of(mailbox, ticket % depth)
        before = Int64(ticket // depth) * 2
        while ptx.ld_acquire_gpu(record) != before:
            pass
        for i in cutlass.range_constexpr(len(words)):
            ptx.st_u64(record + (THERE + i) * 8, words[i])
        ptx.st_release_gpu(record, before + 1)


@cute.jit
def post_by_warp(depth: cutlass.Constexpr[int], ranks: Ranks, words: Any) -> None:
    there, here, nbytes, _, _, rank = words
    if mailbox_of(ranks) == 0:
        copy_by_warp(ranks.peer(Int32(rank)) + there, ranks.own + here, Int32(nbytes))
    # The stores of the whole warp come before lane 0's release.
    arch.sync_warp()
    if arch.lane_idx() == 0:
        post(depth, ranks, words)


@cute.jit
def post_by_block(
    depth: cutlass.Constexpr[int], threads: cutlass.Constexpr[int], ranks: Ranks, words: Any
) -> None:  # fmt: skip
    tid, _, _ = arch.thread_idx()
    there, here, nbytes, _, _, rank = words
    if mailbox_of(ranks) == 0:
        copy_by_block(threads, ranks.peer(Int32(rank)) + there, ranks.own + here, Int32(nbytes))
    # The stores of the whole block come before its first thread's release.
    arch.sync_threads()
    if tid == 0:
        post(depth, ranks, words)


def record_of(mailbox: Int64, index: Int32) -> Int64:
    return mailbox + HEADER_WORDS * 8 + Int64(index) * (RECORD_WORDS * 8)


# ---------------------------------------------------------------------- delivery

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
        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
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
        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
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
