"""Memories, the wire between domains, and whose turn it is: whatever may happen next happens in any order."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

Place = tuple[Any, ...]
Word = tuple[Any, ...]
Steps = Generator[Any, Any, Any]


def come_in(epoch: int) -> Word:
    """How many words of an epoch the wire has set at a rank. (Kernels look at all that it may set.)"""
    return ("come", epoch)


class Violation(AssertionError):
    """A promise of the protocol that was not kept."""


class Abandoned(Exception):
    """Thrown into a task whose wait was given up."""


class Wait(NamedTuple):
    """The value that a task yields to wait for a word of its own rank's memory."""

    rule: str  # what it is for
    word: Word
    ready: Callable[[Any], bool]
    until: str  # what gives it up: "failure", "rejection" (or a failure), "nothing"
    peers: tuple[int, ...] = ()  # whose hellos are looked at meanwhile


class Task:
    def __init__(self, rank: int, steps: Steps) -> None:
        self.rank, self.steps, self.value = rank, steps, None
        self.abandoned = False


class Temper:
    """Who is fast and who is slow in a run. Low priorities go first."""

    def __init__(self, draw: random.Random, world_size: int) -> None:
        self.draw = draw
        self.aging = draw.choice((0.0, 0.0, 0.05, 1.0))  # 0: who is slow waits until nobody else can do anything
        spread = draw.choice((0.0, 1.0, 5.0))
        self.rank = [spread * draw.random() for _ in range(world_size)]
        self.link = [[spread * draw.random() for _ in range(world_size)] for _ in range(world_size)]
        self.wire = draw.choice((0.0, 1.0, 10.0))  # all of the wire
        self.late = draw.choice((0.0, 0.1, 0.5))  # how many pieces come very late
        self.clock = 0

    def of_task(self, rank: int) -> float:
        return self.aging * self.clock + self.rank[rank] + self.draw.random()

    def of_piece(self, source: int, target: int) -> float:
        stall = 100 * self.draw.random() if self.draw.random() < self.late else 0.0
        return self.aging * self.clock + self.wire + self.link[source][target] + 2 * self.draw.random() + stall


class Patience(Temper):
    """Everybody's turn comes in order, and so does what the wire delivers."""

    def of_task(self, rank: int) -> float:
        return 0.0

    def of_piece(self, source: int, target: int) -> float:
        return 0.0


