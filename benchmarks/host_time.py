"""Host time of eager decode calls, layer by layer: method, operator, backend, allocation of the outputs.

python benchmarks/host_time.py --tokens 8
python benchmarks/host_time.py --device cpu --ranks 1 --hidden 128 --experts 8 --top-k 2 --calls 3

The backend allocates the outputs and launches one kernel. What the backend takes beyond the outputs is the launch. What
the operator takes beyond the backend is torch.ops and the checks of the arguments. What the method takes beyond the
operator is the conversion of arguments and results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator
from ep_ops.backends.cute.outputs import allocator
from ep_ops.bench.figures import text_table
from ep_ops.bench.options import add_sizes, new_parser, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.steps import Steps
from ep_ops.bench.workloads import Workload
from ep_ops.specs import spec_of
from meta_kernels.arguments import Args, CombineArgs, DispatchArgs

LAYERS = ("method", "operator", "backend", "outputs")


def layers_of(steps: Steps) -> dict[str, tuple[Callable[[int], Any], ...]]:
    """Return, for a dispatch and a combine, one call for each of `LAYERS`."""
    comm, ops = steps.comm, torch.ops.ep
    x, idx, weights = steps.given(0)
    d = steps.dispatched(0)
    route, out = d.route, steps.combine(0)
    own = comm.num_local_experts, comm.world_size, comm.name
    ints = route.num_rows, route.alignment, route.slots, route.max_tokens, *own, route.layout
    sent = DispatchArgs(x, weights, idx, *ints)
    rows: Any = *d.route.tensors, *d.route.ints, comm.name
    returned = CombineArgs(d.x, d.weights, *rows)
    send, bring = _bound(comm, sent), _bound(comm, returned)

    def outputs(*tensors: Tensor) -> Callable[[int], Any]:
        if comm.device.type != "cuda":
            return lambda i: [torch.empty_like(tensor) for tensor in tensors]
        new, kinds = allocator(comm.device)(), [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]
        return lambda i: [new(*kind) for kind in kinds]

    return {
        "dispatch": (
            steps.dispatch,
            lambda i: ops.dispatch(x, weights, idx, *ints),
            lambda i: send(sent),
            outputs(d.x, d.weights, *d.route.tensors[1:], d.dropped),
        ),
        "combine": (
            steps.combine,
            lambda i: ops.combine(d.x, d.weights, *d.route.tensors, *d.route.ints, comm.name),
            lambda i: bring(returned),
            outputs(out),
        ),
    }


def _bound(comm: Communicator, a: Args) -> Callable[[Any], Any]:
    """Return what runs calls like this one on the backend."""
    spec = spec_of(a)
    assert spec is not None
    return comm.backend.bind(spec, a)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    workload = Workload(args.tokens, args.hidden, args.experts, args.top_k)
    with (
        torch.no_grad(),
        Run(device, args, table, benchmark="host time", tokens=args.tokens, results=[]) as run,
        run.communicator(workload) as comm,
    ):
        comm.warmup()
        for op, calls in layers_of(Steps(comm, workload, 16)).items():
            for layer, call in zip(LAYERS, calls, strict=True):
                timing = run.timer.host(call, args.calls)
                run.found["results"].append({"op": op, "layer": layer, **timing.record()})
        comm.check_errors()
        run.save()


def table(run: Found) -> list[str]:
    rows = [[f"{r['op']}: {r['layer']}", f"{r['us']:.1f}"] for r in run["results"]]
    return text_table([["host time of an eager call", "µs"], *rows])


def main(argv: Sequence[str] | None = None) -> int:
    options = new_parser(__doc__)
    options.add_argument("--calls", type=positive, default=200, help="timed calls (default: %(default)s)")
    add_sizes(options, 8)
    return on_every_rank(measure, read(options, argv))


if __name__ == "__main__":
    sys.exit(main())
