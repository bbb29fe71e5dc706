"""The end of a communicator, over the store of its group: a barrier, in which a dead rank is absent and causes no hang,
and the reason of a rank that leaves without it.

The last rank that ends deletes the communicator's keys. If a rank has died, or never calls ``destroy``, the keys of the
others stay: nobody can tell it from a late rank, which learns from them that the others have left, and at once.
They are at most 3 for each rank and 3 more, with values of a few bytes and two texts of at most ``TEXT_BYTES``.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import patience
from .exchange import TEXT_BYTES, Exchange

logger = logging.getLogger("ep_ops")


def agreed_number(exchange: Exchange) -> int:
    """Return a number that is equal on all ranks and different for each communicator. Collective."""
    return int(exchange.all_gather(torch.tensor([secrets.randbits(62)], device="cpu"))[0])


def store_of(group: Any, number: int) -> dist.Store:
    """Return the part of the group's store for the communicator with this `agreed_number`."""
    return dist.PrefixStore(f"ep_ops/{number:x}", dist.distributed_c10d._get_process_group_store(group))


def leave(group: Any, number: int, rank: int, why: str) -> None:
    """Leave without waiting for the other ranks, which need not wait for this one in :func:`meet`. If ``why`` is not
    empty, ranks that wait in an operation fail with this reason (:func:`gone`)."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):
        store = store_of(group, number)
        store.set(_left(rank), "")
        if why:
            store.compare_set("gone", "", short(why))
        _end(store, group)


def short(why: str) -> str:
    """Return the beginning of a text, which the store may keep."""
    return why.encode()[:TEXT_BYTES].decode(errors="ignore")


def end(group: Any, number: int) -> None:
    """End without informing the other ranks, which know that the communicator has failed or learn it from its keys in
    the store."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):
        _end(store_of(group, number), group)


def gone(group: Any, number: int) -> str | None:
    """Return why a rank has left without waiting for the others, as far as the store is reachable, or None."""
    try:
        store = store_of(group, number)
        return store.get("gone").decode() if store.check(["gone"]) else None
    except (RuntimeError, ValueError, KeyError, TypeError):
        return None


def has_left(group: Any, number: int, rank: int) -> bool:
    """Return whether a rank has called :func:`meet`, as far as the store is reachable."""
    try:
        return store_of(group, number).check([_left(rank)])
    except (RuntimeError, ValueError, KeyError, TypeError):
        return False


def meet(group: Any, name: str, number: int, seconds: float, failed: Callable[[], bool]) -> list[int]:
    """Wait for at most ``seconds`` until all ranks of the group call this function; return those that do not.

    Returns no ranks if the others cannot be reached, because the group was destroyed or its store has died.

    Args:
        number: the communicator's `agreed_number`.
        failed: returns whether the communicator has failed, which ends the wait, because some ranks will not come.
    """
    try:
        store, ranks = store_of(group, number), range(dist.get_world_size(group))
        store.set(_left(dist.get_rank(group)), "")
        call = f"communicator {name!r}: destroy"
        missing = _missing(call, ranks, lambda rank: store.check([_left(rank)]), seconds, failed)
        _end(store, group)
        return missing
    except (RuntimeError, ValueError, KeyError, TypeError):  # TypeError: a group without a store (MPI)
        return []


def missing_in(call: str, group: Any, number: int, seconds: float, failed: Callable[[], bool]) -> list[int]:
    """Wait for at most ``seconds`` until every rank has made this call as often as this rank; return those that have
    not. If there are any, the call does not count. In contrast to a collective, the wait does not disturb what other
    ranks exchange meanwhile.

    Args:
        call: name of the call.
        number, failed: as for :func:`meet`.
    """
    try:
        store, ranks = store_of(group, number), range(dist.get_world_size(group))
        own = store.add(f"{call}/{dist.get_rank(group)}", 1)
        missing = _missing(call, ranks, lambda rank: store.add(f"{call}/{rank}", 0) >= own, seconds, failed)
        if missing:  # the caller raises
            store.add(f"{call}/{dist.get_rank(group)}", -1)
        return missing
    except (RuntimeError, ValueError, KeyError, TypeError):
        return []


def _missing(
    call: str, ranks: Sequence[int], is_there: Callable[[int], bool], seconds: float, failed: Callable[[], bool]
) -> list[int]:
    """Wait for at most ``seconds`` until all ranks are there; return those that are not."""
    start, warned = time.monotonic(), False
    while ranks := [rank for rank in ranks if not is_there(rank)]:
        waited = time.monotonic() - start
        if waited > seconds or failed():
            break
        if waited > patience(seconds) and not warned:
            warned = True
            logger.warning(f"{call} waits for ranks {ranks}, {seconds:g} s at most")
        time.sleep(min(0.05, 0.001 + waited / 10))
    return list(ranks)


def _end(store: dist.Store, group: Any) -> None:
    """Count this rank, which does not read the store any more. The last rank deletes the communicator's keys."""
    ranks = dist.get_world_size(group)
    if store.add("ended", 1) == ranks:
        for key in ("gone", "failed", *(f"{name}/{rank}" for name in _NAMES for rank in range(ranks)), "ended"):
            store.delete_key(key)


_NAMES = "left", "at", "save_pretrained"
"""Names of keys that each rank writes: for its end, its operation (``backends/reference/waits.py``), and its calls of
:func:`missing_in`."""


def _left(rank: int) -> str:
    return f"left/{rank}"
