"""quack's grouped GEMM, for rows that are grouped by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.nn.grouped import Gemms
from ep_ops.operators.library import define
from ep_ops.records import check_types


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Multiply each expert's rows by its own matrix, as :func:`ep_ops.nn.grouped_mm` does. Differentiable.

    Tiles are dynamic: an SM takes the next one when it has finished one. Under ``torch.compile`` it is one operator,
    ``torch.ops.ep.quack_mm``.

    Args:
        x: rows, [R, M], bfloat16 or float16.
        w: matrices, [El, M, N], contiguous or the transpose of contiguous ones, in the dtype of x.
        offs: end of each expert's rows, int32 [El], such as ``Route.offs``.

    Returns:
        [R, N]. Rows after ``offs[-1]`` are undefined, in x and in the result.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: w has other sizes, or M or N is not a multiple of 8.
    """
    check_types(Tensor, x=x, w=w, offs=offs)
    if x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype} and w is {w.dtype}; allowed: both torch.bfloat16 or both torch.float16")
    if w.dim() != 3 or w.shape[0] != offs.shape[0] or w.shape[1] != x.shape[1] or w.shape[1] % 8 or w.shape[2] % 8:
        allowed = f"[{offs.shape[0]}, {x.shape[1]}, N] (the entries of offs, the columns of x), multiples of 8"
        raise ValueError(f"w has shape {tuple(w.shape)}; allowed: {allowed}")
    return _GroupedMM.apply(x, w, offs)


def weights_gradient(x: Tensor, grad: Tensor, offs: Tensor) -> Tensor:
    """Return the gradient [El, M, N] of w in ``grouped_mm(x, w, offs)``, from x [R, M] and ``grad`` [R, N]."""
    check_types(Tensor, x=x, grad=grad, offs=offs)
    return _QUACK_MM(x.contiguous(), grad.contiguous(), offs, None)


def gathered_product(x: Tensor, w: Tensor, offs: Tensor, rows: Tensor) -> Tensor:
    """Return ``grouped_mm(x[rows], w, offs)`` [L, N] without copying rows, from x [R, M] and rows, int32 [L]."""
    return _QUACK_MM(x.contiguous(), w, offs, rows)


def gathered_gradient(x: Tensor, grad: Tensor, offs: Tensor, rows: Tensor) -> Tensor:
    """Return ``weights_gradient(x[rows], grad, offs)`` [El, M, N] without copying rows, from x [R, M] and rows [L]."""
    return _QUACK_MM(x.contiguous(), grad.contiguous(), offs, rows)


GEMMS = Gemms(grouped_mm, weights_gradient, True, gathered_product, gathered_gradient)
"""For :func:`ep_ops.nn.expert_mlp` and the attribute ``gemms`` of :class:`ep_ops.nn.Experts`."""


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, offs)
        return _QUACK_MM(x.contiguous(), w, offs, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, offs = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _QUACK_MM(grad, w.transpose(1, 2), offs, None) if ctx.needs_input_grad[0] else None
        grad_w = weights_gradient(x, grad, offs) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def _fake(a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None) -> Tensor:
    if b.dim() == 3:
        return a.new_empty((a if rows is None else rows).shape[0], b.shape[2])
    return a.new_empty(offs.shape[0], a.shape[1], b.shape[1])


def _mm(a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None) -> Tensor:
    """Multiply each expert's rows of a [R, M] by its matrix of b [El, M, N], or their transpose by its rows of b. With
    ``rows`` [L] those are a[rows], which the GEMM gathers."""
    if not offs.shape[0] or not a.shape[0]:
        return torch.zeros_like(_fake(a, b, offs, rows))
    ends = torch.nn.functional.pad(offs, (1, 0))
    gathers = {} if rows is None else {"A_idx": rows}
    if b.dim() == 3:
        return gemm(a, b, cu_seqlens_m=ends, dynamic_scheduler=True, **gathers)
    return gemm(a.mT, b, cu_seqlens_k=ends, dynamic_scheduler=True, **gathers)


# An operator, because Dynamo cannot be relied on to trace quack; with the strides of the trace, so that matrices are
# not copied to be transposed.
_QUACK_MM = define(
    "quack_mm(Tensor a, Tensor b, Tensor offs, Tensor? rows) -> Tensor", _mm, _fake, (torch.Tag.needs_exact_strides,)
)


def gemm(a: Tensor, b: Tensor, **how: Any) -> Tensor:
    """Return the result of quack's GEMM."""
    # Not imported before it is needed: the import takes a second, and changes the CuTe DSL.
    from quack.gemm_interface import gemm

    return gemm(a, b, tuned=False, **how)
