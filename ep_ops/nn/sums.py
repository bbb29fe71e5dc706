"""Sums of rows that indices name: what brings token-major rows to the places of lists, and places back to rows.

On GPUs that run the kernels of the ``cute`` backend, rows of bfloat16, float16 and float32 whose length is a multiple
of 16 bytes are summed by a kernel, which reads the rows that are named and no others. Everything else is plain PyTorch.
A kernel is compiled by the first call that needs it, which must come before a CUDA graph is captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.formats import exact_dtype
from ep_ops.nn.live_rows import kernels_of
from ep_ops.operators.eager import call
from ep_ops.operators.library import LIBRARY, define


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """x [N, H], index int32 [B, K], weights [B, K] -> [B, H]: the sum of the rows that are named, k ascending, each
    times its weight; an index below 0 names none, and zeros come of no row at all.

    In fp32 (fp64 where x is), each product and each sum rounded, then rounded once. With K = 1 and without weights rows
    are copied, of any dtype. Differentiable functions are made of it; its own gradient, which would have to know who
    names each row, raises NotImplementedError.
    """
    return call("sum_rows", x, index, None if weights is None else weights.to(exact_dtype(x.dtype)))


def _fake(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


def _sum_rows(x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    out, kernels = _fake(x, index, weights), kernels_of(x, x.shape[1])
    if kernels is not None:
        kernels.sum_rows(x.contiguous(), index.contiguous(), None if weights is None else weights.contiguous(), out)
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


def of_index(x: Tensor, index: Tensor) -> Tensor:
    """[B, H] of the sums' dtype: the rows that ``index`` [B] names, zeros where it is below 0."""
    return torch.where((index >= 0)[:, None], x[index.clamp(min=0)].to(exact_dtype(x.dtype)), 0)


def _no_gradient(ctx: Any, grad: Tensor) -> None:
    raise NotImplementedError("ep::sum_rows has no gradient; allowed: ep_ops.nn.gather_rows and ep_ops.nn.reduce_rows")


define("sum_rows(Tensor x, Tensor index, Tensor? weights) -> Tensor out", _sum_rows, _fake)
torch.library.register_autograd("ep::sum_rows", _no_gradient, lib=LIBRARY)
