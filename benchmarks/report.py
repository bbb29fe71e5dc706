"""Tables (Markdown) and plots of recorded runs of `ep-ops bench throughput` and `latency`.

python benchmarks/report.py results.json ...                      # a table and plots for each run
python benchmarks/report.py --ratio ratio.svg run-4.json run-2.json   # does time follow the bytes?
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ep_ops.bench import latency_report
from ep_ops.bench.against import recorded
from ep_ops.bench.figures import log_ticks, machine_line, markdown_table, pyplot, save, title
from ep_ops.bench.options import a_file
from ep_ops.bench.ranks import Found
from ep_ops.bench.report import BUDGETS, COLUMNS, NAMES, best_link, cells, complete, link_lines, taken
from ep_ops.bench.workloads import ROUTINGS

SWEPT = ("dispatch", "dispatch_planned", "combine", "combine_unweighted", "combine_gathered", "combine_pushed")
"""Operators that sweeps are plotted of."""
AXES = {"given_sms": "SMs", "tokens": "tokens", "hidden": "hidden size", "top_k": "top-k"}


def summary(run: Found) -> dict[str, Any]:
    """Return the run with only the first result of each operator on the workload that sweeps start from."""
    swept = [result for result in run["results"] if result["op"] in SWEPT]
    centre = centre_of(swept) | {"routing": "balanced", "given_sms": None} if swept else {}
    firsts: dict[str, Found] = {}
    for result in run["results"]:
        if all(result[key] == value for key, value in centre.items()):
            firsts.setdefault(result["op"], result)
    return run | {"results": list(firsts.values())}


def centre_of(results: Sequence[Found]) -> dict[str, Any]:
    """Return the workload that sweeps start from: the most frequent hidden size, top-k and number of tokens."""
    values = {key: [result[key] for result in results] for key in ("hidden", "top_k", "tokens")}
    return {key: max(set(seen), key=seen.count) for key, seen in values.items()}


def markdown(run: Found) -> str:
    lines = [machine_line(run) + ".", "", *(line + "." for line in link_lines(run)), ""]
    return "\n".join([*lines, *markdown_table([list(COLUMNS), *map(cells, run["results"])])])


def latency_markdown(run: Found) -> str:
    lines = [
        machine_line(run) + ".",
        latency_report.setting(run) + ".",
        "",
        *markdown_table(latency_report.rows_of(run)),
        "",
    ]
    return "\n".join([*lines, *(f"- {remark}" for remark in latency_report.remarks(run))])


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
PANELS = {
    "dispatch + combine": {
        "pair": "#1b6ca8",
        "pair_padded": "#57a0d3",
        "pair_throughput": "#c0392b",
        "pair_eager": "#7d3c98",
        "pair_nccl": "#777777",
    },
    "one way": {
        "dispatch": "#1b6ca8",
        "dispatch_wait": "#57a0d3",
        "combine": "#c0392b",
        "combine_wait": "#e08e79",
        "dispatch_nccl": "#777777",
    },
}


def varied(
    results: Iterable[Found], axis: str, ops: Sequence[str] = SWEPT, **fixed: Any
) -> dict[str, list[tuple[Any, Found]]]:
    """By operator: results that agree with `fixed`, sorted by `axis`, one for each of its values."""
    lines: dict[str, dict[Any, Found]] = {}
    for result in results:
        if result["op"] in ops and all(result[key] == value for key, value in fixed.items()):
            lines.setdefault(result["op"], {})[result[axis]] = result
    return {op: sorted(points.items()) for op, points in lines.items() if len(points) > 1}


def plot(run: Found, stem: Path) -> list[Path]:
    """Write a figure for each kind of data that the run has: `stem`-tokens.svg, `stem`-sms.svg, `stem`-shapes.svg."""
    swept = [result for result in run["results"] if result["op"] in SWEPT]
    if not swept:
        return []
    centre = centre_of(swept)
    defaults = [result for result in swept if result["given_sms"] is None]
    figures: dict[str, Any] = {}

    sizes = {key: centre[key] for key in ("hidden", "top_k")}
    by_routing = {routing: varied(defaults, "tokens", routing=routing, **sizes) for routing in ROUTINGS}
    by_routing = {routing: lines for routing, lines in by_routing.items() if lines}
    if by_routing:
        figures["tokens"] = _over_tokens(by_routing)

    budgets = varied([r for r in swept if r["given_sms"]], "given_sms", routing="balanced", **centre)
    if budgets and best_link(run):
        figures["sms"] = _over_sms(run, budgets)

    found = [
        (AXES[key], varied(defaults, key, routing="balanced", **{k: v for k, v in centre.items() if k != key}))
        for key in ("hidden", "top_k")
    ]
    found = [(label, lines) for label, lines in found if lines and best_link(run)]
    if found:
        figures["shapes"] = _over_shapes(found)
    heading = title(run, swept[0]["dtype"])
    return [save(figure, stem.with_name(f"{stem.name}-{name}.svg"), heading) for name, figure in figures.items()]


RATIO = operator.itemgetter("ratio")
"""Return the ratio of a result to the link."""


def draw(axis: Any, lines: dict[str, list[tuple[Any, Found]]], value: Callable[[Found], float]) -> None:
    """Draw a value of each operator's results."""
    for op, points in lines.items():
        xs, ys = [x for x, _ in points], [value(result) for _, result in points]
        axis.plot(xs, ys, "o-", color=COLOURS[op], label=NAMES[op], markersize=4)


