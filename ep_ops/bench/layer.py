"""A whole mixture-of-experts layer, forward and backward, in several sizes of its receive buffer: `ep-ops bench layer`.

ep-ops bench layer --ranks 1 --experts 64 --times 4       # one GPU of four: room for four times the rows that come
torchrun --nproc-per-node 4 -m ep_ops bench layer     # 4096 tokens a rank, hidden 7168, 256 experts of width 2048
ep-ops bench layer --device cpu --tokens 32 --hidden 128 --width 64 --experts 8 --top-k 2 --iterations 2

Capacity is the worst case where every rank may send all its tokens to one, several times the mean: grouped GEMMs and
SwiGLU by kernels of ours touch live rows only, SwiGLU by PyTorch all that there is room for. `--only quack` needs
quack-kernels 0.6.5.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ep_ops import Communicator
from ep_ops.integrations import quack
from ep_ops.nn import (
    Computed,
    Experts,
    MoELayer,
    expert_lists,
    gather_mm,
    grouped_mm,
    places_route,
    swiglu_rows,
    weights_of_places,
)  # fmt: skip

from .figures import text_table
from .options import add_sizes, names_of, new_parser, positive, read
from .ranks import Found, Run, on_every_rank
from .workloads import Workload

WAYS = {
    "exact": "exact size, one host synchronization",
    "mean": "1.25 × the mean",
    "worst": "worst case",
    "wire": "worst case, dispatched as wire:e4m3/128/pow2",
    "token_major": "worst case, token-major rows, copied for each expert",
    "quack": "worst case, token-major rows, gathered by quack's grouped GEMM",
}
DEFAULT = tuple(way for way in WAYS if way != "quack")


class TokenMajorExperts(Experts):
    """One row for each token and rank; an expert's rows are copied for the first product."""

    gather_mm = staticmethod(gather_mm)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, **options: Any) -> Computed:
        received = self.comm.dispatch(x, topk_idx, topk_weights, layout="token_major", capacity=self.capacity)
        self.dropped += received.dropped
        assert received.local_idx is not None
        lists = expert_lists(received.local_idx, self.comm.num_local_experts, alignment=self.comm.alignment)
        places = places_route(self.comm, received.route, lists)
        y = swiglu_rows(self.gather_mm(received.x, self.local_weight("w_in"), lists), places)
        y = grouped_mm(y, self.local_weight("w_out"), lists.offs)
        assert received.weights is not None
        out = self.comm.combine(y, places, weights_of_places(received.weights, lists))
        return Computed(out, received.dropped)


class ByQuack(TokenMajorExperts):
    """The first product gathers them."""

    gather_mm = staticmethod(quack.gather_mm)


KINDS: dict[str, type[Experts]] = {"token_major": TokenMajorExperts, "quack": ByQuack}


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "layer")
    add_sizes(options)
    options.add_argument("--width", type=positive, default=2048, help="inside each expert (default: %(default)s)")
    options.add_argument("--times", type=float, help="the worst case, in multiples of the mean (default: as it is)")
    options.add_argument("--iterations", type=positive, default=20)
    options.add_argument("--only", type=names_of(WAYS), default=DEFAULT, metavar="NAME,NAME", help=" ".join(WAYS))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read(options, argv)
    if "quack" in args.only and (args.device == "cpu" or importlib.util.find_spec("quack") is None):
        options.error("--only quack needs GPUs, and quack-kernels 0.6.5")
    return on_every_rank(measure, args)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "width", "experts", "top_k", "times")}
    workload = Workload(args.tokens, args.hidden, args.experts, args.top_k)
    facts = {"benchmark": "layer", "dtype": workload.dtype, **sizes}
    with (
        Run(device, args, table, **facts, results=[]) as run,
        run.communicator(workload, latency_max_tokens=0) as comm,
    ):
        comm.warmup([("wire:e4m3/128/pow2", "")] if "wire" in args.only else [])
        run.steps = len(args.only)
        weights = made(comm, args.width)
        for way in args.only:
            run.found["results"].append(time(run, comm, way, weights))
            run.save()
            run.done += 1
        comm.check_errors()


def made(comm: Communicator, width: int) -> tuple[Tensor, Tensor]:
    """Return random weights of this rank's experts, drawn on the device."""
    draw = torch.Generator(device=comm.device).manual_seed(comm.rank)
    shapes = (comm.num_local_experts, comm.hidden_size, 2 * width), (comm.num_local_experts, width, comm.hidden_size)
    first, second = (
        torch.empty(shape, dtype=comm.dtype, device=comm.device).normal_(0, shape[1] ** -0.5, generator=draw)
        for shape in shapes
    )
    return first, second


def capacity_of(run: Run, comm: Communicator, way: str) -> int | None:
    """Return the number of rows of the receive buffer, or None for the exact size. Token-major rows: as many as provide
    that many places."""
    if way in ("token_major", "quack"):
        return int(run.args.times * run.args.tokens) if run.args.times else None
    mean = run.args.tokens * run.args.top_k * comm.num_local_experts * run.world_size // comm.num_experts
    room = comm.num_local_experts * (comm.alignment - 1)
    if way == "exact":
        return None
    if way == "mean":
        rows = int(1.25 * mean) + room
    elif run.args.times:
        rows = int(run.args.times * mean) + room
    else:
        return comm.capacity()
    return -(-rows // comm.alignment) * comm.alignment


def time(run: Run, comm: Communicator, way: str, weights: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the times of forward, and of forward and backward, in ms."""
    capacity = capacity_of(run, comm, way)
    layer = MoELayer(comm, 1)
    layer.experts = experts = KINDS.get(way, Experts)(
        comm, 1, capacity=capacity, dynamic=way == "exact", format="wire:e4m3/128/pow2" if way == "wire" else ""
    )
    experts.w_in, experts.w_out = (nn.Parameter(experts.from_local(w)) for w in weights)
    draw = torch.Generator(device=comm.device).manual_seed(run.rank)
    shape = (run.args.tokens, run.args.hidden)
    x, grad = (torch.randn(shape, generator=draw, device=comm.device).to(comm.dtype) for _ in range(2))
    leaves = (x.requires_grad_(), *layer.parameters())

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return layer(x)

    def both(i: int) -> None:
        torch.autograd.grad(layer(x), leaves, grad)

    if comm.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = {}
    for name, call in (("forward", forward), ("forward_backward", both)):
        timing = run.timer.steady(call, run.args.iterations)
        found[name] = timing.median / 1e3
        run.say(f"{way}: {name} {found[name]:.2f} ms")
    peak = torch.cuda.max_memory_allocated() / 2**30 if comm.device.type == "cuda" else 0.0
    dropped = int(run.worst({"dropped": float(experts.dropped.sum())})["dropped"])
    return {"way": way, "capacity": capacity, **found, "peak_gib": peak, "dropped": dropped}


def table(run: Found) -> list[str]:
    rows = [["ms, the slowest rank's", "rows", "forward", "and backward", "peak GiB"]]
    for result in run["results"]:
        times = (f"{result[name]:.2f}" for name in ("forward", "forward_backward"))
        name = WAYS[result["way"]] + (f", {result['dropped']} rows dropped" if result["dropped"] else "")
        rows.append([name, str(result["capacity"] or ""), *times, f"{result['peak_gib']:.1f}"])
    return text_table(rows)


if __name__ == "__main__":
    sys.exit(main())
