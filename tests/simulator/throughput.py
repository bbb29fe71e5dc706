"""Two hops: rows cross on the rail in batches, to the rank that stands for their owner in the domain they go to, and
from there over NVLink. Sums come back the same way, one for each domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .network import Abandoned, Place, Steps, Word
from .placing import Head, entries_of, head_of, kept_of, place_rows, sum_of
from .shape import Operation, add, rounded, weight_of, x_of

if TYPE_CHECKING:
    from .rank import Rank


def bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def row_in(mask: int, index: int) -> int:
    """Where the row of a batch's token lies: behind those of lower bits."""
    return (mask & ((1 << index) - 1)).bit_count()


class Throughput:
    def other_domains(self: Rank) -> list[int]:
        return [d for d in range(len(self.shape.domains)) if d != self.domain]

    def of_batch(self: Rank, b: int, tokens: int) -> range:
        return range(b * self.shape.batch, min(tokens, (b + 1) * self.shape.batch))

    # ---------------------------------------------------------------- dispatch

    def dispatch(self: Rank, op: Operation) -> list[Steps]:
        fresh, others = op.kind == "dispatch", self.other_domains()
        return [
            *(self.tell_tile(op, tile, fresh) for tile in range(self.shape.tiles)),
            *(self.send_rows(op, d) for d in others),
            self.stage_rows(op),
            *(self.relay_rows(d) for d in others),
            *(self.relay_weights(d) for d in others),
            self.receive(op, fresh),
        ]

    def tell_tile(self: Rank, op: Operation, tile: int, fresh: bool) -> Steps:
        """Send the tile's counts and entries to everybody, one put each, and its weights to the stagers, as owner."""
        ids, word = op.ids[self.rank], self.word("route", self.rank, tile)
        tokens = [t for t in self.shape.tile(tile) if t < len(ids)]
        weights = tuple(tuple(weight_of(op.number, self.rank, t, k) for k in range(self.shape.top_k)) for t in tokens)
        self.store(self.rank, self.place("weights", tile), weights)
        if fresh:
            head = head_of(self.shape, tuple(ids[t] for t in tokens), op.capacity[self.rank])
            for rank in self.everybody:
                told = [e for e in entries_of(self.shape, ids, rank) if e.token in tokens], head
                there = self.place("told", self.rank, tile)
                if rank in self.peers:
                    self.store(rank, there, told)
                else:
                    here = self.out_place("told out", rank, tile)
                    self.store(self.rank, here, told)
                    self.put(rank, [(here, there)], word, 0)
                yield
        for domain in self.other_domains():
            cells = [(self.place("weights", tile), self.place("weights in", self.domain, tile))]
            self.put(self.shape.stager(self.rank, domain), cells, self.word("weighed", self.domain, tile), 0)
            yield
        for peer in self.peers:
            self.flag(peer, word, 0)
            yield

    def send_rows(self: Rank, op: Operation, domain: int) -> Steps:
        """Send all batches to the rank that stands for this one in another domain, as owner."""
        ids = op.ids[self.rank]
        for b in range(self.shape.batches):
            mask = 0
            for i, t in enumerate(self.of_batch(b, len(ids))):
                if any(self.shape.domain_of[rank] == domain for rank in self.shape.named(ids[t])):
                    mask |= 1 << i
            for row, i in enumerate(bits(mask)):
                x = x_of(op.number, self.rank, b * self.shape.batch + i)
                self.store(self.rank, self.out_place("rows out", domain, b, row), x)
            yield
            self.put_batch_of("batch", domain, b, mask)
            yield

    def put_batch_of(self: Rank, words: str, domain: int, b: int, mask: int) -> None:
        """One put; of no rows, a word alone."""
        cells = [
            (self.out_place("rows out", domain, b, row), self.place("rows in", self.domain, b, row))
            for row in range(mask.bit_count())
        ]
        self.put_cells(words, domain, b, mask, cells)

    def put_cells(self: Rank, words: str, domain: int, b: int, mask: int, cells: list[tuple[Place, Place]]) -> None:
        self.put(self.shape.stager(self.rank, domain), cells, self.word(words, self.domain, b), mask)

    def out_place(self: Rank, area: str, target: int, *index: Any) -> Place:
        """Return the place of data to be put, for a rank or a domain."""
        return self.place(area, target, *index)

    def stage_rows(self: Rank, op: Operation) -> Steps:
        """Stage rows for the ranks of this domain, as owner."""
        tokens = len(op.ids[self.rank])
        for b in range(self.shape.batches):
            for t in self.of_batch(b, tokens):
                self.store(self.rank, self.place("staged", t), x_of(op.number, self.rank, t))
            for peer in self.peers:
                self.flag(peer, self.word("staged", self.rank, b), 0)
            yield

    def relay_rows(self: Rank, domain: int) -> Steps:
        """Relay each batch's word to the ranks of this domain, as stager."""
        source = self.shape.stager(self.rank, domain)
        for b in range(self.shape.batches):
            mask = yield from self.wait_number("rows arrived", self.word("batch", domain, b), source)
            yield from self.relay(self.word("relayed", source, b), mask)

    def relay_weights(self: Rank, domain: int) -> Steps:
        source = self.shape.stager(self.rank, domain)
        for tile in range(self.shape.tiles):
            yield from self.wait_number("weights arrived", self.word("weighed", domain, tile), source)
            yield from self.relay(self.word("relayed weights", source, tile), 0)

    def relay(self: Rank, word: Word, number: int) -> Steps:
        for peer in self.peers:
            self.flag(peer, word, number)
            yield

    def receive(self: Rank, op: Operation, fresh: bool) -> Steps:
        """Place the rows, and fetch them from where they are staged in this domain, as the experts' rank."""
        heads: list[list[Head]] = []
        entries = []
        for source in self.everybody:
            heads.append([])
            entries.append([])
            for tile in range(self.shape.tiles):
                if fresh or source in self.peers:
                    yield from self.wait("route arrived", self.word("route", source, tile), source)
                if fresh:
                    of_tile, head = self.read(self.rank, self.place("told", source, tile))
                    heads[-1].append(head)
                    entries[-1] += of_tile
        if fresh:
            heads_of = [
                Head(tuple(map(sum, zip(*(h.counts for h in of), strict=True))), of[0].capacity) for of in heads
            ]
            self.routes[op.number] = place_rows(self.shape, self.rank, op.ids[self.rank], heads_of, entries)
        else:
            self.routes[op.number] = self.routes[op.along]

        route, arrived = self.routes[op.number], {}
        for copy in route.copies:
            x = yield from self.fetch(op, copy.source, copy.token)
            weights = yield from self.fetch_weights(copy.source, copy.token)
            for k, at in copy.rows:
                arrived[at] = (x, weights[k])
            yield
        self.result = tuple(arrived[at] for at in range(route.rows)), route.send_rows

    def fetch(self: Rank, op: Operation, source: int, token: int) -> Steps:
        b, stager = token // self.shape.batch, self.shape.stager(source, self.domain)
        if source == self.rank:
            return x_of(op.number, source, token)
        if source in self.peers:
            yield from self.wait("staged", self.word("staged", source, b), source)
            return self.read(source, self.place("staged", token))
        mask = yield from self.wait_number("rows relayed", self.word("relayed", source, b), source)
        row = row_in(mask, token - b * self.shape.batch)
        return self.read(stager, self.place("rows in", self.shape.domain_of[source], b, row))

    def fetch_weights(self: Rank, source: int, token: int) -> Steps:
        each = -(-self.shape.tokens // self.shape.tiles)
        tile, index = token // each, token % each
        if source in self.peers:  # the route told it
            return self.read(source, self.place("weights", tile))[index]
        yield from self.wait_number("weights relayed", self.word("relayed weights", source, tile), source)
        stager = self.shape.stager(source, self.domain)
        return self.read(stager, self.place("weights in", self.shape.domain_of[source], tile))[index]

    # ---------------------------------------------------------------- combine

    def combine(self: Rank, op: Operation) -> list[Steps]:
        self.totals: dict[int, Any] = {}
        blocks = range(self.shape.blocks)
        return [self.push(op), *(self.sum_up(op, block) for block in blocks)]

    def sum_up(self: Rank, op: Operation, block: int) -> Steps:
        """One block's share, one after the other: it asks, passes on, and adds up. (Kernels that have blocks enough
        leave the last to others: fewer waits come one after the other.)"""
        yield from self.ask_all(op, block)
        yield from self.pass_all(op, block)
        yield from self.add_all(op, block)

    def shared(self: Rank, count: int, block: int) -> range:
        return range(block, count, self.shape.blocks)

    def push(self: Rank, op: Operation) -> Steps:
        """Add up the rows of each copy, and store the sum at the rank that stands for the token's owner in this domain,
        as the experts' rank."""
        for copy in self.routes[op.along].copies:
            stager = self.shape.stager(copy.source, self.domain)
            domain = self.shape.domain_of[copy.source]
            at = domain, self.number_there(domain, copy.number), copy.token
            total, scalars = sum_of(op.number, self.rank, copy)
            for k, scalar in scalars:
                self.store(stager, self.place("scalars", domain, copy.token, k), scalar)
            self.store(stager, self.place("pushed", *at), total)
            self.flag(stager, self.word("pushed", *at), 0)
            yield

    def number_there(self: Rank, domain: int, number: int) -> int:
        """A copy's number where it is pushed to: a domain of one rank has no other copy of the token."""
        return number if len(self.peers) > 1 or domain == self.domain else 0

    def wanted(self: Rank, op: Operation, domain: int, token: int) -> tuple[int, ...]:
        """The numbers of a token's copies in a domain, of those that have rows."""
        if token >= len(op.ids[self.rank]):
            return ()
        named = self.shape.named(self.routes[op.along].ids[token])
        kept = [r for r in kept_of(self, op.along, token) if r in self.shape.domains[domain]]
        return tuple(self.number_there(domain, named.index(r)) for r in kept)

    def ask_all(self: Rank, op: Operation, block: int) -> Steps:
        """Ask other domains for sums, batch by batch, as owner; also where none are wanted."""
        for b in self.shared(self.shape.batches, block):
            for domain in self.other_domains():
                here = self.out_place("wanted out", domain, b)
                wanted = [self.wanted(op, domain, t) for t in self.of_batch(b, self.shape.tokens)]
                self.store(self.rank, here, wanted)
                target, there = self.shape.stager(self.rank, domain), self.place("wanted in", self.domain, b)
                self.put(target, [(here, there)], self.word("wanted", self.domain, b), 0)
                yield

    def pass_all(self: Rank, op: Operation, block: int) -> Steps:
        """Pass on the sums that owners of other domains ask for, as stager. Where a copy never comes, none of its
        batch."""
        others = self.other_domains()
        for item in self.shared(self.shape.batches * len(others), block):
            try:
                yield from self.pass_sums(op, others[item % len(others)], item // len(others))
            except Abandoned:
                continue

    def pass_sums(self: Rank, op: Operation, domain: int, b: int) -> Steps:
        owner, first = self.shape.stager(self.rank, domain), b * self.shape.batch
        yield from self.wait_number("wanted", self.word("wanted", domain, b), owner)
        wanted = self.read(self.rank, self.place("wanted in", domain, b))
        mask = sum(1 << i for i, numbers in enumerate(wanted) if numbers)
        for i, numbers in enumerate(wanted):
            for number in numbers:
                yield from self.wait("pushed", self.word("pushed", domain, number, first + i), *self.suspects(owner))
        if not mask:
            return
        yield
        self.put_scalars(domain, b)
        if self.is_whole(mask):
            cells = [
                (self.place("pushed", domain, 0, first + i), self.place("rows in", self.domain, b, row))
                for row, i in enumerate(bits(mask))
            ]
            self.put_cells("sum", domain, b, mask, cells)
            return
        for row, i in enumerate(bits(mask)):
            total = None
            for number in self.in_order([(domain, number, first + i) for number in wanted[i]]):
                total = add(total, self.read(self.rank, self.place("pushed", *number)))
            self.store(self.rank, self.out_place("rows out", domain, b, row), self.rounded(total))
            yield
        self.put_batch_of("sum", domain, b, mask)

    def suspects(self: Rank, owner: int) -> tuple[int, ...]:
        """Whose hellos a stager looks at that waits for a copy: it does not know which rank of its domain has it."""
        return self.peers

    def is_whole(self: Rank, mask: int) -> bool:
        """Whether sums are put from where they were pushed: of single copies, without gaps."""
        return len(self.peers) == 1 and mask & (mask + 1) == 0

    def rounded(self: Rank, total: Any) -> Any:
        return rounded(total)

    def in_order(self: Rank, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return places

    def put_scalars(self: Rank, domain: int, b: int) -> None:
        """Those of a batch that experts here have pushed."""
        cells = []
        for t in self.of_batch(b, self.shape.tokens):
            for k in range(self.shape.top_k):
                here = self.place("scalars", domain, t, k)
                if self.network.is_of(self.rank, here, self.epoch):
                    cells.append((here, self.place("scalars in", self.domain, t, k)))
        self.put_cells("returned", domain, b, 0, cells)

    def add_all(self: Rank, op: Operation, block: int) -> Steps:
        """Add up what the domains have sent, and what was pushed here, as owner."""
        chosen = self.routes[op.along]
        for t in self.shared(len(chosen.ids), block):
            result, scalars, b = None, [], t // self.shape.batch
            holders = {k: self.shape.rank_of(e) for k, e in enumerate(chosen.ids[t]) if chosen.send_rows[t][k] >= 0}
            for domain, ranks in enumerate(self.shape.domains):
                numbers = self.wanted(op, domain, t)
                if not numbers:
                    continue
                if domain == self.domain:
                    partial, area = None, "scalars"
                    for at in self.in_order([(domain, number, t) for number in numbers]):
                        holder = self.shape.named(chosen.ids[t])[at[1]]
                        yield from self.wait("pushed", self.word("pushed", *at), holder)
                        partial = add(partial, self.read(self.rank, self.place("pushed", *at)))
                else:
                    stager, area = self.shape.stager(self.rank, domain), "scalars in"
                    yield from self.wait_number("scalars arrived", self.word("returned", domain, b), stager)
                    mask = yield from self.wait_number("sums arrived", self.word("sum", domain, b), stager)
                    partial = self.read(self.rank, self.place("rows in", domain, b, row_in(mask, t % self.shape.batch)))
                result = add(result, partial)
                for k, holder in holders.items():
                    if holder in ranks:
                        scalars.append((k, self.read(self.rank, self.place(area, domain, t, k))))
            self.totals[t] = rounded(result), tuple(sorted(scalars))
            yield
        if len(self.totals) == len(chosen.ids):
            self.result = tuple(self.totals[t] for t in range(len(chosen.ids)))
