"""Time a grouped GEMM concurrently with a dispatch or a combine that it does not depend on.

    torchrun --nproc-per-node 2 benchmarks/concurrent_gemm.py [--shapes 256x2048,64x512] [--leads 0,20]

In one run, by turns, with a rest before each call and without: the GEMM alone, the split operation alone, one after
the other, both at once, and the GEMM after the operation that is not split (`whole`). No kernel that starts tiles as
rows arrive can hide more than this.

The operation is started first, but its kernels run on another stream than the GEMM and become ready a few microseconds
later. A persistent GEMM that is first takes all multiprocessors until its end. `--leads`: µs by which the GEMM is
delayed by a sleep on its stream, so that the operation's kernels are resident first. For each lead two figures:

    hidden           (one after the other - both at once) / operation alone, where the lead counts as a cost
    without lead     the same, less the measured length of the lead: the bound for a GEMM that needs no lead

At the end, PyTorch's profiler records the time from the start of the operation's last kernel to the start of the GEMM,
the smallest of all ranks. If it is negative, the GEMM was first on a rank. The quack GEMMs need quack-kernels 0.6.5.
"""

import argparse
import functools
import itertools
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ep_ops import Communicator
from ep_ops.bench.figures import text_table
from ep_ops.bench.options import names_of, new_parser, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.timeline import SLEEP, timeline
from ep_ops.bench.timing import Timing
from ep_ops.bench.workloads import Workload
from ep_ops.nn import grouped_mm

