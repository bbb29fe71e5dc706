"""The last meeting of a communicator's ranks: over the store of their group, where a rank that is dead is one that does
not come, and not an error or a hang of a collective."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..config import patience
from .exchange import Exchange

logger = logging.getLogger("ep_ops")


def agreed_number(exchange: Exchange) -> int:
    """Collective: the same number on all ranks, and another one for each communicator."""
    return int(exchange.all_gather(torch.tensor([secrets.randbits(62)], device="cpu"))[0])


def store_of(group: Any, number: int) -> dist.Store:
    """Return the part of the group's store that belongs to a communicator. ``number``: its `agreed_number`."""
    return dist.PrefixStore(f"ep_ops/{number:x}", dist.distributed_c10d._get_process_group_store(group))


def has_left(group: Any, number: int, rank: int) -> bool:
    """Whether a rank has come to :func:`meet`, as far as the store tells."""
    try:
        return store_of(group, number).check([_left(rank)])
    except (RuntimeError, ValueError, KeyError, TypeError):
        return False


def meet(group: Any, name: str, number: int, seconds: float, failed: Callable[[], bool]) -> list[int]:
    """Wait until all ranks of the group have come here, for at most ``seconds``; return the ranks that have not.

    Returns no ranks if the others cannot be reached any more: the group was destroyed, or its store ended with the rank
    that ran it.

    Args:
        number: the communicator's (`agreed_number`).
        failed: whether the communicator has failed, in which case some ranks do not come and the wait ends.
    """
    start = time.monotonic()
    try:
        missing = list(range(dist.get_world_size(group)))
        store = store_of(group, number)
        store.set(_left(dist.get_rank(group)), "")
        warned = False
        while missing:
            missing = [rank for rank in missing if not store.check([_left(rank)])]
            waited = time.monotonic() - start
            if not missing or waited > seconds or failed():
                break
            if waited > patience(seconds) and not warned:
                warned = True
                logger.warning(f"communicator {name!r}: destroy waits for ranks {missing}, {seconds:g} s at most")
            time.sleep(min(0.05, 0.001 + waited / 10))
    except (RuntimeError, ValueError, KeyError, TypeError):  # TypeError: a group without a store (MPI)
        return []
    return missing


def _left(rank: int) -> str:
    return f"left/{rank}"
