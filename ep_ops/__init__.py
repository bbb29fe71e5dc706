"""Expert-parallel dispatch and combine for mixture-of-experts models, as PyTorch operators.

Importing this package registers every operator under ``torch.ops.ep``. It needs no GPU, no kernel toolchain and no
process group; those are looked for when a :class:`Communicator` is made.
"""

from __future__ import annotations

from typing import Any

from . import operators  # noqa: F401  registers torch.ops.ep.*
from .communicator import Communicator
from .config import Config
from .memory import memory_plan
from .records import Dispatched, Route
from .version import __version__

__all__ = ["Communicator", "Config", "Dispatched", "Route", "__version__", "memory_plan"]


def __getattr__(name: str) -> Any:
    """``ep_ops.nn`` and ``ep_ops.moe`` are imported when they are first used."""
    if name in ("nn", "moe"):
        import importlib

        return importlib.import_module(f"ep_ops.{name}")
    raise AttributeError(f"module 'ep_ops' has no attribute {name!r}")
