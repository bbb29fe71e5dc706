"""quack's grouped GEMMs, for rows that are grouped by expert and for token-major rows.

    pip install quack-kernels==0.6.5

    layer = ep_ops.nn.MoELayer(comm, 1024, gemms="quack")           # GEMMS, on all ranks

    lists = ep_ops.nn.expert_lists(sent.local_idx, comm.num_local_experts)
    y = ep_ops.integrations.quack.gather_mm(sent.x, w, lists)       # as ep_ops.nn.gather_mm

Rows and matrices are bfloat16 or float16, on GPUs of capability 9.0 and newer.
"""

from __future__ import annotations

from torch import Tensor

from ep_ops.nn.lists import ExpertLists
from ep_ops.nn.quack_mm import GEMMS, gathered_mm, grouped_mm, weights_gradient
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
    return gathered_mm(x, w, lists.offs, lists.rows, lists.places)
