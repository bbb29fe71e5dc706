"""Dispatch, SwiGLU experts and combine as one function, whose backward can compute weight gradients late.

Backward of the experts computes the gradient of the rows (dX), which is sent back to the tokens, and the gradients of
the weights (dW_in, dW_out), which nothing else waits for. In the ordinary order all gradients are computed first, and
nothing runs while rows are sent. In the late order the gradients of the weights are computed while the gradient of the
rows is sent:

    ordinary   dY ── dh, dW_out ── d(gate, up) ── dX, dW_in ── send dX
    late       dY ── dh ── d(gate, up) ── dX ── start sending dX ── dW_in, dW_out ── wait

Both orders run the same GEMMs on the same operands, so they give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops import inputs
from ep_ops.communicator import Communicator
from ep_ops.nn.few_rows import few_rows_mlp
from ep_ops.nn.gemms import Choice, choose
from ep_ops.nn.grouped import Gemms
from ep_ops.nn.live_rows import SWIGLU, SWIGLU_BACKWARD, swiglu_rows
from ep_ops.nn.scaled import ROW, scaled_grouped_mm
from ep_ops.operators.gradients import DISPATCH_BACKWARD_START, DISPATCH_BACKWARD_WAIT
from ep_ops.operators.once import once
from ep_ops.records import Dispatched
from meta_kernels.arguments import DispatchBackwardStartArgs, DispatchBackwardWaitArgs


class Computed(NamedTuple):
    """The outputs of experts, and the number of rows that they dropped."""

    out: Tensor
    """Weighted sums of the experts' outputs, with shape and dtype of x."""
    dropped: Tensor
    """int32 [El]: number of rows that each local expert dropped in this call, from the tokens of all ranks."""


def expert_mlp(
    comm: Communicator, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_in: Tensor, w_out: Tensor, *,
    capacity: int | None = None, exact: bool = False, max_tokens: int | None = None, format: str = "",
    combine_format: str = "", gemms: str | Gemms | Choice = "auto",
) -> Computed:  # fmt: skip
    """Send tokens to their SwiGLU experts and return the weighted sums of the experts' outputs. Collective.

    Differentiable, also under ``torch.compile(fullgraph=True)`` and in CUDA graphs. With GEMMs that have ``late``,
    backward computes the gradients of w_in and w_out while the gradient of x is being sent, with the same bits. In this
    case the gradients of the experts' inputs and outputs, [R, H] each, are in memory at the same time. On GPUs this
    order is not tested with activation checkpointing.

    Args:
        comm: the communicator, with hidden size H.
        x, topk_idx, topk_weights: tokens, ids and weights, as for :meth:`ep_ops.Communicator.dispatch`.
        w_in: gate and up matrices of this rank's experts, [El, H, 2F], in the communicator's dtype.
        w_out: down matrices of this rank's experts, [El, F, H], in the communicator's dtype.
        capacity, exact, max_tokens: as for :meth:`ep_ops.Communicator.dispatch`.
        format, combine_format: as for :class:`ep_ops.nn.Experts`.
        gemms: the grouped GEMMs, the same on all ranks, as for :class:`ep_ops.nn.Experts`.

    Returns:
        Computed: the sums, with shape and dtype of x, and dropped rows.

    Raises:
        TypeError, ValueError, RuntimeError: as for :meth:`ep_ops.Communicator.dispatch`.
        ValueError: w_in or w_out has the wrong shape.
        TypeError, ValueError: ``gemms`` is not supported, as described for :class:`ep_ops.nn.Experts`.
    """
    chosen = choose(comm, gemms, w_out.shape[1], format)
    late = is_late(chosen.gemms, format, (x, topk_weights), (w_in, w_out))
    zeros = torch.is_grad_enabled()
    with torch.set_grad_enabled(zeros and not late):
        received = comm.dispatch(
            x, topk_idx, topk_weights, capacity=capacity, exact=exact, max_tokens=max_tokens, format=format, zeros=zeros
        )
    y, weights = expert_rows(received, w_in, w_out, chosen, SentTokens(comm, x, topk_weights) if late else None)
    return Computed(comm.combine(y, received.route, weights, format=combine_format), received.dropped)


