"""Compare the loss of a small MoE language model with quantized rows with the loss in bfloat16.

benchmarks/training.py --steps 300 --out training.json --plot training.svg        # all GPUs, or two CPU processes
benchmarks/training.py --device cpu --hidden 128 --sequences 8 --steps 200
benchmarks/training.py --only wire:e4m3/32/mx --combine-format wire:e4m3/32/mx    # quantized both ways

The model and the language are those of `ep-ops demo`, except that a tenth of the words to be predicted are random, so
that the loss stays above 0 as that of a natural language does. All runs begin with the same weights and use the same
batches. Before training, the layer's output in each format is compared with bfloat16, on the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ep_ops import Communicator
from ep_ops.bench.figures import pyplot, save
from ep_ops.bench.options import a_file, names_of, new_parser, read
from ep_ops.bench.ranks import Found, Run, on_every_rank
from ep_ops.bench.workloads import Workload
from ep_ops.commands.arguments import multiple_of, positive
from ep_ops.commands.demo import LENGTH, VOCABULARY, Language, Model, training
from ep_ops.formats import COMBINE_FORMATS
from ep_ops.nn import MoELayer

FORMATS = ("", "e4m3/row/fp32", "wire:e4m3/128/pow2", "wire:e4m3/32/mx")
MAX_OUTPUT_ERROR = 0.08
"""Largest relative error of the layer's output compared with bfloat16, with untrained weights. The root mean square
error of e4m3 numbers is 2.7 %, and an output is a product of two sums of them (of codes and codes in
``e4m3/row/fp32``)."""
MAX_LOSS_GAP = 0.05
"""Largest difference in nats per token from bfloat16, in the mean of the last tenth of the steps."""
EXPERTS, TOP_K = 8, 2  # of each rank; of each token
NOISE = 0.1  # of the words to be predicted


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__)
    options.add_argument("--steps", type=positive, default=300)
    options.add_argument("--hidden", type=multiple_of(128), help="a multiple of 128 (default: 512; on CPUs 128)")
    options.add_argument("--sequences", type=positive, help=f"of {LENGTH} tokens, a rank (default: 64; on CPUs 8)")
    options.add_argument("--only", type=names_of(FORMATS[1:]), default=FORMATS[1:], metavar="NAME,NAME",
                         help=" ".join(FORMATS[1:]))  # fmt: skip
    sums = "format in which combines send their sums, in all runs except bfloat16's: " + " ".join(COMBINE_FORMATS)
    options.add_argument("--combine-format", choices=COMBINE_FORMATS, default="", metavar="NAME", help=sums)
    options.add_argument("--plot", type=a_file, metavar="FILE", help="draw the curves (SVG)")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    args = read(parser(), argv)
    on_gpu = args.device == "cuda"
    args.hidden = args.hidden or (512 if on_gpu else 128)
    args.sequences = args.sequences or (64 if on_gpu else 8)
    return on_every_rank(measure, args)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    sizes = {name: getattr(args, name) for name in ("steps", "hidden", "sequences", "combine_format")}
    with Run(device, args, table, benchmark="training", dtype="bf16", **sizes, results=[]) as run:
        workload = Workload(args.sequences * LENGTH, args.hidden, EXPERTS * run.world_size, TOP_K)
        with run.communicator(workload) as comm:
            asked = ("", *args.only)
            comm.warmup([(name, "") for name in dict.fromkeys((*asked, args.combine_format)) if name])
            run.steps = args.steps * len(asked)
            for name in asked:
                run.found["results"].append(train(run, comm, name))
                judge(run.found["results"])
                run.save()
            comm.check_errors()
        if run.rank == 0 and args.plot:
            plot(run.found, args.plot)


def train(run: Run, comm: Communicator, name: str) -> Found:
    """Train one model; return the losses of all ranks together for each step, in nats per token."""
    args, device = run.args, comm.device
    torch.manual_seed(0)  # the same on every rank
    moe = MoELayer(comm, args.hidden, format=name, combine_format=args.combine_format if name else "")
    model = Model(args.hidden, moe, torch.bfloat16).to(device)
    error = output_error(run, comm, model)
    language = Language(comm.rank, args.sequences, device)
    losses: list[float] = []
    for step, (_, loss) in enumerate(training(model, lambda: batch(language), args.steps)):
        losses.append(round(loss, 4))
        run.done += 1
        if step % 50 == 0 or step + 1 == args.steps:
            run.say(f"{name or 'bf16'}: step {step + 1}, loss {losses[-1]:.3f}")
    tail = losses[-max(1, args.steps // 10) :]
    return {"format": name, "output_error": error, "last": sum(tail) / len(tail), "losses": losses}


def batch(language: Language) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of the language's next batch. A part of the targets is random."""
    inputs, targets = language.batch()
    words = torch.randint(VOCABULARY, targets.shape, generator=language.draws)
    noisy = torch.rand(targets.shape, generator=language.draws) < NOISE
    return inputs, torch.where(noisy.to(targets.device), words.to(targets.device), targets)


def output_error(run: Run, comm: Communicator, model: Model) -> float:
    """Return the relative error of the layer's output in its format, compared with bfloat16, in norm: the largest of
    all ranks."""
    moe = model.moe
    plain = MoELayer(comm, run.args.hidden)
    plain.load_state_dict(moe.state_dict())
    draw = torch.Generator(device=comm.device).manual_seed(comm.rank)
    x = torch.randn(comm.max_tokens_per_rank, run.args.hidden, generator=draw, device=comm.device).bfloat16()
    with torch.no_grad():
        expected = plain(x).double()
        return run.worst({"error": float((moe(x).double() - expected).norm() / expected.norm())})["error"]


def judge(results: list[Found]) -> None:
    """Add how far each is from the first one, which is bfloat16's, and whether that is as near as it should be."""
    for result in results:
        result["gap"] = result["last"] - results[0]["last"]
        result["correct"] = result["output_error"] <= MAX_OUTPUT_ERROR and abs(result["gap"]) <= MAX_LOSS_GAP


def table(run: Found) -> list[str]:
    return [
        f"{result['format'] or 'bf16':20} output off by {100 * result['output_error']:.1f} %, loss "
        f"{result['losses'][0]:.3f} -> {result['last']:.4f} ({result['gap']:+.4f})"
        + ("" if result["correct"] else "  WRONG")
        for result in run["results"]
    ]


def plot(run: Found, path: Path) -> None:
    figure, axis = pyplot().subplots(figsize=(7, 4.5))
    for result in run["results"]:
        axis.plot(range(1, run["steps"] + 1), result["losses"], label=result["format"] or "bf16", linewidth=1)
    axis.set(xlabel="step", ylabel="loss, nats a token", yscale="log")
    axis.legend()
    save(figure, path, f"{run['world_size']} x {run['machine']['device']}, backend {run['machine']['backend']}")


if __name__ == "__main__":
    sys.exit(main())
