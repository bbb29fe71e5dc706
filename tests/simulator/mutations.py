"""Every rule of the protocol, broken. What is left out or done otherwise must be found by some schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .cases import Mutant
from .network import Abandoned, Network, Place, Steps, Wait, Word, come_in
from .placing import kept_of
from .rank import Rank
from .shape import REJECTED, Operation

Ready = Callable[[Any], bool]

WAITS = (
    "hello", "rejection", "route arrived", "weights arrived", "weights relayed", "staged", "rows arrived",
    "rows relayed", "wanted", "pushed", "sums arrived", "scalars arrived", "few route arrived", "few row arrived",
    "few sum arrived", "sent", "come",
)  # fmt: skip
"""All that there are."""


def impatient(name: str) -> type[Rank]:
    """One wait is left out: what the word says is taken as it is."""

    class Impatient(Rank):
        def wait_for(self, rule: str, word: Word, ready: Ready, peers: tuple[int, ...], until: str) -> Steps:
            if rule != name:
                return (yield from super().wait_for(rule, word, ready, peers, until))
            yield
            epoch, number, _ = self.word_here(word)
            return epoch, number, self.terms

        def wait_come(self, expected: int) -> Steps:
            if name != "come":
                yield from super().wait_come(expected)

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


class WordsWithoutTerms(Rank):
    """Words, those of few tokens too, say in which epoch they were set, and not in which operation."""

    def is_mark(self, value: Any) -> bool:
        return self.is_of_epoch(value)


class TermsUnread(Rank):
    """Nobody looks at the terms of a hello."""

    def meet(self, peer: int) -> Steps:
        terms = self.terms
        self.terms = self.word_here(self.hello_word(peer))[2]
        yield from super().meet(peer)
        self.terms = terms

    def look_at(self, peer: int) -> None:
        pass


class TermsAtTheEnd(Rank):
    """While ranks wait they look at no hello."""

    def look_at(self, peer: int) -> None:
        pass


class StagerSuspectsTheOwner(Rank):
    """A stager that waits for a copy looks at the hello of the token's owner, not of who may have it."""

    def suspects(self, owner: int) -> tuple[int, ...]:
        return (owner,)


class RejectionIsAnotherOperation(Rank):
    """A hello that comes before the rejection is taken for one with other terms."""

    def look_at(self, peer: int) -> None:
        value = self.word_here(self.hello_word(peer))
        if self.is_of_epoch(value) and value[1] == REJECTED and not self.rejected:
            self.give_up("other terms")
        super().look_at(peer)


class RunningCount(Rank):
    """Rows of few tokens have one word for each source, which counts those that were sent."""

    def put_copies(self, target: int, cells: list[Any], line: int, number: tuple[int, int]) -> None:
        self.put(target, cells, self.word("counted", self.rank), number[0] + 1)

    def await_copies(self, source: int, line: int, number: int) -> Steps:
        ready = lambda v: self.is_mark(v) and v[1] > number  # noqa: E731
        yield from self.wait_for("few row arrived", self.word("counted", source), ready, (source,), "rejection")


class AddsCounts(Network):
    """With a `RunningCount` of which each row adds one, where it is delivered."""

    def deliver(self, target: int, word: Word, value: Any) -> None:
        if word[0] == "counted":
            epoch, number, _ = self.words[target].get(word, (0, 0, ""))
            value = (value[0], (number if epoch == value[0] else 0) + 1, value[2])
        super().deliver(target, word, value)


class FinishFlag(Rank):
    """Rows of few tokens have no words; a put of nothing says that all were sent."""

    def put_copies(self, target: int, cells: list[Any], line: int, number: tuple[int, int]) -> None:
        self.put(target, cells, None, 0)
        if number[0] + 1 == number[1]:
            self.put(target, [], self.word("counted", self.rank), 0)

    def await_copies(self, source: int, line: int, number: int) -> Steps:
        yield from self.wait("few row arrived", self.word("counted", source), source)


class FirstRow(Rank):
    """When the first row of a source is here, the others are taken to be."""

    def await_copies(self, source: int, line: int, number: int) -> Steps:
        if number == 0:
            yield from super().await_copies(source, line, number)


class NumberedAsKept(Rank):
    """Where rows are bundled the expert's rank counts those alone that it keeps."""

    def number_of_row(self, tokens: list[int], token: int, kept: list[int]) -> int:
        return sum(other in kept for other in tokens if other < token)


class NumberedAsNamed(Rank):
    """Where sums are bundled their owner counts those, too, that were dropped."""

    def number_of_sum(self, op: Operation, rank: int, token: int) -> int:
        ids = self.routes[op.along].ids
        return sum(rank in self.shape.named(ids[before]) for before in range(token))


