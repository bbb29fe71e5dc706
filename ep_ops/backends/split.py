"""Split operations: an operation as a start and a wait, and which of them are in progress."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def ticket(device: torch.device) -> Tensor:
    """Return the result of a start: an empty float32 tensor, so that autograd passes through it."""
    return torch.empty(0, dtype=torch.float32, device=device)


def nothing() -> None:
    """Stand for results of a wait that nobody uses."""


class FlightOrder:
    """The split operations in progress, and checks of their order. A wait must follow the start of the same operation
    in its flight. While one is in progress, only split operations of other flights are allowed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.started: dict[int, Any] = {}
        """Flight -> what was started in it, a record with the name of the ``operator``. Backends add what they start,
        and delete what has ended."""

    def free(self, flight: int) -> None:
        """Check that a start may use the flight."""
        if flight in self.started:
            begun = self.started[flight].operator
            raise RuntimeError(
                f"communicator {self._name!r}: flight {flight} is in use: ep::{begun}_start must be followed by"
                f" ep::{begun}_wait. Pass another flight for a second operation at the same time"
            )

    def begun(self, flight: int, operator: str) -> None:
        """Check that a wait follows its start."""
        begun = self.started.get(flight)
        if begun is None or begun.operator != operator:
            what = "nothing was started" if begun is None else f"ep::{begun.operator}_start was called"
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{operator}_wait was called, but {what} in flight {flight}; a wait"
                " finishes the start that was called before it in the same flight"
            )

    def check(self) -> None:
        """Check that an operator that is neither start nor wait may run."""
        if self.started:
            begun = next(iter(self.started.values())).operator
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{begun}_start must be followed by ep::{begun}_wait before an"
                " operator that is not split. Until then, only split operations in the other flight and operators of"
                " other communicators are allowed"
            )


def parts_of(operator: str) -> tuple[str, str]:
    """Split an operator's name into that of the whole operation and "start", "wait" or ""."""
    for part in ("start", "wait"):
        if operator.endswith("_" + part):
            return operator.removesuffix("_" + part), part
    return operator, ""
