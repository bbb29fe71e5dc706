"""All ranks in one memory: their heaps, tensors and reports, and operations of all of them at once."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import torch
from torch import Tensor

from . import machine
from .network import Network
from .threads import TICK, Launch, Thread, run

BEHIND = 600
"""Rounds that the rank that is late begins its operations behind the others."""
REPORT_WORDS = 128
TENSOR_BYTES = 1 << 26
"""Room for the tensors of all operations of a check."""


class Ranks:
    """`heap` is the layout of each rank's symmetric memory, which lasts for all operations; their tensors are new.
    Unless they are `mapped`, ranks know of no address of another one's, but for those of their NVLink domain. `depth`:
    of the mailbox that each has where an adversary is the wire."""

    def __init__(self, heap: Any, draw: random.Random, mapped: bool = True, depth: int = 0) -> None:
        self.heap, self.draw = heap, draw
        self.world_size = world = heap.problem.world_size
        self.memory = machine.new_memory((world + 1) * (heap.nbytes + 512) + TENSOR_BYTES)
        self.memory.end = heap.nbytes  # what would be the heap of a rank that is not mapped is nobody's
        self.heaps = [self.memory.take(heap.nbytes, f"heap of rank {rank}", 0) for rank in range(world)]
        machine.networks.append(Network(self.heaps, heap.nbytes))
        self.tables = [self.new_table(rank, mapped, depth) for rank in range(world)]
        for rank in range(world):
            self.memory.store_long(self.epoch_of(rank), 1)
        self.reports = [self.memory.take(4 * REPORT_WORDS, "report", 0) for _ in range(world)]
        self.operations = 0
        self.late: int | None = None
        self.waited: list[list[list[int]]] = [[] for _ in range(world)]  # of each rank in each operation, for each rank
        self.timeout_ns = 1 << 40
        self.depth = depth if heap.problem.wire is not None else 0

    def new_table(self, rank: int, mapped: bool, depth: int) -> int:
        """Return a rank's table of the places of other ranks."""
        from courier import mailbox_bytes

        from cute_kernels.domains import position_words

        domains = self.heap.problem.domains or (range(self.world_size),)
        near = next(members for members in domains if rank in members) if self.heap.problem.domains else [rank]
        known = [heap if mapped or peer in near else 0 for peer, heap in enumerate(self.heaps)]
        words = [*known, *position_words(domains), self.memory.take(mailbox_bytes(depth), "mailbox", 0) if depth else 0]
        table = self.memory.take(8 * len(words), "table of heaps")
        for number, word in enumerate(words):
            self.memory.store_long(table + 8 * number, word)
        return table

    def begin_at(self, epoch: int) -> None:
        """Let the next operation be that of an epoch. The log is emptied: it is read as that of recent operations."""
        for rank in range(self.world_size):
            self.memory.store_long(self.epoch_of(rank), epoch)
            first = self.heaps[rank] + self.heap.offset["notes"]
            self.view(first, self.heap.size["notes"] // 4).zero_()
        self.operations = epoch - 1

    def epoch_of(self, rank: int) -> int:
        from cute_kernels.heap import EPOCH

        return self.heaps[rank] + EPOCH * 8

    def args(self, rank: int, terms: int) -> Any:
        """Return the arguments that every kernel begins with."""
        from cute_kernels.launch import RankArgs

        return numbered(RankArgs, peers=self.tables[rank], own=self.heaps[rank], rank=rank, report=self.reports[rank],
                        timeout_ns=self.timeout_ns, terms=terms)  # fmt: skip

    def courier(self, rank: int, kernel: Any, epoch: int, blocks: int) -> Launch:
        """The courier of a rank's operation."""
        served = self.memory.take(8, "served")
        self.memory.store_long(served, epoch)
        values = dict(ranks=self.args(rank, 0), served=served, log=self.memory.take(32, "log"),
                      seed=self.draw.getrandbits(30), blocks=blocks)  # fmt: skip
        return Launch(kernel, numbered(kernel.Args, **values))

    def couriers(self) -> list[Launch]:
        """Return the couriers of an operation if the wire is an adversary."""
        from courier import Courier

        if not self.depth:
            return []
        kernel = Courier(self.heap.problem, self.depth)
        return [self.courier(rank, kernel, 1 + self.operations, 2) for rank in range(self.world_size)]

    def run(self, launches: list[Launch], ends: bool = True) -> None:
        """One operation of all ranks, or the half of it that does not end it; no rank may report anything. Where it
        ends no put is under way."""
        if self.late is not None:
            machine.accesses = sys.maxsize  # no pauses: they take time, which `check_waits` measures
        delayed = [self.delayed(launch) for launch in launches]
        groups = run([*delayed, *self.couriers()] if ends else delayed, self.draw)
        self.check_triggers(launches, groups)
        self.operations += ends
        if ends:
            self.check_wire()
        self.check_epochs()
        for rank in range(self.world_size):
            if ends:
                self.check_note(rank)
                self.check_waits(rank)
                if self.heap.problem.counts_waits:
                    self.check_sums(rank)

    def check_triggers(self, launches: list[Launch], groups: list[list[Thread]]) -> None:
        """A kernel triggers its dependents if one of them is of the same operation. Latency kernels, of which there is
        one, do so when they have seen everything that they wait for."""
        for index, launch in enumerate(launches):
            triggered = any(thread.triggered for thread in groups[index])
            if not getattr(launch.kernel, "triggers", False):
                depended = any(other.after == index for other in launches)
                assert triggered <= depended, f"{launch.kernel} lets a kernel of another operation begin"

    def check_wire(self) -> None:
        """When an operation has ended at all ranks, no put is under way: all have been waited for."""
        assert not any(network.puts for network in machine.networks), "a put that nobody has waited for"

    def check_epochs(self) -> None:
        """All operations have ended, and nothing is reported."""
        for rank in range(self.world_size):
            assert not self.view(self.reports[rank], REPORT_WORDS).any(), f"rank {rank} reports something"
            epoch = self.memory.load_long(self.epoch_of(rank))
            assert epoch == 1 + self.operations, f"rank {rank} is in epoch {epoch} after {self.operations} operations"

    def check_note(self, rank: int) -> None:
        """Check the note of the last operation: it has begun, and then met all."""
        from cute_kernels.heap import BEGUN, MET, NOTE_WORDS, NOTES
        from cute_kernels.marks import unpack

        at = self.heaps[rank] + self.heap.offset["notes"] + self.operations % NOTES * NOTE_WORDS * 8
        mark, begun, met = (self.memory.load_long(at + 8 * word) for word in (0, BEGUN, MET))
        assert unpack(mark, self.operations)[0] == self.operations and 0 < begun < met, (
            f"rank {rank} notes {mark:x}, {begun}, {met}"
        )

    def delayed(self, launch: Launch) -> Launch:
        """Return the launches of the rank that is late, if there is one."""
        late = launch.after is None and launch.args.ranks.rank == self.late
        return dataclasses.replace(launch, behind=BEHIND) if late else launch

    def check_waits(self, rank: int) -> None:
        """Check that in the last operation all others waited longest for the rank that was late, and it for nobody so
        long. Across domains it may wait as long for ranks that wait for it."""
        from cute_kernels.heap import NOTE_WORDS, NOTES
        from ep_ops.backends.cute import history

        parts = (self.view(self.heaps[rank] + self.heap.offset[name], 2 * NOTES * words).numpy().tobytes()
                 for name, words in (("notes", NOTE_WORDS), ("waited", self.world_size)))  # fmt: skip
        last = history.operations(*parts, now=self.operations + 1)[0]
        assert last.number == self.operations and last.waits[rank] < 1, last
        if self.late is not None and not self.heap.problem.domains:
            others = [wait if other != rank else 0.0 for other, wait in enumerate(last.waits)]
            long = BEHIND * TICK * 1e-9 / 2
            if rank == self.late:
                assert max(others) < long, f"rank {rank}, which is late, waits {others} in {last}"
            else:
                assert others.index(max(others)) == self.late and max(others) > long, f"rank {rank} waits {others}"

    def check_sums(self, rank: int) -> None:
        """Check that a rank has added up the waits of all operations but the last few."""
        from cute_kernels.heap import NOTES, SUM_LAG, WAIT_BITS

        heap, longs = self.heaps[rank], self.memory.load_long
        waited = heap + self.heap.offset["waited"] + self.operations % NOTES * 8 * self.world_size
        use = self.operations // NOTES
        words = [longs(waited + 8 * peer) for peer in range(self.world_size)]
        self.waited[rank].append([word & (1 << WAIT_BITS) - 1 if word >> WAIT_BITS == use else 0 for word in words])
        assert len(self.waited[rank]) == self.operations, "operations that nobody has looked at"
        sums = [longs(heap + self.heap.offset["waits"] + 8 * peer) for peer in range(self.world_size)]
        want = [sum(each) for each in zip([0] * self.world_size, *self.waited[rank][:-SUM_LAG], strict=True)]
        assert sums == want, f"rank {rank} has waited {sums} instead of {want}"

    def reported(self, rank: int, clear: bool = True) -> list[tuple[int, int]]:
        """Reason and peer of a rank's first and third records, (0, 0) where nothing is reported; then clears them. (A
        host does not clear the first one, from which its rank tells the others.)"""
        from cute_kernels.sync import REPORT_WORDS as words

        said = self.view(self.reports[rank], 2 * REPORT_WORDS)[::2].tolist()
        if clear:
            self.view(self.reports[rank], REPORT_WORDS).zero_()
        return [(said[at + 1], said[at + 4]) for at in (0, 2 * words)]

    def view(self, address: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.memory.tensor(address, shape, dtype)

    def floats(self, address: int, *shape: int) -> Tensor:
        return self.view(address, *shape, dtype=torch.float32)

    def blank(self, words: int, name: str) -> int:
        """Poisoned room for an output."""
        return self.memory.take(max(4 * words, 16), name)

    def along(self, truth: Any, rank: int) -> dict[str, int]:
        """Where a rank's inputs lie that `truth` names, and room for what its plan returns."""
        put, blank, case = self.memory.put, self.blank, truth.case
        tokens, idx = truth.tokens[rank], case.topk_idx[rank]
        rows, held = case.capacity[rank], case.experts_per_rank[rank]
        return dict(
            x=put(tokens.x, "x"), topk_weights=put(tokens.weights, "topk_weights"), topk_idx=put(idx, "topk_idx"),
            send_rows=blank(idx.numel(), "send_rows"), arrivals=blank(4 * rows + case.world_size + 3, "arrivals"),
            offs=blank(held, "offs"), counts=blank(held, "counts"), dropped=blank(held, "dropped"),
            y=put(truth.y[rank], "y"), weights=put(truth.weights[rank], "weights"),
        )  # fmt: skip


def numbered(kind: Any, **values: Any) -> Any:
    """A kernel's arguments, each of the type that its annotation names."""
    types = kind.__annotations__
    typed = {name: value if name == "ranks" else types[name](value) for name, value in values.items()}
    return kind(**typed)


def same(got: Tensor, want: Tensor, what: str, loose: bool = False) -> None:
    """``loose``: where `want` says -1, anything may stand."""
    if loose:
        got = torch.where(want == -1, want, got)
    assert torch.equal(got, want), f"{what}: {got.tolist()} instead of {want.tolist()}"
