"""Texts that readers see are plain technical English: unusual words that stood for common terms are errors."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import ep_ops

ROOT = Path(ep_ops.__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", ".github/**/*.md")
CODE = ("ep_ops", "cute_kernels", "meta_kernels", "benchmarks", "examples", "docs")

RULED_OUT = {
    r"\b[Bb]eside\b": "next to, compared with, concurrently with",
    r"\b(?:[Tt]old|owed)\b": "the name of the message or of the expected data",
    r"\bmended\b": "fixed",
    r"\b[Rr]efus(?:es?|ed|al)s?\b": "rejects, raises",
    r"\b(?:was|were) asked for\b|\bis reached\b|\bis missed\b": "the figure alone",
    r"\bown script\b|\blast time\b|\bnot found out\b|\bhas not run\b": "nothing: history belongs in git",
    r"\bof right values\b|\bof which what\b|\bwhat of it\b": "a full sentence",
    r"(?m)^(?:Of|Likewise|The same(?= by|,|\.))\b": "a sentence that says what it is about",
    r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b": "no commit ids",
    r"\bgarbage for good\b": "stale data as valid",
    r"\b(?:synchronis|quantis|normalis|recognis)\w*": "spelling with z",
}
"""Pattern -> what to write instead."""

STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))  # the second since Python 3.12


def files() -> list[Path]:
    modules = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    found = {*(path for pattern in PAGES for path in ROOT.glob(pattern)), *modules}
    return sorted(found)


def prose(path: Path) -> str:
    """Text for readers: a page without its code, or the comments and texts (strings with a space) of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"\]\([^)]*\)", "", without_code(re.sub(r"```.*?```", "", text, flags=re.S)))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.append(without_code(token.string.lstrip("# ")))
        elif token.type in STRINGS and " " in token.string:
            body = token.string.lstrip("rbfRBF").strip("\"'")
            found.append(without_code(re.sub(r"\{[^{}]*\}", "", body) if token.string[0] in "fF" else body))
    return "\n".join(found)


def without_code(text: str) -> str:
    return re.sub(r"``[^`]*``|`[^`]*`", "", text)


def wrong_words(text: str) -> list[str]:
    return [f"{m[0]!r}: write {better}" for pattern, better in RULED_OUT.items() for m in re.finditer(pattern, text)]


def test_words() -> None:
    assert len(files()) > 200
    wrong = {str(path.relative_to(ROOT)): words for path in files() if (words := wrong_words(prose(path)))}
    assert wrong == {}


FRAGMENTS = frozenset({"What", "Of", "As", "Likewise"})
"""First words of docstrings that are no sentences."""
UNCLEAR = FRAGMENTS | set(
    "Against Also And Beside But By Else Eager Into Its It Neither Nor Said Straight Their Them They Those To Which"
    " Whoever".split()
)
"""The same of tests, whose first sentence names what it is about."""


def fragments(text: str) -> list[str]:
    """Return the beginnings of a test module's docstrings that do not say what is guaranteed, or what a helper does."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            said = ast.get_docstring(node) or ""
            words = UNCLEAR if getattr(node, "name", "").startswith("test_") else FRAGMENTS
            if re.match(r"\w*", said)[0] in words:
                found.append(said.split("\n")[0])
    return found


def test_docstrings_of_tests_are_sentences() -> None:
    """The docstring of a test says what is guaranteed, and that of a helper what it does, so that whoever reads of a
    failure learns what is broken."""
    modules = sorted((ROOT / "tests").rglob("*.py"))
    assert len(modules) > 200
    wrong = {str(path.relative_to(ROOT)): texts for path in modules if (texts := fragments(path.read_text()))}
    assert wrong == {}
    text = 'def f():\n    """Of a rank."""\ndef test_g():\n    """It runs."""\ndef it():\n    """It is."""\n'
    assert fragments(text) == ["Of a rank.", "It runs."]


def test_docstrings_of_kernels_say_what_a_thing_is() -> None:
    """The docstring of a kernel's part begins with what the part is or does, not with a question."""
    found = [
        f"{path.relative_to(ROOT)}: {(ast.get_docstring(node) or '')[:60]}"
        for path in sorted((ROOT / "cute_kernels").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        and re.match("(As|How|Of|What|Where|Which) ", ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(found)


IDENTIFIERS = {r"refus": "reject", r"mend": "fix"}
"""Pattern in the name of a function, class, constant or attribute -> what to write instead."""


def identifiers(text: str) -> set[str]:
    """Return the names that a module defines: functions, classes, and what is assigned."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def wrong_identifiers(text: str) -> list[str]:
    words = {name: re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower() for name in identifiers(text)}
    return [
        f"{name}: write {better}"
        for name, lower in words.items()
        for pattern, better in IDENTIFIERS.items()
        if re.search(rf"(?:^|_){pattern}", lower)
    ]


def test_identifiers() -> None:
    """Names follow the same rules as texts."""
    modules = [path for path in files() if path.suffix == ".py"]
    wrong = {str(path.relative_to(ROOT)): names for path in modules if (names := wrong_identifiers(path.read_text()))}
    assert wrong == {}
    assert sorted(wrong_identifiers("def refuse_it(): pass\nclass IsRefused: mended = recommended = 1\n")) == [
        "IsRefused: write reject", "mended: write fix", "refuse_it: write reject"
    ]  # fmt: skip


def test_what_is_found(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("22 was asked for.\nMeasured at f94ed22.\n```\nmended\n```\n`told`\n")
    assert [found.partition(":")[0] for found in wrong_words(prose(page))] == ["'was asked for'", "'f94ed22'"]
    module.write_text('told = f"{beside} is refused"  # told\n"""Of ``refused`` rows."""\nbeside = "beside"\n')
    assert sorted(found.partition(":")[0] for found in wrong_words(prose(module))) == ["'Of'", "'refused'", "'told'"]
