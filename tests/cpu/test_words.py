"""Texts that users read are plain technical English: unusual words that stood for common terms are errors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ep_ops

ROOT = Path(ep_ops.__file__).parent.parent

REWRITTEN = (
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "docs/quickstart.md",
    "docs/release.md",
    "docs/results.md",
    "ep_ops/bench/model.py",
)
"""Files that have been rewritten. Whoever rewrites another one adds it here."""

RULED_OUT = {
    r"\bbeside\b": "next to, compared with, concurrently with",
    r"\b(told|owed)\b": "the name of the message or of the expected data",
    r"\bmended\b": "fixed",
    r"\brefus(?:es?|ed|als?)\b": "rejects, raises",
    r"\b(?:was|were) asked for\b|\bis reached\b|\bis missed\b": "the figure alone",
    r"\bown script\b|\blast time\b|\bnot found out\b|\bhas not run\b": "nothing: history belongs in git",
    r"\bof right values\b|\bof which what\b|\bwhat of it\b": "a full sentence",
    r"(?m)^(?:Of|Likewise|The same)\b": "a sentence that says what it is about",
    r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b": "no commit ids",
    r"\b(?:synchronis|quantis|normalis|recognis)\w*": "spelling with z",
}
"""Pattern -> what to write instead."""


def prose(path: Path) -> str:
    """Text for readers: a page without its code, or the docstrings and error messages of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.S)
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            public = not getattr(node, "name", "").startswith("_")
            found.append(ast.get_docstring(node) or "" if public else "")
        elif isinstance(node, ast.Raise) and node.exc is not None:
            strings = (n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant))
            found.append(" ".join(s for s in strings if isinstance(s, str)))
    return re.sub(r"`[^`\n]*`", "", "\n".join(found))


def wrong_words(text: str) -> list[str]:
    return [f"{m[0]!r}: write {better}" for pattern, better in RULED_OUT.items() for m in re.finditer(pattern, text)]


@pytest.mark.parametrize("name", REWRITTEN)
def test_words(name: str) -> None:
    assert wrong_words(prose(ROOT / name)) == []


def test_what_is_found(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("22 was asked for.\nMeasured at f94ed22.\n```\nmended\n```\n")
    assert [found.partition(":")[0] for found in wrong_words(prose(page))] == ["'was asked for'", "'f94ed22'"]
    module.write_text('def f():\n    """Of rows."""\n    raise ValueError(f\'{1} was refused\')\n')
    assert [found.partition(":")[0] for found in wrong_words(prose(module))] == ["'refused'", "'Of'"]
