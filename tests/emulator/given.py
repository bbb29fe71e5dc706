"""Checks of combines along a route that names a row that is not there: the kernels read nothing outside of y and of the
weights, report the row, and end as ever."""

from __future__ import annotations

import random
from typing import Any

from .latency import Pair
from .ranks import Ranks
from .routes import Shape, Truth
from .threads import run
from .throughput import Steps


def spoil(ranks: Ranks, truth: Truth, at: list[dict[str, int]], draw: random.Random) -> tuple[int, int] | None:
    """Makes an entry of some rank's lists name a row behind the last: (rank, the row that it named), None if no rank
    has rows."""
    having = [rank for rank in range(ranks.world_size) if truth.owned(rank)]
    if not having:
        return None
    rank = draw.choice(having)
    owned, capacity = truth.owned(rank), truth.case.capacity[rank]
    entry = draw.randrange(len(owned))
    row, source, token, k = owned[entry]
    bad = capacity + draw.choice([0, 3])
    lists = ranks.view(at[rank]["arrivals"], 4 * capacity + ranks.world_size + 3)
    place = 2 * (capacity + 1) + 2 * entry  # behind the list of copies
    assert lists[place] == row
    lists[place] = bad
    if source == rank:
        ranks.view(at[rank]["send_rows"], *truth.case.topk_idx[rank].shape)[token, k] = bad
    return rank, row


def check_reports(ranks: Ranks, bad: int) -> None:
    """Rank `bad` has rejected a row, and nobody has failed."""
    from cute_kernels.sync import BAD_ROW, REPORT_WORDS

    for rank in range(ranks.world_size):
        said = ranks.view(ranks.reports[rank], 6 * REPORT_WORDS)[::2].tolist()
        rejected = said[REPORT_WORDS + 1]
        assert rejected == (BAD_ROW if rank == bad else 0), f"rank {rank} rejects with reason {rejected}"
        assert ranks.reported(rank) == [(0, 0), (0, 0)], f"rank {rank} reports a failure"


def given(both: Any, ranks: Ranks, draw: random.Random, launches: Any, missing: Any) -> None:
    """`launches()`: of a combine of all ranks. `missing` (rank, row): what is added up in the place of the row."""
    found = spoil(ranks, both.truth, both.at, draw)
    if found is None:
        return
    missing(*found)
    run(launches(), draw)
    ranks.operations += 1
    check_reports(ranks, found[0])
    ranks.check_epochs()
    both.truth.check_combined(ranks, [at["out"] for at in both.at], True)


def few(draw: random.Random) -> None:
    both = Pair(Shape((2, 3), 3, 3, 64), draw, (1, 0, 2), (1, 0, 2))
    both.inputs()
    both.run("dispatch", True, False)

    def nothing(rank: int, row: int) -> None:
        both.truth.y[rank][row] = 0

    given(both, both.ranks, draw, lambda: both.launches("combine", True, (True, True)), nothing)


def many(draw: random.Random, experts: tuple[int, ...]) -> None:
    on = Steps(Shape(experts, 3, 3, alignment=4), draw)
    on.inputs()
    on.dispatch(known=False)

    def last(rank: int, row: int) -> None:
        for values in (on.truth.y[rank], on.truth.weights[rank]):
            values[row] = values[-1]

    given(on, on.ranks, draw, lambda: [on.launch_combine(rank) for rank in range(on.ranks.world_size)], last)


CHECKS = {
    "given_few": few,
    "given_many": lambda draw: many(draw, (2, 1, 2)),
    "given_many_own": lambda draw: many(draw, (2, 3)),  # of two ranks owners read their own rows
}