class Network:
    """Words have the value None until they are set. A stored value has two halves, which the wire moves one by one."""

    signal_after_data = True
    kind_of_temper = Temper

    def __init__(self, world_size: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.temper = self.kind_of_temper(self.draw, world_size)
        self.memory: list[dict[Place, list[Any]]] = [{} for _ in range(world_size)]
        self.words: list[dict[Word, Any]] = [{} for _ in range(world_size)]
        self.waiting: list[dict[Task, Wait]] = [{} for _ in range(world_size)]
        self.dead: set[int] = set()
        self.cut: set[tuple[int, int]] = set()  # links that deliver nothing any more
        self.heard: Callable[[int, Word, Any], None] = lambda rank, word, value: None
        self._turns: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    # ---------------------------------------------------------------- memory

    def store(self, rank: int, place: Place, value: Any, epoch: int) -> None:
        stamp = (epoch, next(self._number))
        self.memory[rank][place] = [(value, stamp), (value, stamp)]

    def read(self, rank: int, place: Place, epoch: int) -> Any:
        """The value that was stored there in this epoch, and no other."""
        first, second = self.memory[rank].get(place, (None, None))
        if first is None or second is None or (first[1][0], second[1][0]) != (epoch, epoch) or first[0] != second[0]:
            raise Violation(f"in epoch {epoch} {place} of rank {rank} is read; it holds {first} and {second}")
        return first[0]

    def is_of(self, rank: int, place: Place, epoch: int) -> bool:
        """Whether anything was stored there in this epoch."""
        return any(half is not None and half[1][0] == epoch for half in self.memory[rank].get(place, ()))

    def set(self, rank: int, word: Word, value: Any) -> None:
        self.words[rank][word] = value
        self.heard(rank, word, value)
        for task, wait in list(self.waiting[rank].items()):
            if wait.word == word and wait.ready(value):
                self._resume(task, value)

    # ---------------------------------------------------------------- the wire

    def put(self, source: int, target: int, cells: list[tuple[Place, Place]], word: Word | None, value: Any) -> None:
        """Cells are (place here, place there). Each half is read some time, written there some time later, and when
        all are written the word is set there, some time."""
        halves = [(here, there, half) for here, there in cells for half in (0, 1)]
        left = len(halves)

        def turn(action: Callable[[], None]) -> None:
            self._turn(self.temper.of_piece(source, target), action)

        def lost() -> bool:
            return (source, target) in self.cut or source in self.dead or target in self.dead

        def take(here: Place, there: Place, half: int, stamp: Any) -> None:
            if lost():
                return
            piece = self.memory[source][here][half]
            if piece[1] != stamp:
                raise Violation(f"{here} of rank {source} was overwritten before the wire had read it")
            turn(lambda: give(there, half, piece))

        def give(there: Place, half: int, piece: Any) -> None:
            nonlocal left
            if lost():
                return
            self.memory[target].setdefault(there, [None, None])[half] = piece
            left -= 1
            if left == 0 and self.signal_after_data:
                turn(signal)

        def signal() -> None:
            if not lost() and word is not None:
                self.deliver(target, word, value)

        if not halves or not self.signal_after_data:
            turn(signal)
        for here, there, half in halves:
            stamp = self.memory[source][here][half][1]
            turn(lambda here=here, there=there, half=half, stamp=stamp: take(here, there, half, stamp))

    def deliver(self, target: int, word: Word, value: Any) -> None:
        """Sets a word that the wire brings, and counts those of its epoch; nobody counts alarms and counts."""
        self.set(target, word, value)
        if word[0] not in ("alarm", "sent"):
            come = come_in(value[0])
            self.set(target, come, self.words[target].get(come, 0) + 1)

    # ---------------------------------------------------------------- turns

    def _turn(self, priority: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._turns, (priority, next(self._number), action))

    def spawn(self, rank: int, tasks: list[Steps]) -> Wait:
        """Lets them run side by side; the wait is for the end of all."""
        word, left = ("running", next(self._number)), len(tasks)

        def counted(steps: Steps) -> Steps:
            nonlocal left
            try:
                yield from steps
            except Abandoned:
                pass
            left -= 1
            if left == 0:
                self.set(rank, word, True)

        for steps in tasks:
            self._ready(Task(rank, counted(steps)))
        return Wait("tasks", word, bool, "nothing")

    def _ready(self, task: Task) -> None:
        self._turn(self.temper.of_task(task.rank), lambda: self._advance(task))

    def _resume(self, task: Task, value: Any) -> None:
        del self.waiting[task.rank][task]
        task.value = value
        self._ready(task)

    def _advance(self, task: Task) -> None:
        if task.rank in self.dead:
            return
        try:
            if task.abandoned:
                task.abandoned = False
                wait = task.steps.throw(Abandoned())
            else:
                wait = task.steps.send(task.value)
        except StopIteration:
            return
        task.value = None
        if wait is None:
            self._ready(task)
            return
        value = self.words[task.rank].get(wait.word)
        self.waiting[task.rank][task] = wait
        if value is not None and wait.ready(value):
            self._resume(task, value)

    def abandon(self, rank: int, why: str) -> None:
        """Gives up a rank's waits, because of a "rejection" or a "failure"."""
        for task, wait in list(self.waiting[rank].items()):
            if wait.until == "rejection" or wait.until == why:
                task.abandoned = True
                self._resume(task, None)

    def run(self, event: tuple[int, Callable[[], None]] | None, stuck: Callable[[], bool]) -> None:
        """Until nothing can happen any more. ``event``: something to be done after so many turns. ``stuck`` is called
        when only waits are left, and says whether it has moved anything."""
        while True:
            if not self._turns:
                if event is not None:
                    event[1]()
                    event = None
                elif not any(self.waiting[rank] for rank in range(len(self.words)) if rank not in self.dead):
                    return
                elif not stuck():
                    waits = {r: [(w.rule, w.word) for w in ws.values()] for r, ws in enumerate(self.waiting) if ws}
                    raise Violation(f"everybody waits for ever: {waits}")
                continue
            if event is not None and self.temper.clock >= event[0]:
                event[1]()
                event = None
            self.temper.clock += 1
            heapq.heappop(self._turns)[2]()
