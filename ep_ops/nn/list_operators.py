"""The operators behind ``lists`` and ``places``: kernels on GPUs that the ``cute`` backend supports, else plain
PyTorch.

They do not synchronize the host, except ``exact_lists``. The first call compiles a kernel; it must come before the
capture of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ep_ops.arrivals import size, views
from ep_ops.formats import round_up
from ep_ops.nn.live_rows import kernels_on
from ep_ops.operators.library import define
from ep_ops.records import UNKNOWN_ROW

MOST_EXPERTS = 2048
"""The largest number of experts whose tables fit into the shared memory of a kernel."""


def _fake_lists(local_idx: Tensor, num_local_experts: int, alignment: int, length: int) -> tuple[Tensor, ...]:
    rows, flat = (local_idx.new_empty(length, dtype=torch.int32) for _ in range(2))
    places = local_idx.new_empty(local_idx.shape, dtype=torch.int32)
    of_experts = (local_idx.new_empty(num_local_experts, dtype=torch.int32) for _ in range(3))
    return rows, flat, places, *of_experts


def _lists(local_idx: Tensor, num_local_experts: int, alignment: int, length: int) -> tuple[Tensor, ...]:
    kernels = kernels_on(local_idx.device)
    if kernels is not None and local_idx.dtype == torch.int32 and 0 < num_local_experts <= MOST_EXPERTS:
        made = _fake_lists(local_idx, num_local_experts, alignment, length)
        kernels.expert_lists(kernels.readable(local_idx), num_local_experts, alignment, made)
        return made
    taken = local_idx.numel()
    if taken and local_idx.device.type == "cpu" and (largest := int(local_idx.max())) >= num_local_experts:
        raise ValueError(
            f"local_idx has {largest}; allowed: local experts, 0..{num_local_experts - 1}, or -1 for none (global ids"
            " become local ones in a token-major dispatch)"
        )
    expert = torch.where(local_idx < 0, num_local_experts, local_idx).flatten().long()
    order = expert.argsort(stable=True)  # row * K + k, by expert; -1 last
    expert = expert[order]
    bounds = torch.searchsorted(expert, torch.arange(num_local_experts + 1, device=local_idx.device))
    asked = bounds[1:] - bounds[:-1]
    padded = round_up(asked, alignment)
    begin = (padded.cumsum(0) - padded).clamp(max=length)
    counts = torch.minimum(asked, length - begin)

    number = torch.arange(taken, device=local_idx.device) - bounds[expert]
    last = counts.new_zeros(1)  # entry of -1: nothing is kept
    kept = number < torch.cat([counts, last])[expert]
    place = torch.where(kept, torch.cat([begin, last])[expert] + number, -1)
    places = torch.empty_like(order).scatter(0, order, place).view(local_idx.shape)
    flat = order.new_full((length + 1,), taken).scatter(0, torch.where(kept, place, length), order)[:length]

    # Padding places repeat the row of the expert's last place, so a GEMM reads rows of the same expert only.
    at = torch.arange(length, device=local_idx.device)
    offs = begin + round_up(counts, alignment)
    held = torch.searchsorted(offs, at, right=True)
    end = torch.cat([begin + counts, last])[held]
    some = torch.cat([flat, last])[torch.where(held < num_local_experts, torch.minimum(at, end - 1), length)]
    rows = some // local_idx.shape[1]
    return rows.int(), flat.int(), places.int(), offs.int(), counts.int(), (asked - counts).int()


def _fake_exact(local_idx: Tensor, num_local_experts: int, alignment: int) -> tuple[Tensor, ...]:
    length: Any = torch.library.get_ctx().new_dynamic_size()
    return _fake_lists(local_idx, num_local_experts, alignment, length)


def _exact(local_idx: Tensor, num_local_experts: int, alignment: int) -> tuple[Tensor, ...]:
    named = (local_idx.flatten() + 1).clamp(max=num_local_experts).long().bincount(minlength=num_local_experts + 1)
    return _lists(local_idx, num_local_experts, alignment, int(round_up(named[1:], alignment).sum()))


def _fake_route(
    topk_idx: Tensor, send_rows: Tensor, arrivals: Tensor, places: Tensor, num_places: int, rank: int,
    experts_per_rank: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ints = size(num_places, len(experts_per_rank))
    return arrivals.new_empty(ints, dtype=torch.int32), torch.empty_like(send_rows)


def _route(
    topk_idx: Tensor, send_rows: Tensor, arrivals: Tensor, places: Tensor, num_places: int, rank: int,
    experts_per_rank: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kernels = kernels_on(arrivals.device)
    if kernels is not None and len(set(experts_per_rank)) == 1 and experts_per_rank[0] > 0:
        made = _fake_route(topk_idx, send_rows, arrivals, places, num_places, rank, experts_per_rank)
        given = [kernels.readable(t) for t in (topk_idx, send_rows, arrivals, places)]
        kernels.places_route(given, made, num_places, len(experts_per_rank), rank, experts_per_rank[0])
        return made
    own = _send_rows(topk_idx, send_rows, places, rank, experts_per_rank)
    return _arrivals(arrivals, places, num_places, len(experts_per_rank)), own


def _arrivals(arrivals: Tensor, places: Tensor, num_places: int, ranks: int) -> Tensor:
    """Return the arrivals of the places: the same copies, with as many rows as they have places."""
    num_rows, top_k = places.shape
    copies, _, sources = views(arrivals, num_rows)
    held = places.flatten() >= 0
    behind = held.cumsum(0)  # number of places up to and including each
    begin = torch.nn.functional.pad(behind, (1, 0))[::top_k][: num_rows + 1]
    home = copies[:, 1].long()
    asker = (home[:num_rows, None] // min(top_k, ranks) * top_k).add(_ks(places)).flatten()
    at = torch.where(held, behind - 1, num_places)
    owned = [
        values.new_full((num_places + 1,), -1).scatter(0, at, values)[:num_places]
        for values in (places.flatten().long(), asker)
    ]
    ends = torch.nn.functional.pad(torch.stack([begin, home], 1), (0, 0, 0, num_places - num_rows), value=-1)
    return torch.cat([ends.flatten(), torch.stack(owned, 1).flatten(), sources]).int()


def _send_rows(
    topk_idx: Tensor, send_rows: Tensor, places: Tensor, rank: int, experts_per_rank: Sequence[int]
) -> Tensor:
    """Return the place of each (token, k) on this rank, and `UNKNOWN_ROW` on other ranks, [T, K]."""
    holder = _holders(topk_idx, experts_per_rank)
    same = holder[:, :, None] == holder[:, None, :]
    copy = torch.where(same, send_rows[:, None, :], -1).amax(2)  # the copy's row at its rank
    elsewhere = torch.where(copy >= 0, UNKNOWN_ROW, -1)
    if places.shape[0] == 0:
        return elsewhere.int()
    here = (holder == rank) & (copy >= 0)
    row = torch.where(here, copy, 0).long()
    return torch.where(here, places[row, _ks(places)], elsewhere).int()


def _holders(topk_idx: Tensor, experts_per_rank: Sequence[int]) -> Tensor:
    """Return the rank that holds each expert, or -1."""
    each = experts_per_rank[0]
    if len(set(experts_per_rank)) == 1:
        return torch.div(topk_idx, each, rounding_mode="floor")
    holder, begin = torch.where(topk_idx >= 0, 0, -1), 0
    for held in experts_per_rank[:-1]:
        begin += held
        holder = holder + (topk_idx >= begin)
    return holder


def _ks(places: Tensor) -> Tensor:
    return torch.arange(places.shape[1], device=places.device)


expert_lists = define(
    "expert_lists(Tensor local_idx, int num_local_experts, int alignment, SymInt length)"
    " -> (Tensor rows, Tensor flat, Tensor places, Tensor offs, Tensor counts, Tensor dropped)",
    _lists, _fake_lists,
)  # fmt: skip
exact_lists = define(
    "exact_lists(Tensor local_idx, int num_local_experts, int alignment)"
    " -> (Tensor rows, Tensor flat, Tensor places, Tensor offs, Tensor counts, Tensor dropped)",
    _exact, _fake_exact,
)  # fmt: skip
places_route = define(
    "places_route(Tensor topk_idx, Tensor send_rows, Tensor arrivals, Tensor places, SymInt num_places, int rank,"
    " int[] experts_per_rank) -> (Tensor new_arrivals, Tensor new_send_rows)",
    _route, _fake_route,
)  # fmt: skip
