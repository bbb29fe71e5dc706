"""Second kernel of combine's backward: fetch each token's gradient once, and compute the gradients of rows and weights.

For a row of the token with weight w and value y, the gradient of the row is w × g and that of its weight dot(g, y),
where g is the token's gradient. A warp's ring loads a slice of g (over NVLink) and then the same slice of y of each of
its rows here (from this rank's memory). Products are stored from registers. g therefore crosses the link once and is
never stored.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import operation, ptx, sync
from ..arrivals import Copy, begin_walk, copy_of, given_row, guarded, row_of, token_of
from ..copies import pop_lowest
from ..delivery import Arrived, Delivery
from ..heap import CLAIMS, Heap
from ..ids import block_id, block_ids, num_blocks, thread_id, warp_id
from ..launch import RankArgs
from ..views import Floats, Ints, Records
from .adder import Notes
from .pipeline import deal_out, run
from .ring import Ring, SlicedKernel, init_ring_barriers
from .staged import SegmentEnds, await_rows, clear_padding, new_known, source_row

GRADIENT = 32
"""Mark of a stage that holds a slice of g. The mark of any other stage is its row's number in the copy."""


class PullScaledArgs(NamedTuple):
    ranks: RankArgs
    grad_out: Int64
    y: Int64
    recv_weights: Floats
    arrivals: Int64
    offs: Ints
    counts: Ints
    grad_y: Int64
    grad_weights: Floats
    max_tokens: Int32
    alignment: Int32
    num_rows: Int32  # of y and grad_y
    blocks: Int32


class Products(NamedTuple):
    """The job of an item, a copy: for each slice, that of the token's gradient and then those of its rows."""

    held: Int32  # the lanes that hold a row, as a bit mask
    left: Int32  # those of them whose slice is not under way yet
    piece: Int32  # the slice that loads are being started for
    row: Int32
    weight: Float32
    gradient: Int64  # its address


