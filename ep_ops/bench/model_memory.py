"""How much symmetric memory the protocols across NVLink domains take: the formulas of docs/across-domains.md."""

from __future__ import annotations

import dataclasses


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
    batch_rows: int = 32  # rows of a put, many tokens
    few_tokens: int = 128  # the bound of the latency kernels
    few_batch_rows: int = 1  # rows of a put, few tokens

    @property
    def ranks(self) -> int:
        return self.domains * self.domain_ranks

    @property
    def row_bytes(self) -> int:
        """Of x alone."""
        return self.hidden * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """A row of many tokens with what travels beside it: its token, the ranks that need it, K scalars."""
        return self.row_bytes + 16 * -(-(16 + 4 * self.top_k) // 16)

    @property
    def few_slot_bytes(self) -> int:
        """A row of few tokens with its entries and weights."""
        return self.row_bytes + 16 * self.top_k

    @property
    def few_head_bytes(self) -> int:
        """Counts of all experts, capacity, alignment, slots, number of tokens."""
        return 2 * self.experts + 16

    @property
    def route_bytes(self) -> int:
        """The route of a rank for one domain, at most: counts, where each rank's entries begin, sizes, entries."""
        return 4 * self.experts + 4 * self.domain_ranks + 16 + 16 * self.top_k * self.tokens

    @property
    def of_round(self) -> int:
        return self.round_tokens or max(1, self.tokens)

    @property
    def rounds(self) -> int:
        return max(1, -(-self.tokens // self.of_round))


def places(layout: Layout) -> dict[str, int]:
    """Places (rows, heads, words) of one bank, by purpose: most of what a rank may need at once."""
    d, ranks, tokens = layout.domains, layout.ranks, layout.of_round
    copies = min(layout.top_k, ranks)
    batches = -(-tokens // layout.batch_rows)
    others = ranks - layout.domain_ranks
    return {
        "rows": d * tokens,
        "rows to be sent": (d - 1) * tokens,
        "pushed sums": d * copies * tokens,
        "routes": 2 * d - 1,
        "wanted": 2 * (d - 1),
        "words": d * (batches + copies * tokens + 3) + ranks * (tokens + 1) + layout.domain_ranks,
        "few rows": others * layout.few_tokens,
        "few rows to be sent": others * layout.few_tokens,
        "few heads": 2 * others,
        "few words": others * -(-layout.few_tokens // layout.few_batch_rows),
    }


def staging(layout: Layout) -> dict[str, int]:
    """Bytes by purpose, both banks."""
    of = places(layout)
    few = of["few rows"] + of["few rows to be sent"]
    one = {
        "rows": of["rows"] * layout.slot_bytes,
        "rows to be sent": of["rows to be sent"] * layout.slot_bytes,
        "pushed sums": of["pushed sums"] * layout.slot_bytes,
        "routes": of["routes"] * layout.route_bytes,
        "wanted": of["wanted"] * (16 + 8 * layout.of_round),
        "words": 8 * of["words"],
        "few tokens": few * layout.few_slot_bytes + of["few heads"] * layout.few_head_bytes + 8 * of["few words"],
    }
    return {purpose: 2 * size for purpose, size in one.items()}


def many_bytes(layout: Layout) -> int:
    """Bytes for many tokens, both banks."""
    return sum(size for purpose, size in staging(layout).items() if purpose != "few tokens")


def in_rounds(layout: Layout, limit: int) -> Layout:
    """The same in as few rounds (a power of two of them) as keep what many tokens take within `limit` bytes.

    Raises ValueError where rounds of one token would not.
    """
    tokens = layout.tokens
    while True:
        found = dataclasses.replace(layout, round_tokens=tokens)
        if many_bytes(found) <= limit:
            return found
        if tokens <= 1:
            raise ValueError(f"limit is {limit} bytes; rounds of one token take {many_bytes(found)}")
        tokens = -(-tokens // 2)
