"""Does time follow the bytes? Ratios to the link over sizes and budgets, as lines of text and as one plot of all runs.

python -m ep_ops.bench.sweeps throughput-4.json throughput-2.json --plot throughput-ratio.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .figures import pyplot
from .report import BUDGETS, COLOURS, NAMES, Result, centre_of, complete, taken, varied

AXES = {"given_sms": "SMs", "tokens": "tokens", "hidden": "hidden size", "top_k": "top-k"}
ROUTINGS = ("balanced", "skewed")


def sweep(run: dict[str, Any], axis: str, routing: str) -> dict[str, list[tuple[int, Result]]]:
    """By operator: what was measured along `axis` (of AXES) from the workload that sweeps start from, sorted."""
    results = [r for r in run["results"] if r["op"] in BUDGETS]
    if not results:
        return {}
    centre = {key: value for key, value in centre_of(results).items() if key != axis}
    chosen = [r for r in results if (r["given_sms"] is not None) == (axis == "given_sms")]
    return varied(chosen, axis, tuple(BUDGETS), routing=routing, **centre)


def lines(run: dict[str, Any]) -> Iterator[str]:
    """Each sweep of each operator: µs in steady state, and the ratio to the link."""
    for axis, label in AXES.items():
        for routing in ROUTINGS:
            for op, points in sweep(run, axis, routing).items():
                told = (f"{x}: {taken(r):.1f}" + (f" ({r['ratio']:.0%})" if "ratio" in r else "") for x, r in points)
                yield f"{NAMES[op]}, {routing}, µs (of link) over {label}: {', '.join(told)}"


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Ratio to the link over tokens; each run has its number of ranks. A level line: time in proportion to bytes."""
    plt = pyplot()
    shape = (len(ROUTINGS), len(runs))
    figure, axes = plt.subplots(*shape, figsize=(5.5 * shape[1], 4 * shape[0]), sharex=True, sharey=True, squeeze=False)
    for row, routing in zip(axes, ROUTINGS, strict=True):
        for axis, run in zip(row, runs, strict=True):
            axis.set(xscale="log", ylim=(0, 1.05), title=f"{run['world_size']} ranks, {routing} routing")
            for op, points in sweep(run, "tokens", routing).items():
                if op in COLOURS:
                    xs, ys = [x for x, _ in points], [r["ratio"] for _, r in points]
                    axis.plot(xs, ys, "o-", color=COLOURS[op], label=NAMES[op], markersize=4)
                    axis.set_xticks(xs)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.xaxis.minorticks_off()
            axis.tick_params(labelbottom=True)
        row[0].set_ylabel("ratio to the link's best speed")
    for axis in axes[-1]:
        axis.set_xlabel("tokens a rank")
    axes[0][0].legend(loc="lower right")
    figure.suptitle(runs[0]["machine"]["device"])
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="python -m ep_ops.bench.sweeps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("results", nargs="+", type=Path, help="JSON files that `ep-ops bench throughput --out` wrote")
    options.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratio to the link over tokens (SVG)")
    args = options.parse_args(argv)
    runs = [complete(json.loads(path.read_text())) for path in args.results]
    for run in runs:
        print(f"{run['world_size']} ranks", *lines(run), sep="\n")
    if args.plot:
        plot([run for run in runs if sweep(run, "tokens", "balanced") and run["link"]], args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
