"""The lists of what arrives at a rank, in one int32 tensor of a route: ``arrivals`` [4 R + W + 3].

W ranks, K = top_k, R rows of the receive buffer, C = min(K, W). Three lists follow each other;
``ep_ops.backends.reference`` defines them:

* ``copies`` [R + 1, 2], at 0: for each copy, where its rows begin in ``owned``, and its home;
* ``owned`` [R, 2], at 2 R + 2: the owned rows in the order of their owners' entries, each with that entry;
* ``sources`` [W + 1], at 4 R + 2: where the copies of each source rank begin in ``copies``, and the number of copies.

:func:`recv_from` computes the owner's entry of each row. A *table* contains the same information as int [W, max_tokens,
K]: the row here of (source rank, token, k), or -1.

Unless they say so, functions do not synchronize the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.fakes import arrivals_size


class Arrivals(NamedTuple):
    """Views of the three lists."""

    copies: Tensor  # [R + 1, 2] where rows begin, home; behind the last: number of owned rows, and something undefined
    owned: Tensor  # [R, 2] row, (source * max_tokens + token) * K + k; undefined behind the last owned row
    sources: Tensor  # [W + 1]


def size(num_rows: int, world_size: int) -> int:
    """Return the number of ints for ``num_rows`` rows."""
    ints: int = arrivals_size(num_rows, world_size)
    return ints


_FIXED = size(0, 0)


def rows_of(numel: int, world_size: int) -> int:
    """Return the number of rows that ``numel`` ints describe, or -1 if no number of rows fits."""
    rest = numel - world_size - _FIXED
    return -1 if rest < 0 or rest & 3 else rest >> 2


def views(arrivals: Tensor, num_rows: int) -> Arrivals:
    """Return views of the three lists. (Inductor of torch 2.11 does not compile slices of unknown size.)"""
    pairs = 2 * num_rows
    copies, owned, sources = arrivals.split((pairs + 2, pairs, arrivals.numel() - 2 * pairs - 2))
    return Arrivals(copies.view(num_rows + 1, 2), owned.view(num_rows, 2), sources)


def recv_from(arrivals: Tensor, num_rows: int) -> Tensor:
    """Return the owner's entry of each row, int32 [R]: ``(source * max_tokens + token) * K + k``, -1 for no token."""
    copies, owned, sources = views(arrivals, num_rows)
    row = torch.where(_is_owned(copies, sources), owned[:, 0], num_rows).long()  # undefined entries: after the last row
    return owned.new_full((num_rows + 1,), -1).scatter(0, row, owned[:, 1])[:num_rows]


def known(arrivals: Tensor, world_size: int) -> Tensor:
    """Return the list ``owned`` up to its last row. Synchronizes the host."""
    copies, owned, sources = views(arrivals, rows_of(arrivals.numel(), world_size))
    return owned[: int(copies[int(sources[-1]), 0])]


def are_consistent(arrivals: Tensor, world_size: int) -> bool:
    """Return whether the lists name rows and entries that can exist. Synchronizes the host."""
    num_rows = rows_of(arrivals.numel(), world_size)
    copies, _, sources = views(arrivals, num_rows)
    last = int(sources[-1])
    if not 0 <= last <= num_rows or not 0 <= int(copies[last, 0]) <= num_rows:
        return False
    owned = known(arrivals, world_size)
    return bool(((owned >= 0) & (owned[:, :1] < num_rows)).all())


def pack(table: Tensor, num_rows: int, copy_numbers: Tensor) -> Tensor:
    """Build ``arrivals`` of ``num_rows`` rows, -1 where undefined.

    Args:
        table: [W, max_tokens, K], the row here of (source rank, token, k), or -1.
        num_rows: R.
        copy_numbers: [W, max_tokens], number of the copy of (source rank, token) here; any value where there is none.
    """
    world_size, _, top_k = table.shape
    packed = table.new_full((size(num_rows, world_size),), -1, dtype=torch.int32)
    copies, owned, sources = views(packed, num_rows)

    asker = (table.flatten() >= 0).nonzero().squeeze(1)  # flat (source rank, token, k)
    owned[: asker.numel(), 0] = table.flatten()[asker].int()
    owned[: asker.numel(), 1] = asker.int()

    rows_of_copy = (table >= 0).sum(2)  # [W, max_tokens]
    token = rows_of_copy.flatten().nonzero().squeeze(1)  # flat (source rank, token)
    count = rows_of_copy.flatten()[token]
    last = token.numel()
    copies[:last, 0] = (count.cumsum(0) - count).int()
    copies[:last, 1] = (token * min(top_k, world_size) + copy_numbers.flatten()[token]).int()
    copies[last, 0] = asker.numel()
    sources[0] = 0
    sources[1:] = (rows_of_copy > 0).sum(1).cumsum(0).int()
    return packed


def cut(arrivals: Tensor, num_rows: int, fewer: int) -> Tensor:
    """Return the lists for ``fewer`` rows, which must include all owned ones, as a new tensor."""
    copies, owned, sources = views(arrivals, num_rows)
    return torch.cat([copies[: fewer + 1].flatten(), owned[:fewer].flatten(), sources])


