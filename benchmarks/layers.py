"""Compare whole layers of experts: the GEMMs alone, this library in both orders of weight gradients, eager PyTorch with
NCCL's all-to-all, and torchtitan's layer.

    torchrun --nproc-per-node 2 benchmarks/layers.py --out layers.json [--models deepseek-v3,qwen3-30b-a3b]
    python benchmarks/layers.py --draw layers.json         # writes a picture of the timelines for each model

All variants have the same tokens, balanced routing, and weights; the router is not part of them. In one run, by turns:
forward, and forward + backward (gradients of tokens, routing weights and experts' weights). Times are medians over
rounds of the slowest rank. Before that, outputs and gradients of tokens are compared with those of the first variant.

    GEMMs      two grouped GEMMs and SwiGLU, on rows that have been dispatched: what no layer can be faster than
    serial     `ep_ops.nn.expert_mlp`, ordinary order
    late       the same with late weight gradients, which differs in backward only
    sort+NCCL  tokens are sorted, sent by all_to_all_single, grouped, and summed by eager PyTorch; exact sizes
    torchtitan torchtitan 0.3's RoutedExperts with its all-to-all dispatcher, whose exchanges are those of sort+NCCL

The first three run with PyTorch's grouped GEMM and with that of quack-kernels 0.6.5, if it is installed; the others run
with PyTorch's. If torchtitan cannot be imported or does not run with this PyTorch, `missing` says why.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ep_ops import Communicator
from ep_ops.bench.against import recorded
from ep_ops.bench.baselines import eager_combine, eager_dispatch, exchange
from ep_ops.bench.figures import text_table
from ep_ops.bench.operators import relative_error
from ep_ops.bench.options import names_of, new_parser, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.timeline import picture, timeline
from ep_ops.bench.workloads import Workload, draw_route
from ep_ops.integrations import quack
from ep_ops.nn import TORCH, Gemms, expert_mlp, grouped_mm, swiglu
from ep_ops.nn.expert_mlp import expert_rows
from ep_ops.nn.gemms import Choice
from ep_ops.nn.late import SentTokens
from ep_ops.nn.token_major import How, Rows


class Model(NamedTuple):
    hidden: int
    experts: int
    width: int
    top_k: int

    def workload(self, tokens: int) -> Workload:
        return Workload(tokens, self.hidden, self.experts, self.top_k)


MODELS = {
    "deepseek-v3": Model(7168, 256, 2048, 8),
    "qwen3-30b-a3b": Model(2048, 128, 768, 8),
    "tiny": Model(64, 8, 32, 2),
}
MAX_ERROR = 0.05
"""Largest relative error of a row of the output or of the gradient of tokens, between variants in bfloat16."""


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=positive, default=4096, help="tokens of each rank (default: %(default)s)")
    parser.add_argument("--models", type=names_of(MODELS), default=tuple(MODELS)[:2], help=", ".join(MODELS))
    parser.add_argument("--rounds", type=positive, default=12, help="%(default)s")
    parser.add_argument(
        "--draw", type=timelines_of, metavar="FILE", help="measure nothing: draw the timelines of this file"
    )
    return parser


def timelines_of(text: str) -> Found:
    return recorded(text, "timelines")


class Variant(NamedTuple):
    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    grad: Tensor  # of what `run` returns

    def forward(self, i: int = 0) -> Tensor:
        with torch.no_grad():
            return self.run()

    def both(self, i: int = 0) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.run(), self.leaves, self.grad)


class Layer:
    """The tokens and experts of a model on this rank, and the variants. Collective."""

    def __init__(self, comm: Communicator, model: Model, tokens: int) -> None:
        self.comm, self.model = comm, model
        draw = torch.Generator(comm.device).manual_seed(comm.rank)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.empty(shape, device=comm.device, dtype=comm.dtype).normal_(0, scale, generator=draw)

        held, (hidden, experts, width, top_k) = comm.num_local_experts, model
        self.x, self.grad = normal(tokens, hidden).requires_grad_(), normal(tokens, hidden)
        self.w_in = normal(held, hidden, 2 * width, scale=hidden**-0.5).requires_grad_()
        self.w_out = normal(held, width, hidden, scale=width**-0.5).requires_grad_()
        self.idx = draw_route(model.workload(tokens), comm.rank, 0, comm.device).long()
        weights = torch.rand(self.idx.shape, device=comm.device, generator=draw) + 0.1
        self.weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
        mean = tokens * top_k * comm.world_size * held // experts
        self.capacity = -(-(mean * 5 // 4 + comm.alignment * held) // 128) * 128
        with torch.no_grad():
            self.rows = comm.dispatch(self.x, self.idx, self.weights, capacity=self.capacity, zeros=True)
        self.grad_y = normal(self.capacity, hidden)

    def variants(self, kinds: dict[str, Gemms]) -> dict[str, Variant]:
        leaves, rows = (self.x, self.weights, self.w_in, self.w_out), self.rows.x.detach().requires_grad_()
        found = {}
        for kind, gemms in kinds.items():
            for name, late in (("serial", False), ("late", True)):
                run = functools.partial(self.ours, gemms._replace(late=late))
                found[f"{name}, {kind}"] = Variant(run, leaves, self.grad)
            run = functools.partial(self.gemms, rows, gemms)
            found[f"GEMMs, {kind}"] = Variant(run, (rows, self.w_in, self.w_out), self.grad_y)
        found["sort+NCCL"] = Variant(self.sorted, leaves, self.grad)
        return found

    def gemms(self, rows: Tensor, gemms: Gemms) -> Tensor:
        sent = SentTokens(self.comm, self.x, self.weights)
        return expert_rows(self.rows._replace(x=rows), self.w_in, self.w_out, Choice(gemms), sent, How(Rows()))[0]

    def ours(self, gemms: Gemms) -> Tensor:
        given = self.comm, self.x, self.idx, self.weights, self.w_in, self.w_out
        return expert_mlp(*given, capacity=self.capacity, gemms=gemms).out

    def sorted(self) -> Tensor:
        rows, sent = eager_dispatch(self.x, self.idx, self.model.experts, self.comm.world_size)
        offs = sent.counts.sum(0).cumsum(0).int()
        h = swiglu(grouped_mm(rows, self.w_in, offs))
        return eager_combine(grouped_mm(h, self.w_out, offs), self.weights, sent)

    def communication(self, i: int = 0) -> Tensor:
        """Dispatch and combine alone."""
        with torch.no_grad():
            rows = self.comm.dispatch(self.x, self.idx, self.weights, capacity=self.capacity)
            return self.comm.combine(rows.x, rows.route, rows.weights)


def of_torchtitan(layer: Layer) -> Variant:
    """Return torchtitan's layer with the same weights. ImportError if torchtitan cannot be imported."""
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    class Dispatcher(AllToAllTokenDispatcher):
        """With exchanges that are differentiable in every version of PyTorch."""

        def _dispatch_token_exchange(self, rows: Tensor, pg: Any, entering: list[int], leaving: list[int]) -> Tensor:
            return exchange(rows, entering, leaving)

        def _combine_token_exchange(self, rows: Tensor, pg: Any, entering: list[int], leaving: list[int]) -> Tensor:
            return exchange(rows, entering, leaving)

    set_spmd_backend("partial_dtensor")
    comm, (hidden, experts, width, top_k) = layer.comm, layer.model
    with torch.device("meta"):
        inner = GroupedExperts.Config(dim=hidden, hidden_dim=width, num_experts=comm.num_local_experts)
        config = AllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k)
        routed = RoutedExperts.Config(inner_experts=inner, token_dispatcher=config).build()
    gate, up = layer.w_in.detach().chunk(2, dim=2)
    parameters = (w.mT.contiguous() for w in (gate, layer.w_out.detach(), up))
    for name, weight in zip(("w1_EFD", "w2_EDF", "w3_EFD"), parameters, strict=True):
        setattr(routed.inner_experts, name, torch.nn.Parameter(weight))
    dispatcher = routed.token_dispatcher = Dispatcher(config)
    dispatcher.wire_meshes(ep_mesh=dist.init_device_mesh(comm.device.type, (comm.world_size,), mesh_dim_names=("ep",)))

    def run() -> Tensor:
        chosen = torch.zeros(len(layer.idx), experts, dtype=torch.bool, device=comm.device)
        counts = chosen.scatter_(1, layer.idx, True).sum(0)  # as in torchtitan's MoE
        return routed(layer.x[None], layer.weights[None], layer.idx[None], counts)[0]

    return Variant(run, (layer.x, layer.weights, *routed.parameters()), layer.grad)


