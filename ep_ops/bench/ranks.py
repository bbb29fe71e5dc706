"""Common code of benchmarks: a process for each rank, with the timer, results, and output by rank 0."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_ops import Communicator
from ep_ops.commands.launch import launch, process_group

from .machine import describe
from .options import gpus
from .timing import Timer

Measure = Callable[[torch.device, argparse.Namespace], None]


def domains_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the domain options of a communicator."""
    return {"domain_size": args.domain_size, "staging_bytes": args.staging_bytes}


def on_every_rank(measure: Measure, args: argparse.Namespace, timeout: float) -> int:
    """Run `measure(device, args)`, a module-level function, on all ranks: torchrun's, or new processes of this host.

    `timeout`: seconds that torch.distributed waits for a rank. Returns the exit code.
    """
    if "LOCAL_RANK" not in os.environ:
        launch(_process, args.ranks or gpus() or 2, measure, args, timeout)
        return 0
    device = _device(args, int(os.environ["LOCAL_RANK"]))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if on_gpu else None,
    )
    measure(device, args)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _process(rank: int, port: int, world_size: int, measure: Measure, args: argparse.Namespace, timeout: float) -> None:
    device = _device(args, rank)
    with process_group(rank, port, world_size, device, timeout):
        measure(device, args)


def _device(args: argparse.Namespace, rank: int) -> torch.device:
    return torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")


BAR = 10
"""Characters of a bar."""


class Run:
    """One run of a benchmark, as one rank sees it. `facts` describe it in the file that is written."""

    def __init__(self, device: torch.device, args: argparse.Namespace, **facts: Any) -> None:
        self.device, self.args = device, args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.began = time.perf_counter()
        self.steps, self.done = 0, 0  # of the whole run, once that is known
        self.on_link = device.type == "cuda" and self.world_size > 1
        self.barrier: Any = dist.barrier if self.world_size > 1 else lambda: None
        if self.on_link:
            from .link import DeviceBarrier

            self.barrier = DeviceBarrier(device)
        self.timer = Timer(device, self.barrier)
        self.found: dict[str, Any] = {
            "version": 1, "machine": describe(device), "world_size": self.world_size, **facts
        }  # fmt: skip

    def worst(self, errors: dict[str, float]) -> dict[str, float]:
        """Return the largest errors of all ranks."""
        worst = torch.tensor(list(errors.values()), dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return dict(zip(errors, worst.tolist(), strict=True))

    def note(self, comm: Communicator) -> None:
        """Record what the file says about a communicator."""
        self.found["machine"]["backend"] = comm.backend.name
        if self.args.domain_size is not None or len(comm.config.domains) > 1:
            self.found |= domains_of(self.args) | {"wire": comm.config.wire}

    def compile(self, formats: list[tuple[str, str]], *comms: Communicator) -> None:
        """Compile all kernels of the communicators: by the first rank of each host, with all its cores. Collective.

        Without it each rank compiles them in its warmup. Does nothing without the cute backend or a disk cache.
        """
        from cute_kernels import jit

        if self.world_size == 1 or comms[0].backend.name != "cute" or jit.cache_dir() is None:
            return
        from ep_ops.backends.cute.backend import all_kernels
        from ep_ops.commands.compile import compile_all

        from .link import arch_of

        wanted = dict.fromkeys(kernel for comm in comms for kernel in all_kernels(comm.config, formats))
        if self.device.index == 0:
            compile_all(list(wanted), arch_of(self.device))
        dist.barrier()
        self.say(f"{len(wanted)} kernels are compiled")

    def save(self) -> None:
        if self.rank == 0 and self.args.out is not None:
            write(self.found, self.args.out)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s{bar(self.done, self.steps)}] {text}", flush=True)

    def close(self) -> None:
        if self.on_link:
            self.barrier.free()


def bar(done: int, steps: int) -> str:
    """Return the progress of a run for a line of output, or "" if the number of steps is unknown."""
    if not steps:
        return ""
    full = BAR * done // steps
    return f" {'#' * full}{'.' * (BAR - full)} {done:{len(str(steps))}d} of {steps}"


def write(run: dict[str, Any], path: Path) -> None:
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
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(held) for key, held in value.items()}
    return [rounded(held) for held in value] if isinstance(value, list) else value
