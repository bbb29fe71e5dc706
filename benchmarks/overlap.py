"""Measure overlap: two interleaved micro-batches, and a shared expert between the start and the wait of an operation,
compared in one run with the same work in sequence and with each part alone.

torchrun --nproc-per-node 2 benchmarks/overlap.py --out overlap.json --picture overlap.svg

Each of the two micro-batches has `--tokens` tokens on each rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator, Dispatched, Route
from ep_ops.bench.figures import text_table
from ep_ops.bench.operators import MAX_ERROR, relative_error
from ep_ops.bench.options import add_sizes, new_parser, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.timeline import picture, timeline
from ep_ops.bench.workloads import ALIGNMENT, ROUTINGS, Workload, draw_route, measure_traffic
from ep_ops.nn import grouped_mm, interleave, swiglu, swiglu_rows


def routing(text: str) -> str:
    """Parse how experts are drawn."""
    part = text.removeprefix("hot ")
    try:
        known = text in ROUTINGS or (part != text and 0 <= float(part) <= 1)
    except ValueError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(ROUTINGS)}, nor as 'hot 0.2'")
    return text


# ---------------------------------------------------------------------- the layer


@dataclasses.dataclass
class Batch:
    """A micro-batch; `rows` are what a dispatch brings of it."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad_out: Tensor
    rows: Dispatched


