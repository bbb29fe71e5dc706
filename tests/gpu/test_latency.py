"""Latency kernels against the reference backend to the bit, and the promises of their protocol under delays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from operators import (
    CASES,
    HIDDEN,
    Call,
    case_config,
    compare,
    covered,
    make_comm,
    of_kernels,
    ranks,
    size_config,
    unequal,
    without_scales,
)
from sharing import SHARING, TURNS, few_processes, fewer

import ep_ops
from cute_kernels.latency.sizes import most_tokens
from ep_ops.backends.cute.sizing import problem_of

BF16 = torch.bfloat16
SIZES = (120, 2880, 7168)
DELAY = 3_000_000  # cycles, more than a millisecond: hundreds of operations
REPLAYS = fewer(10_000, 40)


@contextlib.contextmanager
def latency_comm(name: str, **config: Any) -> Iterator[ep_ops.Communicator]:
    with make_comm("cute", name, latency_max_tokens=None, **config) as comm:
        assert of_kernels(comm).latency.tokens == min(256, most_tokens(problem_of(comm.config)))
        yield comm


def reference(name: str, **config: Any) -> ep_ops.Communicator:
    return make_comm("reference", name, latency_max_tokens=None, **config)


def draw_inputs(seed: int, tokens: int, hidden: int, top_k: int, rows: int, dtype: torch.dtype = BF16):
    draw = torch.Generator(device="cuda").manual_seed(seed + 977 * ranks()[0])
    x = torch.randn(tokens, hidden, generator=draw, device="cuda").to(dtype)
    y = torch.randn(rows, hidden, generator=draw, device="cuda").to(dtype)
    weights = torch.rand(tokens, top_k, generator=draw, device="cuda") * 2 - 0.5
    row_weights = torch.rand(rows, generator=draw, device="cuda") * 2 - 0.5
    return x, weights, y, row_weights


def run(comm: ep_ops.Communicator, call: Call, x, weights, y, row_weights) -> dict[str, Any]:
    """Run operators on the latency kernels, and one on throughput kernels in between."""
    ops, sizes, idx = torch.ops.ep, call.sizes(comm), call.topk_idx
    out: dict[str, Any] = {"dispatch": without_scales(ops.dispatch(x, weights, idx, *sizes))}
    out["dispatch unweighted"] = without_scales(ops.dispatch(x, None, idx, *sizes))
    out["plan"] = out["dispatch"][2:]
    route = (idx, *out["plan"][:4])
    tail = (call.alignment, call.max_tokens, comm.name)
    held, padding = covered(route, call.alignment, call.capacity)
    y = torch.where((held | padding)[:, None], y, torch.nan)
    row_weights = torch.where(held, row_weights, torch.where(padding, 0.0, torch.nan))
    out["combine"] = ops.combine(y, None, *route, *tail)
    out["dispatch backward x"] = ops.dispatch_backward(y, None, *route, *tail)
    out["combine weighted"] = ops.combine(y, row_weights, *route, *tail)
    out["combine residual"] = ops.combine(y, row_weights, *route, *tail, x)
    return out


def check(comm: ep_ops.Communicator, ref: ep_ops.Communicator, call: Call, given, together) -> None:
    got = run(comm, call, *given)
    torch.cuda.synchronize()
    comm.check_errors()
    expected = run(ref, call, *given)
    with together():
        compare(got, expected, call)


def random_route(seed: int, tokens: int, experts: int = 256, top_k: int = 8) -> torch.Tensor:
    draw = torch.Generator(device="cuda").manual_seed(seed + 31 * ranks()[0])
    return torch.rand(tokens, experts, generator=draw, device="cuda").argsort(1)[:, :top_k].int()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_route(name, dtype, seed, together):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    config = case_config(case, dtype)
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    given = draw_inputs(seed, call.topk_idx.shape[0], HIDDEN[dtype], case.top_k, call.capacity, dtype)
    with latency_comm(name, **config) as comm, reference(name, **config) as ref:
        check(comm, ref, call, given, together)


@pytest.mark.parametrize("hidden", SIZES)
def test_sizes_and_uneven_tokens(hidden, seed, together):
    rank, _ = ranks()
    config = size_config(hidden)
    with latency_comm("sizes", **config) as comm, reference("sizes", **config) as ref:
        for tokens in (0, 1, 2, 7, 33, 128, 256, 300):
            mine = tokens if rank % 2 == 0 else tokens // 3
            idx = random_route(seed + tokens, mine)
            slots = 32 if tokens in (7, 128) else 0
            capacity = comm.num_local_experts * slots if slots else comm.capacity(max(tokens, 1))
            call = Call(idx, capacity, 16, slots, max(tokens, 1))
            given = draw_inputs(seed, mine, hidden, 8, capacity)
            check(comm, ref, call, given, together)


class Oracle:
    """The same step on latency kernels and on throughput kernels; counts differing numbers on the device."""

    def __init__(self, tokens: int, hidden: int, bound: int | None = None, slots: int = 0) -> None:
        self.tokens, self.hidden = tokens, hidden
        self.sizes: dict = {"max_tokens": bound or max(tokens, 1), **(cases.room(None, slots) if slots else {})}
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(self.tokens, self.hidden, dtype=BF16, device="cuda")
        idx = torch.rand(self.tokens, 256, device="cuda").argsort(1)[:, :8].int()
        idx = torch.where(torch.rand(self.tokens, 8, device="cuda") < 0.1, -1, idx)
        return x, idx, torch.rand(self.tokens, 8, device="cuda")

    def step(self, fast: ep_ops.Communicator, slow: ep_ops.Communicator, delay=lambda: None) -> None:
        x, idx, weights = self.draw()
        delay()
        a = fast.dispatch(x, idx, weights, **self.sizes)
        delay()
        got = fast.combine(a.x, a.route, a.weights)
        delay()
        b = slow.dispatch(x, idx, weights, **self.sizes)
        expected = slow.combine(b.x, b.route, b.weights)
        self.wrong += (got != expected).sum() + unequal(a.route, b.route)
        self.wrong += (a.route.send_rows != b.route.send_rows).sum() + (a.route.offs != b.route.offs).sum()

    def verdict(self, fast: ep_ops.Communicator, together) -> None:
        torch.cuda.synchronize()
        fast.check_errors()
        with together():
            assert int(self.wrong) == 0


@contextlib.contextmanager
def both(name: str, hidden: int) -> Iterator[tuple[ep_ops.Communicator, ep_ops.Communicator]]:
    with (
        latency_comm(name, **size_config(hidden)) as fast,
        make_comm("cute", name + "/slow", **size_config(hidden)) as slow,
    ):
        fast.warmup()
        slow.warmup()
        torch.cuda.synchronize()
        yield fast, slow


def one_is_late(seed: int) -> Callable[[], None]:
    """To be called on all ranks together: the stream of one of them, drawn anew each time, sleeps."""
    rank, world_size = ranks()
    turns = torch.Generator().manual_seed(seed)

    def delay() -> None:
        if int(torch.randint(0, world_size, (), generator=turns)) == rank:
            torch.cuda._sleep(DELAY)

    return delay


def test_delays_in_every_role(seed, together):
    """A rank that sends late, one that receives late, one that runs a step ahead of the others: in turns."""
    rank, _ = ranks()
    delay = one_is_late(seed)
    with both("delays", 2880) as (fast, slow):
        torch.manual_seed(seed + rank)
        oracle = Oracle(16, 2880)
        for _ in range(fewer(40, 12)):
            oracle.step(fast, slow, delay)
        oracle.verdict(fast, together)


def test_runs_ahead_without_waiting_for_anybody(seed, together):
    """Latency operations back to back, one rank slow in each: staging is not overwritten before it was read."""
    rank, world_size = ranks()
    with both("ahead", 7168) as (fast, slow):
        torch.manual_seed(seed + rank)
        oracle = Oracle(4, 7168)
        inputs = [oracle.draw() for _ in range(60)]
        outs = []
        for i, (x, idx, weights) in enumerate(inputs):
            if i % 7 == rank:
                torch.cuda._sleep(DELAY // 4)
            a = fast.dispatch(x, idx, weights, max_tokens=4)
            if i % 5 == rank:
                torch.cuda._sleep(DELAY // 4)
            outs.append(fast.combine(a.x, a.route, a.weights))
        for (x, idx, weights), got in zip(inputs, outs, strict=True):
            b = slow.dispatch(x, idx, weights, max_tokens=4)
            oracle.wrong += (got != slow.combine(b.x, b.route, b.weights)).sum()
        oracle.verdict(fast, together)


def test_latency_and_throughput_by_turns(seed, together):
    """One communicator, calls below and above its bound, one rank late before each of them."""
    rank, _ = ranks()
    delay = one_is_late(seed)
    bounds = torch.randint(1, 500, (fewer(40, 8),), generator=torch.Generator().manual_seed(seed)).tolist()
    with both("turns", 2880) as (fast, slow):
        torch.manual_seed(seed + rank)
        for bound in bounds:
            oracle = Oracle(bound if rank % 2 else bound // 2, 2880, bound)
            oracle.step(fast, slow, delay)
            oracle.verdict(fast, together)


def test_many_replays(seed, together):
    """Graphs of both kinds and layouts, with different numbers of tokens (on some ranks none), in any order.

    Every replay draws its own data and checks itself.
    """
    rank, _ = ranks()
    with both("graphs", 1024) as (fast, slow):
        torch.manual_seed(seed + rank)
        graphs = []
        for bound, slots in ((1, 0), (5, 32), (64, 0), (300, 0)):
            oracle = Oracle(bound if rank % 2 == 0 else bound // 2, 1024, bound, slots)
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                oracle.step(fast, slow)
                oracle.wrong.zero_()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                oracle.step(fast, slow)
                if bound == 5:  # an odd number of operations: what was in one bank of the staging is then in the other
                    fast.dispatch(*oracle.draw(), max_tokens=bound)
            graphs.append((graph, oracle))
        turns = torch.Generator().manual_seed(seed)
        for i, turn in enumerate(torch.randint(0, len(graphs), (REPLAYS,), generator=turns).tolist()):
            graphs[turn][0].replay()
            if i % 100 == 99:
                torch.cuda.synchronize()
        for _, oracle in graphs:
            oracle.verdict(fast, together)
        torch.cuda.synchronize()
        del graphs


def split(comm: ep_ops.Communicator, between=lambda: None, **sizes: Any):
    """A step whose dispatch and combine are cut in two."""

    def step(x, idx, weights):
        started = comm.dispatch_start(x, idx, weights, **sizes)
        between()
        d = comm.dispatch_wait(started)
        sent = comm.combine_start(d.x, d.route, d.weights)
        between()
        return comm.combine_wait(sent), d.route

    return step


@pytest.mark.parametrize("bound", [1, 16, 128, 400])
def test_split_operations_are_the_whole(bound, seed, together):
    """Split operations return what whole ones do: eager, with work and delays in between, and replayed; above the
    kernels' bound too."""
    rank, _ = ranks()
    with both("split", 1024) as (fast, slow):
        torch.manual_seed(seed + rank)
        oracle = Oracle(bound, 1024)
        a = torch.randn(2048, 2048, device="cuda", dtype=BF16)

        def busy():
            torch.matmul(a, a)

        def check(step):
            x, idx, weights = oracle.draw()
            got, route = step(x, idx, weights)
            d = slow.dispatch(x, idx, weights, max_tokens=bound)
            oracle.wrong += (got != slow.combine(d.x, d.route, d.weights)).sum()
            oracle.wrong += unequal(route, d.route)

        delay = one_is_late(seed)
        for turn in range(12):
            delay()
            check(split(fast, busy if turn % 2 else delay, max_tokens=bound))
        oracle.verdict(fast, together)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                check(split(fast, busy, max_tokens=bound))
                oracle.step(fast, slow)
        for _ in range(fewer(100, 8)):
            graph.replay()
        oracle.verdict(fast, together)
        del graph


