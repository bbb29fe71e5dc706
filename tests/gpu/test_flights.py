"""Split operations of many and of few tokens against whole ones, to the bit: two in flight on one communicator, forward
and backward, eager, compiled and captured, with ranks that come late, with memory that is poisoned and used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operators import ranks
from sharing import MPS, few_processes, fewer
from test_latency import BF16, Oracle, both, one_is_late
from torch import Tensor

from ep_ops.nn import interleave

HIDDEN = 1024
MANY, FEW = 500, 60  # on throughput kernels, on latency kernels
BOUNDS = [(MANY, MANY), (FEW, FEW), (FEW, MANY)]
Batch = tuple[Tensor, Tensor, Tensor]


def doubled(rows: Tensor, offs: Tensor) -> Tensor:
    """Return the outputs of experts: rows of segments times two, others zero."""
    row = torch.arange(rows.shape[0], device=rows.device)[:, None]
    return torch.where(row < offs[-1], rows * 2, 0)


class Turns:
    """Two micro-batches in turns on `fast`, one after the other on `slow`."""

    def __init__(self, fast: Any, slow: Any, bounds: tuple[int, int], between: Callable[[], None]) -> None:
        self.fast, self.slow, self.between = fast, slow, between
        rank, _ = ranks()
        self.oracles = [Oracle(bound if rank % 2 else bound // 2, HIDDEN, bound) for bound in bounds]

    def draw(self) -> list[Batch]:
        return [oracle.draw() for oracle in self.oracles]

    def steps(self, batch: Batch, flight: int) -> Any:
        x, idx, weights = batch
        sizes = self.oracles[flight].sizes
        started = self.fast.dispatch_start(x, idx, weights, zeros=True, flight=flight, **sizes)
        self.between()
        yield None
        d = self.fast.dispatch_wait(started)
        started = self.fast.combine_start(doubled(d.x, d.route.offs), d.route, d.weights, flight=flight)
        self.between()
        yield None
        yield self.fast.combine_wait(started)

    def run(self, first: Batch, second: Batch) -> list[Tensor]:
        return interleave(self.steps(first, 0), self.steps(second, 1))

    def whole(self, first: Batch, second: Batch) -> list[Tensor]:
        outs = []
        for (x, idx, weights), oracle in zip((first, second), self.oracles, strict=True):
            d = self.slow.dispatch(x, idx, weights, zeros=True, **oracle.sizes)
            outs.append(self.slow.combine(doubled(d.x, d.route.offs), d.route, d.weights))
        return outs

    def compare(self, got: list[Tensor], expected: list[Tensor]) -> None:
        for oracle, mine, right in zip(self.oracles, got, expected, strict=True):
            oracle.wrong += (mine != right).sum()

    def verdict(self, together: Any) -> None:
        for oracle in self.oracles:
            oracle.verdict(self.fast, together)


def busy() -> Callable[[], None]:
    """Return a GEMM. With small shares of MPS it is one without thread block clusters: concurrently with those, not all
    blocks of a dispatch start (benchmarks/results/tested.md)."""
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.float32 if MPS and ranks()[1] > 2 else BF16)
    return lambda: torch.matmul(a, a)  # type: ignore[return-value]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_two_in_flight(bounds, seed, together):
    """Two operations in flight return the right results: eager, with one rank late here and there, then replayed."""
    rank, _ = ranks()
    delay, work = one_is_late(seed), busy()
    with both("flights", HIDDEN) as (fast, slow), torch.no_grad():
        torch.manual_seed(seed + rank)
        for between in (work, delay):
            turns = Turns(fast, slow, bounds, between)
            for _ in range(fewer(12, 3)):
                delay()
                batches = turns.draw()
                turns.compare(turns.run(*batches), turns.whole(*batches))
            turns.verdict(together)
        turns = Turns(fast, slow, bounds, work)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                batches = turns.draw()
                turns.compare(turns.run(*batches), turns.whole(*batches))
        for _ in range(fewer(100, 8)):
            graph.replay()
        turns.verdict(together)
        del graph


def gradients(run: Callable[..., list[Tensor]], batches: list[Batch], grads: list[Tensor]) -> list[Tensor]:
    given = [(x.clone().requires_grad_(), idx, w.clone().requires_grad_()) for x, idx, w in batches]
    outs = run(*given)
    torch.autograd.backward(outs, grads)
    return [out.detach() for out in outs] + [t.grad for x, _, w in given for t in (x, w)]  # type: ignore[misc]


@pytest.mark.parametrize(
    "how", ["eager", *(pytest.param(how, marks=few_processes) for how in ("compiled", "compiled graph"))]
)
def test_backward(how, seed, together):
    """The gradients of waits start, those of starts wait."""
    rank, _ = ranks()
    with both("backward", HIDDEN) as (fast, slow):
        torch.manual_seed(seed + rank)
        for bounds in BOUNDS:
            turns = Turns(fast, slow, bounds, busy())
            run = turns.run
            if how != "eager":
                torch._dynamo.reset()
                mode = "reduce-overhead" if how == "compiled graph" else "default"
                run = torch.compile(turns.run, fullgraph=True, mode=mode)
            for _ in range(fewer(4, 2)):
                batches = turns.draw()
                grads = [torch.randn_like(x) for x, _, _ in batches]
                got = gradients(run, batches, grads)
                expected = gradients(turns.whole, batches, grads)
                for mine, right in zip(got, expected, strict=True):
                    turns.oracles[0].wrong += (mine != right).sum()
            turns.verdict(together)
    torch._dynamo.reset()


@pytest.mark.parametrize("bound", [MANY, FEW])
def test_memory_is_not_used_again_too_early(bound, seed, together):
    """Tensors given to a start that everybody else has freed are not overwritten before the wait, and results stay as
    they are when more operations follow. One rank is late, so that the others' operations last."""
    rank, _ = ranks()
    delay = one_is_late(seed)
    ops = torch.ops.ep
    with both("memory", HIDDEN) as (fast, slow), torch.no_grad():
        torch.manual_seed(seed + rank)
        oracle = Oracle(bound, HIDDEN, bound)
        kept = []
        for _ in range(fewer(20, 4)):
            x, idx, weights = oracle.draw()
            d = slow.dispatch(x, idx, weights, zeros=True, **oracle.sizes)
            expected = slow.combine(d.x, d.route, d.weights)
            along = *d.route.tensors, *d.route.ints
            delay()
            y, row_weights = d.x.clone(), d.weights.clone()
            copies = [t.clone() for t in d.route.tensors]
            started = ops.combine_start(y, row_weights, *copies, *d.route.ints, fast.name)
            del y, row_weights, copies
            for like in (d.x, d.weights, *d.route.tensors, expected):
                torch.full_like(like, 99)  # into what is free
            out = ops.combine_wait(started, d.x, d.weights, *along, fast.name)
            kept.append((out, expected))
            grad = torch.randn_like(x)
            home, _ = ops.dispatch_backward(d.x, None, *along, slow.name)
            back, row_grads = ops.combine_backward(
                grad, d.x, d.weights, *along[:5], d.route.num_rows, *along[5:], slow.name
            )
            delay()
            y, given = d.x.clone(), grad.clone()
            one = ops.dispatch_backward_start(y, None, *along, fast.name)
            two = ops.combine_backward_start(
                given, d.x, d.weights, *along[:5], d.route.num_rows, *along[5:], fast.name, 1
            )  # fmt: skip
            del y, given
            for like in (d.x, grad, expected):
                torch.full_like(like, 99)
            held = d.route.recv_from >= 0
            sizes = BF16, *d.x.shape, True, fast.name, 1
            for mine, right in zip(ops.combine_backward_wait(two, [], *sizes), (back, row_grads), strict=True):
                kept.append((mine[held], right[held]))
            kept.append((ops.dispatch_backward_wait(one, [], BF16, *x.shape, 0, fast.name)[0], home))
        for mine, right in kept:
            oracle.wrong += (mine != right).sum()
        oracle.verdict(fast, together)


