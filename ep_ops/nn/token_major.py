"""SwiGLU experts on token-major rows, of which backward keeps two tensors: the received rows [R, H] and the output of
the first GEMM [L, 2F].

R counts copies (one for each token and rank) and L places (one for each token and expert). A place's row is copied to
scratch memory, unless the GEMM gathers rows itself. With x the received rows, s the routing weights, and g the gradient
that the combine sends, one row for each copy:

    forward    h = x[rows] w_in      a = swiglu(h)      out = sum over places of s (a w_out)
    backward   dA = g[rows] w_out'   dh = s dA swiglu'(h)   ds = <dA, a>   dX = sum over places of dh w_in'
               dw_out = (s a)' g[rows]   dw_in = x[rows]' dh

The outputs of the experts are not needed for the gradient of s, because <g, a w_out> = <g w_out', a>, and a is computed
from h again. With ``redispatch`` backward sends the tokens again and the received rows are not kept either.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops import inputs
from ep_ops.communicator import Communicator
from ep_ops.formats import Segments
from ep_ops.nn.expert_module import transposed
from ep_ops.nn.few_rows import few_rows
from ep_ops.nn.gemms import Choice
from ep_ops.nn.grouped import Gated, Gemms
from ep_ops.nn.late import Returning, SentTokens, taken, while_returning
from ep_ops.nn.lists import ExpertLists, expert_lists, places_at_most
from ep_ops.nn.live_rows import SWIGLU, SWIGLU_WEIGHTED_BACKWARD
from ep_ops.nn.scaled import ROW
from ep_ops.nn.sums import copy_rows, sum_rows
from ep_ops.operators.library import define
from ep_ops.operators.once import once
from ep_ops.operators.table import DISPATCH_PLANNED, DISPATCH_START, DISPATCH_WAIT
from ep_ops.records import GROUPED, TOKEN_MAJOR, Dispatched, check_rows_of_experts
from meta_kernels.arguments import DispatchPlannedArgs, DispatchStartArgs, DispatchWaitArgs


class Rows(NamedTuple):
    """Which rows experts receive, and what backward keeps of them."""

    layout: str = GROUPED
    """"grouped" or "token_major"."""
    places: int | None = None
    """Token-major: number of rows of the GEMMs. None: as many as the received rows can need."""
    redispatch: bool = False
    """Token-major: whether backward dispatches the tokens again."""


class How(NamedTuple):
    """How one call of experts runs."""

    rows: Rows
    exact: bool = False
    """Whether the dispatch receives an exact number of rows."""
    format: str = ""
    """Format of the dispatch."""
    late: bool = False
    """Whether the dispatch runs without gradients, and backward of the experts sends those of the tokens while it
    computes those of the matrices."""
    split: bool = False
    """Whether other split operations may be in progress, so that backward runs split ones only."""


def check_rows(how: Rows, comm: Communicator, exact: bool, format: str) -> None:
    """Check the arguments of experts that concern their rows.

    Raises:
        ValueError: a value is not allowed, or not together with another one.
    """
    check_rows_of_experts(how.layout, how.places, how.redispatch, comm.alignment)
    if how.layout == GROUPED:
        return
    if format == ROW:
        raise ValueError(f"format is {ROW!r} with rows {TOKEN_MAJOR!r}; allowed: '', or one that begins with 'wire:'")
    if how.places is not None and exact:
        raise ValueError(f"places is {how.places} with an exact number of rows; allowed: None")


def token_major_rows(
    received: Dispatched, w_in: Tensor, w_out: Tensor, chosen: Choice, sent: SentTokens, how: How
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the weighted sums of the experts' outputs for the rows of a token-major dispatch, [R, H], and how many
    (token, k) each local expert dropped, int32 [El].

    Args:
        received: result of the dispatch, without gradients if ``how.late``.
        w_in, w_out, chosen: matrices and GEMMs of the experts.
        sent: what the dispatch has sent.
        how: the other arguments.
    """
    route, local_idx, weights, comm = received.route, received.local_idx, received.weights, sent.comm
    assert local_idx is not None and weights is not None
    lists = _lists(local_idx, comm, how)
    dropped = received.dropped + lists.dropped
    if comm.overflowed is not None:
        comm.overflowed.add(lists.dropped)
    # On token-major rows the kernels for few rows have no gradient, not even with gemms="memory".
    if chosen._replace(gradients=False).runs_few_rows(received, w_in, w_out):
        segments = Segments(lists.offs, lists.counts, lists.alignment)
        share = route.max_tokens, local_idx.shape[1], chosen.ranks
        y = few_rows(copy_rows(received.x, lists.rows, lists.offs), w_in, w_out, segments, *share)
        return sum_rows(y, lists.places, weights), dropped
    x, topk_weights = inputs.with_weights(comm, sent.x, sent.topk_weights)  # converted as by dispatch
    returning = Returning(route.alignment, route.max_tokens, comm.name, route.layout, sent.flight)
    kept = _Kept(returning, chosen.gemms, lists.alignment, route.num_rows, comm.num_local_experts, comm.world_size, how)
    ints = lists.rows, lists.flat, lists.places, lists.offs, lists.counts, *route.tensors
    if how.late:
        return _TokenMajor.apply(x, topk_weights, w_in, w_out, kept, received.x, weights, *ints), dropped
    again = x.detach() if how.rows.redispatch else None
    return _TokenMajor.apply(received.x, weights, w_in, w_out, kept, again, None, *ints), dropped


