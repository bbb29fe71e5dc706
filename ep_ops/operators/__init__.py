"""The ``ep`` operators. Importing this package registers them; it needs no GPU and no process group.

Modules: the table of operators (table), gradients (gradients) and their missing second derivatives (once), registration
with PyTorch (library, register), which operators compiled graphs run (partition) and in what order (ordering), where
compiled graphs write rows that are gathered (gathered), and calls from methods (eager). ``ep_ops.backends.reference``
defines the results.
"""

from __future__ import annotations

import torch

from . import gathered, register  # noqa: F401  register
from .table import OPERATORS, Operator

__all__ = ["OPERATORS", "SAVE_FOR_CHECKPOINT", "Operator"]

SAVE_FOR_CHECKPOINT: list[torch._ops.OpOverload] = [op.overload for op in OPERATORS if "backward" not in op.name]
"""Operators whose results ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` is to save, not to recompute.

Plain checkpointing sends every token again in the backward pass. With this list it keeps their results::

    contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
"""
