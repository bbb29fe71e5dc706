"""Operators that selective activation checkpointing should not run again."""

from __future__ import annotations

import torch

from .table import OPERATORS

SAVE_FOR_CHECKPOINT: list[torch._ops.OpOverload] = [op.overload for op in OPERATORS if "backward" not in op.name]
"""Operators whose results ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` is to save, not to recompute.

Without it, checkpointing sends every token again in the backward pass: right, as long as all ranks do, but slow::

    contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
"""
