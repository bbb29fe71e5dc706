"""The kernels' side of ep_ops: NVIDIA GPUs, one process each.

`memory`, `budget` need neither a GPU nor the CuTe DSL; so what needs it is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import CuteBackend, all_kernels, kernels_of

__all__ = ["CuteBackend", "all_kernels", "kernels_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import backend

    return getattr(backend, name)
