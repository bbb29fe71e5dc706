"""Every rule of the protocol, broken. What is left out or done otherwise must be found by some schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .cases import Mutant
from .network import Abandoned, Network, Place, Steps, Word
from .placing import kept_of
from .rank import Rank
from .shape import HEAD, REFUSED, Operation

WAITS = (
    "hello", "clear", "route arrived", "route told", "rows arrived", "row told", "wanted", "pushed", "sums arrived",
    "head arrived", "copies arrived", "few sums arrived", "quiet",
)  # fmt: skip
"""All that there are."""


def impatient(name: str) -> type[Rank]:
    """One wait is left out: what the word says is taken as it is."""

    class Impatient(Rank):
        def wait_for(self, rule: str, word: Word, ready: Callable[[Any], bool], until: str) -> Steps:
            if rule != name:
                return (yield from super().wait_for(rule, word, ready, until))
            yield
            epoch, number, _ = self.network.words[self.rank].get(word, (0, 0, ""))
            return epoch, number, self.terms

        def quiet(self) -> Steps:
            if name != "quiet":
                yield from super().quiet()

    return Impatient


# ---------------------------------------------------------------- words


class SignalBesideData(Network):
    """A put does not wait with its signal until its data is there."""

    signal_after_data = False


class Adds(Network):
    """ADD instead of SET."""

    def deliver(self, target: int, word: Word, value: Any) -> None:
        if word[0] != "alarm":
            epoch, number, _ = self.words[target].get(word, (0, 0, ""))
            value = (epoch + value[0], number + value[1] if isinstance(number, int) else value[1], value[2])
        super().deliver(target, word, value)


class WithoutEpoch(Rank):
    """Words say that something has come, not in which operation."""

    def is_of_epoch(self, value: Any) -> bool:
        return True


class ShortEpoch(Rank):
    """One bit of it."""

    def is_of_epoch(self, value: Any) -> bool:
        return value[0] % 2 == self.epoch % 2


class ListsWithoutTerms(Rank):
    """Words of lists say in which epoch they were set, and not in which operation."""

    def is_mark(self, value: Any) -> bool:
        return self.is_of_epoch(value)


class TermsUnread(Rank):
    """Hello and clear are not looked at for terms."""

    def heed(self, rule: str, word: Word) -> Steps:
        if (yield from self.wait(rule, word, "failure")) == REFUSED:
            self.refuse()


class RunningCount(Rank):
    """A list has one word, which counts the batches that were sent."""

    def put_batch(self, target: int, cells: list[tuple[Place, Place]], batch: tuple[str, int, int], total: int) -> None:
        area, key, b = batch
        self.put(target, cells, self.word(area, key), (total, b + 1))

    def wait_batch(self, rule: str, area: str, key: int, b: int, until: str = "refusal") -> Steps:
        word = self.word(area, key)
        _, (total, _), _ = yield from self.wait_for(rule, word, lambda v: self.is_mark(v) and v[1][1] > b, until)
        return total


class AddsCounts(Network):
    """With a `RunningCount` of which each batch adds one, where it is delivered."""

    def deliver(self, target: int, word: Word, value: Any) -> None:
        if isinstance(value[1], tuple):
            epoch, number, _ = self.words[target].get(word, (0, (0, 0), ""))
            value = (value[0], (value[1][0], (number[1] if epoch == value[0] else 0) + 1), value[2])
        super().deliver(target, word, value)


class FinishFlag(Rank):
    """The batches of a list have no words; a put of nothing says that all were sent."""

    def put_batch(self, target: int, cells: list[tuple[Place, Place]], batch: tuple[str, int, int], total: int) -> None:
        area, key, b = batch
        size = {"rows": self.shape.batch, "copies": self.shape.few_batch}.get(area, 1)
        self.put(target, cells, None, total)
        if (b + 1) * size >= total:
            self.put(target, [], self.word(area, key), total)

    def wait_batch(self, rule: str, area: str, key: int, b: int, until: str = "refusal") -> Steps:
        return (yield from self.wait(rule, self.word(area, key), until))


class FirstBatch(Rank):
    """When the first batch of a list is here, the others are taken to be."""

    def wait_batch(self, rule: str, area: str, key: int, b: int, until: str = "refusal") -> Steps:
        return (yield from super().wait_batch(rule, area, key, b, until)) if b == 0 else 0


class OneWordForAllSources(Rank):
    """Words of lists are not told apart by who sends."""

    def word(self, kind: str, *index: Any) -> Word:
        return (kind, self.bank, index[-1]) if kind in ("rows", "copies") else super().word(kind, *index)


class NothingForNothing(Rank):
    """A list without rows is not sent."""

    def send_list(self, target, area, key, total, row, batch, head=None) -> Steps:  # type: ignore[no-untyped-def]
        if total or head is not None:
            yield from super().send_list(target, area, key, total, row, batch, head)


class NothingWanted(Rank):
    """Who wants no sums says nothing."""

    def send_list(self, target, area, key, total, row, batch, head=None) -> Steps:  # type: ignore[no-untyped-def]
        if area != "wanted" or head:
            yield from super().send_list(target, area, key, total, row, batch, head)


class NotDrained(Rank):
    """A stager that knows from the route that no rows come does not wait for the batch that says so."""

    def pass_on(self, op: Operation, number: int, domain: int) -> Steps:
        source = self.shape.stager(self.rank, domain)
        if op.kind == "dispatch" and number == 0:
            yield from self.wait_batch("route arrived", "route", domain, 0)
            of_ranks, _ = self.read(self.rank, self.place("route", domain, HEAD))
            for peer in self.peers:
                self.flag(peer, self.word("route told", source), 0)
            if not any(of_ranks.values()) and self.shape.rounds == 1:
                return
            op = op._replace(kind="dispatch_planned")
        yield from super().pass_on(op, number, domain)


# ---------------------------------------------------------------- places


class OneBank(Rank):
    @property
    def bank(self) -> int:
        return 0


class OneBankOfWords(Rank):
    """For words, which a late signal may set back."""

    def word(self, kind: str, *index: Any) -> Word:
        return (kind, *index)

    def is_of_epoch(self, value: Any) -> bool:
        return value[0] >= self.epoch


class OneClear(Rank):
    """The clear words alone have no banks."""

    def clear_word(self, domain: int) -> Word:
        return ("clear", domain)

    def heed(self, rule: str, word: Word) -> Steps:
        epoch, number, terms = yield from self.wait_for(rule, word, self.is_of_epoch, "failure")
        assert epoch > self.epoch or terms == self.terms
        if number == REFUSED:
            self.refuse()

    def is_of_epoch(self, value: Any) -> bool:
        return value[0] >= self.epoch


class OneSendArea(Rank):
    """What the wire reads has no banks."""

    def sent_place(self, area: str, target: int, p: Any) -> Place:
        return ("sent " + area, target, p)


class SharedSendArea(Rank):
    """What goes to several ranks is put together in the same places."""

    def sent_place(self, area: str, target: int, p: Any) -> Place:
        return self.place("sent " + area, p)


class Ring(Rank):
    """A list has places and words for one batch, used by turns, and no credits."""

    def place(self, area: str, *index: Any) -> Place:
        size = {"rows": self.shape.batch, "copies": self.shape.few_batch}.get(area)
        if size and isinstance(index[-1], int):
            index = (*index[:-1], index[-1] % size)
        return super().place(area, *index)

    def word(self, kind: str, *index: Any) -> Word:
        return super().word(kind, *index[:-1], 0) if kind in ("rows", "copies") else super().word(kind, *index)


class RoundsAreNoEpochs(Rank):
    """All rounds of an operation have the same epoch."""

    def rounds(self, op: Operation) -> Iterator[list[Steps]]:
        for number, tasks in enumerate(super().rounds(op)):
            if number:
                self.epoch -= 1
            yield tasks


# ---------------------------------------------------------------- meeting


class ClearAtOnce(Rank):
    """A rank says clear for itself, not for its domain."""

    def meet_domain(self) -> Steps:
        return
        yield

    def meet_rails(self) -> Steps:
        yield from super().meet_domain()
        yield from super().meet_rails()


class RefusalStaysHome(Rank):
    """Clear does not say that somebody refuses."""

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        super().put(target, cells, word, 0 if number == REFUSED else number)


# ---------------------------------------------------------------- sums


class AsTheyCome(Rank):
    """Copies are added in the order in which they came."""

    def in_order(self, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        here = self.network.words[self.rank]
        return sorted(places, key=lambda at: not self.is_mark(here.get(self.word("pushed", *at), (0, 0, ""))))


class SumsUnrounded(Rank):
    """A domain's sum crosses as it is."""

    def send_list(self, target, area, key, total, row, batch, head=None) -> Steps:  # type: ignore[no-untyped-def]
        def as_it_is(p: int) -> Steps:
            found = yield from row(p)
            if area == "rows" and isinstance(found[0], tuple) and found[0][0] == "rounded":
                return (found[0][1], *found[1:])
            return found

        yield from super().send_list(target, area, key, total, as_it_is, batch, head)


