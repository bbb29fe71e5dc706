"""The rooms of the code and the arrows between them: who imports whom, lazily or for types alone included."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import ep_ops

ROOT = Path(ep_ops.__file__).parent.parent
PACKAGES = ("ep_ops", "cute_kernels", "meta_kernels")

ROOMS = {
    # room: what it may import of our own code
    "ep_ops.version": (),
    "ep_ops.arrivals": ("meta_kernels",),
    "ep_ops.formats": ("meta_kernels",),
    "ep_ops.records": ("ep_ops.arrivals", "ep_ops.formats", "meta_kernels"),
    "ep_ops.specs": ("ep_ops.formats", "ep_ops.records", "meta_kernels"),
    "ep_ops.config": ("ep_ops.records", "ep_ops.version"),
    "ep_ops.group": ("ep_ops.config",),
    "ep_ops.arguments": (),
    "ep_ops.inputs": ("ep_ops.config", "ep_ops.records", "ep_ops.registry"),
    "ep_ops.overflow": (),
    "ep_ops.checks": (
        "ep_ops.arrivals", "ep_ops.formats", "ep_ops.records", "ep_ops.config", "ep_ops.specs", "meta_kernels",
    ),
    "ep_ops.symmetric": ("ep_ops.group",),
    "ep_ops.statistics": ("ep_ops.formats", "ep_ops.overflow", "ep_ops.records", "ep_ops.symmetric"),
    "ep_ops.backends": (
        "ep_ops.arrivals", "ep_ops.formats", "ep_ops.records", "ep_ops.config", "ep_ops.group", "ep_ops.symmetric",
        "ep_ops.specs", "cute_kernels", "meta_kernels",
    ),
    "ep_ops.memory": ("ep_ops.arrivals", "ep_ops.config", "ep_ops.formats", "ep_ops.backends", "ep_ops.records"),
    "ep_ops.registry": ("ep_ops.config", "ep_ops.group", "ep_ops.overflow", "ep_ops.statistics", "ep_ops.backends"),
    "ep_ops.operators": (
        "ep_ops.records", "ep_ops.config", "ep_ops.checks", "ep_ops.backends", "ep_ops.registry", "ep_ops.specs",
        "meta_kernels",
    ),
    "ep_ops.methods": (
        "ep_ops.records", "ep_ops.config", "ep_ops.operators", "ep_ops.inputs", "ep_ops.formats", "ep_ops.registry",
        "meta_kernels",
    ),
    "ep_ops.creation": ("ep_ops.config", "ep_ops.group", "ep_ops.backends", "ep_ops.registry"),
    "ep_ops.communicator": (
        "ep_ops.records", "ep_ops.config", "ep_ops.checks", "ep_ops.group", "ep_ops.memory", "ep_ops.registry",
        "ep_ops.backends", "ep_ops.arguments", "ep_ops.inputs", "ep_ops.formats", "ep_ops.methods",
        "ep_ops.operators", "ep_ops.overflow", "ep_ops.creation", "ep_ops.statistics",
    ),
    "ep_ops.nn": (
        "ep_ops.config", "ep_ops.arrivals", "ep_ops.records", "ep_ops.communicator", "ep_ops.formats", "ep_ops.group",
        "ep_ops.operators", "ep_ops.backends", "ep_ops.overflow", "ep_ops.inputs", "cute_kernels", "meta_kernels",
    ),
    "ep_ops.moe": (
        "ep_ops.records", "ep_ops.config", "ep_ops.group", "ep_ops.arguments", "ep_ops.backends", "ep_ops.operators",
        "ep_ops.formats", "ep_ops.communicator", "ep_ops.nn", "ep_ops.overflow",
    ),
    "ep_ops.integrations": (
        "ep_ops.arrivals", "ep_ops.records", "ep_ops.backends", "ep_ops.communicator", "ep_ops.formats",
        "ep_ops.group", "ep_ops.nn", "ep_ops.operators", "ep_ops.registry", "ep_ops.arguments", "ep_ops.config",
    ),
    "ep_ops": (
        "ep_ops.version", "ep_ops.config", "ep_ops.records", "ep_ops.memory", "ep_ops.operators", "ep_ops.communicator",
    ),
    "ep_ops.commands": (
        "ep_ops", "ep_ops.config", "ep_ops.memory", "ep_ops.group", "ep_ops.symmetric", "ep_ops.formats",
        "ep_ops.backends", "ep_ops.nn", "cute_kernels",
    ),
    "ep_ops.bench": (
        "ep_ops", "ep_ops.arrivals", "ep_ops.records", "ep_ops.config", "ep_ops.commands", "ep_ops.symmetric",
        "ep_ops.backends", "ep_ops.formats", "ep_ops.nn", "ep_ops.integrations", "cute_kernels",
    ),
    "ep_ops.commands.cli": ("ep_ops", "ep_ops.commands", "ep_ops.bench"),
    "ep_ops.__main__": ("ep_ops.commands.cli",),
    "cute_kernels": (),
    "meta_kernels": (),
}  # fmt: skip
OUTSIDE = {"cute_kernels": {"cutlass", "cuda"}, "meta_kernels": {"torch"}}
"""What these may import besides their own files and the standard library."""

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def room_of(module: str) -> str:
    """The longest name in the table that the module lies in; ``ep_ops`` itself is its ``__init__`` alone."""
    found = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    best = max(found, key=len)
    assert best != "ep_ops" or module == "ep_ops", f"{module} is in no room of the table"
    return best


def imported(module: str) -> Iterator[str]:
    """Every module that the file imports, wherever in it; names of packages are resolved to their files."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            for name in node.names:
                whole = f"{base}.{name.name}"
                yield whole if whole in FILES else base


