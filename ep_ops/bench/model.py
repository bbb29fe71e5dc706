"""Predict time, traffic and memory of dispatch and combine on up to 576 ranks: `ep-ops bench model`. Needs no GPU.

Speeds of NVLink and constants of the operations are those measured on 4 x H200 (ep_ops/backends/cute/rates.py), from
which the numbers of multiprocessors follow as well; figures of networks are published ones. `benchmarks/scale_model.py`
derives the constants from recorded runs and compares the model with measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

from ep_ops.backends.cute.rates import H200, SM, Gpu
from ep_ops.backends.cute.residency import most_pulling
from ep_ops.backends.cute.sm_model import TokenTraffic, default_budget
from ep_ops.backends.cute.tuning import Tuning

from .figures import text_table
from .model_formulas import (
    Layout,
    WireSpeed,
    few_bytes,
    few_us,
    in_rounds,
    many_bytes,
    many_staging,
    many_us,
    sizes,
    staging,
)
from .options import a_file, positive
from .ranks import write

Found = dict[str, Any]

GIB = 2**30
H200_SMS = 132
DOMAIN_SIZES = {8: (16, 32, 64, 128, 256, 512), 72: (144, 288, 576)}
ONE_DOMAIN = (2, 4, 8, 16, 32, 64, 72)

INFINIBAND = WireSpeed(
    "InfiniBand, GPU-initiated",
    rate=45e9,
    latency=8.35,
    put=0.02,
    source="one 400 Gb/s NIC a GPU: 45 of its 50 GB/s (assumed; DeepEP V2's 90 and 61 GB/s on 2 and 4 hosts, own tokens"
    " included, are 45 across); put and signal 16.7 µs there and back (NCCL GIN on H100, arXiv 2511.15076);"
    " 50 million puts a second (assumed)",
)
EFA = WireSpeed(
    "EFA, proxies",
    rate=43.5e9,
    latency=20.0,
    put=0.4,
    rows=32,
    source="rails of two p5 hosts, all to all: 43.5 GB/s in puts of 1 MB, 13.8 in puts of 8 KB (UCCL), which is 0.4 µs"
    " a put; 20 µs from put to signal (assumed: no figure was found); up to 32 rows of few tokens for a rank in a put,"
    " which a block puts together at 50 GB/s (assumed)",
)
WIRES = (INFINIBAND, EFA)


def model(gpu: Gpu, many_tokens: int, few_tokens: int, limit: int) -> Found:
    """Return the predictions and what they rest on. `limit`: bytes of staging for the throughput kernels."""
    return {
        "version": 1,
        "tokens": many_tokens,
        "few_tokens": few_tokens,
        "staging_limit": limit,
        "gpu": dataclasses.asdict(gpu),
        "sm": dataclasses.asdict(SM),
        "wires": [dataclasses.asdict(wire) for wire in WIRES],
        "predictions": predictions(gpu, many_tokens, few_tokens, limit),
    }


def predictions(gpu: Gpu, many_tokens: int, few_tokens: int, limit: int) -> list[dict[str, Any]]:
    """Return predictions for one domain, and for several domains of 8 and of 72 ranks with each wire."""
    cases: list[tuple[WireSpeed | None, int, tuple[int, ...]]] = [(None, 72, ONE_DOMAIN)]
    cases += [(wire, size, ranks) for wire in WIRES for size, ranks in DOMAIN_SIZES.items()]
    found = []
    for wire, size, ranks in cases:
        for many, few in zip(sizes(ranks, size, many_tokens), sizes(ranks, size, few_tokens), strict=True):
            many = in_rounds(many, limit)
            sent, few_sent = many_bytes(many, "dispatch"), few_bytes(few, False, wire.rows if wire else 1)
            found.append(
                {
                    "wire": wire.name if wire else None, "domains": many.domains, "domain_ranks": many.domain_ranks,
                    "ranks": many.ranks, "experts": many.experts, "rounds": many.rounds, "sms": sms(many),
                    "dispatch_us": many_us(gpu, wire, many, "dispatch"),
                    "combine_us": many_us(gpu, wire, many, "combine"),
                    "few_dispatch_us": few_us(gpu, few, False, wire), "few_combine_us": few_us(gpu, few, True, wire),
                    "near_bytes": sent.near, "far_bytes": sent.far, "puts": sent.puts, "few_puts": few_sent.puts,
                    "few_near_bytes": few_sent.near, "few_far_bytes": few_sent.far,
                    "staging_bytes": many_staging(many) if many.domains > 1 else None,
                    "few_staging_bytes": staging(few)["few tokens"] if few.domains > 1 else None,
                }
            )  # fmt: skip
    return found


def sms(layout: Layout) -> list[int] | None:
    """Return the default budgets of a dispatch and a combine on 132 multiprocessors, or None for several domains."""
    if layout.domains > 1:
        return None
    traffic = TokenTraffic.of(layout.problem, -(-layout.row_bytes // 4096))
    tuning, most = Tuning(H200.name, layout.ranks), most_pulling(layout.problem, H200_SMS)
    budget = default_budget(traffic, tuning, H200_SMS, most, None, None)
    return [budget.dispatch, budget.combine]


def where(entry: Found) -> str:
    if entry["domains"] == 1:
        return f"one of {entry['domain_ranks']}"
    return f"{entry['domains']} x {entry['domain_ranks']}, {(entry['wire'] or '').split(',')[0]}"


def gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f}"


def prediction_rows(found: Found) -> list[list[str]]:
    heading = [
        "domains", "dispatch µs", "combine µs", "SMs", "rounds", "NVLink MB", "network MB", "staging GiB",
        "few: dispatch µs", "combine µs", "network MB", "staging GiB",
    ]  # fmt: skip
    rows = [heading]
    for p in found["predictions"]:
        rows.append(
            [
                where(p), f"{p['dispatch_us']:.0f}", f"{p['combine_us']:.0f}",
                ", ".join(map(str, p["sms"] or ())), str(p["rounds"]),
                f"{p['near_bytes'] / 1e6:.0f}", f"{p['far_bytes'] / 1e6:.0f}", gib(p["staging_bytes"]),
                f"{p['few_dispatch_us']:.0f}", f"{p['few_combine_us']:.0f}",
                f"{p['few_far_bytes'] / 1e6:.1f}", gib(p["few_staging_bytes"]),
            ]
        )  # fmt: skip
    return rows


def assumptions(found: Found) -> list[str]:
    constants = ", ".join(f"{op} {us:.1f}" for op, us in found["gpu"]["constants"].items())
    of_sm = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in found["sm"].items())
    return [
        "Even routing, hidden 7168, bf16, top-8, experts: the multiple of the ranks from 256 on; many:"
        f" {found['tokens']} tokens a rank, few: {found['few_tokens']}; staging of many tokens at most"
        f" {found['staging_limit'] / 2**30:g} GiB",
        f"GPU: {found['gpu']['source']}; constants in µs: {constants}",
        "Numbers of SMs follow from the same speeds, from the table of measured choices, and from the work of one SM,"
        f" in bytes per second, in seconds, and in relation to other work: {of_sm}",
        *(f"{wire['name']}: {wire['source']}" for wire in found["wires"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="ep-ops bench model", description=__doc__)
    options.add_argument(
        "--tokens",
        type=positive,
        default=4096,
        metavar="N",
        help="tokens of each rank in training (default: %(default)s)",
    )
    options.add_argument(
        "--few-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="tokens of each rank in decode (default: %(default)s)",
    )
    options.add_argument(
        "--staging",
        type=float,
        default=4.0,
        metavar="GIB",
        help="bound on staging in training, GiB (default: %(default)s)",
    )
    options.add_argument("--out", type=a_file, metavar="FILE", help="write the predictions as JSON")
    args = options.parse_args(argv)
    if not 0 < args.staging < math.inf:
        options.error(f"--staging is {args.staging:g}; allowed: a positive number of GiB")
    try:
        found = model(H200, args.tokens, args.few_tokens, int(args.staging * GIB))
    except ValueError as too_little:
        options.error(f"--staging is {args.staging:g}; {too_little}")
    print(*assumptions(found), "", *text_table(prediction_rows(found)), sep="\n")
    if args.out:
        write(found, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
