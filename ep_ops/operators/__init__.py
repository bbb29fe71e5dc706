"""The ``ep`` operators. Importing this registers them all; it needs no GPU and no process group.

One idea a file: what there is (table), how gradients flow (gradients) and that they have none themselves (once), how
PyTorch is told of one (library) and of them all (register), which of them compiled graphs run (partition) and in what
order (ordering), where these write rows that are gathered (gathered), how methods call them (eager). Their meaning is
in ``ep_ops.backends.reference``.
"""

from __future__ import annotations

from . import gathered, register  # noqa: F401  register
from .checkpoint import SAVE_FOR_CHECKPOINT
from .table import OPERATORS, Operator

__all__ = ["OPERATORS", "SAVE_FOR_CHECKPOINT", "Operator"]
