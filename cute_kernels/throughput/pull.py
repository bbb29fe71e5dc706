"""Second kernel of a throughput dispatch: fetch each token's row once and store it to all its rows here.

A row is fetched from its owner, or from this rank's own staging if peers push rows (push.py).

Each warp owns a ring of row-sized stages in shared memory. A bulk copy loads a row over NVLink, then each lane that
holds one of its rows starts a bulk copy to it. Rows never pass through registers, and duplicates cross the link once.
One more warp of each block clears the padding.

In the example of ../arrivals.py, rank 1 fetches the rows of both tokens of rank 0. It stores the first one to row 0,
and the second one to rows 3 and 1, from one load. It reads the row of its own token 0 from x and stores it to row 2.

After a publish kernel, this kernel is launched while that one runs; it waits for `placed` flags before it reads the
route.

A rank with more rows than others uses more blocks (surplus.py). With a known route they belong to the grid. With a new
route they form a grid of their own (`joins`), launched when all blocks of the first grid have seen the route, so that
none of them waits for it. Both grids share the claims, and the operation ends with the last block of both. The first
block of the second grid always takes part and ends last, so that whatever follows on the stream waits for both.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import Copy, begin_walk, copy_of, given_row, guarded, row_of, token_of
from ..copies import pop_lowest
from ..delivery import Arrived, Delivery, staged_scale
from ..experts import local_experts
from ..heap import CLAIMS, RING_BYTES, Heap
from ..ids import block_id, thread_id, warp_id
from ..launch import Kernel, RankArgs
from ..quantize import decode, exact_scale, numbers_of
from ..swizzled import Begins
from ..views import Floats, Ints, Records
from .pipeline import deal_out, run
from .ring import MAX_PIECE, Ring, RingShape, init_ring_barriers
from .staged import SegmentEnds, await_rows, clear_padding, new_known, source_row
from .surplus import surplus_blocks


class PullArgs(NamedTuple):
    ranks: RankArgs
    x: Int64
    arrivals: Int64
    offs: Ints
    counts: Ints
    recv_x: Int64
    recv_weights: Floats
    recv_scales: Int64
    max_tokens: Int32
    alignment: Int32
    num_rows: Int32  # of recv_x
    slots: Int32  # rows of each expert; 0: segments follow each other
    zeros: Int32  # whether padding is cleared
    dealt: Int32  # blocks that have items dealt out
    expected: Int32  # rows and copies of an average rank
    joining: Int32  # blocks that may join these, in the same grid or in one that joins
    blocks: Int32


class Fetch(NamedTuple):
    """The job of an item: one load at most."""

    left: Int32  # 1 until it is under way
    at: Int64  # address of the piece
    piece: Int32
    target: Int32  # where this lane is to store it, as the number of a piece of recv_x; -1: nowhere


@dataclass(frozen=True)
class Pull(Kernel):
    """`weights`: recv_weights has padding to clear too. `begins_operation`: no publish kernel goes before.
    `placed`: the publish kernel places the route that is read here. `joins`: another grid of this operation has
    begun. `format` and `layout`: what rows travel as, and what they arrive as (delivery.py). `pushed`: peers push rows
    to this rank's staging."""

    NAME, Args = "ep_pull", PullArgs

    weights: bool = False
    begins_operation: bool = False
    placed: bool = False
    joins: bool = False
    format: str = ""
    layout: str = ""
    pushed: bool = False

    @property
    def delivery(self) -> Delivery:
        return Delivery(self.problem, self.format, self.layout)

    @property
    def ring(self) -> RingShape:
        """Shape of the ring. For rows in a format, a stage contains a whole row, so that the scales of all its numbers
        are available."""
        nbytes = self.delivery.traveling_bytes
        return RingShape.of(nbytes, RING_BYTES, nbytes if self.format else MAX_PIECE)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "block": (32 * (self.ring.warps + 1), 1, 1), "use_pdl": not self.begins_operation, **self.one_block,
        }  # fmt: skip

    @cute.kernel
    def kernel(self, args: PullArgs) -> None:
        p, shape = self.problem, self.ring
        tid = thread_id()
        bid = block_id()
        # Where a publish kernel goes before, it may run still. The epoch, x and a known route are read all the same:
        # they were written before that kernel began, since that is no dependent launch itself (publish.py).
        ranks = sync.Ranks(Heap.of(p), args.ranks)
        if const_expr(self.begins_operation):
            if bid == 0:
                operation.say_hello(ranks, tid, 32 * (shape.warps + 1), True)
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, shape.warps * shape.stages)
        buffers = smem.allocate_array(Uint8, shape.warps * shape.stages * shape.stride, byte_alignment=128)
        # What a lane has to store from a stage; written and read by the same lane.
        targets = smem.allocate_tensor(Int32, cute.make_layout(shape.warps * shape.stages * 32))
        if tid < 32:
            init_ring_barriers(barriers, shape.warps * shape.stages)
        known = new_known(p, smem, shape.warps)
        sources = smem.allocate_tensor(Int32, cute.make_layout(p.world_size + 1))
        ring_memory = (buffers, barriers)
        found = smem.allocate_tensor(Int32, cute.make_layout(1))
        lost = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            lost[0] = 0
        arch.sync_threads()
        if const_expr(self.placed):
            if tid < p.tiles:
                # When a grid that joins is launched, the tiles have decided. A block that does not see it has come
                # after the operation's end, which waits only for those that take part: it is not needed, and leaves.
                if not sync.decided(ranks, "placed", tid, not self.joins):
                    lost[0] = 1
        # Hands the barriers, and the route that was acquired, to the whole block.
        arch.sync_threads()
        if const_expr(self.placed and not self.joins):
            if args.joining > 0:  # else the next kernel is of another operation, and this one waits for peers
                arch.griddepcontrol_launch_dependents()
        # The first block of a grid of surplus blocks always takes part.
        always, number = args.dealt, bid
        if const_expr(self.placed):
            always += cutlass.min(args.joining, 1)
        if const_expr(self.joins):
            number += args.dealt
        most = args.dealt + args.joining - always
        if lost[0] != 0:
            most = Int32(0)
        needed = Boolean(True)
        if number >= always:
            if tid == 0:
                found[0] = always + surplus_blocks(ranks, args, always, most, 1.0)
            arch.sync_threads()
            needed = number < found[0]
        if needed:
            shared = (ring_memory, targets, sources, known, lost, found)
            self.take_part(ranks, shared, number, (always, most), args)
            # What was counted reaches all threads.
            arch.sync_threads()
            operation.finish(ranks, found[0])
        if const_expr(self.joins):
            if bid == 0:
                arch.griddepcontrol_wait()

    @cute.jit
    def take_part(
        self, ranks: sync.Ranks, shared: Any, number: Int32, counts: tuple[Int32, Int32], args: PullArgs
    ) -> None:
        """Do a block's share, as the `number`-th of all blocks that take part. `counts`: how many do in any case, and
        how many more may."""
        p, shape = self.problem, self.ring
        warp = warp_id()
        (buffers, barriers), targets, sources, known, lost, found = shared
        if thread_id() == 32 * shape.warps:  # in the warp that has time for it
            always, most = counts
            # In a surplus block other warps may still load the word after its first store (`kernel`). Nothing orders
            # those loads with this store, which racecheck reports. Both stores are of one value: they compute it from
            # the same arguments and lists, which do not change, and add nothing if the route is lost. So every load
            # returns that value, whichever store it observes.
            found[0] = always + surplus_blocks(ranks, args, always, most, 1.0)
        if lost[0] != 0:
            pass  # reported; without a route nothing can be moved
        elif warp < shape.warps:
            ring = Ring(shape, buffers, barriers, warp)
            mine = cute.make_tensor(known.iterator + warp * p.world_size, cute.make_layout(p.world_size))
            self.move_rows(ranks, ring, (targets, sources, mine), (warp, number), args)
        elif number < args.dealt:
            if args.zeros != 0:
                segments = SegmentEnds(args.offs, args.counts, args.alignment)
                to = self.arrived(ranks, args)
                clear_padding(ranks, segments, not self.placed, self.delivery, to, self.weights, args.dealt)
        if const_expr(not self.begins_operation and not self.joins):
            # The publish kernel has left the epoch before it changes.
            arch.griddepcontrol_wait()

    @cute.jit
    def move_rows(self, ranks: sync.Ranks, ring: Ring, shared: Any, who: tuple[Int32, Int32], args: PullArgs) -> None:
        """Process one warp's items: two static ones, then claimed ones. An item is a piece of the row of a copy. `who`:
        the warp in its block, and the block among all that take part."""
        shape = self.ring
        targets, sources, known = shared
        warp, number = who
        walk = begin_walk(ranks, sources, args.arrivals, args.num_rows, args.max_tokens)
        first, step = warp * args.dealt + number, args.dealt * shape.warps
        items = deal_out(ranks.word(CLAIMS), first, step, walk.items * shape.pieces, number < args.dealt)
        to = self.arrived(ranks, args)
        run(self, ring, items, (ranks, walk, args), (known, targets, warp * shape.stages * 32, to))
        # The rows lie in memory before the block ends.
        arch.cp_async_bulk_wait_group(0)

    def arrived(self, ranks: sync.Ranks, args: PullArgs) -> Arrived:
        to = Arrived(args.recv_x, args.recv_weights, args.recv_scales, args.num_rows, args.slots)
        if const_expr(self.delivery.tiles is None):
            return to
        first, end = local_experts(self.problem, ranks.rank)
        return to._replace(begins=Begins(end - first, args.offs))

    # What the warp does in its loop (pipeline.Work).

    @cute.jit
    def scout(self, lists: Any, item: Int32) -> Copy:
        ranks, walk, _ = lists
        return copy_of(ranks, walk, item // self.ring.pieces)

    @cute.jit
    def peek(self, lists: Any, copy: Copy) -> Int32:
        """Return a lane's row of the copy."""
        row, _ = row_of(lists[1], copy)
        return row

    def nothing(self) -> Fetch:
        return Fetch(Int32(0), Int64(0), Int32(0), Int32(-1))

    @cute.jit
    def begin(self, lists: Any, state: Any, item: Int32, copy: Copy, row: Int32) -> Fetch:
        """Return the job after the copy's row has been staged. If it never arrives, which is reported, the item is
        skipped."""
        ranks, _, args = lists
        known, shape = state[0], self.ring
        if const_expr(not self.placed):
            copy = guarded(ranks, args.num_rows, args.max_tokens, copy)
            row = given_row(ranks, row, args.num_rows)
        piece = item % shape.pieces
        left, at = Int32(0), Int64(0)
        if copy.rows > 0:
            source, (token, _) = copy.source, token_of(self.problem, copy, args.max_tokens)
            left = await_rows(ranks, known, source, token, self.format != "", self.pushed)
            at = source_row(ranks, args.x, source, token, self.delivery, left, self.pushed)
            at += piece * shape.piece_bytes
        if row >= 0:
            row = row * shape.pieces + piece
        return Fetch(cutlass.min(left, 1), at, piece, row)

    def left(self, job: Fetch) -> Boolean:
        return job.left != 0

    @cute.jit
    def load(self, lists: Any, state: Any, ring: Ring, stage: Int32, job: Fetch) -> Fetch:
        _, targets, first, _ = state
        lane = arch.lane_idx()
        targets[first + stage * 32 + lane] = job.target
        if lane == 0:
            ring.load(stage, job.at, self.ring.bytes_of(job.piece))
        return Fetch(Int32(0), job.at, job.piece, job.target)

    @cute.jit
    def use(self, state: Any, ring: Ring, stage: Int32, phase: Int32) -> None:
        """Start a copy to each row that a lane holds. For rows in a format, the whole warp stores the scales, or the
        numbers of the codes, from registers."""
        shape = self.ring
        _, targets, first, to = state
        ring.wait(stage, phase)
        row = targets[first + stage * 32 + arch.lane_idx()]
        if const_expr(self.format == "" or self.layout != ""):
            if row >= 0:
                piece = row % shape.pieces
                at = Records(to.rows, self.delivery.row_bytes).at(row // shape.pieces) + piece * shape.piece_bytes
                nbytes = shape.bytes_of(piece)
                if const_expr(self.format != ""):
                    nbytes = self.delivery.row_bytes
                ring.store(stage, at, nbytes)
            arch.cp_async_bulk_commit_group()
        if const_expr(self.format != ""):
            staged = ring.buffer + stage * shape.stride
            if const_expr(self.layout != ""):
                self.store_scales(staged, row, to)
            else:
                self.store_numbers(staged, row, to)
        # Until all lanes' copies have left shared memory, so that the stage may be filled again. Meanwhile the loads of
        # the other stages are under way.
        if const_expr(self.format == "" or self.layout != ""):
            arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_scales(self, staged: Any, row: Int32, to: Arrived) -> None:
        """Store the scales of each row that a lane holds."""
        delivery, lane = self.delivery, arch.lane_idx()
        words = staged + self.problem.hidden_size
        left = arch.vote_ballot_sync(row >= 0)
        while left != 0:
            k, left = pop_lowest(left)
            mine = arch.shuffle_sync(row, k)
            at, step = delivery.scales_at(to, mine)
            for i in cutlass.range(lane, delivery.units, 32):
                delivery.store_unit(Records(at, step).at(i), delivery.staged_unit(words, i))

    @cute.jit
    def store_numbers(self, staged: Any, row: Int32, to: Arrived) -> None:
        """Store the numbers of each row that a lane holds. A lane decodes as many codes at a time as give 16 bytes of
        numbers, so that neighboring lanes store neighboring bytes."""
        p, form = self.problem, self.delivery.form
        each = numbers_of(p.dtype)
        rows = arch.vote_ballot_sync(row >= 0)
        words = staged + p.hidden_size
        for first in cutlass.range(0, p.hidden_size, 32 * each):
            at = first + arch.lane_idx() * each
            inside = at < p.hidden_size
            code = cutlass.min(at, p.hidden_size - each)
            stored = staged_scale(form, words, code // form.block)
            codes = [Uint32(ptx.ld_shared(staged + (code + 4 * i))) for i in range(each // 4)]
            numbers = ptx.pack(decode(codes, exact_scale(form.kind, stored)), p.dtype)
            left = rows
            while left != 0:
                k, left = pop_lowest(left)
                mine = arch.shuffle_sync(row, k)
                if inside:
                    ptx.st_v4(Records(to.rows, p.row_bytes).at(mine) + at * p.itemsize, numbers)
