"""What MoECommunicator costs over the operators: pairs of dispatch and combine through both, of few and of many tokens,
called from eager code and replayed from CUDA graphs, in one run; and what statistics and a placement cost besides.

torchrun --nproc-per-node 2 benchmarks/moe.py --out moe.json
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ep_ops.bench.figures import text_table
from ep_ops.bench.operators import MAX_ERROR, relative_error
from ep_ops.bench.options import add_sizes, new_parser, positive, read
from ep_ops.bench.ranks import TIMEOUT, Found, Run, on_every_rank
from ep_ops.bench.workloads import Workload, draw_route
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig

HOW = ("operators", "MoECommunicator", "with statistics", "with a placement")


class Pairs:
    """Dispatch and combine of one batch."""

    def __init__(self, made: dict[str, MoECommunicator], workload: Workload) -> None:
        self.made, self.workload = made, workload
        comm = made["MoECommunicator"].comm
        draw = torch.Generator(comm.device).manual_seed(1 + comm.rank)
        shape = (workload.tokens, workload.hidden)
        self.x = torch.randn(shape, generator=draw, device=comm.device).to(comm.dtype)
        self.ids = draw_route(workload, comm.rank, 0, comm.device, comm.world_size)
        self.weights = torch.rand(self.ids.shape, generator=draw, device=comm.device) + 0.1

    def of(self, how: str) -> Callable[[int], Tensor]:
        moe = self.made.get(how, self.made["MoECommunicator"])
        tokens = self.workload.tokens

        def operators(i: int) -> Tensor:
            d = moe.comm.dispatch(self.x, self.ids, self.weights, max_tokens=tokens)
            return moe.comm.combine(d.x, d.route, d.weights)

        def through(i: int) -> Tensor:
            output, handle = moe.dispatch(self.x, self.ids, self.weights, max_tokens=tokens)
            return moe.combine(output.x, handle)

        return operators if how == "operators" else through

    def error(self, how: str) -> float:
        """Return the error of results where experts are the identity: x times the sum of its weights."""
        return relative_error(self.of(how)(0), self.x.float() * self.weights.sum(1, keepdim=True))


class Session(Run):
    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        facts = {name: getattr(args, name) for name in ("hidden", "experts", "top_k", "iterations")}
        workload = {**facts, "tokens": args.tokens, "dtype": "bf16"}
        super().__init__(device, args, table, workload=workload, results=[])

    def everything(self) -> None:
        args = self.args
        sizes = dict(
            num_experts=args.experts, hidden_size=args.hidden, top_k=args.top_k, max_tokens_per_rank=max(args.tokens)
        )
        more: dict[str, dict[str, Any]] = {
            "MoECommunicator": {}, "with statistics": {"statistics": True},
            "with a placement": {"placement": range(args.experts)},
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            made = {
                name: stack.enter_context(
                    MoECommunicator(
                        MoECommunicatorConfig(**sizes, **options, backend=args.backend, timeout=TIMEOUT),
                        device=self.device,
                    )
                )
                for name, options in more.items()
            }  # fmt: skip
            comm = made["MoECommunicator"].comm
            self.found["machine"]["backend"] = comm.backend.name
            for moe in made.values():
                moe.warmup()
            for tokens in args.tokens:
                workload = Workload(tokens, args.hidden, args.experts, args.top_k)
                pairs = Pairs(made, workload)
                errors = self.worst({how: pairs.error(how) for how in HOW})
                if max(errors.values()) > MAX_ERROR:
                    raise RuntimeError(f"results are wrong by {errors}")
                self.times(pairs)

    def times(self, pairs: Pairs) -> None:
        calls = {how: pairs.of(how) for how in HOW}
        eager = self.timer.by_turns(calls, self.args.iterations, row=min(ROW, self.args.iterations), rest=False)
        for how, call in calls.items():
            captured, _ = self.timer.graph(call, self.args.iterations) if self.timer.cuda else (None, None)
            host = self.timer.host(call, self.args.iterations).median
            self.found["results"].append(
                {
                    "what": how, "tokens": pairs.workload.tokens, "host_us": host, "eager_us": eager[how].median,
                    "of operators": eager[how].over(eager["operators"]),
                    "graph_us": None if captured is None else captured.median,
                }
            )  # fmt: skip
        self.save()


ROW = 16
"""Eager pairs behind each other."""


def table(run: Found) -> list[str]:
    rows = [["pairs through", "T", "host µs", "eager µs", "of the operators'", "graph µs"]]
    for one in run["results"]:
        graph = "" if one["graph_us"] is None else f"{one['graph_us']:.2f}"
        times = (f"{one['host_us']:.1f}", f"{one['eager_us']:.1f}", f"{one['of operators']:.3f}", graph)
        rows.append([one["what"], str(one["tokens"]), *times])
    return text_table(rows)


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_sizes(parser, (8, 128, 4096))
    parser.add_argument("--iterations", type=positive, default=40)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return on_every_rank(Session.measure, read(options(), argv))


if __name__ == "__main__":
    sys.exit(main())
