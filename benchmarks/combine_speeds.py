"""Time a combine in one process with other memory and with other numbers of multiprocessors.

    torchrun --nproc-per-node 2 benchmarks/combine_speeds.py [--heaps 3] [--inputs 3] [--sms 38,60,76,88,96,112,132]

The same combine takes different times in different processes. This script changes one thing at a time within a process:
the communicator (another allocation of symmetric memory), the rows y (another address), whether ranks meet before each
call, and the number of multiprocessors (SMs). Run it several times to see what changes between processes. Prints the
median, least and greatest µs over replays of a CUDA graph with 10 combines, on the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ep_ops import Communicator
from ep_ops.bench.options import add_sizes, new_parser, numbers, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.timing import CHAIN, Timing
from ep_ops.bench.workloads import Workload

REPLAYS = 24


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_sizes(parser)
    parser.add_argument("--heaps", type=positive, default=3, help="communicators (default: %(default)s)")
    parser.add_argument("--inputs", type=positive, default=3, help="addresses of y (default: %(default)s)")
    parser.add_argument("--sms", type=numbers, default=(38, 60, 76, 88, 96, 112, 132), metavar="N,N")
    return parser


class Combines:
    """The combines of one communicator: of rows grouped by expert with weights, and of token-major rows."""

    def __init__(self, run: Run, comm: Communicator) -> None:
        args, self.run, self.comm = run.args, run, comm
        draw = torch.Generator(comm.device).manual_seed(comm.rank)
        x = torch.randn(args.tokens, args.hidden, generator=draw, device=comm.device).to(comm.dtype)
        idx = torch.rand(args.tokens, args.experts, generator=draw, device=comm.device).topk(args.top_k).indices
        weights = torch.full(idx.shape, 1 / args.top_k, device=comm.device)
        self.grouped = comm.dispatch(x, idx, weights)
        self.copies = comm.dispatch(x, idx, weights, layout="token_major")

    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.grouped.x.clone(), self.copies.x.clone()

    def times(self, inputs: tuple[Tensor, Tensor], meet: bool = False) -> str:
        """Return the times of both combines as text. `meet`: whether ranks meet before each call. Collective."""
        calls: dict[str, Callable[[int], Tensor]] = {
            "grouped": lambda i: self.comm.combine(inputs[0], self.grouped.route, self.grouped.weights),
            "token-major": lambda i: self.comm.combine(inputs[1], self.copies.route),
        }
        return ", ".join(f"{name} {as_text(self.timed(call, meet))}" for name, call in calls.items())

    def timed(self, call: Callable[[int], Tensor], meet: bool) -> Timing:
        timer = self.run.timer
        if meet:
            return timer.whole(timer.captured(call, 1), REPLAYS)
        return timer.row(timer.captured(call, CHAIN), REPLAYS).each(CHAIN)


def as_text(timing: Timing) -> str:
    return f"{timing.median:.1f} [{min(timing.calls):.1f} {max(timing.calls):.1f}]"


@torch.no_grad()
def measure(device: torch.device, args: argparse.Namespace) -> None:
    with (
        Run(device, args, table, benchmark="speeds of a combine", lines=[]) as run,
        contextlib.ExitStack() as stack,
    ):

        def say(text: str) -> None:
            run.found["lines"].append(text)
            run.say(text)
            run.save()

        workload = Workload(args.tokens, args.hidden, args.experts, args.top_k)
        made = [Combines(run, stack.enter_context(run.communicator(workload))) for _ in range(args.heaps)]
        inputs = [made[0].inputs() for _ in range(args.inputs)]
        for heap, combines in enumerate(made):
            for number, given in enumerate(inputs):
                say(f"communicator {heap}, y {number}: {combines.times(given)}")
        first, given = made[0], inputs[0]
        say(f"ranks meet before each call: {first.times(given, meet=True)}")
        for sms in args.sms:
            with first.comm.sm_budget(combine=sms):
                say(f"{sms} SMs: {first.times(given)}")
        say(f"the default again: {first.times(given)}")


def table(run: Found) -> list[str]:
    return run["lines"]


def main(argv: Sequence[str] | None = None) -> int:
    return on_every_rank(measure, read(options(), argv))


if __name__ == "__main__":
    sys.exit(main())
