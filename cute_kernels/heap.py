"""Layout of a rank's symmetric memory. It is the same on every rank, so an offset names a place on all peers.

Everything that peers write or read exists in two banks, which operations use alternately, by the parity of their epoch.
When a rank writes to bank `e % 2` in operation e, all its peers have left operation e - 2: each of them announced
operation e - 1 with its hello flag (sync.py), and an operation does not end before it has seen all its hellos.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

MOST_RANKS = 72
"""The most ranks of an NVLink domain that kernels take: as many GPUs as map each other's memory today."""
MOST_RANKS_ACROSS = 1024
"""The most ranks of several domains: as many as an alarm can name (`marks.RANK_BITS`)."""

CHUNK_BYTES = 28 * 1024
"""The most bytes of a chunk of staged rows, unless `LEAST_CHUNK_TOKENS` rows are longer."""
LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 2, 8
"""The fewest and the most tokens of a chunk of staged rows."""

BATCH_BYTES = 128 * 1024
"""About how many bytes of rows cross to another NVLink domain in one put (benchmarks/results/domains.md)."""
MOST_BATCH_TOKENS = 16
"""The most tokens that the rows of one put are of: a bit for each has to fit into its word."""

SHARED_BYTES = 226 * 1024
"""Bytes of shared memory that kernels plan with for a block."""
RING_BYTES = 150 * 1024
"""The most bytes of a pulling block's ring of rows. What all blocks have asked for queues up at the links, and flags
behind it: a larger ring moves no more and lets every flag come later."""
SEND = 0.45
"""Cost of sending a copy's sum in a combine, relative to adding a row."""
PLACING_WARPS = 32
"""Warps of a block that places the route."""
COUNTING_BYTES = 128 * 1024
"""The most bytes of shared memory for counters of single warps while a tile is counted."""

CAPACITY, ALIGNMENT, SLOTS, COPIES = 0, 1, 2, 3
"""Values that a rank sends after its counts: the first three are arguments of its call, the last is the number of its
tile's tokens that name an expert of the destination rank."""
SETTINGS_INTS = 8
"""Number of int32 reserved for these values; a multiple of 4, of which some are unused."""
ENTRY_BYTES = 16
"""Size of an entry: what a rank sends to the rank of an expert about one (token, k) that names it."""

REASON_BYTES = 512
"""Size of the text that gives the reason for rejecting an operation; a multiple of 8."""

GUARD_BYTES = 64
"""Unused bytes after every bank of every buffer. Tests check that nothing writes to them."""

# Each rank logs its latest operations, to diagnose hangs. The hosts of its peers may read the log.
NOTES = 16
"""Number of log entries, indexed by the lowest bits of the epoch."""
BEGUN, MET, GAVE_UP = 1, 2, 3
"""Words of a log entry after the operation's mark: when the rank began it, when it had seen that all ranks have begun
it, and when a wait of it failed. In ns of the device's clock. Values of an earlier operation may remain."""
NOTE_WORDS = 4
WAIT_BITS, WAIT_UNIT = 27, 10
"""Each log entry has one word for each rank: the longest wait of a thread for that rank in the operation, in
2**WAIT_UNIT ns, in the lowest WAIT_BITS bits. The bits above contain how often the entry has been used (epoch //
NOTES), so that the largest word is of the latest operation: 37 bits, enough for 2**41 operations."""
SUM_LAG = 4
"""With `Problem.counts_waits`, an operation adds the waits of the operation this many before it to their sums. That one
has ended on all ranks, and its log entry is not used again yet."""

# Words (8 bytes each) of the rank's own state, at the start of the heap. Peers do not touch them, except FAILED, and
# read EPOCH and ALIVE.
EPOCH = 0  # the number of the current operation, from 1 on; marks contain its lowest bits (marks.base_of)
FAILED = 1  # whether this rank has given up (sync.py); read together with EPOCH, as 16 aligned bytes
VACANT, VACANT_WORDS = 2, 2  # reserved for a mask of `MOST_RANKS` ranks that operations leave out; always 0
TICKET = 4  # how many blocks have come to the end of the operation
REJECTED = 5  # whether an invalid value has been reported that the host has not read yet
LATE = 6  # mark of the last operation that reported a long wait
ALIVE = 7  # when some thread of this rank has last looked why it waits, by the clock of its GPU
# On a line of their own: numbers of items that warps have claimed. PUSHES are those of blocks that push rows while the
# next kernel of the operation claims its items. Both are set to 0 together, as 16 aligned bytes.
CLAIMS, PUSHES = 16, 17
STATE_BYTES = 256


