"""The command line: ``ep-ops demo``, ``ep-ops compile``, ``ep-ops doctor``, ``ep-ops bench``."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
from collections.abc import Sequence

from ep_ops.commands.arguments import add_device_options, choose_device, multiple_of, positive
from ep_ops.commands.launch import NO_OUTPUT, launch, output_is_lost

TOOLCHAIN = "cutlass", "tvm_ffi", "cuda"
"""Packages that the extras cu12 and cu13 install."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of ``ep-ops``.

    Args:
        argv: the command's arguments. None: those of the process.

    Returns:
        Exit code: 0 done, 1 failed, 2 wrong usage or a missing optional package, 74 output cannot be written,
        130 interrupted, 143 terminated.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except OSError:
        if not output_is_lost():
            raise
        return NO_OUTPUT
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in TOOLCHAIN:
            raise
        hint = "pip install 'ep_ops[cu13]' (cu12 if torch.version.cuda begins with 12)"
        print(f"ep-ops {args[0]} needs {package}: {hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted; all processes have ended", file=sys.stderr)
        return 143 if isinstance(interrupt, Terminated) else 130


def _run(args: list[str]) -> int:
    from torch.multiprocessing import ProcessExitedException

    try:
        if args[:1] == ["bench"]:
            return bench(args[1:])  # the benchmarks have their own options
        options = parser().parse_args(args)
        return options.run(options)
    except ProcessExitedException as failure:
        if failure.exit_code != NO_OUTPUT:
            raise
        return NO_OUTPUT


def parser() -> argparse.ArgumentParser:
    from ep_ops import __version__
    from ep_ops.commands.compile import add_options

    top = argparse.ArgumentParser(
        prog="ep-ops", description="Expert-parallel dispatch and combine as PyTorch operators."
    )
    top.add_argument("--version", action="version", version=f"ep_ops {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="train a small MoE model on all GPUs, or on two CPU processes, and check it against a dense model"
    )
    add_device_options(demo)
    demo.add_argument(
        "--decode", action="store_true", help="run decode steps instead of training, on GPUs in a CUDA graph"
    )
    demo.add_argument("--steps", type=positive, help="training steps (default: 60), or decode steps (300, CPU: 20)")
    demo.add_argument(
        "--tokens", type=positive, default=8, help="tokens of each rank in a decode step (default: %(default)s)"
    )
    demo.add_argument(
        "--sequences", type=positive, help="sequences of 32 tokens, per rank and step (default: 128, CPU: 16)"
    )
    demo.add_argument("--hidden-size", type=multiple_of(32), help="a multiple of 32 (default: 512, CPU: 64)")
    demo.add_argument("--eager", action="store_true", help="do not compile the model")
    demo.set_defaults(run=run_demo, parser=demo)

    ahead = commands.add_parser(
        "compile",
        help="compile a communicator's kernels into the disk cache, with all cores; needs no GPU",
        description="Compile the kernels of an ep_ops.Communicator with these arguments into EP_OPS_CACHE_DIR.",
    )
    ahead.add_argument("--ranks", type=positive, required=True, help="number of ranks of the communicator")
    add_options(ahead)
    ahead.add_argument(
        "--format", action="append", default=[], metavar="NAME=LAYOUT",
        help="also compile for rows in a format, such as e4m3/128/pow2=columns (repeatable; default: its first layout)",
    )  # fmt: skip
    ahead.add_argument("--arch", type=arch, help="such as sm_90a or sm_100a (default: that of this host's GPU)")
    ahead.set_defaults(run=run_compile)

    doctor = commands.add_parser(
        "doctor", help="print versions, GPUs, how they are connected, and the backend that will be used"
    )
    doctor.set_defaults(run=run_doctor)
    commands.add_parser(
        "bench", help=f"measure, or model: ep-ops bench {'|'.join(BENCHMARKS)} [options]", add_help=False
    )
    return top


