"""quack's grouped GEMMs, for rows that are grouped by expert and for token-major rows.

    pip install quack-kernels==0.6.5

    layer = ep_ops.nn.MoELayer(comm, 1024, gemms="quack")           # GEMMS, on all ranks

    lists = ep_ops.nn.expert_lists(sent.local_idx, comm.num_local_experts)
    y = ep_ops.integrations.quack.gather_mm(sent.x, w, lists)       # as ep_ops.nn.gather_mm

Rows and matrices are bfloat16 or float16, on GPUs of capability 9.0 and newer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.nn.lists import ExpertLists
from ep_ops.nn.quack_mm import GEMMS, gathered_gradient, gathered_product, grouped_mm, weights_gradient
from ep_ops.nn.sums import sum_rows
from ep_ops.records import check_types

__all__ = ["GEMMS", "gather_mm", "grouped_mm", "weights_gradient"]


def gather_mm(x: Tensor, w: Tensor, lists: ExpertLists) -> Tensor:
    """Multiply the row of each place by its expert's matrix, as :func:`ep_ops.nn.gather_mm`. Differentiable.

    Whether the GEMM and that of the gradient of w gather rows of x, or these are copied before, follows from the tuning
    table. The gradient of a row is the sum of those of its places over k ascending, in fp32, rounded once. Padding
    places (lists with an alignment above 1) are computed from a row of their expert; their gradient must be zeros.

    Args:
        x: token-major rows, [R, M].
        w: matrices of the local experts, [El, M, N]. M and N are multiples of 8.
        lists: lists of these rows.

    Returns:
        [L, N], undefined after the last list.

    Raises:
        TypeError: x or w is not a tensor, or ``lists`` are not ExpertLists.
        ValueError: the number of rows or experts differs from that of the lists.
    """
    check_types(Tensor, x=x, w=w)
    check_types(ExpertLists, lists=lists)
    if x.shape[0] != lists.places.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows; allowed: {lists.places.shape[0]}, the rows of the lists")
    if w.shape[0] != lists.offs.shape[0]:
        raise ValueError(f"w has {w.shape[0]} experts; allowed: {lists.offs.shape[0]}, which the lists have")
    return _GatherMM.apply(x, w, lists.rows, lists.places, lists.offs)


class _GatherMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rows: Tensor, places: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, rows, places, offs)
        return gathered_product(x, w, offs, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, w, rows, places, offs = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = sum_rows(gathered_product(grad, w.transpose(1, 2), offs, None), places)
        if ctx.needs_input_grad[1]:
            grad_w = gathered_gradient(x, grad, offs, rows)
        return grad_x, grad_w, None, None, None
