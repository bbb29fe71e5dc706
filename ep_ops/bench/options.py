"""Options of several benchmarks. Invalid values end the program with one line, before any process is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ep_ops.commands.arguments import add_device_options, choose_device, positive
from ep_ops.commands.launch import gpu_count

from .against import recorded


def numbers(text: str) -> tuple[int, ...]:
    """Parse positive ints, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def a_file(text: str) -> Path:
    """Parse the path of a file to be written, and check it before measuring for hours."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of some of the names `known`, separated by commas."""

    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := set(given) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is unknown; allowed: {' '.join(known)}")
        return given

    return names


def only(known: Collection[str]) -> str:
    """Return the help of an option `--only` for the names `known`."""
    return f"measure nothing but these: {' '.join(known)}"


def new_parser(about: str | None, benchmark: str = "", writes: str = "all results as JSON") -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have. `benchmark`: name for `ep-ops bench`, or "" for a
    script. `writes`: what the file of `--out` gets."""
    prog = f"ep-ops bench {benchmark}" if benchmark else None
    parser = argparse.ArgumentParser(prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=a_file, metavar="FILE", help=f"write {writes}, after each result")
    add_device_options(parser)
    parser.set_defaults(sharing=1)  # `read` counts the ranks of each GPU
    return parser


def add_sizes(options: argparse.ArgumentParser, tokens: int | tuple[int, ...] = 4096, width: bool = False) -> None:
    """Add the sizes of the workload; the defaults are those of DeepSeek-V3. `tokens`: one number, or several. `width`:
    also that of experts."""
    several = isinstance(tokens, tuple)
    shown = ",".join(map(str, tokens)) if isinstance(tokens, tuple) else tokens
    options.add_argument(
        "--tokens", type=numbers if several else positive, default=tokens, metavar="N,N" if several else "N",
        help=f"tokens of each rank (default: {shown})",
    )  # fmt: skip
    sizes = [
        ("hidden", 7168, "hidden size"), ("experts", 256, "experts of all ranks"), ("top-k", 8, "experts of a token"),
    ]  # fmt: skip
    for name, size, about in [*sizes, ("width", 2048, "intermediate size of each expert")] if width else sizes:
        options.add_argument(f"--{name}", type=positive, default=size, metavar="N", help=f"{about} (default: {size})")


def read(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, select the device and the number of ranks, and reject sizes that contradict each other.

    `args.sharing` becomes the number of ranks of each GPU. More ranks than GPUs share them.
    """
    args = options.parse_args(argv)
    asked, args.ranks = args.ranks, None
    choose_device(options, args)
    args.ranks = int(os.environ.get("WORLD_SIZE", asked or args.ranks))  # of torchrun
    here = int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks))
    args.sharing = -(-here // gpu_count()) if args.device == "cuda" else 1
    if args.sharing > 1 and args.backend == "auto":  # which takes the reference where ranks share a GPU
        args.backend = "cute"
    if (hidden := getattr(args, "hidden", None)) and hidden % 8:
        options.error(f"--hidden is {hidden}; allowed: a multiple of 8 (rows of 16 bytes)")
    if hasattr(args, "experts") and args.top_k > args.experts:
        options.error(f"--top-k is {args.top_k}; allowed: 1..{args.experts}, of --experts")
    if (size := getattr(args, "domain_size", None)) and args.ranks % size:
        options.error(f"--domain-size is {size}; it must divide the {args.ranks} ranks")
    return args


def add_against(options: argparse.ArgumentParser) -> None:
    """Add the option of benchmarks whose results can be compared with earlier ones."""
    options.add_argument(
        "--against", type=recorded, metavar="FILE", help="print ratios to a run that --out has written to FILE"
    )


def add_domain_options(options: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that can run across NVLink domains."""
    options.add_argument(
        "--domain-size",
        type=positive,
        metavar="N",
        help="declare NVLink domains of N ranks (EP_OPS_WIRE selects the transport between them)",
    )
    options.add_argument(
        "--staging-bytes",
        type=positive,
        metavar="N",
        help="bound on the symmetric memory of the kernels; larger calls run in rounds",
    )
