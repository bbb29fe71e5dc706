"""Plots of the last operations: when each rank began them, and for whom it waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from .lateness import Lateness

_CELL, _LEFT, _TOP, _RIGHT = 26, 80, 62, 120
_LEAST = 500  # width of the heading


def plot_begun(lateness: Lateness, path: str | Path) -> Path:
    """Write an SVG that shows how much later than the first rank each rank began each of the last operations.

    It has a line for each rank and a cell for each operation; darker is later. The mean in µs follows each line, and
    the heading names the rank that is latest on average.

    Args:
        lateness: result of :meth:`Communicator.lateness`.
        path: the file to write.

    Returns:
        ``path``.

    Raises:
        ValueError: no operation was recorded by all ranks (the reference backend records none).
    """
    _reject_none(lateness)
    late = (lateness.begun * 1e6).tolist()
    means = (lateness.late * 1e6).tolist()
    heads = ("How much later than the first rank each one began", f"latest on average: {_worst(means)}")
    names = [f"operation {number}" for number in lateness.operations]
    foot = f"operations {lateness.operations[0]} to {lateness.operations[-1]} of the communicator"
    return _grid(Path(path), heads, late, names, ("mean, µs", means), foot)


def plot_waits(lateness: Lateness, path: str | Path) -> Path:
    """Write an SVG that shows how long each rank waited for each other rank.

    It has a line for each waiting rank and a cell for each awaited rank, the mean over the last operations of the
    longest wait of a thread; darker is longer. The longest cell in µs follows each line, and the heading names the rank
    that is waited for most. A straggler is a dark column.

    Arguments, result and errors are those of :func:`plot_begun`.
    """
    _reject_none(lateness)
    ranks = lateness.waits.shape[0]
    of_others = 1 - torch.eye(ranks, device="cpu")
    means = (lateness.waits.mean(2) * of_others * 1e6).tolist()  # µs
    heads = (
        "For how long each rank waited for each other one",
        f"waited for most: {_worst((lateness.awaited * 1e6).tolist())}",
    )
    names = [f"wait for rank {rank}" for rank in range(ranks)]
    first, last = lateness.operations[0], lateness.operations[-1]
    foot = f"from left to right: for ranks 0 to {ranks - 1}; operations {first} to {last}"
    return _grid(Path(path), heads, means, names, ("longest, µs", [max(row) for row in means]), foot)


def _reject_none(lateness: Lateness) -> None:
    if not lateness.operations:
        raise ValueError("lateness has no operations that all ranks have recorded; allowed: those of the cute backend")


def _worst(of_rank: Sequence[float]) -> str:
    worst = max(range(len(of_rank)), key=of_rank.__getitem__)
    return f"rank {worst}, {of_rank[worst]:.1f} µs"


def _grid(
    path: Path, heads: tuple[str, str], cells: Sequence[Sequence[float]], columns: Sequence[str],
    behind: tuple[str, Sequence[float]], foot: str,
) -> Path:  # fmt: skip
    """Write values in µs by rank: two headings, cells with tooltips, a number after each line, and a footer."""
    most = max(*(max(row) for row in cells), 1e-9)
    width = max(_LEFT + _CELL * len(cells[0]) + _RIGHT, _LEAST)
    height = _TOP + _CELL * len(cells) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial,'
        ' sans-serif" font-size="12" fill="#1b1f24">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(10, 20, f"{heads[0]}; darkest: {most:.1f} µs", 'font-weight="bold"'),
        _text(10, 38, heads[1]),
        _text(width - 10, _TOP - 8, behind[0], 'text-anchor="end"'),
    ]
    for rank, values in enumerate(cells):
        y = _TOP + _CELL * rank
        out.append(_text(_LEFT - 8, y + 17, f"rank {rank}", 'text-anchor="end"'))
        for column, value in enumerate(values):
            place = f'x="{_LEFT + _CELL * column}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}"'
            title = f"<title>rank {rank}, {columns[column]}: {value:.1f} µs</title>"
            out.append(
                f'<rect {place} fill="#c0392b" fill-opacity="{value / most:.3f}" stroke="#d0d7de">{title}</rect>'
            )
        out.append(_text(width - 10, y + 17, f"{behind[1][rank]:.1f}", 'text-anchor="end"'))
    out += [_text(_LEFT, height - 10, foot), "</svg>"]
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
    return path


def _text(x: float, y: float, text: str, how: str = "") -> str:
    return f'<text x="{x}" y="{y}" {how}>{escape(text)}</text>'
