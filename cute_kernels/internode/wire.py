"""Access to ranks whose memory is not mapped: the operations that kernels may use, and their guarantees.

A rank's heap is symmetric memory, the same on all ranks, so an offset names a place on each of them. `put_signal`
copies bytes of this rank's heap to another rank's heap and then sets a word there, which has no other writer. A thread
that acquires the word sees the bytes. `put_value` only sets a word. The order and delay in which puts and words of one
rank arrive are not specified. A put may be split, and may read its source at any time before its word arrives.

Kernels rely on these properties:

- A batch of rows has its own place and word, for each sender and bank. There are no sums, counters or queues.
- The word contains the operation's epoch and a number that describes the contents (for throughput kernels a bit mask of
  the tokens whose rows the batch has). A word of an earlier operation is therefore no batch of this one, and a reader
  knows which rows have arrived.
- A receiver waits for all that is sent to it before its operation ends, and then sends its hello of the next operation
  by `put_value`. A rank that has seen the hello of operation e may therefore overwrite, in e + 1, what its puts of
  operation e - 1 read and wrote.
"""

import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint64, const_expr
from cutlass.cute import arch

from .. import ptx
from ..barriers import whole_block
from ..copies import lowest
from ..ids import thread_id
from ..sync import Ranks

BUNDLE = 32
"""The most latency rows in one put: one for each lane of a warp."""

VECTORS = 4
"""Number of vectors that a thread loads before it stores them."""

OLDEST = (3, 7)
"""The first version of NVSHMEM whose device library holds all that is called here."""
NVSHMEM_SIGNAL_SET, NVSHMEM_CMP_EQ = 9, 0


@dataclass(frozen=True)
class Wire:
    """Whatever moves the bytes. `there` and `word` are offsets in the heap of `rank`, `here` one in this rank's; all of
    them and `nbytes` are multiples of 16, but words of 8.

    `late`: puts arrive at times of their own, and not before whatever is released after them. Those are counted, for
    each rank that they go to (`rejected.settle`).

    `rows`: the most rows of the latency kernels that go to a rank in one put, with one word. More than 1, at most
    `BUNDLE`, where a put costs more than it takes a block to put the rows together (docs/domains.md)."""

    late: ClassVar[bool] = True
    rows: int = field(default=1, kw_only=True)

    def put_signal(
        self, ranks: Ranks, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64, value: Int64
    ) -> None:
        """By a whole warp, which has written the source itself. Does not wait for the bytes to leave."""
        raise NotImplementedError

    def put_signal_by_block(
        self, ranks: Ranks, threads: int, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64,
        value: Int64,
    ) -> None:  # fmt: skip
        """Do the same by a whole block, whose threads have written the source and then met at a barrier."""
        raise NotImplementedError

    def put_value(self, ranks: Ranks, rank: Int32, word: Int64, value: Int64) -> None:
        """By one thread."""
        raise NotImplementedError

    def arrived(self, ranks: Ranks, word: Int64, came: Boolean) -> None:
        """By a whole warp, each of whose lanes has acquired what stands in a `word` of this rank, if its `came` says
        so: whatever else it takes for the warp to see what came with these words."""


@cute.jit
def count_put(ranks: Ranks, rank: Int32, number: Int32) -> None:
    """By thread 0 of those that put something to `rank`."""
    if const_expr(ranks.heap.problem.num_domains > 1):
        if number == 0:
            ptx.atom_inc(ranks.view("puts").at(rank))


# ---------------------------------------------------------------------- NVLink


@dataclass(frozen=True)
class Nvlink(Wire):
    """Stores into memory that this rank maps."""

    late = False

    def put_signal(
        self, ranks: Ranks, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64, value: Int64
    ) -> None:
        heap = ranks.peer(rank)
        copy_by_warp(heap + there, ranks.own + here, nbytes)
        signal_by_warp(heap + word, value)

    def put_signal_by_block(
        self, ranks: Ranks, threads: int, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64,
        value: Int64,
    ) -> None:  # fmt: skip
        heap = ranks.peer(rank)
        copy_by_block(threads, heap + there, ranks.own + here, nbytes)
        signal_by_block(heap + word, value)

    def put_value(self, ranks: Ranks, rank: Int32, word: Int64, value: Int64) -> None:
        ptx.st_relaxed_sys(ranks.peer(rank) + word, value)


@cute.jit
def copy_by_warp(there: Int64, here: Int64, nbytes: Int32) -> None:
    """By a whole warp, from where it, or a thread that it has acquired from, has written."""
    # Every lane copies what any lane of the warp has written.
    arch.sync_warp()
    for at in cutlass.range(arch.lane_idx() * 16, nbytes, 32 * 16):
        ptx.st_v4(there + at, ptx.ld_v4(here + at))


@cute.jit
def copy_by_block(threads: cutlass.Constexpr[int], there: Int64, here: Int64, nbytes: Int32) -> None:
    """By a whole block: several loads of each thread are in flight together."""
    for at in cutlass.range(thread_id() * 16, nbytes, VECTORS * whole_block(threads) * 16):
        # Behind the end the last vector is read once more.
        offsets = [at + i * (threads * 16) for i in range(VECTORS)]
        words = [ptx.ld_v4(here + cutlass.min(offset, nbytes - 16)) for offset in offsets]
        for i in cutlass.range_constexpr(VECTORS):
            if offsets[i] < nbytes:
                ptx.st_v4(there + offsets[i], words[i])


