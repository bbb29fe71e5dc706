"""Throughput of dispatch and combine: `ep-ops bench throughput`, on all GPUs of this host or under torchrun.

ep-ops bench throughput                                        # workload A, one process for each visible GPU
torchrun --nproc-per-node 4 -m ep_ops.cli bench throughput --preset full --out results.json
ep-ops bench throughput --preset sizes --dry-run               # what would be measured; needs no GPU
ep-ops bench throughput --preset tiny --device cpu             # the benchmark itself, on two CPU processes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_ops import Communicator
from ep_ops.launch import launch, process_group

from .baselines import SameBytes
from .machine import describe
from .operators import MAX_ERROR, Calls
from .presets import MEASURABLE, OPERATORS, PRESETS, Case, Preset, over_sms
from .report import complete, table
from .timing import Timer, Timing
from .workloads import Workload, expected_traffic

TIMEOUT = 60.0  # seconds that a rank waits for another


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="ep-ops bench throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--preset", choices=PRESETS, help="what to measure (default: quick; on CPUs: tiny)")
    options.add_argument("--sms", type=_numbers, metavar="N,N", help="budgets that preset sms tries")
    options.add_argument("--dispatch-sms", type=int, metavar="N", help="where the preset leaves it to the backend")
    options.add_argument("--combine-sms", type=int, metavar="N", help="likewise")
    everything = ("link", *MEASURABLE)
    options.add_argument(
        "--only", type=_names, metavar="NAME,NAME", help=f"measure nothing but: {' '.join(everything)}"
    )
    options.add_argument("--skip", type=_names, default=(), metavar="NAME,NAME", help="measure all but these")
    options.add_argument("--iterations", type=int, default=20, help="timed calls of each (default: %(default)s)")
    options.add_argument("--seconds", type=float, help="start no further workload after that many seconds")
    options.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON, anew after each result")
    options.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if there are any"
    )
    options.add_argument("--backend", choices=("auto", "cute", "reference"), default="auto")
    options.add_argument("--ranks", type=int, help="without torchrun: processes (default: one for each GPU; CPU: 2)")
    options.add_argument("--dry-run", action="store_true", help="print what would be measured, and stop")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = set(names) - {"link", *MEASURABLE}
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


def preset_of(args: argparse.Namespace) -> Preset:
    made = over_sms(args.sms) if args.preset == "sms" and args.sms else PRESETS[args.preset]()
    made = made.with_default_sms(args.dispatch_sms, args.combine_sms)
    skipped = set(args.skip) if args.only is None else {"link", *MEASURABLE} - set(args.only)
    return made.without(skipped)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "auto":
        args.device = "cuda" if gpus else "cpu"
    if args.preset is None:
        args.preset = "quick" if args.device == "cuda" or args.dry_run else "tiny"
    under_torchrun = "LOCAL_RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.ranks or gpus or (4 if args.dry_run else 2)
    if args.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(plan_text(preset_of(args), world_size))
        return 0
    if args.device == "cuda" and not gpus:
        print("ep-ops bench throughput: torch sees no GPU; try --device cpu or --dry-run", file=sys.stderr)
        return 2
    if under_torchrun:
        rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
        _join(device)
        _measure(device, args)
        dist.barrier()
        dist.destroy_process_group()
    else:
        launch(_process, world_size, args)
    return 0


def _join(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=2 * TIMEOUT),
        device_id=device if device.type == "cuda" else None,
    )


def _process(rank: int, port: int, world_size: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    with process_group(rank, port, world_size, device, 2 * TIMEOUT):
        _measure(device, args)


def plan_text(preset: Preset, world_size: int) -> str:
    """What a preset measures, with the bytes that cross NVLink on the busiest rank when routing is balanced."""
    lines = [f"{world_size} ranks"]
    if preset.link_sms:
        rows = ", ".join(map(str, preset.row_bytes))
        lines.append(f"link: push and pull of rows of {rows} bytes with {', '.join(map(str, preset.link_sms))} SMs")
    for case in preset.cases:
        nbytes = expected_traffic(case.workload, world_size).crossing * case.workload.row_bytes
        lines.append(f"{case} ({nbytes / 1e6:.1f} MB over NVLink on average)")
    return "\n".join(lines)


def _measure(device: torch.device, args: argparse.Namespace) -> None:
    session = Session(device, args)
    try:
        session.run(preset_of(args))
    finally:  # after an error, what was found until then
        if session.rank == 0:
            print(table(complete(session.found)), flush=True)
    session.close()


class Session:
    """One run: measures, and gathers what it finds."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        self.device, self.args = device, args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.began = time.perf_counter()
        self.on_link = device.type == "cuda" and self.world_size > 1
        self.barrier: Any = dist.barrier if self.world_size > 1 else lambda: None
        if self.on_link:
            from .link import DeviceBarrier

            self.barrier = DeviceBarrier(device)
        self.timer = Timer(device, self.barrier)
        self.found: dict[str, Any] = {
            "version": 1,
            "machine": describe(device),
            "world_size": self.world_size,
            "preset": args.preset,
            "iterations": args.iterations,
            "link": [],
            "results": [],
        }

    def run(self, preset: Preset) -> None:
        """Everything of a preset. The file is written anew after each result."""
        self.say(f"{self.world_size} ranks on {self.found['machine']['device']}")
        if self.on_link and self.args.backend != "reference":
            from .kernels import compile_together

            self.say(f"{compile_together(preset, self.device)} kernels are compiled")
        if self.on_link and preset.link_sms:
            for row_bytes in preset.row_bytes:
                self.link(row_bytes, preset.link_sms)
        for cases in preset.groups():
            if self.out_of_time():
                break
            with self.communicator(cases) as comm:
                for case in cases:
                    if self.out_of_time():
                        break
                    self.say(str(case))
                    self.case(comm, case)
        self.say(f"done after {time.perf_counter() - self.began:.1f} s")

    # ------------------------------------------------------------------ what is measured

    def link(self, row_bytes: int, sms: tuple[int, ...]) -> None:
        """Speed of bare pushes and pulls of as many bytes as workload A moves on 4 ranks."""
        from .link import Link

        self.say(f"link, rows of {row_bytes} bytes")
        nbytes = expected_traffic(Workload(), 4).crossing * Workload().row_bytes
        link = Link(self.device, row_bytes, nbytes // (row_bytes * (self.world_size - 1)))
        link.verify()
        for push in (True, False):
            for blocks in sorted({min(n, link.sms) for n in sms}):
                timing = link.measure(self.timer, push, blocks, max(5, self.args.iterations // 2))
                entry = {
                    "direction": "push" if push else "pull",
                    "row_bytes": row_bytes,
                    "sms": blocks,
                    "bytes": link.crossing_bytes,
                    "gbs": link.crossing_bytes / timing.median / 1e3,
                    **timing.record(),
                }
                self.found["link"].append(entry)
        link.free()
        self.save()

    def case(self, comm: Communicator, case: Case) -> None:
        calls = Calls(comm, case.workload)
        errors = self.errors(calls)
        iterations = self.args.iterations
        with torch.no_grad():
            for op in OPERATORS:
                if op in case.measure:
                    call = getattr(calls, op)
                    steady = self.timer.steady(call, iterations)
                    timing = self.timer.whole(call, iterations)
                    self.add(case, calls, op, timing, steady_us=steady.median, error=errors[op])
            if "host" in case.measure:
                timing = self.timer.host(calls.dispatch, iterations)
                self.add(case, calls, "host_dispatch", timing, crossings=0)
            if "nccl" in case.measure and self.world_size > 1:
                same = SameBytes(case.workload, calls.traffic, self.rank, self.device)
                for direction in ("dispatch", "combine"):
                    timing = self.timer.whole(getattr(same, direction), iterations)
                    rows = calls.traffic.crossing
                    self.add(case, calls, f"nccl_{direction}", timing, rows=rows)
                del same
            if "eager" in case.measure and self.world_size > 1 and case.workload.experts % self.world_size == 0:
                dispatch, combine = calls.eager()
                self.add(case, calls, "eager_dispatch", self.timer.whole(dispatch, max(1, iterations // 2)))
                self.add(case, calls, "eager_combine", self.timer.whole(combine, max(1, iterations // 2)))

        if "pair" in case.measure:
            forward, forward_backward = calls.compiled()
            self.add(case, calls, "pair_forward", self.timer.whole(forward, iterations), crossings=2)
            timing = self.timer.whole(forward_backward, iterations)
            self.add(case, calls, "pair_forward_backward", timing, crossings=4)

    def errors(self, calls: Calls) -> dict[str, float]:
        """Of each operator, the worst over ranks."""
        with torch.no_grad():
            errors = calls.errors()
        worst = torch.tensor(list(errors.values()), dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return dict(zip(errors, worst.tolist(), strict=True))

    def add(
        self,
        case: Case,
        calls: Calls,
        op: str,
        timing: Timing,
        *,
        crossings: int = 1,
        rows: float | None = None,
        error: float = 0.0,
        steady_us: float | None = None,
    ) -> None:
        """Record a timing. `crossings`: how often the bytes of a dispatch cross in one call."""
        workload = case.workload
        rows = calls.crossing if rows is None else rows
        dispatch_sms, combine_sms = budgets(calls.comm)
        result = {
            "op": op,
            "tokens": workload.tokens,
            "hidden": workload.hidden,
            "experts": workload.experts,
            "top_k": workload.top_k,
            "routing": workload.routing,
            "dtype": workload.dtype,
            "row_bytes": workload.row_bytes,
            "given_sms": case.dispatch_sms,
            "dispatch_sms": dispatch_sms,
            "combine_sms": combine_sms,
            "nvlink_bytes": crossings * rows * workload.row_bytes,
            "rows_expanded": list(calls.traffic.expanded),
            **timing.record(),
        }
        if steady_us is not None:
            result |= {"steady_us": steady_us, "error": error, "correct": error <= MAX_ERROR}
        self.found["results"].append(result)
        self.save()
        self.say(f"    {op}: {timing.median:.1f} µs")

    # ------------------------------------------------------------------ around it

    def communicator(self, cases: list[Case]) -> Communicator:
        """For cases that differ in tokens and routing only."""
        workload = cases[0].workload
        comm = Communicator(
            num_experts=workload.experts,
            hidden_size=workload.hidden,
            top_k=workload.top_k,
            max_tokens_per_rank=max(case.workload.tokens for case in cases),
            dtype=workload.torch_dtype,
            device=self.device,
            backend=self.args.backend,
            timeout=TIMEOUT,
            dispatch_sms=cases[0].dispatch_sms,
            combine_sms=cases[0].combine_sms,
        )
        self.found["machine"]["backend"] = comm.backend.name
        comm.warmup()
        return comm

    def close(self) -> None:
        if self.on_link:
            self.barrier.free()

    def out_of_time(self) -> bool:
        """As rank 0 sees it."""
        if self.args.seconds is None:
            return False
        over = torch.tensor(int(time.perf_counter() - self.began > self.args.seconds), device=self.device)
        if self.world_size > 1:
            dist.broadcast(over, 0)
        if over:
            self.say(f"{self.args.seconds} s have passed: the rest is left out")
        return bool(over)

    def save(self) -> None:
        if self.rank == 0 and self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(complete(self.found), indent=1, ensure_ascii=False) + "\n")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)


def budgets(comm: Communicator) -> tuple[int | None, int | None]:
    """Multiprocessors for dispatch and combine: what was asked for, or what the backend chose."""
    chosen = comm.backend
    return (
        comm.dispatch_sms or getattr(chosen, "_dispatch_blocks", None),
        comm.combine_sms or getattr(chosen, "_combine_blocks", None),
    )


if __name__ == "__main__":
    sys.exit(main())
