"""Token-major rows, and what is made of them, in plain loops straight from the definition (docs/token-major.md).

Nothing here uses ep_ops: a test compares the two. A case's own capacities are those of rows grouped by expert, and are
not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import cases
import torch
from cases import RouteCase, Tokens
from torch import Tensor

NAN = float("nan")


@dataclasses.dataclass
class Copies:
    """The copies of one rank."""

    rows: list[tuple[int, int]]  # (source rank, token) of each row that holds a token
    num_rows: int
    send_rows: Tensor  # [T, K]
    arrivals: Tensor
    offs: Tensor  # [El]
    counts: Tensor  # [El]
    dropped: Tensor  # [El]
    local_idx: Tensor  # [R, K]


def expected_copies(case: RouteCase, capacity: Sequence[int] | None) -> list[Copies]:
    """Return the copies of each rank, for so many rows; as many as are needed where that is None."""
    send = [torch.full(tuple(idx.shape), -1, dtype=torch.int32) for idx in case.topk_idx]
    found = []
    for rank, held in enumerate(case.experts_per_rank):
        rows: list[tuple[int, int]] = []
        ids: list[list[int]] = []
        counts, dropped = [0] * held, [0] * held
        table = torch.full((case.world_size, case.max_tokens, case.top_k), -1, dtype=torch.int32)
        for source, idx in enumerate(case.topk_idx):
            for token, experts in enumerate(idx.tolist()):
                homes = [case.holder(expert) if expert >= 0 else (-1, -1) for expert in experts]
                local = [number if home == rank else -1 for home, number in homes]
                here = [k for k, number in enumerate(local) if number >= 0]
                if not here:
                    continue
                fits = capacity is None or len(rows) < capacity[rank]
                for k in here:
                    (counts if fits else dropped)[local[k]] += 1
                if fits:
                    send[source][token, here[0]] = table[source, token, here[0]] = len(rows)
                    rows.append((source, token))
                    ids.append(local)
        num_rows = len(rows) if capacity is None else capacity[rank]
        ids += [[-1] * case.top_k] * (num_rows - len(rows))
        offs = [sum(counts[: expert + 1]) for expert in range(held)]
        ints = [torch.tensor(values, dtype=torch.int32) for values in (offs, counts, dropped)]
        lists = cases.expected_arrivals(case, rank, table, num_rows)
        local_idx = torch.tensor(ids, dtype=torch.int32).view(num_rows, case.top_k)
        found.append(Copies(rows, num_rows, send[rank], lists, *ints, local_idx))
    return found


def expected_rows(copies: Copies, tokens: list[Tokens]) -> tuple[Tensor, Tensor]:
    """x [R, H], NaN in rows without a token, and weights [R, K], 0 where there is no local id."""
    hidden, dtype = tokens[0].x.shape[1], tokens[0].x.dtype
    x = torch.full((copies.num_rows, hidden), NAN, dtype=dtype)
    weights = torch.zeros(copies.local_idx.shape, dtype=tokens[0].weights.dtype)
    for row, (source, token) in enumerate(copies.rows):
        x[row] = tokens[source].x[token]
        for k, number in enumerate(copies.local_idx[row].tolist()):
            if number >= 0:
                weights[row, k] = tokens[source].weights[token, k]
    return x, weights


def expected_sums(
    case: RouteCase,
    copies: list[Copies],
    y: list[Tensor],
    domains: Sequence[Sequence[int]] = (),
    sent: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Return the combine of one row for each copy: sums over ranks ascending, rounded once; of several NVLink domains
    (ordered by their lowest ranks) first those of each, rounded unless it is the owner's own. ``sent``: what arrives of
    a row [H] of fp32 (fp64); without it the row rounded to y's dtype."""
    wire = y[0].dtype
    exact = torch.float64 if wire == torch.float64 else torch.float32
    arrives = sent or (lambda row: row.to(wire).to(exact))
    outs = [torch.zeros(idx.shape[0], y[0].shape[1], dtype=exact) for idx in case.topk_idx]
    for members in domains or [range(len(copies))]:
        parts = [torch.zeros_like(out) for out in outs]
        for rank in members:
            for row, (source, token) in enumerate(copies[rank].rows):
                parts[source][token] += arrives(y[rank][row].to(exact))
        for source, part in enumerate(parts):
            for token, row in enumerate(part):
                outs[source][token] += row if source in members else arrives(row)
    return [out.to(wire) for out in outs]


def expected_weight_grads(case: RouteCase, copies: list[Copies], row_grads: list[Tensor]) -> list[Tensor]:
    """Gradients [T, K] of weights from those of received ones [R, K]."""
    grads = [torch.zeros(tuple(idx.shape), dtype=row_grads[0].dtype) for idx in case.topk_idx]
    for rank, here in enumerate(copies):
        for row, (source, token) in enumerate(here.rows):
            for k, number in enumerate(here.local_idx[row].tolist()):
                if number >= 0:
                    grads[source][token, k] = row_grads[rank][row, k]
    return grads


@dataclasses.dataclass
class Lists:
    """See ``ep_ops.nn.ExpertLists``."""

    rows: Tensor
    flat: Tensor
    places: Tensor
    offs: Tensor
    counts: Tensor
    dropped: Tensor


def expected_lists(local_idx: Tensor, experts: int, alignment: int, length: int) -> Lists:
    """In ``length`` places; rows of places behind the last list are 0."""
    top_k = local_idx.shape[1]
    rows, flat = [0] * length, [local_idx.numel()] * length
    places = torch.full(local_idx.shape, -1, dtype=torch.int32)
    offs, counts, dropped = [], [], []
    begin = 0
    for expert in range(experts):
        asked = [(row, k) for row, ids in enumerate(local_idx.tolist()) for k in range(top_k) if ids[k] == expert]
        kept = asked[: length - begin]
        for number, (row, k) in enumerate(kept):
            rows[begin + number], flat[begin + number] = row, row * top_k + k
            places[row, k] = begin + number
        end = min(begin + -(-len(asked) // alignment) * alignment, length)
        for place in range(begin + len(kept), end):
            rows[place] = kept[-1][0]
        counts.append(len(kept))
        dropped.append(len(asked) - len(kept))
        offs.append(end)
        begin = end
    ints = (torch.tensor(values, dtype=torch.int32) for values in (rows, flat))
    return Lists(*ints, places, *(torch.tensor(values, dtype=torch.int32) for values in (offs, counts, dropped)))


def expected_reduced(y: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weighted sum of each row's places, k ascending, rounded once."""
    exact = torch.float64 if y.dtype == torch.float64 else torch.float32
    out = torch.zeros(places.shape[0], y.shape[1], dtype=exact)
    for row, own in enumerate(places.tolist()):
        for k, place in enumerate(own):
            if place >= 0:
                out[row] += y[place].to(exact) * (1 if weights is None else weights[row, k].to(exact))
    return out.to(y.dtype)


def rooms(case: RouteCase, how: str) -> list[int] | None:
    """Rows of each rank: of a capacity for all copies, for few, or for none; or as many as there are (None)."""
    most = case.world_size * case.max_tokens
    if how == "exact":
        return None
    few = [3 + 2 * rank for rank in range(case.world_size)]
    return {"all": [most] * case.world_size, "few": few, "none": [0] * case.world_size}[how]
