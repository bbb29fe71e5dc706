"""Tables and plots of all benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine_line(run: dict[str, Any]) -> str:
    m = run["machine"]
    shared = ""
    if sharing := run.get("sharing"):
        how = "at the same time under MPS" if sharing["mps"] else "by turns"
        shared = f"; {sharing['ranks']} ranks share a GPU, {how}, with {sharing['sms']} SMs each: no times of a link"
    return (
        f"{run['world_size']} x {m['device']}, torch {m['torch']}, CUDA {m['cuda']}, NCCL {m['nccl']}, driver "
        f"{m['driver']}, backend {m['backend']}{shared}"
    )


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table for a terminal. The first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown. The first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" + " ---: |" * (len(rows[0]) - 1), *lines[1:]]


def pyplot() -> Any:
    """Return matplotlib.pyplot, configured to write SVG files. ImportError if it is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 10, "axes.grid": True, "grid.alpha": 0.3})
    return plt


def log_ticks(axis: Any, values: Sequence[int]) -> None:
    """Make the x axis logarithmic, and label these values."""
    axis.set_xscale("log")
    axis.set_xticks(values)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.xaxis.minorticks_off()


def title(run: dict[str, Any], dtype: str) -> str:
    return f"{run['world_size']} x {run['machine']['device']}, {dtype}"


def save(figure: Any, path: Path, title: str = "") -> Path:
    """Save a figure as an SVG file, and return its path."""
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
    return path
