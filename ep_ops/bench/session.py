"""A run of the throughput benchmark on all ranks: it measures and collects results."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.formats import Form
from ep_ops import Communicator

from .baselines import SameBytes
from .operators import MAX_ERROR, Calls
from .presets import FORMATS, GATHERED, OPERATORS, PRESETS, SUM_FORMAT, SUMS, TOKEN_MAJOR, Case, over_sms
from .ranks import Run
from .report import complete, table
from .timing import CHAIN, Timing, largest
from .workloads import ALIGNMENT, Workload

CROSSINGS = {"host_dispatch": 0, "pair_forward": 2, "pair_forward_backward": 4}
"""How often the bytes of a dispatch cross in a call, where that is not once."""
LINK_BYTES = 159_000_000
"""Bytes that a rank pushes or pulls to measure the link: about those of workload A on 4 ranks."""


class Session(Run):
    """Measures what a preset names."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        super().__init__(device, args, table, preset=args.preset, iterations=args.iterations, link=[], results=[])

    def everything(self) -> None:
        """Run the preset. The file is written after each result."""
        args = self.args
        preset = over_sms(args.sms) if args.preset == "sms" and args.sms else PRESETS[args.preset]()
        preset = preset.only(args.only)
        self.say(f"{self.world_size} ranks on {self.found['machine']['device']}")
        if self.on_link and not self.sharing and preset.link_sms:
            for row_bytes in preset.row_bytes:
                self.link(row_bytes, preset.link_sms)
        self.steps = sum(len(case.measure) for case in preset.cases)
        for cases in preset.groups():
            if self.out_of_time():
                break
            with self.made(cases) as comm:
                for workload, same in itertools.groupby(cases, key=lambda case: case.workload):
                    if self.out_of_time():
                        break
                    self.workload(comm, workload, list(same))
        self.say(f"done after {time.perf_counter() - self.began:.1f} s")

    # ------------------------------------------------------------------ what is measured

    def link(self, row_bytes: int, sms: tuple[int, ...]) -> None:
        """Measure the speed of bare pushes and pulls of :data:`LINK_BYTES`."""
        from .link import Link

        self.say(f"link, rows of {row_bytes} bytes")
        link = Link(self.device, row_bytes, LINK_BYTES // (row_bytes * (self.world_size - 1)))
        link.verify()
        for push in (True, False):
            for blocks in sorted({min(n, link.sms) for n in sms}):
                copy = functools.partial(link.copy, push, blocks)
                timing = self.timer.whole(copy, max(5, self.args.iterations // 2))
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

    def workload(self, comm: Communicator, workload: Workload, cases: list[Case]) -> None:
        """Run cases that differ only in budgets, on the same inputs."""
        calls = Calls(comm, workload)
        self.errors = self.worst(calls.errors())
        for case in cases:
            self.say(str(case))
            with budget(comm, case):
                self.case(calls, case)
            self.done += len(case.measure)

    def case(self, calls: Calls, case: Case) -> None:
        iterations = self.args.iterations
        for op in OPERATORS:
            if op in case.measure:
                self.operator(case, calls, op, calls.call(op))
        if "host" in case.measure:
            self.add(case, calls, "host_dispatch", self.timer.host(calls.dispatcher("dispatch"), iterations))
        if "nccl" in case.measure and self.world_size > 1 and not self.sharing:
            same = SameBytes(case.workload, calls.traffic, self.rank, self.device)
            for direction in ("dispatch", "combine"):
                call = getattr(same, direction)
                timing, steady = self.timer.whole(call, iterations), self.timer.steady(call, iterations)
                self.add(case, calls, f"nccl_{direction}", timing, steady)
            del same
        even = case.workload.experts % self.world_size == 0
        if "eager" in case.measure and self.world_size > 1 and even and not self.sharing:
            for op, call in zip(("eager_dispatch", "eager_combine"), calls.eager(), strict=True):
                self.add(case, calls, op, self.timer.whole(call, max(1, iterations // 2)))
        if "pair" in case.measure:
            for op, call in zip(("pair_forward", "pair_forward_backward"), calls.compiled(), strict=True):
                self.operator(case, calls, op, call)

    def operator(self, case: Case, calls: Calls, op: str, call: Callable[[int], Any]) -> None:
        """Time calls one by one, back to back, and from a graph where the device and the backend have them."""
        iterations = self.args.iterations
        timing, steady = self.timer.whole(call, iterations), self.timer.steady(call, iterations)
        graph = same = None
        if calls.comm.backend.name == "cute":
            graph, left = self.timer.graph(call, iterations)
            differs = not calls.same(CHAIN - 1, left, call(CHAIN - 1))
            same = self.worst({op: float(differs)})[op] == 0
        self.add(case, calls, op, timing, steady, graph, same)

    def add(
        self,
        case: Case,
        calls: Calls,
        op: str,
        timing: Timing,
        steady: Timing | None = None,
        graph: Timing | None = None,
        same: bool | None = None,
    ) -> None:
        """Record timings. `same`: whether a graph's replay returned what an eager call does."""
        workload = case.workload
        rows = calls.traffic.crossing if op.startswith("nccl") else calls.crossing
        dispatch_sms, combine_sms = budgets(calls.comm, op)
        result = {
            "op": op,
            **dataclasses.asdict(workload),
            "row_bytes": workload.row_bytes,
            "given_sms": case.dispatch_sms,
            "dispatch_sms": dispatch_sms,
            "combine_sms": combine_sms,
            "nvlink_bytes": 0 if self.sharing else CROSSINGS.get(op, 1) * rows * traveling_bytes(op, workload),
            "rows_expanded": list(calls.traffic.expanded),
            **timing.record(),
        }
        others = {"steady_us": steady, "graph_us": graph}
        result |= {key: timing.median for key, timing in others.items() if timing is not None}
        if op in self.errors:
            result |= {"error": self.errors[op], "correct": self.errors[op] <= MAX_ERROR}
        if same is not None:
            result |= {"graph_same": same, "correct": result.get("correct", True) and same}
        self.found["results"].append(result)
        self.save()
        kinds = {"us": "{:.1f} µs", "steady_us": "back to back {:.1f}", "graph_us": "in a graph {:.1f}"}
        self.say(f"    {op}: " + ", ".join(text.format(result[key]) for key, text in kinds.items() if key in result))

    # ------------------------------------------------------------------ around it

    def made(self, cases: list[Case]) -> Communicator:
        """Create the communicator of cases that differ only in tokens, routing and budgets."""
        largest = max((case.workload for case in cases), key=lambda workload: workload.tokens)
        most_copies = self.world_size * largest.tokens + 2  # and the rows that `Calls.room` adds
        gathered = any(GATHERED in case.measure for case in cases)
        # The latency kernels have a benchmark of their own.
        comm = self.communicator(
            largest, alignment=ALIGNMENT, latency_max_tokens=0, symmetric_rows=most_copies if gathered else 0
        )
        asked = FORMATS | dict.fromkeys(SUMS, (SUM_FORMAT, ""))
        formats = [how for op, how in asked.items() if any(op in case.measure for case in cases)]
        comm.warmup(formats)
        return comm

    def out_of_time(self) -> bool:
        """Return whether time is over on any rank."""
        if self.args.seconds is None:
            return False
        passed = time.perf_counter() - self.began > self.args.seconds
        over = bool(largest([float(passed)], self.device)[0])
        if over:
            self.say(f"{self.args.seconds} s have passed: the rest is left out")
        return over

    def save(self) -> None:
        complete(self.found)
        super().save()


def budget(comm: Communicator, case: Case) -> contextlib.AbstractContextManager[None]:
    """Return the budget of a case, limited to what the GPU has."""
    most = comm.backend.budget
    dispatch = case.dispatch_sms and min(case.dispatch_sms, most.most_dispatch)
    combine = case.combine_sms and min(case.combine_sms, most.most_combine)
    return comm.sm_budget(dispatch=dispatch, combine=combine)


def traveling_bytes(op: str, workload: Workload) -> int:
    """Return the size in bytes of a row that is sent."""
    if op in SUMS:
        form = Form(SUM_FORMAT.removeprefix("wire:"), workload.hidden)
        return workload.hidden + form.scales
    return Form(FORMATS[op][0], workload.hidden).staged_bytes if op in FORMATS else workload.row_bytes


def budgets(comm: Communicator, op: str) -> tuple[int | None, int | None]:
    """Return the multiprocessors that dispatches and combines use; the reference backend has no budgets."""
    now = comm.backend.budget
    if comm.backend.name == "reference":
        return None, None
    if op in FORMATS:
        return max(now.dispatch, min(now.beyond, now.most_dispatch)), now.combine
    backend: Any = comm.backend
    if op in TOKEN_MAJOR:
        return backend.throughput.sms.token_major
    own = {"combine_gathered": now.gather, "combine_backward": now.scaled}
    return now.dispatch, own.get(op, now.combine)
