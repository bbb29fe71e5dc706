"""Latency of dispatch and combine at decode sizes: `ep-ops bench latency`, on all GPUs of this host or under torchrun.

ep-ops bench latency                                           # T = 1, 2, 4, ... 256 tokens a rank
torchrun --nproc-per-node 4 -m ep_ops bench latency --out results.json
ep-ops bench latency --ranks 2 --against results.json          # 2 ranks may share a GPU; ratios to a recorded run
ep-ops bench latency --device cpu --tokens 1,2 --hidden 64 --experts 8 --top-k 2 --replays 3    # the benchmark itself

Operations are captured in CUDA graphs of `--pairs` of them, every one with its own random rows and route, and replayed
back to back with an event between replays. A figure is µs of one operation in one replay, the longest over ranks; shown
are mean and 99th percentile. benchmarks/results/README.md of the sources says how each of them is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_ops import Communicator

from .against import reject_other_kind
from .baselines import SameBytes
from .latency_report import NAMES, table
from .operators import MAX_ERROR
from .options import add_against, add_domain_options, add_sizes, names_of, new_parser, only, positive, read
from .presets import SUM_FORMAT
from .ranks import Run, on_every_rank
from .steps import Idle, Steps
from .timing import Timing
from .workloads import Workload, measure_traffic

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FP8 = ("e4m3/128/pow2", "columns")
"""Format of the rows of `pair_fp8`, and layout of their scales."""
WARM = "pair_fp8_warm"
"""The same with one step's rows in every pair, so that a combine finds those of experts in the cache, as it does behind
the GEMM that has written them, and in `pair`, whose dispatch has. In `pair_fp8` they come from memory."""


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "latency")
    add_sizes(options, TOKENS)
    options.add_argument("--pairs", type=positive, default=16, help="operations in a graph (default: %(default)s)")
    options.add_argument(
        "--replays",
        type=positive,
        default=2000,
        help="timed replays; comparisons take a tenth of them (default: %(default)s)",
    )
    options.add_argument("--only", type=names_of(NAMES), default=tuple(NAMES), metavar="NAME,NAME", help=only(NAMES))
    add_domain_options(options)
    add_against(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read(options, argv)
    reject_other_kind(options, args, **facts_of(args))
    return on_every_rank(Latency.measure, args)


SIZES = ("hidden", "experts", "top_k", "pairs")


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what two runs that can be compared have in common."""
    return {"benchmark": "latency", **{key: getattr(args, key) for key in SIZES}}


