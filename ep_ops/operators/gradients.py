"""Gradients: the backward of each operator is another operator along the same route.

All ranks must run the same operators in backward, too. Which gradients are sent is therefore decided by which inputs
require a gradient, not by which gradients happen to arrive; missing gradients are sent as zeros.

In the backward of a split operation, the gradient of the wait starts, and passes its ticket on as the gradient of the
forward ticket. Autograd passes that to the gradient of the start, which waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.arguments import (
    AnyCombine,
    AnyDispatch,
    CombineBackwardArgs,
    CombineBackwardStartArgs,
    CombineBackwardWaitArgs,
    CombineGatheredArgs,
    CombineStartArgs,
    CombineWaitArgs,
    DispatchBackwardArgs,
    DispatchBackwardStartArgs,
    DispatchBackwardWaitArgs,
    DispatchPlannedArgs,
    DispatchStartArgs,
    DispatchWaitArgs,
)
from meta_kernels.formats import ELEMENT

from .. import checks, registry
from ..records import Placed, Received, Segments
from . import recomputation
from .operator import Gradient, Operator, nothing
from .rejection import reject


class ToTokens(NamedTuple):
    """Results of the gradient of a dispatch."""

    grad_x: Tensor
    grad_topk_weights: Tensor


class ToRows(NamedTuple):
    """Results of the gradient of a combine."""

    grad_y: Tensor
    grad_recv_weights: Tensor


class _Route(NamedTuple):
    """The tensors of a route, as operators take them."""

    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor


def _save_dispatch(ctx: Any, a: AnyDispatch, asked: Any, output: tuple[Tensor, ...]) -> None:
    recv_x, recv_scales, recv_weights, *integers = output
    route: Placed | DispatchPlannedArgs = a if isinstance(a, DispatchPlannedArgs) else Placed(*integers)
    ctx.save_for_backward(a.topk_idx, route.send_rows, route.arrivals, route.offs, route.counts)
    ctx.forward_idx = recomputation.kept(a.topk_idx) if recomputation.dispatch_modes() else None
    ctx.rows_shape, ctx.rows_dtype = recv_x.shape, a.x.dtype
    ctx.weights_shape, ctx.weights_dtype = recv_weights.shape, recv_weights.dtype
    ctx.along = {"alignment": a.alignment, "max_tokens": a.max_tokens, "comm": a.comm, "layout": a.layout}
    ctx.set_materialize_grads(False)  # most outputs are integers, which need no zeros
    constant = [recv_scales, *integers] if asked.topk_weights else [recv_scales, recv_weights, *integers]
    if a.x.dtype is ELEMENT:
        if asked.x:
            raise NotImplementedError(
                f"x is {a.x.dtype} and requires a gradient; quantized input has none. Pass x unquantized, which"
                " dispatch quantizes and differentiates, or x.detach()"
            )
        constant.append(recv_x)
    elif recv_x.dtype is ELEMENT:  # straight-through: gradients of quantized rows have the dtype of x
        free_gradient(ctx, output, recv_x, constant)
    ctx.mark_non_differentiable(*constant)


def free_gradient(ctx: Any, outputs: Sequence[Tensor], free: Tensor, constant: Sequence[Tensor]) -> None:
    """Let the gradient of output ``free`` arrive in backward in its own dtype; autograd would round it to the output's
    dtype. ``constant``: the outputs that have no gradient."""
    if hasattr(ctx, "set_output_grad_dtype"):  # torch 2.15 and newer; older ones support this for leaves only
        has_none = {id(output) for output in (free, *constant)}
        ctx.set_output_grad_dtype(*(None if id(output) in has_none else output.dtype for output in outputs))
    else:
        free.grad_dtype = None


def _check(ctx: Any, operator: Operator, topk_idx: Tensor, *grads: Tensor | None) -> None:
    """Raise an error on all ranks, which run ``operator`` next, for batched gradients, and if selective checkpointing
    has kept the results of a dispatch to other experts."""
    try:
        if any(grad is not None and _is_batched(grad) for grad in grads):
            raise not_batched(operator)
        if ctx.forward_idx is not None:
            recomputation.compare(topk_idx, *ctx.forward_idx)
    except RuntimeError as error:
        comm, flight = registry.get(ctx.along["comm"]), getattr(ctx, "flight", 0)
        reject(operator.name, comm, error, flight, ctx.along["max_tokens"])


def not_batched(operator: Operator) -> NotImplementedError:
    """Return the error for tensors of batched gradients, which would run the operator once for each gradient."""
    return NotImplementedError(
        f"ep::{operator.name} does not support batched gradients (torch.autograd.grad with is_grads_batched,"
        " torch.autograd.functional.jacobian with vectorize); allowed: one backward for each gradient"
    )


_is_batched = torch._C._functorch.is_legacy_batchedtensor


def _outgoing_grads(ctx: Any, operator: Operator, asked: Any, grads: tuple[Tensor | None, ...]) -> dict[str, Any]:
    """Return the gradients of a dispatch's rows and weights, and the route, as arguments of ``operator``."""
    grad_x, _scales, grad_weights, *_ = grads
    route = _Route(*ctx.saved_tensors)
    _check(ctx, operator, route.topk_idx, grad_x, grad_weights)
    zeros = route.topk_idx.new_zeros
    if asked.x:  # gradients may have any strides, such as those of an expanded sum
        dtype = ctx.rows_dtype
        grad_x = zeros(ctx.rows_shape, dtype=dtype) if grad_x is None else grad_x.to(dtype).contiguous()
    if asked.topk_weights:
        shape, dtype = ctx.weights_shape, ctx.weights_dtype
        grad_weights = zeros(shape, dtype=dtype) if grad_weights is None else grad_weights.contiguous()
    rows, scalars = grad_x if asked.x else None, grad_weights if asked.topk_weights else None
    return {"grad_recv_x": rows, "grad_recv_weights": scalars, **route._asdict()}


