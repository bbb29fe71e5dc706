"""Where everything lies in a rank's symmetric memory. The same on every rank, so an offset names a place on all peers.

Everything that peers write or read is held in two banks, which operations use in turn, by the parity of their epoch:
when a rank writes into bank `e % 2` in operation e, all its peers have left operation e - 2, because each of them
announced operation e - 1 (the hello flag, see sync.py) and an operation does not end before all its hellos were seen.
"""

from dataclasses import dataclass
from functools import cached_property

MOST_RANKS = 31
"""The most ranks that kernels take: a lane of a warp looks after each, and one more after a combine's residual. (With
32 ranks the residual's lane would be missing, and the residual left out without a word.)"""

CHUNK_BYTES = 28 * 1024
"""The most bytes of a chunk of staged rows, unless `LEAST_CHUNK_TOKENS` rows are longer."""
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 2, 8
"""The fewest and the most tokens of a chunk of staged rows."""

SHARED_BYTES = 226 * 1024
"""Bytes of shared memory that kernels plan with for a block."""
RING_BYTES = 150 * 1024
"""The most bytes of a pulling block's ring of rows. What all blocks have asked for queues up at the links, and flags
behind it: a larger ring moves no more and lets every flag come later."""
PLACING_WARPS = 32
"""Warps of a block that places the route."""

HEADER_INTS = 16
"""Size of the published header in int32. It holds tokens, capacity, alignment and slots; the rest is unused."""

REASON_BYTES = 512
"""The most bytes of the text that says why a rank refuses an operation; a multiple of 8."""

# Words (8 bytes each) of the rank's own state, at the start of the heap; peers do not touch them.
EPOCH, FAILED, TICKET, REFUSED = 0, 1, 2, 3
CLAIMS = 16  # a line of its own: all warps count here
STATE_BYTES = 256


@dataclass(frozen=True)
class Problem:
    """What kernels are compiled for: everything that all calls of one communicator share.

    `row_bytes` is hidden size × item size, a multiple of 16. `dtype` is "bf16", "fp16" or "fp32".
    """

    world_size: int
    experts_per_rank: tuple[int, ...]
    top_k: int
    hidden_size: int
    dtype: str
    max_tokens: int

    @property
    def tiles(self) -> int:
        """Into how many tiles of consecutive tokens a rank cuts its route, one block each. What a block reads of all
        ranks' counts (world_size × tiles × experts) stays below 128 KiB."""
        return max(1, min(16, 2**15 // (self.world_size * self.num_experts)))

    @property
    def table_entries(self) -> int:
        """Ints that a block has for the route: counting takes [warps, E], placing [W, E] twice, one after the other."""
        return max(PLACING_WARPS, 2 * self.world_size) * self.num_experts

    @property
    def placing_bytes(self) -> int:
        """Shared memory of a block that places the route: the tables, two ints for each expert, four for each rank, and
        a kilobyte for the rest."""
        return (self.table_entries + 2 * self.num_experts + 4 * self.world_size) * 4 + 1024

    @property
    def most_experts(self) -> int:
        """As many as leave a kilobyte to the blocks that stage, which have the same shared memory."""
        each = 4 * (self.table_entries // self.num_experts + 2)
        return (SHARED_BYTES - 1024 - self.placing_bytes) // each + self.num_experts

    @property
    def chunk_tokens(self) -> int:
        """Tokens of x that are staged, and announced to the peers, together: few, since peers wait for the first, but
        enough bytes for a bulk copy."""
        return max(LEAST_CHUNK_TOKENS, min(MOST_CHUNK_TOKENS, CHUNK_BYTES // self.row_bytes))

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.itemsize

    @cached_property
    def first_expert(self) -> tuple[int, ...]:
        """Global id of each rank's first expert, and num_experts at the end: world_size + 1 entries."""
        first = [0]
        for n in self.experts_per_rank:
            first.append(first[-1] + n)
        return tuple(first)


def _align(n: int, to: int = 256) -> int:
    return (n + to - 1) // to * to


class Heap:
    """Byte offsets into the symmetric memory of one rank. Each `*_stride` is the distance of the two banks."""

    def __init__(self, p: Problem) -> None:
        self.problem = p
        w, t = p.world_size, p.max_tokens
        self.chunks = (t + p.chunk_tokens - 1) // p.chunk_tokens
        entries = t * p.top_k
        self.end = STATE_BYTES
        # Flags: 8 bytes each, one writer each (the source rank), read by this rank alone.
        self.hello, self.hello_stride = self.take(w * 8)
        self.route, self.route_stride = self.take(w * p.tiles * 8)
        self.placed, self.placed_stride = self.take(p.tiles * 8)
        self.staged, self.staged_stride = self.take(w * 8)
        self.chunk, self.chunk_stride = self.take(w * self.chunks * 8)
        self.token, self.token_stride = self.take(w * t * 8)
        self.fetched, self.fetched_stride = self.take(w * 8)
        # Set by any rank that refuses the operation, which leaves its reason with every rank.
        self.refusal, self.refusal_stride = self.take(8)
        self.reason, self.reason_stride = self.take(w * REASON_BYTES)
        self.flags_end = self.end
        # What this rank publishes and its peers read.
        self.header, self.header_stride = self.take(HEADER_INTS * 4)
        self.counts, self.counts_stride = self.take(p.tiles * p.num_experts * 4)
        self.experts, self.experts_stride = self.take(entries * 4)
        self.positions, self.positions_stride = self.take(entries * 4)
        self.weights, self.weights_stride = self.take(entries * 4)
        # What peers write here in a combine: one scalar for each (token, k), one row for each (source rank, token).
        # Dispatch stages the rank's own rows at the start of the same space: the banks alternate for all operations
        # alike.
        self.scalars, self.scalars_stride = self.take(entries * 4)
        self.rows, self.rows_stride = self.take(w * t * p.row_bytes)
        self.nbytes = self.end

    def take(self, nbytes: int) -> tuple[int, int]:
        start, stride = self.end, _align(nbytes)
        self.end += 2 * stride
        return start, stride

    def sizes(self) -> dict[str, int]:
        """Bytes by purpose, of both banks."""
        published = self.scalars - self.header
        return {
            "flags": self.flags_end,
            "published routes": published,
            "gradients of weights": 2 * self.scalars_stride,
            "staged rows": 2 * self.rows_stride,
        }
