"""Compare the scale model with recorded and with published figures, and draw it.

    python benchmarks/scale_model.py --out benchmarks/results/model.json     # also writes model.svg
    python benchmarks/scale_model.py --markdown                              # the tables of results/model.md

Constants of the model come from recorded runs of both benchmarks on 4 x H200; its other figures are in
ep_ops/backends/cute/rates.py and ep_ops/bench/model.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ep_ops.backends.cute.rates import MEMORY, Gpu, passing_rows
from ep_ops.bench.against import recorded
from ep_ops.bench.figures import log_ticks, markdown_table, pyplot, save, text_table
from ep_ops.bench.model import EFA, GIB, INFINIBAND, Found, assumptions, model, prediction_rows, where
from ep_ops.bench.model_formulas import Layout, WireSpeed, expected, few_us, in_rounds, many_us, reached_domains
from ep_ops.bench.options import a_file
from ep_ops.bench.ranks import rounded, write

RECORDED = Path(__file__).resolve().parent / "results"

RUNS = ("throughput-4", "throughput-2", "throughput-4-skew", "latency-4")
"""Recorded runs that it reads: constants are from the first and the last."""
MANY = ("dispatch", "dispatch_planned", "combine", "combine_gathered")
"""Operations on many tokens that the model has, by the benchmark's names."""
FEW = ("dispatch", "combine")

PAIRS_ON_2 = {1: 8.68, 8: 9.24, 32: 11.16, 64: 15.19, 128: 23.01}
"""Tokens of a rank -> µs of a dispatch and a combine by the latency kernels on 2 H200s (results/latency.md)."""


