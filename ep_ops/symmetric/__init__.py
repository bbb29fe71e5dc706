"""Symmetric memory: a buffer on every rank whose addresses all ranks of one NVLink domain can read and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass
class SymmetricBuffer:
    """One rank's view of a symmetric allocation. Zeroed on every rank when it is handed out."""

    local: torch.Tensor  # uint8 [nbytes] on this rank's device
    addresses: tuple[int, ...]  # device address of every rank's buffer, as seen from this device; own included
    _release: Callable[[], None] | None = None

    def free(self) -> None:
        """Give the memory back; no rank may touch it any more (barrier first). Calling it again does nothing."""
        release, self._release = self._release, None
        self.local = torch.empty(0, dtype=torch.uint8)
        self.addresses = ()
        if release is not None:
            release()


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
