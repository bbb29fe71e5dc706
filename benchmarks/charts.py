"""Draw the charts of README.md and docs/ from recorded runs: one for each machine, and one of decode layers.

python benchmarks/charts.py    # rewrites compare-2-h100.svg, compare-2-h200.svg and decode.svg in benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ep_ops.bench.figures import log_ticks, pyplot

RESULTS = Path(__file__).resolve().parent / "results"
EARLIER = "ep_ops of 2026-11-24"
COLOURS = {"ep_ops": "#1b6ca8", EARLIER: "#7fb3d9", "mscclpp": "#e08e3a", "NCCL": "#8a8a8a"}

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
"""title; bars: label -> name -> µs; decode: tokens, and a panel title -> name -> µs for each number of tokens."""

CHARTS = {"compare-2-h100": ("2 × H100", "mscclpp"), "compare-2-h200": ("2 × H200", "NCCL")}
"""File of a run and of its chart -> machine, and what ep_ops is compared with."""

DECODE = {
    "torch": ("torch's grouped GEMM", "#8a8a8a"),
    "triton": ("plain Triton kernels", "#e08e3a"),
    "vllm": ("vLLM, no exchange", "#7a5195"),
    "flashinfer": ("flashinfer, no exchange", "#3a9e6e"),
    "memory": ("ep_ops", "#1b6ca8"),
}
"""Measurement of `ep-ops bench decode` -> its name in the chart, and its color."""


def chart(run: str) -> Chart:
    """Return the chart of a recorded run: the operations that the other system was measured with, and decode."""
    machine, other = CHARTS[run]
    names = "ep_ops", EARLIER, other
    found = json.loads((RESULTS / f"{run}.json").read_text())
    large, decode = found["large"]["rows"], found["decode"]["rows"][:2]
    return {
        "title": f"{machine}, hidden 7168, 256 experts, top-8, bfloat16",
        "bars": {row["what"]: {name: row[name] for name in names} for row in large if row[other] is not None},
        "tokens": found["decode"]["tokens"],
        "decode": {row["what"]: {name: row[name] for name in names if name in row} for row in decode},
    }


def draw(shown: Chart, path: Path) -> None:
    """Draw horizontal bars for 4096 tokens a rank and, below, a panel of lines for each kind of decode step.

    The picture is narrow, so that its text is legible on phones.
    """
    plt = pyplot()
    plt.rcParams.update({"svg.hashsalt": path.name, "axes.titlesize": "medium"})  # equal runs write equal files
    figure = plt.figure(figsize=(6, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    bars = upper.subplots()
    axes = lower.subplots(1, len(shown["decode"]))
    labels, names = list(shown["bars"]), list(next(iter(shown["bars"].values())))
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [shown["bars"][label][name] for label in labels]
        places = [i + (number - (len(names) - 1) / 2) * height for i in range(len(labels))]
        drawn = bars.barh(places, values, height * 0.92, color=COLOURS[name], label=name)
        bars.bar_label(drawn, [f"{us:.0f}" for us in values], padding=2, fontsize=9)
    bars.set(yticks=range(len(labels)), yticklabels=[label.replace(", ", ",\n") for label in labels])
    bars.set(title="4096 tokens a rank", xlabel="µs, less is better")
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.grid(False, axis="y")
    for axis, (kind, lines) in zip(axes, shown["decode"].items(), strict=True):
        for name, values in lines.items():
            axis.plot(shown["tokens"], values, "o-", color=COLOURS[name], markersize=4)
        axis.set(
            title=f"decode,\n{kind}",
            xlabel="tokens a rank",
            ylabel="µs, dispatch + combine",
        )
        log_ticks(axis, shown["tokens"])
        axis.set_ylim(bottom=0)
    upper.suptitle(shown["title"])
    lower.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncol=len(names), frameon=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    path.write_text(with_dark_variant(path.read_text()))


def draw_decode(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each model and number of GPUs, two in a row: layer time divided by the floor. Of several runs of
    `ep-ops bench decode` that measured a layer, the one with most layers counts."""
    plt = pyplot()
    plt.rcParams.update({"svg.hashsalt": path.name, "axes.titlesize": "medium"})
    by_panel: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        experts, gpu = run["experts"] // run["world_size"], run["machine"]["device"].split()[1]
        title = f"{run['model']},\n{experts} experts a GPU, {run['world_size']} × {gpu}"
        by_panel.setdefault(title, []).append(run)
    height = -(-len(by_panel) // 2)
    figure = plt.figure(figsize=(6, 0.6 + 2.4 * height), layout="constrained")
    panels = figure.subplots(height, 2, squeeze=False, sharey=True).flatten()
    shown = {}
    for panel, (title, same) in zip(panels, by_panel.items(), strict=False):
        same = sorted(same, key=lambda run: -sum(name in run["results"][0] for name in DECODE))
        for name, (what, color) in DECODE.items():
            complete = (run["results"] for run in same if all(name in result for result in run["results"]))
            if results := next(complete, None):
                tokens = [result["tokens"] for result in results]
                ratios = [result[name] / result["floor_us"] for result in results]
                (shown[what],) = panel.plot(tokens, ratios, "o-", color=color, markersize=4, label=what)
        panel.set(title=title, xlabel="tokens a rank")
        log_ticks(panel, [result["tokens"] for result in same[0]["results"]])
    panels[0].set_ylim(bottom=1)  # of all
    for panel in panels[::2]:
        panel.set_ylabel("layer ÷ reading its weights")
    for panel in panels[len(by_panel) :]:
        panel.set_visible(False)
    figure.legend(shown.values(), shown, loc="outside lower center", ncol=2, frameon=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    path.write_text(with_dark_variant(path.read_text()))


def with_dark_variant(svg: str) -> str:
    """Add the colors that browsers use if the reader prefers dark pages."""
    rules = "".join(f"{selector} {{{rule} !important}}" for selector, rule in DARK.items())
    return svg.replace("</style>", f"@media (prefers-color-scheme: dark) {{{rules}}}</style>", 1)


def main(folder: Path = RESULTS) -> int:
    for run in CHARTS:
        draw(chart(run), folder / f"{run}.svg")
    if recorded := [json.loads(path.read_text()) for path in sorted(RESULTS.glob("decode-*.json"))]:
        draw_decode(recorded, folder / "decode.svg")
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
