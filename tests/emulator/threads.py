"""Threads, warps and blocks as greenlets, and the scheduler that lets warps go on in random order.

A warp goes on until each of its lanes waits: for a barrier, for the other lanes in a collective, or for something that
another thread will write, in which case it looks again in its next turn.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet

from . import machine
from .memory import SharedArray

WARP = 32
QUIET_TURNS = 300
"""After so many rounds in which threads did nothing but look again, they look in vain."""


class Yield:
    """The thread looks again later."""


@dataclasses.dataclass
class Pause:
    """The thread goes on after so many turns of its warp."""

    turns: int


ACCESSES, TURNS = 60, 12
"""The most accesses of all threads to memory between two pauses of some, and the most turns of one."""


@dataclasses.dataclass
class Collective:
    """A lane's part of an operation of its whole warp; `combine` makes the results of all from the arguments of all."""

    place: tuple[Any, int]
    combine: Callable[[list[tuple[Any, ...]]], list[Any]]
    values: tuple[Any, ...]


@dataclasses.dataclass
class Barrier:
    """A barrier of a block: its `number`; `threads` take part, 0: all. `waits`: the thread does not only arrive."""

    number: int
    threads: int
    waits: bool


class Block:
    def __init__(self, index: int, blocks: int, threads: int, after: list[Thread], late: int, uneven: int) -> None:
        self.index, self.blocks, self.threads = index, blocks, threads
        self.shared: list[Any] = []
        self.arrived: dict[int, list[tuple[Thread, bool]]] = {}
        self.mbarriers: dict[Any, Any] = {}
        self.counted: list[bool] = []  # of `barrier_count`
        self.unfenced: dict[int, Thread] = {}  # chunks of shared memory that a copy has written, and its thread
        self.started: dict[tuple[int, int], Any] = {}  # operands of products of four warps, in their order
        self.after = after  # threads of the kernel that this one's launch depends on
        self.late = late  # rounds that it starts later than it may
        self.uneven = uneven  # the most rounds that one of its warps misses at a time

    def may_start(self) -> bool:
        return all(thread.dead or thread.triggered for thread in self.after)


class Thread(greenlet):
    """One GPU thread. `state` says what it waits for; None: it can go on."""

    def __init__(self, body: Callable[[], None], block: Block, index: int) -> None:
        super().__init__(body)
        self.block, self.index = block, index
        self.state: Any = None
        self.result: Any = None
        self.began = self.triggered = False
        self.missing = 0  # rounds that its warp misses
        self.together = False  # with all lanes of its warp: no access to memory since they met in a collective
        self.allocated = 0  # arrays of shared memory that it has come to
        self.stores: list[list[Any]] = [[]]  # bulk stores of each group that is not known to be complete
        self.copies: list[list[Any]] = [[]]  # asynchronous copies of 16 bytes, likewise
        self.products: list[Any] = []  # products of four warps that are not known to be complete
        self.started = 0  # of them

    def go_on(self) -> bool:
        """Returns whether it did more than look again."""
        looked = isinstance(self.state, Yield)
        result, self.result = self.result, None
        self.state = self.switch(result) if self.began else self.switch()
        self.began = True
        return self.dead or not (looked and isinstance(self.state, Yield))


def me() -> Thread:
    return getcurrent()  # type: ignore[return-value]


def wait(state: Any) -> Any:
    """Hands over to the scheduler; returns what comes of it."""
    return me().parent.switch(state)


def look_again() -> None:
    wait(Yield())


def pause() -> None:
    """Before an access to memory: now and then stop a lane there, while the other lanes of its warp go on to their next
    collective. Lanes that a collective lets go are together up to their next access."""
    thread = me()
    if isinstance(thread, Thread):
        thread.together = False
        machine.accesses -= 1
        if machine.accesses < 0:
            machine.accesses = machine.draw.randint(0, ACCESSES)
            wait(Pause(machine.draw.randint(1, TURNS)))


SharedArray.pause = staticmethod(pause)


def collective(combine: Callable[[list[tuple[Any, ...]]], list[Any]]) -> Callable[..., Any]:
    """A function that all lanes of a warp have to call at the same place. Options are those of the whole warp."""

    def call(*values: Any, **_: Any) -> Any:
        caller = sys._getframe(1)
        return wait(Collective((caller.f_code, caller.f_lasti), combine, values))

    return call


@dataclasses.dataclass
class Launch:
    """A kernel on one rank. `after`: index of the launch that it depends on. `late`: the most rounds that blocks but
    the first start later than that allows. `behind`: rounds that all of them start later. `uneven`: the most rounds
    that a warp now and then misses, while others go on. `begins`: rounds that some blocks start later, by index."""

    kernel: Any
    args: Any
    after: int | None = None
    late: int = 0
    behind: int = 0
    uneven: int = 0
    begins: dict[int, int] = dataclasses.field(default_factory=dict)


