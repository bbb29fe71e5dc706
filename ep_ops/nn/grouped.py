"""Grouped GEMM: each expert multiplies its own rows by its own matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_ops.inputs import autocasts


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
        ValueError: w has other sizes.
    """
    if w.dim() != 3 or w.shape[0] != offs.shape[0] or w.shape[1] != x.shape[1]:
        allowed = f"[{offs.shape[0]} (as offs has), {x.shape[1]} (as rows have), N]"
        raise ValueError(f"w has shape {tuple(w.shape)}; allowed: {allowed}")
    if w.dtype != x.dtype and autocasts(x.device.type):
        w = w.to(x.dtype)
    if x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and w.shape[2] % 8 == 0 and w.shape[0] > 0:
        return torch._grouped_mm(x, w, offs=offs)  # strides must be multiples of 16 bytes
    if w.shape[0] == 0:  # zeros that hang on x and w all the same: other ranks wait in the backward pass of this one
        return x[:, :0] @ w.sum(0)[:0]
    # Other dtypes, for tests and the CPU: every expert on all rows, keeping its own. The inner `where` keeps garbage
    # (0 * nan is nan) out of the gradient of w, the outer one out of what comes back to x.
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    out = x.new_zeros(x.shape[0], w.shape[2])
    for e in range(w.shape[0]):
        mine = (row < offs[e]) if e == 0 else (row >= offs[e - 1]) & (row < offs[e])
        out = torch.where(mine, torch.where(mine, x, 0) @ w[e], out)
    return out
