"""Activation checkpointing runs a forward a second time, during backward: what counts must count once."""

from __future__ import annotations

import torch


def recomputing() -> bool:
    """Whether this is such a second run. In a compiled function it is not: the compiler runs what counts once."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
