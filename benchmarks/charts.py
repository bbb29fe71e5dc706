"""Draw the charts of README.md and docs/results.md from recorded runs, one chart for each run and machine.

python benchmarks/charts.py          # rewrites compare-2-h100.svg and compare-4-h200.svg in benchmarks/results
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from ep_ops.bench.figures import log_ticks, pyplot

RESULTS = Path(__file__).resolve().parent / "results"
EARLIER = "ep_ops of 2026-11-24"
COLOURS = {"ep_ops": "#1b6ca8", EARLIER: "#7fb3d9", "mscclpp": "#e08e3a", "NCCL": "#8a8a8a", "eager PyTorch": "#c5b0d5"}

DARK = {
    "text": "fill: #e6edf3",
    '[style*="fill: #ffffff"]': "fill: #161b22",
    '[style*="stroke: #000000"]': "stroke: #8d96a0",
    '[style*="stroke: #b0b0b0"]': "stroke: #6e7681",
    '[style*="fill: #1b6ca8"]': "fill: #4493f8",
    '[style*="stroke: #1b6ca8"]': "stroke: #4493f8",
}
"""CSS selector -> property of a chart on a dark page. matplotlib writes each color as an inline style."""

Chart = dict[str, Any]
"""title; bars: label -> name -> µs, or None if not measured; decode: tokens, and a panel title -> name -> µs for each
number of tokens."""


def with_mscclpp() -> Chart:
    """Return the chart of ep_ops and mscclpp on two H100s."""
    run = json.loads((RESULTS / "compare-2-h100.json").read_text())
    names = ("ep_ops", EARLIER, "mscclpp")
    return {
        "title": "2 × H100, hidden 7168, 256 experts, top-8, bfloat16",
        "bars": {row["what"]: {name: row[name] for name in names} for row in run["large"]["rows"]},
        "tokens": run["decode"]["tokens"],
        "decode": {row["what"]: {name: row[name] for name in names} for row in run["decode"]["rows"][:2]},
    }


def with_torch() -> Chart:
    """Return the chart of ep_ops, NCCL and eager PyTorch on four H200s."""
    large = json.loads((RESULTS / "throughput-4.json").read_text())["results"]
    small = json.loads((RESULTS / "latency-4.json").read_text())["results"]
    centre = {"tokens": 4096, "hidden": 7168, "top_k": 8, "routing": "balanced", "given_sms": None}

    def us(op: str) -> float:
        return next(r["us"] for r in large if r["op"] == op and all(r[key] == centre[key] for key in centre))

    sizes = (1, 8, 32, 64, 128)

    def pairs(op: str) -> list[float]:
        return [next(r["us"] for r in small if (r["op"], r["tokens"], r["deal"]) == (op, t, None)) for t in sizes]

    return {
        "title": "4 × H200, hidden 7168, 256 experts, top-8, bfloat16",
        "bars": {
            op: {"ep_ops": us(op), "NCCL": us(f"nccl_{op}"), "eager PyTorch": us(f"eager_{op}")}
            for op in ("dispatch", "combine")
        },
        "tokens": list(sizes),
        "decode": {"rows grouped by expert": {"ep_ops": pairs("pair"), "NCCL": pairs("pair_nccl")}},
    }


CHARTS = {"compare-2-h100.svg": with_mscclpp, "compare-4-h200.svg": with_torch}


def draw(chart: Chart, path: Path) -> None:
    """Draw horizontal bars for 4096 tokens a rank and, below, a panel of lines for each kind of decode step.

    The picture is narrow, so that its text is legible on phones.
    """
    plt = pyplot()
    plt.rcParams.update({"svg.hashsalt": path.name, "axes.titlesize": "medium"})  # equal runs write equal files
    figure = plt.figure(figsize=(6, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    bars = upper.subplots()
    axes = lower.subplots(1, len(chart["decode"]), squeeze=False)[0]
    labels, names = list(chart["bars"]), list(next(iter(chart["bars"].values())))
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [chart["bars"][label][name] or math.nan for label in labels]
        places = [i + (number - (len(names) - 1) / 2) * height for i in range(len(labels))]
        drawn = bars.barh(places, values, height * 0.92, color=COLOURS[name], label=name)
        bars.bar_label(drawn, ["" if math.isnan(us) else f"{us:.0f}" for us in values], padding=2, fontsize=9)
    bars.set(yticks=range(len(labels)), yticklabels=[label.replace(", ", ",\n") for label in labels])
    bars.set(title="4096 tokens a rank", xlabel="µs, less is better")
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.grid(False, axis="y")
    for axis, (kind, lines) in zip(axes, chart["decode"].items(), strict=True):
        for name, values in lines.items():
            axis.plot(chart["tokens"], values, "o-", color=COLOURS[name], markersize=4)
        axis.set(
            title=f"decode, {kind}" if len(axes) == 1 else f"decode,\n{kind}",
            xlabel="tokens a rank",
            ylabel="µs, dispatch + combine",
        )
        log_ticks(axis, chart["tokens"])
        axis.set_ylim(bottom=0)
    upper.suptitle(chart["title"])
    lower.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncol=len(names), frameon=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    path.write_text(with_dark_variant(path.read_text()))


def with_dark_variant(svg: str) -> str:
    """Add the colors that browsers use if the reader prefers dark pages."""
    rules = "".join(f"{selector} {{{rule} !important}}" for selector, rule in DARK.items())
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark) {{{rules}}}</style>", 1)


def main(folder: Path = RESULTS) -> int:
    for name, chart in CHARTS.items():
        draw(chart(), folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
