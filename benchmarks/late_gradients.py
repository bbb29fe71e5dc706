"""Time forward and backward of experts with weight gradients in the ordinary and in the late order, by turns.

    torchrun --nproc-per-node 2 benchmarks/late_gradients.py [--width 2048] [--experts 256] [--rounds 20]

Both orders run the same GEMMs (`ep_ops.nn.expert_mlp`). In the late order the gradient of x is sent while the gradients
of the weights are computed. Prints, for PyTorch's grouped GEMM and for quack's (if quack-kernels is installed), the
median over rounds of the slowest rank, and the median of the differences within a round. Fails if the orders differ in
a bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ep_ops
from ep_ops.bench.options import add_sizes, new_parser, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.timing import Timer
from ep_ops.bench.workloads import Workload
from ep_ops.integrations import quack
from ep_ops.nn import TORCH, Gemms, expert_mlp

SIZES = ("tokens", "hidden", "experts", "top_k", "width", "rounds", "combine_sms")


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_sizes(parser, width=True)
    parser.add_argument("--rounds", type=positive, default=20, help="timed steps of each order (default: %(default)s)")
    parser.add_argument("--combine-sms", type=positive, help="limit of SMs that send the gradient of x in late order")
    return parser


def steps(comm: ep_ops.Communicator, args: argparse.Namespace, gemms: Gemms) -> Callable[[bool], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward in the late or the ordinary order and returns the gradients."""
    draw = torch.Generator(device=comm.device).manual_seed(comm.rank)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, device=comm.device, dtype=comm.dtype).normal_(0, scale, generator=draw)
        return made.requires_grad_()

    held = comm.num_local_experts
    x, grad = drawn(args.tokens, args.hidden), drawn(args.tokens, args.hidden).detach()
    w_in = drawn(held, args.hidden, 2 * args.width, scale=args.hidden**-0.5)
    w_out = drawn(held, args.width, args.hidden, scale=args.width**-0.5)
    weights, idx = torch.rand(args.tokens, args.experts, device=comm.device, generator=draw).topk(args.top_k)
    weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
    capacity = -(-args.tokens * args.top_k * 5 // 4 // 128) * 128 + 128 * held

    def step(late: bool) -> tuple[Tensor, ...]:
        own = gemms._replace(late=late)
        out, _ = expert_mlp(comm, x, idx, weights, w_in, w_out, capacity=capacity, gemms=own)
        with comm.sm_budget(combine=args.combine_sms if late else None):
            return torch.autograd.grad(out, (x, weights, w_in, w_out), grad)

    return step


def compare(step: Callable[[bool], tuple[Tensor, ...]], rounds: int, timer: Timer) -> dict[str, float]:
    """Return the median ms of both orders and of their differences. RuntimeError if gradients have different bits."""
    ordinary, late = step(False), step(True)
    names = zip(("x", "topk_weights", "w_in", "w_out"), ordinary, late, strict=True)
    if wrong := [name for name, a, b in names if not torch.equal(a, b)]:
        raise RuntimeError(f"the orders differ in the gradients of {', '.join(wrong)}")
    del ordinary, late
    took = timer.by_turns({"ordinary": lambda i: step(False), "late": lambda i: step(True)}, rounds)
    gains = [a - b for a, b in zip(took["ordinary"].calls, took["late"].calls, strict=True)]
    us = {"ordinary_ms": took["ordinary"].median, "late_ms": took["late"].median, "gain_ms": statistics.median(gains)}
    return {name: value / 1e3 for name, value in us.items()}


def measure(device: torch.device, args: argparse.Namespace) -> None:
    with_quack = device.type == "cuda" and importlib.util.find_spec("quack")
    kinds = {"torch": TORCH} | ({"quack": quack.GEMMS} if with_quack else {})
    workload = Workload(args.tokens, args.hidden, args.experts, args.top_k)
    facts = {name: getattr(args, name) for name in SIZES}
    with (
        Run(device, args, table, benchmark="late gradients", **facts, results={}) as run,
        run.communicator(workload, latency_max_tokens=0) as comm,
    ):
        for kind, gemms in kinds.items():
            run.found["results"][kind] = compare(steps(comm, args, gemms), args.rounds, run.timer)
            run.save()


def table(run: Found) -> list[str]:
    return [
        f"{kind}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        for kind, figures in run["results"].items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return on_every_rank(measure, read(options(), argv))


if __name__ == "__main__":
    sys.exit(main())