def start(launch: Launch, after: list[Thread], draw: random.Random) -> list[list[Thread]]:
    """The warps of a launch."""
    kernel, args = launch.kernel, launch.args
    count = kernel.options["block"][0]
    warps = []
    for index in range(int(args.blocks)):
        late = launch.behind + (draw.randint(0, launch.late) if index else 0) + launch.begins.get(index, 0)
        block = Block(index, int(args.blocks), count, after, late, launch.uneven)
        threads = [Thread(lambda: run_thread(kernel, args), block, i) for i in range(count)]
        warps += [threads[i : i + WARP] for i in range(0, count, WARP)]
    return warps


def run_thread(kernel: Any, args: Any) -> None:
    kernel.kernel(args)
    assert not any(me().stores), "a thread has left before its bulk stores were complete"
    assert not any(me().copies), "a thread has left before its copies were complete"
    assert not me().products, "a thread has left before its products were complete"


def arrive(thread: Thread) -> None:
    """At a barrier of its block, which lets all go when the last one comes."""
    barrier, block = thread.state, thread.block
    came = block.arrived.setdefault(barrier.number, [])
    came.append((thread, barrier.waits))
    if not barrier.waits:
        thread.state = None
    if len(came) == (barrier.threads or block.threads):
        for other, waits in came:
            if waits:
                other.state = None
        came.clear()


def turn(warp: list[Thread]) -> bool:
    """Lets a warp's lanes go on as far as they can; returns whether anything happened."""
    moved = False
    for thread in warp:
        if isinstance(thread.state, Pause) and not thread.dead:
            thread.state.turns -= 1
            moved = True
            if thread.state.turns == 0:
                thread.state = None
        if not thread.dead and (thread.state is None or isinstance(thread.state, Yield)):
            moved |= thread.go_on()
            if isinstance(thread.state, Barrier) and not thread.dead:
                arrive(thread)
    alive = [thread for thread in warp if not thread.dead]
    if alive and all(isinstance(thread.state, Collective) for thread in alive):
        assert len(alive) == WARP, f"a collective when lanes have left: {alive[0].state.place}"
        states = [thread.state for thread in alive]
        assert len({state.place for state in states}) == 1, f"lanes diverge: {[state.place for state in states]}"
        results = states[0].combine([state.values for state in states])
        for thread, result in zip(alive, results, strict=True):
            thread.state, thread.result, thread.together = None, result, True
        moved = True
    return moved


TICK = 64
"""Nanoseconds of a round."""


def run(
    launches: list[Launch],
    draw: random.Random,
    dying: Sequence[int] = (),
    after: int = 0,
    quiet_turns: int = QUIET_TURNS,
    rounds: int | None = None,
) -> list[list[Thread]]:
    """All launches at once, until every thread has ended. Return the threads of each launch. An exception of a thread
    ends it, with its traceback. Threads of launches that are `dying` (by index) stop for ever after so many rounds.
    `quiet_turns`: more than deadlines of waits, if there are any. `rounds`: the most that it may take, for threads
    that may wait for ever in a loop that does more than look again."""
    warps: list[list[Thread]] = []
    groups: list[list[Thread]] = []
    for launch in launches:
        mine = start(launch, groups[launch.after] if launch.after is not None else [], draw)
        groups.append([thread for warp in mine for thread in warp])
        warps += mine
    quiet, first = 0, machine.clock
    doomed = {id(thread) for index in dying for thread in groups[index]}
    while warps:
        if doomed and after == 0:
            warps = [warp for warp in warps if id(warp[0]) not in doomed]
        after -= 1
        machine.clock += TICK
        draw.shuffle(warps)
        moved = any([network.step(draw) for network in machine.networks])
        for warp in warps:
            block = warp[0].block
            if not warp[0].began and block.after and not block.may_start():
                continue
            if block.late > 0:
                block.late -= warp[0].index == 0
                moved = True
                continue
            if warp[0].missing > 0:
                warp[0].missing -= 1
                moved = True
                continue
            moved |= turn(warp)
            if block.uneven and draw.random() < 0.1:
                warp[0].missing = draw.randint(1, block.uneven)
        warps = [warp for warp in warps if not all(thread.dead for thread in warp)]
        quiet = 0 if moved else quiet + 1
        assert quiet <= quiet_turns, f"nobody goes on: {[stuck(warp) for warp in warps[:6]]}"
        if rounds is not None:
            late = [stuck(warp) for warp in warps[:6] if warp[0].began]
            assert machine.clock - first <= rounds * TICK, f"after {rounds} rounds some go on: {late}"
    return groups


def stuck(warp: list[Thread]) -> str:
    """Where the first lane of a warp waits, and for what."""
    alive = [thread for thread in warp if not thread.dead]
    frame, lines = alive[0].gr_frame, []
    while frame is not None and len(lines) < 4:
        lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    kinds = {type(thread.state).__name__ for thread in alive}
    return f"block {alive[0].block.index} thread {alive[0].index} {kinds} {' < '.join(lines)}"