def test_split_operations_are_not_interrupted(seed):
    config = size_config(120)
    with latency_comm("order", **config) as comm:
        x, weights, *_ = draw_inputs(seed, 3, 120, 8, 1)
        idx = random_route(seed, 3)
        started = comm.dispatch_start(x, idx, weights, max_tokens=3)
        with pytest.raises(RuntimeError, match="dispatch_start must be followed by"):
            comm.dispatch(x, idx, weights, max_tokens=3)
        d = comm.dispatch_wait(started)
        with pytest.raises(RuntimeError, match="nothing was started"):
            comm.dispatch_wait(started)
        comm.combine_wait(comm.combine_start(d.x, d.route, d.weights))
        torch.cuda.synchronize()
        comm.check_errors()


@few_processes
def test_two_communicators_at_once(seed, together):
    """Split operations of two micro-batches in each other: eager with a late rank, compiled, and replayed."""
    rank, _ = ranks()
    bounds = 8, 130
    with both("first", 1024) as (one, slow), latency_comm("second", **size_config(1024)) as two, torch.no_grad():
        two.warmup()
        torch.manual_seed(seed + rank)
        oracles = [Oracle(bound - 5 * (rank % 2), 1024, bound) for bound in bounds]

        def step(a, b):
            first = one.dispatch_start(*a, max_tokens=bounds[0])
            second = two.dispatch_start(*b, max_tokens=bounds[1])
            rows = one.dispatch_wait(first)
            back = one.combine_start(rows.x, rows.route, rows.weights)
            more = two.dispatch_wait(second)
            other = two.combine_start(more.x, more.route, more.weights)
            return one.combine_wait(back), two.combine_wait(other)

        def check(run) -> None:
            given = [oracle.draw() for oracle in oracles]
            for oracle, mine, got in zip(oracles, given, run(*given), strict=True):
                d = slow.dispatch(*mine, **oracle.sizes)
                oracle.wrong += (got != slow.combine(d.x, d.route, d.weights)).sum()

        delay = one_is_late(seed)
        for _ in range(12):
            delay()
            check(step)
        for mode in ("default", "reduce-overhead"):
            compiled = torch.compile(step, fullgraph=True, mode=mode)
            for _ in range(6):
                check(compiled)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            check(step)
        for _ in range(fewer(200, 8)):
            graph.replay()
        for comm, oracle in zip((one, two), oracles, strict=True):
            oracle.verdict(comm, together)
        torch._dynamo.reset()
        del graph