class TwoKindsOfPlaces(Rank):
    """Where sums are bundled, those of the own domain lie as if none were."""

    def place_of_sum(self, rank: int, other: int, copy: int, token: int, number: int) -> tuple[int, int]:
        if self.each(other) == 1:
            return copy, token
        return super().place_of_sum(rank, other, copy, token, number)


class KeptAlone(Rank):
    """Rows that are dropped are not awaited."""

    def awaits(self, kept: bool) -> bool:
        return kept


class OneWordForAllSources(Rank):
    """Words of batches are not told apart by who sends."""

    def word(self, kind: str, *index: Any) -> Word:
        several = ("batch", "relayed", "sum", "lines")
        return (kind, self.bank, index[-1]) if kind in several else super().word(kind, *index)


class OneWordForAllBatches(Rank):
    """Nor by which batch it is."""

    def word(self, kind: str, *index: Any) -> Word:
        return (kind, self.bank, index[0]) if kind in ("batch", "sum") else super().word(kind, *index)


class LastBatch(Rank):
    """A stager that has seen the last batch takes all to be here."""

    def wait_number(self, rule: str, word: Word, *peers: int) -> Steps:
        if rule == "rows arrived":
            yield from super().wait_number(rule, (*word[:-1], self.shape.batches - 1), *peers)
            return self.word_here(word)[1]
        return (yield from super().wait_number(rule, word, *peers))


class RelaysAtOnce(Rank):
    """The source sets the flags of the ranks of the other domain itself, beside its put to the stager."""

    def put_cells(self, words: str, domain: int, b: int, mask: int, cells: list[tuple[Place, Place]]) -> None:
        super().put_cells(words, domain, b, mask, cells)
        if words == "batch":
            for rank in self.shape.domains[domain]:
                self.put(rank, [], self.word("relayed", self.rank, b), mask)

    def relay_rows(self, domain: int) -> Steps:
        for b in range(self.shape.batches):
            source = self.shape.stager(self.rank, domain)
            yield from self.wait_number("rows arrived", self.word("batch", domain, b), source)


class NothingForNothing(Rank):
    """Batches without rows are not sent."""

    def put_batch_of(self, words: str, domain: int, b: int, mask: int) -> None:
        if mask:
            super().put_batch_of(words, domain, b, mask)


class NothingWanted(Rank):
    """Who wants no sums of a batch says nothing."""

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        if word is None or word[0] != "wanted" or any(self.read(self.rank, cells[0][0])):
            super().put(target, cells, word, number)


class AnswersNobody(Rank):
    """A stager says of batches, too, of which no sums are wanted, that it sends none."""

    def pass_sums(self, op: Operation, domain: int, b: int) -> Steps:
        yield from super().pass_sums(op, domain, b)
        if not any(self.read(self.rank, self.place("wanted in", domain, b))):
            self.put_cells("sum", domain, b, 0, [])


class PassesOnFirst(Rank):
    """A block asks when it has passed on what others ask for."""

    def sum_up(self, op: Operation, block: int) -> Steps:
        yield from self.pass_all(op, block)
        yield from self.ask_all(op, block)
        yield from self.add_all(op, block)


class AddsFirst(Rank):
    """A block passes on when it has added up its own tokens."""

    def sum_up(self, op: Operation, block: int) -> Steps:
        yield from self.ask_all(op, block)
        yield from self.add_all(op, block)
        yield from self.pass_all(op, block)


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


class OneHello(Rank):
    """The hello words alone have no banks."""

    def hello_word(self, rank: int) -> Word:
        return ("hello", rank)

    def look_at(self, peer: int) -> None:
        pass

    def meet(self, peer: int) -> Steps:
        later = lambda v: v[0] >= self.epoch  # noqa: E731
        yield from self.wait_for("hello", self.hello_word(peer), later, (), "failure")


class OneSendArea(Rank):
    """A protocol without banks in the area that the wire reads."""

    def out_place(self, area: str, target: int, *index: Any) -> Place:
        return (area, target, *index)


class SharedSendArea(Rank):
    """A protocol that puts together in the same places what goes to several ranks."""

    def out_place(self, area: str, target: int, *index: Any) -> Place:
        return self.place(area, *index)


class Gaps(Rank):
    """In a domain of one rank sums are put from where they were pushed, though some are left out."""

    def is_whole(self, mask: int) -> bool:
        return len(self.peers) == 1

    def put_cells(self, words: str, domain: int, b: int, mask: int, cells: list[tuple[Place, Place]]) -> None:
        if words == "sum":
            for row, (here, there) in enumerate(cells):
                if here[0] == "pushed":
                    wrong = (*here[:-1], b * self.shape.batch + row)
                    if self.network.is_of(self.rank, wrong, self.epoch):
                        cells[row] = (wrong, there)
        super().put_cells(words, domain, b, mask, cells)


