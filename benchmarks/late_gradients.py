"""Time forward and backward of experts with weight gradients in the ordinary and in the late order, by turns.

    torchrun --nproc-per-node 2 benchmarks/late_gradients.py [--width 2048] [--experts 256] [--rounds 20]

Both orders run the same GEMMs (`ep_ops.nn.expert_mlp`). In the late order the gradient of x is sent while the gradients
of the weights are computed. Prints, for PyTorch's grouped GEMM and for quack's (if quack-kernels is installed), the
median over rounds of the slowest rank, and the median of the differences within a round. Every second round runs the
orders the other way round. Fails if the orders differ in a bit.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ep_ops
from ep_ops.integrations import quack
from ep_ops.nn import TORCH, Gemms, expert_mlp


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 4096, "hidden": 7168, "experts": 256, "top-k": 8, "width": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each order (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before each step (default: %(default)s)")
    parser.add_argument("--combine-sms", type=int, help="limit of SMs that send the gradient of x in the late order")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON")
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


def timed(step: Callable[[bool], Any], late: bool, pause: float) -> float:
    """Return the ms of one step on the slowest rank; 0 without GPUs."""
    if not torch.cuda.is_available():
        step(late)
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    time.sleep(pause)
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda._sleep(2_000_000)  # so that the host enqueues the step before it starts on the device
    begin.record()
    step(late)
    end.record()
    end.synchronize()
    spent = torch.tensor(begin.elapsed_time(end), device="cuda")
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def compare(step: Callable[[bool], tuple[Tensor, ...]], rounds: int, pause: float) -> dict[str, float]:
    """Return the median ms of both orders and of their differences. RuntimeError if gradients have different bits."""
    ordinary, late = step(False), step(True)
    names = zip(("x", "topk_weights", "w_in", "w_out"), ordinary, late, strict=True)
    if wrong := [name for name, a, b in names if not torch.equal(a, b)]:
        raise RuntimeError(f"the orders differ in the gradients of {', '.join(wrong)}")
    del ordinary, late
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for order in (False, True) if turn % 2 else (True, False):
            took[order].append(timed(step, order, pause))
    gains = [a - b for a, b in zip(took[False], took[True], strict=True)]
    figures = {"ordinary_ms": took[False], "late_ms": took[True], "gain_ms": gains}
    return {name: statistics.median(values) for name, values in figures.items()}


def main() -> None:
    args, gpu = options().parse_args(), torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    kinds = {"torch": TORCH} | ({"quack": quack.GEMMS} if gpu and importlib.util.find_spec("quack") else {})
    sizes = dict(num_experts=args.experts, hidden_size=args.hidden, top_k=args.top_k, max_tokens_per_rank=args.tokens)
    found = {}
    with ep_ops.Communicator(**sizes, device=device, latency_max_tokens=0) as comm:
        for kind, gemms in kinds.items():
            found[kind] = compare(steps(comm, args, gemms), args.rounds, args.pause)
            if dist.get_rank() == 0:
                print(f"{kind}: " + ", ".join(f"{name} {value:.3f}" for name, value in found[kind].items()), flush=True)
    if args.out and dist.get_rank() == 0:
        how = {name: value for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"ranks": dist.get_world_size(), **how, "results": found}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