@few_processes
@pytest.mark.parametrize("slots", [0, 32], ids=["grouped", "padded"])
def test_compiled(slots, seed, together):
    """Whole and split operations in compiled graphs return the right results on every step's fresh data."""
    rank, _ = ranks()
    with both("compiled", 1024) as (fast, slow), torch.no_grad():
        torch.manual_seed(seed + rank)
        oracle = Oracle(24, 1024, slots=slots)
        sizes = oracle.sizes

        def whole(x, idx, weights):
            d = fast.dispatch(x, idx, weights, **sizes)
            return fast.combine(d.x, d.route, d.weights), d.route

        for step in (whole, split(fast, **sizes)):
            compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
            for _ in range(6):
                x, idx, weights = oracle.draw()
                got, route = compiled(x, idx, weights)
                d = slow.dispatch(x, idx, weights, **sizes)
                oracle.wrong += (got != slow.combine(d.x, d.route, d.weights)).sum()
                oracle.wrong += unequal(route, d.route)
            oracle.verdict(fast, together)
        torch.cuda.synchronize()
        torch._dynamo.reset()


def test_bad_expert_ids_are_reported_and_not_sent(seed, together):
    rank, _ = ranks()
    with latency_comm("bad", **size_config(120)) as comm:
        idx = random_route(seed, 3)
        if rank == 0:
            idx[1, 2] = 1000
        x, weights, *_ = draw_inputs(seed, 3, 120, 8, 1)
        d = comm.dispatch(x, idx, weights, max_tokens=3)
        torch.cuda.synchronize()
        with together():
            if rank == 0:
                with pytest.raises(ValueError, match="1000"):
                    comm.check_errors()
            else:
                comm.check_errors()
            assert ((d.route.send_rows == -1) == (idx == 1000)).all()
        came = d.route.counts.sum()  # of 24 rows of each rank one is not sent
        came = came.cpu() if SHARING > 1 else came
        if dist.is_initialized():
            dist.all_reduce(came)
        with together():
            assert int(came) == 24 * ranks()[1] - 1


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Memory as users get it: no kernel that fills results stands between two operations."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def test_kernels_next_to_each_other(seed, together):
    """16 steps as users run them, each kernel launched while the one before it ends, eager and from a graph."""
    with both("adjacent", 1024) as (fast, slow):
        torch.manual_seed(seed + ranks()[0])
        oracle = Oracle(8, 1024)
        inputs = [oracle.draw() for _ in range(16)]
        expected = []
        for x, idx, weights in inputs:
            d = slow.dispatch(x, idx, weights, **oracle.sizes)
            expected.append(slow.combine(d.x, d.route, d.weights))

        def steps() -> list[torch.Tensor]:
            made = []
            for x, idx, weights in inputs:
                d = fast.dispatch(x, idx, weights, **oracle.sizes)
                made.append(fast.combine(d.x, d.route, d.weights))
            return made

        with unfilled(), torch.no_grad():
            outs = steps()
            for got, want in zip(outs, expected, strict=True):
                oracle.wrong += (got != want).sum()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = steps()
            for _ in range(fewer(100, 8)):
                for out in outs:
                    out.fill_(torch.nan)
                graph.replay()
                for got, want in zip(outs, expected, strict=True):
                    oracle.wrong += (got != want).sum()
        oracle.verdict(fast, together)
        del graph


