"""Hooks of mkdocs (``hooks`` in mkdocs.yml).

They add pages from outside docs/ to the site, adapt the links between pages, and insert the schemas of operators.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ep_ops.operators import OPERATORS

ROOT = Path(__file__).resolve().parent.parent
PAGES = "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md"
ELSEWHERE = {"README.md": "index.md"} | {
    name: name
    for path in (*PAGES, *sorted((ROOT / "benchmarks/results").iterdir()))
    for name in [os.path.relpath(ROOT / path, ROOT)]
}
"""Files outside docs/ -> their paths in the site."""

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")


def on_files(files: Files, config: Any) -> Files:
    for source, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    place = page.file.src_uri
    source = {place: source for source, place in ELSEWHERE.items()}.get(place, f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        """Convert a link between files of the repository to one between pages of the site."""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
        there = ELSEWHERE.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(there, posixpath.dirname(place) or ".")

    return LINK.sub(moved, markdown).replace("<!-- schemas -->", schemas())


WIDE, WIDE_BEYOND_FIRST = 60, 30
"""Tables of three or more columns with a cell of this many characters are stacked on phones (site.css)."""


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r"<table>.*?</table>", stacked, html, flags=re.S)


def stacked(table: re.Match[str]) -> str:
    """Add the heading of its column to each cell, if the table has long cells."""
    heads = [plain(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.S)]
    cells = [plain(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", table[0], re.S)]
    beyond = [cell for i, cell in enumerate(cells) if i % max(len(heads), 1)]
    longest = max(map(len, cells), default=0)
    if len(heads) < 3 or (longest < WIDE and max(map(len, beyond), default=0) < WIDE_BEYOND_FIRST):
        return table[0]
    labels = itertools.cycle(heads)
    labeled = re.sub(r"<td", lambda _: f'<td data-label="{next(labels)}"', table[0])
    return labeled.replace("<table>", "<table data-stacked>")


def plain(cell: str) -> str:
    return re.sub(r"<[^>]*>", "", cell).replace('"', "&quot;")


def schemas() -> str:
    """Return the section on schemas of docs/operators.md, with one argument or result on each line."""
    return "\n\n".join(f"### {op.name}\n\n```\n{broken(op.name, op.schema)}\n```" for op in OPERATORS)


def broken(name: str, schema: str) -> str:
    arguments, _, results = schema.partition(" -> ")
    return f"ep::{name}{lines(arguments)} -> {lines(results)}"


def lines(items: str) -> str:
    """Break ``(a, b)`` into several lines."""
    if not items.startswith("("):
        return items
    return "(\n" + "".join(f"    {item},\n" for item in items[1:-1].split(", ")) + ")"