def over_tokens(axis: Any, tokens: Sequence[int]) -> None:
    """Make both axes logarithmic, and label the measured sizes."""
    axis.set(yscale="log", xlabel="tokens a rank")
    log_ticks(axis, tokens)


def _over_tokens(by_routing: dict[str, Any]) -> Any:
    """Times by number of tokens, one diagram for each routing."""
    figure, axes = pyplot().subplots(
        1, len(by_routing), figsize=(5.5 * len(by_routing), 4.2), sharey=True, squeeze=False
    )
    for axis, (routing, lines) in zip(axes[0], by_routing.items(), strict=True):
        draw(axis, lines, taken)
        points = [(x, r["limit_us"]) for x, r in next(iter(lines.values())) if "limit_us" in r]
        if points:
            axis.plot(*zip(*points, strict=True), "k--", label="the link", linewidth=1)
        axis.set_title(f"{routing} routing")
        over_tokens(axis, [x for x, _ in next(iter(lines.values()))])
    axes[0][0].set_ylabel("µs, whole call in steady state")
    axes[0][0].legend()
    return figure


def _over_sms(run: Found, budgets: dict[str, Any]) -> Any:
    """Plot speeds over numbers of multiprocessors, relative to the link, with those of bare copies."""
    figure, axis = pyplot().subplots(figsize=(7, 4.4))
    draw(axis, budgets, RATIO)
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
    """Plot speeds over row sizes and top-k, relative to the link."""
    figure, axes = pyplot().subplots(1, len(found), figsize=(5.5 * len(found), 4.2), sharey=True, squeeze=False)
    for axis, (label, lines) in zip(axes[0], found, strict=True):
        draw(axis, lines, RATIO)
        axis.set(xlabel=label, ylim=(0, 1.05))
    axes[0][0].set_ylabel("ratio to the link's best speed")
    axes[0][0].legend()
    return figure


def latency_plot(run: Found, stem: Path) -> list[Path]:
    """Writes `stem`-tokens.svg: means as lines, up to the 99th percentile shaded."""
    lines = {op: sorted(points.items()) for op, points in latency_report.lines_of(run).items() if len(points) > 1}
    panels = {panel: {op: c for op, c in ops.items() if op in lines} for panel, ops in PANELS.items()}
    panels = {panel: ops for panel, ops in panels.items() if ops}
    if not panels:
        return []
    figure, axes = pyplot().subplots(1, len(panels), figsize=(6.2 * len(panels), 5), sharey=True, squeeze=False)
    for axis, (panel, ops) in zip(axes[0], panels.items(), strict=True):
        for op, color in ops.items():
            tokens = [t for t, _ in lines[op]]
            mean, p99 = ([result[key] for _, result in lines[op]] for key in ("us", "us_p99"))
            axis.plot(tokens, mean, "o-", color=color, label=latency_report.NAMES[op], markersize=4)
            axis.fill_between(tokens, mean, p99, color=color, alpha=0.2, linewidth=0)
        over_tokens(axis, [t for t, _ in lines[next(iter(ops))]])
        if flag := run.get("flag"):
            axis.axhline(flag["us"], color="k", linestyle="--", linewidth=1, label="round trip of a bare flag")
        axis.set_title(panel)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2, fontsize=8)
    axes[0][0].set_ylabel("µs, mean and 99th percentile")
    return [save(figure, stem.with_name(f"{stem.name}-tokens.svg"), title(run, run["dtype"]))]