def _lists(local_idx: Tensor, comm: Communicator, how: How) -> ExpertLists:
    """Return lists with room for distinct ids of each row, for ``places``, or for exactly those that there are."""
    held, top_k = comm.num_local_experts, local_idx.shape[1]
    if how.exact:
        return expert_lists(local_idx, held, alignment=comm.alignment, exact=True)
    places = how.rows.places
    if places is None and held < top_k:
        places = max(places_at_most(local_idx.shape[0] * held, held, comm.alignment), comm.alignment)
    return expert_lists(local_idx, held, alignment=comm.alignment, capacity=places)


class _Kept(NamedTuple):
    """What backward needs besides tensors."""

    returning: Returning
    gemms: Gemms
    alignment: int
    num_rows: int
    num_local_experts: int
    world_size: int
    how: How


class _TokenMajor(torch.autograd.Function):
    """Experts between a token-major dispatch and a combine.

    x and weights are the tensors whose gradients backward returns: the received ones, or, in the late order, those that
    the dispatch has sent. ``other`` is the other one of received rows and tokens: in the late order the received rows,
    otherwise the tokens, if backward dispatches them again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, kept: _Kept, other: Tensor | None,
        recv_weights: Tensor | None, *ints: Tensor,
    ) -> Tensor:  # fmt: skip
        recv_x, tokens = (other, x) if kept.how.late else (x, other)
        scales = weights if recv_weights is None else recv_weights
        rows, flat, places, offs, counts, *route = ints
        product, gated = kept.gemms.product, _gated(kept.gemms, w_in)
        assert recv_x is not None
        if gated is not None:
            h, a = gated.product(recv_x, w_in, offs, rows)
        else:
            if kept.gemms.gathered_product is None:
                h = product(copy_rows(recv_x, rows, offs), w_in, offs)
            else:
                h = kept.gemms.gathered_product(recv_x, w_in, offs, rows)
            a = SWIGLU(h, offs, counts, kept.alignment, 0)
        y = product(a, w_out, offs)
        del a
        ctx.save_for_backward(tokens if kept.how.rows.redispatch else recv_x, scales, h, w_in, w_out, *ints)
        ctx.kept, ctx.sizes, ctx.dtype, ctx.gated = kept, (*x.shape, weights.shape[1]), x.dtype, gated is not None
        return sum_rows(y, places, scales)

    @staticmethod
    @functools.partial(once, "expert_mlp")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, weights, h, w_in, w_out, rows, flat, places, offs, counts, *route = taken(ctx)
        asks_x, asks_weights, asks_in, asks_out, *_ = ctx.needs_input_grad
        kept: _Kept = ctx.kept
        product, gradient, how = kept.gemms.product, kept.gemms.weights_gradient, kept.how
        gated = kept.gemms.gated if ctx.gated else None
        gathered = kept.gemms.gathered_gradient if gated is None else gated.weights_gradient
        recv_x = _dispatched(given, route, kept, grad) if how.rows.redispatch else given
        rows, flat = _AFTER(rows, grad), _AFTER(flat, grad)
        grad_y = copy_rows(grad, rows, offs)  # in padding of the row that precedes it, whose weight is 0
        of_places = torch.nn.functional.pad(weights.flatten(), (0, 1))[flat]
        if gated is not None:
            grad_h, a, dots = gated.gradient(grad_y, w_out, h, of_places, offs)
        else:
            grad_a = product(grad_y, w_out.transpose(1, 2), offs)
            grad_h, a, dots = SWIGLU_WEIGHTED_BACKWARD(grad_a, h, of_places, offs, counts, kept.alignment)
            del grad_a
        for_in, for_out = [grad_h, recv_x], [a] if gathered is None else [grad_y, a]  # freed when they are used
        del given, h, recv_x, grad_y, a
        up = functools.partial(product if gated is None else gated.rows_gradient, grad_h, w_in.transpose(1, 2), offs)
        grad_rows = sum_rows(up(), places) if asks_x else None
        del grad_h, up
        # Places of -1 select the zero behind the last dot product.
        scalars = torch.nn.functional.pad(dots, (0, 1))[places] if asks_weights else None

        def matrices() -> tuple[Tensor | None, Tensor | None]:
            """Compute the gradient of w_in, which needs wider rows than that of w_out, while the latter is not in
            memory; vice versa if the GEMM gathers rows of x."""
            of_in = of_out = None
            if asks_out and gathered is not None:
                of_out = gradient(for_out.pop(), for_out.pop(), offs)
            if asks_in and gathered is not None:
                of_in = gathered(for_in.pop(), for_in.pop(), offs, rows)
            if asks_in and gathered is None:
                of_in = gradient(copy_rows(for_in.pop(), rows, offs), for_in.pop(), offs)
            for_in.clear()
            if asks_out and gathered is None:
                again = rows if of_in is None else _AFTER(rows, of_in)
                of_out = gradient(for_out.pop(), copy_rows(grad, again, offs), offs)
            return of_in, of_out

        if how.late:
            grad_rows, scalars, (of_in, of_out) = while_returning(
                grad_rows, scalars, route, kept.returning, ctx.sizes, ctx.dtype, matrices
            )
        else:
            of_in, of_out = matrices()
        return grad_rows, scalars, of_in, of_out, *(None for _ in range(13))


def _gated(gemms: Gemms, w_in: Tensor) -> Gated | None:
    """Return the GEMMs with SwiGLU in their epilogues, if they take w_in."""
    return gemms.gated if transposed(w_in) else None


def _after(ints: Tensor, grad: Tensor) -> Tensor:
    return ints.clone()


_AFTER = define("after(Tensor ints, Tensor grad) -> Tensor", _after, lambda ints, grad: torch.empty_like(ints))
"""Copies ints. What is computed from the copy depends on the gradient, so that compiled graphs compute it in backward.
A compiler may otherwise compute it in the forward graph, and keep it."""


def _dispatched(x: Tensor, route: list[Tensor], kept: _Kept, grad: Tensor) -> Tensor:
    """Return the received rows of tokens that were dispatched before."""
    (alignment, max_tokens, comm, layout, flight), how = kept.returning, kept.how
    topk_idx, send_rows, arrivals, offs, counts = route
    topk_idx = _AFTER(topk_idx, grad)
    if not how.split:
        planned = DispatchPlannedArgs(
            x=x, topk_weights=None, topk_idx=topk_idx, send_rows=send_rows, arrivals=arrivals, offs=offs,
            counts=counts, num_rows=kept.num_rows, alignment=alignment, max_tokens=max_tokens, comm=comm,
            layout=layout, format=how.format, zeros=False,
        )  # fmt: skip
        return DISPATCH_PLANNED.call(planned)[0]  # type: ignore[no-any-return]
    start = DispatchStartArgs(
        x=x, topk_weights=None, topk_idx=topk_idx, capacity=kept.num_rows, alignment=alignment, slots=0,
        max_tokens=max_tokens, num_local_experts=kept.num_local_experts, world_size=kept.world_size, comm=comm,
        layout=layout, format=how.format, zeros=False, flight=flight,
    )  # fmt: skip
    ticket = DISPATCH_START.call(start)
    return DISPATCH_WAIT.call(DispatchWaitArgs(ticket, *start))[0]  # type: ignore[no-any-return]
