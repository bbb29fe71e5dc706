"""Symmetric memory: a buffer on every rank. Ranks of one NVLink domain read and write it by its addresses, those of
other domains, where that is asked for, through NVSHMEM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .buffer import SymmetricBuffer

__all__ = ["SymmetricBuffer", "allocate"]


def allocate(
    nbytes: int, group: Any, device: torch.device, over_domains: bool = False, near: Sequence[int] = ()
) -> SymmetricBuffer:
    """``nbytes`` of zeroed symmetric memory on every rank of ``group`` (None: this process alone).

    Collective: every rank asks for the same ``nbytes``; ValueError on every rank otherwise. RuntimeError where peers
    cannot be mapped. ``over_domains``: from NVSHMEM, for ranks of several NVLink domains, of which this rank has to map
    those that are ``near``; RuntimeError where it is not installed as it is needed, ValueError for a group that is not
    the first one (see ``nvshmem.py``).
    """
    if group is None or group.size() == 1:
        from . import local

        return local.allocate(nbytes, device)
    if over_domains:
        from . import nvshmem

        return nvshmem.allocate(nbytes, group, device, near)
    from . import torch_symm

    return torch_symm.allocate(nbytes, group, device)
