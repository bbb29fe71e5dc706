"""Grouped products whose blocks are short: what computes beside communication is a choice, and torch has one.

torch's grouped GEMM on GPUs is persistent: a block for each multiprocessor, each with a fixed share of the tiles, so
that whatever holds one of them for a while delays the whole. Here are two that a benchmark compares with it: a Triton
kernel with a block for each tile, and a product for each expert on a few streams. Both are forward only.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILES: tuple[tuple[int, ...], ...] = ((128, 256, 64, 3, 8), (128, 128, 64, 3, 4))
"""Rows, columns and depth of a tile, stages and warps: the first call of a size takes the fastest."""
STREAMS = 4


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kernel() -> Any:
    """The Triton kernel; ImportError where Triton is not installed."""
    import triton
    import triton.language as tl

    @triton.jit
    def grouped(x, w, offs, out, size: tl.constexpr, tile: tl.constexpr):
        experts: tl.constexpr = size[0]
        depth: tl.constexpr = size[1]
        columns: tl.constexpr = size[2]
        bm: tl.constexpr = tile[0]
        bn: tl.constexpr = tile[1]
        bk: tl.constexpr = tile[2]
        expert = tl.arange(0, triton.next_power_of_2(experts))
        end = tl.load(offs + expert, mask=expert < experts, other=0)
        begin = tl.load(offs + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
        tiles = tl.where(expert < experts, (end - begin + bm - 1) // bm, 0)
        behind = tl.cumsum(tiles, 0)
        wide = tl.cdiv(columns, bn)
        number = tl.program_id(0)
        if number < tl.max(behind, 0) * wide:
            here = expert == tl.sum((behind * wide <= number).to(tl.int32), 0)
            high = tl.sum(tl.where(here, tiles, 0), 0)
            local = number - tl.sum(tl.where(here, behind - tiles, 0), 0) * wide
            last = tl.sum(tl.where(here, end, 0), 0)
            mine = tl.sum(tl.where(here, expert, 0), 0).to(tl.int64)
            # Tiles of one expert's columns come one after the other: its weights are read once.
            row = tl.sum(tl.where(here, begin, 0), 0) + local % high * bm + tl.arange(0, bm)
            column = local // high * bn + tl.arange(0, bn)
            k = tl.arange(0, bk)
            # Behind the last row and column the last ones stand in: what comes of them is not stored.
            a = x + tl.minimum(row, last - 1).to(tl.int64)[:, None] * depth + k[None, :]
            b = w + mine * depth * columns + k.to(tl.int64)[:, None] * columns + (column % columns)[None, :]
            total = tl.zeros((bm, bn), tl.float32)
            for _ in range(0, depth, bk):
                total = tl.dot(tl.load(a), tl.load(b), total)
                a += bk
                b += bk * columns
            place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
            tl.store(place, total.to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < columns)[None, :])

    return grouped


def product(x: Tensor, w: Tensor, offs: Tensor, tile: tuple[int, ...]) -> Tensor:
    """x [R, M], w [El, M, N], offs [El] -> [R, N], as ``grouped_mm``; M is a multiple of a tile's depth."""
    bm, bn, bk, stages, warps = tile
    experts, depth, columns = w.shape
    if depth % bk:
        raise ValueError(f"rows have {depth} columns; allowed: multiples of {bk}")
    out = x.new_empty(x.shape[0], columns)
    grid = ((-(-x.shape[0] // bm) + experts) * -(-columns // bn),)
    kernel()[grid](x, w, offs, out, tuple(w.shape), (bm, bn, bk), num_stages=stages, num_warps=warps)
    return out


_fastest: dict[tuple[int, ...], tuple[int, ...]] = {}


def tile_products(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """A block for each tile."""
    size = (x.shape[0], *w.shape)
    if size not in _fastest:
        took = {tile: _time(lambda tile=tile: product(x, w, offs, tile)) for tile in TILES}  # type: ignore[misc]
        _fastest[size] = min(took, key=took.__getitem__)
    return product(x, w, offs, _fastest[size])


def _time(call: Callable[[], Any]) -> float:
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


class ExpertProducts:
    """A product of cuBLAS for each expert, on a few streams by turns. The host has to know where segments end."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
        self._ends: dict[int, list[int]] = {}

    def __call__(self, x: Tensor, w: Tensor, offs: Tensor, ends: list[int]) -> Tensor:
        """`ends`: what `offs` holds."""
        out = x.new_empty(x.shape[0], w.shape[2])
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            with torch.cuda.stream(self._streams[expert % STREAMS]):
                torch.mm(x[begin:end], w[expert], out=out[begin:end])
        for stream in self._streams:
            current.wait_stream(stream)
        return out
