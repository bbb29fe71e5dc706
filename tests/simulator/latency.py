"""One hop: every row straight to its rank, on the wire or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .network import Steps
from .placing import entries_of, head_of, kept_of, place_rows, sum_of
from .shape import Ids, Operation, add, rounded, weight_of, x_of

if TYPE_CHECKING:
    from .rank import Rank


class Latency:
    # ---------------------------------------------------------------- dispatch

    def few_dispatch(self: Rank, op: Operation) -> list[Steps]:
        ranks = range(self.shape.world_size)
        return [
            *(self.send_route(op, rank) for rank in ranks), *(self.send_copies(op, rank) for rank in ranks),
            self.receive_copies(op),
        ]  # fmt: skip

    def send_route(self: Rank, op: Operation, target: int) -> Steps:
        """Send the ids of all tokens, as their owner."""
        here = self.out_place("few routes out", target)
        self.store(self.rank, here, (op.ids[self.rank], op.capacity[self.rank]))
        self.put(target, [(here, self.place("few routes", self.rank))], self.word("few routes", self.rank), 0)
        yield

    def tokens_for(self: Rank, ids: Ids, rank: int) -> list[int]:
        """Those that name an expert there, whether or not their rows are kept."""
        return [t for t, chosen in enumerate(ids) if rank in self.shape.named(chosen)]

    def each(self: Rank, other: int) -> int:
        """How many rows between this rank and that one are a put, at most. More than one are bundled."""
        return 1 if other in self.peers else self.shape.rows

    def line(self: Rank, other: int, token: int, number: int) -> int:
        """Where a row lies among all between this rank and that one: bundled by its number among them."""
        return token if self.each(other) == 1 else number

    def send_copies(self: Rank, op: Operation, target: int) -> Steps:
        """Send each token that names the rank, with its weights, so many in a put, as their owner."""
        tokens, each = self.tokens_for(op.ids[self.rank], target), self.each(target)
        for first in range(0, len(tokens), each):
            cells = []
            for number, t in enumerate(tokens[first : first + each], first):
                line = self.line(target, t, number)
                here = self.out_place("lines out", target, line)
                row = (
                    x_of(op.number, self.rank, t),
                    [weight_of(op.number, self.rank, t, k) for k in range(self.shape.top_k)],
                )
                self.store(self.rank, here, row)
                cells.append((here, self.place("lines", self.rank, line)))
            puts = (first // each, -(-len(tokens) // each))
            self.put_copies(target, cells, self.line(target, tokens[first], first), puts)
            yield

    def put_copies(self: Rank, target: int, cells: list[Any], line: int, _: tuple[int, int]) -> None:
        """`line` is the first one's. The last says which of how many puts it is."""
        self.put(target, cells, self.word("lines", self.rank, line), 0)

    def await_copies(self: Rank, source: int, line: int, _: int) -> Steps:
        yield from self.wait("few row arrived", self.word("lines", source, line), source)

    def receive_copies(self: Rank, op: Operation) -> Steps:
        """Place the rows that all routes announce, and wait for them all, as the experts' rank."""
        heads, entries, ids, came = [], [], [], {}
        for source in range(self.shape.world_size):
            yield from self.wait("few route arrived", self.word("few routes", source), source)
            told, capacity = self.read(self.rank, self.place("few routes", source))
            ids.append(told)
            heads.append(head_of(self.shape, told, capacity))
            entries.append(entries_of(self.shape, told, self.rank))
        route = place_rows(self.shape, self.rank, op.ids[self.rank], heads, entries)
        kept = {(copy.source, copy.token) for copy in route.copies}
        for source, told in enumerate(ids):
            tokens, each = self.tokens_for(told, self.rank), self.each(source)
            for t in tokens:
                number = self.number_of_row(tokens, t, [t for s, t in kept if s == source])
                first = number // each * each
                if self.awaits((source, t) in kept):
                    line = self.line(source, tokens[first], first)
                    yield from self.await_copies(source, line, first // each)
                if (source, t) in kept:
                    came[source, t] = self.read(self.rank, self.place("lines", source, self.line(source, t, number)))
                yield
        rows = {}
        for copy in route.copies:
            x, weights = came[copy.source, copy.token]
            rows.update({at: (x, weights[k]) for k, at in copy.rows})
        self.routes[op.number] = route
        self.result = tuple(rows[at] for at in range(route.rows)), route.send_rows

    def number_of_row(self: Rank, tokens: list[int], token: int, kept: list[int]) -> int:
        """Among those of its source, kept or not."""
        return tokens.index(token)

    def awaits(self: Rank, kept: bool) -> bool:
        """Whether a row is awaited of which some rows are kept, or none."""
        return True

    # ---------------------------------------------------------------- combine

    def few_combine(self: Rank, op: Operation) -> list[Steps]:
        return [*(self.send_sums(op, rank) for rank in range(self.shape.world_size)), self.add_sums(op)]

    def send_sums(self: Rank, op: Operation, target: int) -> Steps:
        """Send the sum of each of an owner's copies, so many in a put, as the experts' rank."""
        copies, each = [copy for copy in self.routes[op.along].copies if copy.source == target], self.each(target)
        for first in range(0, len(copies), each):
            cells, places = [], []
            for number, copy in enumerate(copies[first : first + each], first):
                here = self.out_place("lines out", target, self.line(target, copy.token, number))
                self.store(self.rank, here, sum_of(op.number, self.rank, copy))
                places.append(self.place_of_sum(self.rank, target, copy.number, copy.token, number))
                cells.append((here, self.place("lines", *places[-1])))
            self.put(target, cells, self.word("lines", *places[0]), 0)
            yield

    def place_of_sum(self: Rank, rank: int, other: int, copy: int, token: int, number: int) -> tuple[int, int]:
        """At its owner, of a sum of `rank`; `other` is the other one of the two. By the copy's number, which makes
        fewer places, unless ranks bundle."""
        return (copy, token) if self.shape.rows == 1 else (rank, self.line(other, token, number))

    def add_sums(self: Rank, op: Operation) -> Steps:
        """Add up the sums as owner, in the tree of sums."""
        totals = []
        for t, chosen in enumerate(self.routes[op.along].ids):
            kept, named = kept_of(self, op.along, t), self.shape.named(chosen)
            result, scalars = None, []
            for domain, ranks in enumerate(self.shape.domains):
                of_domain = None
                for rank in ranks:
                    if rank not in kept:
                        continue
                    at, first = self.places_of_sum(op, rank, named.index(rank), t)
                    yield from self.wait("few sum arrived", self.word("lines", *first), rank)
                    partial, of_copy = self.read(self.rank, self.place("lines", *at))
                    of_domain = add(of_domain, partial)
                    scalars += of_copy
                if of_domain is not None:
                    result = add(result, of_domain if domain == self.domain else rounded(of_domain))
            totals.append((rounded(result), tuple(sorted(scalars))))
            yield
        self.result = tuple(totals)

    def places_of_sum(self: Rank, op: Operation, rank: int, copy: int, token: int) -> tuple[Any, Any]:
        """Return the places of the sum of one of a token's copies, as its owner, and of the first one in its put."""
        number, each = self.number_of_sum(op, rank, token), self.each(rank)
        first = number // each * each
        at = self.place_of_sum(rank, rank, copy, token, number)
        return at, at if each == 1 else (rank, first)

    def number_of_sum(self: Rank, op: Operation, rank: int, token: int) -> int:
        """Among those of this rank's tokens that have rows there."""
        return sum(rank in kept_of(self, op.along, before) for before in range(token))