@pytest.mark.parametrize("missing", ["dispatch", "combine"])
def test_who_is_missing_is_told(missing, seed, together):
    """The other ranks' kernels end, and say for whom they waited."""
    rank, world_size = ranks()
    if world_size == 1:
        pytest.skip("nobody to wait for")
    config = size_config(120)
    comm = ep_ops.Communicator(backend="cute", name=f"missing/{missing}", device="cuda", timeout=1.0 * TURNS, **config)
    comm.warmup()
    idx = random_route(seed, 3)
    x, weights, *_ = draw_inputs(seed, 3, 120, 8, 1)
    dist.barrier()
    d = comm.dispatch(x, idx, weights, max_tokens=3) if missing == "combine" or rank != 1 else None
    if missing == "combine" and rank != 1:
        comm.combine(d.x, d.route, d.weights)
    torch.cuda.synchronize()
    dist.barrier()
    with together():
        # All say for whom they waited, rank 1 that it was told so, as soon as it is.
        told = "stopped because rank . waited .* for rank 1" if rank == 1 else f"ep::{missing}.* for rank 1"
        end = time.monotonic() + 5
        with pytest.raises(RuntimeError, match=told):
            while time.monotonic() < end:
                comm.check_errors()
                time.sleep(0.01)
    comm.destroy()
