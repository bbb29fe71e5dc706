"""MoE layers of one GPU in one process: ep_ops, PyTorch's grouped GEMMs, and libraries that can be installed with pip.

python benchmarks/rivals.py decode --model qwen3-30b --tokens 1,8,64 --out benchmarks/results/rivals-decode.json
python benchmarks/rivals.py training --hidden 2048 --width 768 --experts 128 --tokens 8192
python benchmarks/rivals.py training --device cpu --tokens 16 --hidden 64 --width 32 --experts 8 --top-k 2 --rounds 2

A layer computes weighted sums of SwiGLU experts from tokens, expert ids and routing weights, in bfloat16. Layers of
ep_ops include dispatch and combine, the others have no exchange. Each layer takes turns with ep_ops and, in training,
with ep_ops and quack's GEMMs; every second round is in the reverse order. Figures are medians over rounds, and ratios
are medians of the ratios to those layers in the same round. A library that is not installed, that fails, or whose
results are wrong is named with the reason. Results are written after each layer, because some libraries take minutes to
tune.

`decode` replays CUDA graphs of `--calls` layers. Each call has its own route, and successive calls use different copies
of the weights, so many that twice the GPU's cache is read before a copy is used again. The floor is the time in which a
kernel that only reads takes the weights of the experts that tokens name.

`training` times forward without gradients, and forward with backward: the mean of a row of 4 calls behind a pause of
30 ms, so that a row begins at the GPU's full clock and the host is ahead. Each call reads all weights, which must
exceed the cache (`weights_mib` and `cache_mib` in the results). The floor is the time of dense GEMMs of the same sizes.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops import Communicator
from ep_ops.bench import layer, other_layers
from ep_ops.bench.decode import MODELS, has_triton, read_speed, triton_experts
from ep_ops.bench.figures import text_table
from ep_ops.bench.operators import relative_error
from ep_ops.bench.options import add_sizes, new_parser, positive, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.workloads import Workload, draw_route
from ep_ops.commands.doctor import installed
from ep_ops.nn import expert_mlp
from ep_ops.records import Dispatched

MAX_ERROR = 3e-2
TOKENS = {"decode": (1, 8, 32, 64, 128, 256), "training": (4096,)}
PACKAGES = ("triton", "flashinfer-python", "vllm", "liger-kernel", "sonic-moe", "quack-kernels")
OURS, QUACK = "ep_ops", "ep_ops, quack"
"""The layers that the others take turns with, the second one if it is there."""
WAYS = {OURS: "mean", "ep_ops, token-major": "token_major", QUACK: "quack"}
"""Ways of `ep-ops bench layer` that train."""
RATIOS = {OURS: "ratio", QUACK: "ratio_quack"}
"""What ends the names of ratios to these layers."""


class Made(NamedTuple):
    """A layer with weights in the layout that it wants."""

    run: other_layers.Layer
    weights: tuple[Tensor, Tensor]
    turned: bool
    """Whether the last two dimensions of the weights are those of w_in and w_out in the other order."""


def of_torch(w_in: Tensor, w_out: Tensor) -> Made:
    """Return a layer of PyTorch's operators: sort, grouped GEMMs, and a sum over each token's rows."""
    experts = w_in.shape[0]

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ordered, order = ids.flatten().sort(stable=True)
        offs = torch.searchsorted(ordered, torch.arange(experts, device=x.device, dtype=ids.dtype), right=True).int()
        token = order // ids.shape[1]
        gate, up = torch.nn.functional.grouped_mm(x[token], w_in, offs=offs).chunk(2, 1)
        y = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w_out, offs=offs)
        weighted = y.float() * weights.flatten()[order, None]
        return torch.zeros(x.shape, device=x.device).index_add(0, token, weighted).to(x.dtype)

    return Made(run, (w_in, w_out), False)


def of_liger(w_in: Tensor, w_out: Tensor) -> Made:
    """Return Liger's Triton layer (liger-kernel 0.8.5)."""
    from liger_kernel.ops import LigerFusedMoEFunction

    made = w_in.mT.contiguous(), w_out.mT.contiguous()
    return Made(lambda x, ids, weights: LigerFusedMoEFunction.apply(x, *made, ids, weights), made, True)


def of_sonic(w_in: Tensor, w_out: Tensor) -> Made:
    """Return SonicMoE's layer (sonic-moe 0.1.2.post1), with gate and up behind each other as they are here."""
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    made, experts = (w_in.mT.contiguous(), w_out.mT.contiguous()), w_in.shape[0]

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens = torch.arange(ids.shape[0], dtype=torch.int32, device=x.device).repeat_interleave(ids.shape[1])
        first, second = (w.permute(1, 2, 0) for w in made)
        return moe_general_routing_inputs(
            x, weights.flatten(), tokens, ids.flatten(), first, None, second, None, experts,
            torch.cuda.current_stream().cuda_stream, ActivationType.SWIGLU, not torch.is_grad_enabled(), True,
        )[0]  # fmt: skip

    return Made(run, made, True)


