"""Copies and sums of indexed rows, by which token-major rows are copied to the places of lists, and places are summed.

A kernel computes them on GPUs that the ``cute`` backend supports, for rows of bfloat16, float16 and float32 whose
length is a multiple of 16 bytes, and reads no other rows than those named. Otherwise plain PyTorch does. The first call
compiles the kernel; it must come before the capture of a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.formats import exact_dtype
from ep_ops.nn.live_rows import kernels_of
from ep_ops.operators.library import LIBRARY, define


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sums of the rows that ``index`` names, each times its weight, over k ascending.

    Sums are computed in fp32 (fp64 if x is), with each product and each sum rounded, and rounded once to the dtype of
    x. With K = 1 and without weights rows of any dtype are copied. Not differentiable itself; differentiable functions
    use it.

    Args:
        x: rows [N, H].
        index: int32 [B, K]; negative values name no row.
        weights: [B, K]. None: 1.

    Returns:
        [B, H], zeros where no row is named.
    """
    return _SUM_ROWS(x, index, None if weights is None else weights.to(exact_dtype(x.dtype)))


def _fake(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


def _sum_rows(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    out, kernels = _fake(x, index, weights), kernels_of(x, x.shape[1])
    if kernels is not None:
        given = kernels.readable(x), kernels.readable(index), None if weights is None else kernels.readable(weights)
        kernels.sum_rows(*given, out)
    elif not x.shape[0]:
        out.zero_()
    elif index.shape[1] == 1 and weights is None:
        out.copy_(torch.where(index >= 0, x[index[:, 0].clamp(min=0)], 0))
    else:
        total = x.new_zeros(out.shape, dtype=exact_dtype(x.dtype))
        for k in range(index.shape[1]):
            own = of_index(x, index[:, k])
            total = total + (own if weights is None else own * weights[:, k, None])
        out.copy_(total)
    return out


def copy_rows(x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
    """Return x[rows] [L, H], up to the end of the last segment. Not differentiable.

    Args:
        x: rows [N, H].
        rows: int32 [L], such as those of lists.
        offs: end of each expert's rows, int32 [El].

    Returns:
        [L, H], undefined after ``offs[-1]``.
    """
    return _COPY_ROWS(x, rows, offs)


def _fake_copies(x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0], x.shape[1])


def _copy_rows(x: Tensor, rows: Tensor, offs: Tensor) -> Tensor:
    out, kernels = _fake_copies(x, rows, offs), kernels_of(x, x.shape[1])
    if kernels is not None and offs.shape[0]:
        kernels.copy_rows(*map(kernels.readable, (x, rows, offs)), out)
        return out
    made = torch.arange(rows.shape[0], device=x.device) < (offs[-1] if offs.shape[0] and x.shape[0] else 0)
    named = x[torch.where(made, rows, 0)] if x.shape[0] else out
    return out.copy_(torch.where(made[:, None], named, torch.nan))


def of_index(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows that ``index`` [B] names, in the dtype of sums, zeros where it is negative: [B, H]."""
    return torch.where((index >= 0)[:, None], x[index.clamp(min=0)].to(exact_dtype(x.dtype)), 0)


def _no_gradient(ctx: Any, grad: Tensor) -> None:
    raise NotImplementedError("ep::sum_rows has no gradient; allowed: ep_ops.nn.gather_rows and ep_ops.nn.reduce_rows")


_SUM_ROWS = define("sum_rows(Tensor x, Tensor index, Tensor? weights) -> Tensor out", _sum_rows, _fake)
_COPY_ROWS = define("copy_rows(Tensor x, Tensor rows, Tensor offs) -> Tensor out", _copy_rows, _fake_copies)
torch.library.register_autograd("ep::sum_rows", _no_gradient, lib=LIBRARY)
