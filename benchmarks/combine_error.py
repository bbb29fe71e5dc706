"""Compute the rounding error of a combine whose sums are sent in bfloat16 and in each format. Needs no GPU.

    python benchmarks/combine_error.py

Each of ``--ranks`` ranks has a partial sum of every token. Prints the error of their sum, relative to the norm of the
exact sum, for rows of three kinds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from ep_ops.commands.arguments import multiple_of, positive
from ep_ops.formats import COMBINE_FORMATS, dequantize, format_of, quantize

KINDS = ("normal", "outlier channels", "heavy tails")


def drawn(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return random fp32 rows. Outlier channels: one of 256 channels is 100 times as large in all rows. Heavy tails:
    Student's t with 3 degrees of freedom."""
    torch.manual_seed(seed)
    x = torch.randn(shape)
    if kind == "outlier channels":
        x[..., torch.randperm(shape[-1])[: shape[-1] // 256]] *= 100
    elif kind == "heavy tails":
        x = torch.distributions.StudentT(3.0).sample(shape)
    return x


def arrived(sums: Tensor, format: str) -> Tensor:
    """Return sums [rows, H] as their owner receives them, fp32."""
    if not format:
        return sums.bfloat16().float()
    form = format_of(format)
    return dequantize(*quantize(sums, form), form, torch.float32)


def error(kind: str, format: str, ranks: int, tokens: int, hidden: int, seed: int = 0) -> float:
    """Return the error of the rounded sums over ranks, relative to the norm of the exact sums."""
    parts = drawn(kind, (ranks, tokens, hidden), seed)
    exact = parts.double().sum(0)
    total = torch.zeros(tokens, hidden)
    for part in parts:
        total += arrived(part, format)
    return float((total.bfloat16().double() - exact).norm() / exact.norm())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=256, help="(default: %(default)s)")
    parser.add_argument("--hidden", type=multiple_of(128), default=7168, help="(default: %(default)s)")
    given = parser.parse_args(argv)
    print("| sums are sent as | " + " | ".join(KINDS) + " |\n|" + "---|" * (1 + len(KINDS)))
    for format in ("", *COMBINE_FORMATS):
        errors = (error(kind, format, given.ranks, given.tokens, given.hidden) for kind in KINDS)
        print(f"| {format or 'bfloat16'} | " + " | ".join(f"{100 * e:.2f} %" for e in errors) + " |")


if __name__ == "__main__":
    main()
