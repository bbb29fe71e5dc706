"""Symmetric memory of a single rank: ordinary memory."""

from __future__ import annotations

import torch

from .buffer import SymmetricBuffer


def allocate(nbytes: int, device: torch.device) -> SymmetricBuffer:
    """Zeroed memory whose only address is its own."""
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # later users may be on any stream
    return SymmetricBuffer(memory, (memory.data_ptr(),))
