"""The ``ep`` operators. Importing this package registers them; it needs no GPU and no process group.

Modules: the table of operators (table), gradients (gradients) and their missing second derivatives (once), registration
with PyTorch (library, register), which operators compiled graphs run (partition) and in what order (ordering), where
compiled graphs write rows that are gathered (gathered), and calls from methods (eager). ``ep_ops.backends.reference``
defines the results.
"""

from __future__ import annotations

from . import gathered, register  # noqa: F401  register
from .checkpoint import SAVE_FOR_CHECKPOINT
from .table import OPERATORS, Operator

__all__ = ["OPERATORS", "SAVE_FOR_CHECKPOINT", "Operator"]
