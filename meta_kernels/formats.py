"""Formats of rows by name, and the shapes and dtypes of their scales in every layout (docs/formats.md).

A *format* is the form in which rows arrive: element type / numbers that share a scale / kind of scale. With ``wire:``
before it, rows are quantized for sending and arrive dequantized. A *layout* is the memory layout of received scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

ELEMENT = torch.float8_e4m3fn
TILE = 128  # rows of a tile of swizzled scales


class Format(NamedTuple):
    """The properties of a format."""

    name: str
    block: int  # numbers that share a scale; 0: the whole row
    multiple: int  # what the hidden size must be a multiple of
    power: bool  # scales are powers of two
    scale_dtype: torch.dtype  # of scales that are passed with a quantized x, and of received scales in rows
    layouts: tuple[str, ...]  # that received scales may lie in, the first one unless another is asked for
    wire: bool = False  # rows arrive dequantized


SWIZZLED = ("swizzled/torch", "swizzled/quack", "swizzled/flashinfer")
LAYOUTS = ("rows", "columns", "packed", *SWIZZLED)
OF_TOKENS = ("rows", "columns")  # those that token-major rows may have: the others are of groups of rows
_FP32, _BYTES = torch.float32, torch.float8_e8m0fnu
_QUANTISED = (
    Format("e4m3/128/pow2", 128, 128, True, _FP32, ("rows", "columns", "packed")),
    Format("e4m3/128/fp32", 128, 128, False, _FP32, ("rows", "columns")),
    Format("e4m3/32/mx", 32, 32, True, _BYTES, ("rows", "packed", *SWIZZLED)),
    Format("e4m3/row/fp32", 0, 16, False, _FP32, ("rows",)),
)
_WIRE = tuple(form._replace(name=f"wire:{form.name}", wire=True) for form in _QUANTISED)
FORMATS: dict[str, Format] = {form.name: form for form in (*_QUANTISED, *_WIRE)}
COMBINE_FORMATS = ("wire:e4m3/32/mx", "wire:e4m3/128/pow2")
"""Formats in which a combine can send its sums."""


def format_of(name: str) -> Format:
    """Return the format of that name, or raise ValueError."""
    found = FORMATS.get(name)
    if found is None:
        allowed = ", ".join(map(repr, FORMATS))
        raise ValueError(f"format is {name!r}; allowed: '' (rows arrive unquantized), {allowed}")
    return found


def combine_format_problem(argument: str, format: str) -> str | None:
    """Return why a combine cannot send its sums in the ``format`` of an argument, or None. Empty: unquantized."""
    if format in ("", *COMBINE_FORMATS):
        return None
    allowed = ", ".join(map(repr, COMBINE_FORMATS))
    return f"{argument} is {format!r}; allowed for a combine: '' (sums are sent unquantized), {allowed}"


def layout_of(form: Format, scales_as: str) -> str:
    """Return the layout that ``scales_as`` means ("": the first). ValueError if the format does not have it."""
    if form.wire:
        if scales_as:
            raise ValueError(f"scales_as is {scales_as!r}; format {form.name!r} returns no scales; allowed: ''")
        return ""
    if not scales_as:
        return form.layouts[0]
    if scales_as not in form.layouts:
        allowed = ", ".join(map(repr, form.layouts))
        raise ValueError(f"scales_as is {scales_as!r}; allowed for format {form.name!r}: {allowed}, '' for the first")
    return scales_as


def per_row(form: Format, hidden: int) -> int:
    """Return G, the number of scales of a row."""
    return hidden // form.block if form.block else 1


class Grid(NamedTuple):
    """The sizes that determine the shape of received scales. Groups are the local experts."""

    num_rows: Any  # R
    slots: Any  # 0: flat rows; else rows of each group
    groups: int  # El
    hidden: int  # H


def scales_shape(form: Format, layout: str, grid: Grid) -> tuple[tuple[Any, ...], torch.dtype]:
    """Return the shape and dtype of ``recv_scales`` as operators return them: contiguous, as they lie in memory."""
    rows, slots, groups, hidden = grid
    count = per_row(form, hidden)
    if layout == "rows":
        return ((rows, count) if form.block else (rows,)), form.scale_dtype
    if layout in SWIZZLED:
        width = round_up(count, 4)
        if slots:
            return (groups, round_up(slots, TILE), width), _BYTES
        return (TILE * tiles(layout, rows, groups), width), _BYTES
    across, dtype = (count, _FP32) if layout == "columns" else (-(-count // 4), torch.int32)
    return ((groups, across, round_up(slots, 4)) if slots else (across, round_up(rows, 4))), dtype


def tiles(layout: str, num_rows: Any, groups: int) -> Any:
    """Return the largest number of tiles of swizzled scales for flat rows in ``groups`` groups."""
    if groups == 0:
        return 0
    if layout == "swizzled/quack":
        return round_up(num_rows, TILE) // TILE + groups - 1
    return (num_rows + (TILE - 1) * groups) // TILE


def round_up(count: Any, multiple: int) -> Any:
    """Return the smallest multiple that is at least ``count``, an int or a tensor."""
    return (count + multiple - 1) // multiple * multiple
