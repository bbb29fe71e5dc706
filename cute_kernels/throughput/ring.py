"""Rings: the stages of each warp in shared memory.

A row has `row_bytes`, a multiple of 16. The ring moves pieces of rows through shared memory with bulk copies, so that
no register and no lane is occupied while bytes are in flight.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from .. import ptx
from ..carried import Carried
from ..heap import SHARED_BYTES
from ..ids import thread_id
from ..launch import Kernel
from ..slices import Slices

MAX_PIECE = 16 * 1024
"""The most bytes of a piece, which is what a stage of a ring holds."""
BOOKKEEPING = 32 * 4 + 8
"""Bytes of shared memory that a stage has besides its piece: an int32 for each lane and a barrier."""

RANK_BYTES = 2048
"""Bytes of shared memory that a block has besides its stages: what it knows of each rank."""

SLICE_BOOKKEEPING = 40
"""Bytes of shared memory that a stage has besides its slice, where it holds one: a barrier and adder.Notes."""


@dataclass(frozen=True)
class RingShape:
    """Division of a block's shared memory: each of `warps` warps owns `stages` pieces of `piece_bytes`.

    A row is `pieces` pieces; the last may be shorter.
    """

    row_bytes: int
    warps: int
    stages: int
    piece_bytes: int
    room: int = 0
    """Bytes of a stage if it is larger than a piece, else 0."""

    @property
    def pieces(self) -> int:
        return -(-self.row_bytes // self.piece_bytes)

    @staticmethod
    def of_slices(row_bytes: int, warps: int, slice_bytes: int, room: int = 0) -> "RingShape":
        """Return a ring with one slice of a row in each stage, which has `room` bytes if that is more. Lanes after the
        end of a short row still read, so a stage has room for them. Shared memory is reserved for the notes of the
        largest ring."""
        stride, most = -(-max(slice_bytes, room) // 128) * 128, 8
        budget = (SHARED_BYTES - RANK_BYTES) // warps - most * SLICE_BOOKKEEPING
        return RingShape(row_bytes, warps, min(most, budget // stride), slice_bytes, room)

    @staticmethod
    def of(row_bytes: int, ring_bytes: int, most: int = MAX_PIECE) -> "RingShape":
        """Return a ring with whole rows of up to `most` bytes, else equal pieces; at most 16 warps, with at least two
        stages each if the ring holds two pieces."""
        pieces = -(-row_bytes // most)
        piece = -(-row_bytes // (16 * pieces)) * 16
        stages = ring_bytes // (-(-piece // 128) * 128 + BOOKKEEPING)
        warps = max(1, min(16, stages // 2))
        assert stages > 0, f"a piece of {piece} bytes in a ring of {ring_bytes}"
        return RingShape(row_bytes, warps, min(8, stages // warps), piece)

    def bytes_of(self, piece: Any) -> Any:
        """Return the length of a row's piece, whose index may be a run-time value."""
        if self.pieces == 1:
            return self.row_bytes
        return cutlass.min(self.row_bytes - piece * self.piece_bytes, self.piece_bytes)

    @property
    def stride(self) -> int:
        """Distance of two pieces in shared memory: bulk copies want 128-byte lines."""
        return -(-max(self.piece_bytes, self.room) // 128) * 128


class Ring(Carried):
    """One warp's stages of the ring. Loads are started ahead; a stage is refilled when its stores have read it."""

    carried = ("buffer", "barrier")

    def __init__(self, shape: RingShape, buffers: Any, barriers: Any, warp: Int32) -> None:
        self.shape = shape
        self.buffer = buffers + warp * (shape.stages * shape.stride)
        self.barrier = barriers + warp * shape.stages

    def load(self, stage: Int32 | int, addr: Int64, nbytes: Any) -> None:
        """By one lane: starts filling a stage."""
        arch.mbarrier_arrive_and_expect_tx(self.barrier + stage, nbytes)
        ptx.bulk_load(self.buffer + stage * self.shape.stride, addr, nbytes, self.barrier + stage)

    def wait(self, stage: Int32 | int, phase: Int32) -> None:
        """Wait until the stage is full: its bytes are visible to the waiting lanes and to their bulk copies."""
        arch.mbarrier_wait(self.barrier + stage, phase)

    def wait_soon(self, stage: Int32 | int, phase: Int32) -> None:
        """Wait for a stage that is likely to be full: test it once before the warp may sleep."""
        ptx.look_then_wait(self.barrier + stage, phase)

    def store(self, stage: Int32 | int, addr: Int64, nbytes: Any) -> None:
        """By any lane: starts copying the stage to a row, in the lane's current bulk group."""
        ptx.bulk_store(addr, self.buffer + stage * self.shape.stride, nbytes)


@cute.jit
def init_ring_barriers(barriers: Any, count: cutlass.Constexpr[int]) -> None:
    """By one warp, followed by a block barrier."""
    for i in cutlass.range(thread_id(), count, 32):
        arch.mbarrier_init(barriers + i, 1)
    arch.mbarrier_init_fence()


@dataclass(frozen=True)
class SlicedKernel(Kernel):
    """A kernel whose warps add up rows in registers: a stage of the ring holds a slice of a row."""

    WARPS: ClassVar[int]
    """Number of warps of a block that have a ring."""

    @property
    def slices(self) -> Slices:
        return Slices(self.problem.row_bytes, self.problem.dtype)

    @property
    def ring(self) -> RingShape:
        return RingShape.of_slices(self.slices.row_bytes, self.WARPS, self.slices.slice_bytes)
