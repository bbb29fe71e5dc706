"""The lists of what arrives at a rank (`arrivals` of a route), and how warps walk over them.

A copy is the visit of a token at a rank: all rows here of one (source rank, token). `arrivals` is int32
[4 R + W + 3] for R rows, three lists one after the other:

  copies   [R + 1, 2]  where the copy's rows begin in `owned`, and its home; by source rank, then by token
  owned    [R, 2]      the rows of each copy by k ascending, copy after copy: the row, and the (source rank, token, k)
                       that asked for it, as a flat index
  sources  [W + 1]     where the copies of each source rank begin; the last: how many there are

The pair behind the last copy holds how many rows have an owner. What lies behind the last copy and behind the last row
is undefined. A home is (source rank × max_tokens + token) × most_copies + the copy's number at its owner, where a
token's copies are numbered 0, 1, ... over the ranks that its ids name, ascending.

Example, to which the other files refer. Two ranks hold two experts each: 0 and 1, 2 and 3. Each has two tokens with two
experts (top_k = max_tokens = most_copies = 2):

    rank 0   token 0: experts 2, 0    token 1: experts 3, 2
    rank 1   token 0: experts 2, 1    token 1: experts 0, 1

At rank 1, rows grouped by expert are: 0, 1, 2 of expert 2, from (rank 0, token 0, k 0), (0, 1, 1) and (1, 0, 0); and 3
of expert 3, from (0, 1, 0). Its lists are

    copies   [0, 1] [1, 2] [3, 5] [4, -]
    owned    [0, 0] [3, 2] [1, 3] [2, 4]
    sources  0 2 3

The second copy, of token 1 of rank 0, has two rows, `owned` 1 and 2: for its k 0 row 3 and
asker (0 × 2 + 1) × 2 + 0 = 2, for its k 1 row 1 and asker 3. It is that token's only copy, number 0, so its home is
(0 × 2 + 1) × 2 + 0 = 2. The first copy, of token 0 of rank 0, is number 1, because that token names an expert of rank 0
as well.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute import arch

from .heap import Problem
from .sync import BAD_ROW, Ranks, reject
from .views import Ints, Pairs


class Lists(NamedTuple):
    """The three lists."""

    copies: Pairs
    owned: Pairs
    sources: Ints


def lists(arrivals: Int64, num_rows: Int32) -> Lists:
    """Return the lists of `arrivals` for a buffer of `num_rows`."""
    copies = Pairs(arrivals)
    each = copies.at(num_rows) - arrivals
    return Lists(copies, Pairs(arrivals + each + copies.step), Ints(arrivals + 2 * each + copies.step))


class Copy(NamedTuple):
    """A copy, before its rows are known. A copy that does not exist has no rows."""

    begin: Int32
    end: Int32  # nothing is worked out of these until they are used: a warp would wait for their loads
    home: Int32
    source: Int32  # the rank that it comes from

    @property
    def rows(self) -> Int32:
        """Number of rows."""
        return self.end - self.begin


class Walk(NamedTuple):
    """State of a warp that finds copies by the number of an item."""

    sources: Any  # [W + 1] in shared memory
    lists: Lists
    num_rows: Int32
    max_tokens: Int32
    items: Int32  # how many there are


@cute.jit
def begin_walk(ranks: Ranks, smem_sources: Any, arrivals: Int64, num_rows: Int32, max_tokens: Int32) -> Walk:
    """By every warp of a block, each for itself and all with the same values: `smem_sources` holds W + 1 ints that a
    barrier behind this hands to nobody else.

    Nothing orders the stores of one warp with the loads and stores of the others, which racecheck reports. A warp
    loads a word after it has stored the word itself (warp barrier below), all stores to a word are of one value, and a
    word is loaded and stored whole. So every load returns that value, whichever warp's store it observes.

    Items are (number within a source, source), so that all links are busy all the time: of each source as many as the
    one with the most has.
    """
    world_size = ranks.heap.problem.world_size
    lane = arch.lane_idx()
    at = lists(arrivals, num_rows)
    most = Int32(0)
    for source in cutlass.range(lane, world_size + 1, 32):
        begin = cutlass.min(cutlass.max(at.sources[source], 0), num_rows)
        smem_sources[source] = begin
        if source < world_size:
            end = cutlass.min(at.sources[source + 1], num_rows)
            most = cutlass.max(most, end - begin)
    most = cutlass.min(arch.warp_redux_sync(most, "max"), max_tokens)  # whatever the list says
    # Every lane's part comes before the other lanes' reads.
    arch.sync_warp()
    return Walk(smem_sources, at, num_rows, max_tokens, most * world_size)


@cute.jit
def copy_of(ranks: Ranks, walk: Walk, item: Int32) -> Copy:
    """By each lane: the copy of an item, if there is one."""
    world_size = ranks.heap.problem.world_size
    begin, end, home, source = Int32(0), Int32(0), Int32(0), Int32(0)
    if item < walk.items:
        # Unsigned numbers take fewer instructions to divide, and warps that add up rows have none to spare.
        number = Int32(Uint32(item) // world_size)
        # Rotated from number to number, and from rank to rank, so that no warp and no rank meets one source only.
        turns = item + number + (number >> 2) + (number >> 4) + ranks.rank + 1
        source = Int32(Uint32(turns) % world_size)
        index = walk.sources[source] + number
        if index < walk.sources[source + 1]:
            begin, home, end = walk.lists.copies.with_next(index)
    return Copy(begin, end, home, source)


@cute.jit
def copies_of_other(ranks: Ranks, walk: Walk) -> Int32:
    """Return how many copies there are of the tokens of the other one of two ranks."""
    other = 1 - ranks.rank
    return cutlass.min(walk.sources[other + 1] - walk.sources[other], walk.max_tokens)


@cute.jit
def copy_of_other(ranks: Ranks, walk: Walk, number: Int32) -> Copy:
    """By each lane: a copy of a token of the other one of two ranks, by its number, if there is one."""
    begin, end, home, source = Int32(0), Int32(0), Int32(0), 1 - ranks.rank
    index = walk.sources[source] + number
    if number < walk.max_tokens and index < walk.sources[source + 1]:
        begin, home, end = walk.lists.copies.with_next(index)
    return Copy(begin, end, home, source)


@cute.jit
def guarded(ranks: Ranks, num_rows: Int32, max_tokens: Int32, copy: Copy) -> Copy:
    """By each lane: the copy, without rows if its place in the lists or its home cannot be, which is reported. Whatever
    integers an operator is called with, nothing outside of its tensors is read or written."""
    problem = ranks.heap.problem
    begin, end, home, source = copy
    count = end - begin
    token, _ = token_of(problem, copy, max_tokens)
    fits = Uint32(count) <= problem.top_k and begin >= 0 and end <= num_rows
    if count != 0 and not (fits and Uint32(token) < Uint32(max_tokens) and Uint32(source) < problem.world_size):
        reject(ranks, BAD_ROW, begin, num_rows)
        end = begin
    return Copy(begin, end, home, source)


@cute.jit
def row_of(walk: Walk, copy: Copy) -> tuple[Int32, Int32]:
    """By a warp: lane i gets the copy's i-th row, -1 behind the last, and who asked for it."""
    lane = arch.lane_idx()
    row, asker = Int32(-1), Int32(-1)
    # Where a list is garbage (`guarded` looks at that) nothing outside of it is read.
    if lane < copy.rows and copy.begin >= 0 and copy.begin + lane < walk.num_rows:
        row, asker = walk.lists.owned[copy.begin + lane]
    return row, asker


@cute.jit
def token_of(problem: cutlass.Constexpr[Problem], copy: Copy, max_tokens: Int32) -> tuple[Int32, Int32]:
    """Return the index of a copy's token at its source, and the copy's number."""
    token = Int32(Uint32(copy.home) // problem.most_copies)
    return token - copy.source * max_tokens, copy.home - token * problem.most_copies


@cute.jit
def given_row(ranks: Ranks, row: Int32, num_rows: Int32) -> Int32:
    """Return a row of a given route, or -1, after reporting it, if it exceeds `num_rows`. Kernels that place the route
    themselves need no such check."""
    if row >= num_rows:
        reject(ranks, BAD_ROW, row, num_rows)
        row = Int32(-1)
    return row
