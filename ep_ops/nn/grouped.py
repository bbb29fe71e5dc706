"""Grouped GEMM: each expert multiplies its own rows by its own matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.inputs import autocasts
from ep_ops.records import check_types


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Multiply each expert's rows by its own matrix. Expert e has the rows [offs[e-1], offs[e]) of x. Differentiable.

    Args:
        x: rows, [R, M].
        w: matrices, [El, M, N]. Under ``torch.autocast`` they are cast to the dtype of x.
        offs: end of each expert's rows, int32 [El], such as ``Route.offs``.

    Returns:
        [R, N]. Rows after ``offs[-1]`` are undefined, in x and in the result. They affect no other row and no gradient
        of w.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: w has the wrong shape.
    """
    check_types(Tensor, x=x, w=w, offs=offs)
    if w.dim() != 3 or w.shape[0] != offs.shape[0] or w.shape[1] != x.shape[1]:
        allowed = f"[{offs.shape[0]}, {x.shape[1]}, N] (the entries of offs, the columns of x)"
        raise ValueError(f"w has shape {tuple(w.shape)}; allowed: {allowed}")
    if w.dtype != x.dtype and autocasts(x.device.type):
        w = w.to(x.dtype)
    if _takes(x, w.shape[2]) and w.shape[0] > 0:
        return torch._grouped_mm(x, w, offs=offs)
    if w.shape[0] == 0:  # zeros that depend on x and w, so that this rank takes part in backward
        return x[:, :0] @ w.sum(0)[:0]
    # Other dtypes, for tests and CPUs: apply every expert to all rows and keep its own. The inner `where` keeps NaN of
    # undefined rows out of the gradient of w, the outer one out of the gradient of x.
    out = x.new_zeros(x.shape[0], w.shape[2])
    for e in range(w.shape[0]):
        mine = _rows_of(e, x, offs)
        out = torch.where(mine, torch.where(mine, x, 0) @ w[e], out)
    return out


def weights_gradient(x: Tensor, grad: Tensor, offs: Tensor) -> Tensor:
    """Return the gradient of w in ``grouped_mm(x, w, offs)``, with the same bits as autograd. Not differentiable.

    Args:
        x: rows, [R, M].
        grad: gradient of the product, [R, N].
        offs: end of each expert's rows, int32 [El].

    Returns:
        [El, M, N].

    Raises:
        TypeError: an argument is not a tensor.
    """
    check_types(Tensor, x=x, grad=grad, offs=offs)
    if offs.shape[0] == 0:
        return x.new_zeros(0, x.shape[1], grad.shape[1])
    if _takes(x, grad.shape[1]):
        return torch._grouped_mm(x.t(), grad, offs=offs)
    masks = [_rows_of(e, x, offs) for e in range(offs.shape[0])]
    return torch.stack([torch.where(mine, x, 0).t() @ torch.where(mine, grad, 0) for mine in masks])


def _takes(x: Tensor, columns: int) -> bool:
    """Return whether torch's grouped GEMM takes the rows, whose strides must be multiples of 16 bytes."""
    return x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and columns % 8 == 0


def _rows_of(e: int, x: Tensor, offs: Tensor) -> Tensor:
    """Return which rows of x are those of expert e, bool [R, 1]."""
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return (row < offs[e]) if e == 0 else (row >= offs[e - 1]) & (row < offs[e])


class Gated(NamedTuple):
    """Grouped GEMMs whose epilogues compute SwiGLU and its gradient, for token-major rows and for w_in [El, H, 2F] that
    is the transpose of contiguous matrices. They read and write h, the output of the first GEMM, in an order of columns
    of their own. Not differentiable. rows is int32 [L], the row of x [R, H] that each place has."""

    product: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """h [L, 2F] and SwiGLU of it [L, F], from x, w_in, offs and rows."""
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """From the gradient of the output [L, H], w_out, h, a weight of each place [L] and offs: the gradient of h, SwiGLU
    of h times the weight, and the gradient of the weight. A weight of 0 gives zeros, except in the last."""
    rows_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The gradient [L, H] of x[rows], from that of h, the transpose of w_in and offs."""
    weights_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """The gradient of w_in, with its strides, from x, the gradient of h, offs and rows."""


class Gemms(NamedTuple):
    """The grouped GEMMs that an expert MLP is computed with."""

    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Differentiable product of rows x [R, M], matrices w [El, M, N] (contiguous, or the transpose of contiguous ones)
    and offs, as :func:`grouped_mm`."""
    weights_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Gradient of w from x [R, M], the gradient of the product [R, N] and offs, as :func:`weights_gradient`: the same
    bits as ``product`` gives in backward."""
    late: bool
    """Whether backward computes weight gradients while the gradient of x is being sent (docs/overlap.md)."""
    gathered_product: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """``product(x[rows], w, offs)`` from x [R, M], w, offs and rows, int32 [L]; without a gradient. None: token-major
    rows are copied first."""
    gathered_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """``weights_gradient(x[rows], grad, offs)`` from x [R, M], grad [L, N], offs and rows [L]. None: copied."""
    gated: Gated | None = None
    """GEMMs with SwiGLU in their epilogues. None: kernels of its own compute SwiGLU."""


TORCH = Gemms(grouped_mm, weights_gradient, late=False)
"""PyTorch's grouped GEMM."""
