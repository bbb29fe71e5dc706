"""Symmetric memory: a buffer on every rank whose addresses all ranks of one NVLink domain can read and write."""

from __future__ import annotations

from typing import Any

import torch

from .buffer import SymmetricBuffer

__all__ = ["SymmetricBuffer", "allocate"]


def allocate(nbytes: int, group: Any, device: torch.device) -> SymmetricBuffer:
    """``nbytes`` of zeroed symmetric memory on every rank of ``group`` (None: this process alone).

    Collective: every rank asks for the same ``nbytes``; ValueError on every rank otherwise.
    RuntimeError where peers cannot be mapped.
    """
    if group is None or group.size() == 1:
        from . import local

        return local.allocate(nbytes, device)
    from . import torch_symm

    return torch_symm.allocate(nbytes, group, device)