TRAINING = {"torch": of_torch, "Liger": of_liger, "SonicMoE": of_sonic}
"""Layers with gradients besides those of ep_ops."""
FIGURES = {"forward_us": False, "forward_backward_us": True}
"""What is timed of a layer that trains, and whether with gradients."""


def options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("what", choices=TOKENS)
    add_sizes(parser, TOKENS["decode"])
    parser.add_argument("--width", type=positive, help="intermediate size of each expert")
    parser.add_argument("--model", choices=MODELS, default="deepseek-v3", help="model whose sizes are the defaults")
    parser.add_argument("--rounds", type=positive, default=20, help="timed rounds (default: %(default)s)")
    parser.add_argument("--calls", type=positive, default=10, help="layers in a graph (default: %(default)s)")
    parser.set_defaults(hidden=None, experts=None, top_k=None, tokens=None, ranks=1)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = options()
    given = parser.parse_args(argv)
    parser.set_defaults(**MODELS[given.model]._asdict(), tokens=TOKENS[given.what])
    args = read(parser, argv)
    if args.ranks != 1:
        parser.error(f"--ranks is {args.ranks}; allowed: 1, because the other layers have no exchange")
    return on_every_rank(measure, args)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    kind = Decode if args.what == "decode" else Training
    with kind(device, args) as run:
        run.everything()


class Rivals(Run):
    """What both benchmarks share: a row for each layer, by number of tokens, and why layers are missing."""

    comm: Communicator
    calls_in_row, rest = 1, False
    """How a row is timed: the mean of so many calls, and whether behind a pause."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        names = "model", "hidden", "width", "experts", "top_k", "rounds", "calls"
        facts = {name: getattr(args, name) for name in names}
        versions = {name: installed(name) for name in PACKAGES}
        super().__init__(
            device, args, table, benchmark=f"rivals {args.what}", dtype="bf16", **facts, versions=versions, missing={},
            results=[],
        )  # fmt: skip

    def everything(self) -> None:
        args = self.args
        self.steps = len(args.tokens)
        workload = Workload(max(args.tokens), args.hidden, args.experts, args.top_k)
        with self.communicator(workload, **({} if args.what == "decode" else {"latency_max_tokens": 0})) as self.comm:
            for tokens in args.tokens:
                found: Found = {"tokens": tokens, "rows": []}
                self.found["results"].append(found)
                self.ours: dict[str, dict[str, Callable[[int], Any]]] = {}
                self.size(tokens, found)
                self.done += 1
                self.save()
            self.comm.check_errors()

    def size(self, tokens: int, found: Found) -> None:
        """Measure one number of tokens; ep_ops is the first layer."""
        raise NotImplementedError

    def add(self, name: str, make: Callable[[], tuple[dict[str, Callable[[int], Any]], float]], each: int) -> None:
        """Add a row: a layer's error, seconds until it was compiled, tuned and checked, µs of one of ``each`` in a call
        of each kind, and the ratios to layers of ep_ops. ``make`` returns calls by kind, and the error. If it fails or
        if results are wrong, record the reason."""
        self.say(f"{name} is compiled, tuned and checked")
        begun = time.perf_counter()
        try:
            calls, error = make()
        except Exception as error:  # an import of a library that does not support this host may raise anything
            self.found["missing"][name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            self.say(f"{name} is not measured: {self.found['missing'][name]}")
            return
        row: Found = {"layer": name, "error": error, "ready_s": time.perf_counter() - begun}
        if name in RATIOS:
            self.ours[name] = calls
        for figure, call in calls.items():
            turns = {other: theirs[figure] for other, theirs in self.ours.items()} | {name: call}
            timing = self.timer.by_turns(turns, self.args.rounds, self.calls_in_row, self.rest, mirrored=True)
            row[figure] = timing[name].each(each).median
            for other in self.ours:
                row[f"{figure}_{RATIOS[other]}"] = timing[name].over(timing[other])
        self.found["results"][-1]["rows"].append(row)
        self.save()


def check(errors: dict[str, float]) -> dict[str, float]:
    """Return the errors of a layer's results. ValueError if they are wrong."""
    if wrong := [f"{name} {error:.1e}" for name, error in errors.items() if not error <= MAX_ERROR]:
        raise ValueError(f"results differ from torch's: {', '.join(wrong)}")
    return errors


# ---------------------------------------------------------------------- decode


