"""Stand-ins for quack's GEMMs, which need no GPU and take any dtype. They check what quack requires of its arguments,
and write NaN where quack writes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.nn import grouped_mm, quack_mm, weights_gradient


def install(patch: Any, checks: bool = True) -> list[tuple[str, bool]]:
    """Replace quack's GEMMs by ``patch.setattr``, and without ``checks`` what rejects their dtypes and sizes. Returns a
    list to which each call adds its name, and whether it gathers."""
    called: list[tuple[str, bool]] = []

    def recorded(name: str, function: Any) -> Any:
        def run(*args: Any, **how: Any) -> Any:
            called.append((name, "A_idx" in how))
            return function(*args, **how)

        return run

    for name, function in (("gemm", gemm), ("gated", gated), ("gated_gradient", gated_gradient)):
        patch.setattr(quack_mm, name, recorded(name, function))
    if not checks:
        patch.setattr(quack_mm, "check_operands", lambda *_: None)
    return called


def gemm(
    a: Tensor, b: Tensor, out: Tensor, tile: str, concat: tuple[str, ...] | None = None, *,
    cu_seqlens_m: Tensor | None = None, cu_seqlens_k: Tensor | None = None, A_idx: Tensor | None = None,
) -> None:  # fmt: skip
    ends = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
    assert ends is not None and ends[0] == 0 and ends.dtype == torch.int32
    last = int(ends[-1])
    if A_idx is not None:  # rows outside of lists are not read
        assert A_idx.dtype == torch.int32 and A_idx.dim() == 1 and A_idx.is_contiguous()
        at = torch.where(torch.arange(A_idx.shape[0]) < last, A_idx, 0)
        a = a[at] if cu_seqlens_m is not None else a.t()[at].t()
    if cu_seqlens_m is not None:
        assert a.is_contiguous() and 1 in b.stride()[1:] and concat in (None, ("B",))
        if concat:  # along the dimension that is not contiguous
            b = paired(b, 1 if b.stride(2) == 1 else 2)
        out.copy_(grouped_mm(a, b, ends[1:]))
        out[last:] = torch.nan
        return
    assert a.stride(0) == 1 and b.is_contiguous() and concat in (None, ("out",)) and 1 in out.stride()[1:]
    made = weights_gradient(a.t(), b, ends[1:])
    if concat:
        made = halves(made, 1 if out.stride(2) == 1 else 2)
    out.copy_(made)


def gated(x: Tensor, w: Tensor, h: Tensor, a: Tensor, tile: str, **how: Any) -> None:
    assert w.stride(1) == 1 and h.is_contiguous() and a.is_contiguous()
    gemm(x, w, h, tile, ("B",), **how)
    a.copy_(torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2])


def gated_gradient(
    grad: Tensor, b: Tensor, h: Tensor, weights: Tensor, grad_h: Tensor, a: Tensor, tile: str, **how: Any
) -> Tensor:  # fmt: skip
    assert h.is_contiguous() and grad_h.is_contiguous() and weights.is_contiguous() and weights.shape == h.shape[:1]
    own = torch.empty_like(a)
    gemm(grad, b, own, tile, **how)
    gate, up = h[:, ::2], h[:, 1::2]
    share = torch.sigmoid(gate)
    out = gate * share * up
    by = own * weights[:, None].to(own.dtype)
    grad_h[:, ::2], grad_h[:, 1::2] = by * up * share * (1 + gate * (1 - share)), by * gate * share
    a.copy_(out * weights[:, None].to(own.dtype))
    return (own * out).to(weights.dtype).sum(1)


def paired(x: Tensor, dim: int) -> Tensor:
    """Return entries of the first half and of the second one by turns."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def halves(x: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`paired`."""
    return torch.cat(x.unflatten(dim, (-1, 2)).unbind(dim + 1), dim)


def transposed(w: Tensor) -> Tensor:
    """Return the same matrices, as the transpose of contiguous ones."""
    return w.transpose(1, 2).contiguous().transpose(1, 2)
