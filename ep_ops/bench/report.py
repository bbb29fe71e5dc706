"""What a run found, as a table, as Markdown and as plots: `python -m ep_ops.bench.report results.json ...`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import latency_report
from .figures import machine_line, markdown_table, over_tokens, pyplot, text_table
from .figures import save as save_figure

Result = dict[str, Any]

COLUMNS = ("what", "T", "H", "K", "routing", "SMs", "µs", "steady µs", "graph µs", "GB/s", "of link")

NAMES = {
    "dispatch": "dispatch",
    "dispatch_planned": "dispatch, reused route",
    "dispatch_fp8": "dispatch in FP8, scales in columns",
    "dispatch_fp8_packed": "dispatch in FP8, packed scales",
    "dispatch_fp8_planned": "dispatch in FP8, scales in columns, reused route",
    "dispatch_fp8_packed_planned": "dispatch in FP8, packed scales, reused route",
    "dispatch_tokens": "dispatch, token-major",
    "dispatch_tokens_planned": "dispatch, token-major, reused route",
    "combine": "combine, weighted",
    "combine_unweighted": "combine, unweighted",
    "combine_residual": "combine, weighted, with a residual",
    "combine_tokens": "combine, token-major",
    "combine_gathered": "combine of a row per rank, gathered",
    "combine_pushed": "combine of a row per rank, pushed",
    "dispatch_backward": "dispatch, backward",
    "combine_backward": "combine, backward",
    "pair_forward": "both, forward, compiled",
    "pair_forward_backward": "both, forward + backward, compiled",
    "host_dispatch": "host time of a dispatch",
    "nccl_dispatch": "all_to_all_single, dispatch's bytes",
    "nccl_combine": "all_to_all_single, combine's bytes",
    "eager_dispatch": "eager PyTorch dispatch",
    "eager_combine": "eager PyTorch combine",
}

BUDGETS = {
    "dispatch": "dispatch_sms",
    "dispatch_planned": "dispatch_sms",
    "dispatch_fp8": "dispatch_sms",
    "dispatch_fp8_packed": "dispatch_sms",
    "dispatch_fp8_planned": "dispatch_sms",
    "dispatch_fp8_packed_planned": "dispatch_sms",
    "dispatch_tokens": "dispatch_sms",
    "dispatch_tokens_planned": "dispatch_sms",
    "combine_backward": "combine_sms",
    "combine": "combine_sms",
    "combine_unweighted": "combine_sms",
    "combine_residual": "combine_sms",
    "combine_tokens": "combine_sms",
    "combine_gathered": "combine_sms",
    "combine_pushed": "combine_sms",
    "dispatch_backward": "combine_sms",
}
"""Operator -> the budget that it runs under. Backwards move rows the other way."""


def best_link(run: dict[str, Any]) -> float | None:
    """GB/s of the fastest push or pull at any number of SMs and any row size; None if it was not measured."""
    return max((entry["gbs"] for entry in run["link"]), default=None)


def taken(result: Result) -> float:
    """µs of a call: in a graph, else back to back, else by itself, as far as that was measured."""
    us: float = next(result[key] for key in ("graph_us", "steady_us", "us") if key in result)
    return us


def complete(run: dict[str, Any]) -> dict[str, Any]:
    """Fills in the time that the bytes take at the link's speed, and its ratio to the time taken."""
    speed = best_link(run)
    for result in run["results"]:
        nbytes = result.get("nvlink_bytes")
        if nbytes and taken(result):
            result["gbs"] = nbytes / taken(result) / 1e3
            if speed:
                result["limit_us"] = nbytes / speed / 1e3
                result["ratio"] = result["limit_us"] / taken(result)
    return run


# ---------------------------------------------------------------------- text


def cells(result: Result) -> list[str]:
    """In the order of COLUMNS."""
    op: str = result["op"]
    budget = result[BUDGETS[op]] if op in BUDGETS else None
    wrong = "" if result.get("correct", True) else " WRONG"
    return [
        NAMES.get(op, op) + wrong,
        str(result["tokens"]),
        str(result["hidden"]),
        str(result["top_k"]),
        result["routing"],
        str(budget or ""),
        *(f"{result[key]:.1f}" if key in result else "" for key in ("us", "steady_us", "graph_us")),
        f"{result['gbs']:.0f}" if "gbs" in result else "",
        f"{100 * result['ratio']:.0f} %" if "ratio" in result else "",
    ]


