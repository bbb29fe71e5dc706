"""How long something takes on all ranks: whole calls, on data that no cache holds, as long as the slowest rank takes.

Before each timed call the device reads a buffer larger than its L2 (nothing of earlier calls stays there), idles a
little (so that the host has enqueued the call before it starts: its own speed is measured apart), and passes a barrier
with all ranks. Then: event, call, event. The time of a call is the longest over ranks; the result is their median.
Calls in steady state, eager or from a CUDA graph, are timed in rows that are prepared in the same way: a row as a
whole, or (`row`) each of its calls by an event behind it.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

EVICT_BYTES = 256 * 2**20
PAUSE_CYCLES = 300_000  # of the GPU's clock: about 0.15 ms
WARMUP = 3
LEAD = 10  # calls of a row before the timed ones
ROW = 8  # eager calls back to back
HOST_ROW = 50  # eager calls whose host time is taken together
CHAIN = 10  # calls in a graph
REST_CYCLES = 60_000_000  # about 30 ms
SPIN_UP_CYCLES = 20_000_000  # about 10 ms, so that an idle GPU raises its clock


@dataclasses.dataclass(frozen=True)
class Timing:
    """µs of each call, the longest over ranks."""

    calls: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.calls)

    def over(self, other: Timing) -> float:
        """Return the ratio to another timing that was measured in alternation: the median over rounds."""
        return statistics.median(a / b for a, b in zip(self.calls, other.calls, strict=True))

    def record(self) -> dict[str, float]:
        return {"us": self.median, "us_min": min(self.calls), "us_max": max(self.calls), "calls": len(self.calls)}

    @property
    def mean(self) -> float:
        return statistics.fmean(self.calls)

    @property
    def p99(self) -> float:
        return sorted(self.calls)[int(0.99 * len(self.calls))]

    def spread(self) -> dict[str, float]:
        """Return mean and tail, where :meth:`record` returns the median."""
        return self.record() | {"us": self.mean, "us_median": self.median, "us_p99": self.p99}

    def each(self, count: int) -> Timing:
        """Return the time of one of `count` calls that were timed together."""
        return Timing(tuple(us / count for us in self.calls))

    def less(self, us: float) -> Timing:
        """Return the timing without an overhead of `us` in every call."""
        return Timing(tuple(call - us for call in self.calls))


class Timer:
    """Times calls `call(i)`, i counting up, on the current stream. All methods are collective.

    `barrier` lines up the ranks: on a GPU by work on the current stream that does not block the host.
    """

    def __init__(self, device: torch.device, barrier: Callable[[], None]) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.barrier = barrier
        if self.cuda:
            self.evicted = torch.ones(EVICT_BYTES // 4, dtype=torch.float32, device=device)
            self.sink = torch.empty((), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that this object holds."""
        return self.evicted.nbytes + self.sink.nbytes if self.cuda else 0

    def whole(self, call: Callable[[int], Any], iterations: int) -> Timing:
        """Time single calls, each from a barrier to its end on the device."""
        warmup = self._warm(call, iterations)
        return self._timing([self._span(call, warmup + i) for i in range(iterations)])

    def by_turns(
        self, calls: dict[str, Callable[[int], Any]], rounds: int, row: int = 1, rest: bool = True,
        mirrored: bool = False,
    ) -> dict[str, Timing]:  # fmt: skip
        """Calls that are to be compared: in each round a row of each, in an order of the round's own, and the mean of
        the row. The i-th time of each is of the same round. `mirrored`: every second round is in the order of `calls`,
        and the others in the reverse one.

        A GPU that draws all the power that it may lowers its clock, within milliseconds, for whatever comes next. With
        `rest` it idles before each row, and begins at its full clock; without, it is as hot as the row makes it.
        """
        for call in calls.values():
            self._warm(call, 1)
        spans: dict[str, list[Any]] = {name: [] for name in calls}
        for i in range(rounds):
            order = list(calls)
            if mirrored:
                order = order[::-1] if i % 2 else order
            else:
                random.Random(i).shuffle(order)  # the same on all ranks
            for name in order:
                if rest and self.cuda:
                    torch.cuda._sleep(REST_CYCLES)
                spans[name].append(self._span(calls[name], i * row, row))
        return {name: self._timing(pairs, row) for name, pairs in spans.items()}

    def steady(self, call: Callable[[int], Any], iterations: int) -> Timing:
        """Calls back to back, 8 at a time, without a barrier in between: µs of each, one figure for each such row."""
        self._warm(call, iterations)
        count = min(ROW, iterations)
        return self._timing([self._span(call, 0, count) for _ in range(max(1, iterations // 4))], count)

    def graph(self, call: Callable[[int], Any], iterations: int) -> tuple[Timing, Any]:
        """Time replays of a CUDA graph of 10 calls: µs of each call, one figure for each replay. Also return the result
        of `call(9)`, the last of them (except its inputs), which a further replay writes to memory that was cleared."""
        self._warm(call, iterations)
        last: list[Any] = [None]

        def kept(i: int) -> None:
            last[0] = None  # its memory serves the next call
            last[0] = call(i)

        replay = self.captured(kept, CHAIN)
        replay(0)  # the first one loads it
        timing = self._timing([self._span(replay) for _ in range(max(1, iterations // 4))], CHAIN)
        for tensor in leaves(last[0]):
            tensor.zero_()
        replay(0)
        self.synchronize()
        return timing, last[0]

    def captured(self, call: Callable[[int], Any], count: int) -> Callable[[int], None]:
        """Return a function that replays a CUDA graph of `count` calls, whatever its argument; on a CPU it makes these
        calls."""
        if not self.cuda:
            return lambda i: repeat(call, count)
        repeat(call, count)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # what other libraries free must not end the capture
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            repeat(call, count)
        return lambda i: graph.replay()

    def row(self, call: Callable[[int], Any], iterations: int) -> Timing:
        """Calls back to back, without a barrier in between: each from the end of the one before it to its own."""
        self._warm(call, iterations)
        marks = [self._mark() for _ in range(iterations + 1)]
        self._line_up()
        repeat(call, LEAD)
        marks[0].record()
        for i, mark in enumerate(marks[1:]):
            call(i)
            mark.record()
        return self._timing(list(itertools.pairwise(marks)))

    def host(self, call: Callable[[int], Any], iterations: int) -> Timing:
        """Time until a call returns: what the host pays. Means of rows of 50 calls, behind 10 that are not timed."""
        self._warm(call, iterations)
        count = min(HOST_ROW, iterations * ROW)
        means = []
        for _ in range(max(1, iterations // 4)):
            self._line_up()
            repeat(call, min(LEAD, iterations))
            begin = time.perf_counter()
            repeat(call, count)
            means.append(1e6 * (time.perf_counter() - begin) / count)
            self.synchronize()
        return self._longest(means)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _warm(self, call: Callable[[int], Any], iterations: int) -> int:
        """Warm up, and return the number of calls needed."""
        if self.cuda:
            torch.cuda._sleep(SPIN_UP_CYCLES)
        warmup = min(WARMUP, iterations)
        repeat(call, warmup)
        self.synchronize()
        return warmup

    def _span(self, call: Callable[[int], Any], first: int = 0, count: int = 1) -> tuple[Any, Any]:
        """Line up the ranks, make calls from number `first` on, and return the marks before and after them."""
        start, end = self._mark(), self._mark()
        self._line_up()
        start.record()
        repeat(call, count, first)
        end.record()
        return start, end

    def _line_up(self) -> None:
        if self.cuda:
            torch.sum(self.evicted, 0, out=self.sink)
            torch.cuda._sleep(PAUSE_CYCLES)
        self.barrier()

    def _mark(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.cuda else HostMark()

    def _timing(self, spans: list[tuple[Any, Any]], count: int = 1) -> Timing:
        """Return the time between the marks of each span, divided by the number of calls in a span."""
        self.synchronize()
        return self._longest([1e3 * start.elapsed_time(end) / count for start, end in spans])

    def _longest(self, took: list[float]) -> Timing:
        return Timing(tuple(largest(took, self.device)))


def largest(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    found = torch.tensor(values, dtype=torch.float64, device="cpu" if dist.get_backend() == "gloo" else device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def repeat(call: Callable[[int], Any], count: int, first: int = 0) -> None:
    """Call with the numbers from `first` on."""
    for i in range(first, first + count):
        call(i)


def leaves(results: Any) -> list[Tensor]:
    """Yield the tensors of nested tuples."""
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


class HostMark:
    """A CUDA event's stand-in where calls run on the host."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostMark) -> float:
        """Return the elapsed time in ms."""
        return 1e3 * (end.at - self.at)