class Decode(Rivals):
    @torch.no_grad()
    def size(self, tokens: int, found: Found) -> None:
        args, device = self.args, self.device
        draw = torch.Generator(device=device).manual_seed(0)
        x = torch.randn(tokens, args.hidden, generator=draw, device=device).to(self.comm.dtype)
        scores = torch.rand(tokens, args.top_k, generator=draw, device=device) + 0.1
        scores /= scores.sum(1, keepdim=True)
        workload = Workload(tokens, args.hidden, args.experts, args.top_k)
        routes = [draw_route(workload, 0, tokens + 1000 * i, device) for i in range(args.calls)]
        named = sum(len(route.unique()) for route in routes) / args.calls
        nbytes = named * 3 * args.hidden * args.width * 2
        copies = 2 + int(2 * cache_bytes(device) / nbytes)
        weights = [self.weights(seed) for seed in range(copies)]
        found |= {"named": named, "copies": copies}
        if has_triton(device):
            if "read_tb_s" not in self.found:
                self.found["read_tb_s"] = read_speed(self.timer)
            found["floor_us"] = nbytes / self.found["read_tb_s"] / 1e6
        sent = [self.comm.dispatch(x, route, scores, max_tokens=tokens, zeros=False) for route in routes]
        expected = of_torch(*weights[0]).run(x, routes[0], scores)
        for name, make in self.layers(tokens, sent).items():

            def ready(make: Callable[..., other_layers.Layer] = make) -> tuple[dict[str, Callable[[int], Any]], float]:
                made = [make(*each) for each in weights]
                error = check({"out": relative_error(made[0](x, routes[0], scores), expected)})["out"]
                run = lambda i: made[i % copies](x, routes[i % args.calls], scores)  # noqa: E731
                return {"us": self.timer.captured(run, args.calls)}, error

            self.add(name, ready, args.calls)

    def weights(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the weights of all experts, different for each copy."""
        first, second = layer.made(self.comm, self.args.width)
        return first.roll(seed, 0), second.roll(seed, 0)

    def layers(self, tokens: int, sent: list[Dispatched]) -> dict[str, Callable[[Tensor, Tensor], other_layers.Layer]]:
        """Return what makes each layer from w_in and w_out."""
        comm = self.comm

        def ours(w_in: Tensor, w_out: Tensor) -> other_layers.Layer:
            return lambda x, ids, weights: expert_mlp(comm, x, ids, weights, w_in, w_out, max_tokens=tokens).out

        def triton(w_in: Tensor, w_out: Tensor) -> other_layers.Layer:
            experts = triton_experts(self.timer, (w_in, w_out), sent)

            def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
                got = comm.dispatch(x, ids, weights, max_tokens=tokens, zeros=False)
                return comm.combine(experts(got), got.route, got.weights)

            return run

        others = {name: functools.partial(make, comm) for name, make in other_layers.LAYERS["bf16"].items()}
        return {OURS: ours, "torch": lambda *w: of_torch(*w).run, "ep_ops, plain Triton GEMMs": triton, **others}


def cache_bytes(device: torch.device) -> int:
    """Return the size of the GPU's L2 cache; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


# ---------------------------------------------------------------------- training


class Training(Rivals):
    calls_in_row, rest = 4, True

    def size(self, tokens: int, found: Found) -> None:
        names = {"tokens": tokens, "times": None, "mode": "eager"}
        self.args = argparse.Namespace(**{**vars(self.args), **names})  # as `ep-ops bench layer` has them
        inputs = layer.LayerInputs(self, self.comm)
        weights_mib = sum(w.nbytes for w in inputs.matrices) / 2**20
        found |= {"weights_mib": weights_mib, "cache_mib": cache_bytes(self.device) / 2**20}
        for figure, grads in FIGURES.items():
            dense = {"floor": self.dense(tokens, grads)}
            timing = self.timer.by_turns(dense, self.args.rounds, self.calls_in_row, self.rest)
            found[f"floor_{figure}"] = timing["floor"].median
        expected = results(inputs, of_torch(*(w.detach().requires_grad_() for w in inputs.matrices)))
        for name, make in self.layers(inputs).items():

            def ready(make: Callable[[], Layer] = make) -> tuple[dict[str, Callable[[int], Any]], float]:
                made = make()
                got = results(inputs, made.made)
                errors = check({what: relative_error(got[what], expected[what]) for what in expected})
                return {figure: made.call(grads) for figure, grads in FIGURES.items()}, max(errors.values())

            self.add(name, ready, 1)

    def layers(self, inputs: layer.LayerInputs) -> dict[str, Callable[[], Layer]]:
        """Return what makes each layer."""
        mine = {name: functools.partial(ours, self, inputs, way) for name, way in WAYS.items()}
        return {**mine, **{name: functools.partial(theirs, inputs, make) for name, make in TRAINING.items()}}

    def dense(self, tokens: int, grads: bool) -> Callable[[int], Any]:
        """Return dense GEMMs as large as those of the layer, of one expert: all rows in one product."""
        args, rows = self.args, tokens * self.args.top_k
        made = functools.partial(torch.ones, dtype=self.comm.dtype, device=self.device)
        x, h, a = made(rows, args.hidden), made(rows, 2 * args.width), made(rows, args.width)
        w_in, w_out = made(args.hidden, 2 * args.width), made(args.width, args.hidden)
        pairs = [(x, w_in), (a, w_out)]
        if grads:
            pairs += [(x, w_out.t()), (h, w_in.t()), (x.t(), h), (a.t(), x)]

        def run(i: int) -> None:
            for left, right in pairs:
                left @ right

        return run


class Layer:
    """A layer that trains, and its inputs."""

    def __init__(self, inputs: layer.LayerInputs, made: Made) -> None:
        self.inputs, self.made = inputs, made

    def call(self, grads: bool) -> Callable[[int], Any]:
        """Return what is timed: forward without gradients, or forward and backward."""
        inputs, made = self.inputs, self.made
        given = inputs.x, inputs.idx, inputs.weights

        def forward(i: int) -> Tensor:
            with torch.no_grad():
                return made.run(*given)

        def both(i: int) -> tuple[Tensor, ...]:
            return torch.autograd.grad(made.run(*given), (inputs.x, inputs.weights, *made.weights), inputs.grad)

        return both if grads else forward


def ours(run: Training, inputs: layer.LayerInputs, way: str) -> Layer:
    """Return a layer of ep_ops as `ep-ops bench layer` makes it."""
    if way == "quack":
        import quack  # noqa: F401
    made = layer.Layer(run, inputs, way)
    w_in, w_out = made.experts.parameters()
    return Layer(inputs, Made(made.experts, (w_in, w_out), False))


def theirs(inputs: layer.LayerInputs, make: Callable[[Tensor, Tensor], Made]) -> Layer:
    """Return another layer, whose weights take gradients."""
    w_in, w_out = inputs.matrices
    made = make(w_in.detach().clone(), w_out.detach().clone())
    for w in made.weights:
        w.requires_grad_()
    return Layer(inputs, made)


def results(inputs: layer.LayerInputs, made: Made) -> dict[str, Tensor]:
    """Return the output and all gradients, those of weights as a matrix with a row for each input of an expert."""
    out = made.run(inputs.x, inputs.idx, inputs.weights)
    x, weights, *of_weights = torch.autograd.grad(out, (inputs.x, inputs.weights, *made.weights), inputs.grad)
    names, found = ("w_in", "w_out"), {"out": out.detach(), "x": x, "routing weights": weights.reshape(1, -1)}
    for name, got in zip(names, of_weights, strict=True):
        found[name] = (got.mT if made.turned else got).reshape(1, -1)
    return found


# ---------------------------------------------------------------------- results


def cell(found: Found, figure: str) -> str:
    """Return µs, and the ratios to ep_ops and to ep_ops with quack."""
    if figure not in found:
        return ""
    ratios = [found.get(f"{figure}_{name}") for name in RATIOS.values()]
    while ratios and ratios[-1] is None:
        ratios.pop()
    texts = ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return f"{found[figure]:.1f}" + (f" ({', '.join(texts)})" if texts else "")


def table(run: Found) -> list[str]:
    """Return the lines of the table for a terminal."""
    results = run["results"]
    figures = ("us",) if run["benchmark"] == "rivals decode" else tuple(FIGURES)
    names = {"us": "", "forward_us": " forward", "forward_backward_us": " and backward"}
    sizes = f"{run['experts']} experts, top-{run['top_k']}, hidden {run['hidden']}, width {run['width']}"
    rows = [["µs (ratio to ep_ops) at T =", *(f"{one['tokens']}{names[f]}" for one in results for f in figures)]]
    floors = [one.get("floor_us" if f == "us" else f"floor_{f}") for one in results for f in figures]
    if any(floors):
        rows.append(["floor", *("" if floor is None else f"{floor:.1f}" for floor in floors)])
    layers = dict.fromkeys(row["layer"] for one in results for row in one["rows"])
    for name in layers:
        own = [{row["layer"]: row for row in one["rows"]}.get(name, {}) for one in results]
        rows.append([name, *(cell(row, f) for row in own for f in figures)])
    second = ["second ratio: to ep_ops, quack"] * (QUACK in layers)
    return [sizes, *text_table(rows), *second, *(f"{name}: {why}" for name, why in run["missing"].items())]


if __name__ == "__main__":
    sys.exit(main())
