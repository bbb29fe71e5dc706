"""Draw the charts of README.md and docs/results.md from recorded runs, one chart for each run and machine.

python benchmarks/charts.py          # rewrites compare-2-h100.svg and compare-4-h200.svg in benchmarks/results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ep_ops.bench.figures import pyplot

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = {"ep_ops": "#1b6ca8", "mscclpp": "#e08e3a", "NCCL": "#8a8a8a", "eager PyTorch": "#c5b0d5"}

Chart = dict[str, Any]
"""title; bars: label -> name -> µs; decode: tokens, and a panel title -> name -> µs for each number of tokens."""


def with_mscclpp() -> Chart:
    """ep_ops and mscclpp on two H100s."""
    run = json.loads((RESULTS / "compare-2-h100.json").read_text())
    names = ("ep_ops", "mscclpp")
    return {
        "title": "2 × H100, hidden 7168, 256 experts, top-8, bfloat16",
        "bars": {row["what"]: {name: row[name] for name in names} for row in run["large"]["rows"]},
        "tokens": run["decode"]["tokens"],
        "decode": {row["what"]: {name: row[name] for name in names} for row in run["decode"]["rows"][:2]},
    }


def with_torch() -> Chart:
    """ep_ops, NCCL and eager PyTorch on four H200s."""
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
    """Horizontal bars for 4096 tokens a rank, and a panel of lines for each kind of decode step."""
    plt = pyplot()
    panels = 1 + len(chart["decode"])
    widths = (1.5, *(1 for _ in chart["decode"]))
    figure, axes = plt.subplots(1, panels, figsize=(4.4 * panels, 3.6), width_ratios=widths)
    bars = axes[0]
    labels, names = list(chart["bars"]), list(next(iter(chart["bars"].values())))
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [chart["bars"][label][name] for label in labels]
        places = [i + (number - (len(names) - 1) / 2) * height for i in range(len(labels))]
        drawn = bars.barh(places, values, height * 0.92, color=COLOURS[name], label=name)
        bars.bar_label(drawn, fmt="%.0f", padding=2, fontsize=9)
    bars.set(yticks=range(len(labels)), yticklabels=[label.replace(", ", ",\n") for label in labels])
    bars.set(title="4096 tokens a rank", xlabel="µs, less is better")
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.grid(False, axis="y")
    for axis, (kind, lines) in zip(axes[1:], chart["decode"].items(), strict=True):
        for name, values in lines.items():
            axis.plot(chart["tokens"], values, "o-", color=COLOURS[name], markersize=4)
        axis.set(title=f"decode: dispatch + combine,\n{kind}", xlabel="tokens a rank", ylabel="µs", xscale="log")
        axis.set_xticks(chart["tokens"])
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.xaxis.minorticks_off()
        axis.set_ylim(bottom=0)
    figure.suptitle(chart["title"])
    figure.legend(*bars.get_legend_handles_labels(), loc="lower center", ncol=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def main(folder: Path = RESULTS) -> int:
    for name, chart in CHARTS.items():
        draw(chart(), folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
