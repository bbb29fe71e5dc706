"""Two hops: rows cross on the rail in batches, to the rank that stands for their owner in the domain they go to, and
from there over NVLink. Sums come back the same way, one for each domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .network import Steps
from .placing import Head, entries_of, head_of, kept_of, place_rows, sum_of
from .shape import HEAD, Operation, add, rounded, weight_of, x_of

if TYPE_CHECKING:
    from .rank import Rank


class Row(NamedTuple):
    """What a batch of a dispatch has of each token."""

    token: int
    ranks: tuple[int, ...]  # of the domain, that need it
    x: Any
    weights: tuple[Any, ...]


class Throughput:
    # ---------------------------------------------------------------- dispatch

    def dispatch_round(self: Rank, op: Operation, number: int) -> list[Steps]:
        domains = range(len(self.shape.domains))
        return [
            *(self.send_rows_to(op, number, d) for d in domains),
            *(self.pass_on(op, number, d) for d in domains),
            self.receive(op, number),
        ]

    def send_rows_to(self: Rank, op: Operation, number: int, domain: int) -> Steps:
        """As owner: what a domain needs of this rank's tokens, to the rank that stands for this one there."""
        target = self.shape.stager(self.rank, domain)
        ids = op.ids[self.rank]
        if op.kind == "dispatch" and number == 0:
            ranks = self.shape.domains[domain]
            head = {r: entries_of(self.shape, ids, r) for r in ranks}, head_of(self.shape, ids, op.capacity[self.rank])
            yield from self.send_list(target, "route", self.domain, 0, None, 1, head)

        rows = []
        for t in self.of_round(number, len(ids)):
            named = self.shape.named(ids[t]) if op.kind == "dispatch" else list(kept_of(self, op.along, t))
            here = tuple(r for r in named if r in self.shape.domains[domain])
            if here:
                weights = tuple(weight_of(op.number, self.rank, t, k) for k in range(self.shape.top_k))
                rows.append(Row(t, here, x_of(op.number, self.rank, t), weights))

        def row(p: int) -> Steps:
            return rows[p]
            yield

        yield from self.send_list(target, "rows", self.domain, len(rows), row, self.shape.batch)

    def pass_on(self: Rank, op: Operation, number: int, domain: int) -> Steps:
        """As stager: tells the ranks of this domain what has come from the rail's rank of that one, and where it is."""
        source = self.shape.stager(self.rank, domain)
        if op.kind == "dispatch" and number == 0:
            yield from self.wait_batch("route arrived", "route", domain, 0)
            for peer in self.peers:
                self.flag(peer, self.word("route told", source), 0)
        total = yield from self.wait_batch("rows arrived", "rows", domain, 0)
        for p in range(total):
            if p and p % self.shape.batch == 0:
                yield from self.wait_batch("rows arrived", "rows", domain, p // self.shape.batch)
            row = self.read(self.rank, self.place("rows", domain, p))
            for peer in row.ranks:
                self.flag(peer, self.word("row told", source, row.token % self.shape.round_tokens), p)
            yield

    def receive(self: Rank, op: Operation, number: int) -> Steps:
        """As the experts' rank: places the rows, and fetches them from where they are staged in this domain."""
        if number == 0:
            self.arrived: dict[int, Any] = {}
            if op.kind == "dispatch":
                heads: list[Head] = []
                entries = []
                for source in range(self.shape.world_size):
                    yield from self.wait("route told", self.word("route told", source))
                    place = self.place("route", self.shape.domain_of[source], HEAD)
                    of_ranks, head = self.read(self.shape.stager(source, self.domain), place)
                    heads.append(head)
                    entries.append(of_ranks[self.rank])
                self.routes[op.number] = place_rows(self.shape, self.rank, op.ids[self.rank], heads, entries)
            else:
                self.routes[op.number] = self.routes[op.along]

        route = self.routes[op.number]
        for copy in route.copies:
            if copy.token // self.shape.round_tokens != number:
                continue
            word = self.word("row told", copy.source, copy.token % self.shape.round_tokens)
            p = yield from self.wait("row told", word)
            stager = self.shape.stager(copy.source, self.domain)
            row = self.read(stager, self.place("rows", self.shape.domain_of[copy.source], p))
            for k, at in copy.rows:
                self.arrived[at] = (row.x, row.weights[k])
            yield
        if number == self.shape.rounds - 1:
            self.result = tuple(self.arrived[at] for at in range(route.rows)), route.send_rows

    def of_round(self: Rank, number: int, tokens: int) -> range:
        return range(number * self.shape.round_tokens, min(tokens, (number + 1) * self.shape.round_tokens))

    # ---------------------------------------------------------------- combine

    def combine_round(self: Rank, op: Operation, number: int) -> list[Steps]:
        others = [d for d in range(len(self.shape.domains)) if d != self.domain]
        return [
            *(self.ask(op, number, d) for d in others),
            self.push(op, number),
            *(self.add_domain(op, number, d) for d in others),
            self.add_all(op, number),
        ]

    def asked(self: Rank, op: Operation, number: int, domain: int) -> list[tuple[int, tuple[int, ...]]]:
        """The round's tokens with rows in that domain, and the numbers of their copies there."""
        found = []
        for t in self.of_round(number, len(self.routes[op.along].ids)):
            named = self.shape.named(self.routes[op.along].ids[t])
            kept = [r for r in kept_of(self, op.along, t) if r in self.shape.domains[domain]]
            if kept:
                found.append((t, tuple(named.index(r) for r in kept)))
        return found

    def ask(self: Rank, op: Operation, number: int, domain: int) -> Steps:
        """As owner: which sums are wanted of that domain."""
        wanted = self.asked(op, number, domain)
        target = self.shape.stager(self.rank, domain)
        yield from self.send_list(target, "wanted", self.domain, 0, None, 1, wanted)

    def push(self: Rank, op: Operation, number: int) -> Steps:
        """As the experts' rank: adds up the rows of each copy, and stores the sum at the rank that stands for the
        token's owner in this domain."""
        for copy in self.routes[op.along].copies:
            if copy.token // self.shape.round_tokens == number:
                stager = self.shape.stager(copy.source, self.domain)
                at = self.shape.domain_of[copy.source], copy.number, copy.token % self.shape.round_tokens
                self.store(stager, self.place("pushed", *at), sum_of(op.number, self.rank, copy))
                self.flag(stager, self.word("pushed", *at), 0)
                yield

    def add_copies(self: Rank, domain: int, token: int, numbers: tuple[int, ...]) -> Steps:
        """As stager: the sum of a token's copies on this domain's ranks, not rounded, and their scalars."""
        result, scalars = None, []
        for at in self.in_order([(domain, number, token % self.shape.round_tokens) for number in numbers]):
            yield from self.wait("pushed", self.word("pushed", *at))
            partial, of_copy = self.read(self.rank, self.place("pushed", *at))
            result = add(result, partial)
            scalars += of_copy
        return result, scalars

    def in_order(self: Rank, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return places

    def add_domain(self: Rank, op: Operation, number: int, domain: int) -> Steps:
        """As stager: the sums that the rail's rank of that domain wants."""
        yield from self.wait_batch("wanted", "wanted", domain, 0)
        wanted = self.read(self.rank, self.place("wanted", domain, HEAD))
        if not wanted:
            return

        def row(p: int) -> Steps:
            result, scalars = yield from self.add_copies(domain, *wanted[p])
            return rounded(result), tuple(scalars)

        target = self.shape.stager(self.rank, domain)
        yield from self.send_list(target, "rows", self.domain, len(wanted), row, self.shape.batch)

    def add_all(self: Rank, op: Operation, number: int) -> Steps:
        """As owner: adds up what the domains have sent."""
        if number == 0:
            self.totals: list[Any] = []
        wanted = [dict(self.asked(op, number, d)) for d in range(len(self.shape.domains))]
        for t in self.of_round(number, len(self.routes[op.along].ids)):
            result, scalars = None, []
            for domain, of_domain in enumerate(wanted):
                if t not in of_domain:
                    continue
                if domain == self.domain:
                    partial, of_copies = yield from self.add_copies(domain, t, of_domain[t])
                else:
                    p = list(of_domain).index(t)
                    yield from self.wait_batch("sums arrived", "rows", domain, p // self.shape.batch)
                    partial, of_copies = self.read(self.rank, self.place("rows", domain, p))
                result = add(result, partial)
                scalars += of_copies
            self.totals.append((rounded(result), tuple(sorted(scalars))))
            yield
        if number == self.shape.rounds - 1:
            self.result = tuple(self.totals)