def arch(text: str) -> str:
    if re.fullmatch(r"sm_(9\d|1\d\d)a", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an architecture such as sm_90a or sm_100a; allowed: sm_90a and newer"
        )
    return text


def run_demo(args: argparse.Namespace) -> int:
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    from ep_ops.commands.decode import decode
    from ep_ops.commands.demo import Options, train

    choose_device(args.parser, args)
    on_gpu = args.device == "cuda"
    steps, hidden = (300 if on_gpu else 20, 1024) if args.decode else (60, 512)
    options = Options(
        device=args.device,
        ranks=args.ranks,
        steps=args.steps or steps,
        tokens=args.tokens,
        sequences=args.sequences or (128 if on_gpu else 16),
        hidden_size=args.hidden_size or (hidden if on_gpu else 64),
        backend=args.backend,
        compiled=not args.eager,
    )
    signal.signal(signal.SIGTERM, terminate)
    try:
        launch(decode if args.decode else train, options.ranks, options)
    except (ProcessRaisedException, ProcessExitedException) as failure:
        if getattr(failure, "exit_code", None) == NO_OUTPUT:
            return NO_OUTPUT
        print(f"\nep-ops demo failed:{failure}", file=sys.stderr)
        return 1
    return 0


def terminate(number: int, frame: object) -> None:
    """Unwind as for Ctrl-C, so that the started processes end with this one."""
    raise Terminated


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM."""


def run_compile(args: argparse.Namespace) -> int:
    from ep_ops.commands import compile as ahead

    arch = args.arch or ahead.arch_here()
    if arch is None:
        print("ep-ops compile: torch sees no GPU on this host; pass --arch, for example --arch sm_90a", file=sys.stderr)
        return 2
    try:
        config = ahead.checked_config(ahead.config_of(args), args.ranks)
        formats = ahead.formats_of(args.format, args.hidden_size)
        count = ahead.compile_communicator(config, arch, formats)
    except (ValueError, RuntimeError) as rejected:
        print(f"ep-ops compile: {rejected}", file=sys.stderr)
        return 2
    print(f"{count} kernels for {arch} are in {ahead.folder()}")
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    from ep_ops.commands.doctor import report

    print(report())
    return 0


BENCHMARKS = {
    "throughput": "throughput kernels, forward and backward, compared with the link, NCCL and eager PyTorch",
    "latency": "latency kernels in CUDA graphs: whole and split operations, pairs, compared with NCCL",
    "decode": "a whole decode layer in CUDA graphs, compared with the time that reading its weights takes",
    "layer": "a whole layer, forward and backward, with receive buffers of the exact size and larger ones",
    "tune": "find the numbers of blocks with which operations take the least time, and write them to a file",
    "gemms": "find the configurations with which quack's GEMMs take the least time, and write them to a file",
    "model": "predict times, bytes and memory on up to 576 ranks; runs nothing",
}
BENCHMARK_NOTES = (
    "All except model run on all GPUs of this host, one process for each, or on the ranks of torchrun. Without GPUs,",
    "or with --device cpu, all but tune and gemms run the reference backend on CPU processes, whose times say nothing",
    "about GPUs; use small sizes: throughput --preset tiny,",
    "latency --tokens 1,2 --hidden 64 --experts 8 --top-k 2 --replays 3.",
    "They print results as they go, and with --out FILE write them as JSON after each result.",
)


def bench(argv: list[str]) -> int:
    """Run ``ep_ops.bench.<argv[0]>.main(argv[1:])``. No other command imports that package."""
    usage = argparse.ArgumentParser(
        prog="ep-ops bench", epilog="\n".join(BENCHMARK_NOTES), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = usage.add_subparsers(required=True, dest="kind", title="benchmarks (--help after one lists its options)")
    for kind, what in BENCHMARKS.items():
        kinds.add_parser(kind, help=what, add_help=False)
    return importlib.import_module(f"ep_ops.bench.{usage.parse_args(argv[:1]).kind}").main(argv[1:]) or 0
