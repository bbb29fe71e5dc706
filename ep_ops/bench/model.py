"""A model of larger systems than were measured: `ep-ops bench model`. Needs no GPU.

From recorded runs it takes speeds and constants, from others figures of networks. It says how long dispatch and combine
would take on 2 to 576 ranks, what they move, and how far it is off wherever something was measured or published.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_ops.backends.cute.sm_model import TokenTraffic

from . import model_report
from .model_memory import Layout, in_rounds, many_bytes, staging
from .model_stated import PAIRS_ON_2, PUBLISHED, WIRES, Published, gb200
from .model_times import (
    FEW,
    MANY,
    Gpu,
    Wire,
    few_us,
    layout_of,
    many_us,
    measured_gpu,
    recorded_us,
    sizes,
)
from .model_traffic import combine_bytes, dispatch_bytes, expected, few_bytes, reached_domains

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GIB = 2**30
H200_SMS = 132
DOMAIN_SIZES = {8: (16, 32, 64, 128, 256, 512), 72: (144, 288, 576)}
ONE_DOMAIN = (2, 4, 8, 16, 32, 64, 72)


RUNS = ("throughput-4", "throughput-2", "throughput-4-skew", "latency-4")
"""Recorded runs that it reads: constants are from the first and the last."""


def predictions(gpu: Gpu, many_tokens: int, few_tokens: int, limit: int) -> list[dict[str, Any]]:
    """One domain, and several with each wire, of 8 and of 72 ranks."""
    cases: list[tuple[Wire | None, int, tuple[int, ...]]] = [(None, 72, ONE_DOMAIN)]
    cases += [(wire, size, ranks) for wire in WIRES for size, ranks in DOMAIN_SIZES.items()]
    found = []
    for wire, size, ranks in cases:
        for many, few in zip(sizes(ranks, size, many_tokens), sizes(ranks, size, few_tokens), strict=True):
            many = in_rounds(many, limit)
            sent, back = dispatch_bytes(many), combine_bytes(many)
            few_sent = few_bytes(few, False, wire.rows if wire else 1)
            found.append(
                {
                    "wire": wire.name if wire else None, "domains": many.domains, "domain_ranks": many.domain_ranks,
                    "ranks": many.ranks, "experts": many.experts, "rounds": many.rounds, "sms": sms(many),
                    "dispatch_us": many_us(gpu, wire, many, "dispatch"),
                    "combine_us": many_us(gpu, wire, many, "combine"),
                    "few_dispatch_us": few_us(gpu, few, False, wire), "few_combine_us": few_us(gpu, few, True, wire),
                    "near_bytes": sent.near_rows, "far_bytes": sent.far_rows,
                    "near_other_bytes": sent.near_other, "far_other_bytes": sent.far_other,
                    "combine_near_other_bytes": back.near_other, "combine_far_other_bytes": back.far_other,
                    "puts": sent.puts, "few_puts": few_sent.puts, "few_near_bytes": few_sent.near,
                    "few_far_bytes": few_sent.far, "staging_bytes": many_bytes(many) if many.domains > 1 else None,
                    "few_staging_bytes": staging(few)["few tokens"] if few.domains > 1 else None,
                }
            )  # fmt: skip
    return found


def sms(layout: Layout) -> list[int] | None:
    """Default budgets of a dispatch and a combine on 132 multiprocessors. None with several domains, for which there
    are no kernels."""
    if layout.domains > 1:
        return None
    held, slices = layout.experts // layout.ranks, -(-layout.row_bytes // 4096)
    budget = TokenTraffic.of((held,) * layout.ranks, layout.top_k, layout.row_bytes, slices)
    return [budget.dispatch_sms(H200_SMS), budget.combine_sms(H200_SMS)]


def measured_errors(gpu: Gpu, many_runs: Sequence[dict[str, Any]], few: dict[str, Any]) -> list[dict[str, Any]]:
    """Each recorded result of an operation that the model has, with the backend's own budgets, and what the model says:
    of many tokens with the rows that were counted. `used`: its constant is from there."""
    found = []
    for run in many_runs:
        for result in run["results"]:
            if result["op"] in MANY and result["given_sms"] is None and "graph_us" in result:
                what = {key: result[key] for key in ("op", "tokens", "hidden", "top_k", "routing")}
                used = run is many_runs[0] and result["tokens"] >= 512 and result["hidden"] == 7168
                used = used and result["top_k"] == 8 and result["routing"] == "balanced"
                us = recorded_us(gpu, result, run["world_size"])
                found.append(what | {"ranks": run["world_size"], "us": result["graph_us"], "model": us, "used": used})
    timed = [
        (result["op"], few["world_size"], result["tokens"], result["us"])
        for result in few["results"]
        if result["op"] in ("dispatch", "combine", "pair") and result["deal"] is None
    ]
    for op, ranks, tokens, took in [*timed, *(("pair", 2, tokens, took) for tokens, took in PAIRS_ON_2.items())]:
        layout = layout_of(few | {"world_size": ranks}, tokens)
        us = sum(
            few_us(gpu, layout, kind == "combine") for kind in (("dispatch", "combine") if op == "pair" else (op,))
        )
        what = {"op": "few " + op, "tokens": tokens, "hidden": layout.hidden, "top_k": layout.top_k}
        what |= {"routing": "balanced", "ranks": ranks, "us": took, "model": us}
        found.append(what | {"used": op in FEW and tokens == 1})
    return found


def beside(gpu: Gpu, entry: Published, limit: int) -> dict[str, Any]:
    """A published figure, and the model's in the same unit."""
    on = gb200(gpu) if entry.gpu == "GB200" else gpu
    layout = entry.layout
    few = entry.kind.startswith("few ")
    if few:
        us = few_us(on, layout, entry.kind == "few combine", entry.wire)
    else:
        us = many_us(on, entry.wire, in_rounds(layout, limit), entry.kind)
    reached = expected(layout).copies / layout.tokens if entry.unit == "GB/s of ranks" else reached_domains(layout)
    value = us if entry.unit == "µs" else layout.tokens * reached * layout.row_bytes / us / 1e3
    return {
        "who": entry.who, "kind": entry.kind, "domains": layout.domains, "domain_ranks": layout.domain_ranks,
        "tokens": layout.tokens, "wire": entry.wire.name if entry.wire else None, "unit": entry.unit,
        "published": entry.value, "model": value,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="ep-ops bench model", description=__doc__)
    options.add_argument("--runs", type=Path, default=RECORDED, help="folder of recorded runs (%(default)s)")
    options.add_argument("--tokens", type=int, default=4096, help="of a rank, many (%(default)s)")
    options.add_argument("--few-tokens", type=int, default=128, help="of a rank, few (%(default)s)")
    options.add_argument("--staging", type=float, default=4.0, help="GiB for many tokens' staging (%(default)s)")
    options.add_argument("--out", type=Path, metavar="FILE", help="write what was found (JSON), and plots beside it")
    args = options.parse_args(argv)

    try:
        *many, few = [json.loads((args.runs / f"{name}.json").read_text()) for name in RUNS]
    except (FileNotFoundError, NotADirectoryError) as missing:
        print(f"ep-ops bench model: there is no {missing.filename}; --runs names the folder", file=sys.stderr)
        return 2
    if args.tokens < 1 or args.few_tokens < 1 or not 0 < args.staging < math.inf:
        print("ep-ops bench model: --tokens, --few-tokens and --staging must be positive", file=sys.stderr)
        return 2
    gpu, limit = measured_gpu(many[0], few), int(args.staging * GIB)
    try:
        predicted = predictions(gpu, args.tokens, args.few_tokens, limit)
    except ValueError as too_little:
        print(f"ep-ops bench model: --staging is {args.staging:g}; {too_little}", file=sys.stderr)
        return 2
    found = {
        "version": 1,
        "tokens": args.tokens,
        "few_tokens": args.few_tokens,
        "staging_limit": limit,
        "gpu": dataclasses.asdict(gpu),
        "gb200": gb200(gpu).told,
        "wires": [dataclasses.asdict(wire) for wire in WIRES],
        "predictions": predicted,
        "measured": measured_errors(gpu, many, few),
        "published": [beside(gpu, entry, limit) for entry in PUBLISHED],
    }
    print(model_report.text(found))
    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(model_report.as_json(found))
        except OSError as error:
            print(f"ep-ops bench model: --out {args.out} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
        try:
            print(f"written: {args.out}, {model_report.plot(found, args.out.with_suffix('.svg'))}")
        except ImportError as error:
            print(f"written: {args.out}; no plot: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
