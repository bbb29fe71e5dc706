"""One rank: its marks and banks, how it sends lists, how operations begin and end, and what becomes of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .latency import Latency
from .network import IN_FLIGHT, Abandoned, Network, Place, Steps, Violation, Wait, Word
from .shape import ANOTHER, HEAD, REFUSED, Operation, Route, Shape
from .throughput import Throughput


class Rank(Throughput, Latency):
    def __init__(self, network: Network, shape: Shape, rank: int, others: list[Rank]) -> None:
        self.network, self.shape, self.rank, self.others = network, shape, rank, others
        self.domain, self.index = shape.domain_of[rank], shape.index_of[rank]
        self.peers = shape.domains[self.domain]  # of the NVLink domain, this rank included
        self.epoch = 0
        self.refused = False  # this operation, by anybody
        self.failed: str | None = None  # what has ended this communicator
        self.terms = ""  # of the operation: what all ranks must agree on
        self.routes: dict[int, Route] = {}
        self.results: dict[int, Any] = {}

    # ---------------------------------------------------------------- operations

    def run(self, operations: list[Operation]) -> Steps:
        for op in operations:
            if self.rank in op.differs:
                op = op._replace(kind=ANOTHER[op.kind])
            self.terms = op.kind
            for tasks in self.rounds(op):
                self.epoch += 1
                yield self.network.spawn(self.rank, tasks)
                if self.refused:  # its receivers have not waited for what was put
                    yield from self.quiet()
            if self.failed:
                return
            self.results[op.number] = REFUSED if self.refused else self.result

    def rounds(self, op: Operation) -> Iterator[list[Steps]]:
        """What runs side by side in each round of an operation. Each round has an epoch and a bank of its own."""
        self.refused = False
        if op.refused_by == self.rank:
            yield [self.meet(op)]
        elif op.kind == "few_dispatch":
            yield [*self.few_dispatch(op), self.meet(op)]
        elif op.kind == "few_combine":
            yield [*self.few_combine(op), self.meet(op)]
        else:
            of_round = self.combine_round if op.kind == "combine" else self.dispatch_round
            for number in range(self.shape.rounds):
                yield [*of_round(op, number), self.meet(op)]
                if self.refused or self.failed:
                    return

    def quiet(self) -> Steps:
        """Until all that this rank has put is there."""
        yield Wait("quiet", IN_FLIGHT, lambda count: count == 0, "failure")

    def meet(self, op: Operation) -> Steps:
        """Ends when all ranks have begun this epoch, and so have left the one before it."""
        if op.refused_by == self.rank:
            self.refuse()
        for peer in self.peers:
            self.flag(peer, self.word("hello", self.rank), REFUSED if self.refused else 0)
        yield
        yield from self.meet_domain()
        for domain in range(len(self.shape.domains)):
            if domain != self.domain:
                rail = self.shape.stager(self.rank, domain)
                self.put(rail, [], self.clear_word(self.domain), REFUSED if self.refused else 0)
                yield
        yield from self.meet_rails()

    def meet_domain(self) -> Steps:
        for peer in self.peers:
            yield from self.heed("hello", self.word("hello", peer))

    def meet_rails(self) -> Steps:
        for domain in range(len(self.shape.domains)):
            if domain != self.domain:
                yield from self.heed("clear", self.clear_word(domain))

    def clear_word(self, domain: int) -> Word:
        return self.word("clear", domain)

    def heed(self, rule: str, word: Word) -> Steps:
        """Until the word is of this epoch; then what it says."""
        _, number, terms = yield from self.wait_for(rule, word, self.is_of_epoch, "failure")
        if terms != self.terms:
            self.give_up(f"rank {self.rank} is in {self.terms}, others in {terms}")
        elif number == REFUSED:
            self.refuse()

    # ---------------------------------------------------------------- marks and places

    @property
    def bank(self) -> int:
        return self.epoch % 2

    def mark(self, number: Any) -> Any:
        """The value of a word: epoch, what else it says, and the terms."""
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

    def wait(self, rule: str, word: Word, until: str = "refusal") -> Steps:
        """Until the word, of this rank's memory, is a mark; returns its number."""
        _, number, _ = yield from self.wait_for(rule, word, self.is_mark, until)
        return number

    def wait_for(self, rule: str, word: Word, ready: Callable[[Any], bool], until: str) -> Steps:
        """Returns the word's value."""
        if self.failed or (self.refused and until == "refusal"):
            raise Abandoned
        return (yield Wait(rule, word, ready, until))

    def read(self, rank: int, place: Place) -> Any:
        """Of this rank, or of one of its domain."""
        if self.shape.domain_of[rank] != self.domain:
            raise Violation(f"rank {self.rank} cannot read memory of rank {rank}")
        return self.network.read(rank, place, self.epoch)

    def store(self, rank: int, place: Place, value: Any) -> None:
        """Likewise."""
        self.go_on()
        if self.shape.domain_of[rank] != self.domain:
            raise Violation(f"rank {self.rank} cannot write memory of rank {rank}")
        self.network.store(rank, place, value, self.epoch)

    def flag(self, rank: int, word: Word, number: Any) -> None:
        """Sets a word of a rank of this domain, behind all that was stored."""
        self.go_on()
        if self.shape.domain_of[rank] != self.domain:
            raise Violation(f"rank {self.rank} cannot set words of rank {rank}")
        self.network.set(rank, word, self.mark(number))

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        """Rows to another rank, and behind them its word: by stores within the domain, else on the wire."""
        self.go_on()
        if self.shape.domain_of[target] != self.domain:
            self.network.put(self.rank, target, cells, word, self.mark(number))
            return
        for here, there in cells:
            self.store(target, there, self.read(self.rank, here))
        if word is not None:
            self.flag(target, word, number)

    # ---------------------------------------------------------------- lists

    def send_list(
        self,
        target: int,
        area: str,
        key: int,
        total: int,
        row: Callable[[int], Steps] | None,
        batch: int,
        head: Any = None,
    ) -> Steps:
        """``total`` rows to the places (area, key, 0 ...) of another rank, each batch in one put that sets the batch's
        own word to the mark with ``total``. There is one batch at least; the head, if any, lies in the first one."""
        for b in range(max(1, -(-total // batch))):
            places: list[Any] = [HEAD] if head is not None and b == 0 else []
            places += range(b * batch, min(total, (b + 1) * batch))
            cells = []
            for p in places:
                value = head if p == HEAD else (yield from row(p))  # type: ignore[misc]
                here = self.sent_place(area, target, p)
                self.store(self.rank, here, value)
                cells.append((here, self.place(area, key, p)))
            self.put_batch(target, cells, (area, key, b), total)
            yield

    def sent_place(self, area: str, target: int, p: Any) -> Place:
        return self.place("sent " + area, target, p)

    def put_batch(self, target: int, cells: list[tuple[Place, Place]], batch: tuple[str, int, int], total: int) -> None:
        self.put(target, cells, self.word(*batch), total)

    def wait_batch(self, rule: str, area: str, key: int, b: int, until: str = "refusal") -> Steps:
        """Until batch b of a list is here; returns how many rows the list has."""
        return (yield from self.wait(rule, self.word(area, key, b), until))

    # ---------------------------------------------------------------- failures

    def go_on(self) -> None:
        """A rank that has given up does nothing any more: it stores, sets and puts nothing."""
        if self.failed:
            raise Abandoned

    def refuse(self) -> None:
        """This operation, here. Nobody waits for its rows any more; it ends when all ranks have begun it."""
        self.refused = True
        self.network.abandon(self.rank, "refusal")

    def give_up(self, cause: str) -> None:
        """At a deadline."""
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
