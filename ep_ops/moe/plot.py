"""A picture of when ranks began their operations: a straggler is a dark line."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from .statistics import Stats

_CELL, _LEFT, _TOP, _RIGHT = 26, 80, 62, 120
_LEAST = 500  # what the heading takes


def plot_begun(stats: Stats, path: str | Path) -> Path:
    """Writes an SVG file: a line for each rank, a cell for each of the last operations, the darker the later the rank
    began it than the first one did, and behind each line the mean in µs. Its heading names the rank that is latest.

    ValueError if no operation has been noted by all ranks (the reference backend notes none).
    """
    if not stats.operations:
        raise ValueError("stats has no operations that all ranks have noted; allowed: those of the cute backend")
    late = (stats.begun * 1e6).tolist()  # µs
    means = (stats.late * 1e6).tolist()
    most = max(max(map(max, late)), 1e-9)
    worst = max(range(len(means)), key=means.__getitem__)
    width = max(_LEFT + _CELL * len(stats.operations) + _RIGHT, _LEAST)
    height = _TOP + _CELL * len(late) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial,'
        ' sans-serif" font-size="12" fill="#1b1f24">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(
            10, 20, f"How much later than the first rank each one began; darkest: {most:.1f} µs", 'font-weight="bold"'
        ),
        _text(10, 38, f"latest on average: rank {worst}, {means[worst]:.1f} µs"),
        _text(width - 10, _TOP - 8, "mean, µs", 'text-anchor="end"'),
    ]
    for rank, values in enumerate(late):
        y = _TOP + _CELL * rank
        out.append(_text(_LEFT - 8, y + 17, f"rank {rank}", 'text-anchor="end"'))
        for column, (number, value) in enumerate(zip(stats.operations, values, strict=True)):
            place = f'x="{_LEFT + _CELL * column}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}"'
            told = f"<title>{escape(f'rank {rank}, operation {number}: {value:.1f} µs')}</title>"
            out.append(f'<rect {place} fill="#c0392b" fill-opacity="{value / most:.3f}" stroke="#d0d7de">{told}</rect>')
        out.append(_text(width - 10, y + 17, f"{means[rank]:.1f}", 'text-anchor="end"'))
    first, last = stats.operations[0], stats.operations[-1]
    out += [_text(_LEFT, height - 10, f"operations {first} to {last} of the communicator"), "</svg>"]
    path = Path(path)
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
    return path


def _text(x: float, y: float, text: str, how: str = "") -> str:
    return f'<text x="{x}" y="{y}" {how}>{escape(text)}</text>'