def test_a_wait_on_another_stream(seed, together):
    """A wait on another stream returns the right rows, and memory that is freed there is not used too early."""
    rank, _ = ranks()
    other = torch.cuda.Stream()
    with both("streams", HIDDEN) as (fast, slow), torch.no_grad():
        torch.manual_seed(seed + rank)
        oracle = Oracle(MANY, HIDDEN, MANY)
        for _ in range(fewer(12, 3)):
            x, idx, weights = oracle.draw()
            expected = slow.dispatch(x, idx, weights, zeros=True, **oracle.sizes)
            right = slow.combine(expected.x, expected.route, expected.weights)
            started = fast.dispatch_start(x, idx, weights, zeros=True, **oracle.sizes)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                d = fast.dispatch_wait(started)
                del started
                out = fast.combine(d.x, d.route, d.weights)
                oracle.wrong += (out != right).sum()
                del d, out
            torch.full_like(expected.x, 99)
            torch.cuda.current_stream().wait_stream(other)
        oracle.verdict(fast, together)


def test_start_and_wait_are_captured_together(seed, together):
    rank, _ = ranks()
    with both("captured", HIDDEN) as (fast, _), torch.no_grad():
        torch.manual_seed(seed + rank)
        oracle = Oracle(MANY, HIDDEN, MANY)
        started = fast.dispatch_start(*oracle.draw(), **oracle.sizes)
        graph = torch.cuda.CUDAGraph()
        with together(), pytest.raises(RuntimeError, match="its wait is captured in a CUDA graph, its start was not"):
            with torch.cuda.graph(graph):
                fast.dispatch_wait(started)
        fast.dispatch_wait(started)
        oracle.verdict(fast, together)
