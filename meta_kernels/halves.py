"""Dispatch and combine in two halves: the first returns a ticket, the second what the whole returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .combine import combine
from .dispatch import Dispatched, dispatch


def dispatch_start(x: Tensor, *args: Any) -> Tensor:
    """-> ticket int64 [0]"""
    return ticket(x)


def dispatch_wait(started: Tensor, *args: Any) -> Dispatched:
    """As dispatch."""
    return dispatch(*args)


def combine_start(y: Tensor, *args: Any) -> Tensor:
    """-> ticket int64 [0]"""
    return ticket(y)


def combine_wait(started: Tensor, *args: Any) -> Tensor:
    """As combine."""
    return combine(*args)


def ticket(beside: Tensor) -> Tensor:
    """Nothing, on the device of ``beside``."""
    return beside.new_empty(0, dtype=torch.int64)
