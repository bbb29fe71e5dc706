"""Row-wise operations between dispatch and combine: what belongs to an expert, for each of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.records import TOKEN_MAJOR, Route, no_route


def refuse_no_route(given: Any) -> None:
    """ValueError for what is no route, as the ``Dispatched`` that has one."""
    if not isinstance(given, Route):
        raise ValueError(no_route(given))


def expert_of_rows(route: Route) -> Tensor:
    """int64 [R]: the local expert whose row each one is; -1 for rows that nobody owns.

    R is ``route.num_rows``. Padding rows, and those between or past the segments, are nobody's. ValueError for
    token-major rows, which belong to several experts.
    """
    refuse_no_route(route)
    if route.layout == TOKEN_MAJOR:
        raise ValueError("route is token-major: its rows belong to several experts; take ep_ops.nn.expert_lists")
    row = torch.arange(route.num_rows, device=route.offs.device)
    if route.offs.shape[0] == 0:
        return torch.full_like(row, -1)
    counts = route.counts.long()
    padded = (counts + route.alignment - 1) // route.alignment * route.alignment
    end = route.offs.long() - padded + counts  # behind the last row that the expert owns
    expert = torch.searchsorted(route.offs.long(), row, right=True).clamp(max=end.shape[0] - 1)
    owned = (row < end[expert]) & (row >= (end - counts)[expert])
    return torch.where(owned, expert, -1)


def of_rows(values: Tensor, route: Route) -> Tensor:
    """What each row's expert has: ``values`` [El, ...] -> [R, ...], zeros for rows that nobody owns. Differentiable.

    For biases, scales and norms that differ by expert::

        y = grouped_mm(x, w, route.offs) + of_rows(bias, route)

    Rows that nobody owns add nothing to the gradient of ``values``, whatever their own gradients hold: they are
    undefined there. ``bias[expert_of_rows(route)]`` would add them up. ValueError for values of other experts than the
    route's.
    """
    refuse_no_route(route)
    if values.shape[:1] != route.offs.shape:
        raise ValueError(
            f"values has shape {tuple(values.shape)}; allowed: [{route.offs.shape[0]} (local experts), ...]"
        )
    expert = expert_of_rows(route)
    owned = (expert >= 0).view(-1, *[1] * (values.ndim - 1))
    if values.shape[0] == 0:
        return values.new_zeros(expert.shape[0], *values.shape[1:])
    return torch.where(owned, values[expert.clamp(min=0)], 0)


def mask_rows(x: Tensor, route: Route) -> Tensor:
    """Return x with zeros in the rows that hold no token; their gradient is zero as well. Differentiable.

    Rows that hold no token are undefined (NaN on the reference backend), in received rows and in the gradient that a
    combine returns. A product over whole batches of rows, such as ``torch.bmm`` over [El, slots, H], multiplies them
    into the gradient of the weights. Mask the rows before the first product and after the last one::

        h = mask_rows(got.x, got.route).view(num_local_experts, slots, H)
        y = mask_rows(experts(h).view(-1, H), got.route)

    Args:
        x: rows along ``route``, [R, ...].
        route: of a grouped or padded layout, R = ``route.num_rows``.

    Raises:
        ValueError: the route is token-major, or x has another number of rows than the route.
    """
    holds = expert_of_rows(route) >= 0
    if x.shape[:1] != holds.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [{holds.shape[0]} (num_rows of the route), ...]")
    return torch.where(holds.view(-1, *[1] * (x.ndim - 1)), x, 0)
