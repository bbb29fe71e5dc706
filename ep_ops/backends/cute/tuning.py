"""Numbers of blocks, and choices of quack's GEMMs, that were found by measuring: rows of a table, named by operation,
GPU and number of ranks.

A row of `tuning.json` is an object of a few conditions and knobs. It holds for calls that meet all its conditions:

    operation  one of `KNOBS`
    gpu        shell pattern of the GPU's name; default: any
    ranks      number of ranks; default: any
    rows       "grouped" if a copy of a token has two rows or more on average, else "token_major"; of GEMMs:
               "token_major" if lists name their rows, which may then be gathered; default: any
    format     shell pattern of the format of rows or sums and the layout of their scales, such as
               "e4m3/128/pow2=columns"; "" for none; default: any
    tokens     smallest number of tokens of the rank; of GEMMs, of rows of an expert on average; default: 0
    sizes      GEMMs only: shell pattern of the depth and the columns of the first operand times the matrices, such as
               "7168x4096"; default: any

Knobs are free: any value gives the same results (of GEMMs: up to rounding), ranks may differ in them, and they change
no kernel that peers wait for. What correctness requires is not in the table: least numbers of blocks (residency.py),
and whatever ranks must agree on (`cute_kernels.heap.Problem`), such as whether rows are pushed and where they are
added.

    sms        SMs of the operation at least; the model may say more (sm_model.py). null: the model's number. Several
               ranks only
    surplus    SMs of a dispatch on a rank with more rows than others, of calls of all kinds
    push       SMs that push the rows of a dispatch; blocks of a combine across domains that push
    spare      share of the blocks that a combine does not need which push as well; the others sum
    joins      whether blocks that sum join those that push on a rank with more rows
    send       blocks of a latency kernel that send
    gathers    whether a GEMM on token-major rows gathers them; otherwise they are copied first
    tile       configuration of a GEMM: rows and columns of a tile, blocks of a cluster along both, and whether two
               groups of warps take turns, such as "128x192 2x1 pingpong". "": quack's own

Numbers are ints, or fractions such as "5/6" of the GPU's SMs or of the blocks, rounded down. A knob comes from the
first row that has it. `ep-ops bench tune` measures and writes rows, and `ep-ops bench gemms` those of GEMMs; those of
the file that `EP_OPS_TUNING` names come first.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "EP_OPS_TUNING"
"""Environment variable that names a file of rows."""

Share = int | Fraction
"""A number of blocks, or a part of those that there are."""


class Knobs(NamedTuple):
    """The knobs of a call (see above). None: the model's number."""

    sms: Share | None = None
    surplus: Share = 0
    push: Share = 0
    spare: Share = 0
    joins: bool = False
    send: Share = 0
    gathers: bool = False
    tile: str = ""


KNOBS = {
    "dispatch": ("sms", "surplus", "push"),
    "combine": ("sms", "spare", "joins"),
    "combine across domains": ("push",),
    "latency dispatch": ("send",),
    "latency combine": ("send",),
    "gemm": ("gathers", "tile"),
    "gemm gated": ("gathers", "tile"),
    "gemm gated gradient": ("tile",),
    "gemm weights": ("gathers", "tile"),
}
"""Operation -> its knobs. Gathered combines and the backward of weighted ones have none: they take the model's SMs."""
GEMMS = tuple(operation for operation in KNOBS if operation.startswith("gemm"))
"""Operations of quack's GEMMs, which ep_ops/nn/quack_mm.py describes."""
LAYOUTS = "grouped", "token_major"
TILE = re.compile(r"(\d+)x(\d+) ([12])x([12])( pingpong)?")

CONDITIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "operation": (KNOBS.__contains__, ", ".join(KNOBS)),
    "gpu": (lambda value: isinstance(value, str), "text"),
    "ranks": (lambda value: type(value) is int and value > 0, "an int of at least 1"),
    "rows": (lambda value: value in LAYOUTS, ", ".join(LAYOUTS)),
    "format": (lambda value: isinstance(value, str), "text"),
    "tokens": (lambda value: type(value) is int and value >= 0, "an int of at least 0"),
    "sizes": (lambda value: isinstance(value, str), "text"),
}
"""Condition -> whether a value is valid, and which ones are."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    operation: str
    knobs: Mapping[str, Any]
    gpu: str = "*"
    ranks: int | None = None
    rows: str = "*"
    format: str = "*"
    tokens: int = 0
    sizes: str = "*"

    def names(self, gpu: str, ranks: int) -> bool:
        """Return whether the row is of this GPU and number of ranks."""
        return fnmatchcase(gpu, self.gpu) and self.ranks in (None, ranks)

    def holds(self, operation: str, rows: str, format: str, tokens: int, sizes: str = "") -> bool:
        """Return whether the row holds for such calls."""
        same = self.operation == operation and fnmatchcase(rows, self.rows) and fnmatchcase(format, self.format)
        return same and tokens >= self.tokens and fnmatchcase(sizes, self.sizes)


def count(share: Share, of: int) -> int:
    """Return the number of blocks that a knob stands for, of so many."""
    return min(of, share if isinstance(share, int) else of * share.numerator // share.denominator)


def text_of(format: str, layout: str = "") -> str:
    """Return a format and the layout of its scales as rows name them."""
    return f"{format}={layout}" if layout else format


def row_of(given: Any) -> Row:
    """Return a row of a file. Raises ValueError if it is none."""
    if not isinstance(given, dict):
        raise ValueError(f"the row is {given!r}; allowed: an object")
    operation = given.get("operation")
    if not isinstance(operation, str) or operation not in KNOBS:
        raise ValueError(f"operation is {operation!r}; allowed: {', '.join(KNOBS)}")
    without = ("ranks", "format") if operation in GEMMS else ("sizes",)
    allowed = [*(key for key in CONDITIONS if key not in without), *KNOBS[operation]]
    named: dict[str, Any] = {}
    knobs: dict[str, Any] = {}
    for key, value in given.items():
        if key not in allowed:
            raise ValueError(
                f"{key} is {value!r} in a row of operation {operation!r}; allowed keys: {', '.join(allowed)}"
            )
        if key in KNOBS[operation]:
            knobs[key] = _knob(key, value)
            continue
        valid, words = CONDITIONS[key]
        if not valid(value):
            raise ValueError(f"{key} is {value!r}; allowed: {words}")
        named[key] = value
    conditions = [key for key in ("rows", "format", "tokens") if key in named]
    if "surplus" in knobs and conditions:
        raise ValueError(f"surplus is given with {', '.join(conditions)}; allowed: only gpu and ranks")
    return Row(knobs=knobs, **named)


def _knob(name: str, value: Any) -> Any:
    if name in ("joins", "gathers") and isinstance(value, bool):
        return value
    if name == "tile":
        if not isinstance(value, str) or value and TILE.fullmatch(value) is None:
            raise ValueError(f"tile is {value!r}; allowed: text such as '128x192 2x1 pingpong', '128x256 2x1' or ''")
        return value
    if name == "sms" and value is None:
        return None
    try:
        share = value if type(value) is int else Fraction(value) if isinstance(value, str) else None
    except (ValueError, ZeroDivisionError):
        share = None
    most = 1 if isinstance(share, Fraction) else 1024
    if name in ("joins", "gathers") or share is None or not 0 <= share <= most:
        allowed = (
            "true or false" if name in ("joins", "gathers") else "an int of 0..1024, or a fraction of 0..1 as text"
        )
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
    return share


def read(path: str | Path, given_by: str = VARIABLE) -> list[Row]:
    """Return the rows of a file. `given_by`: the option that names it.

    Raises ValueError if the file cannot be read or has something else.
    """
    where = f"{given_by} is {str(path)!r}"
    try:
        rows = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"{where}: the file cannot be read ({error}); allowed: a JSON file with a list of rows"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: the file is not JSON ({error}); allowed: a list of rows") from error
    if not isinstance(rows, list):
        raise ValueError(f"{where}: the file has a {type(rows).__name__}; allowed: a list of rows")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(row_of(row))
        except ValueError as error:
            raise ValueError(f"{where}: row {number}: {error}") from error
    return found


def rows_given() -> list[Row]:
    """Return the rows of the file that `EP_OPS_TUNING` names."""
    path = os.environ.get(VARIABLE)
    return read(path) if path else []


TABLE = tuple(read(Path(__file__).with_name("tuning.json")))


class Tuning:
    """The knobs of a rank's calls, on a GPU of that name. `rows` come before those of the table."""

    def __init__(self, gpu: str, ranks: int, rows: Iterable[Row] = ()) -> None:
        self._gpu, self._ranks = gpu, ranks
        self._given, self.version = tuple(rows), 0
        self.put()

    def put(self, *rows: Row) -> None:
        """Put rows before all others, in place of those that were put before."""
        self.version += 1
        self._rows = [row for row in (*rows, *self._given, *TABLE) if row.names(self._gpu, self._ranks)]
        self._steps: Sequence[int] = sorted({row.tokens for row in self._rows})
        self._found: dict[tuple[str, str, str, int, str], Knobs] = {}

    def knobs(
        self, operation: str, rows: str = "grouped", format: str = "", tokens: int = 0, sizes: str = ""
    ) -> Knobs:  # fmt: skip
        """Return the knobs of such calls."""
        key = operation, rows, format, bisect.bisect_right(self._steps, tokens), sizes
        found = self._found.get(key)
        if found is None:
            knobs: dict[str, Any] = {}
            for row in self._rows:
                if row.holds(operation, rows, format, tokens, sizes):
                    knobs = {**row.knobs, **knobs}
            found = self._found[key] = Knobs(**knobs)
        return found
