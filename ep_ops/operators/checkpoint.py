"""Which operators selective activation checkpointing should not run again."""

from __future__ import annotations

import torch

from . import schema  # noqa: F401  defines them

SAVE_FOR_CHECKPOINT: list[torch._ops.OpOverload] = [
    torch.ops.ep.plan.default,
    torch.ops.ep.dispatch.default,
    torch.ops.ep.dispatch_dynamic.default,
    torch.ops.ep.dispatch_planned.default,
    torch.ops.ep.combine.default,
    torch.ops.ep.combine_gathered.default,
    torch.ops.ep.dispatch_start.default,
    torch.ops.ep.dispatch_wait.default,
    torch.ops.ep.combine_start.default,
    torch.ops.ep.combine_wait.default,
]
"""For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: save what these return, recompute the rest.

Without it, checkpointing sends every token again in the backward pass: right, as long as all ranks do, but slow::

    contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
"""
