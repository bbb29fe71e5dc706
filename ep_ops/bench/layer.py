"""The experts of a mixture-of-experts layer, with dispatch and combine, in several ways: `ep-ops bench layer`.

ep-ops bench layer --ranks 1 --experts 64 --only worst,token_major       # one GPU; the ways take turns
torchrun --nproc-per-node 4 -m ep_ops bench layer     # 4096 tokens a rank, hidden 7168, 256 experts of width 2048
ep-ops bench layer --device cpu --tokens 32 --hidden 128 --width 64 --experts 8 --top-k 2 --iterations 2

Receive buffers have room for the worst case, in which every rank sends all its tokens to one rank, or for 1.25 times
the mean number of rows. Grouped GEMMs and SwiGLU compute only the rows that hold tokens.

Held: bytes that a forward with gradients keeps for backward, without its output. Peak: the most bytes that are
allocated during forward and backward, including weights, inputs, gradients and, on one rank, symmetric memory.

Names that end in `quack` need quack-kernels 0.6.5.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ep_ops import Communicator
from ep_ops.nn import Experts

from .figures import text_table
from .options import add_sizes, names_of, new_parser, only, positive, read
from .ranks import Found, Run, on_every_rank
from .workloads import Workload

ROOM = 1.25
"""Rows of a buffer that is not sized for the worst case, in multiples of the mean."""


class Way(NamedTuple):
    """A layer that is measured."""

    about: str
    room: str
    """"exact", "mean" (with :data:`ROOM`) or "worst"."""
    options: dict[str, Any]
    """Arguments of :class:`ep_ops.nn.Experts`."""
    transposed: bool = False
    """Whether w_in is the transpose of contiguous matrices."""


WIRE = "wire:e4m3/128/pow2"
TOKEN_MAJOR: dict[str, Any] = {"rows": "token_major"}
AGAIN: dict[str, Any] = {**TOKEN_MAJOR, "redispatch": True}
QUACK: dict[str, Any] = {"gemms": "quack"}
WAYS = {
    "exact": Way("exact size, one host synchronization", "exact", {"dynamic": True}),
    "mean": Way("1.25 × the mean", "mean", {}),
    "worst": Way("worst case", "worst", {}),
    "wire": Way(f"worst case, dispatched as {WIRE}", "worst", {"format": WIRE}),
    "token_major": Way("token-major rows, 1.25 × the mean", "mean", TOKEN_MAJOR),
    "redispatch": Way("token-major rows, dispatched again, 1.25 × the mean", "mean", AGAIN),
    "quack": Way("1.25 × the mean, quack's GEMMs", "mean", QUACK),
    "token_major_quack": Way("token-major rows, 1.25 × the mean, quack's GEMMs", "mean", TOKEN_MAJOR | QUACK),
    "redispatch_quack": Way("token-major rows, dispatched again, quack's GEMMs", "mean", AGAIN | QUACK),
    "gated_quack": Way("token-major rows, quack's GEMMs with SwiGLU", "mean", TOKEN_MAJOR | QUACK, True),
    "gated_redispatch_quack": Way("the same, dispatched again", "mean", AGAIN | QUACK, True),
}
DEFAULT = tuple(way for way in WAYS if not way.endswith("quack"))
MODES = "eager", "compiled", "captured"
FIGURES = {"forward": "forward", "forward_backward": "and backward"}


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "layer")
    add_sizes(options, width=True)
    options.add_argument(
        "--times",
        type=float,
        metavar="X",
        help="size of the worst-case buffer, in multiples of the mean (default: the real worst case)",
    )
    options.add_argument("--iterations", type=positive, default=20, help="timed calls of each (default: %(default)s)")
    options.add_argument(
        "--only",
        type=names_of(WAYS),
        default=DEFAULT,
        metavar="NAME,NAME",
        help=f"{only(WAYS)} (default: those without quack)",
    )
    options.add_argument(
        "--mode", choices=MODES, default="eager", help="how the layer is called (default: %(default)s)"
    )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read(options, argv)
    by_quack = [way for way in args.only if way.endswith("quack")]
    if by_quack and (args.device == "cpu" or importlib.util.find_spec("quack") is None):
        options.error(f"--only {by_quack[0]} needs GPUs, and quack-kernels 0.6.5")
    if args.mode == "captured" and (args.device == "cpu" or "exact" in args.only):
        options.error("--mode captured needs GPUs, and ways of fixed sizes (without exact)")
    return on_every_rank(measure, args)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "width", "experts", "top_k", "times", "mode")}
    workload = Workload(args.tokens, args.hidden, args.experts, args.top_k)
    facts = {"benchmark": "layer", "dtype": workload.dtype, **sizes}
    with (
        Run(device, args, table, **facts, results=[]) as run,
        run.communicator(workload, latency_max_tokens=0) as comm,
    ):
        comm.warmup([(WIRE, "")] if "wire" in args.only else [])
        run.steps = len(args.only)
        inputs = LayerInputs(run, comm)
        layers = {}
        for name in args.only:
            layers[name] = Layer(run, inputs, name)
            run.found["results"].append(layers[name].found)
            run.say(f"{name}: {run.found['results'][-1]}")
            run.save()
            run.done += 1
        rounds = max(1, args.iterations // 2)
        for figure in FIGURES:
            calls = {name: getattr(layer, figure) for name, layer in layers.items()}
            if args.mode == "captured":
                calls = {name: run.timer.captured(call, 1) for name, call in calls.items()}
            for name, timing in run.timer.by_turns(calls, rounds, row=2, rest=False).items():
                layers[name].found[figure] = timing.median / 1e3
            run.save()
        for layer in layers.values():
            layer.found["dropped"] = int(run.worst({"dropped": float(layer.experts.dropped.sum())})["dropped"])
        comm.check_errors()
        run.save()


class LayerInputs:
    """Tensors that all ways share: tokens of this rank with their route, and the experts' weights."""

    def __init__(self, run: Run, comm: Communicator) -> None:
        args, self.comm = run.args, comm
        draw = torch.Generator(device=comm.device).manual_seed(run.rank)
        shape = args.tokens, args.hidden
        self.x, self.grad = (torch.randn(shape, generator=draw, device=comm.device).to(comm.dtype) for _ in range(2))
        self.x.requires_grad_()
        scores = torch.rand(args.tokens, args.experts, generator=draw, device=comm.device)
        self.idx = scores.topk(args.top_k).indices.int()
        self.weights = torch.rand(args.tokens, args.top_k, generator=draw, device=comm.device).requires_grad_()
        self.matrices = made(comm, args.width)
        self.unused = 0  # bytes of matrices that a way does not use

    def matrices_of(self, way: Way) -> tuple[Tensor, Tensor]:
        """Return the experts' weights as a way stores them."""
        w_in, w_out = self.matrices
        if not way.transposed:
            return w_in, w_out
        self.unused += w_in.nbytes
        return w_in.transpose(1, 2).contiguous().transpose(1, 2), w_out