IMPORTS = {module: sorted(set(imported(module))) for module in FILES}


def test_arrows_go_one_way():
    wrong = []
    for module, names in IMPORTS.items():
        room = room_of(module)
        for name in names:
            if name.partition(".")[0] in PACKAGES:
                other = room_of(name)
                if other not in (room, *ROOMS[room]):
                    wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_rooms_have_no_circles():
    left = {room: set(others) for room, others in ROOMS.items()}
    while left:
        free = [room for room, others in left.items() if not others & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        for room in free:
            del left[room]


def test_files_have_no_circles():
    left = {
        module: {name for name in names if name in FILES and name not in PACKAGES and name != module}
        for module, names in IMPORTS.items()
    }
    while left:
        free = [module for module, others in left.items() if not others & left.keys()]
        assert free, {module: sorted(others & left.keys()) for module, others in left.items()}
        for module in free:
            del left[module]


def test_every_room_is_used():
    assert {room_of(module) for module in FILES} == set(ROOMS)


def test_device_code_and_fakes_stand_alone():
    allowed = {package: {package, *OUTSIDE[package], *sys.stdlib_module_names} for package in OUTSIDE}
    for module, names in IMPORTS.items():
        package = module.partition(".")[0]
        if package in allowed:
            foreign = {name for name in names if name.partition(".")[0] not in allowed[package]}
            assert not foreign, f"{module} imports {sorted(foreign)}"


TUPLES = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}
TENSORS = {"_version"}


def test_nobody_reaches_into_another_files_private_names():
    """Names of ours that begin with an underscore are used by the file that defines them."""
    defined = {
        module: {
            node.attr if isinstance(node, ast.Attribute) else node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.startswith("_"))
            or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_"))
        }
        for module, path in FILES.items()
    }
    private = {name for names in defined.values() for name in names if not name.endswith("__")} - TUPLES - TENSORS
    wrong = []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in private and node.attr not in defined[module]:
                wrong.append(f"{module}:{node.lineno}: .{node.attr}")
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] in PACKAGES):
                names = [name.name for name in node.names]
                wrong += [f"{module}:{node.lineno}: {name}" for name in names if name[0] == "_" and name[-1] != "_"]
    assert not wrong, "\n".join(wrong)


FOREIGN = "ep_ops.integrations.deep_ep"
"""Its functions take what another library's do."""
LONG = 60
"""Lines that a function of the product may have."""


def test_no_function_takes_a_long_list():
    """More than eight positional parameters are a record that nobody has written down."""
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
                if module.startswith(FOREIGN):
                    continue
                assert len(names) <= 8, f"{module}.{node.name} takes {', '.join(names)}"


def test_no_function_is_long():
    for module, path in FILES.items():
        if not module.startswith(FOREIGN):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    assert lines <= LONG, f"{module}.{node.name} has {lines} lines"


CLIENTS = {"Config"}
"""Names of classes that other libraries fix: torchtitan's nested configurations, DeepEP's."""


def test_class_names_are_used_once():
    found: dict[str, list[str]] = {}
    for module, path in FILES.items():
        if module.startswith("ep_ops"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and node.name not in CLIENTS:
                    found.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert not twice