GEMMS = {
    "torch": "first GEMM, torch",
    "static": "first GEMM, quack, static tiles",
    "dynamic": "first GEMM, quack, dynamic tiles",
    "gradient": "gradient of the second weights, quack, dynamic tiles",
}
OPERATIONS = ("dispatch", "combine")
MHZ = 1980
"""Clock with which a lead is converted to cycles. Its length is measured."""


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse numbers and widths of experts, such as 256x2048,64x512."""
    pairs = [tuple(positive(number) for number in part.split("x")) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text} is not of the form 256x2048,64x512")
    return tuple((pair[0], pair[1]) for pair in pairs)


def leads(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of each rank (default: %(default)s)")
    parser.add_argument("--hidden", type=positive, default=7168, help="%(default)s")
    parser.add_argument("--top-k", type=positive, default=8, help="%(default)s")
    parser.add_argument("--shapes", type=shapes, default=((256, 2048), (64, 512)), help="experts x width, ...")
    parser.add_argument("--gemms", type=names_of(GEMMS), default=("torch", "dynamic"), help=", ".join(GEMMS))
    parser.add_argument("--operations", type=names_of(OPERATIONS), default=OPERATIONS, help=", ".join(OPERATIONS))
    parser.add_argument("--leads", type=leads, default=(0.0, 20.0), help="µs by which the GEMM is delayed (0,20)")
    parser.add_argument("--rounds", type=positive, default=12, help="with rests; a third as many without (%(default)s)")
    parser.add_argument("--row", type=positive, default=40, help="calls back to back without rests (%(default)s)")
    return parser


class Case:
    """A shape: the GEMMs, the operations, and the ways to run them. Collective."""

    def __init__(self, comm: Communicator, args: argparse.Namespace, width: int) -> None:
        self.comm, self.args, self.name = comm, args, f"{comm.num_experts} x {width}"
        device, experts = comm.device, comm.num_experts
        draw = torch.Generator(device).manual_seed(comm.rank)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=comm.dtype).normal_(0, shape[-2] ** -0.5, generator=draw)

        held = comm.num_local_experts
        self.x, self.w_in = normal(args.tokens, args.hidden), normal(held, args.hidden, 2 * width)
        self.idx = torch.rand(args.tokens, experts, device=device, generator=draw).topk(args.top_k).indices
        self.weights = torch.full((args.tokens, args.top_k), 1 / args.top_k, device=device)
        self.capacity = -(-args.tokens * args.top_k * 5 // 4 // 128) * 128 + 128 * held
        self.rows = comm.dispatch(self.x, self.idx, self.weights, capacity=self.capacity, zeros=True)
        self.y, self.h = normal(self.capacity, args.hidden), normal(self.capacity, width)
        self.ends = torch.nn.functional.pad(self.rows.route.offs, (1, 0))
        for operation in OPERATIONS:  # compiled before quack is imported, which changes the CuTe DSL
            self.whole(operation)
            self.split(operation)

    def gemm(self, name: str, i: int = 0) -> Any:
        """Run a GEMM with sizes that are known beforehand, so that nothing precedes its kernels."""
        if name == "torch":
            return grouped_mm(self.rows.x, self.w_in, self.rows.route.offs)
        from quack.gemm_interface import gemm

        if name == "gradient":
            return gemm(self.h.mT, self.y, cu_seqlens_k=self.ends, dynamic_scheduler=True, tuned=False)
        return gemm(self.rows.x, self.w_in, cu_seqlens_m=self.ends, dynamic_scheduler=name == "dynamic", tuned=False)

    def whole(self, operation: str, suffix: str = "") -> Any:
        """Run an operation, or only its start if `suffix` is "_start"."""
        method = getattr(self.comm, operation + suffix)
        if operation == "dispatch":
            return method(self.x, self.idx, self.weights, capacity=self.capacity)
        return method(self.y, self.rows.route, self.rows.weights)

    def wait(self, operation: str, started: Any) -> Any:
        return getattr(self.comm, f"{operation}_wait")(started)

    def split(self, operation: str, i: int = 0) -> Any:
        return self.wait(operation, self.whole(operation, "_start"))

    def together(self, gemm: str, operation: str, lead: float, i: int = 0) -> None:
        started = self.whole(operation, "_start")
        if lead:
            sleep(self.comm.device, lead)
        self.gemm(gemm)
        self.wait(operation, started)

    def after(self, operate: Callable[[str], Any], gemm: str, operation: str, i: int = 0) -> None:
        operate(operation)
        self.gemm(gemm)

    def pairs(self) -> Iterator[tuple[str, str]]:
        return ((gemm, operation) for gemm in self.args.gemms for operation in self.args.operations)

    def ways(self) -> dict[Any, Callable[[int], Any]]:
        """Return what is timed: parts alone by name, the others by (GEMM, operation, "after", "whole" or lead)."""
        bind = functools.partial
        found: dict[Any, Callable[[int], Any]] = {gemm: bind(self.gemm, gemm) for gemm in self.args.gemms}
        found |= {operation: bind(self.split, operation) for operation in self.args.operations}
        found |= {lead: bind(sleep, self.comm.device, lead) for lead in self.args.leads if lead}
        for gemm, operation in self.pairs():
            found[gemm, operation, "after"] = bind(self.after, self.split, gemm, operation)
            found[gemm, operation, "whole"] = bind(self.after, self.whole, gemm, operation)
            found |= {(gemm, operation, lead): bind(self.together, gemm, operation, lead) for lead in self.args.leads}
        return found


def sleep(device: torch.device, us: float, i: int = 0) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(int(us * MHZ))


def begins(run: Run, case: Case, gemm: str, operation: str, lead: float) -> float:
    """Return how many µs after the operation's last kernel the GEMM's longest kernel starts, on the rank with the
    smallest value; 0 without GPUs. Collective."""
    if run.device.type != "cuda":
        return 0.0

    both = functools.partial(case.together, gemm, operation, lead)
    both()
    kernels = [kernel for kernel in timeline(both, run.barrier) if SLEEP not in kernel.name]
    computed = max((k for k in kernels if k.lane != "communication"), key=lambda k: k.end - k.start, default=None)
    begun = max((k.start for k in kernels if k.lane == "communication"), default=math.inf)  # the profiler lost some
    return -run.worst({"": begun - computed.start if computed else math.inf})[""]


def figures(case: Case, paused: bool, took: dict[Any, Timing]) -> Iterator[dict[str, Any]]:
    """Yield a record for each GEMM, operation and lead: medians in ms, and shares of the operation that are hidden."""
    ms = {way: timing.median / 1e3 for way, timing in took.items()}
    for gemm, operation in case.pairs():
        after, whole = took[gemm, operation, "after"].calls, took[gemm, operation, "whole"].calls
        for lead in case.args.leads:
            both, slept = took[gemm, operation, lead].calls, ms.get(lead, 0.0)
            gains = [
                statistics.median(a - b for a, b in zip(before, both, strict=True)) / 1e3 for before in (after, whole)
            ]
            yield {
                "shape": case.name, "calls": "paused" if paused else "sustained", "gemm": gemm, "operation": operation,
                "lead_us": lead, "lead_ms": slept, "gemm_ms": ms[gemm], "operation_ms": ms[operation],
                "after_ms": ms[gemm, operation, "after"], "whole_ms": ms[gemm, operation, "whole"],
                "together_ms": ms[gemm, operation, lead], "gain_ms": gains[0], "gain_over_whole_ms": gains[1],
                "hidden": gains[0] / max(ms[operation], 1e-9),
                "hidden_without_lead": (gains[0] + slept) / max(ms[operation], 1e-9),
            }  # fmt: skip


class Load:
    """Mean clock and largest power of this rank's GPU within a `with` block, by nvidia-smi if there is one."""

    def __init__(self, run: Run) -> None:
        self.found: dict[str, float] = {}
        query = "nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 50 -i"
        self.command = [*query.split(), str(run.device.index or 0)] if run.device.type == "cuda" else ["true"]

    def __enter__(self) -> dict[str, float]:
        try:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        except OSError:
            self.command = []
        return self.found

    def __exit__(self, *_: object) -> None:
        if self.command:
            self.process.terminate()
            lines = re.findall(r"^(\d+), ([\d.]+)$", self.process.communicate()[0], re.MULTILINE)
            if lines:
                clocks, watts = ([float(line[i]) for line in lines] for i in range(2))
                self.found |= {"mean_mhz": statistics.fmean(clocks), "max_watts": max(watts)}


