"""What puts of a wire cost, without anything around them: batches that every rank puts to the next one (a process
alone: to itself), and how long it takes until a put is seen. Nothing is routed, expanded or added.

benchmarks/wire.py                                       # stores, and NVSHMEM where it is installed
torchrun ... benchmarks/wire.py --wires nvshmem   # on several hosts
"""

# No "from __future__ import annotations": the kernels' annotations are read as types.

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cutlass.cute as cute
import torch
import torch.distributed as dist
from cutlass import Int32, Int64, const_expr
from cutlass.cute import arch

from cute_kernels import jit, ptx, sync
from cute_kernels.domains import position_words
from cute_kernels.heap import EPOCH, STATE_BYTES, Heap, Problem, records, words
from cute_kernels.internode import wire
from cute_kernels.internode.sending import word_of
from cute_kernels.launch import Kernel, RankArgs
from cute_kernels.marks import SHIFT
from cute_kernels.views import Records
from ep_ops.bench.figures import text_table
from ep_ops.bench.link import digest, stream_of
from ep_ops.bench.options import names_of, new_parser, numbers, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.timing import Timing
from ep_ops.commands.compile import arch_of
from ep_ops.config import consecutive_domains
from ep_ops.symmetric import SymmetricBuffer, allocate, nvshmem, torch_symm

WIRES = ("stores", "nvshmem")
BLOCK, WARPS = 1024, 8
"""Threads of a block that puts batches, and warps of one each of which does."""
LOOKS = 2**24
"""How often a kernel looks for a word before it gives up: about 10 s."""


