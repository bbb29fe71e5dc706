"""One rank: its marks and banks, how operations begin and end, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .latency import Latency
from .network import Abandoned, Network, Place, Steps, Violation, Wait, Word, come_in
from .shape import REJECTED, Operation, Route, Shape
from .throughput import Throughput


class Rank(Throughput, Latency):
    def __init__(self, network: Network, shape: Shape, rank: int, others: list[Rank]) -> None:
        self.network, self.shape, self.rank, self.others = network, shape, rank, others
        self.domain, self.index = shape.domain_of[rank], shape.index_of[rank]
        self.peers = shape.domains[self.domain]  # of the NVLink domain, this rank included
        self.everybody = tuple(range(shape.world_size))
        self.epoch = 0
        self.rejected = False  # this operation, by anybody
        self.failed: str | None = None  # what has ended this communicator
        self.terms = ""  # of the operation: what all ranks must agree on
        self.routes: dict[int, Route] = {}
        self.results: dict[int, Any] = {}

    # ---------------------------------------------------------------- operations

    def run(self, operations: list[Operation]) -> Steps:
        for op in operations:
            if self.failed and not self.goes_on():
                return
            self.terms = op.kind
            if self.rank in op.differs:
                self.terms = "another " + op.instead
                op = op._replace(kind=op.instead)
            self.epoch += 1
            self.puts = dict.fromkeys(self.everybody, 0)  # of this epoch, over the wire
            self.rejected = any(
                self.is_there(self.word("rejection", peer), self.is_of_epoch) for peer in self.everybody
            )
            tasks = [self.say_rejection()] if op.rejected_by == self.rank else [self.say_hello(), *self.tasks(op)]
            yield self.network.spawn(self.rank, tasks)
            yield self.network.spawn(self.rank, [self.meet(peer) for peer in self.everybody])
            if self.rejected:  # its receivers have not waited for what was put
                yield from self.settle()
            if not self.failed:
                self.results[op.number] = self.why_rejected() if self.rejected else self.result

    def goes_on(self) -> bool:
        """Whether a rank that has given up begins another operation: it would put nothing, and leave alone what is
        being put."""
        return False

    def tasks(self, op: Operation) -> list[Steps]:
        """Return the tasks that run concurrently."""
        kinds = {
            "few_dispatch": self.few_dispatch, "few_combine": self.few_combine, "combine": self.combine,
            "dispatch": self.dispatch, "dispatch_planned": self.dispatch,
        }  # fmt: skip
        return kinds[op.kind](op)

    def settle(self) -> Steps:
        """Until all has come that was put to this rank in this epoch, or its deadline. Senders say how much that is."""
        far = [rank for rank in self.everybody if rank not in self.peers]
        for rank in far:
            self.network.put(self.rank, rank, [], self.word("sent", self.rank), self.mark(self.puts[rank]))
        expected = 0
        for rank in far:
            _, count, _ = yield from self.wait_for("sent", self.word("sent", rank), self.is_of_epoch, (), "failure")
            expected += count
        if far:
            yield from self.wait_come(expected)

    def wait_come(self, expected: int) -> Steps:
        if not self.failed:
            yield Wait("come", come_in(self.epoch), lambda count: count >= expected, "failure")

    # ---------------------------------------------------------------- meeting

    def say_hello(self, says: Any = 0) -> Steps:
        for peer in self.everybody:
            self.put(peer, [], self.hello_word(self.rank), says)
            yield

    def hello_word(self, rank: int) -> Word:
        return self.word("hello", rank)

    def say_rejection(self) -> Steps:
        """Instead of an operation: leaves the reason with everybody, and the word that says so; and hello."""
        reason = self.place("reason", self.rank)
        self.store(self.rank, reason, ("because", self.epoch, self.rank))
        for peer in self.everybody:
            self.put(peer, [(reason, reason)] * (peer != self.rank), self.word("rejection", self.rank), 0)
            yield
        yield from self.say_hello(REJECTED)

    def why_rejected(self) -> Any:
        rank = next(r for r in self.everybody if self.is_there(self.word("rejection", r), self.is_of_epoch))
        return REJECTED if self.read(self.rank, self.place("reason", rank)) == ("because", self.epoch, rank) else "?"

    def meet(self, peer: int) -> Steps:
        """Ends when that rank has begun this epoch, and so has left the one before it. Of one that rejects, when its
        rejection is here, too."""
        word = self.hello_word(peer)
        _, says, terms = yield from self.wait_for("hello", word, self.is_of_epoch, (), "failure")
        if says == REJECTED:
            yield from self.wait_for("rejection", self.word("rejection", peer), self.is_of_epoch, (), "failure")
        elif terms != self.terms and not self.rejected:
            self.give_up(f"rank {self.rank} is in {self.terms}, rank {peer} in {terms}")

    def look_at(self, peer: int) -> None:
        """While something is awaited: a hello with other terms says that it will not come. That of a rank that rejects
        says nothing: its rejection will."""
        _, says, terms = self.word_here(self.hello_word(peer))
        if self.is_there(self.hello_word(peer), self.is_of_epoch) and terms != self.terms:
            if says != REJECTED and not self.rejected:
                self.give_up(f"rank {self.rank} is in {self.terms}, rank {peer} in {terms}")

    def hear(self, word: Word, value: Any) -> None:
        """Take notice of whatever is set in this rank's memory."""
        if word[0] == "alarm":
            self.fail(value)
        elif isinstance(value, tuple) and value[0] < self.epoch - 1 and not self.failed:
            raise Violation(f"in epoch {self.epoch} of rank {self.rank} {word} of epoch {value[0]} arrives")
        elif word[:2] == self.word("rejection") and self.is_of_epoch(value):
            self.rejected = True
            self.network.abandon(self.rank, "rejection")
        elif word[0] == "hello":
            for wait in list(self.network.waiting[self.rank].values()):
                for peer in wait.peers:
                    self.look_at(peer)

    # ---------------------------------------------------------------- marks and places

    @property
    def bank(self) -> int:
        return self.epoch % 2

    def mark(self, number: Any) -> Any:
        """The value of a word: epoch, what else it says, and the terms. A kernel's word has room for a number or for
        terms; who waits for a number does not look at the terms."""
        return (self.epoch, number, self.terms)

    def is_of_epoch(self, value: Any) -> bool:
        return value[0] == self.epoch

    def is_mark(self, value: Any) -> bool:
        """Set in this epoch, by a rank that is in the same operation."""
        return self.is_of_epoch(value) and value[2] == self.terms

    def place(self, area: str, *index: Any) -> Place:
        return (area, self.bank, *index)

    def word(self, kind: str, *index: Any) -> Word:
        return (kind, self.bank, *index)

    # ---------------------------------------------------------------- memory

    def wait(self, rule: str, word: Word, *peers: int) -> Steps:
        """Until the word, of this rank's memory, is a mark; returns its number. The hellos of `peers` are looked at
        meanwhile: those of whom it waits for."""
        _, number, _ = yield from self.wait_for(rule, word, self.is_mark, peers, "rejection")
        return number

    def wait_number(self, rule: str, word: Word, *peers: int) -> Steps:
        """Wait for a word that contains a number instead of terms, and return the number."""
        _, number, _ = yield from self.wait_for(rule, word, self.is_of_epoch, peers, "rejection")
        return number

    def wait_for(
        self, rule: str, word: Word, ready: Callable[[Any], bool], peers: tuple[int, ...], until: str
    ) -> Steps:
        """Returns the word's value. What is there is taken, whatever else has happened."""
        if not self.is_there(word, ready):
            for peer in peers:
                self.look_at(peer)
            if self.failed or (self.rejected and until == "rejection"):
                raise Abandoned
        return (yield Wait(rule, word, ready, until, peers))

    def word_here(self, word: Word) -> Any:
        return self.network.words[self.rank].get(word, (0, 0, ""))

    def is_there(self, word: Word, ready: Callable[[Any], bool]) -> bool:
        return word in self.network.words[self.rank] and ready(self.word_here(word))

    def read(self, rank: int, place: Place) -> Any:
        """Return a value of this rank, or of one of its domain."""
        if self.shape.domain_of[rank] != self.domain:
            raise Violation(f"rank {self.rank} cannot read memory of rank {rank}")
        return self.network.read(rank, place, self.epoch)

    def store(self, rank: int, place: Place, value: Any) -> None:
        """Store a value at this rank, or at one of its domain."""
        if self.shape.domain_of[rank] != self.domain:
            raise Violation(f"rank {self.rank} cannot write memory of rank {rank}")
        self.network.store(rank, place, value, self.epoch)

    def flag(self, rank: int, word: Word, number: Any) -> None:
        """Sets a word of a rank of this domain, behind all that was stored."""
        if self.shape.domain_of[rank] != self.domain:
            raise Violation(f"rank {self.rank} cannot set words of rank {rank}")
        self.network.set(rank, word, self.mark(number))

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        """Rows to another rank, and behind them its word: by stores within the domain, else on the wire."""
        if self.shape.domain_of[target] != self.domain:
            self.puts[target] += 1
            self.network.put(self.rank, target, cells, word, self.mark(number))
            return
        for here, there in cells:
            self.store(target, there, self.read(self.rank, here))
        if word is not None:
            self.flag(target, word, number)

    # ---------------------------------------------------------------- failures

    def give_up(self, cause: str) -> None:
        """At a deadline, say. Waits end; what is sent without waiting is sent still in this operation, and is right."""
        if self.failed:
            return
        self.fail(cause)
        for other in self.others:
            if other is not self:
                self.tell(other.rank, cause)

    def tell(self, rank: int, cause: str) -> None:
        word = ("alarm", self.rank)
        if self.shape.domain_of[rank] == self.domain:
            self.network.set(rank, word, cause)
        else:
            self.network.put(self.rank, rank, [], word, cause)

    def fail(self, cause: str) -> None:
        """Also of a rank that has been told."""
        if not self.failed:
            self.failed = cause
            self.network.abandon(self.rank, "failure")