class RowSizes:
    """Sizes of rows of `hidden_size` numbers of a `dtype`: "bf16", "fp16" or "fp32"."""

    hidden_size: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.itemsize


@dataclass(frozen=True)
class Problem(RowSizes):
    """Compile-time parameters that all kernels of a communicator share.

    `row_bytes` is a multiple of 16. `domains` lists the ranks of each NVLink domain in ascending order if there are
    several, and `wire` then moves data between them (internode/wire.py). `max_tokens` is the largest number of tokens
    of a rank whose rows one operation moves. `route_tokens` is the largest number of tokens of a route, 0 if equal to
    `max_tokens`; rows of larger routes are moved in several rounds, one operation each. `counts_waits`: kernels add up
    how long they wait for each rank.
    """

    world_size: int
    experts_per_rank: tuple[int, ...]
    top_k: int
    hidden_size: int
    dtype: str
    max_tokens: int
    domains: tuple[tuple[int, ...], ...] = ()
    wire: Any = None
    route_tokens: int = 0
    counts_waits: bool = False

    @property
    def planned_tokens(self) -> int:
        """The largest number of tokens of a rank in a route."""
        return self.route_tokens or self.max_tokens

    @property
    def num_domains(self) -> int:
        return max(1, len(self.domains))

    @property
    def domain_ranks(self) -> int:
        """Ranks of each domain."""
        return self.world_size // self.num_domains

    @property
    def bundles(self) -> bool:
        """Whether rows of the latency kernels for one rank of another domain share one put (internode/bundled.py)."""
        return self.wire is not None and self.wire.rows > 1

    @property
    def batch_tokens(self) -> int:
        """Consecutive tokens whose rows cross to another domain together, those that are needed there."""
        return max(1, min(MOST_BATCH_TOKENS, BATCH_BYTES // self.row_bytes))

    @property
    def weights_each(self) -> int:
        """fp32 numbers that a token's routing weights take; where they are put on a wire, whole vectors of 16 bytes."""
        return -(-self.top_k // 4) * 4 if self.domains else self.top_k

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's routing weights, and of its ids behind them."""
        return 2 * self.weights_each * 4

    @property
    def most_copies(self) -> int:
        """Largest number of copies of a token: it reaches no more ranks than it names experts."""
        return min(self.top_k, self.world_size)

    @property
    def has_room_for_pushes(self) -> bool:
        """Whether staging has room for every token of every rank, so that a dispatch can push rows to it."""
        return 1 < self.world_size == self.most_copies and self.num_domains == 1

    def pushed_slot(self, source: Any, token: Any) -> Any:
        """Return the number of a pushed row's place in the staging of the rank that receives it, and of its flag."""
        return source * self.max_tokens + token

    @property
    def adds_own(self) -> bool:
        """Whether owners of tokens add the rows that their own rank has of them in a combine of rows, round or quantize
        that sum as if it were sent, and add the other rank's, for which a lane is left. Only with two ranks: with more
        of them the link limits a combine, and a sum of two has the same bits in either order."""
        return self.world_size == 2 and self.num_domains == 1 and self.top_k < 32

    @property
    def tiles(self) -> int:
        """Into how many tiles of consecutive tokens a rank cuts its route, one block each. What a block reads of all
        ranks' counts (world_size × tiles × experts) stays below 512 KiB, unless one tile has more."""
        return max(1, min(16, 2**17 // (self.world_size * self.num_experts)))

    @property
    def tile_tokens(self) -> int:
        """The most tokens of a tile."""
        return -(-self.planned_tokens // self.tiles)

    @property
    def header_ints(self) -> int:
        """Ints of a message before its entries: how many name each expert, and `SETTINGS_INTS` more."""
        return -(-self.num_experts // 4) * 4 + SETTINGS_INTS

    def message_bytes(self, entries: Any) -> Any:
        """Return the size of a message of so many entries."""
        return self.header_ints * 4 + entries * ENTRY_BYTES

    @property
    def local_experts(self) -> int:
        """The most experts of a rank."""
        return max(self.experts_per_rank)

    @property
    def counters(self) -> int:
        """Number of counters of a tile: entries for each expert, then entries and copies for each rank."""
        return self.num_experts + 2 * self.world_size

    @property
    def counting_warps(self) -> int:
        """Number of warps of a block that count concurrently in separate counters, limited by the shared memory that
        the tile's tables leave."""
        left = SHARED_BYTES - 2048 - self.tile_bytes
        return max(1, min(PLACING_WARPS, min(COUNTING_BYTES, left) // (4 * self.counters)))

    @property
    def table_ints(self) -> int:
        """Number of int32 of a block's table for the route: counting uses it as [warps, counters], then placing as
        [2, W, local experts]."""
        return max(self.counting_warps * self.counters, 2 * self.world_size * self.local_experts)

    @property
    def placing_bytes(self) -> int:
        """Shared memory of a block that places the route: the tables, what there is for the whole tile, and a kilobyte
        for the rest."""
        return 4 * self.table_ints + self.tile_bytes + 1024

    @property
    def tile_bytes(self) -> int:
        """Shared memory for a whole tile: its counters, four ints for each expert, eight for each rank."""
        return 4 * (self.counters + 4 * self.num_experts + 8 * self.world_size)

    @property
    def fits(self) -> bool:
        """Whether the blocks that place the route have shared memory for so many experts. A kilobyte is left to the
        blocks that stage, which have the same."""
        return self.placing_bytes <= SHARED_BYTES - 1024

    @property
    def chunk_tokens(self) -> int:
        """Tokens of x that are staged, and announced to the peers, together: few, since peers wait for the first, but
        enough bytes for a bulk copy."""
        return max(LEAST_CHUNK_TOKENS, min(MOST_CHUNK_TOKENS, CHUNK_BYTES // self.row_bytes))

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    @cached_property
    def first_expert(self) -> tuple[int, ...]:
        """Global id of each rank's first expert, and num_experts at the end: world_size + 1 entries."""
        first = [0]
        for n in self.experts_per_rank:
            first.append(first[-1] + n)
        return tuple(first)


WORDS_OF_RANKS = ("hello", "rejected", "route")
"""Sections of words that the wire sets, as many for each source rank; those of the rank's own domain are stored."""
WORDS_OF_RAIL = ("batch", "wanted", "sum", "returned", "weighed")
"""All others of every heap. Each put sets one word of its own, so whoever counts them knows how many puts have come."""
WORDS_OF_LATENCY = ("routes_words", "lines_words")
"""Sections of the latency kernels, where the heap has them."""

PURPOSES = {
    **dict.fromkeys(("messages", "messages_out", "kept", "weights", "weights_in", "wanted_in", "wanted_out"), "routes"),
    **dict.fromkeys(("scalars", "scalars_in"), "gradients of weights"),
    **dict.fromkeys(("rows", "rows_in", "rows_out"), "staged rows"),
    **dict.fromkeys(("routes", "lines", "routes_out", "lines_out"), "marked lines"),  # of the latency kernels
}
"""Purposes of buffers in `ep_ops.memory_plan`. All buffers that are not listed hold flags."""


ELEMENT_BYTES = {"word": 8, "pair": 8, "int": 4, "float": 4, "byte": 1, "vector": 16, "record": 1}
"""Sizes of the kinds of elements (views.py). Records have a size of their own."""


class Section(NamedTuple):
    """Layout of a buffer: how many elements of a kind there are of each dimension, the slowest first."""

    element: str
    shape: tuple[int, ...]
    record_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        return self.record_bytes or ELEMENT_BYTES[self.element]

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.length * self.element_bytes


def words(*shape: int) -> Section:
    """Flags, counters and whatever else is synchronized."""
    return Section("word", shape)


def pairs(*shape: int) -> Section:
    return Section("pair", shape)


def floats(*shape: int) -> Section:
    return Section("float", shape)


def records(nbytes: int, *shape: int) -> Section:
    """Rows, messages and other records of so many bytes."""
    return Section("record", shape, nbytes)


def _padded(nbytes: int) -> int:
    """Return the size including the guard, rounded up to where the next buffer may begin."""
    return (nbytes + GUARD_BYTES + 255) // 256 * 256


class Heap:
    """Layout of the symmetric memory of one rank: `section` of each buffer, byte `offset` of its first bank, `distance`
    to its second, `size` of one in bytes. `guards`: where the bytes that nobody touches begin and end."""

    @classmethod
    @cache
    def of(cls, *sizes: Any) -> Any:
        """Return the layout for the arguments of the class, computed once for equal ones."""
        return cls(*sizes)

    def __init__(self, p: Problem) -> None:
        self.problem = p
        w, t, d = p.world_size, p.max_tokens, p.num_domains
        self.batches = (t + p.batch_tokens - 1) // p.batch_tokens
        self.chunks = (t + p.chunk_tokens - 1) // p.chunk_tokens
        self.tile_entries = p.tile_tokens * p.top_k
        self.message_bytes = p.message_bytes(self.tile_entries)
        self.masks_bytes = -(-p.batch_tokens // 4) * 16
        # What an owner asks for of a batch: a mask of copies for each token, and where gradients of weights of
        # token-major rows come home the experts that it names.
        self.wanted_bytes = self.masks_bytes + p.batch_tokens * p.weights_each * 4
        self.weights_bytes = p.planned_tokens * p.token_bytes
        self.nbytes = STATE_BYTES
        self.section: dict[str, Section] = {}
        self.offset: dict[str, int] = {}
        self.distance: dict[str, int] = {}
        self.size: dict[str, int] = {}
        self.guards: list[tuple[int, int]] = []
        self.take(
            # Flags: one writer each (the source rank), read by this rank alone.
            hello=words(w),
            route=words(w, p.tiles),
            counted=words(p.tiles),
            placed=words(p.tiles),
            staged=words(w),
            chunk=words(w, self.chunks),
            token=words(d * p.most_copies * t),
            fetched=words(w),
            rejection=words(1),  # set by any rank of the domain that rejects the operation, after its reason
            alarm=words(1),  # set once and for all by a rank that gives up (marks.Alarm); of one bank
            reason=records(REASON_BYTES, w),
            notes=words(NOTES, NOTE_WORDS),  # of one bank
            waited=words(NOTES, w),  # likewise
            # From each tile of each source rank: its counts, then its entries for experts of this rank.
            messages=records(self.message_bytes, w, p.tiles),
            # Exchanged between the blocks of this rank if rows are dropped: numbers of kept entries and copies.
            kept=pairs(p.tiles, w),
            # Routing weights, which peers read here; in a token-major dispatch each token's, and behind them its ids.
            weights=floats(p.planned_tokens * 2 * p.weights_each),
            # Written by peers in a combine: one scalar for each (token, k), one row for each copy of each token,
            # by [copy][token]. Dispatch stages the rank's own rows at the start of the same space, because the banks
            # alternate for all operations. In the backward of a token-major dispatch, peers write scalars to `messages`
            # instead, which that operation does not use otherwise. With several domains, a rank has both for the ranks
            # of its rail as well, by [slot] (domains.py).
            scalars=floats(d, t, p.weights_each),
            rows=records(p.row_bytes, d * p.most_copies * t),
        )
        if d > 1:
            self.take(**self._across())
        if p.counts_waits:
            self.take(waits=words(w))  # sums for each rank, in 2**WAIT_UNIT ns; of one bank

    def _across(self) -> dict[str, Section]:
        """Return the buffers for other domains: what their ranks put here, what is to be put to them (`_out`), both by
        [slot - 1], and what a rank forwards to the ranks of its own domain, by [source rank]."""
        p, others, ranks = self.problem, self.problem.num_domains - 1, self.problem.world_size
        batches = others, self.batches
        return {
            **{name: words(*batches) for name in ("batch", "wanted", "sum", "returned")},
            "weighed": words(others, p.tiles),
            **{name: words(ranks) for name in ("rejected", "put_counts", "puts")},  # see rejected.settle
            "relayed": words(ranks, self.batches),
            "relayed_weights": words(ranks, p.tiles),
            "messages_out": records(self.message_bytes, ranks, p.tiles),
            "weights_in": floats(others, p.planned_tokens * 2 * p.weights_each),
            "scalars_in": floats(others, p.max_tokens, p.weights_each),
            "wanted_in": records(self.wanted_bytes, *batches),
            "wanted_out": records(self.wanted_bytes, *batches),
            "rows_in": records(p.batch_tokens * p.row_bytes, *batches),
            "rows_out": records(p.batch_tokens * p.row_bytes, *batches),
        }

    def take(self, **sections: Section) -> None:
        """Lay out these buffers: one bank of all of them, then the other, so that all have the same distance."""
        end = self.nbytes
        for name, section in sections.items():
            self.section[name], self.offset[name], self.size[name] = section, end, section.nbytes
            end += _padded(section.nbytes)
        distance = end - self.nbytes
        ends = [*(self.offset[name] for name in sections), end][1:]
        for name, behind in zip(sections, ends, strict=True):
            self.distance[name] = distance
            begin = self.offset[name] + self.size[name]
            self.guards += [(begin + bank, behind + bank) for bank in (0, distance)]
        self.nbytes = end + distance

    def sizes(self) -> dict[str, int]:
        """Return the bytes of both banks by purpose."""
        found = {"flags": STATE_BYTES}
        for name, size in self.size.items():
            purpose = PURPOSES.get(name, "flags")
            found[purpose] = found.get(purpose, 0) + 2 * _padded(size)
        return found
