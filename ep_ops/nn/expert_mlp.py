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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops import inputs
from ep_ops.communicator import Communicator
from ep_ops.nn.e4m3_weights import check_e4m3, gradient_problem
from ep_ops.nn.few_rows import check_shapes, few_rows_mlp
from ep_ops.nn.few_rows_e4m3 import check_weights, few_rows_mlp_e4m3
from ep_ops.nn.gemms import Choice, choose
from ep_ops.nn.grouped import Gemms
from ep_ops.nn.late import Returning, SentTokens, taken, while_returning
from ep_ops.nn.live_rows import SWIGLU, SWIGLU_BACKWARD, swiglu_rows
from ep_ops.nn.ranges import ranged
from ep_ops.nn.scaled import ROW, scaled_grouped_mm
from ep_ops.nn.token_major import How, Rows, check_rows, token_major_rows
from ep_ops.operators.once import once
from ep_ops.operators.rejection import reject, rejected
from ep_ops.records import GROUPED, TOKEN_MAJOR, Dispatched, check_types


class Computed(NamedTuple):
    """The outputs of experts, and the number of rows that they dropped."""

    out: Tensor
    """Weighted sums of the experts' outputs, with shape and dtype of x."""
    dropped: Tensor
    """int32 [El]: number of (token, k) that each local expert dropped in this call, from the tokens of all ranks."""


