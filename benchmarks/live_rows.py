"""Compare SwiGLU of the rows of a route with plain PyTorch over all rows of the buffer. One device, no ranks.

benchmarks/live_rows.py --live 32768 --times 4 --hidden 2048 --experts 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ep_ops import formats
from ep_ops.bench.machine import describe
from ep_ops.bench.options import a_file
from ep_ops.bench.timing import Timer
from ep_ops.bench.workloads import DTYPES
from ep_ops.commands.arguments import positive
from ep_ops.commands.launch import gpu_count
from ep_ops.nn import swiglu, swiglu_quantized, swiglu_rows
from ep_ops.records import Route

FORMAT, LAYOUT = "e4m3/128/pow2", "columns"
OURS = "live rows"


def made(options: argparse.Namespace, device: torch.device) -> tuple[Route, Tensor, Tensor]:
    """Return a route of `live` rows, spread evenly over experts, in a buffer of `times` as many rows; x and a
    gradient."""
    rows = options.live * options.times
    each = options.live // options.experts
    counts = torch.full((options.experts,), each, dtype=torch.int32, device=device)
    offs = (torch.arange(options.experts, device=device, dtype=torch.int32) + 1) * each
    generator = torch.Generator(device).manual_seed(options.seed)
    x, grad = (
        torch.randn(rows, width, generator=generator, device=device).to(DTYPES[options.dtype])
        for width in (2 * options.hidden, options.hidden)
    )
    return Route(counts, counts, counts, offs, counts, 1, rows, rows), x, grad


def ways(route: Route, x: Tensor, grad: Tensor) -> dict[str, dict[str, Callable[[int], Any]]]:
    """Return what is timed -> implementation -> call."""
    own = x.detach().requires_grad_()
    exact = formats.format_of(FORMAT)

    def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = formats.quantize(swiglu(x), exact)
        return codes, scales.t().contiguous()

    def both(forward: Callable[[Tensor], Tensor]) -> Callable[[int], Any]:
        return lambda i: torch.autograd.grad(forward(own), own, grad)

    compiled, compiled_cast = torch.compile(swiglu), torch.compile(quantized)
    return {
        "forward": {
            OURS: lambda i: swiglu_rows(x, route),
            "PyTorch, eager": lambda i: swiglu(x),
            "PyTorch, compiled": lambda i: compiled(x),
        },
        "forward and backward": {
            OURS: both(lambda x: swiglu_rows(x, route)),
            "PyTorch, eager": both(swiglu),
            "PyTorch, compiled": both(compiled),
        },
        f"forward, {FORMAT} in {LAYOUT}": {
            OURS: lambda i: swiglu_quantized(x, route, FORMAT, LAYOUT),
            "PyTorch, compiled": lambda i: compiled_cast(x),
        },
    }


def live_bytes(options: argparse.Namespace, what: str) -> int:
    """Read and written of live rows."""
    numbers, size = options.live * options.hidden, DTYPES[options.dtype].itemsize
    if "backward" in what:
        return numbers * size * (3 + 5)
    if what == "forward":
        return numbers * size * 3
    return numbers * (2 * size + 1) + numbers // 128 * 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/live_rows.py", description=__doc__)
    parser.add_argument("--live", type=positive, default=32768, help="rows that experts have (%(default)s)")
    parser.add_argument("--times", type=positive, default=4, help="room, in multiples of these (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=2048, help="F, a multiple of 128 (%(default)s)")
    parser.add_argument("--experts", type=positive, default=64, help="which divide --live (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--iterations", type=positive, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=a_file, metavar="FILE", help="write what was found (JSON)")
    options = parser.parse_args(argv)
    if options.live % options.experts:
        parser.error(f"--experts is {options.experts}; it must divide --live, {options.live}")
    if options.hidden % 128:
        parser.error(f"--hidden is {options.hidden}; allowed: a multiple of 128")

    on_gpu = gpu_count() > 0 if options.device == "auto" else options.device == "cuda"
    device = torch.device("cuda:0" if on_gpu else "cpu")
    timer = Timer(device, lambda: None)
    found: list[dict[str, Any]] = []
    print(
        f"{options.live} live rows of {options.live * options.times}, F = {options.hidden}, {options.dtype}; median µs"
    )
    for what, by in ways(*made(options, device)).items():
        for who, call in by.items():
            timing = timer.whole(call, options.iterations)
            speed = live_bytes(options, what) / timing.median / 1e3
            found.append({"what": what, "who": who, "live_gb_s": speed, **timing.record()})
            print(f"{what:40} {who:20} {timing.median:9.1f}   {speed:7.0f} GB/s of live rows")
    if options.out:
        sizes = {name: value for name, value in vars(options).items() if name not in ("out", "device")}
        options.out.write_text(json.dumps({"machine": describe(device), **sizes, "results": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