def gb200(h200: Gpu) -> Gpu:
    """Return a GPU for the comparison with figures of GB200. Its constants are those of the H200."""
    return dataclasses.replace(
        h200,
        name="GB200",
        pull=722e9,
        push=722e9,
        memory=6.2e12,
        source="NVLink 722 GB/s (NCCL 2.30's table for sm_100), memory 6.2 TB/s (8 TB/s at the H200's share: assumed),"
        " constants of the H200",
    )


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of others. `unit`: µs, or "GB/s of domains": rows for each (token, domain), own domain included, or
    "GB/s of ranks": rows for each (token, rank), own rank included, by time."""

    who: str
    layout: Layout
    wire: WireSpeed | None
    kind: str  # dispatch, combine, few dispatch, few combine
    value: float
    unit: str
    gpu: str = "H200"


def _both(
    who: str,
    layout: Layout,
    wire: WireSpeed | None,
    values: tuple[float, float],
    unit: str,
    few: str = "",
    gpu: str = "H200",
) -> list[Published]:
    """Return published figures of a dispatch and a combine. The dispatch uses the layout's dtype (1 byte: fp8), the
    combine bf16."""
    bf16 = dataclasses.replace(layout, itemsize=2)
    of = ((layout, "dispatch", values[0]), (bf16, "combine", values[1]))
    return [Published(who, made, wire, few + kind, value, unit, gpu) for made, kind, value in of]


DOMAINS, RANKS = "GB/s of domains", "GB/s of ranks"

PUBLISHED = (
    *_both("DeepEP V1, fp8 dispatch", Layout(2, 8, itemsize=1), INFINIBAND, (43, 43), DOMAINS),
    *_both("DeepEP V1, fp8 dispatch", Layout(4, 8, itemsize=1), INFINIBAND, (58, 57), DOMAINS),
    *_both("DeepEP V1, fp8 dispatch", Layout(8, 8, itemsize=1), INFINIBAND, (51, 50), DOMAINS),
    *_both("DeepEP V2", Layout(2, 8, 8192), INFINIBAND, (90, 81), DOMAINS),
    *_both("DeepEP V2", Layout(4, 8, 8192), INFINIBAND, (61, 61), DOMAINS),
    *_both("HybridEP, H100", Layout(2, 8), INFINIBAND, (71.7, 63), DOMAINS),
    *_both("HybridEP, H100", Layout(4, 8), INFINIBAND, (57.7, 57.5), DOMAINS),
    *_both("HybridEP, H100", Layout(8, 8), INFINIBAND, (50, 49.8), DOMAINS),
    *_both("UCCL-EP, p5en", Layout(2, 8, itemsize=1), EFA, (1196, 6379), "µs"),
    *_both("DeepEP V1, fp8 dispatch", Layout(2, 8, 128, itemsize=1), INFINIBAND, (118, 195), "µs", "few "),
    *_both("DeepEP V1, fp8 dispatch", Layout(8, 8, 128, itemsize=1), INFINIBAND, (173, 314), "µs", "few "),
    *_both("DeepEP V1, fp8 dispatch", Layout(32, 8, 128, itemsize=1), INFINIBAND, (194, 360), "µs", "few "),
    *_both("pplx-garden, CX-7", Layout(2, 8, 128, itemsize=1), INFINIBAND, (110, 186), "µs", "few "),
    *_both("pplx-garden, CX-7", Layout(8, 8, 128, itemsize=1), INFINIBAND, (188, 309), "µs", "few "),
    *_both("pplx-garden, EFA", Layout(2, 8, 128, itemsize=1), EFA, (215, 242), "µs", "few "),
    *_both("pplx-garden, EFA", Layout(8, 8, 128, itemsize=1), EFA, (267, 391), "µs", "few "),
    *_both("UCCL-EP, p5en", Layout(2, 8, 128, itemsize=1), EFA, (226, 293), "µs", "few "),
    *_both("HybridEP, GB200", Layout(1, 8, experts=64), None, (764, 737), RANKS, gpu="GB200"),
    *_both("HybridEP, GB200", Layout(1, 16, experts=128), None, (707, 666), RANKS, gpu="GB200"),
    *_both("HybridEP, GB200", Layout(1, 32, experts=256), None, (642, 605), RANKS, gpu="GB200"),
    *_both("mscclpp, GB200", Layout(1, 4), None, (284, 476), "µs", gpu="GB200"),
    Published("mscclpp, GB200", Layout(1, 8), None, "combine", 494, "µs", "GB200"),
    Published("mscclpp, GB200", Layout(1, 16), None, "combine", 640, "µs", "GB200"),
    Published("mscclpp, GB200", Layout(1, 32), None, "combine", 747, "µs", "GB200"),
    Published("mscclpp, GB200", Layout(1, 16), None, "dispatch", 925, "µs", "GB200"),
)
"""Tokens, hidden size and top-k are those of `Layout` unless they are named: 4096 (few: 128), 7168, 8. Routing is taken
to be even over all experts, also where it was limited to groups, and the dtype to be bf16 where none is stated."""


def best(run: dict[str, Any], direction: str) -> float:
    """Return the bytes per second of bare bulk copies."""
    return max(entry["gbs"] for entry in run["link"] if entry["direction"] == direction) * 1e9


def measured_gpu(many: dict[str, Any], few: dict[str, Any]) -> Gpu:
    """Return the GPU of a run of each benchmark. The constant of a throughput operation is the median, over sizes from
    512 tokens on, of its time beyond its bytes; that of a latency operation is its time at the smallest size."""
    bare = Gpu("", best(many, "pull"), best(many, "push"), MEMORY, few["flag"]["us"] / 2, {}, "")
    constants = {}
    for op in MANY:
        beyond = [
            result["graph_us"] - of_recorded(bare, result, many["world_size"])
            for result in many["results"]
            if result["op"] == op and is_centre(result) and result["tokens"] >= 512
        ]
        constants[op] = statistics.median(beyond)
    for op in FEW:
        result = min((r for r in few["results"] if r["op"] == op), key=lambda r: r["tokens"])
        constants["few " + op] = result["us"] - few_us(bare, layout_of(few, result["tokens"]), op == "combine")
    machine = many["machine"]["device"]
    source = (
        f"measured on {many['world_size']} x {machine}: fetching {bare.pull / 1e9:.0f} GB/s, storing"
        f" {bare.push / 1e9:.0f} GB/s over NVLink, memory {MEMORY / 1e12:.1f} TB/s, a flag {bare.flag:.2f} µs"
    )
    return dataclasses.replace(bare, name=machine, constants=constants, source=source)


def is_centre(result: dict[str, Any]) -> bool:
    """Return whether a result belongs to the sweep over tokens with all other parameters as in workload A and default
    budgets."""
    same = {"hidden": 7168, "top_k": 8, "routing": "balanced", "given_sms": None}
    return all(result[key] == value for key, value in same.items())


def layout_of(run: dict[str, Any], tokens: int) -> Layout:
    """Return the layout of a run of the latency benchmark."""
    return Layout(1, run["world_size"], tokens, run["hidden"], experts=run["experts"], top_k=run["top_k"])


def of_recorded(gpu: Gpu, result: dict[str, Any], ranks: int) -> float:
    """Return the µs for the bytes of a recorded result, without the constant: those of the busiest rank, which receives
    equally many rows from each rank."""
    near, row = result["nvlink_bytes"], result["row_bytes"]
    copies = near / row * ranks / (ranks - 1)
    reached = min(copies, result["tokens"] * min(ranks, result["top_k"]))
    passing = passing_rows(result["op"], copies, reached, max(result["rows_expanded"]), result["tokens"])
    return gpu.us(result["op"], near, passing * row)


def measured_errors(gpu: Gpu, many_runs: Sequence[dict[str, Any]], few: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each recorded result of an operation of the model with default budgets, and the model's prediction;
    throughput operations use the recorded rows. `used`: the constant comes from this result."""
    found = []
    for run in many_runs:
        for result in run["results"]:
            if result["op"] in MANY and result["given_sms"] is None and "graph_us" in result:
                what = {key: result[key] for key in ("op", "tokens", "hidden", "top_k", "routing")}
                used = run is many_runs[0] and result["tokens"] >= 512 and is_centre(result)
                us = gpu.constants[result["op"]] + of_recorded(gpu, result, run["world_size"])
                found.append(what | {"ranks": run["world_size"], "us": result["graph_us"], "model": us, "used": used})
    timed = [
        (result["op"], few["world_size"], result["tokens"], result["us"])
        for result in few["results"]
        if result["op"] in ("dispatch", "combine", "pair")
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
    """Return a published figure, and the model's in the same unit."""
    on = gb200(gpu) if entry.gpu == "GB200" else gpu
    layout = entry.layout
    few = entry.kind.startswith("few ")
    if few:
        us = few_us(on, layout, entry.kind == "few combine", entry.wire)
    else:
        us = many_us(on, entry.wire, in_rounds(layout, limit), entry.kind)
    reached = expected(layout).copies / layout.tokens if entry.unit == RANKS else reached_domains(layout)
    value = us if entry.unit == "µs" else layout.tokens * reached * layout.row_bytes / us / 1e3
    return {
        "who": entry.who, "kind": entry.kind, "domains": layout.domains, "domain_ranks": layout.domain_ranks,
        "tokens": layout.tokens, "wire": entry.wire.name if entry.wire else None, "unit": entry.unit,
        "published": entry.value, "model": value,
    }  # fmt: skip


def off(entry: Found) -> float:
    """By how much the model is too high."""
    return float(entry["model"] / entry["us"] - 1)


def error_groups(found: Found) -> Iterator[tuple[str, list[Found]]]:
    """By operation, ranks, and what was varied."""
    groups: dict[str, list[Found]] = {}
    for entry in found["measured"]:
        if entry["used"]:
            varied = "tokens, from which the constant is"
        elif entry["routing"] != "balanced":
            varied = "skewed routing"
        elif entry["hidden"] != 7168:
            varied = "hidden size"
        elif entry["top_k"] != 8:
            varied = "top-k"
        else:
            varied = "tokens"
        groups.setdefault(f"{entry['op']}, {entry['ranks']} ranks: {varied}", []).append(entry)
    yield from groups.items()


def error_rows(found: Found) -> list[list[str]]:
    rows = [["operation", "results", "mean error", "from", "to", "largest at"]]
    for name, entries in error_groups(found):
        errors = [100 * off(entry) for entry in entries]
        worst = max(entries, key=lambda entry: abs(off(entry)))
        at = f"T={worst['tokens']} H={worst['hidden']} K={worst['top_k']} {worst['routing']}: {worst['us']:.0f} µs"
        mean = statistics.mean(map(abs, errors))
        rows.append(
            [name, str(len(entries)), f"{mean:.0f} %", f"{round(min(errors)):+d} %", f"{round(max(errors)):+d} %", at]
        )
    return rows


def published_rows(found: Found) -> list[list[str]]:
    rows = [["who", "domains", "tokens", "operation", "unit", "published", "model", "published ÷ model, in time"]]
    for entry in found["published"]:
        ratio = entry["published"] / entry["model"]
        if entry["unit"] != "µs":
            ratio = 1 / ratio
        rows.append(
            [
                entry["who"], where(entry), str(entry["tokens"]), entry["kind"], entry["unit"],
                f"{entry['published']:g}", f"{entry['model']:.0f}", f"{ratio:.2f}",
            ]
        )  # fmt: skip
    return rows


def lines(found: Found) -> list[str]:
    return [*assumptions(found), f"GB200, for published figures alone: {found['gb200']}"]


def tables(found: Found) -> dict[str, list[list[str]]]:
    return {
        "Predictions": prediction_rows(found),
        "Compared with measurements": error_rows(found),
        "Compared with published figures": published_rows(found),
    }


def text(found: Found) -> str:
    parts = (lines(found), *map(text_table, tables(found).values()))
    return "\n\n".join("\n".join(part) for part in parts)


def markdown(found: Found) -> str:
    assumed = (
        textwrap.fill(f"- {line}.", 128, subsequent_indent="  ", break_on_hyphens=False) for line in lines(found)
    )
    said = ["## Assumptions", "", *assumed]
    for title, rows in tables(found).items():
        said += ["", f"## {title}", "", *markdown_table(rows)]
    return "\n".join(said)


COLOURS = {None: "#333333", "InfiniBand, GPU-initiated": "#1b6ca8", "EFA, proxies": "#c0392b"}


def plot(found: Found, path: Path) -> Path:
    """Draw predicted times over ranks, and list the assumptions of the model next to them. Returns the path of the SVG
    file."""
    plt = pyplot()
    plt.rcParams["svg.hashsalt"] = path.name  # equal runs write equal files
    figure, axes = plt.subplots(2, 3, figsize=(15, 9), width_ratios=(1, 1, 0.75))
    panels = {
        (0, 0): ("dispatch, many tokens", "dispatch_us", "dispatch"),
        (0, 1): ("combine, many tokens", "combine_us", "combine"),
        (1, 0): ("dispatch, few tokens", "few_dispatch_us", "few dispatch"),
        (1, 1): ("combine, few tokens", "few_combine_us", "few combine"),
    }
    for at, (title, key, op) in panels.items():
        axis = axes[at]
        for (wire, size), points in by_line(found).items():
            label = "one domain" if wire is None else f"domains of {size}, {wire}"
            style = "o-" if size == 8 or wire is None else "s--"
            axis.plot(
                [p["ranks"] for p in points], [p[key] for p in points], style, color=COLOURS[wire], label=label, ms=4
            )
        tokens = found["tokens"] if not op.startswith("few") else found["few_tokens"]
        measured = [
            m for m in found["measured"]
            if (m["op"], m["tokens"], m["hidden"], m["top_k"], m["routing"]) == (op, tokens, 7168, 8, "balanced")
        ]  # fmt: skip
        if measured:
            xs, ys = [m["ranks"] for m in measured], [m["us"] for m in measured]
            axis.plot(xs, ys, "*", color="#f39c12", ms=11, label="measured")
        ranks = sorted({p["ranks"] for p in found["predictions"]})
        axis.set(yscale="log", xlabel="ranks", ylabel="µs", title=f"{title}: {tokens} a rank")
        log_ticks(axis, [n for n in ranks if n & (n - 1) == 0])
    axes[0][0].legend(fontsize=8)
    gone = axes[0][2].get_gridspec()
    for axis in axes[:, 2]:
        axis.remove()
    side = figure.add_subplot(gone[:, 2])
    side.axis("off")
    said = "\n\n".join(textwrap.fill(line, 46) for line in ("Assumptions:", *assumptions(found)))
    side.text(0, 1, said, va="top", fontsize=9)
    return save(figure, path)


def by_line(found: Found) -> dict[tuple[str | None, int], list[Found]]:
    by: dict[tuple[str | None, int], list[Found]] = {}
    for entry in found["predictions"]:
        size = 0 if entry["wire"] is None else max(entry["domain_ranks"], 8)
        by.setdefault((entry["wire"], size), []).append(entry)
    return by


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=Path, default=RECORDED, help="folder of recorded runs (%(default)s)")
    options.add_argument("--out", type=a_file, metavar="FILE", help="write everything as JSON, and a plot next to it")
    options.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    args = options.parse_args(argv)
    try:
        *many, few = [recorded(str(args.runs / f"{name}.json")) for name in RUNS]
    except argparse.ArgumentTypeError as error:
        options.error(f"--runs: {error}")
    gpu, limit = measured_gpu(many[0], few), 4 * GIB
    found = model(gpu, 4096, 128, limit) | {
        "gb200": gb200(gpu).source,
        "measured": measured_errors(gpu, many, few),
        "published": [beside(gpu, entry, limit) for entry in PUBLISHED],
    }
    found = rounded(found)  # so that the tables are those of the file
    print(markdown(found) if args.markdown else text(found))
    if args.out:
        write(found, args.out)
        plot(found, args.out.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
