"""Symmetric memory of the latency kernels: marked lines only; across NVLink domains also words.

Data is sent in packets: 480 bytes of payload in four 128-byte lines, each of which ends with the 8-byte mark of the
operation. A line with the current mark has arrived, because its memory never holds anything except such lines, and no
two operations have the same mark. This memory is therefore separate from the staging of the throughput kernels.
"""

import bisect
from typing import Any

from ..heap import Heap, Problem, records, words

PACKET_BYTES = 512
"""Bytes of a packet: four marked lines of 128."""
PAYLOAD_BYTES = 480
"""Bytes of a packet without the marks of its lines."""
PAYLOAD_VECTORS = PAYLOAD_BYTES // 16
"""Vectors of 16 bytes in a packet's payload."""

ROUTE_HEADER_BYTES = 16
"""Bytes of a route before its 16-bit expert ids in entry order: capacity, alignment, slots (int32), and four that are
unused."""

MOST_EXPERTS = 65534
"""The most experts that 16-bit ids can distinguish, and one value for none."""

MOST_BLOCK_BYTES = 113 * 1024
"""Largest shared memory of a block, in bytes, so that two blocks fit on a multiprocessor: a kernel of another
communicator can then run concurrently. (The system reserves one of 228 KiB for each block.)"""

WARPS = 16
"""Warps of a block."""


def packets(nbytes: Any) -> Any:
    """Packets that carry `nbytes`, a Python or a run-time integer."""
    return (nbytes + PAYLOAD_BYTES - 1) // PAYLOAD_BYTES


def route_packets(p: Problem, tokens: int) -> int:
    """Packets of a route of at most so many tokens."""
    return packets(ROUTE_HEADER_BYTES + 2 * tokens * p.top_k)


def placed(p: Problem) -> int:
    """Return the sizes of tables that do not depend on tokens: all experts; token-major: all ranks, or twice the
    experts of one rank."""
    return max(p.num_experts, p.world_size, 2 * p.local_experts)


def table_ints(p: Problem, tokens: int) -> dict[str, int]:
    """Return the length of each table of a dispatch block (`place.RouteTables`), in int32. `earlier` counts with 16
    bits, which suffice because `rows` would not fit otherwise; so does `order`, which exists across NVLink domains."""
    w, e = p.world_size, placed(p)
    return {
        **({"order": -(-w * tokens // 2)} if p.num_domains > 1 else {}),
        "route": w * route_packets(p, tokens) * (PAYLOAD_BYTES // 4),
        "rows": w * (-(-tokens * p.top_k // 32) * 32),
        "earlier": WARPS * e // 2,
        "start": e,
        "limit": e,
        "asked": e,
        "found": 2 * WARPS,
    }


def block_bytes(p: Problem, tokens: int) -> int:
    """Return the shared memory of a dispatch block in bytes."""
    return 4 * sum(table_ints(p, tokens).values())


def most_tokens(p: Problem) -> int:
    """Return the largest token bound that the latency kernels can be compiled for, 0 if there is none."""
    if p.num_experts > MOST_EXPERTS:
        return 0
    bounds = range(1, p.max_tokens + 1)
    return bisect.bisect_right(bounds, MOST_BLOCK_BYTES, key=lambda tokens: block_bytes(p, tokens))


class LatencyHeap(Heap):
    """The heap with two more sections behind it: a route of each rank, and rows.

    A route's address is [bank][source rank]. A row's is [bank][source rank][token] in a dispatch, in a combine
    [bank][copy of the token][token], which is no more: in each operation an address has one writer at most. Where rows
    are bundled (../internode/bundled.py) it is [bank][source rank][number] in both.

    Across NVLink domains each of these has a word (`routes_words`, `lines_words`), and what goes to other domains is
    put together in a send area (../internode/far.py): a route by [bank][rank that it goes to], a row by [bank][rank
    that it goes to][its owner's token, or its number].
    """

    def __init__(self, p: Problem, tokens: int) -> None:
        super().__init__(p)
        self.tokens = tokens
        self.weight_bytes = (p.top_k * 4 + 15) // 16 * 16
        # Rows in a format need no more packets, unless they are so short that weights do (quantized.py).
        self.row_stride = max(packets(p.row_bytes + self.weight_bytes), -(-p.top_k // 4)) * PACKET_BYTES
        self.route_packets = route_packets(p, tokens)
        sent = {
            "routes": records(PACKET_BYTES, p.world_size, self.route_packets),
            "lines": records(self.row_stride, p.world_size * tokens),
        }
        self.take(**sent)
        if p.num_domains > 1:
            self.take(
                **{f"{name}_out": section for name, section in sent.items()},
                routes_words=words(p.world_size),
                lines_words=words(p.world_size * tokens),
            )
