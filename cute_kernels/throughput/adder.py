"""Adds up rows and stores the sums elsewhere: what both the pushing and the summing blocks of a combine do.

A warp works through items; an item is a few rows to add and one place for the sum. Rows come by bulk copies through
the warp's ring, a slice of a row a stage, started ahead over the ends of items, so that latency is paid once. A lane
adds its vectors of each slice in fp32 in registers and stores the rounded sum from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..carried import Carried
from ..outbox import Outbox, close, post
from ..rows import Ring, Slices

FIRST, LAST, END = 1, 2, 4
"""Bits that are noted of a stage: its slice begins a sum; it ends the sum; with it ends the item."""


class Notes(Carried):
    """What a warp has to know of a stage when it is full: written by lane 0 when its load starts."""

    carried = ("marks", "weights", "codes", "places")

    def __init__(self, smem: Any, stages: int) -> None:
        self.marks = smem.allocate_array(Int32, stages)
        self.weights = smem.allocate_array(Float32, stages)
        self.codes = smem.allocate_array(Int32, stages)
        self.places = smem.allocate_array(Int64, stages)


@dataclass(frozen=True)
class Adding:
    """How a warp adds up items, of which it looks three ahead.

    `scout(context, item)` is what has to be loaded first of an item, `peek(context, scouted)` are two integers that
    this leads to. `fetch(context, scouted, peeked)` gives, for a whole warp, the bit mask of lanes that hold a row,
    the lane's row (counted from address `Items.base`), its weight (used if `weighted`), the address of the sum, and the
    code to post when it is stored; an empty mask skips the item. If there may be an `extra` row, added last, bit
    32 of the mask says so; it is row `code` from address `Items.extra_base`.
    """

    slices: Slices
    weighted: bool
    scout: Callable[..., Any]
    peek: Callable[..., Any]
    fetch: Callable[..., Any]
    extra: bool = False


class Items(NamedTuple):
    """Which items a warp adds up: `first` and `second`, as far as they are below `total`. Then it claims what none of
    the `step` warps has that two were dealt out to, `claims` being this rank's heap, or, if that is None, goes on in
    steps."""

    first: Int32
    second: Int32
    step: Int32
    total: Int32
    base: Int64
    claims: Int64 | None = None
    extra_base: Any = None  # an address, where there may be extra rows


@cute.jit
def add_items(
    ring: Ring, notes: Notes, warp: Int32, adding: cutlass.Constexpr[Adding], items: Items, context: Any,
    outbox: Outbox | None = None,
) -> None:  # fmt: skip
    """By one warp: all its items. Codes are posted to `outbox`, if there is one."""
    slices, weighted, extra = adding.slices, adding.weighted, adding.extra
    scout, peek, fetch = adding.scout, adding.peek, adding.fetch
    item, upcoming, step, total, base, claims, extra_base = items
    shape = ring.shape
    lane = arch.lane_idx()
    first_note = warp * shape.stages
    acc = cute.make_rmem_tensor((slices.values,), Float32)
    loaded, added, count = Int32(0), Int32(0), Int32(0)
    # The item that loads are being started for.
    mask_type: Any = Int64 if extra else Int32
    held, left, piece = mask_type(0), mask_type(0), Int32(shape.pieces)
    row, weight, place, code = Int32(0), Float32(1.0), Int64(0), Int32(0)
    scouted = scout(context, item)
    peeked = peek(context, scouted)
    following = scout(context, upcoming)
    ticket = Int32(0)
    if const_expr(claims is not None):
        ticket = sync.claim(claims)
    more = Int32(1)
    while more != 0:
        # All stages are to be under way.
        while loaded - added < shape.stages and (left != 0 or piece < shape.pieces - 1 or item < total):
            if left == 0:
                piece += 1
                if piece >= shape.pieces:
                    ahead = peek(context, following)
                    held, row, weight, place, code = fetch(context, scouted, peeked)
                    scouted, peeked = following, ahead
                    piece = Int32(0)
                    if held == 0:
                        piece = Int32(shape.pieces)
                    item = upcoming
                    if const_expr(claims is None):
                        upcoming += step
                    else:
                        upcoming = 2 * step + sync.granted(ticket)
                        ticket = sync.claim(claims)
                    following = scout(context, upcoming)
                left = held
            if left != 0:
                k = Int32(arch.popc((left & -left) - 1))
                mark = Int32(0)
                if left == held:
                    mark = mark | FIRST
                left = left & (left - 1)
                if left == 0:
                    mark = mark | LAST
                    if piece == shape.pieces - 1:
                        mark = mark | END
                source = base + Int64(arch.shuffle_sync(row, k & 31)) * shape.row_bytes
                if const_expr(extra):
                    if k == 32:
                        source = extra_base + Int64(code) * shape.row_bytes
                stage = loaded % shape.stages
                if const_expr(weighted):
                    factor = arch.shuffle_sync(weight, k)
                    if lane == 0:
                        (notes.weights + (first_note + stage)).store(factor)
                if lane == 0:
                    (notes.marks + (first_note + stage)).store(mark)
                    (notes.codes + (first_note + stage)).store(code)
                    (notes.places + (first_note + stage)).store(place + piece * shape.piece_bytes)
                    ring.load(stage, source + piece * shape.piece_bytes, shape.bytes_of(piece))
                loaded += 1
        # Lane 0's notes come before the other lanes' reads.
        arch.sync_warp()
        if added < loaded:
            stage = added % shape.stages
            # Where to look is worked out before the wait, so that nothing is left to do when it ends.
            at, noted = ring.buffer + stage * shape.stride + lane * 16, notes.marks + (first_note + stage)
            ring.wait_soon(stage, (added // shape.stages) & 1)
            mark = noted.load()
            if mark & FIRST != 0:
                for i in range_constexpr(slices.values):
                    acc[i] = Float32(0.0)
            words = []
            for u in range_constexpr(slices.vectors):
                words.extend(ptx.ld_shared_v4(at + u * 512))
            values = ptx.unpack(words, slices.dtype)
            if const_expr(weighted):
                factor = (notes.weights + (first_note + stage)).load()
                for i in range_constexpr(slices.values):
                    acc[i] = ptx.add_rn(acc[i], ptx.mul_rn(values[i], factor))
            else:
                for i in range_constexpr(slices.values):
                    acc[i] = ptx.add_rn(acc[i], values[i])
            if mark & LAST != 0:
                to = (notes.places + (first_note + stage)).load() + lane * 16
                sums = ptx.pack([acc[i] for i in range(slices.values)], slices.dtype)
                # The last slice of a row may be short: its end is that of the row.
                behind = Int32(slices.slice_bytes)
                if const_expr(shape.row_bytes % slices.slice_bytes != 0):
                    if mark & END != 0:
                        behind = Int32(shape.row_bytes % slices.slice_bytes)
                for u in range_constexpr(slices.vectors):
                    if u * 512 + lane * 16 < behind:
                        ptx.st_v4(to + u * 512, sums[4 * u : 4 * u + 4])
            if mark & END != 0:
                if const_expr(outbox is not None):
                    post(outbox, warp, count, (notes.codes + (first_note + stage)).load())
                    count += 1
            # All lanes have read the stage and its notes before they are filled again.
            arch.sync_warp()
            added += 1
        more = Int32(added < loaded or left != 0 or piece < shape.pieces - 1 or item < total)
    if const_expr(outbox is not None):
        close(outbox, warp, count)
