"""Placement of rows: the route of every token, from the expert ids of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from meta_kernels.arguments import PlanArgs

from ... import arrivals
from ...formats import round_up
from ...records import NO_IDS, TOKEN_MAJOR, UNBOUNDED, Placed
from .ranks import ExpertRanks


def place(ranks: ExpertRanks, everyone: Tensor, rooms: list[list[int]], a: PlanArgs) -> Placed:
    """Return the route of this rank, without ``recv_idx``.

    Args:
        everyone: ids of all tokens, int64 [W, max_tokens, K].
        rooms: capacity, alignment and slots of each rank.
        a: arguments of this rank.
    """
    capacity, alignment, token_major = a.capacity, a.alignment, a.layout == TOKEN_MAJOR
    destination = ranks.named(everyone)
    asks, held = everyone, ranks.experts_per_rank
    if token_major:  # each token requests a row of each rank once
        asks, held = _first_named(destination, ranks.world_size), (1,) * ranks.world_size
    position, asked = _number_askers(asks, sum(held))

    begins, kept = [], []
    for rank_asked, room in zip(asked.split(held), rooms, strict=True):
        begin, keep = _segments(rank_asked, *room)
        begins.append(begin)
        kept.append(keep)
    begin, keep = torch.cat(begins), torch.cat(kept)  # [E], or [W] of ranks

    asked_for = asks.clamp(min=0)
    has_row = (asks >= 0) & (position < keep[asked_for])
    rows = torch.where(has_row, begin[asked_for] + position, -1)
    mine = slice(sum(held[: ranks.rank]), sum(held[: ranks.rank + 1]))
    counts = keep[mine]
    offs = begin[mine] + round_up(counts, alignment)
    if capacity == UNBOUNDED:
        capacity = int(offs[-1]) if offs.numel() else 0
    table = torch.where(destination == ranks.rank, rows, -1)
    dropped = asked[mine] - counts
    if token_major:
        counts, dropped = _named_here(ranks, everyone, destination, (table >= 0).any(2))
        offs = counts.cumsum(0)
    return Placed(
        rows[ranks.rank, : a.topk_idx.shape[0]].int(),
        arrivals.pack(table, capacity, ranks.copy_numbers(destination)),
        offs.int(),
        counts.int(),
        dropped.int(),
        NO_IDS[everyone.device],
    )


def _number_askers(asks: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Number the (source rank, token, k) that request the same, and count the requests of each of 0 .. ``groups``."""
    none_last = torch.where(asks < 0, groups, asks).flatten()
    asked = torch.bincount(none_last, minlength=groups + 1)
    order = none_last.argsort(stable=True)  # by request, then (source rank, token, k)
    before = asked.cumsum(0) - asked
    position = torch.empty_like(none_last)
    position[order] = torch.arange(order.numel(), device=asks.device) - before[none_last[order]]
    return position.view_as(asks), asked[:groups]


def _named_here(ranks: ExpertRanks, everyone: Tensor, destination: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Count the (token, k) that name each local expert, of ``kept`` copies [W, max_tokens] and of others."""
    here, local = destination == ranks.rank, everyone - ranks.first_expert[ranks.rank]
    held = ranks.experts_per_rank[ranks.rank]
    of_kept, of_others = (torch.bincount(local[here & which[..., None]], minlength=held) for which in (kept, ~kept))
    return of_kept, of_others


def _first_named(destination: Tensor, none: int) -> Tensor:
    """Return the rank of each (source rank, token, k) that is the token's first to name it, else -1."""
    first = destination != none
    for k in range(1, destination.shape[2]):
        first[:, :, k] &= (destination[:, :, :k] != destination[:, :, k : k + 1]).all(2)
    return torch.where(first, destination, -1)


def _segments(asked: Tensor, capacity: int, alignment: int, slots: int) -> tuple[Tensor, Tensor]:
    """Return the first row and the number of kept rows of each expert of a rank with ``asked`` [El] requests."""
    if slots:
        return torch.arange(asked.numel(), device=asked.device) * slots, asked.clamp(max=slots)
    room = round_up(asked, alignment)
    begin = room.cumsum(0) - room
    if capacity == UNBOUNDED:
        return begin, asked
    begin = begin.clamp(max=capacity)
    return begin, torch.minimum(asked, capacity - begin)
