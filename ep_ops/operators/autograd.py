"""How gradients flow: backward of each operator is another operator along the same route.

All ranks must run the same operators in backward too. What is sent there is therefore decided by which inputs need a
gradient, never by which gradients happen to have arrived: those that are missing are sent as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .schema import LIBRARY


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, topk_idx, _, alignment, *_ = inputs
    _save_dispatch(ctx, inputs, output, (topk_idx, *output[2:6]), alignment)


def _dispatch_dynamic_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, topk_idx, alignment, *_ = inputs
    _save_dispatch(ctx, inputs, output, (topk_idx, *output[2:6]), alignment)


def _dispatch_planned_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *route, _, alignment, _ = inputs
    _save_dispatch(ctx, inputs, output, tuple(route), alignment)


def _dispatch_wait_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, topk_idx, _, alignment, *_ = inputs
    _save_dispatch(ctx, inputs, output, (topk_idx, *output[2:6]), alignment, before=1)


def _save_dispatch(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, ...],
    route: tuple[Tensor, ...],
    alignment: int,
    before: int = 0,
) -> None:
    """``before``: how many inputs stand before x (the ticket of a wait)."""
    recv_x, recv_weights, *integers = output
    ctx.save_for_backward(*route)
    ctx.rows_shape, ctx.rows_dtype, ctx.weights_dtype = recv_x.shape, recv_x.dtype, recv_weights.dtype
    ctx.alignment, ctx.comm, ctx.num_inputs = alignment, inputs[-1], len(inputs)
    ctx.set_materialize_grads(False)  # most outputs are integers: no zeros for those
    ctx.before = before
    ctx.mark_non_differentiable(*integers if ctx.needs_input_grad[before + 1] else (recv_weights, *integers))


@once_differentiable
def _dispatch_backward(ctx: Any, grad_x: Tensor | None, grad_weights: Tensor | None, *_: None) -> tuple[Any, ...]:
    route = ctx.saved_tensors
    x_asked, weights_asked, *_ = ctx.needs_input_grad[ctx.before :]
    zeros = route[0].new_zeros
    if x_asked:  # what arrives may have any strides, those of an expanded sum for instance
        grad_x = zeros(ctx.rows_shape, dtype=ctx.rows_dtype) if grad_x is None else grad_x.contiguous()
    if weights_asked:
        shape, dtype = ctx.rows_shape[:1], ctx.weights_dtype
        grad_weights = zeros(shape, dtype=dtype) if grad_weights is None else grad_weights.contiguous()
    home_x, home_weights = torch.ops.ep.dispatch_backward(
        grad_x if x_asked else None, grad_weights if weights_asked else None, *route, ctx.alignment, ctx.comm
    )
    none = [None] * (ctx.num_inputs - ctx.before - 2)
    return *[None] * ctx.before, home_x if x_asked else None, home_weights if weights_asked else None, *none


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *whole, residual = inputs
    _save_combine(ctx, whole, 0)
    ctx.residual_asked = [residual is not None and ctx.needs_input_grad[len(whole)]]


def _combine_wait_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_combine(ctx, inputs[1:], 1)
    ctx.residual_asked = []  # has none


def _save_combine(ctx: Any, inputs: Sequence[Any], before: int) -> None:
    """``before``: how many inputs stand before y (the ticket of a wait)."""
    y, recv_weights, *route, alignment, comm = inputs
    ctx.rows_asked = any(ctx.needs_input_grad[before : before + 2])
    ctx.save_for_backward(y if ctx.needs_input_grad[before + 1] else None, recv_weights, *route)
    ctx.num_rows, ctx.alignment, ctx.comm, ctx.before = y.shape[0], alignment, comm, before


@once_differentiable
def _combine_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    y, recv_weights, *route = ctx.saved_tensors
    grad_y = grad_weights = None
    if ctx.rows_asked:
        given, along = grad_out.contiguous(), (*route, ctx.num_rows, ctx.alignment, ctx.comm)
        if recv_weights is None:
            grad_y, _ = torch.ops.ep.dispatch_planned(given, None, *along)
        else:
            grad_y, grad_weights = torch.ops.ep.combine_backward(given, y, recv_weights, *along)
    none = [None] * 7  # the route, alignment, communicator
    grad_residual = [grad_out if asked else None for asked in ctx.residual_asked]
    return *[None] * ctx.before, grad_y, None if y is None else grad_weights, *none, *grad_residual


def _combine_gathered_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, *route, alignment, comm = inputs
    ctx.save_for_backward(*route)
    ctx.num_rows, ctx.alignment, ctx.comm = y.shape[0], alignment, comm


@once_differentiable
def _combine_gathered_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    route = ctx.saved_tensors
    tail = (ctx.num_rows, ctx.alignment, ctx.comm)
    grad_y, _ = torch.ops.ep.dispatch_planned(grad_out.contiguous(), None, *route, *tail)
    return grad_y, *[None] * 7


for _name, _backward, _setup in (
    ("dispatch", _dispatch_backward, _dispatch_setup),
    ("dispatch_dynamic", _dispatch_backward, _dispatch_dynamic_setup),
    ("dispatch_planned", _dispatch_backward, _dispatch_planned_setup),
    ("combine", _combine_backward, _combine_setup),
    ("combine_gathered", _combine_gathered_backward, _combine_gathered_setup),
    # The halves that end an operation; a ticket has no gradient.
    ("dispatch_wait", _dispatch_backward, _dispatch_wait_setup),
    ("combine_wait", _combine_backward, _combine_wait_setup),
):
    # Opaque to Dynamo, as what the operators run is (see register).
    torch.library.register_autograd(
        f"ep::{_name}", torch._disable_dynamo(_backward), setup_context=torch._disable_dynamo(_setup), lib=LIBRARY
    )
