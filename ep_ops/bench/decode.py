"""Decode layers, compared with the time that reading their weights takes: `ep-ops bench decode`.

ep-ops bench decode --model qwen3-30b                          # on all GPUs of this host
ep-ops bench decode --model deepseek-v3 --experts 32 --ranks 1      # as many experts as a rank of eight has
ep-ops bench decode --model deepseek-v3 --experts 32 --ranks 1 --weights e4m3
torchrun --nproc-per-node 4 -m ep_ops bench decode --hidden 4096 --width 1536 --experts 128 --top-k 8 --out decode.json
ep-ops bench decode --device cpu --tokens 1,2 --hidden 64 --width 32 --experts 8 --top-k 2 --replays 3

A layer is dispatch, SwiGLU experts and combine, bfloat16, from tokens to weighted sums, without a router. CUDA graphs
of `--calls` layers are replayed. Each layer has a route of its own, so that weights come from memory. A figure is µs of
one layer, the median over replays of the slowest rank.

The floor is the time in which the weights of the experts that tokens name are read once, on the rank with most of them,
by a kernel that only reads. Its speed is measured first. It and the plain Triton kernels need triton.

On one rank layers of vLLM, flashinfer and DeepGEMM are measured as well, if these are installed.

With `--weights e4m3` experts have e4m3 weights with a scale for each 128 x 128, and rows are sent in e4m3. The layer
with torch's GEMMs, whose results others are compared with, has the same weights in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops import Communicator
from ep_ops.commands.compile import arch_of
from ep_ops.nn import expert_mlp, few_rows_mlp, few_rows_mlp_e4m3
from ep_ops.records import Dispatched

from . import other_layers
from .figures import text_table
from .layer import made
from .operators import relative_error
from .options import add_sizes, names_of, new_parser, only, positive, read
from .ranks import Found, Run, on_every_rank
from .timing import Timer
from .workloads import Workload, draw_route


class LayerSizes(NamedTuple):
    """Sizes of the MoE layers of a model."""

    hidden: int
    width: int
    experts: int
    top_k: int


MODELS = {"qwen3-30b": LayerSizes(2048, 768, 128, 8), "deepseek-v3": LayerSizes(7168, 2048, 256, 8)}
TOKENS = (1, 8, 32, 64, 128, 256)
NAMES = {
    "memory": "layer, kernels for few rows",
    "transposed": "the same, weights transposed in memory",
    "torch": "layer, torch's GEMMs",
    "triton": "layer, plain Triton kernels",
    "vllm": "vLLM's Triton kernels, no exchange",
    "flashinfer": "flashinfer's CuTe DSL layer, no exchange",
    "deep_gemm": "layer, DeepGEMM's masked GEMMs",
    "gemms": "GEMMs for few rows alone",
    "pair": "dispatch + combine alone",
}
"""What is measured -> its name in the table, in that order."""
READ_BYTES = 2 * 2**30
MAX_ERROR = {"bf16": 2e-2, "e4m3": 8e-2}
"""Weights -> largest relative error of a layer, compared with that of torch's GEMMs. With e4m3 weights, what the other
layer multiplies them by is quantized, too."""
FORMAT = "e4m3/128/fp32"


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "decode")
    add_sizes(options, TOKENS, width=True)
    options.add_argument(
        "--model",
        choices=MODELS,
        default="deepseek-v3",
        help="model whose sizes are the defaults (default: %(default)s)",
    )
    options.add_argument(
        "--weights", choices=MAX_ERROR, default="bf16", help="dtype of the experts' weights (default: %(default)s)"
    )
    options.add_argument("--calls", type=positive, default=10, help="layers in a graph (default: %(default)s)")
    options.add_argument("--replays", type=positive, default=30, help="timed replays (default: %(default)s)")
    options.add_argument("--only", type=names_of(NAMES), default=tuple(NAMES), metavar="NAME,NAME", help=only(NAMES))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    options.set_defaults(**MODELS[options.parse_args(argv).model]._asdict())
    args = read(options, argv)
    if args.weights == "e4m3" and (args.hidden % 128 or args.width % 128):
        options.error(f"--hidden is {args.hidden} and --width {args.width}; allowed for e4m3: multiples of 128")
    return on_every_rank(DecodeLayers.measure, args)


def quantize_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [El, N, K] of weights [El, K, N], sizes multiples of 128, and a scale, a power of two, for each
    128 x 128. The weights become what these stand for."""
    experts, depth, columns = w.shape
    codes = torch.empty(experts, columns, depth, dtype=torch.float8_e4m3fn, device=w.device)
    scales = torch.empty(experts, columns // 128, depth // 128, device=w.device)
    for e in range(experts):  # one at a time, which needs little memory
        blocks = w[e].t().float().view(columns // 128, 128, depth // 128, 128)
        scales[e] = (blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448).log2().ceil().exp2()
        by = scales[e][:, None, :, None]
        rounded = (blocks / by).to(codes.dtype)
        codes[e] = rounded.view(columns, depth)
        w[e] = (rounded.float() * by).view(columns, depth).t()
    return codes, scales


def gemm_kernels(
    sizes: LayerSizes, local_experts: int, ranks: int, tokens: Sequence[int], weights: str = "bf16",
    turned: bool = False,
) -> list[Any]:  # fmt: skip
    """Return the kernels for few rows of these numbers of tokens, with `turned` also those of transposed weights."""
    from ep_ops.backends.cute.local_kernels import Share, few_rows_e4m3_kernels, few_rows_kernels

    found, given = list[Any](), (local_experts, sizes.hidden, sizes.width)
    for share in (Share(count, sizes.top_k, ranks) for count in tokens):
        if weights == "e4m3":
            found += few_rows_e4m3_kernels(*given, share)
        else:
            for transposed in {False, turned}:
                found += few_rows_kernels(*given, "bf16", share, (transposed, transposed))
    return found


def has_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def read_speed(timer: Timer) -> float:
    """Return TB/s of a kernel that only reads, on the slowest rank."""
    from . import plain_triton

    buffer = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=timer.device)
    sink = torch.empty(1024, dtype=torch.int32, device=timer.device)
    sms = torch.cuda.get_device_properties(timer.device).multi_processor_count
    calls = [functools.partial(plain_triton.read, buffer, sink, blocks * sms) for blocks in (4, 8, 16)]
    return READ_BYTES / min(timer.row(call, 10).median for call in calls) / 1e6


def triton_experts(
    timer: Timer, weights: Sequence[Tensor], sent: Sequence[Dispatched]
) -> Callable[[Dispatched], Tensor]:  # fmt: skip
    """Return experts by plain Triton kernels, with the fastest tiles of a few for each of the two GEMMs.

    Args:
        weights: w_in and w_out.
        sent: dispatches with which tiles are timed.
    """
    from . import plain_triton

    w_in, w_out = weights
    width, hidden = w_out.shape[1:]
    rows = plain_triton.rows_of(max(int(each.route.counts.max()) for each in sent))
    inner = torch.zeros(sent[0].x.shape[0], width, dtype=w_out.dtype, device=w_out.device)

    def fastest(columns: int, depth: int, gemm: Callable[[tuple[int, ...], int], Any]) -> tuple[int, ...]:
        tiles = [tile for tile in plain_triton.TILES if columns % tile[0] == 0 and depth % 64 == 0]
        calls = {tile: functools.partial(gemm, tile) for tile in tiles}
        took = {tile: timer.row(call, len(sent)).median for tile, call in calls.items()}
        return min(took, key=took.__getitem__)

    def first_gemm(tile: tuple[int, ...], i: int) -> Tensor:
        return plain_triton.gate_up(sent[i % len(sent)].x, w_in, sent[i % len(sent)].route.offs, rows, tile)

    def second_gemm(tile: tuple[int, ...], i: int) -> Tensor:
        return plain_triton.down(inner, w_out, sent[i % len(sent)].route.offs, rows, tile)

    first, second = fastest(width, hidden, first_gemm), fastest(hidden, width, second_gemm)

    def experts(got: Dispatched) -> Tensor:
        made = plain_triton.gate_up(got.x, w_in, got.route.offs, rows, first)
        return plain_triton.down(made, w_out, got.route.offs, rows, second)

    return experts


class DecodeLayers(Run):
    """Measures all numbers of tokens, one after the other."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        sizes = {name: getattr(args, name) for name in ("model", *LayerSizes._fields, "calls", "replays")}
        facts = sizes | {"weights": args.weights, "read_tb_s": None, "results": []}
        super().__init__(device, args, table, benchmark="decode", dtype="bf16", **facts)
        self.has_triton = has_triton(device)
        self.codes: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        """e4m3 weights: w_in, in_scales, w_out, out_scales."""
        self.others: dict[str, other_layers.Layer] = {}

    def everything(self) -> None:
        args = self.args
        workload = Workload(max(args.tokens), args.hidden, args.experts, args.top_k)
        self.steps = len(args.tokens)
        if self.has_triton:
            self.found["read_tb_s"] = read_speed(self.timer)
            self.say(f"a kernel that only reads: {self.found['read_tb_s']:.2f} TB/s")
        with self.communicator(workload) as comm:
            turned = "transposed" in args.only and args.weights == "bf16"
            comm.warmup([(FORMAT, "rows")] if args.weights == "e4m3" else [])
            if comm.backend.name == "cute":
                from cute_kernels import prepare
                from ep_ops.backends.cute.launcher import processes_of_rank

                sizes = LayerSizes(args.hidden, args.width, args.experts, args.top_k)
                local = comm.num_local_experts, comm.world_size
                gemms = gemm_kernels(sizes, *local, args.tokens, args.weights, turned)
                prepare.prepare_all(gemms, arch_of(self.device), processes_of_rank(comm.exchange))
            self.weights = made(comm, args.width)
            self.turned = tuple(w.mT.contiguous().mT for w in self.weights) if turned else None
            if args.weights == "e4m3":
                w_in, w_out = self.weights
                self.codes = *quantize_weights(w_in), *quantize_weights(w_out)
            if self.world_size == 1:
                weights = self.codes or self.weights
                self.others = other_layers.installed(args.only, args.weights, comm, weights, self.say)
            for tokens in args.tokens:
                self.found["results"].append(self.size(comm, tokens))
                self.done += 1
                self.save()
            comm.check_errors()

    def size(self, comm: Communicator, tokens: int) -> Found:
        """Measure one number of tokens."""
        args = self.args
        draw = torch.Generator(device=self.device).manual_seed(self.rank)
        x = torch.randn(tokens, args.hidden, generator=draw, device=self.device).to(comm.dtype)
        workload = Workload(tokens, args.hidden, args.experts, args.top_k)
        routes = [draw_route(workload, self.rank, tokens + 1000 * i, self.device) for i in range(args.calls)]
        scores = torch.rand(tokens, args.top_k, generator=draw, device=self.device) + 0.1
        scores /= scores.sum(1, keepdim=True)
        given = [(x, route, scores) for route in routes]
        how: dict[str, Any] = {"max_tokens": tokens, "zeros": False}
        if self.codes:
            how |= {"format": FORMAT, "scales_as": "rows"}
        sent = [comm.dispatch(*each, **how) for each in given]
        y = torch.zeros(sent[0].x.shape, dtype=comm.dtype, device=self.device)
        counts = [each.route.counts for each in sent]
        named = self.worst({"named": sum(int((count > 0).sum()) for count in counts) / args.calls})["named"]
        found: Found = {"tokens": tokens, "named": named}
        if self.found["read_tb_s"]:
            found["floor_us"] = (
                named * 3 * args.hidden * args.width * (1 if self.codes else 2) / self.found["read_tb_s"] / 1e6
            )

        def layer(gemms: str, weights: tuple[Tensor, ...]) -> Callable[[int], Tensor]:
            return lambda i: expert_mlp(comm, *given[i], *weights, max_tokens=tokens, gemms=gemms).out

        def gemms(got: Dispatched) -> Tensor:
            if self.codes:
                return few_rows_mlp_e4m3(got.x, got.scales, *self.codes, got.route, comm.world_size)
            return few_rows_mlp(got.x, *self.weights, got.route, comm.world_size)

        def between(i: int, compute: Callable[[Dispatched], Tensor]) -> Tensor:
            got = comm.dispatch(*given[i], **how)
            return comm.combine(compute(got), got.route, got.weights)

        ways: dict[str, Callable[[int], Any]] = {
            "memory": (lambda i: between(i, gemms)) if self.codes else layer("memory", self.weights),
            "torch": layer("torch", self.weights),
            "gemms": lambda i: gemms(sent[i]),
            "pair": lambda i: between(i, lambda got: y),
        }
        if self.turned is not None:
            ways["transposed"] = layer("memory", self.turned)
        if self.has_triton and "triton" in args.only and not self.codes:
            experts = triton_experts(self.timer, self.weights, sent)
            ways["triton"] = lambda i: between(i, experts)
        expected = ways["torch"](0)
        for name in list(self.others):
            if self.agrees(name, given[0], expected):
                ways[name] = functools.partial(lambda run, i: run(*given[i]), self.others[name])
        for name in NAMES:
            if name in args.only and name in ways:
                timing = self.timer.row(self.timer.captured(ways[name], args.calls), args.replays).each(args.calls)
                found[name] = timing.median
                self.say(f"T={tokens} {name}: {timing.median:.1f} µs")
        others = [name for name in ("memory", "transposed", "triton") if name in ways]
        errors: dict[str, float] = {name: relative_error(ways[name](0), expected) for name in others}
        found["error"] = max(self.worst(errors).values())
        return found | {"correct": found["error"] <= MAX_ERROR[args.weights]}

    def agrees(self, name: str, given: tuple[Tensor, ...], expected: Tensor) -> bool:
        """Return whether another library's layer returns what torch's GEMMs do. One that does not, or that fails, is
        left out from here on."""
        try:
            error = relative_error(self.others[name](*given), expected)
            problem = "" if error <= MAX_ERROR[self.args.weights] else f"its results differ by {error:.1e}"
        except Exception as failure:  # an installation that does not support this GPU
            problem = str(failure)
        if problem:
            self.say(f"{name} is not measured: {problem}")
            del self.others[name]
        return not problem


def cell(result: Found, name: str) -> str:
    """Return µs, and the ratio to the floor if there is one."""
    if name not in result:
        return ""
    floor = result.get("floor_us")
    return f"{result[name]:.1f}" + (f" ({result[name] / floor:.2f})" if floor and name != "pair" else "")


def table(run: Found) -> list[str]:
    """Return the lines of the table for a terminal."""
    speed = f"; a kernel that only reads: {run['read_tb_s']:.2f} TB/s" if run["read_tb_s"] else ""
    sizes = f"{run['experts']} experts, top-{run['top_k']}, hidden {run['hidden']}, width {run['width']}"
    heading = f"{sizes}, weights {run['weights']}; graphs of {run['calls']}, median of {run['replays']} replays{speed}"
    results = run["results"]
    rows = [["µs (ratio to the floor) at T =", *(str(result["tokens"]) for result in results)]]
    rows.append(["experts named, busiest rank", *(f"{result['named']:.1f}" for result in results)])
    if any("floor_us" in result for result in results):
        rows.append(["floor: their weights, read once", *(f"{result['floor_us']:.1f}" for result in results)])
    for name, what in NAMES.items():
        if any(name in result for result in results):
            wrong = "" if all(result["correct"] for result in results) else " WRONG"
            rows.append([what + wrong, *(cell(result, name) for result in results)])
    return [heading, *text_table(rows)]


if __name__ == "__main__":
    sys.exit(main())
