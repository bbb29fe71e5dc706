"""The link's own speed: every rank only moves whole rows to (push) or from (pull) all its peers by bulk copies.

Rows go through shared memory in the same ring that the operators use; no row is looked up, expanded or added. So this
is what an operator can reach at the same number of blocks, one on each SM. Also a barrier between ranks on the device.
"""

# No "from __future__ import annotations": the kernels' annotations are read as types.

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
import torch.distributed as dist
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute import arch

from cute_kernels import jit, ptx
from cute_kernels.heap import SHARED_BYTES
from cute_kernels.launch import Launched
from cute_kernels.throughput.ring import Ring, RingShape, init_ring_barriers
from ep_ops import symmetric
from ep_ops.commands.compile import arch_of

BARRIER_BYTES = 1024
BARRIER_SECONDS = 20.0


def digest(path: str) -> str:
    """Return a digest of a file. It is part of the configuration of its kernels, so that kernels compiled from another
    version are not reused."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def heap_of(peers: Int64, rank: Int32) -> Int64:
    """Address of a rank's symmetric memory, from the table of all."""
    return ptx.ld_constant(peers + Int64(rank) * 8)


class LinkCopyArgs(NamedTuple):
    peers: Int64  # table of the addresses of all ranks' symmetric memory
    local: Int64
    rank: Int32
    rows: Int32
    blocks: Int32