def _dispatch_backward(ctx: Any, asked: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
    home_x, home_weights = DISPATCH_BACKWARD.call(
        DispatchBackwardArgs(**_outgoing_grads(ctx, DISPATCH_BACKWARD, asked, grads), **ctx.along)
    )
    return {"x": home_x if asked.x else None, "topk_weights": home_weights if asked.topk_weights else None}


def _save_combine(ctx: Any, a: AnyCombine | CombineGatheredArgs, asked: Any, output: Tensor) -> None:
    weights = getattr(a, "recv_weights", None)  # a gathering combine takes none
    weights_asked = weights is not None and asked.recv_weights
    ctx.save_for_backward(
        a.y if weights_asked else None, weights, a.topk_idx, a.send_rows, a.arrivals, a.offs, a.counts
    )
    ctx.forward_idx = recomputation.kept(a.topk_idx) if recomputation.dispatch_modes() else None
    ctx.rows_asked, ctx.grad_format = asked.y or weights_asked, getattr(a, "grad_format", "")
    ctx.along = {
        "num_rows": a.y.shape[0], "alignment": a.alignment, "max_tokens": a.max_tokens, "comm": a.comm
    }  # fmt: skip


def _combine_backward(ctx: Any, asked: Any, grad_out: Tensor) -> dict[str, Tensor | None]:
    y, recv_weights, *tensors = ctx.saved_tensors
    route = _Route(*tensors)
    grads: dict[str, Tensor | None] = {}
    if ctx.rows_asked:
        along = {**route._asdict(), **ctx.along}
        plain = recv_weights is None or ctx.grad_format
        _check(ctx, DISPATCH_PLANNED if plain else COMBINE_BACKWARD, route.topk_idx, grad_out)
        if plain:
            sent = DispatchPlannedArgs(grad_out.contiguous(), None, **along, format=ctx.grad_format)
            rows, *_ = DISPATCH_PLANNED.call(sent)
            grads["y"] = rows
            if recv_weights is not None:
                num_rows = ctx.along["num_rows"]
                segments = Segments(route.offs, route.counts, ctx.along["alignment"])
                kept = segments.covered(num_rows, padding=False)
                grads["y"], grads["recv_weights"] = _with_weights(rows, y, recv_weights, kept)
        else:
            given = CombineBackwardArgs(grad_out.contiguous(), y, recv_weights, **along)
            grads["y"], grad_weights = COMBINE_BACKWARD.call(given)
            grads["recv_weights"] = None if y is None else grad_weights
    if getattr(asked, "residual", False):
        grads["residual"] = grad_out
    return grads


def _with_weights(g: Tensor, y: Tensor | None, recv_weights: Tensor, kept: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``weight * g`` for rows ``g`` [R, H] of the gradient, and the dot products of g and y in fp32, as
    ``combine_backward`` does. Rows that are not ``kept`` [R] are unchanged, and their products are 0."""
    wide = g.float()
    grad_y = torch.where(kept[:, None], (wide * recv_weights[:, None]).to(g.dtype), g)
    return grad_y, None if y is None else torch.where(kept, (wide * y.float()).sum(1), 0)


# ---------------------------------------------------------------------- split operations

_GIVEN = "_ep_given"
"""Attribute of a ticket that is a gradient: the tensors that its start takes. The wait takes them as well, which keeps
them alive until the wait in compiled graphs, too."""


def _save_dispatch_wait(ctx: Any, a: DispatchWaitArgs, asked: Any, output: tuple[Tensor, ...]) -> None:
    _save_dispatch(ctx, a, asked, output)
    _same_as_start(asked, asked.x or asked.topk_weights, "dispatch")
    ctx.flight = a.flight


def _dispatch_wait_backward(ctx: Any, asked: Any, *grads: Tensor | None) -> dict[str, Tensor | None]:
    grads_and_route = _outgoing_grads(ctx, DISPATCH_BACKWARD_START, asked, grads)
    given = DispatchBackwardStartArgs(**grads_and_route, **ctx.along, flight=ctx.flight)
    return _started(DISPATCH_BACKWARD_START, given)


def _save_dispatch_start(ctx: Any, a: DispatchStartArgs, asked: Any, ticket: Tensor) -> None:
    tokens, top_k = a.topk_idx.shape
    ctx.wait = functools.partial(
        DispatchBackwardWaitArgs, dtype=a.x.dtype, tokens=tokens, hidden=a.x.shape[1] if asked.x else 0,
        top_k=top_k if asked.topk_weights else 0, comm=a.comm, flight=a.flight,
    )  # fmt: skip


def _dispatch_start_backward(ctx: Any, asked: Any, ticket: Tensor) -> dict[str, Tensor | None]:
    home_x, home_weights = DISPATCH_BACKWARD_WAIT.call(ctx.wait(ticket, _kept(ticket)))
    return {"x": home_x if asked.x else None, "topk_weights": home_weights if asked.topk_weights else None}


def _save_combine_wait(ctx: Any, a: CombineWaitArgs, asked: Any, output: Tensor) -> None:
    _save_combine(ctx, a, asked, output)
    _same_as_start(asked, ctx.rows_asked, "combine")
    ctx.flight = a.flight


def _combine_wait_backward(ctx: Any, asked: Any, grad_out: Tensor) -> dict[str, Tensor | None]:
    if not ctx.rows_asked:
        return {}
    y, recv_weights, *tensors = ctx.saved_tensors
    route = _Route(*tensors)
    _check(ctx, COMBINE_BACKWARD_START, route.topk_idx, grad_out)
    along = {**route._asdict(), **ctx.along}
    given = CombineBackwardStartArgs(grad_out.contiguous(), y, recv_weights, **along, flight=ctx.flight)
    return _started(COMBINE_BACKWARD_START, given)


def _save_combine_start(ctx: Any, a: CombineStartArgs, asked: Any, ticket: Tensor) -> None:
    num_rows, hidden = a.y.shape
    ctx.scalars = a.recv_weights is not None and asked.recv_weights
    ctx.wait = functools.partial(
        CombineBackwardWaitArgs, dtype=a.y.dtype, num_rows=num_rows, hidden=hidden, scalars=ctx.scalars, comm=a.comm,
        flight=a.flight,
    )  # fmt: skip


def _combine_start_backward(ctx: Any, asked: Any, ticket: Tensor) -> dict[str, Tensor | None]:
    grad_y, grad_weights = COMBINE_BACKWARD_WAIT.call(ctx.wait(ticket, _kept(ticket)))
    return {"y": grad_y, "recv_weights": grad_weights if ctx.scalars else None}


def _same_as_start(asked: Any, gradient: bool, operator: str) -> None:
    if gradient and not asked.ticket:
        raise RuntimeError(
            f"ep::{operator}_wait got tensors that require a gradient, and a ticket that does not: call"
            f" ep::{operator}_start with the same tensors and with gradients enabled"
        )


def _started(
    operator: Operator, given: DispatchBackwardStartArgs | CombineBackwardStartArgs
) -> dict[str, Tensor | None]:
    ticket = operator.call(given)
    setattr(ticket, _GIVEN, [argument for argument in given if isinstance(argument, Tensor)])
    return {"ticket": ticket}


def _kept(ticket: Tensor) -> list[Tensor]:
    """Return the tensors that the start of a gradient takes. They are unknown if it ran in another graph, which keeps
    them alive itself (ordering.py)."""
    return getattr(ticket, _GIVEN, [])


# ---------------------------------------------------------------------- operators that backward runs, and gradients

DISPATCH_BACKWARD = Operator(
    "dispatch_backward", DispatchBackwardArgs, ToTokens, "gradients of a dispatch", checks.dispatch_backward
)
DISPATCH_BACKWARD_START = Operator(
    "dispatch_backward_start",
    DispatchBackwardStartArgs,
    "ticket",
    "start the gradients of a dispatch",
    checks.dispatch_backward,
)
DISPATCH_BACKWARD_WAIT = Operator(
    "dispatch_backward_wait", DispatchBackwardWaitArgs, ToTokens, "finish the gradients of a dispatch", nothing
)
COMBINE_BACKWARD = Operator(
    "combine_backward", CombineBackwardArgs, ToRows, "gradients of a combine", checks.combine_backward
)
COMBINE_BACKWARD_START = Operator(
    "combine_backward_start",
    CombineBackwardStartArgs,
    "ticket",
    "start the gradients of a combine",
    checks.combine_backward,
)
COMBINE_BACKWARD_WAIT = Operator(
    "combine_backward_wait", CombineBackwardWaitArgs, ToRows, "finish the gradients of a combine", nothing
)

OF_DISPATCH = Gradient(("dispatch_backward",), _save_dispatch, _dispatch_backward)
OF_DISPATCH_START = Gradient(("dispatch_backward_wait",), _save_dispatch_start, _dispatch_start_backward)
OF_DISPATCH_WAIT = Gradient(("dispatch_backward_start",), _save_dispatch_wait, _dispatch_wait_backward)
OF_COMBINE_START = Gradient(("combine_backward_wait",), _save_combine_start, _combine_start_backward)
OF_COMBINE_WAIT = Gradient(("combine_backward_start",), _save_combine_wait, _combine_wait_backward)
OF_COMBINE = Gradient(("combine_backward", "dispatch_planned"), _save_combine, _combine_backward)
OF_GATHERED = Gradient(("dispatch_planned",), _save_combine, _combine_backward)

DISPATCH_PLANNED = Operator(
    "dispatch_planned",
    DispatchPlannedArgs,
    Received,
    "`dispatch` along an existing route",
    checks.dispatch_planned,
    OF_DISPATCH,
)