class Session(Run):
    """One run of this benchmark on a rank."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        facts: dict[str, Any] = {"tokens": args.tokens, "rounds": args.rounds, "dtype": "bf16"}
        models = {name: MODELS[name]._asdict() for name in args.models}
        facts |= {"benchmark": "layers", "models": models, "missing": {}, "results": [], "timelines": {}}
        super().__init__(device, args, table, **facts)
        self.comms = {
            name: self.communicator(MODELS[name].workload(args.tokens), latency_max_tokens=0) for name in args.models
        }

    @torch.enable_grad()
    def everything(self) -> None:
        wrong: dict[str, float] = {}
        for name, comm in self.comms.items():
            comm.warmup()
            wrong |= self.of_model(name, comm)
            comm.check_errors()
            comm.destroy()
        if wrong:
            raise RuntimeError(f"results are wrong by {wrong}")

    def of_model(self, name: str, comm: Communicator) -> dict[str, float]:
        """Measure the variants of a model, and return the errors that are too large."""
        with_quack = self.device.type == "cuda" and importlib.util.find_spec("quack")
        kinds = {"torch": TORCH} | ({"quack": quack.GEMMS} if with_quack else {})
        layer = Layer(comm, MODELS[name], self.args.tokens)
        variants = layer.variants(kinds)
        try:
            variant = of_torchtitan(layer)
            variant.both()
            variants["torchtitan"] = variant
        except Exception as error:  # on all ranks alike
            self.found["missing"]["torchtitan"] = repr(error)
            self.say(f"torchtitan is left out: {error!r}")
        errors = self.worst(differences(variants))
        self.say(f"{name}: differences {', '.join(f'{key} {value:.4f}' for key, value in errors.items())}")
        calls: dict[str, Callable[[int], Any]] = {key: variant.forward for key, variant in variants.items()}
        forward = self.timer.by_turns(calls | {"communication": layer.communication}, self.args.rounds)
        both = self.timer.by_turns({key: variant.both for key, variant in variants.items()}, self.args.rounds)
        for key, timing in forward.items():
            times = {"forward": timing.record(), "forward_backward": both[key].record() if key in both else None}
            self.found["results"].append({"model": name, "variant": key, "error": errors.get(key), **times})
        self.save()
        if self.device.type == "cuda":
            for key, variant in variants.items():
                line = timeline(variant.both, self.barrier)
                self.found["timelines"].setdefault(name, {})[key] = [list(kernel) for kernel in line]
            self.save()
        return {f"{name}, {key}": value for key, value in errors.items() if value > MAX_ERROR}


def differences(variants: dict[str, Variant]) -> dict[str, float]:
    """Return the largest relative error of a row of output or gradient of tokens, compared with the first variant."""
    first, *others = (key for key in variants if not key.startswith("GEMMs"))
    out, grad = variants[first].forward(), variants[first].both()[0]
    found = {}
    for key in others:
        pairs = ((variants[key].forward(), out), (variants[key].both()[0], grad))
        found[key] = max(relative_error(*pair) for pair in pairs)
    for variant in variants.values():  # those without errors compile as well
        variant.both()
    return found


def table(run: Found) -> list[str]:
    """Return a table of ms, and their ratios to the GEMMs alone: quack's for variants that use them."""
    us = {(r["model"], r["variant"]): [(r[key] or {}).get("us") for key in KEYS] for r in run["results"]}
    rows = [["model", "variant", "forward,ms", "/ GEMMs", "and backward,ms", "/ GEMMs"]]
    for (model, variant), times in us.items():
        alone = us[model, "GEMMs, quack" if variant.endswith("quack") else "GEMMs, torch"]
        cells = [
            text
            for time, least in zip(times, alone, strict=True)
            for text in (("", "") if time is None else (f"{time / 1e3:.3f}", f"{time / least:.3f}"))
        ]
        rows.append([model, variant, *cells])
    return text_table(rows)


KEYS = ("forward", "forward_backward")


def draw(run: Found) -> None:
    """Draw the timelines of a recorded run: forward and backward on rank 0, one picture for each model."""
    path = Path(run["path"])
    for model, timelines in run["timelines"].items():
        print(picture(run, f"{model}, {run['dtype']}", timelines, path.with_name(f"{path.stem}-{model}.svg")))


def main(argv: Sequence[str] | None = None) -> int:
    args = read(options(), argv)
    if args.draw:
        draw(args.draw)
        return 0
    return on_every_rank(Session.measure, args)


if __name__ == "__main__":
    sys.exit(main())
