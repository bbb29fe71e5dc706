"""What mkdocstrings reads besides docstrings (``extensions`` in mkdocs.yml): comments behind the fields of records."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):`([^`]*)`")


class Comments(griffe.Extension):
    """A field's comment, at the end of its line, is its docstring; roles of Sphinx are code."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.endlineno is not None and attr.parent is not None and attr.parent.is_class:
            _, behind, comment = attr.lines_collection[attr.filepath][attr.endlineno - 1].partition("  # ")
            if behind:
                attr.docstring = griffe.Docstring(comment, lineno=attr.lineno, parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
