"""What mkdocstrings reads besides docstrings (``extensions`` in mkdocs.yml): comments behind the fields of records."""

from __future__ import annotations

import re
from typing import Any

import griffe

CHECKER = re.compile(r"(?:fmt|type|noqa)\b[: ]")
"""Comments for tools."""

ROLE = re.compile(r":(?:class|func|meth|mod):`([^`]*)`")


PAGE = re.compile(r"docs/([a-z-]+)\.md")


def with_links(text: str) -> str:
    return PAGE.sub(r"[\1](../\1.md)", ROLE.sub(r"`\1`", text))


class Comments(griffe.Extension):
    """A field's comment, at the end of its line, is its docstring; roles of Sphinx are code, names of pages links."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.endlineno is not None and attr.parent is not None and attr.parent.is_class:
            _, behind, comment = attr.lines_collection[attr.filepath][attr.endlineno - 1].partition("  # ")
            if behind and not CHECKER.match(comment):
                attr.docstring = griffe.Docstring(with_links(comment), lineno=attr.lineno, parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_links(obj.docstring.value)
