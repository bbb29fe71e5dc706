"""Expected results of an operation, from the arguments of all ranks. Shares nothing with the protocol but its sizes."""

from __future__ import annotations

from typing import Any

from .shape import Operation, Shape, scalar_of, weight_of, x_of, y_of


def routed(shape: Shape, op: Operation) -> dict[tuple[int, int, int], int]:
    """(source, token, k) -> row at the expert's rank, of all that are kept: by expert, then in that order."""
    rows: dict[tuple[int, int, int], int] = {}
    for rank in range(shape.world_size):
        taken = 0
        for expert in range(rank * shape.experts, (rank + 1) * shape.experts):
            for source, ids in enumerate(op.ids):
                for token, chosen in enumerate(ids):
                    for k, e in enumerate(chosen):
                        if e == expert:
                            if taken < op.capacity[rank]:
                                rows[source, token, k] = taken
                            taken += 1
    return rows


def dispatched(shape: Shape, op: Operation, route: Operation) -> list[Any]:
    """By rank: its rows as (x, weight), and the row of each of its own (token, k)."""
    kept = routed(shape, route)
    rows: list[dict[int, Any]] = [{} for _ in range(shape.world_size)]
    for (source, token, k), row in kept.items():
        rank = shape.rank_of(route.ids[source][token][k])
        rows[rank][row] = (x_of(op.number, source, token), weight_of(op.number, source, token, k))
    return [
        (
            tuple(rows[rank][row] for row in range(len(rows[rank]))),
            tuple(tuple(kept.get((rank, t, k), -1) for k in range(shape.top_k)) for t in range(len(route.ids[rank]))),
        )
        for rank in range(shape.world_size)
    ]


def combined(shape: Shape, op: Operation, route: Operation) -> list[Any]:
    """By rank: of each token the tree of sums (docs/domains.md) and the scalar of each k."""
    kept = routed(shape, route)

    def token_of(source: int, token: int) -> Any:
        where = {k: shape.rank_of(e) for k, e in enumerate(route.ids[source][token]) if (source, token, k) in kept}
        of_domains = []
        for domain in shape.domains:
            of_ranks = []
            for rank in domain:
                here = [y_of(op.number, rank, kept[source, token, k]) for k in sorted(where) if where[k] == rank]
                if here:
                    of_ranks.append(rounded(total(here)))
            if of_ranks:
                of_domains.append(total(of_ranks) if source in domain else rounded(total(of_ranks)))
        scalars = tuple((k, scalar_of(op.number, rank, kept[source, token, k])) for k, rank in sorted(where.items()))
        return (rounded(total(of_domains)) if of_domains else None), scalars

    return [
        tuple(token_of(source, token) for token in range(len(route.ids[source]))) for source in range(shape.world_size)
    ]


def total(values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = ("+", result, value)
    return result


def rounded(value: Any) -> Any:
    return value if value[0] == "rounded" else ("rounded", value)
