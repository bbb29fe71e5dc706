"""Timelines of a GPU's kernels, recorded by PyTorch's profiler, and pictures of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .figures import pyplot, save, title

FILLERS = 16
NAME = 100  # characters of a kernel's name that are kept
AHEAD = 20_000_000  # cycles, about 10 ms: for so long the device waits, so that the host is ahead of it
SLEEP = "spin_kernel"
"""Part of the name of the kernel of `torch.cuda._sleep`."""
COMMUNICATION = re.compile("ep_(publish|pull|combine|gather|latency)|nccl")
"""Part of the names of kernels that communicate."""
LANES = {"GEMMs": "#57a0d3", "other": "#8a8a8a", "communication": "#e08e79"}
"""Kinds of kernels, and their colors in a picture."""


class KernelSpan(NamedTuple):
    start: float  # µs
    end: float
    name: str

    @property
    def lane(self) -> str:
        """One of `LANES`."""
        if COMMUNICATION.search(self.name):
            return "communication"
        return "GEMMs" if "gemm" in self.name.lower() or "nvjet" in self.name else "other"


def timeline(run: Callable[[], Any], barrier: Callable[[], None]) -> list[KernelSpan]:
    """Return the kernels of `run` on this GPU by start time, relative to the first one. Collective. Other kernels run
    before `run`, because the profiler may lose the first ones; `barrier` lines up the ranks."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    filler = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(FILLERS):
            filler.add_(1)
        barrier()
        torch.cuda._sleep(AHEAD)
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    return after_sleep(sorted(KernelSpan(e.time_range.start, e.time_range.end, e.name[:NAME]) for e in events))


def after_sleep(kernels: list[KernelSpan]) -> list[KernelSpan]:
    """Return the kernels after the first sleep, relative to the first one of them."""
    slept = next((kernel.end for kernel in kernels if SLEEP in kernel.name), 0.0)
    kernels = [kernel for kernel in kernels if kernel.start >= slept]
    return [KernelSpan(k.start - kernels[0].start, k.end - kernels[0].start, k.name) for k in kernels]


def picture(run: dict[str, Any], dtype: str, timelines: dict[str, list[Any]], path: Path) -> Path:
    """Draw timelines of a run as an SVG file, one below the other, and return its path."""
    plt = pyplot()
    lines = {name: kernels for name, kernels in timelines.items() if kernels}
    figure, axes = plt.subplots(len(lines), 1, figsize=(10, 1 + 1.4 * len(lines)), sharex=True, squeeze=False)
    for axis, (name, line) in zip(axes[:, 0], lines.items(), strict=True):
        kernels = [KernelSpan(*kernel) for kernel in line]
        for place, (lane, color) in enumerate(LANES.items()):
            bars = [(k.start / 1e3, (k.end - k.start) / 1e3) for k in kernels if k.lane == lane]
            axis.broken_barh(bars, (place - 0.4, 0.8), facecolors=color)
        axis.set(yticks=range(len(LANES)), yticklabels=list(LANES), title=name)
    axes[-1, 0].set_xlabel("ms")
    return save(figure, path.with_name(f"{path.stem}-timeline.svg"), title(run, dtype))
