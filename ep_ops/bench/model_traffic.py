"""What an operation moves under balanced routing: rows and bytes of a rank, on average.

Each token chooses `top_k` different experts, every set of them as likely as any other; ranks have equally many. A token
misses a group of m experts with probability C(E - m, K) / C(E, K).
"""

from __future__ import annotations

import dataclasses
import math

from .model_memory import Layout, packet_bytes

ENTRY = 16
"""Bytes of an entry that is told."""
WORD = 8
"""Bytes of a flag or of a batch's word."""
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
    """Probability that a token has none of so many experts."""
    chosen = min(layout.top_k, layout.experts)
    return math.comb(layout.experts - round(experts), chosen) / math.comb(layout.experts, chosen)


def expected(layout: Layout) -> ModelTraffic:
    """Of experts that all ranks have equally many of; ValueError where that does not come out even."""
    if layout.experts % layout.ranks:
        raise ValueError(f"experts is {layout.experts}; it must be a multiple of the {layout.ranks} ranks")
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
    """Of a token, its own included: by that others count their bytes."""
    return layout.domains * (1 - missed(layout, layout.experts // layout.domains))


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of one rank in one operation, in one direction: rows, and all else (routes, headers, flags, words)."""

    near_rows: float
    near_other: float
    far_rows: float
    far_other: float
    puts: float  # on the wire

    @property
    def near(self) -> float:
        return self.near_rows + self.near_other

    @property
    def far(self) -> float:
        return self.far_rows + self.far_other


def dispatch_bytes(layout: Layout) -> Bytes:
    """Many tokens, a fresh route, with weights. Every batch is put, of no rows a word."""
    t = expected(layout)
    others, near, far = layout.domains - 1, layout.domain_ranks - 1, layout.ranks - layout.domain_ranks
    share = t.expanded / layout.ranks  # entries for one rank
    counts = layout.tiles * layout.counts_bytes
    puts = others * layout.rounds * layout.batches + (far + others) * layout.tiles + far * layout.rounds
    relayed = others * (layout.rounds * layout.batches + layout.tiles)
    return Bytes(
        near_rows=t.near * layout.row_bytes,
        near_other=near * (ENTRY * share + counts + 4 * layout.domains * share)  # weights are fetched one by one
        + WORD * near * (layout.rounds * (1 + layout.chunks) + layout.tiles + relayed),
        far_rows=t.crossing * layout.row_bytes,
        far_other=far * (ENTRY * share + counts) + others * layout.tokens * layout.weights_bytes + WORD * puts,
        puts=puts,
    )


def combine_bytes(layout: Layout) -> Bytes:
    """Many tokens. What is asked goes out, sums come back: as much in each direction. Where nothing is asked of a batch
    no sums are put."""
    t = expected(layout)
    others, near, far = layout.domains - 1, layout.domain_ranks - 1, layout.ranks - layout.domain_ranks
    asked = others * layout.rounds * layout.batches
    unasked = missed(layout, layout.experts // layout.domains) ** layout.batch_tokens  # as if all batches were full
    puts = asked + asked * (1 - unasked) + far * layout.rounds
    return Bytes(
        near_rows=t.near * layout.row_bytes,
        near_other=WORD * (t.near + near * layout.rounds),
        far_rows=t.crossing * layout.row_bytes,
        far_other=asked * layout.wanted_bytes + WORD * puts,
        puts=puts,
    )


def bundled_puts(layout: Layout, rows: int) -> float:
    """Few tokens: puts of rows for one rank of another domain, up to so many rows in each."""
    tokens, reaches = layout.tokens, 1 - missed(layout, layout.experts // layout.ranks)
    return sum(
        math.comb(tokens, count) * reaches**count * (1 - reaches) ** (tokens - count) * -(-count // rows)
        for count in range(1, tokens + 1)
    )


def few_bytes(layout: Layout, combine: bool, rows: int = 1) -> Bytes:
    """Few tokens: marked lines within the domain, outside the same packets, a route or up to so many rows a put."""
    t = expected(layout)
    near_row = layout.row_bytes + (0 if combine else 4 * layout.top_k)
    near = t.few_near * near_row * LINE / PAYLOAD
    route = 0.0 if combine else (layout.domain_ranks - 1) * 2 * layout.top_k * layout.tokens * LINE / PAYLOAD
    others = layout.ranks - layout.domain_ranks
    row = packet_bytes(layout.row_bytes) if combine else layout.few_row_bytes
    routes = 0 if combine else others
    of_rows = t.few_far if rows == 1 else others * bundled_puts(layout, rows)
    puts = of_rows + routes + others  # hellos
    return Bytes(
        near_rows=t.few_near * layout.row_bytes,
        near_other=near - t.few_near * layout.row_bytes + route,
        far_rows=t.few_far * layout.row_bytes,
        far_other=t.few_far * (row - layout.row_bytes) + routes * layout.few_route_bytes(layout.tokens) + WORD * puts,
        puts=puts,
    )
