"""How much symmetric memory the protocols across NVLink domains take: the formulas of docs/across-domains.md. For many
tokens it is what cute_kernels/heap.py lays out, for few what cute_kernels/latency/heap.py does, but for padding."""

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
    most_batch_tokens: int = 16  # of a put, many tokens
    most_tiles: int = 16
    few_tokens: int = 128  # the bound of the latency kernels

    @property
    def ranks(self) -> int:
        return self.domains * self.domain_ranks

    @property
    def row_bytes(self) -> int:
        """Of x alone."""
        return self.hidden * self.itemsize

    @property
    def batch_tokens(self) -> int:
        """Consecutive tokens whose rows are one put, many tokens."""
        return max(1, min(self.most_batch_tokens, 2**16 // self.row_bytes))

    @property
    def batches(self) -> int:
        """Of a round."""
        return -(-self.of_round // self.batch_tokens)

    @property
    def chunks(self) -> int:
        """Of rows that are announced together within a domain, in a round."""
        return -(-self.of_round // max(2, min(8, 28 * 2**10 // self.row_bytes)))

    @property
    def tiles(self) -> int:
        """Into which a rank cuts its route."""
        return max(1, min(self.most_tiles, 2**17 // (self.ranks * self.experts)))

    @property
    def counts_bytes(self) -> int:
        """What a tile tells every rank: counts of all experts, and eight numbers more."""
        return 4 * (4 * -(-self.experts // 4) + 8)

    @property
    def told_bytes(self) -> int:
        """The same with the tile's entries, at most."""
        return self.counts_bytes + 16 * self.top_k * -(-self.tokens // self.tiles)

    @property
    def weights_bytes(self) -> int:
        """The scalars of a token's K experts, or its ids."""
        return 16 * -(-self.top_k // 4) if self.domains > 1 else 4 * self.top_k

    @property
    def wanted_bytes(self) -> int:
        """What is asked for a batch: a mask of copies for each token, and its ids."""
        return 16 * -(-self.batch_tokens // 4) + self.batch_tokens * self.weights_bytes

    @property
    def few_row_bytes(self) -> int:
        """A row of few tokens with its weights, in packets."""
        return max(packet_bytes(self.row_bytes + 16 * -(-self.top_k // 4)), 512 * -(-self.top_k // 4))

    def few_route_bytes(self, tokens: int) -> int:
        """The ids of so many tokens, in packets."""
        return packet_bytes(16 + 2 * tokens * self.top_k)

    @property
    def of_round(self) -> int:
        return self.round_tokens or max(1, self.tokens)

    @property
    def rounds(self) -> int:
        return max(1, -(-self.tokens // self.of_round))


def packet_bytes(nbytes: int) -> int:
    """Of packets that carry so many bytes: 480 in 512."""
    return 512 * -(-nbytes // 480)


def few_places(layout: Layout) -> dict[str, int]:
    """Places (rows, routes, words) of few tokens, of one bank: most of what a rank may need at once."""
    ranks, rows = layout.ranks, layout.ranks * layout.few_tokens
    return {
        "few rows": rows,
        "few rows to be sent": rows,
        "few routes": ranks,
        "few routes to be sent": ranks,
        "few words": rows + ranks,
    }


def words(layout: Layout) -> int:
    """Flags of one bank, many tokens: those that there are in one domain, and those of puts and of what is relayed."""
    ranks, others, tiles = layout.ranks, layout.domains - 1, layout.tiles
    copies = layout.domains * min(layout.top_k, ranks) * layout.of_round
    found = ranks * (3 + tiles + layout.chunks) + 2 * tiles + copies + 2
    if layout.domains > 1:
        found += others * (4 * layout.batches + tiles) + ranks * (layout.batches + tiles + 3)
    return found


def staging(layout: Layout) -> dict[str, int]:
    """Bytes by purpose, both banks."""
    d, ranks, tokens = layout.domains, layout.ranks, layout.of_round
    of = few_places(layout)
    few_rows, few_routes = (of[name] + of[f"{name} to be sent"] for name in ("few rows", "few routes"))
    few = few_rows * layout.few_row_bytes + few_routes * layout.few_route_bytes(layout.few_tokens) + 8 * of["few words"]
    batches = (d - 1) * layout.batches
    told = ranks * layout.tiles * layout.told_bytes
    one = {
        "rows": batches * layout.batch_tokens * layout.row_bytes,
        "rows to be sent": batches * layout.batch_tokens * layout.row_bytes,
        "pushed sums": d * min(layout.top_k, ranks) * tokens * layout.row_bytes,
        "routes": told * (2 if d > 1 else 1) + 8 * layout.tiles * ranks,
        # Weights and ids, which are told as the route is; pushed scalars, and returned ones.
        "scalars": (2 * d * max(1, layout.tokens) + (2 * d - 1) * tokens) * layout.weights_bytes,
        "wanted": 2 * batches * layout.wanted_bytes,
        "words": 8 * words(layout) + 512 * ranks + 512 + 128 * ranks,  # and the reasons of refusals, notes, waits
        "few tokens": few if d > 1 else 0,
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