class DroppedAreAwaited(Rank):
    """Sums are wanted of all copies, whether rows of them were kept or not."""

    def asked(self, op: Operation, number: int, domain: int) -> list[tuple[int, tuple[int, ...]]]:
        found = []
        for t in self.of_round(number, len(self.routes[op.along].ids)):
            named = self.shape.named(self.routes[op.along].ids[t])
            if here := [r for r in named if r in self.shape.domains[domain]]:
                found.append((t, tuple(named.index(r) for r in here)))
        return found


class CountedAnew(Rank):
    """Copies are numbered without those that were dropped, by their owner alone."""

    def asked(self, op: Operation, number: int, domain: int) -> list[tuple[int, tuple[int, ...]]]:
        found = []
        for t in self.of_round(number, len(self.routes[op.along].ids)):
            kept = kept_of(self, op.along, t)
            if here := [r for r in kept if r in self.shape.domains[domain]]:
                found.append((t, tuple(kept.index(r) for r in here)))
        return found


# ---------------------------------------------------------------- failures


class GoesOn(Rank):
    """A rank that has given up goes on, with what happens to lie in memory, and marks that are as good as ever."""

    def go_on(self) -> None:
        pass

    def wait_for(self, rule: str, word: Word, ready: Callable[[Any], bool], until: str) -> Steps:
        try:
            return (yield from super().wait_for(rule, word, ready, until))
        except Abandoned:
            return (0, 0, self.terms)

    def read(self, rank: int, place: Place) -> Any:
        if not self.failed:
            return super().read(rank, place)
        held = self.network.memory[rank].get(place)
        if held is None or held[0] is None:
            raise Abandoned
        return held[0][0]