def sweep(run: Found, axis: str, routing: str) -> dict[str, list[tuple[int, Found]]]:
    """By operator: what was measured along `axis` (of AXES) from the workload that sweeps start from, sorted."""
    results = [r for r in run["results"] if r["op"] in BUDGETS]
    if not results:
        return {}
    centre = {key: value for key, value in centre_of(results).items() if key != axis}
    chosen = [r for r in results if (r["given_sms"] is not None) == (axis == "given_sms")]
    return varied(chosen, axis, tuple(BUDGETS), routing=routing, **centre)


def sweep_lines(run: Found) -> Iterator[str]:
    """Yield a line for each sweep of each operator: µs in steady state, and the ratio to the link."""
    for axis, label in AXES.items():
        for routing in ROUTINGS:
            for op, points in sweep(run, axis, routing).items():
                texts = (f"{x}: {taken(r):.1f}" + (f" ({r['ratio']:.0%})" if "ratio" in r else "") for x, r in points)
                yield f"{NAMES[op]}, {routing}, µs (of link) over {label}: {', '.join(texts)}"


def ratio_plot(runs: Sequence[Found], path: Path) -> None:
    """Plot the ratio to the link over tokens for runs with different numbers of ranks. A horizontal line means that
    time is proportional to bytes."""
    shape = (len(ROUTINGS), len(runs))
    figure, axes = pyplot().subplots(
        *shape, figsize=(5.5 * shape[1], 4 * shape[0]), sharex=True, sharey=True, squeeze=False
    )
    for row, routing in zip(axes, ROUTINGS, strict=True):
        for axis, run in zip(row, runs, strict=True):
            axis.set(ylim=(0, 1.05), title=f"{run['world_size']} ranks, {routing} routing")
            lines = {op: points for op, points in sweep(run, "tokens", routing).items() if op in COLOURS}
            draw(axis, lines, RATIO)
            for points in lines.values():
                log_ticks(axis, [x for x, _ in points])
            axis.tick_params(labelbottom=True)
        row[0].set_ylabel("ratio to the link's best speed")
    for axis in axes[-1]:
        axis.set_xlabel("tokens a rank")
    axes[0][0].legend(loc="lower right")
    save(figure, path, runs[0]["machine"]["device"])


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", nargs="+", type=recorded, help="JSON files that `ep-ops bench ... --out` wrote")
    options.add_argument("--plots", type=Path, help="folder for the plots (default: next to each file)")
    options.add_argument("--no-plots", action="store_true")
    options.add_argument("--summary", action="store_true", help="throughput: the central workload only, default SMs")
    options.add_argument(
        "--ratio", type=a_file, metavar="FILE", help="throughput: print sweeps, plot ratios to the link"
    )
    args = options.parse_args(argv)
    for run in args.results:
        if "link" not in run and (args.ratio or run.get("benchmark") != "latency"):
            options.error(f"{run['path']} is a run of {run.get('benchmark', 'a study')}; allowed: a run of throughput"
                          f"{'' if args.ratio else ' or latency'}")  # fmt: skip
    if args.ratio:
        found = [complete(run) for run in args.results]
        for run in found:
            print(f"{run['world_size']} ranks", *sweep_lines(run), sep="\n")
        ratio_plot([run for run in found if sweep(run, "tokens", "balanced") and run["link"]], args.ratio)
        return 0
    for run in args.results:
        path = Path(run["path"])
        stem = (args.plots or path.parent) / path.stem
        if run.get("benchmark") == "latency":
            print(latency_markdown(run), end="\n\n")
            written = [] if args.no_plots else latency_plot(run, stem)
        else:
            complete(run)
            print(markdown(summary(run) if args.summary else run), end="\n\n")
            written = [] if args.no_plots else plot(run, stem)
        if written:
            print(f"plots: {', '.join(map(str, written))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