def made(comm: Communicator, width: int) -> tuple[Tensor, Tensor]:
    """Return random weights of this rank's experts, drawn on the device."""
    draw = torch.Generator(device=comm.device).manual_seed(comm.rank)
    shapes = (comm.num_local_experts, comm.hidden_size, 2 * width), (comm.num_local_experts, width, comm.hidden_size)
    first, second = (
        torch.empty(shape, dtype=comm.dtype, device=comm.device).normal_(0, shape[1] ** -0.5, generator=draw)
        for shape in shapes
    )
    return first, second


class Layer:
    """The experts in one way, and what was found of them: sizes and memory."""

    def __init__(self, run: Run, inputs: LayerInputs, name: str) -> None:
        way, self.inputs, comm = WAYS[name], inputs, inputs.comm
        sizes = sizes_of(run, comm, way)
        self.experts = Experts(comm, 1, **way.options, **sizes)
        self.experts.w_in, self.experts.w_out = (
            nn.Parameter(self.experts.from_local(w)) for w in inputs.matrices_of(way)
        )
        self.leaves = inputs.x, inputs.weights, *self.experts.parameters()
        self.run: Callable[..., Tensor] = self.experts
        if run.args.mode == "compiled":
            torch._dynamo.reset()
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
            self.run = torch.compile(self.experts, fullgraph=True)
        self.found: Found = {"way": name, "capacity": sizes.get("capacity"), "places": sizes.get("places")}
        self.forward_backward()  # compiles
        cuda = comm.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        out = self.run(inputs.x, inputs.idx, inputs.weights)
        held = torch.cuda.memory_allocated() - before - out.nbytes if cuda else 0
        grads = torch.autograd.grad(out, self.leaves, inputs.grad)
        peak = torch.cuda.max_memory_allocated() - run.timer.nbytes - inputs.unused if cuda else 0
        del out, grads
        self.found |= {"held_gib": held / 2**30, "peak_gib": peak / 2**30}

    def forward(self, i: int = 0) -> Tensor:
        with torch.no_grad():
            return self.run(self.inputs.x, self.inputs.idx, self.inputs.weights)

    def forward_backward(self, i: int = 0) -> None:
        out = self.run(self.inputs.x, self.inputs.idx, self.inputs.weights)
        torch.autograd.grad(out, self.leaves, self.inputs.grad)


def sizes_of(run: Run, comm: Communicator, way: Way) -> dict[str, Any]:
    """Return capacity and places; nothing for the exact size."""
    args, held, align = run.args, comm.num_local_experts, comm.alignment
    if way.room == "exact":
        return {}
    mean = args.tokens * args.top_k * held * run.world_size // comm.num_experts
    worst = int(args.times * mean) + held * (align - 1) if args.times else comm.capacity()
    asked = worst if way.room == "worst" else min(int(ROOM * mean) + held * (align - 1), worst)
    rows = -(-asked // align) * align
    if way.options.get("rows") != "token_major":
        return {"capacity": rows}
    none = math.comb(comm.num_experts - held, args.top_k) / math.comb(comm.num_experts, args.top_k)
    most = args.tokens * run.world_size
    return {"capacity": min(most, int(ROOM * most * (1 - none)) + 1), "places": rows}


def table(run: Found) -> list[str]:
    rows = [[f"{run['mode']}: ms, the slowest rank's", "rows", *FIGURES.values(), "held GiB", "peak GiB"]]
    for result in run["results"]:
        times = (f"{result[name]:.2f}" if name in result else "" for name in FIGURES)
        name = WAYS[result["way"]].about + (f", {result['dropped']} dropped" if result.get("dropped") else "")
        sizes = "" if result["capacity"] is None else str(result["capacity"])
        sizes += "" if result["places"] is None else f", {result['places']}"
        rows.append([name, sizes, *times, f"{result['held_gib']:.2f}", f"{result['peak_gib']:.2f}"])
    return text_table(rows)


if __name__ == "__main__":
    sys.exit(main())