class TellsItsDomain(Rank):
    def tell(self, rank: int, cause: str) -> None:
        if rank in self.peers:
            super().tell(rank, cause)


class TellsItsRail(Rank):
    def tell(self, rank: int, cause: str) -> None:
        if self.shape.index_of[rank] == self.index:
            super().tell(rank, cause)


class HearsAtTheNextCall(Rank):
    """Who is told of a failure goes on waiting."""

    def fail(self, cause: str) -> None:
        if cause == self.failed or self.failed:
            return
        self.failed = cause


class Mutation(NamedTuple):
    mutant: Mutant
    fault: str = ""


def rank(kind: type[Rank], fault: str = "") -> Mutation:
    return Mutation((Network, kind), fault)


MUTATIONS: dict[str, Mutation] = {
    **{f"no wait: {name}": rank(impatient(name), "refuses" * (name == "quiet")) for name in WAITS},
    "signal beside its data": Mutation((SignalBesideData, Rank)),
    "ADD for SET": Mutation((Adds, Rank)),
    "no epoch": rank(WithoutEpoch),
    "epoch of one bit": rank(ShortEpoch),
    "no terms in lists": rank(ListsWithoutTerms, "differs"),
    "terms that nobody reads": rank(TermsUnread, "differs"),
    "running count, set": rank(RunningCount),
    "running count, added": Mutation((AddsCounts, RunningCount)),
    "finish flag": rank(FinishFlag),
    "first batch for all": rank(FirstBatch),
    "one word for all sources": rank(OneWordForAllSources),
    "no signal for no rows": rank(NothingForNothing),
    "no signal for nothing wanted": rank(NothingWanted),
    "a signal that nobody waits for": rank(NotDrained),
    "one bank": rank(OneBank),
    "one bank of words": rank(OneBankOfWords),
    "clear without banks": rank(OneClear),
    "send area without banks": rank(OneSendArea),
    "send area for all targets": rank(SharedSendArea),
    "ring without credits": rank(Ring),
    "rounds without epochs": rank(RoundsAreNoEpochs),
    "clear before the domain is": rank(ClearAtOnce),
    "refusal stays in its domain": rank(RefusalStaysHome, "refuses"),
    "sums in order of arrival": rank(AsTheyCome),
    "domain's sum not rounded": rank(SumsUnrounded),
    "waits for dropped copies": rank(DroppedAreAwaited),
    "dropped copies not counted": rank(CountedAnew),
    "goes on after giving up": rank(GoesOn, "gives up"),
    "tells its domain alone": rank(TellsItsDomain, "gives up"),
    "tells its rail alone": rank(TellsItsRail, "gives up"),
    "told, and goes on waiting": rank(HearsAtTheNextCall, "gives up"),
}
