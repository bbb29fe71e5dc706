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
        """As owner: the ids of all tokens."""
        here = self.out_place("few routes out", target)
        self.store(self.rank, here, (op.ids[self.rank], op.capacity[self.rank]))
        self.put(target, [(here, self.place("few routes", self.rank))], self.word("few routes", self.rank), 0)
        yield

    def tokens_for(self: Rank, ids: Ids, rank: int) -> list[int]:
        """Those that name an expert there, whether or not their rows are kept."""
        return [t for t, chosen in enumerate(ids) if rank in self.shape.named(chosen)]

    def send_copies(self: Rank, op: Operation, target: int) -> Steps:
        """As owner: each token that names the rank, with its weights, in a put of its own."""
        tokens = self.tokens_for(op.ids[self.rank], target)
        for number, t in enumerate(tokens):
            here = self.out_place("lines out", target, t)
            row = (
                x_of(op.number, self.rank, t),
                [weight_of(op.number, self.rank, t, k) for k in range(self.shape.top_k)],
            )
            self.store(self.rank, here, row)
            self.put_copy(target, [(here, self.place("lines", self.rank, t))], t, (number, len(tokens)))
            yield

    def put_copy(self: Rank, target: int, cells: list[Any], token: int, _: tuple[int, int]) -> None:
        """The last says which of how many it is."""
        self.put(target, cells, self.word("lines", self.rank, token), 0)

    def await_copy(self: Rank, source: int, token: int, _: int) -> Steps:
        yield from self.wait("few row arrived", self.word("lines", source, token), source)

    def receive_copies(self: Rank, op: Operation) -> Steps:
        """As the experts' rank: places the rows that all routes tell of, and waits for them all."""
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
            for number, t in enumerate(self.tokens_for(told, self.rank)):
                if self.awaits((source, t) in kept):
                    yield from self.await_copy(source, t, number)
                if (source, t) in kept:
                    came[source, t] = self.read(self.rank, self.place("lines", source, t))
                yield
        rows = {}
        for copy in route.copies:
            x, weights = came[copy.source, copy.token]
            rows.update({at: (x, weights[k]) for k, at in copy.rows})
        self.routes[op.number] = route
        self.result = tuple(rows[at] for at in range(route.rows)), route.send_rows

    def awaits(self: Rank, kept: bool) -> bool:
        """Whether a row is awaited of which some rows are kept, or none."""
        return True

    # ---------------------------------------------------------------- combine

    def few_combine(self: Rank, op: Operation) -> list[Steps]:
        return [*(self.send_sums(op, rank) for rank in range(self.shape.world_size)), self.add_sums(op)]

    def send_sums(self: Rank, op: Operation, target: int) -> Steps:
        """As the experts' rank: the sum of each of an owner's copies, to the place of the copy's number."""
        for copy in self.routes[op.along].copies:
            if copy.source == target:
                here = self.out_place("lines out", target, copy.token)
                self.store(self.rank, here, sum_of(op.number, self.rank, copy))
                at = (copy.number, copy.token)
                self.put(target, [(here, self.place("lines", *at))], self.word("lines", *at), 0)
                yield

    def add_sums(self: Rank, op: Operation) -> Steps:
        """As owner: in the tree of sums."""
        totals = []
        for t, chosen in enumerate(self.routes[op.along].ids):
            kept, named = kept_of(self, op.along, t), self.shape.named(chosen)
            result, scalars = None, []
            for domain, ranks in enumerate(self.shape.domains):
                of_domain = None
                for rank in ranks:
                    if rank not in kept:
                        continue
                    at = (named.index(rank), t)
                    yield from self.wait("few sum arrived", self.word("lines", *at), rank)
                    partial, of_copy = self.read(self.rank, self.place("lines", *at))
                    of_domain = add(of_domain, partial)
                    scalars += of_copy
                if of_domain is not None:
                    result = add(result, of_domain if domain == self.domain else rounded(of_domain))
            totals.append((rounded(result), tuple(sorted(scalars))))
            yield
        self.result = tuple(totals)
