"""Command line options that several commands have, and parsers of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ep_ops.commands.launch import gpu_count


def positive(text: str) -> int:
    """Parse a positive int."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an int of at least 1")
    return number


def multiple_of(factor: int) -> Callable[[str], int]:
    """Return a parser of positive multiples of a number."""

    def multiple(text: str) -> int:
        number = positive(text)
        if number % factor:
            raise argparse.ArgumentTypeError(f"{text} is not a multiple of {factor}")
        return number

    return multiple


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select devices, processes and backend; `choose_device` fills in what is not given."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument(
        "--backend", choices=("auto", "cute", "reference"), default="auto", help="auto: cute where it can run"
    )
    parser.add_argument("--ranks", type=positive, help="processes on this host (default: one per GPU; CPU: 2)")


def choose_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Replace the defaults of `add_device_options` by what this host has, and reject what it does not have."""
    gpus = gpu_count()
    if args.device == "auto":
        args.device = "cuda" if gpus else "cpu"
    if args.device == "cuda" and not gpus:
        parser.error("--device is cuda, but torch sees no GPU; use --device cpu")
    if args.device == "cpu" and args.backend == "cute":
        parser.error("--backend is cute, which runs on GPUs; --device is cpu, or torch sees no GPU")
    args.ranks = args.ranks or (gpus if args.device == "cuda" else 2)
    if args.device == "cuda" and args.ranks > gpus:
        parser.error(f"--ranks is {args.ranks}; allowed: at most {gpus}, the number of GPUs")
