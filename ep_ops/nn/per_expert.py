"""Row-wise operations between dispatch and combine that depend on the expert of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_ops.records import Route, check_types


def expert_of_rows(route: Route) -> Tensor:
    """Return the local expert of each row.

    Args:
        route: of grouped or padded rows.

    Returns:
        int64 [R], R = ``route.num_rows``; -1 for rows that hold no token: padding and rows outside of segments.

    Raises:
        TypeError: ``route`` is not a Route.
        ValueError: the route is token-major.
    """
    check_types(Route, route=route)
    return route.m_indices.long()


def of_rows(values: Tensor, route: Route) -> Tensor:
    """Return, for each row, the value of its expert. Differentiable.

    Use it for biases, scales and norm weights of experts::

        y = grouped_mm(x, w, route.offs) + of_rows(bias, route)

    Rows that hold no token add nothing to the gradient of ``values``, although their own gradients are undefined;
    ``bias[expert_of_rows(route)]`` would add them.

    Args:
        values: one entry for each local expert, [El, ...].
        route: of grouped or padded rows.

    Returns:
        [R, ...], zeros for rows that hold no token.

    Raises:
        TypeError: ``values`` is not a tensor, or ``route`` is not a Route.
        ValueError: the number of entries differs from El, or the route is token-major.
    """
    check_types(Tensor, values=values)
    check_types(Route, route=route)
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
    into the gradient of the weights. Mask the rows before the first product and after the last product::

        h = mask_rows(got.x, got.route).view(num_local_experts, slots, H)
        y = mask_rows(experts(h).view(-1, H), got.route)

    Args:
        x: rows along ``route``, [R, ...].
        route: of a grouped or padded layout, R = ``route.num_rows``.

    Raises:
        TypeError: x is not a tensor, or ``route`` is not a Route.
        ValueError: the route is token-major, or x has another number of rows than the route.
    """
    check_types(Tensor, x=x)
    holds = expert_of_rows(route) >= 0
    if x.shape[:1] != holds.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: [{holds.shape[0]}, ...] (the rows of the route)")
    return torch.where(holds.view(-1, *[1] * (x.ndim - 1)), x, 0)