def expert_mlp(
    comm: Communicator, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_in: Tensor, w_out: Tensor,
    in_scales: Tensor | None = None, out_scales: Tensor | None = None, *, capacity: int | None = None,
    exact: bool = False, max_tokens: int | None = None, format: str = "", combine_format: str = "",
    gemms: str | Gemms | Choice = "auto", rows: str = GROUPED, places: int | None = None, redispatch: bool = False,
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
        in_scales, out_scales: scales of weights w_in [El, 2F, H] and w_out [El, H, F] in float8_e4m3fn, as for
            :func:`ep_ops.nn.few_rows_mlp_e4m3`. None: weights are not e4m3.
        capacity, exact, max_tokens: as for :meth:`ep_ops.Communicator.dispatch`.
        format, combine_format: as for :class:`ep_ops.nn.Experts`.
        gemms: the grouped GEMMs, the same on all ranks, as for :class:`ep_ops.nn.Experts`.
        rows, places, redispatch: as for :class:`ep_ops.nn.Experts`. ``rows`` and ``redispatch`` are the same on all
            ranks.

    Returns:
        Computed: the sums, with shape and dtype of x, and dropped rows.

    Raises:
        TypeError, ValueError, RuntimeError: as for :meth:`ep_ops.Communicator.dispatch`.
        TypeError, ValueError: weights or scales have the wrong type or shape, or those of e4m3 the wrong dtype.
        TypeError, ValueError: ``gemms``, ``rows``, ``places`` or ``redispatch`` is not supported, as described for
            :class:`ep_ops.nn.Experts`.
        NotImplementedError: weights are e4m3, and a gradient is needed.
    """
    kept = Rows(rows, places, redispatch)
    scales = [one for one in (in_scales, out_scales) if one is not None]
    try:  # before rows are sent, because other ranks would wait for the combine of a rank that raises afterwards
        check_rows(kept, comm, exact, format)
        _check_weights(comm, w_in, w_out, scales)
        if scales:
            format = check_e4m3(comm, w_out.shape[2], gemms, kept, format)
            if problem := gradient_problem(x, w_in, w_out, *scales):
                raise problem
        chosen = choose(comm, gemms, w_out.shape[1], format)
    except Exception as error:
        tokens = comm.max_tokens_per_rank if max_tokens is None else max_tokens
        reject("dispatch_dynamic" if exact else "dispatch", comm, error, max_tokens=tokens)
    how = How(kept, exact, format, is_late(chosen.gemms, format, (x, topk_weights), (w_in, w_out)))
    zeros = torch.is_grad_enabled()
    with torch.set_grad_enabled(zeros and not how.late):
        received = comm.dispatch(
            x, topk_idx, topk_weights, layout=rows, capacity=capacity, exact=exact, max_tokens=max_tokens,
            format=format, zeros=zeros,
        )  # fmt: skip
    run = functools.partial(expert_rows, received, w_in, w_out, chosen, SentTokens(comm, x, topk_weights), how, scales)
    y, weights, dropped = rejected("combine", comm, run, max_tokens=received.route.max_tokens)
    return Computed(comm.combine(y, received.route, weights, format=combine_format), dropped)


def _check_weights(comm: Communicator, w_in: Tensor, w_out: Tensor, scales: Sequence[Tensor]) -> None:
    """Raise TypeError or ValueError unless weights have the types and shapes that :func:`expert_mlp` takes."""
    held, hidden = comm.num_local_experts, comm.hidden_size
    check_types(Tensor, w_in=w_in, w_out=w_out)
    if len(scales) == 1:
        raise ValueError("one of in_scales and out_scales is None; allowed: both or none")
    if scales:
        in_scales, out_scales = scales
        check_types(Tensor, in_scales=in_scales, out_scales=out_scales)
        check_weights(held, hidden, w_in, in_scales, w_out, out_scales)
        return
    check_shapes(held, hidden, w_in, w_out)


def is_late(gemms: Gemms, format: str, sent: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> bool:
    """Return whether backward is to compute the gradients of ``weights`` while those of ``sent`` are sent. If so, the
    dispatch runs without gradients (with ``zeros=True``), and :func:`expert_rows` has those of ``sent``."""
    if not gemms.late or format == ROW or not torch.is_grad_enabled():
        return False
    return all(any(getattr(tensor, "requires_grad", False) for tensor in some) for some in (sent, weights))


@ranged("ep_ops.nn.experts")
def expert_rows(
    received: Dispatched, w_in: Tensor, w_out: Tensor, chosen: Choice, sent: SentTokens, how: How,
    scales: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return the rows [R, H] to combine, their weights, and what the experts dropped, int32 [El].

    Args:
        received: result of the dispatch, without gradients if ``how.late``.
        w_in, w_out, chosen: matrices and GEMMs of the experts.
        sent: what the dispatch has sent.
        how: the other arguments.
        scales: of w_in and w_out, if they are e4m3.
    """
    route, gemms = received.route, chosen.gemms
    if scales:
        x = received.x.detach()  # weights may have required its gradient
        y = few_rows_mlp_e4m3(x, received.scales, w_in, scales[0], w_out, scales[1], route, sent.comm.world_size)
        return y, received.weights, received.dropped
    if how.rows.layout == TOKEN_MAJOR:
        sums, dropped = token_major_rows(received, w_in, w_out, chosen, sent, how)
        return sums, None, dropped
    if chosen.runs_few_rows(received, w_in, w_out):
        return few_rows_mlp(received.x, w_in, w_out, route, chosen.ranks), received.weights, received.dropped
    if how.late:
        returning = Returning(route.alignment, route.max_tokens, sent.comm.name, route.layout, sent.flight)
        tokens = inputs.with_weights(sent.comm, sent.x, sent.topk_weights)  # converted as by dispatch
        along = received.x, received.weights, *route.tensors
        return *_Late.apply(*tokens, w_in, w_out, _How(returning, gemms), *along), received.dropped
    if received.scales is None:
        y = gemms.product(received.x, w_in, route.offs)
    else:
        y = scaled_grouped_mm(received.x, received.scales, w_in, route.offs)
    return gemms.product(swiglu_rows(y, route), w_out, route.offs), received.weights, received.dropped


class _How(NamedTuple):
    returning: Returning
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
        h = SWIGLU(y, offs, counts, how.returning.alignment, 0)
        weights = recv_weights.clone()
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(weights)
        ctx.save_for_backward(recv_x, y, h, w_in, w_out, *route)
        ctx.sizes, ctx.dtype, ctx.how = (*x.shape, topk_idx.shape[1]), x.dtype, how
        return product(h, w_out, offs), weights

    @staticmethod
    @functools.partial(once, "expert_mlp")
    def backward(ctx: Any, grad_y: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        recv_x, y, h, w_in, w_out, *route = taken(ctx)
        *_, offs, counts = route
        returning, gemms = ctx.how
        asks_x, asks_weights, asks_in, asks_out, *_ = ctx.needs_input_grad
        product, weights_gradient = gemms.product, gemms.weights_gradient
        grad_y = grad_y.contiguous()
        grad_h = product(grad_y, w_out.transpose(1, 2), offs)
        grad_inner = SWIGLU_BACKWARD(grad_h, y, offs, counts, returning.alignment, 0)
        del grad_h, y
        rows = product(grad_inner, w_in.transpose(1, 2), offs) if asks_x else None
        scalars = grad_weights.contiguous() if asks_weights else None

        def matrices() -> tuple[Tensor | None, Tensor | None]:
            of_in = weights_gradient(recv_x, grad_inner, offs) if asks_in else None
            return of_in, weights_gradient(h, grad_y, offs) if asks_out else None

        *home, of_weights = while_returning(rows, scalars, route, returning, ctx.sizes, ctx.dtype, matrices)
        return *home, *of_weights, *(None for _ in range(8))