class Latency(Run):
    """Measures all sizes, one after the other."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        self.few = max(1, args.replays // 10)
        facts = {**facts_of(args), "replays": args.replays, "dtype": "bf16", "few": self.few}
        super().__init__(device, args, table, **facts, host=[], results=[])
        self.now: dict[str, Any] = {}

    def everything(self) -> None:
        args = self.args
        largest = Workload(max(args.tokens), args.hidden, args.experts, args.top_k)
        with self.communicator(largest, latency_max_tokens=0) as slow, self.communicator(largest) as fast:
            formats = [FP8] if self.wants("pair_fp8", WARM) else []
            formats += [(SUM_FORMAT, "")] if self.wants("combine_fp8") else []
            fast.warmup(formats)
            slow.warmup()
            self.say(f"{self.world_size} ranks on {self.found['machine']['device']}, ready")
            self.steps = len(args.tokens)
            for tokens in args.tokens:
                self.now = {"tokens": tokens}
                self.size(fast, slow, dataclasses.replace(largest, tokens=tokens))
                self.done += 1
                self.save()
            fast.check_errors()
            slow.check_errors()
        self.say("done")

    # ------------------------------------------------------------------ what is measured

    def size(self, fast: Communicator, slow: Communicator, workload: Workload) -> None:
        """Run all measurements of one number of tokens."""
        self.grouped(Steps(fast, workload, self.args.pairs))
        mean = fast.world_size * workload.tokens * fast.top_k / fast.num_experts  # rows of an expert
        fp8 = dict(zip(("format", "scales_as"), FP8, strict=True))
        others: tuple[tuple[str, Communicator, int, dict[str, Any]], ...] = (
            ("pair_padded", fast, self.args.replays, {"slots": int(4 * mean) + 16}),
            ("pair_aligned", fast, self.few, {"alignment": fast.alignment}),
            ("pair_cleared", fast, self.few, {"alignment": fast.alignment, "zeros": True}),
            ("pair_tokens", fast, self.args.replays, {"token_major": True}),
            ("pair_fp8", fast, self.few, fp8),
            (WARM, fast, self.few, fp8),
            ("pair_throughput", slow, self.few, {}),
        )
        for op, comm, replays, layout in others:
            if self.wants(op) and ("format" not in layout or workload.hidden % 128 == 0):
                self.pair(op, Steps(comm, workload, 1 if op == WARM else self.args.pairs, **layout), replays)

    def grouped(self, steps: Steps) -> None:
        """Time rows grouped by expert in the smallest buffer, and the alternatives that these are compared with."""
        many, few = self.args.replays, self.few
        if self.wants("pair"):
            self.pair("pair", steps, many)
        if self.wants("pair_single"):
            self.add("pair_single", self.graph(steps.pair, many, count=1))
        if self.wants("pair_eager"):
            self.add("pair_eager", self.timer.row(steps.pair, many))
        for op in ("dispatch", "combine"):
            if self.wants(op):
                self.add(op, self.graph(getattr(steps, op), many))
            if self.wants(f"{op}_start", f"{op}_wait"):
                start, wait = self.split(getattr(steps, f"{op}_split"), steps.workload.tokens)
                self.add(f"{op}_start", start)
                self.add(f"{op}_wait", wait)
        if self.wants("combine_fp8") and steps.workload.hidden % 32 == 0:
            self.add("combine_fp8", self.graph(functools.partial(steps.combine, format=SUM_FORMAT), many))
        if self.wants("dispatch_nccl", "pair_nccl") and self.world_size > 1 and not self.sharing:
            traffic = measure_traffic(steps.given(0)[1], steps.workload.experts, self.world_size)
            same = SameBytes(steps.workload, traffic, self.rank, self.device)
            self.add("dispatch_nccl", self.graph(same.dispatch, few))
            self.add("pair_nccl", self.graph(same.pair, few))
        if self.wants("host") and not self.found["host"]:
            for op in ("dispatch", "combine"):
                timing = self.timer.host(getattr(steps, op), few)
                self.found["host"].append({"op": op, **timing.record()})

    def pair(self, op: str, steps: Steps, replays: int) -> None:
        """Dispatch and combine in a graph of `--pairs` of them, and whether a replay of it is right."""
        replay = self.timer.captured(steps.pair, self.args.pairs)
        error = self.worst({"error": steps.error(lambda: replay(0))})["error"]
        self.add(op, self.timer.row(replay, replays).each(self.args.pairs), error)

    def graph(self, call: Callable[[int], Any], replays: int, count: int | None = None) -> Timing:
        """Return the time of one of `count` calls in a graph (default: `--pairs`), one figure for each replay."""
        count = count or self.args.pairs
        return self.timer.row(self.timer.captured(call, count), replays).each(count)

    def split(self, call: Callable[..., Any], tokens: int) -> tuple[Timing, Timing]:
        """Start and wait.

        The wait is what the two add to an idle kernel between them that is so long that everything has arrived. The
        start is the rest of what they take together without it: what work between them can hide.
        """
        idle = Idle(self.device, tokens)
        alone = self.graph(idle, self.few)
        wait = self.graph(functools.partial(call, between=idle), self.few).less(alone.mean)
        together = self.graph(call, self.few)
        return together.less(wait.mean), wait

    # ------------------------------------------------------------------ around it

    def wants(self, *ops: str) -> bool:
        return not set(ops).isdisjoint(self.args.only)

    def add(self, op: str, timing: Timing, error: float | None = None) -> None:
        """Record a timing."""
        result = {"op": op, **self.now, **timing.spread()}
        if error is not None:
            result |= {"error": error, "correct": error <= MAX_ERROR}
        self.found["results"].append(result)
        self.say(f"T={result['tokens']} {op}: {result['us']:.1f} µs, p99 {result['us_p99']:.1f}")


if __name__ == "__main__":
    sys.exit(main())
