"""The loop of a warp that moves rows through its ring, shared by pull, push, combine and gather.

A warp processes items. The first two are static; then it claims items that no other warp has, because SMs are not
equally fast. For each item it loads the entries of the lists step by step, two items ahead, so that it never waits for
a list. Rows are loaded by bulk copies that are started ahead, across the boundaries of items, until all stages of the
ring are in flight; then the oldest stage is used. Every latency is therefore paid once.
"""

from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import arch

from .. import ptx
from .ring import Ring


class Work(Protocol):
    """The work of a kernel in the loop. All methods are called by whole warps.

    `lists` is what items are looked up in, `state` what the warp has besides its ring. A job is a tuple of what is left
    to load of an item.
    """

    def scout(self, lists: Any, item: Int32) -> Any:
        """Return what has to be loaded first for an item, which may not exist."""

    def peek(self, lists: Any, scouted: Any) -> Any:
        """Return what `scouted` refers to, loaded one item later."""

    def nothing(self) -> Any:
        """Return a finished job."""

    def begin(self, lists: Any, state: Any, item: Int32, scouted: Any, peeked: Any) -> Any:
        """Return the job of an item; a finished job if the item is skipped."""

    def left(self, job: Any) -> Boolean:
        """Return whether something remains to be loaded."""

    def load(self, lists: Any, state: Any, ring: Ring, stage: Int32, job: Any) -> Any:
        """Starts one load, into a stage, and notes what the stage will hold. Returns what is left then."""

    def use(self, state: Any, ring: Ring, stage: Int32, phase: Int32) -> None:
        """Waits for the stage and uses what it holds. Behind it the stage may be filled again."""


class Items(NamedTuple):
    """The items of a warp: `first` and `second`, as far as they are below `total`; then it claims what none of the
    `step` warps has that two were dealt out to. `claims` is the address of their counter; without it the warp goes on
    in steps."""

    first: Int32
    second: Int32
    step: Int32
    total: Int32
    claims: Int64 | None = None


class Ahead(NamedTuple):
    """State of a warp that looks ahead: the item that it is to do next, what it is to do then, and its claim."""

    item: Int32
    scouted: Any
    peeked: Any
    upcoming: Int32
    following: Any
    ticket: Int32


@cute.jit
def deal_out(claims: Int64, item: Int32, step: Int32, total: Int32, dealt: Boolean) -> Items:
    """Assign `item` and `item + step` to a warp with static items. A warp without static items claims its first two as
    well. `claims`: address of the word that counts claims."""
    upcoming = item + step
    if not dealt:
        item = 2 * step + granted(claim(claims))
        upcoming = 2 * step + granted(claim(claims))
    return Items(item, upcoming, step, total, claims)


@cute.jit
def look_ahead(work: cutlass.Constexpr[Work], lists: Any, items: Items) -> Ahead:
    """Load ahead before the first item."""
    scouted = work.scout(lists, items.first)
    peeked = work.peek(lists, scouted)
    following = work.scout(lists, items.second)
    ticket = Int32(0)
    if const_expr(items.claims is not None):
        ticket = claim(items.claims)
    return Ahead(items.first, scouted, peeked, items.second, following, ticket)


@cute.jit
def look_further(work: cutlass.Constexpr[Work], lists: Any, items: Items, ahead: Ahead) -> Ahead:
    """Load ahead when an item begins."""
    peeked = work.peek(lists, ahead.following)
    ticket = ahead.ticket
    if const_expr(items.claims is not None):
        upcoming = 2 * items.step + granted(ticket)
        ticket = claim(items.claims)
    else:
        upcoming = ahead.upcoming + items.step
    following = work.scout(lists, upcoming)
    return Ahead(ahead.upcoming, ahead.following, peeked, upcoming, following, ticket)


@cute.jit
def run(work: cutlass.Constexpr[Work], ring: Ring, items: Items, lists: Any, state: Any) -> None:
    """By one warp: all its items."""
    stages = ring.shape.stages
    loaded, used = Int32(0), Int32(0)
    job = work.nothing()
    ahead = look_ahead(work, lists, items)
    more = Int32(1)
    while more != 0:
        # All stages are to be under way.
        while loaded - used < stages and (work.left(job) or ahead.item < items.total):
            if not work.left(job):
                item, scouted, peeked = ahead.item, ahead.scouted, ahead.peeked
                ahead = look_further(work, lists, items, ahead)
                job = work.begin(lists, state, item, scouted, peeked)
            if work.left(job):
                job = work.load(lists, state, ring, loaded % stages, job)
                loaded += 1
        # What one lane noted of a stage comes before the other lanes' reads.
        arch.sync_warp()
        if used < loaded:
            work.use(state, ring, used % stages, (used // stages) & 1)
            # All lanes have read the stage and its notes before they are filled again.
            arch.sync_warp()
            used += 1
        more = Int32(used < loaded or work.left(job) or ahead.item < items.total)


@cute.jit
def claim(counter: Int64) -> Int32:
    """By a whole warp: claims the next item of the operation that no warp has. The answer, in lane 0, is how many were
    claimed before; it is used late (`granted`), so that nobody waits for it.

    SMs are not equally fast (they share ways to the link), so items that were dealt out beforehand would leave some of
    them waiting for others at the end.
    """
    ticket = Int32(0)
    if arch.lane_idx() == 0:
        ticket = ptx.atom_inc(counter)
    return ticket


def granted(ticket: Int32) -> Int32:
    """Return the result of a claim to the whole warp."""
    return arch.shuffle_sync(ticket, 0)
