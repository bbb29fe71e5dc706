"""Meetings of the ranks before any data moves: they exchange operator, arguments, and rejections."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ... import arrivals
from ...group import meeting
from ...records import TOKEN_MAJOR, Route
from . import quantized
from .transfer import Transfer
from .waits import Waits

Stage = Literal["before", "within", "settled"]

NAMES = {**quantized.NAMES, "layout": ("grouped or padded", "token_major")}
"""Values that ranks exchange by index."""


def layout_index(layout: str) -> int:
    """Return what ranks must agree on. Grouped and padded rows may be mixed, because both are sorted by expert."""
    return int(layout == TOKEN_MAJOR)


class Meeting:
    """Meetings of the ranks of one communicator. Collective. A disagreement raises on all ranks."""

    stage: Stage = "settled"
    """Stage of the current or last operation: "before" it meets the other ranks; "within", while they wait for this
    rank if it raises; "settled" once it raises on all ranks, or has ended on this rank."""

    def __init__(self, rows: Transfer, waits: Waits, name: str, number: int) -> None:
        self._waits, self._name, self._number = waits, name, number
        self._rows, self._exchange = rows, rows.exchange
        self._rank, self._world_size = rows.ranks.rank, rows.ranks.world_size
        self.operations = 0
        self.waited = [0] * self._world_size
        """How long this rank has waited for each rank in all meetings but the last, in nanoseconds."""
        self._lasted = 0  # how long the last meeting took here

    def along(self, operator: str, same: dict[str, int], route: Route, problem: str | None = None) -> None:
        """Meet, and check that both ends of the route expect the same number of rows."""
        same = {"max_tokens": route.max_tokens, **same}
        _, sent = self._rows.sent(route)
        wrong, recv_counts = self._wrong_lists(route), [0] * self._world_size
        if wrong is None:
            _, recv_counts = self._rows.received(route)
        problem = problem or wrong
        published = self.meet(operator, same, (*sent, *recv_counts), problem)
        goes, comes = published[:, : self._world_size], published[:, self._world_size :].T
        if not torch.equal(goes, comes):
            self.stage = "settled"
            source, target = (goes != comes).nonzero()[0].tolist()
            raise RuntimeError(
                f"{operator}: rank {source} sends {int(goes[source, target])} rows to rank {target}, which expects"
                f" {int(comes[source, target])}; the ranks must use routes of the same plan or dispatch"
            )

    def _wrong_lists(self, route: Route) -> str | None:
        """Return why the lists of a route cannot be followed, or None."""
        if not arrivals.are_consistent(route.arrivals, self._world_size):
            return f"arrivals on rank {self._rank} holds other numbers than those of a plan or dispatch"
        askers = arrivals.known(route.arrivals, self._world_size)[:, 1]
        last = int(askers.max()) if askers.numel() else -1
        if last < self._world_size * route.max_tokens * route.topk_idx.shape[1]:
            return None
        return f"max_tokens is {route.max_tokens}; the route of rank {self._rank} was planned with more"

    def meet(self, operator: str, same: dict[str, int], own: Sequence[int], problem: str | None) -> Tensor:
        """Return ``own`` of all ranks, [W, len(own)], after checking that all run the same operator with equal ``same``
        and without a problem."""
        gathered, rejections = self.gather(f"ep::{operator}", problem, (*same.values(), *own))
        if rejections:
            raise ValueError(f"{operator}: {problem}" if problem else f"{operator}: {'; '.join(rejections)}")
        for column, field in enumerate(same):
            values = gathered[:, column].tolist()
            if len(set(values)) > 1:
                self.stage = "settled"
                names = (False, True) if field.startswith("whether ") else NAMES.get(field)
                values = values if names is None else [names[value] for value in values]
                raise ValueError(
                    f"{operator}: ranks disagree on {field}: {values} by rank; all ranks must pass the same"
                )
        return gathered[:, len(same) : len(same) + len(own)]

    def of_method(self, call: str, problem: str | None, values: Sequence[int]) -> Tensor:
        """Meet before the exchanges of a method, and return ``values`` of all ranks."""
        gathered, rejections = self._gather(call, problem, values)
        self.stage = "settled"
        if rejections:
            raise ValueError(problem or "; ".join(rejections))
        return gathered

    def gather(self, call: str, problem: str | None, values: Sequence[int] = ()) -> tuple[Tensor, list[str]]:
        """Meet in an operation. Return ``values`` of all ranks, [W, at least as many], and the reasons of the ranks
        that reject the call."""
        self.operations += 1
        return self._gather(call, problem, values)

    def _gather(self, call: str, problem: str | None, values: Sequence[int]) -> tuple[Tensor, list[str]]:
        self._waits.begin(call)
        self.stage = "within"
        begun, values = time.monotonic_ns(), (self._lasted, *values)
        gathered, rejections, differ = meeting.gather(self._exchange, call, self._name, self._number, problem, values)
        if differ or rejections:
            self.stage = "settled"
        if differ:
            raise RuntimeError(differ)
        # A meeting ends on all ranks at about one time. The last one took a rank shorter by how much later it came.
        for rank, lasted in enumerate(gathered[:, 0].tolist()):
            self.waited[rank] += max(0, self._lasted - lasted)
        self._lasted = time.monotonic_ns() - begun
        return gathered[:, 1:], rejections
