"""Formulas of the scale model: symmetric memory, bytes moved, and time, for any number of ranks and NVLink domains.

Memory is what cute_kernels/heap.py (many tokens) and cute_kernels/latency/sizes.py (few tokens) lay out, without
padding.

Traffic assumes balanced routing: each token chooses `top_k` different experts, every set of them equally likely, and
ranks have equally many experts. A token misses a group of m experts with probability C(E - m, K) / C(E, K).

Time is a constant for each operation plus its bytes at the speed of the bottleneck. In one domain that is NVLink or the
GPU's memory, whichever takes longer. With several domains it may also be the network. The network adds the latency of
one put, and the time of the first batch, since a batch is received whole before its rows are passed on; each round adds
this again. For few tokens each put also costs its sender some time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

from cute_kernels.heap import Problem
from cute_kernels.latency.sizes import PACKET_BYTES, LatencyHeap, packets, route_packets
from ep_ops.backends.cute.rates import Gpu, passing_rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ranks, and what an operation of them moves. `tokens` is of each rank."""

    domains: int
    domain_ranks: int
    tokens: int = 4096
    hidden: int = 7168
    itemsize: int = 2  # bytes of a number of a row
    experts: int = 256  # of all ranks
    top_k: int = 8
    round_tokens: int = 0  # tokens of a round; 0: one round
    few_tokens: int = 128  # the bound of the latency kernels

    @property
    def ranks(self) -> int:
        return self.domains * self.domain_ranks

    @cached_property
    def problem(self) -> Problem:
        """What kernels for rows of so many bytes would be compiled for."""
        count, size = self.ranks, self.domain_ranks
        domains = tuple(tuple(range(first, first + size)) for first in range(0, count, size))
        return Problem(
            count, (self.experts // count,) * count, self.top_k, self.row_bytes // 2, "bf16",
            self.of_round, domains if self.domains > 1 else (), route_tokens=self.tokens if self.round_tokens else 0,
        )  # fmt: skip

    @cached_property
    def heap(self) -> LatencyHeap:
        """Symmetric memory of these kernels."""
        return LatencyHeap(self.problem, self.few_tokens)

    @property
    def row_bytes(self) -> int:
        """Size of a row of x in bytes."""
        return self.hidden * self.itemsize

    @property
    def of_round(self) -> int:
        return self.round_tokens or max(1, self.tokens)

    @property
    def rounds(self) -> int:
        return max(1, -(-self.tokens // self.of_round))


SECTIONS = {
    "rows": ("rows_in",),
    "rows to be sent": ("rows_out",),
    "pushed sums": ("rows",),
    "routes": ("messages", "messages_out", "kept"),
    "scalars": ("weights", "weights_in", "scalars", "scalars_in"),
    "wanted": ("wanted_in", "wanted_out"),
    "few tokens": ("routes", "lines", "routes_out", "lines_out", "routes_words", "lines_words"),
}
"""Purpose of staging -> its sections of the heap. All other sections are words."""


def staging(layout: Layout) -> dict[str, int]:
    """Return the bytes of both banks by purpose, as the kernels lay them out."""
    sizes = dict(layout.heap.size)
    one = {purpose: sum(sizes.pop(name, 0) for name in names) for purpose, names in SECTIONS.items()}
    one["words"] = sum(sizes.values())
    return {purpose: 2 * size for purpose, size in one.items()}


def many_staging(layout: Layout) -> int:
    """Return the bytes of both banks for the throughput kernels."""
    return sum(size for purpose, size in staging(layout).items() if purpose != "few tokens")


def in_rounds(layout: Layout, limit: int) -> Layout:
    """Return the layout with the fewest rounds (a power of two) that keep the throughput kernels' memory within `limit`
    bytes. Raises ValueError if rounds of one token need more."""
    tokens = layout.tokens
    while True:
        found = dataclasses.replace(layout, round_tokens=tokens)
        if many_staging(found) <= limit:
            return found
        if tokens <= 1:
            raise ValueError(f"limit is {limit} bytes; rounds of one token take {many_staging(found)}")
        tokens = -(-tokens // 2)


# ---------------------------------------------------------------------- traffic

LINE, PAYLOAD = 128, 120
"""Bytes of a marked line, and of these what it carries."""


@dataclasses.dataclass(frozen=True)
class ModelTraffic:
    """Rows of one rank in one direction, on average. In a combine they run the other way."""

    copies: float  # that come to a rank: one for each (token, rank), its own included
    staged: float  # of them, those that it finds in its own memory, at its own stager's place
    crossing: float  # rows that leave a rank for other domains, two hops: one for each (token, domain)
    few_near: float  # few tokens: rows that leave for other ranks of the domain
    few_far: float  # likewise, of other domains
    expanded: float  # rows of a rank once each (token, expert) has its own

    @property
    def near(self) -> float:
        """Rows that a rank fetches over NVLink."""
        return self.copies - self.staged


def missed(layout: Layout, experts: float) -> float:
    """Return the probability that a token names none of so many experts."""
    chosen = min(layout.top_k, layout.experts)
    return math.comb(layout.experts - round(experts), chosen) / math.comb(layout.experts, chosen)


def expected(layout: Layout) -> ModelTraffic:
    """Return the average traffic if all ranks have equally many experts. Raises ValueError if the experts cannot be
    divided evenly."""
    if layout.experts % layout.ranks:
        raise ValueError(f"experts is {layout.experts}; allowed: a multiple of the {layout.ranks} ranks")
    held = layout.experts // layout.ranks
    reaches_rank = 1 - missed(layout, held)
    reaches_domain = 1 - missed(layout, held * layout.domain_ranks)
    return ModelTraffic(
        copies=layout.tokens * layout.ranks * reaches_rank,
        staged=layout.tokens * layout.domains * reaches_rank,
        crossing=layout.tokens * (layout.domains - 1) * reaches_domain,
        few_near=layout.tokens * (layout.domain_ranks - 1) * reaches_rank,
        few_far=layout.tokens * (layout.ranks - layout.domain_ranks) * reaches_rank,
        expanded=layout.tokens * min(layout.top_k, layout.experts),
    )


def reached_domains(layout: Layout) -> float:
    """Return the average number of domains that a token reaches, its own included."""
    return layout.domains * (1 - missed(layout, layout.experts // layout.domains))


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes that one rank moves in one operation, in one direction: rows, and routes of few tokens. Flags, headers and
    routes of many tokens are left out, which are 0.3 to 1.4 % as much."""

    near: float  # over NVLink
    far: float  # over the network
    puts: float  # over the network


def many_bytes(layout: Layout, op: str) -> Bytes:
    """Return the bytes of a throughput operation: a dispatch with a new route and weights, or a combine, whose ranks
    request sums. Every batch is put; batches without requests have no sums."""
    t, p = expected(layout), layout.problem
    others, far = layout.domains - 1, layout.ranks - layout.domain_ranks
    batches = others * layout.rounds * layout.heap.batches
    puts: float = batches + others * p.tiles + far * (p.tiles + layout.rounds)
    if op == "combine":
        unasked = missed(layout, layout.experts // layout.domains) ** p.batch_tokens  # as if all batches were full
        puts = batches * (2 - unasked) + far * layout.rounds
    return Bytes(t.near * layout.row_bytes, t.crossing * layout.row_bytes, puts)


def bundled_puts(layout: Layout, rows: int) -> float:
    """Return the number of puts of the latency kernels with up to `rows` rows for a rank of another domain in each."""
    tokens, reaches = layout.tokens, 1 - missed(layout, layout.experts // layout.ranks)
    return sum(
        math.comb(tokens, count) * reaches**count * (1 - reaches) ** (tokens - count) * -(-count // rows)
        for count in range(1, tokens + 1)
    )


def few_bytes(layout: Layout, combine: bool, rows: int = 1) -> Bytes:
    """Return the bytes of the latency kernels: marked lines within the domain; packets to other domains, with one put
    for a route or for up to `rows` rows."""
    t, others = expected(layout), layout.ranks - layout.domain_ranks
    near, far = t.few_near * layout.row_bytes, t.few_far * PACKET_BYTES * packets(layout.row_bytes)
    puts = others + (t.few_far if rows == 1 else others * bundled_puts(layout, rows))  # a hello for each rank
    if not combine:  # a route for each rank
        near += (layout.domain_ranks - 1) * 2 * layout.top_k * layout.tokens
        far = t.few_far * layout.heap.row_stride + others * PACKET_BYTES * route_packets(layout.problem, layout.tokens)
        puts += others
    return Bytes(near * LINE / PAYLOAD, far, puts)


# ---------------------------------------------------------------------- time

BUNDLING = 50e9
"""Bytes a second that a block puts together: assumed."""


@dataclasses.dataclass(frozen=True)
class WireSpeed:
    """A rank's network."""

    name: str
    rate: float  # bytes a second, in one direction
    latency: float  # µs from a put to its signal being seen
    put: float  # µs that each put takes its rank
    source: str  # where these numbers come from
    rows: int = 1  # of few tokens for one rank, at most, in a put (cute_kernels/internode/bundled.py)


def many_us(gpu: Gpu, wire: WireSpeed | None, layout: Layout, op: str) -> float:
    """Return the µs of a throughput dispatch or combine."""
    t = expected(layout)
    moved = many_bytes(layout, op)
    crossing = 3 * t.crossing  # packed, or added up and written; read by the wire; written where it arrives
    passing = passing_rows(op, t.copies, t.copies, t.expanded, layout.tokens) + crossing
    alone = gpu.us(op, moved.near, passing * layout.row_bytes)
    if wire is None or layout.domains == 1:
        return gpu.constants[op] + alone
    batch = 1e6 * layout.problem.batch_tokens * layout.row_bytes / wire.rate
    constant = gpu.constants[op] + wire.latency + gpu.flag + batch
    return layout.rounds * constant + max(alone, far_us(wire, moved))


def few_us(gpu: Gpu, layout: Layout, combine: bool, wire: WireSpeed | None = None) -> float:
    """Return the µs of a latency dispatch or combine."""
    moved = few_bytes(layout, combine, 1 if wire is None else wire.rows)
    near = 1e6 * moved.near / gpu.push
    constant = gpu.constants.get("few combine" if combine else "few dispatch", 0.0)
    if wire is None or layout.domains == 1:
        return constant + near
    return constant + max(near, bundling_us(layout, wire) + wire.latency + far_us(wire, moved))


def bundling_us(layout: Layout, wire: WireSpeed) -> float:
    """Return the µs before the first of several rows for a rank can be put, because a block assembles them."""
    rows = min(wire.rows, expected(layout).few_far / (layout.ranks - layout.domain_ranks))
    return 0.0 if wire.rows == 1 else 1e6 * rows * layout.heap.row_stride / BUNDLING


def far_us(wire: WireSpeed, moved: Bytes) -> float:
    return max(1e6 * moved.far / wire.rate, moved.puts * wire.put)


def sizes(ranks: Sequence[int], domain_ranks: int, tokens: int) -> list[Layout]:
    """Return layouts of `ranks` ranks in domains of `domain_ranks`, or in one domain if there are fewer. The number of
    experts is the smallest multiple of the ranks of at least 256; top-8, hidden size 7168, bf16."""
    found = []
    for count in ranks:
        domains = max(1, count // domain_ranks)
        experts = count * -(-256 // count)
        found.append(Layout(domains, count // domains, tokens, experts=experts, few_tokens=max(1, min(tokens, 256))))
    return found