class Layer:
    """Experts of this rank, a shared expert, and two micro-batches. Method `f(i)` runs both, unless it says otherwise.

    All of it is eager code. Collective."""

    def __init__(self, comm: Communicator, workload: Workload, width: int, shared_width: int) -> None:
        self.comm, self.workload = comm, workload
        draw = torch.Generator(comm.device).manual_seed(1 + comm.rank)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=workload.torch_dtype, device=comm.device)

        hidden, local = workload.hidden, comm.num_local_experts
        self.weights = [
            (normal(*shape) * shape[-2] ** -0.5).requires_grad_()
            for shape in ((local, hidden, 2 * width), (local, width, hidden),
                          (hidden, 2 * shared_width), (shared_width, hidden))
        ]  # fmt: skip
        routes = [draw_route(workload, comm.rank, seed, comm.device, comm.world_size) for seed in range(2)]
        capacity = max(measure_traffic(route, workload.experts, comm.world_size).capacity for route in routes)
        self.sizes: dict[str, Any] = {"capacity": capacity, "max_tokens": workload.tokens}
        self.batches = []
        for topk_idx in routes:
            x, grad_out = (normal(workload.tokens, hidden) for _ in range(2))
            weights = torch.rand(topk_idx.shape, generator=draw, device=comm.device) + 0.1
            weights /= weights.sum(1, keepdim=True)
            rows = comm.dispatch(x, topk_idx, weights, zeros=True, **self.sizes)
            self.batches.append(Batch(x, topk_idx, weights, grad_out, rows))

    def experts(self, rows: Tensor, route: Route) -> Tensor:
        y = grouped_mm(rows, self.weights[0], route.offs)
        return grouped_mm(swiglu_rows(y, route), self.weights[1], route.offs)

    def shared(self, x: Tensor) -> Tensor:
        return swiglu(x @ self.weights[2]) @ self.weights[3]

    # ------------------------------------------------------------------ parts

    def gemms(self, i: int = 0) -> list[Tensor]:
        """Run only the experts, on rows that have been dispatched."""
        return [self.experts(b.rows.x, b.rows.route) for b in self.batches]

    def gemms_train(self, i: int = 0) -> None:
        given = [b.rows.x.detach().requires_grad_() for b in self.batches]
        outs = [self.experts(x, b.rows.route) for x, b in zip(given, self.batches, strict=True)]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])

    def communication(self, i: int = 0) -> None:
        """Dispatch and combine alone."""
        for i in range(len(self.batches)):
            rows = self.dispatch(i)
            self.comm.combine(rows.x, rows.route, rows.weights)

    def dispatch(self, i: int = 0) -> Dispatched:
        """Dispatch micro-batch ``i``."""
        b = self.batches[i % 2]
        return self.comm.dispatch(b.x, b.topk_idx, b.topk_weights, zeros=True, **self.sizes)

    def combine(self, i: int = 0) -> Tensor:
        """Combine micro-batch ``i``."""
        rows = self.batches[i % 2].rows
        return self.comm.combine(rows.x, rows.route, rows.weights)

    def shared_alone(self, i: int = 0) -> Tensor:
        """Run the shared expert on micro-batch ``i``."""
        return self.shared(self.batches[i % 2].x)

    # ------------------------------------------------------------------ put together

    def serial(self, i: int = 0) -> list[Tensor]:
        found = []
        for i in range(len(self.batches)):
            rows = self.dispatch(i)
            found.append(self.comm.combine(self.experts(rows.x, rows.route), rows.route, rows.weights))
        return found

    def steps(self, b: Batch, flight: int) -> Iterator[Tensor | None]:
        comm = self.comm
        dispatch = comm.dispatch_start(b.x, b.topk_idx, b.topk_weights, zeros=True, flight=flight, **self.sizes)
        yield None
        rows = comm.dispatch_wait(dispatch)
        combine = comm.combine_start(self.experts(rows.x, rows.route), rows.route, rows.weights, flight=flight)
        yield None
        yield comm.combine_wait(combine)

    def in_turns(self, i: int = 0) -> list[Tensor]:
        return interleave(*(self.steps(b, flight) for flight, b in enumerate(self.batches)))

    def shared_in_dispatch(self, i: int = 0) -> tuple[Any, Tensor]:
        """Run the shared expert on micro-batch ``i`` between the start and the wait of its dispatch."""
        b = self.batches[i % 2]
        started = self.comm.dispatch_start(b.x, b.topk_idx, b.topk_weights, zeros=True, **self.sizes)
        beside = self.shared(b.x)
        return self.comm.dispatch_wait(started), beside

    def shared_in_combine(self, i: int = 0) -> tuple[Tensor, Tensor]:
        """Run the shared expert on micro-batch ``i`` between the start and the wait of its combine."""
        b = self.batches[i % 2]
        started = self.comm.combine_start(b.rows.x, b.rows.route, b.rows.weights)
        beside = self.shared(b.x)
        return self.comm.combine_wait(started), beside

    def train(self, run: Callable[[], list[Tensor]]) -> Callable[[int], None]:
        """Run forward and backward; gradients of weights accumulate."""

        def step(i: int = 0) -> None:
            torch.autograd.backward(run(), [b.grad_out for b in self.batches])

        return step

    def gradients(self, asked: bool) -> None:
        """Set whether x and routing weights require gradients."""
        for b in self.batches:
            b.x.requires_grad_(asked)
            b.topk_weights.requires_grad_(asked)
            b.x.grad = b.topk_weights.grad = None

    def errors(self) -> dict[str, float]:
        """Return the difference of results from those in sequence: the largest relative error of a row. In training,
        that of the gradients of x."""
        with torch.no_grad():
            expected, got = self.serial(), self.in_turns()
            rows, _ = self.shared_in_dispatch()
            again = self.comm.combine(rows.x, rows.route, rows.weights)
            of_rows = self.combine()
            found = {
                "in turns": max(relative_error(*pair) for pair in zip(got, expected, strict=True)),
                "shared in dispatch": relative_error(again, of_rows),
                "shared in combine": relative_error(self.shared_in_combine()[0], of_rows),
            }
        grads: list[Any] = []
        for run in (self.serial, self.in_turns):
            self.gradients(True)
            self.train(run)(0)
            grads.append([b.x.grad for b in self.batches])
        self.gradients(False)
        found["in turns, forward + backward"] = max(map(relative_error, grads[1], grads[0]))
        return found


# ---------------------------------------------------------------------- one run