@torch.no_grad()
def measure(device: torch.device, args: argparse.Namespace) -> None:
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "top_k", "rounds", "row")}
    facts = {"benchmark": "concurrent GEMM", "dtype": "bf16", **sizes}
    with Run(device, args, table, **facts, loads=[], results=[], begins=[]) as run:
        workloads = [Workload(args.tokens, args.hidden, experts, args.top_k) for experts, _ in args.shapes]
        comms = [run.communicator(workload, latency_max_tokens=0) for workload in workloads]
        for comm in comms:
            comm.warmup()
        cases = [Case(comm, args, width) for comm, (_, width) in zip(comms, args.shapes, strict=True)]
        for paused, case in itertools.product((True, False), cases):
            with Load(run) as load:
                rounds, row = (args.rounds, 1) if paused else (max(1, args.rounds // 3), args.row)
                took = run.timer.by_turns(case.ways(), rounds, row, paused)
            run.found["loads"].append({"shape": case.name, "calls": "paused" if paused else "sustained", **load})
            run.found["results"] += figures(case, paused, took)
            run.say(str(run.found["loads"][-1]))
            run.save()
        # Last, because the profiler may slow down later launches.
        for case in cases:
            for pair, lead in itertools.product(case.pairs(), args.leads):
                us = begins(run, case, *pair, lead)
                run.found["begins"].append({"shape": case.name, "gemm": pair[0], "operation": pair[1], "lead_us": lead,
                                            "us": us if math.isfinite(us) else None})  # fmt: skip
                run.say(f"{case.name}, {', '.join(pair)}, lead {lead:.0f}: the GEMM starts {us:.1f} µs later")
            run.save()
            case.comm.check_errors()
            case.comm.destroy()


MS = ("gemm", "operation", "after", "whole", "together", "gain_over_whole")


def table(run: Found) -> list[str]:
    heading = "shape calls GEMM operation lead,µs GEMM,ms alone after whole together gain hidden without_lead"
    rows = [heading.split()]
    for r in run["results"]:
        names = (r["shape"], r["calls"], r["gemm"], r["operation"], f"{1e3 * r['lead_ms']:.0f}")
        times = (f"{r[f'{name}_ms']:.3f}" for name in MS)
        shares = (f"{r[name]:.0%}" for name in ("hidden", "hidden_without_lead"))
        rows.append([*names, *times, *shares])
    return text_table(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options()
    args = read(parser, argv)
    if args.device == "cpu" and args.gemms != ("torch",):
        parser.error("without GPUs only --gemms torch runs")
    return on_every_rank(measure, args)


if __name__ == "__main__":
    sys.exit(main())
