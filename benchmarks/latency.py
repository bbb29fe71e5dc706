"""Latency of dispatch and combine at decode sizes: `ep-ops bench latency`, on all GPUs of this host or under torchrun.

ep-ops bench latency                                           # T = 1, 2, 4, ... 256 tokens a rank
torchrun --nproc-per-node 4 -m ep_ops.cli bench latency --tokens 1,8,128 --out results.json
ep-ops bench latency --tokens 64 --deal 132,0,132 --deal 40,40,132   # blocks: senders,first receiver,all

Each figure is of whole operations inside a CUDA graph that holds `--pairs` of them, every one with its own random rows
and route: µs for one, the longest over ranks, mean and 99th percentile over replays. Beside it, in the same run, the
same graph on the throughput kernels, NCCL's all_to_all_single of T rows for every rank there and back, and a barrier
of flags, which is the least that any exchange takes. `work` is a matrix product as of a shared expert, `work_and_pair`
one behind a dispatch and one behind a combine, `work_in_halves` the same between their halves.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_ops import Communicator
from ep_ops.launch import launch, process_group

from .machine import describe

TIMEOUT = 20.0  # seconds that a rank waits for another
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLUMNS = (
    "pair", "dispatch", "combine", "padded_pair", "aligned_pair", "throughput_pair", "nccl_pair",
    "work", "work_and_pair", "work_in_halves",
)  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="ep-ops bench latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--tokens", type=_numbers, default=TOKENS, metavar="N,N", help="of each rank")
    options.add_argument("--hidden", type=int, default=7168)
    options.add_argument("--experts", type=int, default=256)
    options.add_argument("--top-k", type=int, default=8)
    options.add_argument("--pairs", type=int, default=16, help="operations in a graph (default: %(default)s)")
    options.add_argument("--replays", type=int, default=200, help="timed replays (default: %(default)s)")
    options.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,NAME", help=" ".join(COLUMNS))
    options.add_argument(
        "--deal", type=_numbers, action="append", help="senders,first receiver,blocks; may be repeated"
    )
    options.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    options.add_argument("--ranks", type=int, help="without torchrun: processes (default: one for each GPU)")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        print("ep-ops bench latency: torch sees no GPU", file=sys.stderr)
        return 2
    if "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120), device_id=device)
        measure(device, args)
        dist.barrier()
        dist.destroy_process_group()
    else:
        launch(_process, args.ranks or gpus, args)
    return 0


def _process(rank: int, port: int, world_size: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    with process_group(rank, port, world_size, device, 120.0):
        measure(device, args)


class Steps:
    """`count` operations of one kind, each with data of its own."""

    def __init__(self, comm: Communicator, tokens: int, count: int, *, alignment: int = 1, slots: int = 0) -> None:
        self.comm, self.count, self.tokens = comm, count, tokens
        self.terms = {"alignment": alignment, "slots": slots, "max_tokens": tokens}
        draw = torch.Generator(device=comm.device).manual_seed(1000 * tokens + comm.rank)
        shape = (count, tokens)
        self.x = torch.randn(*shape, comm.hidden_size, generator=draw, device=comm.device).to(comm.dtype)
        noise = torch.rand(*shape, comm.num_experts, generator=draw, device=comm.device)
        self.idx = noise.argsort(-1)[..., : comm.top_k].int().contiguous()
        self.weights = torch.rand(*shape, comm.top_k, generator=draw, device=comm.device)
        if not slots:
            routed = comm.world_size * tokens * min(comm.top_k, comm.num_local_experts)
            rows = routed + min(routed, comm.num_local_experts) * (alignment - 1)
            self.terms["capacity"] = -(-rows // alignment) * alignment

    def dispatch(self, i: int) -> Any:
        return self.comm.dispatch(self.x[i], self.idx[i], self.weights[i], **self.terms)

    def prepare(self) -> None:
        """What combine alone needs."""
        self.dispatched = [self.dispatch(i) for i in range(self.count)]

    def combine(self, i: int) -> torch.Tensor:
        d = self.dispatched[i]
        return self.comm.combine(d.x, d.route, d.weights, alignment=self.terms["alignment"])

    def pair(self, i: int) -> torch.Tensor:
        d = self.dispatch(i)
        return self.comm.combine(d.x, d.route, d.weights, alignment=self.terms["alignment"])


class Beside:
    """Work that needs nothing from the dispatch or combine beside it."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        new: dict[str, Any] = {"device": steps.comm.device, "dtype": steps.comm.dtype}
        self.a, self.b = torch.randn(256, 7168, **new), torch.randn(7168, 4096, **new)
        self.out = torch.empty(256, 4096, **new)

    def one(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def work(self, i: int) -> None:
        self.one()
        self.one()

    def work_and_pair(self, i: int) -> torch.Tensor:
        d = self.steps.dispatch(i)
        self.one()
        out = self.steps.comm.combine(d.x, d.route, d.weights, alignment=self.steps.terms["alignment"])
        self.one()
        return out

    def work_in_halves(self, i: int) -> torch.Tensor:
        steps, comm = self.steps, self.steps.comm
        started = comm.dispatch_start(steps.x[i], steps.idx[i], steps.weights[i], **steps.terms)
        self.one()
        d = comm.dispatch_wait(started)
        sent = comm.combine_start(d.x, d.route, d.weights, alignment=steps.terms["alignment"])
        self.one()
        return comm.combine_wait(sent)


def expected_pair(steps: Steps, i: int) -> torch.Tensor:
    """What every expert being the identity gives, in fp32: the tokens times the sum of their weights."""
    return steps.x[i].float() * steps.weights[i].sum(1, keepdim=True)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def replay_times(device: torch.device, call: Callable[[int], Any], count: int, replays: int) -> list[float]:
    """µs of one of `count` captured calls, for each replay the longest over ranks."""
    for i in range(count):
        call(i)
    torch.cuda.synchronize(device)
    dist.barrier()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize(device)
    dist.barrier()
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize(device)
    took = [1e3 * a.elapsed_time(b) / count for a, b in zip(marks[:-1], marks[1:], strict=True)]
    longest = torch.tensor(took, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    torch.cuda.synchronize(device)
    return longest.tolist()


def summary(took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    return {
        "us": statistics.fmean(ordered),
        "us_median": statistics.median(ordered),
        "us_p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "us_min": ordered[0],
        "us_max": ordered[-1],
        "replays": len(ordered),
    }


def host_time(call: Callable[[int], Any], count: int) -> float:
    """µs until an eager call returns, median."""
    took = []
    for _ in range(3):
        for i in range(count):
            begin = time.perf_counter()
            call(i)
            took.append(1e6 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    return statistics.median(took)


@contextlib.contextmanager
def communicators(device: torch.device, args: argparse.Namespace) -> Iterator[tuple[Communicator, Communicator]]:
    """One whose calls all run on the latency kernels, one whose calls never do."""
    common: dict[str, Any] = dict(
        num_experts=args.experts, hidden_size=args.hidden, top_k=args.top_k, max_tokens_per_rank=max(args.tokens),
        device=device, backend="cute", timeout=TIMEOUT,
    )  # fmt: skip
    with (
        Communicator(latency_max_tokens=max(args.tokens), **common) as fast,
        Communicator(latency_max_tokens=0, **common) as slow,
    ):
        fast.warmup()
        slow.warmup()
        yield fast, slow


def measure(device: torch.device, args: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {
        "version": 1, "machine": describe(device), "world_size": world_size, "results": [],
        **{name: getattr(args, name) for name in ("hidden", "experts", "top_k", "pairs")},
    }  # fmt: skip
    wanted = args.only or COLUMNS
    with torch.no_grad(), communicators(device, args) as (fast, slow):
        if world_size > 1:
            found["barrier"] = summary(barrier_times(device, args))
        for tokens in args.tokens:
            for deal in args.deal or (None,):
                fast.backend.latency.deal = deal  # type: ignore[attr-defined]
                result: dict[str, Any] = {"tokens": tokens, "deal": deal}
                for name, call in calls(fast, slow, tokens, args, wanted, result):
                    result[name] = summary(replay_times(device, call, args.pairs, args.replays))
                found["results"].append(result)
                if rank == 0:
                    shown = "  ".join(
                        f"{name} {result[name]['us']:.1f} ({result[name]['us_p99']:.1f})"
                        for name in COLUMNS
                        if name in result
                    )
                    print(f"T={tokens} {deal or ''} {shown}", flush=True)
        fast.check_errors()
        slow.check_errors()
    if rank == 0:
        print(table(found))
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")


def calls(
    fast: Communicator, slow: Communicator, tokens: int, args: argparse.Namespace, wanted: Sequence[str], result: dict
) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """What is measured at one size; each is freed before the next."""
    count = args.pairs
    if {"pair", "dispatch", "combine"} & set(wanted):
        steps = Steps(fast, tokens, count)
        result["error"] = max(relative_error(steps.pair(i), expected_pair(steps, i)) for i in range(count))
        result["host_dispatch_us"] = host_time(steps.dispatch, count)
        if "pair" in wanted:
            yield "pair", steps.pair
        if "dispatch" in wanted:
            yield "dispatch", steps.dispatch
        if "combine" in wanted:
            steps.prepare()
            yield "combine", steps.combine
        del steps
    if "padded_pair" in wanted:
        mean = fast.world_size * tokens * fast.top_k / fast.num_experts
        yield "padded_pair", Steps(fast, tokens, count, slots=int(4 * mean) + 16).pair
    if "aligned_pair" in wanted:
        yield "aligned_pair", Steps(fast, tokens, count, alignment=16).pair
    if "throughput_pair" in wanted:
        yield "throughput_pair", Steps(slow, tokens, count).pair
    if {"work", "work_and_pair", "work_in_halves"} & set(wanted):
        beside = Beside(Steps(fast, tokens, count))
        for name in ("work", "work_and_pair", "work_in_halves"):
            if name in wanted:
                yield name, getattr(beside, name)
        del beside
    if "nccl_pair" in wanted and fast.world_size > 1:
        there = torch.randn(fast.world_size * tokens, fast.hidden_size, device=fast.device).to(fast.dtype)
        back = torch.empty_like(there)

        def nccl_pair(i: int) -> None:
            dist.all_to_all_single(back, there)
            dist.all_to_all_single(there, back)

        yield "nccl_pair", nccl_pair


def barrier_times(device: torch.device, args: argparse.Namespace) -> list[float]:
    """µs of one barrier in a row of them. Its marks come from the host, so it cannot be replayed."""
    from .link import DeviceBarrier

    barrier = DeviceBarrier(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(5_000_000)  # until the host has enqueued them all
    barrier()
    start.record()
    for _ in range(args.replays):
        barrier()
    end.record()
    torch.cuda.synchronize(device)
    longest = torch.tensor([1e3 * start.elapsed_time(end) / args.replays], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    barrier.free()
    return longest.tolist()


def table(found: dict[str, Any]) -> str:
    lines = [f"{found['world_size']} × {found['machine']['device']}; µs, mean (p99)"]
    if "barrier" in found:
        lines.append(f"a barrier of flags: {found['barrier']['us']:.1f} ({found['barrier']['us_p99']:.1f})")
    lines.append("  T  deal        host  error " + "".join(f"{name:>17}" for name in COLUMNS))
    for result in found["results"]:
        cells = (
            f"{result[name]['us']:.1f} ({result[name]['us_p99']:.1f})" if name in result else "-" for name in COLUMNS
        )
        deal = ",".join(map(str, result["deal"] or ()))
        host, error = result.get("host_dispatch_us", 0.0), result.get("error", 0.0)
        lines.append(
            f"{result['tokens']:>3}  {deal:<10} {host:5.1f} {error:6.3f} " + "".join(f"{c:>17}" for c in cells)
        )
    return "\n".join(lines)
