"""The last meeting of a communicator's ranks: over the store of their group, where a rank that is dead is one that does
not come, and not an error or a hang of a collective."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import torch
import torch.distributed as dist

from .exchange import Exchange

WARNED = 60.0
"""Seconds after which whoever still waits says so."""

logger = logging.getLogger("ep_ops")


def agreed_number(exchange: Exchange) -> int:
    """Collective: the same number on all ranks, and another one for each communicator."""
    return int(exchange.all_gather(torch.tensor([secrets.randbits(62)], device="cpu"))[0])


def meet(group: Any, name: str, number: int, seconds: float) -> list[int]:
    """Waits until all ranks of the group have come here, for so many seconds at most, and returns those that have not.
    ``number``: the communicator's (`agreed_number`).

    Nobody is missed where there is no way left to hear of the others: the group was destroyed, or its store died with
    the rank that held it.
    """
    start = time.monotonic()
    try:
        missing = list(range(dist.get_world_size(group)))
        store = dist.PrefixStore(f"ep_ops/left/{number:x}", dist.distributed_c10d._get_process_group_store(group))
        store.set(str(dist.get_rank(group)), "")
        told = False
        while missing:
            missing = [rank for rank in missing if not store.check([str(rank)])]
            waited = time.monotonic() - start
            if not missing or waited > seconds:
                break
            if waited > min(seconds / 10, WARNED) and not told:
                told = True
                logger.warning(f"communicator {name!r}: destroy waits for ranks {missing}, {seconds:g} s at most")
            time.sleep(min(0.05, 0.001 + waited / 10))
    except (RuntimeError, ValueError, KeyError, TypeError):  # TypeError: a group without a store (MPI)
        return []
    return missing
