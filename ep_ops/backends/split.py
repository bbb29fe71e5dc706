"""Split operations: a dispatch or a combine as a start and a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def ticket(beside: Tensor) -> Tensor:
    """What a start returns: nothing but its place in the order of operators."""
    return beside.new_empty(0, dtype=torch.int64)


class Order:
    """Keeps a split operation together: between its start and its wait nothing else of the communicator may run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.started: str | None = None

    def start(self, operator: str) -> None:
        """When a start has been checked and runs."""
        self.started = operator

    def wait(self, operator: str) -> None:
        if self.started != operator:
            begun = "nothing was started" if self.started is None else f"ep::{self.started}_start was called"
            raise RuntimeError(f"communicator {self._name!r}: ep::{operator}_wait, but {begun}")
        self.started = None

    def check(self) -> None:
        """Before every operator that is no wait."""
        if self.started is not None:
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{self.started}_start must be followed by ep::{self.started}_wait;"
                " take a communicator for each of several micro-batches"
            )
