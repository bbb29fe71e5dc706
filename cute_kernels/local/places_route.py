"""The route of token-major rows, written as that of their places: `arrivals` of the places and `send_rows`, in one
launch. ep_ops/nn/places.py and arrivals.py describe both.

An *entry* is a (row, k), by rows. Every block counts how many entries before its own share of them have a place. Then
one warp goes through the share in order, 32 entries at a time; the other warps do the rows of this rank's own tokens.

Example: with the places 0 -1, 3 1, 2 -1 of expert_lists.py, the three copies have 1, 2 and 1 places, and the result is
what a dispatch grouped by expert returns: `copies` [0, 1] [1, 2] [3, 5] [4, -], `owned` [0, 0] [3, 2] [1, 3] [2, 4].
"""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from .. import ptx
from ..arrivals import Lists, lists
from ..ids import block_id, thread_id
from ..launch import Launched
from ..views import Ints
from .expert_lists import share_of

WARPS = 32
UNTOLD = 2**31 - 1
"""In `send_rows`: a place of another rank, which is not known here."""


class PlacesRouteArgs(NamedTuple):
    """R rows, K experts a token, L places, T tokens of this rank. All tensors are int32."""

    topk_idx: Ints  # [T, K]
    send_rows: Ints  # [T, K] of rows
    arrivals: Int64  # of rows
    places: Ints  # [R, K]
    new_arrivals: Int64  # of places
    new_send_rows: Ints  # [T, K] of places
    num_rows: Int32  # R
    num_places: Int32  # L
    tokens: Int32  # T
    top_k: Int32
    ranks: Int32
    rank: Int32
    each: Int32  # experts of a rank
    blocks: Int32


@dataclass(frozen=True)
class PlacesRoute(Launched):
    NAME: ClassVar[str] = "ep_places_route"
    Args: ClassVar[Any] = PlacesRouteArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (WARPS * 32, 1, 1)}

    @cute.kernel
    def kernel(self, args: PlacesRouteArgs) -> None:
        tid = thread_id()
        bid = block_id()
        smem = cutlass.memory.SmemAllocator()
        before = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            before[0] = Int32(0)
        arch.sync_threads()
        sources = lists(args.arrivals, args.num_rows).sources
        copies = cutlass.min(cutlass.max(sources[args.ranks], 0), args.num_rows)
        entries = copies * args.top_k
        share = share_of(entries, args.blocks)
        first = cutlass.min(bid * share, entries)
        held, i = Int32(0), tid * 4
        while i + 3 < first:
            for word in ptx.ld_v4(args.places.at(i)):
                held += Int32(Int32(word) >= 0)
            i += WARPS * 128
        i = first // 4 * 4 + tid
        if i < first:
            held += Int32(args.places[i] >= 0)
        if held > 0:
            ptx.add_shared(before.iterator, held)
        arch.sync_threads()
        if tid < 32:
            self.own(args, before[0], first, cutlass.min(first + share, entries), copies, bid == args.blocks - 1)
        else:
            self.send(args, bid * ((WARPS - 1) * 32) + tid - 32)
            r = tid - 32
            while bid == 0 and r <= args.ranks:
                to = lists(args.new_arrivals, args.num_places).sources
                to[r] = sources[r]
                r += (WARPS - 1) * 32

    @cute.jit
    def own(self, args: PlacesRouteArgs, before: Int32, first: Int32, end: Int32, copies: Int32, last: Any) -> None:
        """By a warp: where the places of each copy begin, and each place with who asked for it. The `last` one says
        behind all how many there are."""
        lane = Int32(arch.lane_idx())
        old, new = lists(args.arrivals, args.num_rows), lists(args.new_arrivals, args.num_places)
        most_copies = cutlass.min(args.top_k, args.ranks)
        carry = Int32(before)
        coming, coming_home = self.load(args, old, first + lane, end)
        for start in cutlass.range(first, end, 32):
            i, place, home = start + lane, Int32(coming), Int32(coming_home)
            row = i // args.top_k
            coming, coming_home = self.load(args, old, i + 32, end)  # under way meanwhile
            held = arch.vote_ballot_sync(place >= 0)
            number = carry + Int32(arch.popc(Int32(held) & Int32(arch.lanemask_lt())))
            if i < end:
                k = i - row * args.top_k
                if k == 0:
                    new.copies.first[row] = number
                    new.copies.second[row] = home
                if place >= 0:
                    new.owned.first[number] = place
                    new.owned.second[number] = home // most_copies * args.top_k + k
            carry += Int32(arch.popc(held))
        if last:
            if lane == 0:
                new.copies.first[copies] = carry

    @cute.jit
    def load(self, args: PlacesRouteArgs, given: Lists, entry: Int32, end: Int32) -> tuple[Int32, Int32]:
        """Return the place of an entry, -1 if it has none, and the home of its copy."""
        place, home = Int32(-1), Int32(0)
        if entry < end:
            place = args.places[entry]
            home = given.copies.second[entry // args.top_k]
        return place, home

    @cute.jit
    def send(self, args: PlacesRouteArgs, first: Int32) -> None:
        """By a thread: entries of this rank's tokens from the `first`. A copy's row stands at the first k that names
        its rank."""
        for i in cutlass.range(first, args.tokens * args.top_k, args.blocks * ((WARPS - 1) * 32)):
            token = i // args.top_k
            holder = self.holder(args, i)
            copy = Int32(-1)
            for k in cutlass.range(args.top_k):
                j = token * args.top_k + k
                if self.holder(args, j) == holder:
                    copy = cutlass.max(copy, args.send_rows[j])
            row = Int32(-1)
            if copy >= 0:
                row = Int32(UNTOLD)
                if holder == args.rank and copy < args.num_rows:
                    row = args.places[copy * args.top_k + i - token * args.top_k]
            args.new_send_rows[i] = row

    @cute.jit
    def holder(self, args: PlacesRouteArgs, entry: Int32) -> Int32:
        """Return the rank of an entry's expert, or -1 if there is none."""
        expert = args.topk_idx[entry]
        rank = Int32(-1)
        if expert >= 0:
            rank = expert // args.each
        return rank
