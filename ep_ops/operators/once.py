"""Gradients that raise an error if they are differentiated again.

``torch.autograd.function.once_differentiable`` does not suffice. ``torch.autograd.grad`` does not reach the node that
raises, so a Hessian would silently lack the contribution of an operator. It also ignores saved tensors: the gradients
of a weighted combine depend on rows and weights even if grad_out is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def once(name: str, backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return ``backward`` (ctx, *gradients) of the function ``name`` with results that raise if they are
    differentiated."""

    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():  # the usual case, without create_graph
            return backward(ctx, *grads)
        saved = ctx.saved_tensors  # checkpointing returns them only once
        with torch.no_grad():
            results = backward(_Context(ctx, saved), *grads)
        origins = [t for t in (*grads, *saved) if isinstance(t, Tensor) and t.requires_grad]
        made = [result for result in results if result is not None]
        if not origins or not made:
            return results
        hanging = iter(_Once.apply(name, len(made), *made, *origins))
        return tuple(None if result is None else next(hanging) for result in results)

    return run


class _Context:
    """Context of a backward whose saved tensors have been read."""

    def __init__(self, ctx: Any, saved: tuple[Any, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the first ``count`` tensors. They were computed from the others."""
        ctx.name = name
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name} does not support second derivatives (backward with create_graph=True,"
            " torch.autograd.functional.hessian)"
        )