def link_lines(run: dict[str, Any]) -> list[str]:
    """One line for each direction and row size: GB/s at each number of SMs."""
    by_kind: dict[tuple[str, int], list[str]] = {}
    for entry in run["link"]:
        by_kind.setdefault((entry["direction"], entry["row_bytes"]), []).append(f"{entry['gbs']:.0f} ({entry['sms']})")
    return [
        f"link {direction}, rows of {row_bytes} bytes, GB/s (SMs): {', '.join(speeds)}"
        for (direction, row_bytes), speeds in by_kind.items()
    ]


def table(run: dict[str, Any]) -> str:
    """For a terminal."""
    rows = [list(COLUMNS), *map(cells, run["results"])]
    return "\n".join([machine_line(run), *link_lines(run), *text_table(rows)])


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """The run with nothing but each operator's first result on the workload that sweeps start from."""
    swept = [result for result in run["results"] if result["op"] in SWEPT]
    centre = centre_of(swept) | {"routing": "balanced", "given_sms": None} if swept else {}
    firsts: dict[str, Result] = {}
    for result in run["results"]:
        if all(result[key] == value for key, value in centre.items()):
            firsts.setdefault(result["op"], result)
    return run | {"results": list(firsts.values())}


def markdown(run: dict[str, Any]) -> str:
    lines = [machine_line(run) + ".", "", *(line + "." for line in link_lines(run)), ""]
    return "\n".join([*lines, *markdown_table([list(COLUMNS), *map(cells, run["results"])])])


# ---------------------------------------------------------------------- plots

COLOURS = {
    "dispatch": "#1b6ca8",
    "dispatch_planned": "#57a0d3",
    "combine": "#c0392b",
    "combine_unweighted": "#e08e79",
    "combine_gathered": "#7d3c98",
    "combine_pushed": "#c39bd3",
    "push": "#777777",
    "pull": "#333333",
}
SWEPT = ("dispatch", "dispatch_planned", "combine", "combine_unweighted", "combine_gathered", "combine_pushed")


def varied(
    results: Iterable[Result], axis: str, ops: Sequence[str] = SWEPT, **fixed: Any
) -> dict[str, list[tuple[Any, Result]]]:
    """By operator: results that agree with `fixed`, sorted by `axis`, one for each of its values."""
    lines: dict[str, dict[Any, Result]] = {}
    for result in results:
        if result["op"] in ops and all(result[key] == value for key, value in fixed.items()):
            lines.setdefault(result["op"], {})[result[axis]] = result
    return {op: sorted(points.items()) for op, points in lines.items() if len(points) > 1}


def centre_of(results: Sequence[Result]) -> dict[str, Any]:
    """The workload that sweeps start from: hidden size, top-k and tokens that occur most often."""
    values = {key: [result[key] for result in results] for key in ("hidden", "top_k", "tokens")}
    return {key: max(set(seen), key=seen.count) for key, seen in values.items()}


def plot(run: dict[str, Any], stem: Path) -> list[Path]:
    """Write a figure for each kind of data that the run has: `stem`-tokens.svg, `stem`-sms.svg, `stem`-shapes.svg."""
    swept = [result for result in run["results"] if result["op"] in SWEPT]
    if not swept:
        return []
    centre = centre_of(swept)
    defaults = [result for result in swept if result["given_sms"] is None]
    figures: dict[str, Any] = {}

    sizes = {key: centre[key] for key in ("hidden", "top_k")}
    routings = [r for r in ("balanced", "skewed") if varied(defaults, "tokens", routing=r, **sizes)]
    if routings:
        figures["tokens"] = _over_tokens({r: varied(defaults, "tokens", routing=r, **sizes) for r in routings})

    budgets = varied([r for r in swept if r["given_sms"]], "given_sms", routing="balanced", **centre)
    if budgets and best_link(run):
        figures["sms"] = _over_sms(run, budgets)

    shapes = [(key, label) for key, label in (("hidden", "hidden size"), ("top_k", "top-k"))]
    found = [
        (label, varied(defaults, key, routing="balanced", **{k: v for k, v in centre.items() if k != key}))
        for key, label in shapes
    ]
    found = [(label, lines) for label, lines in found if lines and best_link(run)]
    if found:
        figures["shapes"] = _over_shapes(found)
    return [save_figure(figure, run, swept[0]["dtype"], stem, name) for name, figure in figures.items()]


