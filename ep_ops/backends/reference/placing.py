"""Which rows there are: the route of every token, from the expert ids of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import arrivals
from ...records import NO_IDS, TOKEN_MAJOR, UNBOUNDED, Placed, Sizes
from .ranks import Ranks


def place(ranks: Ranks, everyone: Tensor, rooms: list[list[int]], sizes: Sizes, tokens: int) -> Placed:
    """``everyone``: int64 [W, max_tokens, K] ids of all tokens; ``rooms``: capacity, alignment and slots of each rank;
    ``sizes`` and ``tokens``: this rank's own. Without ``recv_idx``."""
    capacity, alignment, token_major = sizes.capacity, sizes.alignment, sizes.layout == TOKEN_MAJOR
    destination = ranks.named(everyone)
    asks, held = everyone, ranks.experts_per_rank
    if token_major:  # a rank is what its tokens ask for, once
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
    offs = begin[mine] + padded(counts, alignment)
    if capacity == UNBOUNDED:
        capacity = int(offs[-1]) if offs.numel() else 0
    table = torch.where(destination == ranks.rank, rows, -1)
    dropped = asked[mine] - counts
    if token_major:
        counts, dropped = _named_here(ranks, everyone, destination, (table >= 0).any(2))
        offs = counts.cumsum(0)
    return Placed(
        rows[ranks.rank, :tokens].int(),
        arrivals.pack(table, capacity, ranks.copy_numbers(destination)),
        offs.int(),
        counts.int(),
        dropped.int(),
        NO_IDS[everyone.device],
    )


def padded(count: Tensor, alignment: int) -> Tensor:
    return (count + alignment - 1) // alignment * alignment


def _number_askers(asks: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Number of each (source rank, token, k) among those that ask for the same, and how many ask for each of 0 ..
    ``groups``; -1 asks for nothing."""
    none_last = torch.where(asks < 0, groups, asks).flatten()
    asked = torch.bincount(none_last, minlength=groups + 1)
    order = none_last.argsort(stable=True)  # by what is asked for, then (source rank, token, k)
    before = asked.cumsum(0) - asked
    position = torch.empty_like(none_last)
    position[order] = torch.arange(order.numel(), device=asks.device) - before[none_last[order]]
    return position.view_as(asks), asked[:groups]


def _named_here(ranks: Ranks, everyone: Tensor, destination: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """How many (token, k) name each local expert, of copies that are ``kept`` [W, max_tokens] and of others."""
    here, local = destination == ranks.rank, everyone - ranks.first_expert[ranks.rank]
    held = ranks.experts_per_rank[ranks.rank]
    of_kept, of_others = (torch.bincount(local[here & which[..., None]], minlength=held) for which in (kept, ~kept))
    return of_kept, of_others


def _first_named(destination: Tensor, none: int) -> Tensor:
    """The rank of each (source rank, token, k), where none of the token's earlier k names it; else -1."""
    first = destination != none
    for k in range(1, destination.shape[2]):
        first[:, :, k] &= (destination[:, :, :k] != destination[:, :, k : k + 1]).all(2)
    return torch.where(first, destination, -1)


def _segments(asked: Tensor, capacity: int, alignment: int, slots: int) -> tuple[Tensor, Tensor]:
    """First row and number of kept rows of each expert of one rank, for which ``asked`` [El] rows are wanted."""
    if slots:
        return torch.arange(asked.numel(), device=asked.device) * slots, asked.clamp(max=slots)
    room = padded(asked, alignment)
    begin = room.cumsum(0) - room
    if capacity == UNBOUNDED:
        return begin, asked
    begin = begin.clamp(max=capacity)
    return begin, torch.minimum(asked, capacity - begin)