@dataclass(frozen=True)
class LinkCopy(Launched):
    """`rows` rows between this rank and each of its peers, in place: row i to row i.

    Both the local and every rank's symmetric memory hold [world_size, rows] rows. Push: local [peer] -> symmetric
    [this rank] at the peer. Pull: symmetric [this rank] at the peer -> local [peer].
    """

    NAME: ClassVar[str] = "ep_link"
    Args: ClassVar[Any] = LinkCopyArgs

    world_size: int
    row_bytes: int
    push: bool
    source: str = field(default_factory=lambda: digest(__file__))

    @property
    def ring(self) -> RingShape:
        return RingShape.of(self.row_bytes, SHARED_BYTES)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * self.ring.warps, 1, 1)}

    @cute.kernel
    def kernel(self, args: LinkCopyArgs) -> None:
        shape = self.ring
        tid, _, _ = arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, shape.warps * shape.stages)
        buffers = smem.allocate_array(Uint8, shape.warps * shape.stages * shape.stride, byte_alignment=128)
        if tid < 32:
            init_ring_barriers(barriers, shape.warps * shape.stages)
        arch.sync_threads()
        ring = Ring(shape, buffers, barriers, arch.make_warp_uniform(tid // 32))
        if tid % 32 == 0:
            self.move(ring, args.peers, args.rank, args.local, args.rows)

    @cute.jit
    def move(self, ring, peers, rank, local, rows):
        """Move the share of one lane: every (blocks × warps)-th piece. Peers alternate, so that all links are busy."""
        shape, others = self.ring, self.world_size - 1
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        total = rows * (others * shape.pieces)
        next_load = tid // 32 * blocks + bid
        next_store = next_load
        step = blocks * shape.warps
        loaded = Int32(0)
        stored = Int32(0)
        while next_store < total:
            # All stages but the one being stored are under way.
            while loaded - stored < shape.stages - 1 and next_load < total:
                there, here, nbytes = self.ends(peers, rank, local, rows, next_load)
                start = here if const_expr(self.push) else there
                ring.load(loaded % shape.stages, start, nbytes)
                loaded += 1
                next_load += step
            there, here, nbytes = self.ends(peers, rank, local, rows, next_store)
            end = there if const_expr(self.push) else here
            ring.wait(stored % shape.stages, (stored // shape.stages) & 1)
            ring.store(stored % shape.stages, end, nbytes)
            arch.cp_async_bulk_commit_group()
            # All stores but the newest have read their stage: it may be filled again.
            arch.cp_async_bulk_wait_group(1, read=True)
            stored += 1
            next_store += step
        arch.cp_async_bulk_wait_group(0)

    def ends(self, peers, rank, local, rows, item):
        """Return the addresses of piece `item` in the peer's symmetric memory and in local memory, and its length."""
        shape = self.ring
        piece = item % shape.pieces
        row = item // shape.pieces // (self.world_size - 1)
        hop = (item // shape.pieces + row) % (self.world_size - 1)
        peer = (rank + 1 + hop) % self.world_size
        offset = piece * shape.piece_bytes
        there = heap_of(peers, peer) + Int64(rank * rows + row) * self.row_bytes + offset
        here = local + Int64(peer * rows + row) * self.row_bytes + offset
        return there, here, shape.bytes_of(piece)


class BarrierArgs(NamedTuple):
    peers: Int64  # table of the addresses of all ranks' symmetric memory
    mark: Int64
    timeout_ns: Int64
    rank: Int32
    blocks: Int32  # one


@dataclass(frozen=True)
class Barrier(Launched):
    """Ends when all ranks have launched it with this `mark`, or when `timeout_ns` have passed."""

    NAME: ClassVar[str] = "ep_line_up"
    Args: ClassVar[Any] = BarrierArgs

    world_size: int
    source: str = field(default_factory=lambda: digest(__file__))

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: BarrierArgs) -> None:
        tid, _, _ = arch.thread_idx()
        if tid < self.world_size:
            ptx.st_release_sys(heap_of(args.peers, tid) + Int64(args.rank) * 8, args.mark)
            own = heap_of(args.peers, args.rank) + Int64(tid) * 8
            begin = arch.globaltimer()
            while ptx.ld_acquire_sys(own) < args.mark and arch.globaltimer() - begin < args.timeout_ns:
                pass


def stream_of(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


class DeviceBarrier:
    """A barrier of all ranks on the current stream, which does not block the host. Collective; `free` it when done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.mark = device, dist.get_rank(), 0
        self.buffer = symmetric.allocate(BARRIER_BYTES, dist.group.WORLD, device)
        self.function = jit.get(Barrier(dist.get_world_size()), arch_of(device), lambda: False)
        self()  # loaded before anything waits in it
        torch.cuda.synchronize(device)

    def __call__(self) -> None:
        self.mark += 1
        nanoseconds = int(BARRIER_SECONDS * 1e9)
        self.function(self.buffer.table.data_ptr(), self.mark, nanoseconds, self.rank, 1, stream_of(self.device))

    def free(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()
        self.buffer.free()


class Link:
    """Push and pull of `rows` rows of `row_bytes` between each pair of ranks. Collective; `free` it when done."""

    def __init__(self, device: torch.device, row_bytes: int, rows: int) -> None:
        self.device, self.rows, self.row_bytes = device, rows, row_bytes
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        nbytes = self.world_size * rows * row_bytes
        self.buffer = symmetric.allocate(nbytes, dist.group.WORLD, device)
        self.local = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.functions = {
            push: jit.get(LinkCopy(self.world_size, row_bytes, push), arch_of(device), lambda: False)
            for push in (True, False)
        }

    @property
    def crossing_bytes(self) -> int:
        """That each rank sends and that it receives."""
        return (self.world_size - 1) * self.rows * self.row_bytes

    def copy(self, push: bool, blocks: int, i: int = 0) -> None:
        """Launch one push or pull."""
        local = self.local.data_ptr()
        self.functions[push](self.buffer.table.data_ptr(), local, self.rank, self.rows, blocks, stream_of(self.device))

    def verify(self) -> None:
        """Check that random rows arrive at their destinations. Raises RuntimeError on a rank where they do not."""
        for push in (True, False):
            source, target = (self.local, self.buffer.local) if push else (self.buffer.local, self.local)
            source.copy_(self._random(self.rank).flatten())
            target.zero_()
            torch.cuda.synchronize(self.device)
            dist.barrier()
            self.copy(push, self.sms)
            torch.cuda.synchronize(self.device)
            dist.barrier()
            for peer, part in enumerate(target.view(self.world_size, -1)):
                if peer != self.rank and not torch.equal(part, self._random(peer)[self.rank]):
                    raise RuntimeError(f"link {'push' if push else 'pull'}: rank {self.rank} got wrong rows of {peer}")

    def free(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()
        self.buffer.free()
        del self.local

    def _random(self, source: int) -> torch.Tensor:
        """Return the bytes of `source` for each rank, uint8 [world_size, bytes]; every rank can compute them."""
        draw = torch.Generator(self.device).manual_seed(source)
        shape = (self.world_size, self.rows * self.row_bytes)
        return torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8, device=self.device)
