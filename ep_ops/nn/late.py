"""Computation while the gradient of a dispatch is sent: what autograd functions around experts share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.operators.gradients import DISPATCH_BACKWARD_START, DISPATCH_BACKWARD_WAIT
from meta_kernels.arguments import DispatchBackwardStartArgs, DispatchBackwardWaitArgs

Result = TypeVar("Result")


class SentTokens(NamedTuple):
    """What a dispatch without gradients has sent, to which backward sends the gradients."""

    comm: Communicator
    x: Tensor
    topk_weights: Tensor
    flight: int = 0


class Returning(NamedTuple):
    """How gradients return to the tokens of a dispatch."""

    alignment: int
    max_tokens: int
    comm: str
    layout: str
    flight: int


def while_returning(
    rows: Tensor | None, scalars: Tensor | None, route: list[Tensor], how: Returning, sizes: tuple[int, int, int],
    dtype: torch.dtype, compute: Callable[[], Result],
) -> tuple[Tensor | None, Tensor | None, Result]:  # fmt: skip
    """Send the gradients of a dispatch, and compute something else before the wait.

    Args:
        rows: gradient of the received rows; None: not needed.
        scalars: gradient of their weights; None: not needed.
        route: tensors of the route, in the order of the operators' arguments.
        how: the other arguments.
        sizes: tokens of this rank, H and K.
        dtype: dtype of the tokens.
        compute: runs between start and wait.

    Returns:
        The gradients of the tokens and of their weights (None where not needed), and the result of ``compute``.
    """
    (topk_idx, send_rows, arrivals, offs, counts), (tokens, hidden, top_k) = route, sizes
    start = DispatchBackwardStartArgs(
        grad_recv_x=rows, grad_recv_weights=scalars, topk_idx=topk_idx, send_rows=send_rows, arrivals=arrivals,
        offs=offs, counts=counts, alignment=how.alignment, max_tokens=how.max_tokens, comm=how.comm, layout=how.layout,
        flight=how.flight,
    )  # fmt: skip
    ticket = DISPATCH_BACKWARD_START.call(start)
    given = [tensor for tensor in (rows, scalars, *route) if tensor is not None]  # alive until the wait
    end_of_start = DispatchBackwardWaitArgs(
        ticket=ticket, given=given, dtype=dtype, tokens=tokens, hidden=0 if rows is None else hidden,
        top_k=0 if scalars is None else top_k, comm=how.comm, flight=how.flight,
    )  # fmt: skip
    wait = functools.partial(DISPATCH_BACKWARD_WAIT.call, end_of_start)
    try:
        computed = compute()
    except BaseException:
        end(wait)
        raise
    home_x, home_weights = wait()
    return None if rows is None else home_x, None if scalars is None else home_weights, computed


def taken(ctx: Any) -> tuple[Tensor, ...]:
    """Return the saved tensors of a backward, which then is alone in keeping them in memory, unless the graph is kept
    for another backward. Compiled functions do the same."""
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    return saved


def end(wait: Callable[[], Any]) -> None:
    """Complete a started operation whose results nobody will use, because an exception was raised before its wait. That
    exception is the one to raise, not what the wait reports, such as a call that another rank has rejected."""
    with contextlib.suppress(Exception), torch.no_grad():
        wait()