class WireHeap(Heap):
    """By batch: on its way out; what came, and its word. One word more for each of two ranks that answer each other."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        count = problem.max_tokens
        batches = records(problem.row_bytes, count)
        self.take(outgoing=batches, incoming=batches, words=words(count), answers=words(1))


class PutsArgs(NamedTuple):
    """Arguments of :class:`Puts`."""

    ranks: RankArgs
    x: Int64  # [batches, bytes] what is put
    target: Int32  # rank
    batches: Int32
    blocks: Int32


@dataclass(frozen=True)
class Puts(Kernel):
    """Blocks deal batches among them, one put each; a row of the problem is a batch. `filled`: a batch is first copied
    from x to where it is put from, as rows are gathered in a dispatch. `by_warp`: each warp has batches of its own."""

    filled: bool
    by_warp: bool
    source: str = field(default_factory=lambda: digest(__file__))

    NAME, Args = "ep_puts", PutsArgs

    @property
    def threads(self) -> int:
        return 32 * WARPS if self.by_warp else BLOCK

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (self.threads, 1, 1), "min_blocks_per_mp": 1}

    @cute.kernel
    def kernel(self, args: Any) -> None:
        p = self.problem
        ranks = sync.Ranks(WireHeap(p), args.ranks)
        tid, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        item, step = Int32(block), Int32(args.blocks)
        if const_expr(self.by_warp):
            item, step = Int32(arch.make_warp_uniform(tid // 32) * args.blocks + block), step * WARPS
        nbytes = Int32(p.row_bytes)
        while item < args.batches:
            here, there = ranks.offsets("outgoing").at(item), ranks.offsets("incoming").at(item)
            word = ranks.offsets("words").at(item)
            if const_expr(self.by_warp):
                if const_expr(self.filled):
                    wire.copy_by_warp(ranks.own + here, Records(args.x, p.row_bytes).at(item), nbytes)
                p.wire.put_signal(ranks, args.target, there, here, nbytes, word, word_of(ranks, item))
            else:
                if const_expr(self.filled):
                    wire.copy_by_block(BLOCK, ranks.own + here, Records(args.x, p.row_bytes).at(item), nbytes)
                    # The batch is whole before it is put.
                    arch.sync_threads()
                p.wire.put_signal_by_block(
                    ranks, BLOCK, args.target, there, here, nbytes, word, word_of(ranks, item)
                )  # fmt: skip
            item += step


class AnswersArgs(NamedTuple):
    """Arguments of :class:`Answers`."""

    ranks: RankArgs
    partner: Int32
    first: Int32  # 1: of the two, this rank begins
    rounds: Int32
    mark: Int64  # of the first round; the same at both
    blocks: Int32


@dataclass(frozen=True)
class Answers(Kernel):
    """One warp puts a batch to its partner, who answers with one when it has seen the word; `rounds` times. A rank that
    is its own partner sees what it has put itself."""

    source: str = field(default_factory=lambda: digest(__file__))

    NAME, Args = "ep_answers", AnswersArgs

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1)}

    @cute.kernel
    def kernel(self, args: Any) -> None:
        p = self.problem
        ranks = sync.Ranks(WireHeap(p), args.ranks)
        here, there = ranks.offsets("outgoing").base, ranks.offsets("incoming").base
        word = ranks.offsets("answers").base
        mark, end = Int64(args.mark), Int64(args.mark) + args.rounds
        looks = Int32(0)
        while mark < end:
            if args.first != 0:
                p.wire.put_signal(ranks, args.partner, there, here, Int32(p.row_bytes), word, mark)
            seen = ptx.ld_acquire_sys(ranks.own + word)
            while seen < mark and looks < LOOKS:
                seen = ptx.ld_acquire_sys(ranks.own + word)
                looks += 1
            p.wire.arrived(ranks, word, arch.lane_idx() == 0)
            if args.first == 0:
                p.wire.put_signal(ranks, args.partner, there, here, Int32(p.row_bytes), word, mark)
            mark += 1


class Wired:
    """Memory of all ranks in which a wire of a kind puts batches. Collective; `free` it when done."""

    def __init__(self, kind: str, device: torch.device, count: int, nbytes: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.kind, self.count = device, kind, count
        self.next = (self.rank + 1) % self.world_size
        domains = consecutive_domains(self.world_size, 1) if self.world_size > 1 else ()
        self.problem = Problem(
            self.world_size, (1,) * self.world_size, 1, nbytes // 2, "bf16", count, domains, wire_of(kind)
        )  # fmt: skip
        self.heap = WireHeap(self.problem)
        self.memory = memory_of(kind, self.heap.nbytes, device)
        words = [*self.memory.addresses, *position_words(self.problem.domains), 0]
        self.table = torch.tensor(words, dtype=torch.int64, device=device)
        self.memory.local[:STATE_BYTES].view(torch.int64)[EPOCH] = 1
        self.report = torch.zeros(4 * sync.REPORT_WORDS, dtype=torch.int64, pin_memory=True)
        self.ranks = (
            self.table.data_ptr(), self.memory.addresses[self.rank], self.rank, self.report.data_ptr(), 10**10, 0
        )  # fmt: skip
        self.x = torch.zeros(count, nbytes, dtype=torch.uint8, device=device)
        self.mark = 1

    def function(self, kernel: Any) -> Any:
        return jit.get(kernel, arch_of(self.device), lambda: False, nvshmem.register if kernel.linked else None)

    def part(self, name: str) -> torch.Tensor:
        """Return a section of this rank's heap, in the bank that these kernels use."""
        at = self.heap.offset[name] + self.heap.distance[name]
        return self.memory.local[at : at + self.heap.size[name]]

    def put(self, kernel: Puts, blocks: int) -> Any:
        """Return a call of the kernel for the timer."""
        run, x = self.function(kernel), self.x.data_ptr()
        return lambda i: run(*self.ranks, x, self.next, self.count, blocks, stream_of(self.device))

    def answer(self, rounds: int) -> Any:
        """Return a launch of :class:`Answers`. Ranks 0 and 1, 2 and 3, ... are partners; the last of an odd number is
        its own."""
        run = self.function(Answers(self.problem))
        partner = self.rank ^ 1 if self.rank ^ 1 < self.world_size else self.rank
        first = int(self.rank <= partner)

        def call(i: int) -> None:
            run(*self.ranks, partner, first, rounds, self.mark, 1, stream_of(self.device))
            self.mark += rounds

        return call

    def verify(self, kernel: Puts, blocks: int) -> None:
        """Check that random batches and their words arrive. Raises RuntimeError on a rank where they do not."""
        draw = torch.Generator(self.device).manual_seed(self.rank)
        shape, names = self.x.shape, ("incoming", "words")
        self.x.copy_(torch.randint(0, 256, shape, generator=draw, device=self.device, dtype=torch.uint8))
        self.part("outgoing").view(shape).copy_(self.x.flip(0) if kernel.filled else self.x)
        for name in names:
            self.part(name).zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier()
        self.put(kernel, blocks)(0)
        torch.cuda.synchronize(self.device)
        dist.barrier()
        draw = torch.Generator(self.device).manual_seed((self.rank - 1) % self.world_size)
        theirs = torch.randint(0, 256, shape, generator=draw, device=self.device, dtype=torch.uint8)
        words = (1 << SHIFT) + torch.arange(self.count, device=self.device)
        came = self.part("incoming").view(shape), self.part("words").view(torch.int64)
        if not (torch.equal(came[0], theirs) and torch.equal(came[1], words)):
            raise RuntimeError(f"{self.kind}: rank {self.rank} got wrong batches")

    def free(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()
        self.memory.free()


def memory_of(kind: str, nbytes: int, device: torch.device) -> SymmetricBuffer:
    if kind == "nvshmem":
        return nvshmem.allocate(nbytes, dist.group.WORLD, device, ())
    if dist.get_world_size() > 1:
        return torch_symm.allocate(nbytes, dist.group.WORLD, device)
    return allocate(nbytes, None, device)


def wire_of(kind: str) -> wire.Wire:
    if kind == "stores":
        return wire.Nvlink()
    library = wire.find_library()
    if library is None:
        raise RuntimeError(f"NVSHMEM's device library is not installed: {nvshmem.install()}")
    return wire.Nvshmem(library)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    with Run(device, args, table, batch_bytes=args.bytes, batches=args.batches, results=[]) as run:
        results = run.found["results"]
        for kind in args.wires:
            wired = Wired(kind, device, args.batches, args.bytes)
            for by_warp, filled in itertools.product((False, True), repeat=2):
                kernel = Puts(wired.problem, filled, by_warp)
                wired.verify(kernel, args.blocks[0])
                for blocks in args.blocks:
                    timing = run.timer.whole(wired.put(kernel, blocks), args.iterations)
                    results.append({"wire": kind, **found(args, kernel, blocks, timing)})
                    run.save()
            trips = run.timer.whole(wired.answer(args.rounds), args.iterations).each(args.rounds)
            results.append({"wire": kind, "what": "put and answer", "bytes": args.bytes, **trips.record()})
            run.say(f"{kind} is measured")
            run.save()
            wired.free()


def found(args: argparse.Namespace, kernel: Puts, blocks: int, timing: Timing) -> Found:
    rate = args.bytes * args.batches / timing.median / 1e3
    each = timing.median / -(-args.batches // (blocks * (WARPS if kernel.by_warp else 1)))
    return {
        "what": "copied, then put" if kernel.filled else "put", "by": "warp" if kernel.by_warp else "block",
        "blocks": blocks, "gb_s": rate, "us_each": each, **timing.record(),
    }  # fmt: skip


def table(run: Found) -> list[str]:
    rows = [["wire", "what", "by", "blocks", "µs", "GB/s", "µs a put"]]
    for r in run["results"]:
        speeds = [f"{r['gb_s']:.0f}", f"{r['us_each']:.2f}"] if "blocks" in r else ["", ""]
        rows.append([r["wire"], r["what"], r.get("by", "warp"), str(r.get("blocks", 1)), f"{r['us']:.2f}", *speeds])
    return text_table(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--bytes", type=positive, default=57344, help="bytes of a batch, a multiple of 16 (default: %(default)s)"
    )
    parser.add_argument(
        "--batches", type=positive, default=1024, help="batches that a rank puts (default: %(default)s)"
    )
    parser.add_argument("--blocks", type=numbers, default=(8, 16, 32, 64, 80), metavar="N,...")
    parser.add_argument("--wires", type=names_of(WIRES), metavar=",".join(WIRES), help="(those that are usable)")
    parser.add_argument("--rounds", type=positive, default=100, help="puts that are answered, in a row (%(default)s)")
    parser.add_argument("--iterations", type=positive, default=20)
    args = read(parser, argv)
    if args.bytes % 16:
        parser.error(f"--bytes is {args.bytes}; allowed: a multiple of 16")
    if args.device == "cpu":
        print("benchmarks/wire.py: torch sees no GPU, or --device is cpu; puts need GPUs", file=sys.stderr)
        return 2
    if args.wires is None:
        why = nvshmem.problem()
        args.wires = WIRES if why is None else WIRES[:1]
        if why is not None:
            print(f"without NVSHMEM: {why}")
    return on_every_rank(measure, args)


if __name__ == "__main__":
    sys.exit(main())
