"""Time a combine in one process with other memory and with other numbers of multiprocessors.

    torchrun --nproc-per-node 2 benchmarks/combine_speeds.py [--heaps 3] [--inputs 3] [--sms 38,60,76,88,96,112,132]

The same combine takes different times in different processes. This script changes one thing at a time within a process:
the communicator (another allocation of symmetric memory), the rows y (another address), whether ranks meet before each
call, and the number of multiprocessors (SMs). Run it several times to see what changes between processes. Prints the
median, least and greatest µs over replays of a CUDA graph with 10 combines, on the slowest rank.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_ops import Communicator
from ep_ops.bench.options import add_options, read
from ep_ops.bench.ranks import Run, on_every_rank

TIMEOUT = 120.0  # seconds that a rank waits for another, which may be compiling
CHAIN, REPLAYS, LEAD = 10, 24, 3


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 4096, "hidden": 7168, "experts": 256, "top-k": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--heaps", type=int, default=3, help="communicators (default: %(default)s)")
    parser.add_argument("--inputs", type=int, default=3, help="addresses of y (default: %(default)s)")
    parser.add_argument("--sms", default="38,60,76,88,96,112,132", metavar="N,N", help="default: %(default)s")
    add_options(parser)
    return parser


def timed(call: Callable[[], Any], chain: int = CHAIN) -> str:
    """Return the times of a call as text. With a chain of one call, ranks meet before each. Collective."""
    call()
    if not torch.cuda.is_available():
        return "not timed"
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(chain):
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (REPLAYS + LEAD))]
    for begin, end in zip(events[::2], events[1::2], strict=True):
        if chain == 1:
            dist.all_reduce(torch.zeros(1, device="cuda"))
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    spent = [1e3 * a.elapsed_time(b) / chain for a, b in zip(events[::2], events[1::2], strict=True)][LEAD:]
    slowest = torch.tensor(spent, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return f"{statistics.median(slowest.tolist()):.1f} [{float(slowest.min()):.1f} {float(slowest.max()):.1f}]"


class Combines:
    """The combines of one communicator: of rows grouped by expert with weights, and of token-major rows."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        sizes = dict(num_experts=args.experts, hidden_size=args.hidden, top_k=args.top_k)
        self.comm = Communicator(
            **sizes, max_tokens_per_rank=args.tokens, device=device, backend=args.backend, timeout=TIMEOUT
        )
        draw = torch.Generator(device).manual_seed(dist.get_rank())
        x = torch.randn(args.tokens, args.hidden, generator=draw, device=device).to(self.comm.dtype)
        idx = torch.rand(args.tokens, args.experts, generator=draw, device=device).topk(args.top_k).indices
        weights = torch.full(idx.shape, 1 / args.top_k, device=device)
        self.grouped = self.comm.dispatch(x, idx, weights)
        self.copies = self.comm.dispatch(x, idx, weights, layout="token_major")

    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.grouped.x.clone(), self.copies.x.clone()

    def times(self, inputs: tuple[Tensor, Tensor], chain: int = CHAIN) -> str:
        grouped = timed(lambda: self.comm.combine(inputs[0], self.grouped.route, self.grouped.weights), chain)
        copies = timed(lambda: self.comm.combine(inputs[1], self.copies.route), chain)
        return f"grouped {grouped}, token-major {copies}"


def measure(args: argparse.Namespace, device: torch.device, say: Callable[[str], None]) -> None:
    """Pass each measurement to ``say`` as a line of text. Collective."""
    made = [Combines(args, device) for _ in range(args.heaps)]
    inputs = [made[0].inputs() for _ in range(args.inputs)]
    for heap, combines in enumerate(made):
        for number, given in enumerate(inputs):
            say(f"communicator {heap}, y {number}: {combines.times(given)}")
    first, given = made[0], inputs[0]
    say(f"ranks meet before each call: {first.times(given, 1)}")
    for sms in map(int, args.sms.split(",")):
        with first.comm.sm_budget(combine=sms):
            say(f"{sms} SMs: {first.times(given)}")
    say(f"the default again: {first.times(given)}")
    for combines in made:
        combines.comm.destroy()


@torch.no_grad()
def measure_and_save(device: torch.device, args: argparse.Namespace) -> None:
    run = Run(device, args, benchmark="speeds of a combine", lines=[])

    def say(text: str) -> None:
        run.found["lines"].append(text)
        run.say(text)
        run.save()

    measure(args, device, say)
    run.close()


def main(argv: Sequence[str] | None = None) -> int:
    return on_every_rank(measure_and_save, read(options(), argv), TIMEOUT)


if __name__ == "__main__":
    sys.exit(main())
