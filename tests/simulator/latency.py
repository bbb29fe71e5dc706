"""One hop: every row straight to its rank, on the wire or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .network import Steps
from .placing import entries_of, head_of, kept_of, place_rows, sum_of
from .shape import HEAD, Operation, add, rounded, weight_of, x_of

if TYPE_CHECKING:
    from .rank import Rank


class Latency:
    # ---------------------------------------------------------------- dispatch

    def few_dispatch(self: Rank, op: Operation) -> list[Steps]:
        return [*(self.send_copies(op, rank) for rank in range(self.shape.world_size)), self.receive_copies(op)]

    def send_copies(self: Rank, op: Operation, target: int) -> Steps:
        """As owner: a copy of each token that names the rank, with the token's entries there."""
        ids = op.ids[self.rank]
        of_token: dict[int, list[Any]] = {}
        for entry in entries_of(self.shape, ids, target):
            of_token.setdefault(entry.token, []).append(entry)
        rows = [
            (entries, x_of(op.number, self.rank, t), [weight_of(op.number, self.rank, t, e.k) for e in entries])
            for t, entries in of_token.items()
        ]

        def row(p: int) -> Steps:
            return rows[p]
            yield

        head = head_of(self.shape, ids, op.capacity[self.rank])
        yield from self.send_list(target, "copies", self.rank, len(rows), row, self.shape.few_batch, head)

    def receive_copies(self: Rank, op: Operation) -> Steps:
        """As the experts' rank: places the rows of all lists."""
        heads, entries, came = [], [], {}
        totals = []
        for source in range(self.shape.world_size):
            totals.append((yield from self.wait_batch("head arrived", "copies", source, 0)))
            heads.append(self.read(self.rank, self.place("copies", source, HEAD)))
        for source, total in enumerate(totals):
            told = []
            for p in range(total):
                if p and p % self.shape.few_batch == 0:
                    yield from self.wait_batch("copies arrived", "copies", source, p // self.shape.few_batch)
                of_token, x, weights = self.read(self.rank, self.place("copies", source, p))
                told += of_token
                for entry, weight in zip(of_token, weights, strict=True):
                    came[source, entry.token, entry.k] = (x, weight)
                yield
            entries.append(told)
        route = place_rows(self.shape, self.rank, op.ids[self.rank], heads, entries)
        rows = {at: came[copy.source, copy.token, k] for copy in route.copies for k, at in copy.rows}
        self.routes[op.number] = route
        self.result = tuple(rows[at] for at in range(route.rows)), route.send_rows

    # ---------------------------------------------------------------- combine

    def few_combine(self: Rank, op: Operation) -> list[Steps]:
        return [*(self.send_sums(op, rank) for rank in range(self.shape.world_size)), self.add_sums(op)]

    def send_sums(self: Rank, op: Operation, target: int) -> Steps:
        """As the experts' rank: the sum of each of an owner's copies, in the order of its tokens."""
        copies = [copy for copy in self.routes[op.along].copies if copy.source == target]
        if not copies:
            return

        def row(p: int) -> Steps:
            return sum_of(op.number, self.rank, copies[p])
            yield

        yield from self.send_list(target, "copies", self.rank, len(copies), row, self.shape.few_batch)

    def add_sums(self: Rank, op: Operation) -> Steps:
        """As owner: in the tree of sums."""
        tokens = len(self.routes[op.along].ids)
        sent = {r: [t for t in range(tokens) if r in kept_of(self, op.along, t)] for r in range(self.shape.world_size)}
        totals = []
        for t in range(tokens):
            result, scalars = None, []
            for domain, ranks in enumerate(self.shape.domains):
                of_domain = None
                for rank in ranks:
                    if t not in sent[rank]:
                        continue
                    p = sent[rank].index(t)
                    yield from self.wait_batch("few sums arrived", "copies", rank, p // self.shape.few_batch)
                    partial, of_copy = self.read(self.rank, self.place("copies", rank, p))
                    of_domain = add(of_domain, partial)
                    scalars += of_copy
                if of_domain is not None:
                    result = add(result, of_domain if domain == self.domain else rounded(of_domain))
            totals.append((rounded(result), tuple(sorted(scalars))))
            yield
        self.result = tuple(totals)
