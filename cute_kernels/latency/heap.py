"""Symmetric memory of the latency kernels: marked lines, and nothing else ever.

What travels is cut into packets: 480 bytes of payload in four 128-byte lines, each of which ends with the 8-byte mark
of the operation. A line with the current mark is a line that has arrived, because a line's place never holds anything
but lines of this kind, and no two operations have the same mark. Therefore this memory is apart from what the
throughput kernels stage.
"""

from typing import Any

from ..heap import Heap, Problem

PACKET_BYTES = 512
"""Bytes of a packet: four marked lines of 128."""
PAYLOAD_BYTES = 480
"""Bytes of a packet without the marks of its lines."""
PAYLOAD_VECTORS = PAYLOAD_BYTES // 16
"""Vectors of 16 bytes in a packet's payload."""

ROUTE_HEADER_BYTES = 16
"""Bytes of a route before its 16-bit expert ids in entry order: capacity, alignment, slots (int32), and four that are
unused."""

MAX_EXPERTS = 1024
"""The most experts that these kernels take: blocks count entries by warp and expert in shared memory."""

MAX_ENTRIES = 24576
"""The most entries (source rank, token, k) that a block holds in shared memory, 6 bytes each."""


def packets(nbytes: Any) -> Any:
    """Packets that carry `nbytes`, a Python or a run-time integer."""
    return (nbytes + PAYLOAD_BYTES - 1) // PAYLOAD_BYTES


def most_tokens(p: Problem) -> int:
    """The largest token bound that the latency kernels can be compiled for; 0: none."""
    if p.num_experts > MAX_EXPERTS:
        return 0
    return min(p.max_tokens, MAX_ENTRIES // (p.world_size * p.top_k))


class LatencyHeap(Heap):
    """The heap with two more sections behind it: a route of each rank, a row of each (source rank, token).

    Their addresses are [bank][source rank] and [bank][source rank][token]; one writer each, the source rank.
    """

    def __init__(self, p: Problem, tokens: int) -> None:
        super().__init__(p)
        self.tokens = tokens
        self.weight_bytes = (p.top_k * 4 + 15) // 16 * 16
        self.row_stride = packets(p.row_bytes + self.weight_bytes) * PACKET_BYTES
        self.route_packets = packets(ROUTE_HEADER_BYTES + 2 * tokens * p.top_k)
        self.routes, self.routes_stride = self.take(p.world_size * self.route_packets * PACKET_BYTES)
        self.lines, self.lines_stride = self.take(p.world_size * tokens * self.row_stride)
        self.nbytes = self.end

    def sizes(self) -> dict[str, int]:
        """Bytes by purpose, of both banks."""
        return {**super().sizes(), "marked lines": 2 * (self.routes_stride + self.lines_stride)}