def part(arrivals: Tensor, world_size: int, max_tokens: int, top_k: int, first: int, tokens: int) -> Tensor:
    """Return the lists restricted to ``tokens`` tokens of each rank, beginning with its token ``first``, as a new
    tensor.

    The result is a route of at most ``tokens`` tokens whose rows keep their places. Accesses nothing outside of the
    lists, whatever integers they contain. What is undefined in the lists is undefined in the result.

    Args:
        max_tokens: bound of the whole route.
    """
    num_rows = rows_of(arrivals.numel(), world_size)
    copies, owned, sources = views(arrivals, num_rows)
    out = torch.empty_like(arrivals)
    new_copies, new_owned, new_sources = views(out, num_rows)
    most_copies = min(top_k, world_size)
    place = torch.arange(num_rows + 1, device=arrivals.device)
    last = sources[-1:].long().clamp(0, num_rows)  # number of copies
    count = copies[:, 0].index_select(0, last)  # number of owned rows

    def within(flat: Tensor, each: int, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select the entries of the requested tokens among the first ``number`` of ``flat``.

        ``flat`` are numbers of (source, token, index below ``each``). Returns whether each is selected, how many
        selected ones precede each and the end, and their numbers in the part.
        """
        flat = flat.long()
        source = flat // (max_tokens * each)
        rest = flat - source * (max_tokens * each) - first * each
        inside = (rest >= 0) & (rest < tokens * each) & (place[: flat.numel()] < number)
        before = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.cumsum(0)])
        return inside, before, (source * (tokens * each) + rest).int()

    inside, before, askers = within(owned[:, 1], top_k, count)
    _pick(new_owned, inside, before, torch.stack([owned[:, 0], askers], 1))
    inside, of_copies, homes = within(copies[:, 1], most_copies, last)
    begins = before[copies[:, 0].long().clamp(0, num_rows)].int()
    # The pair after the last copy is the number of owned rows.
    inside, ends = inside[:num_rows], of_copies[num_rows]
    _pick(new_copies[:num_rows], inside, of_copies[: num_rows + 1], torch.stack([begins, homes], 1)[:num_rows])
    new_copies.index_copy_(0, ends[None], torch.stack([before[-1].int(), ends.int()])[None])
    new_sources.copy_(of_copies[sources.long().clamp(0, num_rows)])
    return out


def _pick(out: Tensor, chosen: Tensor, before: Tensor, rows: Tensor) -> None:
    """Write the chosen rows to the front of ``out``, in their order. The rest is undefined."""
    place = torch.where(chosen, before[:-1], before[-1] + torch.arange(chosen.numel(), device=out.device) - before[:-1])
    out.index_copy_(0, place, rows)


def without(arrivals: Tensor, world_size: int, left_out: Tensor) -> Tensor:
    """Return the lists without some rows, as a new tensor. The other rows keep their places.

    Args:
        left_out: bool [R], the rows to leave out.
    """
    num_rows = rows_of(arrivals.numel(), world_size)
    copies, owned, sources = views(arrivals, num_rows)
    out = torch.empty_like(arrivals)
    new_copies, new_owned, new_sources = views(out, num_rows)
    last = sources[-1:].long()
    row = torch.where(_is_owned(copies, sources), owned[:, 0], 0).long()
    kept = _is_owned(copies, sources) & ~left_out[row] if num_rows else left_out
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))  # [R + 1], of each entry of `owned`, and all
    _pick(new_owned, kept, before, owned)
    begins = before[copies[:, 0].long().clamp(0, num_rows)]
    is_copy = torch.arange(num_rows, device=arrivals.device) < last
    having = is_copy & (begins[:-1] < begins[1:])  # copies with a row left; the pair after the last is their end
    of_copies = torch.nn.functional.pad(having.cumsum(0), (1, 0))
    pairs = torch.stack([begins.int(), copies[:, 1]], 1)
    _pick(new_copies[:num_rows], having, of_copies, pairs[:num_rows])
    new_copies.index_copy_(0, of_copies[-1:], torch.stack([before[-1:], before[-1:]], 1).int())
    new_sources.copy_(of_copies[sources.long().clamp(0, num_rows)])
    return out


def table(arrivals: Tensor, world_size: int, max_tokens: int, top_k: int) -> Tensor:
    """Return the row here of (source rank, token, k), int32 [W, max_tokens, K], else -1. Synchronizes the host."""
    owned = known(arrivals, world_size)
    rows = arrivals.new_full((world_size, max_tokens, top_k), -1)
    rows.view(-1)[owned[:, 1].long()] = owned[:, 0]
    return rows


def defined(arrivals: Tensor, world_size: int) -> Arrivals:
    """Return the lists with -1 for undefined values, so that equal routes have equal lists."""
    copies, owned, sources = views(arrivals, rows_of(arrivals.numel(), world_size))
    place = torch.arange(copies.shape[0], device=arrivals.device)
    begin = torch.where(place <= sources[-1], copies[:, 0], -1)
    home = torch.where(place < sources[-1], copies[:, 1], -1)
    rows = torch.where(_is_owned(copies, sources)[:, None], owned, -1)
    return Arrivals(torch.stack([begin, home], 1), rows, sources)


def _is_owned(copies: Tensor, sources: Tensor) -> Tensor:
    """Return which positions of ``owned`` hold a row, bool [R]."""
    last = sources[-1:].long().clamp(0, copies.shape[0] - 1)
    return torch.arange(copies.shape[0] - 1, device=copies.device) < copies[:, 0].index_select(0, last)
