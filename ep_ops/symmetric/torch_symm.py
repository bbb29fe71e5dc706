"""Symmetric memory from ``torch.distributed._symmetric_memory``: peers of one NVLink domain map each other's memory."""

from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem

from ..group.exchange import Exchange
from ..group.leaving import store_of
from .buffer import SymmetricBuffer
from .rendezvous import FromZero, meet


def allocate(nbytes: int, group: Any, device: torch.device) -> SymmetricBuffer:
    """See :func:`ep_ops.symmetric.allocate`."""
    exchange = Exchange(group, device)
    own = torch.tensor([nbytes, secrets.randbits(62)], dtype=torch.int64, device="cpu")
    gathered = exchange.all_gather(own).tolist()
    sizes = [size for size, _ in gathered]
    if len(set(sizes)) > 1:
        raise ValueError(f"ranks ask for different sizes of symmetric memory: {sizes} bytes by rank")
    with torch.cuda.device(device):
        memory, error = None, None
        try:
            memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as caught:  # such as out of memory
            error = caught
        exchange.raise_together(f"allocating {nbytes} bytes of symmetric memory", error)  # before the rendezvous
        assert memory is not None
        store = FromZero(store_of(group, gathered[0][1]))  # of this allocation alone
        handle = meet(memory, group, store)
        memory.zero_()
        torch.cuda.synchronize(device)
    bases = [int(base) for base in handle.buffer_ptrs]
    offset = memory.data_ptr() - bases[exchange.rank]  # the allocator may place the tensor inside its block
    exchange.barrier()  # no rank writes before all have zeroed
    store.forget()

    held = [memory, handle]
    return SymmetricBuffer(memory, tuple(base + offset for base in bases), held.clear)
