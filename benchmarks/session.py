"""One run of the throughput benchmark on all ranks: measures, and gathers what it finds."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

from ep_ops import Communicator

from .baselines import SameBytes
from .operators import MAX_ERROR, Calls
from .presets import OPERATORS, Case, Preset
from .ranks import Run
from .report import complete
from .timing import Timing
from .workloads import ALIGNMENT, Workload, expected_traffic

TIMEOUT = 60.0  # seconds that a rank waits for another


class Session(Run):
    """Measures what a preset names."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        super().__init__(device, args, preset=args.preset, iterations=args.iterations, link=[], results=[])

    def run(self, preset: Preset) -> None:
        """Everything of a preset. The file is written anew after each result."""
        self.say(f"{self.world_size} ranks on {self.found['machine']['device']}")
        if self.on_link and self.args.backend != "reference":
            from .kernels import compile_together, kernels

            self.say(f"{compile_together(kernels(preset, self.world_size), self.device)} kernels are compiled")
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
            if "gathered" in case.measure:
                by_rank, call, found = calls.gathered()
                with by_rank:
                    steady, timing = self.timer.steady(call, iterations), self.timer.whole(call, iterations)
                    error = self.worst(found)["combine_gathered"]
                    self.add(
                        case, calls, "combine_gathered", timing, steady_us=steady.median, error=error, comm=by_rank
                    )
                del by_rank, call
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
            return self.worst(calls.errors())

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
        comm: Communicator | None = None,
    ) -> None:
        """Record a timing. `crossings`: how often the bytes of a dispatch cross in a call. `comm`: not the case's."""
        workload = case.workload
        rows = calls.crossing if rows is None else rows
        dispatch_sms, combine_sms = budgets(comm or calls.comm)
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
            alignment=ALIGNMENT,
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
        complete(self.found)
        super().save()


def budgets(comm: Communicator) -> tuple[int | None, int | None]:
    """Multiprocessors for dispatch and combine: what was asked for, or what the backend chose."""
    if comm.backend.name == "reference":
        return comm.dispatch_sms, comm.combine_sms
    return comm.backend.budget.dispatch, comm.backend.budget.combine
