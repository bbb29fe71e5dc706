"""The steps of both protocols that do not wait: which entries go where, which row an entry gets, the sum of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .shape import Copy, Ids, Route, Shape, add, rounded, scalar_of, y_of

if TYPE_CHECKING:
    from .rank import Rank


class Entry(NamedTuple):
    """A (token, k) that names an expert, as its owner tells the expert's rank."""

    token: int
    k: int
    expert: int
    before: int  # the owner's earlier entries of that expert
    copy: int  # which of the token's copies


class Head(NamedTuple):
    """The values that every rank sends to all others."""

    counts: tuple[int, ...]  # its entries of each expert of all ranks
    capacity: int  # of its own rows


def head_of(shape: Shape, ids: Ids, capacity: int) -> Head:
    flat = [e for chosen in ids for e in chosen]
    return Head(tuple(flat.count(e) for e in range(shape.experts * shape.world_size)), capacity)


def entries_of(shape: Shape, ids: Ids, rank: int) -> list[Entry]:
    """Those for one rank, in the order of (token, k)."""
    found: list[Entry] = []
    met: dict[int, int] = {}
    for token, chosen in enumerate(ids):
        for k, expert in enumerate(chosen):
            if expert >= 0 and shape.rank_of(expert) == rank:
                copy = shape.named(chosen).index(rank)
                found.append(Entry(token, k, expert, met.get(expert, 0), copy))
                met[expert] = met.get(expert, 0) + 1
    return found


def place_rows(shape: Shape, rank: int, ids: Ids, heads: list[Head], entries: list[list[Entry]]) -> Route:
    """From the heads of all ranks, and from each rank's entries for this one."""

    def row(source: int, entry: Entry) -> int:
        """-1: there is no room."""
        holder = shape.rank_of(entry.expert)
        earlier = range(holder * shape.experts, entry.expert)
        at = sum(head.counts[e] for head in heads for e in earlier)
        at += sum(head.counts[entry.expert] for head in heads[:source]) + entry.before
        return at if at < heads[holder].capacity else -1

    copies, rows = [], 0
    for source, told in enumerate(entries):
        of_token: dict[int, list[tuple[Entry, int]]] = {}
        for entry in told:
            if (at := row(source, entry)) >= 0:
                of_token.setdefault(entry.token, []).append((entry, at))
                rows += 1
        for token, found in of_token.items():
            copies.append(Copy(source, token, found[0][0].copy, tuple((entry.k, at) for entry, at in found)))

    send_rows = [[-1] * shape.top_k for _ in ids]
    for holder in range(shape.world_size):
        for entry in entries_of(shape, ids, holder):
            send_rows[entry.token][entry.k] = row(rank, entry)
    return Route(ids, tuple(map(tuple, send_rows)), tuple(copies), rows)


def kept_of(rank: Rank, along: int, token: int) -> list[int]:
    """The ranks where rows of a token of this rank were kept, ascending."""
    route = rank.routes[along]
    chosen = zip(route.ids[token], route.send_rows[token], strict=True)
    return sorted({rank.shape.rank_of(e) for e, row in chosen if row >= 0})


def sum_of(operation: int, rank: int, copy: Copy) -> tuple[Any, list[tuple[int, Any]]]:
    """Return the sum of a copy's rows, over k ascending, rounded; and the scalars that go back with it."""
    result = None
    for _, row in copy.rows:
        result = add(result, y_of(operation, rank, row))
    return rounded(result), [(k, scalar_of(operation, rank, row)) for k, row in copy.rows]
