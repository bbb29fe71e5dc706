"""quack's grouped GEMM as the consumer of token-major rows: it gathers an expert's rows itself, so none is copied.

    pip install quack-kernels==0.6.5

    lists = ep_ops.nn.expert_lists(sent.local_idx, comm.num_local_experts)
    y = ep_ops.integrations.quack.gather_mm(sent.x, w, lists)       # as ep_ops.nn.gather_mm

Rows and matrices are bfloat16 or float16, on GPUs of capability 9.0 and newer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.nn.lists import ExpertLists
from ep_ops.nn.sums import sum_rows


def gather_mm(x: Tensor, w: Tensor, lists: ExpertLists) -> Tensor:
    """Token-major rows x [R, M], each times the matrices w [El, M, N] of the experts that it names: [L, N], of each
    place; undefined behind the last list. Differentiable: the gradient of w gathers rows of x, too; that of a row is
    the sum of its places' (k ascending, in fp32, rounded once).

    M and N are multiples of 8. Padding places (of lists with an alignment above 1) are computed from a row of their
    expert; what comes as their gradient must be zeros. ValueError for other numbers of rows or experts than the lists
    have, of which quack would read past the end.
    """
    if x.shape[0] != lists.places.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows; allowed: {lists.places.shape[0]}, of which the lists were made")
    if w.shape[0] != lists.offs.shape[0]:
        raise ValueError(f"w has {w.shape[0]} experts; allowed: {lists.offs.shape[0]}, which the lists have")
    return _GatherMM.apply(x, w, lists.rows, lists.places, lists.cu_seqlens)


class _GatherMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, rows, places, ends)
        return _gemm(x, w, cu_seqlens_m=ends, A_idx=rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, w, rows, places, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = sum_rows(_gemm(grad, w.mT, cu_seqlens_m=ends), places)
        if ctx.needs_input_grad[1]:
            grad_w = _gemm(x.mT, grad, cu_seqlens_k=ends, A_idx=rows)
        return grad_x, grad_w, None, None, None


def _gemm(a: Tensor, b: Tensor, **where: Tensor) -> Tensor:
    from quack.gemm_interface import (
        gemm,
    )  # its import takes a second, and changes the CuTe DSL: not before it is needed

    return gemm(a, b, tuned=False, **where)