@cute.jit
def signal_by_block(address: Int64, value: Int64) -> None:
    # The stores of the whole block come before the release.
    arch.sync_threads()
    if thread_id() == 0:
        ptx.st_release_sys(address, value)


@cute.jit
def signal_by_warp(address: Int64, value: Int64) -> None:
    # The stores of the whole warp come before lane 0's release.
    arch.sync_warp()
    if arch.lane_idx() == 0:
        ptx.st_release_sys(address, value)


# ---------------------------------------------------------------------- NVSHMEM


@dataclass(frozen=True)
class Nvshmem(Wire):
    """NVSHMEM's own calls, linked from its device library (a file of LLVM bitcode, see `find_library`). Ranks have the
    numbers that NVSHMEM gave them, and heaps lie in its memory."""

    library: str

    def put_signal(
        self, ranks: Ranks, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64, value: Int64
    ) -> None:
        calls = _calls(self.library)
        # What reads the source is no thread of this GPU: each lane's stores come before the put.
        arch.fence_acq_rel_sys()
        count_put(ranks, rank, Int32(arch.lane_idx()))
        arch.sync_warp()
        calls.put_signal(
            ranks.own + there, ranks.own + here, Uint64(nbytes), ranks.own + word, Uint64(value),
            Int32(NVSHMEM_SIGNAL_SET), rank,
        )  # fmt: skip

    def put_signal_by_block(
        self, ranks: Ranks, threads: int, rank: Int32, there: Int64, here: Int64, nbytes: Int32, word: Int64,
        value: Int64,
    ) -> None:  # fmt: skip
        fence_by_block()
        count_put(ranks, rank, Int32(thread_id()))
        _calls(self.library).put_signal_by_block(
            ranks.own + there, ranks.own + here, Uint64(nbytes), ranks.own + word, Uint64(value),
            Int32(NVSHMEM_SIGNAL_SET), rank,
        )  # fmt: skip

    def put_value(self, ranks: Ranks, rank: Int32, word: Int64, value: Int64) -> None:
        count_put(ranks, rank, Int32(0))
        _calls(self.library).put(ranks.own + word, Uint64(value), rank)

    def arrived(self, ranks: Ranks, word: Int64, came: Boolean) -> None:
        test_by_warp(self.library, ranks.own + word, came)


@cute.jit
def fence_by_block() -> None:
    """Order the stores of all threads of the block before a put, whose source is read by no thread of this GPU. One
    thread fences for all, because fences of a multiprocessor wait for each other."""
    # Every thread's stores come before the one's fence.
    arch.sync_threads()
    if thread_id() == 0:
        arch.fence_acq_rel_sys()
    # The fence comes before any thread's put.
    arch.sync_threads()


@cute.jit
def test_by_warp(library: cutlass.Constexpr[str], address: Int64, came: Boolean) -> None:
    """Let one lane ask NVSHMEM for a word that has arrived, for all lanes that have one. This makes data visible where
    a network writes data and words by different paths. Each call fences, and the lanes' calls would be serialized."""
    lanes = Int32(arch.vote_ballot_sync(came))
    if arch.lane_idx() == lowest(lanes) and lanes != 0:
        value = Uint64(ptx.ld_relaxed_sys(address))
        _calls(library).test(address, Int32(NVSHMEM_CMP_EQ), value)
    # What that lane has made visible comes before what the others read.
    arch.sync_warp()


@dataclass(frozen=True)
class _Calls:
    """NVSHMEM's functions, on addresses in this rank's heap that stand for the same offset in `pe`'s."""

    put_signal: Any
    put_signal_by_block: Any
    put: Any
    test: Any


@functools.lru_cache
def _calls(library: str) -> _Calls:
    source = cute.BitCode(library)
    # Not inlined: a put is hundreds of instructions for every kind of network, and takes registers of its own.

    @cute.extern(name="nvshmemx_putmem_signal_nbi_warp", source=source, inline=False)
    def put_signal(
        there: Int64, here: Int64, nbytes: Uint64, word: Int64, value: Uint64, operation: Int32, pe: Int32
    ) -> None: ...

    @cute.extern(name="nvshmemx_putmem_signal_nbi_block", source=source, inline=False)
    def put_signal_by_block(
        there: Int64, here: Int64, nbytes: Uint64, word: Int64, value: Uint64, operation: Int32, pe: Int32
    ) -> None: ...

    @cute.extern(name="nvshmem_uint64_p", source=source, inline=False)
    def put(word: Int64, value: Uint64, pe: Int32) -> None: ...

    @cute.extern(name="nvshmem_uint64_test", source=source, inline=False)
    def test(word: Int64, comparison: Int32, value: Uint64) -> Int32:  # type: ignore[empty-body]
        ...

    return _Calls(put_signal, put_signal_by_block, put, test)


def find_library() -> str | None:
    """Return the path of NVSHMEM's device library for GPUs of capability 9.0 and newer, as the wheels
    nvidia-nvshmem-cu12 and -cu13 install it; None if there is none, or if the first one found is older than 3.7."""
    for folder in map(Path, sys.path):
        path = folder / "nvidia" / "nvshmem" / "lib" / "libnvshmem_device_sm_90.bc"
        if path.is_file():
            found = [re.search(r"-(\d+)\.(\d+)", info.name) for info in folder.glob("nvidia_nvshmem_cu*.dist-info")]
            versions = [(int(version[1]), int(version[2])) for version in found if version is not None]
            return str(path) if all(version >= OLDEST for version in versions) else None
    return None
