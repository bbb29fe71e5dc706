"""Expected quantized rows and their scales, number by number, from docs/formats.md.

Nothing here uses ep_ops: a test compares the two. Numbers are Python floats (which hold every fp32 number, and products
and quotients of two before they are rounded), bytes are ints.
"""

from __future__ import annotations

import bisect
import math
import struct

import torch
from torch import Tensor

BLOCKS = {"128/pow2": 128, "128/fp32": 128, "32/mx": 32, "row/fp32": 0}
"""Format without ``e4m3/`` -> numbers that share a scale."""

NAN = float("nan")


def decoded(code: int) -> float:
    """The number that an e4m3 code stands for: sign, 4 bits of exponent (bias 7), 3 of mantissa; no Inf."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


MAGNITUDES = [decoded(code) for code in range(0x7F)]  # 0 to 448, ascending


def encoded(value: float) -> int:
    """The nearest code, ties to even, at most 448 in magnitude."""
    if math.isnan(value):
        return 0x7F
    sign, size = 0x80 if math.copysign(1, value) < 0 else 0, abs(value)
    above = bisect.bisect_left(MAGNITUDES, size)
    if above == len(MAGNITUDES):
        return sign | 0x7E
    if MAGNITUDES[above] == size or above == 0:
        return sign | above
    down, up = size - MAGNITUDES[above - 1], MAGNITUDES[above] - size
    return sign | (above if up < down or (up == down and above % 2 == 0) else above - 1)


def fp32(value: float) -> float:
    """Rounded to fp32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def scale_of(block: list[float], kind: str) -> float:
    """Inf where a number is not finite."""
    if not all(map(math.isfinite, block)):
        return math.inf
    amax = max(map(abs, block))
    if kind == "mx":
        exponent = -127
    else:
        amax, exponent = max(amax, fp32(1e-4)), -200
    if kind == "fp32":
        return fp32(amax / 448)
    while 448 * 2.0**exponent < amax:
        exponent += 1
    return 2.0**exponent


def codes_of(block: list[float], scale: float, kind: str) -> list[int]:
    if math.isinf(scale):
        return [0x7F] * len(block)
    if kind == "mx" and scale == 2.0**-127:
        return [encoded(math.copysign(0.0, x)) for x in block]
    inverse = fp32(1 / scale)
    return [encoded(fp32(x * inverse)) for x in block]


def byte_of(scale: float) -> int:
    """Return the byte of a power of two: its exponent + 127; 255 for Inf."""
    return 255 if math.isinf(scale) else 0 if scale == 0 else math.frexp(scale)[1] - 1 + 127


def quantized(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """x [T, H] in format e4m3/``name``: codes uint8 [T, H], scales float64 [T, G]."""
    size = BLOCKS[name] or x.shape[1]
    kind = name.partition("/")[2]
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(x.shape[0], x.shape[1] // size).double()
    for token, row in enumerate(x.double().tolist()):
        for g in range(len(row) // size):
            block = row[g * size : (g + 1) * size]
            scale = scale_of(block, kind)
            scales[token, g] = scale
            codes[token, g * size : (g + 1) * size] = torch.tensor(codes_of(block, scale, kind), dtype=torch.uint8)
    return codes, scales


def dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Code times scale, rounded to fp32 and then to ``dtype``."""
    numbers = torch.tensor([decoded(code) for code in range(256)], dtype=torch.float64)[codes.long()]
    return (numbers * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)).float().to(dtype)


# ---------------------------------------------------------------------- layouts


def up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def first_tiles(consumer: str, sizes: list[int]) -> list[int]:
    """Where each group of rows begins, in tiles of 128."""
    tiles, before, first = 0, 0, []
    for group, size in enumerate(sizes):
        first.append(
            {"torch": tiles, "quack": before // 128 + group, "flashinfer": (before + 127 * group) // 128}[consumer]
        )
        tiles += up(size, 128) // 128
        before += size
    return first


def total_tiles(consumer: str, rows: int, groups: int) -> int:
    if groups == 0:
        return 0
    return up(rows, 128) // 128 + groups - 1 if consumer == "quack" else (rows + 127 * groups) // 128


def laid(scales: Tensor, known: Tensor, layout: str, sizes: list[int], slots: int, tails: bool, fill: float) -> Tensor:
    """Scales [R, G] (float64) of rows of which those in ``known`` bool [R] are defined, as memory in the layout.

    ``sizes``: rows of each group, padding included, one behind the other, or each at its ``slots``. What is undefined
    holds ``fill``: NaN (byte 255) or 0. ``tails``: what of a tile lies behind a group is 0.
    """
    rows, count = scales.shape
    if layout == "columns":
        lines = scales.float().clone()
        lines[~known] = fill
        groups = lines.view(-1, slots, count) if slots else lines[None]
        padded = torch.full((groups.shape[0], up(groups.shape[1], 4), count), fill)
        padded[:, : groups.shape[1]] = groups
        out = padded.transpose(1, 2).contiguous()
        return out if slots else out[0]
    blank = 255 if math.isnan(fill) else 0
    lines = torch.full((rows, up(count, 4)), blank, dtype=torch.uint8)
    lines[known] = 0
    for row in known.nonzero().flatten().tolist():
        lines[row, :count] = torch.tensor([byte_of(s) for s in scales[row].tolist()], dtype=torch.uint8)
    if layout == "packed":
        words = lines.view(torch.int32)
        groups = words.view(-1, slots, words.shape[1]) if slots else words[None]
        padded = torch.full(
            (groups.shape[0], up(groups.shape[1], 4), words.shape[1]), -1 if blank else 0, dtype=torch.int32
        )
        padded[:, : groups.shape[1]] = groups
        out = padded.transpose(1, 2).contiguous()
        return out if slots else out[0]
    consumer, width = layout.partition("/")[2], lines.shape[1]
    tile_bytes = 128 * width
    if slots:
        total, each = len(sizes) * up(slots, 128) // 128, up(slots, 128) // 128
        first = [group * each for group in range(len(sizes))]
    else:
        total, first = total_tiles(consumer, rows, len(sizes)), first_tiles(consumer, sizes)
    memory = torch.full((total * tile_bytes,), blank, dtype=torch.uint8)
    begin = 0
    for group, size in enumerate(sizes):
        begin = group * slots if slots else begin
        room = up(slots if slots else size, 128)
        whole = torch.full((room, width), blank, dtype=torch.uint8)
        held = slots if slots else size
        whole[:held] = lines[begin : begin + held]
        if tails:
            whole[size : up(size, 128)] = 0
        tiles = whole.view(-1, 4, 32, width // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)
        memory[first[group] * tile_bytes :][: tiles.numel()] = tiles
        begin += 0 if slots else size
    return memory.view(len(sizes), -1, width) if slots else memory.view(-1, width)
