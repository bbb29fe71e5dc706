"""Common code of benchmarks: a process for each rank, with the timer, results, and output by rank 0."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_ops import Communicator
from ep_ops.commands.launch import NO_OUTPUT, launch, process_group

from . import against
from .figures import machine_line
from .machine import describe
from .timing import Timer, largest
from .workloads import Workload

Found = dict[str, Any]
"""A run, or one of its results, as it is written."""
Measure = Callable[[torch.device, argparse.Namespace], None]

TIMEOUT = 120.0
"""Seconds that a rank waits for another, which may be compiling."""


def on_every_rank(measure: Measure, args: argparse.Namespace) -> int:
    """Run `measure(device, args)`, which can be pickled, on all ranks: torchrun's, or new processes of this host.
    Returns the exit code."""
    if "LOCAL_RANK" in os.environ:
        _process(int(os.environ["LOCAL_RANK"]), None, args.ranks, measure, args)
    else:
        launch(_process, args.ranks, measure, args)
    return 0


def _process(rank: int, store: str | None, world_size: int, measure: Measure, args: argparse.Namespace) -> None:
    sharing = {"sharing": True} if args.sharing > 1 else {}  # which earlier checkouts (by_turns.py) do not know
    with process_group(rank, store, world_size, args.device, TIMEOUT, **sharing) as device:
        measure(device, args)


def sharing_of(args: argparse.Namespace) -> Found:
    """Return facts for the file of a run whose ranks share GPUs: ranks of each GPU, multiprocessors of each rank (see
    `Run.communicator`), and whether the ranks run at the same time (under MPS) or take turns."""
    if args.sharing == 1:
        return {}
    at_once = any(name in os.environ for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"))
    return {"sharing": {"ranks": args.sharing, "sms": 0, "mps": at_once}}


BAR = 10
"""Characters of a bar."""


class Run(contextlib.AbstractContextManager[Any]):
    """One run of a benchmark, as one rank sees it. A `with` block of it prints the results at its end.

    Args:
        device: device of this rank.
        args: options of the command line.
        table: returns the lines to print for what was found.
        facts: what describes the run in the file that is written.
    """

    def __init__(
        self, device: torch.device, args: argparse.Namespace, table: Callable[[Found], Sequence[str]], **facts: Any
    ) -> None:
        self.device, self.args, self.table = device, args, table
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.began = time.perf_counter()
        self.steps, self.done = 0, 0  # of the whole run, once that is known
        self.on_link = device.type == "cuda" and self.world_size > 1
        self.barrier: Any = dist.barrier if self.world_size > 1 else lambda: None
        if self.on_link:
            from .link import DeviceBarrier

            self.barrier = DeviceBarrier(device)
        self.timer = Timer(device, self.barrier)
        facts = {**sharing_of(args), **facts}
        self.found: Found = {"version": 1, "machine": describe(device), "world_size": self.world_size, **facts}

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.rank == 0:  # after an error, what was found until then
            lines = [machine_line(self.found), *self.table(self.found)]
            if (earlier := getattr(self.args, "against", None)) is not None:
                lines += against.lines(self.found, earlier)
            print(*lines, sep="\n", flush=True)
        if self.on_link and error is None:
            self.barrier.free()

    @classmethod
    def measure(cls, device: torch.device, args: argparse.Namespace) -> None:
        """Run a benchmark, a subclass that these arguments create."""
        with cls(device, args) as run, torch.no_grad():  # type: ignore[call-arg]
            run.everything()

    def everything(self) -> None:
        """Measure, as `measure` does."""
        raise NotImplementedError

    @property
    def sharing(self) -> bool:
        """Whether ranks share GPUs."""
        return "sharing" in self.found

    def worst(self, errors: dict[str, float]) -> dict[str, float]:
        """Return the largest errors of all ranks."""
        return dict(zip(errors, largest(list(errors.values()), self.device), strict=True))

    def communicator(self, workload: Workload, **options: Any) -> Communicator:
        """Create a communicator of the workload's sizes and record what the file says about it. Collective."""
        names = "domain_size", "staging_bytes"
        domains: dict[str, Any] = {name: getattr(self.args, name, None) for name in names}
        comm = Communicator(
            num_experts=workload.experts, hidden_size=workload.hidden, top_k=workload.top_k,
            max_tokens_per_rank=workload.tokens, dtype=workload.torch_dtype, device=self.device,
            backend=self.args.backend, timeout=TIMEOUT, **domains, **options,
        )  # fmt: skip
        self.found["machine"]["backend"] = comm.backend.name
        if self.sharing:
            self.found["sharing"]["sms"] = comm.multiprocessors
        if domains["domain_size"] is not None or len(comm.config.domains) > 1:
            self.found |= domains | {"wire": comm.config.wire}
        return comm

    def save(self) -> None:
        if self.rank != 0 or self.args.out is None:
            return
        try:
            write(self.found, self.args.out)
        except OSError as error:
            print(f"{self.args.out} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            raise SystemExit(NO_OUTPUT) from None

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s{bar(self.done, self.steps)}] {text}", flush=True)


def bar(done: int, steps: int) -> str:
    """Return the progress of a run for a line of output, or "" if the number of steps is unknown."""
    if not steps:
        return ""
    full = BAR * done // steps
    return f" {'#' * full}{'.' * (BAR - full)} {done:{len(str(steps))}d} of {steps}"


def write(run: Found, path: Path) -> None:
    """Write a run as JSON, one line for each measurement."""
    parts = []
    for key, value in rounded(run).items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def rounded(value: Any) -> Any:
    """Round every number to five digits, which is more than is measured."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.5g}"))