class Ring(Rank):
    """There are places and words for one batch, used by turns, and no credits."""

    def place(self, area: str, *index: Any) -> Place:
        if area in ("rows in", "rows out"):
            index = (index[0], 0, index[2])
        return super().place(area, *index)

    def word(self, kind: str, *index: Any) -> Word:
        return super().word(kind, index[0], 0) if kind == "batch" else super().word(kind, *index)


class RowsAtTheirTokens(Rank):
    """Rows are looked for as if those that are not needed had places, too."""

    def fetch(self, op: Operation, source: int, token: int) -> Steps:
        if source in self.peers:
            return (yield from super().fetch(op, source, token))
        b, stager = token // self.shape.batch, self.shape.stager(source, self.domain)
        yield from self.wait_number("rows relayed", self.word("relayed", source, b), source)
        place = self.place("rows in", self.shape.domain_of[source], b, token - b * self.shape.batch)
        return self.read(stager, place)


# ---------------------------------------------------------------- meeting


class MeetsItsRail(Rank):
    """A rank waits for the hellos of its domain and of its rail alone."""

    def meet(self, peer: int) -> Steps:
        if peer in self.peers or self.shape.index_of[peer] == self.index:
            yield from super().meet(peer)


class RejectionStaysHome(Rank):
    """Ranks of other domains learn by the hello alone that somebody rejects."""

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        if word is None or word[0] != "rejection" or target in self.peers:
            super().put(target, cells, word, number)


class EndlessSettling(Rank):
    """Who waits for what was put to it does so for ever."""

    def wait_for(self, rule: str, word: Word, ready: Ready, peers: tuple[int, ...], until: str) -> Steps:
        until = "nothing" if rule == "sent" else until
        return (yield from super().wait_for(rule, word, ready, peers, until))

    def wait_come(self, expected: int) -> Steps:
        yield Wait("come", come_in(self.epoch), lambda count: count >= expected, "nothing")


# ---------------------------------------------------------------- sums