def is_late(gemms: Gemms, format: str, sent: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> bool:
    """Return whether backward is to compute the gradients of ``weights`` while those of ``sent`` are sent. If so, the
    dispatch runs without gradients (with ``zeros=True``), and :func:`expert_rows` has those of ``sent``."""
    if not gemms.late or format == ROW or not torch.is_grad_enabled():
        return False
    return all(any(getattr(tensor, "requires_grad", False) for tensor in some) for some in (sent, weights))


class SentTokens(NamedTuple):
    """What a dispatch without gradients has sent, to which backward sends the gradients."""

    comm: Communicator
    x: Tensor
    topk_weights: Tensor
    flight: int = 0


def expert_rows(
    received: Dispatched, w_in: Tensor, w_out: Tensor, chosen: Choice, sent: SentTokens | None
) -> tuple[Tensor, Tensor | None]:
    """Return the experts' outputs [R, H] for the rows of a dispatch, and the weights of the rows. ``sent``: for the
    late order. None: for the ordinary one."""
    route, gemms = received.route, chosen.gemms
    if chosen.runs_few_rows(received, w_in, w_out):
        return few_rows_mlp(received.x, w_in, w_out, route, chosen.ranks), received.weights
    if sent is not None:
        how = _How(route.alignment, route.max_tokens, sent.comm.name, route.layout, sent.flight, gemms)
        tokens = inputs.with_weights(sent.comm, sent.x, sent.topk_weights)  # converted as by dispatch
        return _Late.apply(*tokens, w_in, w_out, how, received.x, received.weights, *route.tensors)
    if received.scales is None:
        y = gemms.product(received.x, w_in, route.offs)
    else:
        y = scaled_grouped_mm(received.x, received.scales, w_in, route.offs)
    return gemms.product(swiglu_rows(y, route), w_out, route.offs), received.weights


class _How(NamedTuple):
    alignment: int
    max_tokens: int
    comm: str
    layout: str
    flight: int
    gemms: Gemms


class _Late(torch.autograd.Function):
    """Experts between a dispatch without gradients and a combine. Backward sends the gradients of the dispatch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_weights: Tensor, w_in: Tensor, w_out: Tensor, how: _How, *received: Tensor
    ) -> tuple[Tensor, Tensor]:
        recv_x, recv_weights, *route = received
        topk_idx, *_, offs, counts = route
        product = how.gemms.product
        y = product(recv_x, w_in, offs)
        h = SWIGLU(y, offs, counts, how.alignment, 0)
        weights = recv_weights.clone()
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(weights)
        ctx.save_for_backward(recv_x, y, h, w_in, w_out, *route)
        ctx.sizes, ctx.dtype, ctx.how = (*x.shape, topk_idx.shape[1]), x.dtype, how
        return product(h, w_out, offs), weights

    @staticmethod
    @functools.partial(once, "expert_mlp")
    def backward(ctx: Any, grad_y: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        recv_x, y, h, w_in, w_out, *route = ctx.saved_tensors
        *_, offs, counts = route
        alignment, max_tokens, comm, layout, flight, gemms = ctx.how
        asks_x, asks_weights, asks_in, asks_out, *_ = ctx.needs_input_grad
        tokens, hidden, top_k = ctx.sizes
        product, weights_gradient, _ = gemms
        grad_y = grad_y.contiguous()
        grad_h = product(grad_y, w_out.transpose(1, 2), offs)
        grad_inner = SWIGLU_BACKWARD(grad_h, y, offs, counts, alignment, 0)
        del grad_h
        rows = product(grad_inner, w_in.transpose(1, 2), offs) if asks_x else None
        scalars = grad_weights.contiguous() if asks_weights else None
        topk_idx, send_rows, arrivals, offs, counts = route
        start = DispatchBackwardStartArgs(
            grad_recv_x=rows, grad_recv_weights=scalars, topk_idx=topk_idx, send_rows=send_rows, arrivals=arrivals,
            offs=offs, counts=counts, alignment=alignment, max_tokens=max_tokens, comm=comm, layout=layout,
            flight=flight,
        )  # fmt: skip
        ticket = DISPATCH_BACKWARD_START.call(start)
        given = [tensor for tensor in (rows, scalars, *route) if tensor is not None]  # alive until the wait
        end_of_start = DispatchBackwardWaitArgs(
            ticket=ticket, given=given, dtype=ctx.dtype, tokens=tokens, hidden=hidden if asks_x else 0,
            top_k=top_k if asks_weights else 0, comm=comm, flight=flight,
        )  # fmt: skip
        wait = functools.partial(DISPATCH_BACKWARD_WAIT.call, end_of_start)
        try:
            grad_in = weights_gradient(recv_x, grad_inner, offs) if asks_in else None
            grad_out = weights_gradient(h, grad_y, offs) if asks_out else None
        except BaseException:
            end(wait)
            raise
        home_x, home_weights = wait()
        home = home_x if asks_x else None, home_weights if asks_weights else None
        return *home, grad_in, grad_out, *(None for _ in range(8))


def end(wait: Callable[[], Any]) -> None:
    """Complete a started operation whose results nobody will use, because an exception was raised before its wait."""
    with contextlib.suppress(RuntimeError), torch.no_grad():
        wait()
