"""What the model found, as tables and as a plot with its assumptions: `python -m ep_ops.bench.model_report FILE`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .figures import markdown_table, pyplot, text_table

Found = dict[str, Any]


def as_json(found: Found) -> str:
    """One line for each entry; five digits."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: short(held) for key, held in value.items()}
        return [short(held) for held in value] if isinstance(value, list) else value

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    parts = []
    for key, value in short(found).items():
        if isinstance(value, list):
            value = "[\n  " + ",\n  ".join(map(line, value)) + "\n ]"
        else:
            value = line(value)
        parts.append(f' "{key}": {value}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---------------------------------------------------------------- tables


def where(entry: Found) -> str:
    if entry["domains"] == 1:
        return f"one of {entry['domain_ranks']}"
    return f"{entry['domains']} x {entry['domain_ranks']}, {(entry['wire'] or '').split(',')[0]}"


def gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f}"


def prediction_rows(found: Found) -> list[list[str]]:
    heading = [
        "domains", "dispatch µs", "combine µs", "SMs", "rounds", "NVLink MB", "network MB", "beside rows",
        "staging GiB", "few: dispatch µs", "combine µs", "network MB", "staging GiB",
    ]  # fmt: skip
    rows = [heading]
    for p in found["predictions"]:
        moved = p["near_bytes"] + p["far_bytes"]
        other = (p["near_other_bytes"] + p["far_other_bytes"]) / moved if moved else 0.0
        rows.append(
            [
                where(p), f"{p['dispatch_us']:.0f}", f"{p['combine_us']:.0f}",
                ", ".join(map(str, p["sms"] or ())), str(p["rounds"]),
                f"{p['near_bytes'] / 1e6:.0f}", f"{p['far_bytes'] / 1e6:.0f}", f"{100 * other:.1f} %",
                gib(p["staging_bytes"]), f"{p['few_dispatch_us']:.0f}", f"{p['few_combine_us']:.0f}",
                f"{p['few_far_bytes'] / 1e6:.1f}", gib(p["few_staging_bytes"]),
            ]
        )  # fmt: skip
    return rows


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


def assumptions(found: Found) -> list[str]:
    constants = ", ".join(f"{op} {us:.1f}" for op, us in found["gpu"]["constants"].items())
    return [
        "Even routing, hidden 7168, bf16, top-8, experts: the multiple of the ranks from 256 on; many:"
        f" {found['tokens']} tokens a rank, few: {found['few_tokens']}; staging of many tokens at most"
        f" {found['staging_limit'] / 2**30:g} GiB",
        f"GPU: {found['gpu']['told']}; constants in µs: {constants}",
        *(f"{wire['name']}: {wire['told']}" for wire in found["wires"]),
        f"GB200, for published figures alone: {found['gb200']}",
    ]


def text(found: Found) -> str:
    parts = (prediction_rows(found), error_rows(found), published_rows(found))
    return "\n\n".join("\n".join(lines) for lines in (assumptions(found), *map(text_table, parts)))


def markdown(found: Found) -> str:
    titles = ("Predictions", "Beside what was measured", "Beside what others publish")
    lines = ["## Assumptions", "", *(f"- {line}." for line in assumptions(found))]
    parts = (prediction_rows(found), error_rows(found), published_rows(found))
    for title, rows in zip(titles, parts, strict=True):
        lines += ["", f"## {title}", "", *markdown_table(rows)]
    return "\n".join(lines)


# ---------------------------------------------------------------- plot

COLOURS = {None: "#333333", "InfiniBand, GPU-initiated": "#1b6ca8", "EFA, proxies": "#c0392b"}


def plot(found: Found, path: Path) -> Path:
    """Times over ranks, and what the model rests on beside them, as an SVG file; returns its path."""
    plt = pyplot()
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
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="µs", title=f"{title}: {tokens} a rank")
        axis.set_xticks([n for n in ranks if n & (n - 1) == 0])
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.xaxis.minorticks_off()
    axes[0][0].legend(fontsize=8)
    gone = axes[0][2].get_gridspec()
    for axis in axes[:, 2]:
        axis.remove()
    beside = figure.add_subplot(gone[:, 2])
    beside.axis("off")
    said = "\n\n".join(textwrap.fill(line, 46) for line in ("What it rests on:", *assumptions(found)[:-1]))
    beside.text(0, 1, said, va="top", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def by_line(found: Found) -> dict[tuple[str | None, int], list[Found]]:
    lines: dict[tuple[str | None, int], list[Found]] = {}
    for entry in found["predictions"]:
        size = 0 if entry["wire"] is None else max(entry["domain_ranks"], 8)
        lines.setdefault((entry["wire"], size), []).append(entry)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m ep_ops.bench.model_report", description=__doc__)
    options.add_argument("result", type=Path, help="JSON that `ep-ops bench model --out` wrote")
    args = options.parse_args(argv)
    print(markdown(json.loads(args.result.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
