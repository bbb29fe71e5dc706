"""Rendezvous of torch's symmetric memory for groups whose members have met in other groups before.

Until torch 2.15 a process numbers its rendezvous over all groups, and ranks find each other's messages in the group's
store by that number. Members with different numbers wait for each other forever
(github.com/pytorch/pytorch/issues/196082). Here each rendezvous has a store in which numbers begin with 0.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _unregister_process_group

_names: Iterator[Any] = (f"ep_ops rendezvous {number}" for number in itertools.count())


class FromZero(dist.Store):
    """A store whose keys ``.../number/rank`` are numbered from the first number that is used."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}
        self._written: list[str] = []

    def _key(self, key: str) -> str:
        parts = key.rsplit("/", 2)
        if len(parts) < 3 or not parts[1].isdecimal():
            return key
        kind, number, rank = parts[0], int(parts[1]), parts[2]
        return f"{kind}/{number - self._first.setdefault(kind, number)}/{rank}"

    def set(self, key: str, value: Any) -> None:
        key = self._key(key)
        self._written.append(key)
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)

    def forget(self) -> None:
        """Delete the keys that this rank has written. Call it when no rank reads them any more."""
        with contextlib.suppress(RuntimeError):  # a store that cannot delete keeps a few hundred bytes for each rank
            while self._written:
                self._store.delete_key(self._written.pop())


@contextlib.contextmanager
def registered(store: dist.Store, rank: int, world_size: int) -> Iterator[Any]:
    """Yield the name of a process group that consists of a store. C++ calls the store's methods, so it must stay
    alive."""
    name, group = next(_names), ProcessGroup(store, rank, world_size)
    _register_process_group(name, group)  # does not keep the group alive
    try:
        yield name
    finally:
        _unregister_process_group(name)
        del group


def meet(memory: torch.Tensor, group: dist.ProcessGroup, store: FromZero) -> Any:
    """Return torch's handle of ``memory``, which every rank has allocated with torch. Collective over ``group``. The
    ranks exchange addresses through ``store``."""
    with registered(store, dist.get_rank(group), dist.get_world_size(group)) as name:
        return symm_mem.rendezvous(memory, name)
