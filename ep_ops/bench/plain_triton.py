"""Plain Triton kernels: the experts of a decode step, to compare with, and a kernel that only reads.

A program takes a block of columns of one expert, loops over K with several stages, and leaves at once if the expert has
no rows. This is how the fused MoE kernels of inference engines work. Needs triton, which PyTorch installs with CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILES = ((64, 6, 8), (64, 5, 4), (128, 4, 4))
"""Columns, stages and warps of a tile."""
STEP = tl.constexpr(64)  # of K


@triton.jit
def _gate_up(x, w, out, offs, K: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1)
    begin, end = tl.load(offs + expert - 1, mask=expert > 0, other=0), tl.load(offs + expert)
    if end <= begin:
        return
    cols, depth = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    w += expert.to(tl.int64) * K * 2 * F
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        live = (rows < end)[:, None]
        gate, up = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, STEP):
            some = tl.load(x + rows[:, None] * K + (k + depth)[None, :], mask=live, other=0.0)
            at = w + (k + depth)[:, None] * (2 * F) + cols[None, :]
            gate, up = tl.dot(some, tl.load(at), gate), tl.dot(some, tl.load(at + F), up)
        made = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * F + cols[None, :], made, mask=live)


@triton.jit
def _down(x, w, out, offs, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1)
    begin, end = tl.load(offs + expert - 1, mask=expert > 0, other=0), tl.load(offs + expert)
    if end <= begin:
        return
    cols, depth = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    w += expert.to(tl.int64) * K * N
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        live = (rows < end)[:, None]
        sums = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, K, STEP):
            some = tl.load(x + rows[:, None] * K + (k + depth)[None, :], mask=live, other=0.0)
            sums = tl.dot(some, tl.load(w + (k + depth)[:, None] * N + cols[None, :]), sums)
        tl.store(out + rows[:, None] * N + cols[None, :], sums.to(out.dtype.element_ty), mask=live)


@triton.jit
def _read(x, out, count, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        found ^= tl.load(x + i + tl.arange(0, BLOCK))
    tl.store(out + tl.arange(0, BLOCK), found, mask=found == 123456789)


def rows_of(most: int) -> int:
    """Return the rows of a tile for experts with `most` rows."""
    return min(128, max(16, triton.next_power_of_2(most)))


def gate_up(x: Tensor, w_in: Tensor, offs: Tensor, rows: int, tile: tuple[int, ...]) -> Tensor:
    """Return silu(gate) * up [R, F] of rows x [R, H] and weights [El, H, 2F]."""
    columns, stages, warps = tile
    depth, width = x.shape[1], w_in.shape[2] // 2
    out = x.new_empty(x.shape[0], width)
    grid = width // columns, offs.shape[0]
    _gate_up[grid](x, w_in, out, offs, depth, width, rows, columns, num_stages=stages, num_warps=warps)
    return out


def down(x: Tensor, w_out: Tensor, offs: Tensor, rows: int, tile: tuple[int, ...]) -> Tensor:
    """Return the product [R, H] of rows x [R, F] and weights [El, F, H]."""
    columns, stages, warps = tile
    depth, width = x.shape[1], w_out.shape[2]
    out = x.new_empty(x.shape[0], width)
    grid = width // columns, offs.shape[0]
    _down[grid](x, w_out, out, offs, depth, width, rows, columns, num_stages=stages, num_warps=warps)
    return out


def read(x: Tensor, sink: Tensor, blocks: int, call: int = 0) -> None:
    """Read x, int32, a multiple of 1024 numbers, with `blocks` programs. Nothing is written to `sink`, 1024 int32,
    unless the exclusive or of what a lane reads is one certain number. `call` is not used."""
    _read[(blocks,)](x, sink, x.numel(), 1024, num_warps=8)
