"""Dispatch and combine in two halves."""

from __future__ import annotations

import torch
from torch import Tensor


def ticket(beside: Tensor) -> Tensor:
    """What the first half returns: nothing but its place in the order of operators."""
    return beside.new_empty(0, dtype=torch.int64)


class Order:
    """Keeps a communicator's halves together: between a start and its wait nothing else of it may run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.started: str | None = None

    def start(self, operator: str) -> None:
        """When it has been checked and the first half runs."""
        self.started = operator

    def wait(self, operator: str) -> None:
        if self.started != operator:
            begun = "nothing was started" if self.started is None else f"ep::{self.started}_start was called"
            raise RuntimeError(f"communicator {self._name!r}: ep::{operator}_wait, but {begun}")
        self.started = None

    def check(self) -> None:
        """Before every operator that is no second half."""
        if self.started is not None:
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{self.started}_start must be followed by ep::{self.started}_wait;"
                " take a communicator for each of several micro-batches"
            )
