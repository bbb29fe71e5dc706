"""Symmetric memory: a buffer on every rank, which ranks of one NVLink domain access by its addresses, and ranks of
other domains through NVSHMEM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .buffer import SymmetricBuffer, beside_captures, peek

__all__ = ["SymmetricBuffer", "allocate", "beside_captures", "peek"]


def allocate(
    nbytes: int, group: Any, device: torch.device, over_domains: bool = False, near: Sequence[int] = ()
) -> SymmetricBuffer:
    """Allocate ``nbytes`` of zeroed symmetric memory on every rank of ``group``. Collective.

    Args:
        nbytes: the same on all ranks.
        group: None: this process alone.
        over_domains: allocate from NVSHMEM, for ranks of several NVLink domains.
        near: ranks that this rank must map.

    Raises:
        ValueError: sizes differ between ranks, or NVSHMEM is in use for another group (nvshmem.py).
        RuntimeError: peers cannot be mapped, or NVSHMEM is missing.
    """
    if group is None or group.size() == 1:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # later users may be on any stream
        return SymmetricBuffer(memory, (memory.data_ptr(),))
    if over_domains:
        from . import nvshmem

        return nvshmem.allocate(nbytes, group, device, near)
    from . import torch_symm

    return torch_symm.allocate(nbytes, group, device)