def _over_tokens(by_routing: dict[str, Any]) -> Any:
    """Times by number of tokens, one diagram for each routing."""
    figure, axes = pyplot().subplots(
        1, len(by_routing), figsize=(5.5 * len(by_routing), 4.2), sharey=True, squeeze=False
    )
    for axis, (routing, lines) in zip(axes[0], by_routing.items(), strict=True):
        for op, points in lines.items():
            xs, ys = [x for x, _ in points], [taken(r) for _, r in points]
            axis.plot(xs, ys, "o-", color=COLOURS[op], label=NAMES[op], markersize=4)
        points = [(x, r["limit_us"]) for x, r in next(iter(lines.values())) if "limit_us" in r]
        if points:
            axis.plot(*zip(*points, strict=True), "k--", label="the link", linewidth=1)
        axis.set_title(f"{routing} routing")
        over_tokens(axis, [x for x, _ in next(iter(lines.values()))])
    axes[0][0].set_ylabel("µs, whole call in steady state")
    axes[0][0].legend()
    return figure


def _over_sms(run: dict[str, Any], budgets: dict[str, Any]) -> Any:
    """Speeds by number of multiprocessors, as parts of the link's, and those of bare copies."""
    figure, axis = pyplot().subplots(figsize=(7, 4.4))
    for op, points in budgets.items():
        ys = [r["ratio"] for _, r in points]
        axis.plot([x for x, _ in points], ys, "o-", color=COLOURS[op], label=NAMES[op], markersize=4)
    row_bytes = max(r["row_bytes"] for _, r in next(iter(budgets.values())))
    for direction in ("push", "pull"):
        speeds = sorted(
            (e["sms"], e["gbs"]) for e in run["link"] if (e["direction"], e["row_bytes"]) == (direction, row_bytes)
        )
        ys = [speed / best_link(run) for _, speed in speeds]  # type: ignore[operator]
        axis.plot([n for n, _ in speeds], ys, "--", color=COLOURS[direction], label=f"bare {direction}", lw=1)
    axis.set(xlabel="multiprocessors", ylabel="ratio to the link's best speed", ylim=(0, 1.05))
    axis.legend()
    return figure


def _over_shapes(found: list[tuple[str, Any]]) -> Any:
    """Speeds by size of rows and by top-k, as parts of the link's."""
    figure, axes = pyplot().subplots(1, len(found), figsize=(5.5 * len(found), 4.2), sharey=True, squeeze=False)
    for axis, (label, lines) in zip(axes[0], found, strict=True):
        for op, points in lines.items():
            ys = [r["ratio"] for _, r in points]
            axis.plot([x for x, _ in points], ys, "o-", color=COLOURS[op], label=NAMES[op], markersize=4)
        axis.set(xlabel=label, ylim=(0, 1.05))
    axes[0][0].set_ylabel("ratio to the link's best speed")
    axes[0][0].legend()
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m ep_ops.bench.report", description=__doc__)
    options.add_argument("results", nargs="+", type=Path, help="JSON files that `ep-ops bench ... --out` wrote")
    options.add_argument("--plots", type=Path, help="folder for the plots (default: beside each file)")
    options.add_argument("--no-plots", action="store_true")
    options.add_argument(
        "--summary", action="store_true", help="throughput: of the middle workload only, with default budgets"
    )
    args = options.parse_args(argv)
    for path in args.results:
        run = json.loads(path.read_text())
        draw = plot
        if run.get("benchmark") == "latency":
            draw = latency_report.plot
            print(latency_report.markdown(run), end="\n\n")
        else:
            complete(run)
            print(markdown(summary(run) if args.summary else run), end="\n\n")
        if args.no_plots:
            continue
        try:
            written = draw(run, (args.plots or path.parent) / path.stem)
        except ImportError:
            print("matplotlib is not installed: no plots", file=sys.stderr)
        else:
            print(f"plots: {', '.join(map(str, written)) or 'nothing to plot'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
