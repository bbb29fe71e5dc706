"""The module that kernels import as `cutlass.cute.arch`."""

from __future__ import annotations

from typing import Any

from . import machine
from .numbers import Int32, Int64, Uint32
from .threads import WARP, Barrier, collective, look_again, me, wait

WARP_SIZE = WARP


def thread_idx() -> tuple[Int32, int, int]:
    return Int32(me().index), 0, 0


def block_idx() -> tuple[Int32, int, int]:
    return Int32(me().block.index), 0, 0


def block_dim() -> tuple[Int32, int, int]:
    return Int32(me().block.threads), 1, 1


def grid_dim() -> tuple[Int32, int, int]:
    return Int32(me().block.blocks), 1, 1


def lane_idx() -> Int32:
    return Int32(me().index % WARP)


def lanemask_lt() -> Uint32:
    return Uint32((1 << me().index % WARP) - 1)


def make_warp_uniform(value: Any) -> Int32:
    return Int32(value)


def popc(value: Any) -> Int32:
    return Int32((int(value) & ((1 << getattr(type(value), "bits", 32)) - 1)).bit_count())


def globaltimer() -> Int64:
    return Int64(machine.clock)


# Collectives: from the arguments of all lanes to the results of all.

shuffle_sync = collective(lambda lanes: [lanes[int(lane[1]) & 31][0] for lane in lanes])
shuffle_sync_up = collective(lambda lanes: [lanes[max(i - int(lane[1]), 0)][0] if i >= lane[1] else lane[0]
                                            for i, lane in enumerate(lanes)])  # fmt: skip
shuffle_sync_bfly = collective(lambda lanes: [lanes[i ^ int(lane[1])][0] for i, lane in enumerate(lanes)])
vote_any_sync = collective(lambda lanes: [any(bool(lane[0]) for lane in lanes)] * WARP)
vote_all_sync = collective(lambda lanes: [all(bool(lane[0]) for lane in lanes)] * WARP)
vote_ballot_sync = collective(
    lambda lanes: [Int32(sum(bool(lane[0]) << i for i, lane in enumerate(lanes)))] * WARP
)  # fmt: skip
sync_warp = collective(lambda lanes: [None] * WARP)


@collective
def match_sync(lanes: list[tuple[Any, ...]]) -> list[Any]:
    values = [int(lane[1]) for lane in lanes]
    return [Uint32(sum((one == other) << i for i, other in enumerate(values))) for one in values]


@collective
def warp_redux_sync(lanes: list[tuple[Any, ...]]) -> list[Any]:
    kind, how = type(lanes[0][0]), lanes[0][1]
    values = [int(lane[0]) for lane in lanes]
    if how == "or":
        total = 0
        for value in values:
            total |= value
    else:
        total = {"add": sum, "max": max, "min": min}[how](values)
    return [kind(total)] * WARP


# Barriers of a block.


def sync_threads() -> None:
    wait(Barrier(0, 0, True))


def barrier(barrier_id: int, number_of_threads: int) -> None:
    wait(Barrier(barrier_id, number_of_threads, True))


def barrier_arrive(barrier_id: int, number_of_threads: int) -> None:
    wait(Barrier(barrier_id, number_of_threads, False))


# Dependent launches.


def griddepcontrol_wait() -> None:
    """The kernel before has ended."""
    while not all(thread.dead for thread in me().block.after):
        look_again()


def griddepcontrol_launch_dependents() -> None:
    me().triggered = True


# mbarriers and bulk copies. Loads are complete at once; some stores, drawn, as late as the thread's waits allow.


class Phases:
    """An mbarrier: a phase ends when all threads arrived and all bytes came."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def expect(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.pending -= 1
        assert self.pending >= 0, "more threads arrive at an mbarrier than it counts"

    def came(self, nbytes: int) -> None:
        self.bytes -= nbytes
        if not self.pending and not self.bytes:
            self.phase ^= 1
            self.pending = self.count


def _key(pointer: Any) -> tuple[int, int]:
    return id(pointer.view), pointer.first


def phases(pointer: Any) -> Phases:
    """The mbarrier at a place in shared memory, which must have been initialized."""
    return me().block.mbarriers[_key(pointer)]


def mbarrier_init(pointer: Any, count: int) -> None:
    me().block.mbarriers[_key(pointer)] = Phases(count)


def mbarrier_arrive_and_expect_tx(pointer: Any, nbytes: Any) -> None:
    phases(pointer).expect(int(nbytes))


def mbarrier_wait(pointer: Any, phase: Any) -> None:
    while phases(pointer).phase == int(phase) & 1:
        look_again()


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: memory is ordered here, and waits are complete at once."""


class Store:
    """A bulk store. `words`: in shared memory at first, then those that it has read."""

    def __init__(self, address: Any, words: memoryview) -> None:
        self.address, self.words, self.has_read, self.written = int(address), words, False, False

    def read(self) -> None:
        if not self.has_read:
            self.words, self.has_read = memoryview(bytes(self.words)).cast("I"), True

    def write(self) -> None:
        self.read()
        if not self.written:
            machine.memory().store_words(self.address, self.words, 16)
            self.written = True


def start_store(address: Any, words: memoryview) -> None:
    """In the thread's current bulk group."""
    store = Store(address, words)
    if machine.draw.random() < 0.5:
        store.write()
    me().stores[-1].append(store)


def cp_async_bulk_commit_group() -> None:
    me().stores.append([])


def cp_async_bulk_wait_group(most: int, read: bool = False) -> None:
    """Until no more than `most` of the thread's groups, the latest ones, have stores that are not complete, or, with
    `read`, that may still read shared memory."""
    groups = me().stores
    ended = len(groups) - 1 - most  # the last group is not committed
    for store in [store for group in groups[: max(ended, 0)] for store in group]:
        if read:
            store.read()
        else:
            store.write()
    if not read:
        del groups[: max(ended, 0)]


mbarrier_init_fence = nothing
fence_proxy = fence_acq_rel_sys = nothing


def inline_ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    """The instructions that kernels write themselves."""
    memory, given = machine.memory(), read_only_args
    if "volatile" in text:
        assert me().together, "lanes of a line go apart before they load or store it"
    if text.startswith("ld.volatile.global.v4"):
        return tuple(Uint32(word) for word in memory.load_words(given[0], 4, 16))
    if text.startswith("st.volatile.global.v4"):
        return memory.store_words(given[0], given[1:5], 16)
    if text.startswith("st.global.v2"):
        return memory.store_words(given[0], given[1:3], 8)
    if text.startswith("mov.b64"):
        return given[0]
    if text.startswith("atom.relaxed.gpu.global.add.u32"):
        before = memory.load(given[0])
        memory.store(given[0], before + 1)
        return Int32(before)
    if text.startswith("shf.r.wrap"):
        word, by = int(given[0]) & 0xFFFFFFFF, int(given[1]) & 31
        return Int32(word >> by | word << (32 - by))
    if text.startswith("nanosleep"):
        for _ in range(machine.draw.randint(1, 12)):
            look_again()
        return None
    if "nanosleep" in text:
        return None
    raise NotImplementedError(text)