class Session(Run):
    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        workload = Workload(args.tokens, args.hidden, args.experts, args.top_k, args.routing, args.dtype)
        facts: dict[str, Any] = {"width": args.width, "shared_width": args.shared_width, "iterations": args.iterations}
        facts |= {"workload": dataclasses.asdict(workload), "results": [], "figures": {}, "timelines": {}}
        super().__init__(device, args, table, **facts)
        self.workload = workload

    @torch.enable_grad()
    def everything(self) -> None:
        args = self.args
        with self.communicator(self.workload, alignment=ALIGNMENT) as comm:
            if self.device.type == "cuda":
                comm.warmup()
            layer = Layer(comm, self.workload, args.width, args.shared_width)
            self.found["errors"] = errors = self.worst(layer.errors())
            if max(errors.values()) > MAX_ERROR:
                raise RuntimeError(f"results are wrong by {errors}")
            with comm.sm_budget(dispatch=args.dispatch_sms, combine=args.combine_sms):
                self.times(layer)
            self.figures()
            if self.device.type == "cuda":
                self.lines(layer)
        self.save()

    def times(self, layer: Layer) -> None:
        with torch.no_grad():
            self.by_turns(
                {
                    "gemms": layer.gemms,
                    "communication": layer.communication,
                    "serial": layer.serial,
                    "in turns": layer.in_turns,
                }
            )
            self.by_turns(
                {
                    "dispatch": layer.dispatch,
                    "combine": layer.combine,
                    "shared": layer.shared_alone,
                    "shared in dispatch": layer.shared_in_dispatch,
                    "shared in combine": layer.shared_in_combine,
                }
            )
        layer.gradients(True)
        self.by_turns(
            {
                "gemms, forward + backward": layer.gemms_train,
                "serial, forward + backward": layer.train(layer.serial),
                "in turns, forward + backward": layer.train(layer.in_turns),
            }
        )
        layer.gradients(False)

    def by_turns(self, calls: dict[str, Callable[[int], Any]]) -> None:
        for name, timing in self.timer.by_turns(calls, self.args.iterations).items():
            self.found["results"].append({"what": name, **timing.record()})
            self.say(f"{name}: {timing.median / 1e3:.3f} ms")
        self.save()

    def figures(self) -> None:
        """Compute the figures about overlap from medians."""
        took = {result["what"]: result["us"] for result in self.found["results"]}

        def hidden(operation: str) -> float:
            both = took[operation] + took["shared"] - took[f"shared in {operation}"]
            return both / min(took[operation], took["shared"])

        train = ", forward + backward"
        self.found["figures"] = {
            "in turns / gemms": took["in turns"] / took["gemms"],
            "serial / gemms": took["serial"] / took["gemms"],
            "hidden in dispatch": hidden("dispatch"),
            "hidden in combine": hidden("combine"),
            "in turns / serial" + train: took["in turns" + train] / took["serial" + train],
            "in turns / gemms" + train: took["in turns" + train] / took["gemms" + train],
        }

    def lines(self, layer: Layer) -> None:
        """Record the timeline of rank 0 with the profiler, in the second of two runs."""
        with torch.no_grad():
            runs: dict[str, Callable[[], Any]] = {"serial": layer.serial, "in turns": layer.in_turns}
            for name, run in runs.items():
                run()
                self.found["timelines"][name] = [list(kernel) for kernel in timeline(run, self.barrier)]
        if self.rank == 0 and self.args.picture is not None:
            path = picture(self.found, self.workload.dtype, self.found["timelines"], self.args.picture)
            self.say(f"{path} is written")


def table(run: Found) -> list[str]:
    return text_table([("figure", ""), *((name, f"{value:.3f}") for name, value in run["figures"].items())])


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_sizes(parser, width=True)
    parser.add_argument(
        "--shared-width", type=positive, default=2048, help="intermediate size of the shared expert (%(default)s)"
    )
    parser.add_argument("--routing", type=routing, default="balanced", help="balanced, skewed, or as 'hot 0.2'")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--dispatch-sms", type=positive, help="multiprocessors of a dispatch (the model's)")
    parser.add_argument("--combine-sms", type=positive, help="multiprocessors of a combine (the model's)")
    parser.add_argument("--iterations", type=positive, default=20)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the timelines as FILE-timeline.svg (GPUs)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return on_every_rank(Session.measure, read(options(), argv))


if __name__ == "__main__":
    sys.exit(main())
