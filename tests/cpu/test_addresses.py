"""Kernels name elements of memory by indices: only the files of the layouts and of the views compute with bytes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "cute_kernels"
LAYOUTS = {"heap.py", "latency/sizes.py"}
"""Where sections of the heap are laid out."""
VIEWS = {"views.py", "sync.py"}
"""Where views are made from layouts: their classes, and those of `Ranks`."""
LAYOUT_FIELDS = {"offset", "distance", "size"}
LOADS = {f"{way}_{kind}" for way in ("ld", "st") for kind in ("i32", "u8", "pair")} | {"st_f32", "ld_f32"}
SIZES = {4, 8, 16}


def sources() -> dict[str, ast.Module]:
    found = {str(path.relative_to(KERNELS)): ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")}
    return {name: tree for name, tree in found.items() if name not in LAYOUTS}


def is_cast(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Int64"


def in_bytes(node: ast.AST) -> bool:
    """Whether a factor is a number of bytes: that of an element, or a name that says so."""
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if name.lower().endswith(("bytes", "stride", "step")) and name != "step":
            return True
    return isinstance(node, ast.Constant) and node.value in SIZES


def by_hand(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each place that addresses memory without a view, as a line and what it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            if node.value.attr in LAYOUT_FIELDS and "heap" in ast.unparse(node.value.value):
                yield node.lineno, f"uses the {node.value.attr} of a section"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "at" and ast.unparse(node.func.value) in ("ranks", "heap", "self.heap", "ranks.heap"):
                yield node.lineno, "asks for the address of a section"
            if node.func.attr in LOADS and ast.unparse(node.func.value) == "ptx":
                if not isinstance(node.args[0], ast.Name):
                    yield node.lineno, f"computes the address of {node.func.attr}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if is_cast(node.left) and in_bytes(node.right):
                yield node.lineno, "multiplies an index by a number of bytes"


def test_only_views_compute_addresses() -> None:
    found = [
        f"cute_kernels/{name}:{line} {what}; views.py has views for this"
        for name, tree in sources().items()
        if name not in VIEWS
        for line, what in by_hand(tree)
    ]
    assert not found, "\n".join(found)


def test_these_places_are_found() -> None:
    """The ways in which an address can be computed by hand are recognized."""
    text = """
at = ranks.at(ranks.own, "kept") + Int64(tile * p.world_size + source) * 8
row = ptx.ld_i32(args.send_rows + Int64(j) * 4)
base = ranks.own + ranks.heap.offset["alarm"]
x = args.x + Int64(token) * p.row_bytes
"""
    found = sorted(by_hand(ast.parse(text)))
    assert [line for line, _ in found] == [2, 2, 3, 3, 4, 5]


def test_few_casts_are_left() -> None:
    """Indices are widened by views."""
    casts = sum(is_cast(node) for tree in sources().values() for node in ast.walk(tree))
    assert casts <= 100
