"""The ``ep`` operators. Importing this registers them all; it needs no GPU and no process group.

One idea a file: what they are called with (schema), what runs (register), how gradients flow (autograd) and in which
order compiled graphs run them (ordering). Their meaning is in ``ep_ops.backends.reference``.
"""

from __future__ import annotations

from . import autograd, register  # noqa: F401  registers
from .checkpoint import SAVE_FOR_CHECKPOINT
from .schema import OPERATORS

__all__ = ["OPERATORS", "SAVE_FOR_CHECKPOINT"]