@dataclass(frozen=True)
class PullScaled(SlicedKernel):
    """`begins_operation`: no publish kernel goes before (a single rank)."""

    NAME, Args, WARPS = "ep_pull_scaled", PullScaledArgs, 15

    begins_operation: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * (self.WARPS + 1), 1, 1), "use_pdl": not self.begins_operation}

    @cute.kernel
    def kernel(self, args: PullScaledArgs) -> None:
        shape = self.ring
        tid = thread_id()
        bid = block_id()
        # The epoch, grad_out, y and the route were written before the publish kernel began, which may run still: that
        # one is no dependent launch itself (publish.py).
        ranks = sync.Ranks(Heap.of(self.problem), args.ranks)
        if const_expr(self.begins_operation):
            if bid == 0:
                operation.say_hello(ranks, tid, 32 * (self.WARPS + 1), True)
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, self.WARPS * shape.stages)
        notes = Notes(smem, self.WARPS * shape.stages)
        buffers = smem.allocate_array(Uint8, self.WARPS * shape.stages * shape.stride, byte_alignment=128)
        known = new_known(self.problem, smem, self.WARPS)
        sources = smem.allocate_tensor(Int32, cute.make_layout(self.problem.world_size + 1))
        warp = warp_id()
        if tid < 32:
            init_ring_barriers(barriers, self.WARPS * shape.stages)
        blocks = num_blocks()
        # Hands the barriers to the whole block.
        arch.sync_threads()
        if warp < self.WARPS:
            ring = Ring(shape, buffers, barriers, warp)
            world_size = self.problem.world_size
            mine = cute.make_tensor(known.iterator + warp * world_size, cute.make_layout(world_size))
            self.move(ranks, ring, (notes, sources, mine), warp, args)
        else:
            segments = SegmentEnds(args.offs, args.counts, args.alignment)
            to = Arrived(args.grad_y, args.grad_weights, Int64(0), args.num_rows, Int32(0))
            clear_padding(ranks, segments, True, Delivery(self.problem), to, True, blocks)
        if const_expr(not self.begins_operation):
            # The publish kernel has left the epoch before it changes.
            arch.griddepcontrol_wait()
        operation.finish(ranks, blocks)

    @cute.jit
    def move(self, ranks: sync.Ranks, ring: Ring, shared: Any, warp: Int32, args: PullScaledArgs) -> None:
        """Process one warp's items: two static ones, then claimed ones. An item is a copy."""
        notes, sources, known = shared
        bid, blocks = block_ids()
        walk = begin_walk(ranks, sources, args.arrivals, args.num_rows, args.max_tokens)
        items = deal_out(ranks.word(CLAIMS), warp * blocks + bid, blocks * self.WARPS, walk.items, Boolean(True))
        g = cute.make_rmem_tensor((4 * self.slices.vectors,), Uint32)  # a lane's part of a slice of the gradient
        dot = cute.make_rmem_tensor((1,), Float32)  # lane k's: of the k-th row, over the slices so far
        run(self, ring, items, (ranks, walk, args), (known, notes, warp * ring.shape.stages, g, dot, args))

    # What the warp does in its loop (pipeline.Work).

    @cute.jit
    def scout(self, lists: Any, item: Int32) -> Copy:
        ranks, walk, _ = lists
        return copy_of(ranks, walk, item)

    @cute.jit
    def peek(self, lists: Any, copy: Copy) -> Int32:
        """Return a lane's row of the copy."""
        row, _ = row_of(lists[1], copy)
        return row

    def nothing(self) -> Products:
        return Products(Int32(0), Int32(0), Int32(self.ring.pieces), Int32(0), Float32(0.0), Int64(0))

    @cute.jit
    def begin(self, lists: Any, state: Any, item: Int32, copy: Copy, row: Int32) -> Products:
        """Return the job after the token's gradient has been staged. If it never arrives, which is reported, the item
        is skipped."""
        ranks, _, args = lists
        known = state[0]
        copy = guarded(ranks, args.num_rows, args.max_tokens, copy)
        row = given_row(ranks, row, args.num_rows)
        held = arch.vote_ballot_sync(row >= 0)
        if copy.rows == 0:
            held = Int32(0)
        piece = Int32(self.ring.pieces)
        weight, gradient = Float32(0.0), Int64(0)
        if held != 0:
            source, (token, _) = copy.source, token_of(self.problem, copy, args.max_tokens)
            ready = await_rows(ranks, known, source, token)
            if ready != 0:
                piece = Int32(-1)
                if row >= 0:
                    weight = args.recv_weights[row]
                gradient = source_row(ranks, args.grad_out, source, token, Delivery(self.problem), ready)
        return Products(held, Int32(0), piece, row, weight, gradient)

    @cute.jit
    def left(self, job: Products) -> Boolean:
        return job.left != 0 or job.piece < self.ring.pieces - 1

    @cute.jit
    def load(self, lists: Any, state: Any, ring: Ring, stage: Int32, job: Products) -> Products:
        shape = ring.shape
        _, notes, first_note, _, _, args = state
        held, left, piece, row, weight, gradient = job
        lane = arch.lane_idx()
        note = first_note + stage
        if left != 0:
            k, left = pop_lowest(left)
            source = Int64(arch.shuffle_sync(row, k))
            factor = arch.shuffle_sync(weight, k)
            if lane == 0:
                (notes.marks + note).store(k)
                (notes.weights + note).store(factor)
                (notes.codes + note).store(piece)
                (notes.targets + note).store(source)
                at = Records(args.y, self.problem.row_bytes).at(source) + piece * shape.piece_bytes
                ring.load(stage, at, shape.bytes_of(piece))
        else:
            piece += 1
            left = held
            if lane == 0:
                (notes.marks + note).store(GRADIENT)
                ring.load(stage, gradient + piece * shape.piece_bytes, shape.bytes_of(piece))
        return Products(held, left, piece, row, weight, gradient)

    @cute.jit
    def use(self, state: Any, ring: Ring, stage: Int32, phase: Int32) -> None:
        p, shape, slices = self.problem, ring.shape, self.slices
        _, notes, first_note, g, dot, args = state
        lane = arch.lane_idx()
        note = first_note + stage
        ring.wait(stage, phase)
        k = (notes.marks + note).load()
        at = ring.buffer + stage * shape.stride + lane * 16
        words = []
        for u in range_constexpr(slices.vectors):
            words.extend(ptx.ld_shared_v4(at + u * 512))
        if k == GRADIENT:
            for i in range_constexpr(4 * slices.vectors):
                g[i] = words[i]
        else:
            of_row = (notes.targets + note).load()
            of_piece = (notes.codes + note).load()
            factor = (notes.weights + note).load()
            # The last slice of a row may be short: its end is that of the row.
            behind = p.row_bytes - of_piece * shape.piece_bytes
            to = Records(args.grad_y, p.row_bytes).at(of_row) + of_piece * shape.piece_bytes + lane * 16
            partial = Float32(0.0)
            for u in range_constexpr(slices.vectors):
                grads = ptx.unpack([g[4 * u + i] for i in range(4)], slices.dtype)
                values = ptx.unpack(words[4 * u : 4 * u + 4], slices.dtype)
                if u * 512 + lane * 16 < behind:
                    scaled = ptx.pack([ptx.mul_rn(grad, factor) for grad in grads], slices.dtype)
                    ptx.st_v4(to + u * 512, scaled)
                    for i in range_constexpr(len(grads)):
                        partial += grads[i] * values[i]
            for i in range_constexpr(5):
                partial += arch.shuffle_sync_bfly(partial, 16 >> i)
            # Lane k keeps the k-th row's sum over the slices.
            if lane == k:
                if of_piece == 0:
                    dot[0] = Float32(0.0)
                dot[0] += partial
                if of_piece == shape.pieces - 1:
                    args.grad_weights[of_row] = dot[0]