class AsTheyCome(Rank):
    """Copies are added in the order in which they came."""

    def in_order(self, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        came = {at: self.network.memory[self.rank].get(self.place("pushed", *at)) for at in places}
        return sorted(places, key=lambda at: came[at][0][1] if came[at] else (self.epoch + 1, 0))


class SumsUnrounded(Rank):
    """A domain's sum crosses as it is."""

    def rounded(self, total: Any) -> Any:
        return total


class DroppedAreAwaited(Rank):
    """Sums are wanted of all copies, whether rows of them were kept or not."""

    def wanted(self, op: Operation, domain: int, token: int) -> tuple[int, ...]:
        if token >= len(op.ids[self.rank]):
            return ()
        named = self.shape.named(self.routes[op.along].ids[token])
        here = [r for r in named if r in self.shape.domains[domain]]
        return tuple(self.number_there(domain, named.index(r)) for r in here)


class CountedAnew(Rank):
    """Copies are numbered without those that were dropped, by their owner alone."""

    def wanted(self, op: Operation, domain: int, token: int) -> tuple[int, ...]:
        if token >= len(op.ids[self.rank]):
            return ()
        kept = kept_of(self, op.along, token)
        here = [r for r in kept if r in self.shape.domains[domain]]
        return tuple(self.number_there(domain, kept.index(r)) for r in here)


# ---------------------------------------------------------------- failures


class IncompleteSums(Rank):
    """A stager passes a sum on though one of its copies has not come."""

    def wait_for(self, rule: str, word: Word, ready: Ready, peers: tuple[int, ...], until: str) -> Steps:
        try:
            return (yield from super().wait_for(rule, word, ready, peers, until))
        except Abandoned:
            if rule != "pushed" or not self.failed:
                raise
            return (0, 0, self.terms)


class GoesOn(Rank):
    """A rank that has given up begins the next operations. It puts nothing, and its flags are no marks; but it stores,
    as long as it need not wait, into some areas: `into`."""

    into: tuple[str, ...] = ()
    given_up = 0  # in which epoch

    def goes_on(self) -> bool:
        self.given_up = self.given_up or self.epoch
        return True

    def tasks(self, op: Operation) -> list[Steps]:
        return [self.as_far_as_it_comes(steps) for steps in super().tasks(op)]

    def as_far_as_it_comes(self, steps: Steps) -> Steps:
        try:
            yield from steps
        except (AttributeError, LookupError, TypeError):
            if not self.given_up:
                raise

    def read(self, rank: int, place: Place) -> Any:
        if self.given_up:
            raise Abandoned
        return super().read(rank, place)

    def store(self, rank: int, place: Place, value: Any) -> None:
        if not self.given_up or place[0] in self.into:
            super().store(rank, place, value)

    def flag(self, rank: int, word: Word, number: Any) -> None:
        if not self.given_up:
            super().flag(rank, word, number)

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        if not self.given_up:
            super().put(target, cells, word, number)

    def wait_for(self, rule: str, word: Word, ready: Ready, peers: tuple[int, ...], until: str) -> Steps:
        if self.given_up:
            raise Abandoned
        return (yield from super().wait_for(rule, word, ready, peers, until))


def goes_on(into: str) -> type[Rank]:
    return type("GoesOn", (GoesOn,), {"into": (into,)})


class PutsOn(GoesOn):
    """It goes on with everything that it need not wait for."""

    def store(self, rank: int, place: Place, value: Any) -> None:
        Rank.store(self, rank, place, value)

    def flag(self, rank: int, word: Word, number: Any) -> None:
        Rank.flag(self, rank, word, number)

    def put(self, target: int, cells: list[tuple[Place, Place]], word: Word | None, number: Any) -> None:
        if target not in self.peers:
            Rank.put(self, target, cells, word, number)
        elif word is not None and not cells:
            self.flag(target, word, number)


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
    **{
        f"no wait: {name}": rank(impatient(name), "rejects" * (name in ("sent", "come", "rejection"))) for name in WAITS
    },
    "signal beside its data": Mutation((SignalBesideData, Rank)),
    "ADD for SET": Mutation((Adds, Rank)),
    "no epoch": rank(WithoutEpoch),
    "epoch of one bit": rank(ShortEpoch),
    "no terms in flags": rank(WordsWithoutTerms, "differs"),
    "terms that nobody reads": rank(TermsUnread, "differs"),
    "terms are read at the end": rank(TermsAtTheEnd, "differs"),
    "stager looks at the owner's terms": rank(StagerSuspectsTheOwner, "differs"),
    "rejection is another operation": rank(RejectionIsAnotherOperation, "rejects"),
    "running count, set": rank(RunningCount),
    "running count, added": Mutation((AddsCounts, RunningCount)),
    "finish flag": rank(FinishFlag),
    "first row for all": rank(FirstRow),
    "bundled rows numbered as they are kept": rank(NumberedAsKept),
    "bundled sums numbered as they are named": rank(NumberedAsNamed),
    "bundled sums beside others": rank(TwoKindsOfPlaces),
    "dropped rows of few tokens not awaited": rank(KeptAlone),
    "last batch for all": rank(LastBatch),
    "one word for all sources": rank(OneWordForAllSources),
    "one word for all batches": rank(OneWordForAllBatches),
    "told by the source": rank(RelaysAtOnce),
    "no word for an empty batch": rank(NothingForNothing),
    "no word for nothing wanted": rank(NothingWanted),
    "a word that nobody waits for": rank(AnswersNobody),
    "passes on before it asks": rank(PassesOnFirst),
    "adds before it passes on": rank(AddsFirst),
    "one bank": rank(OneBank),
    "one bank of words": rank(OneBankOfWords),
    "hello without banks": rank(OneHello),
    "send area without banks": rank(OneSendArea),
    "send area for all targets": rank(SharedSendArea),
    "ring without credits": rank(Ring),
    "rows with gaps": rank(RowsAtTheirTokens),
    "put from where pushed, with gaps": rank(Gaps),
    "meets its domain and its rail alone": rank(MeetsItsRail),
    "rejection stays in its domain": rank(RejectionStaysHome, "rejects"),
    "settles for ever": rank(EndlessSettling, "rejected, and dies"),
    "sums in order of arrival": rank(AsTheyCome),
    "domain's sum not rounded": rank(SumsUnrounded),
    "waits for dropped copies": rank(DroppedAreAwaited),
    "dropped copies not counted": rank(CountedAnew),
    "incomplete sums cross": rank(IncompleteSums, "gives up"),
    "goes on, and stores routes": rank(goes_on("told out"), "gives up"),
    "goes on, and stores weights": rank(goes_on("weights"), "gives up"),
    "goes on, and stores rows to be sent": rank(goes_on("rows out"), "gives up"),
    "goes on, and stores few rows to be sent": rank(goes_on("lines out"), "gives up"),
    "goes on, and asks": rank(goes_on("wanted out"), "gives up"),
    "goes on, and pushes": rank(goes_on("pushed"), "gives up"),
    "goes on, and puts": rank(PutsOn, "gives up"),
    "tells its domain alone": rank(TellsItsDomain, "gives up"),
    "tells its rail alone": rank(TellsItsRail, "gives up"),
    "told, and goes on waiting": rank(HearsAtTheNextCall, "gives up"),
}
