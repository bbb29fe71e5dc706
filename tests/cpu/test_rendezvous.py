"""Ranks exchange values through the store of a rendezvous, however often each has met others before."""

from __future__ import annotations

import datetime
import gc
import threading

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from ep_ops.symmetric.rendezvous import FromZero, registered


class Exchange:
    """Numbers of groups as torch assigns them: they continue from group to group."""

    def __init__(self, number: int) -> None:
        self.number = number

    def all_gather(self, store: dist.Store, rank: int, world_size: int) -> list[bytes]:
        keys = [f"Kind/{self.number}/{r}" for r in range(world_size)]
        self.number += 1
        store.set(keys[rank], bytes([rank, 0, 255]))
        for key in keys:
            store.wait([key], datetime.timedelta(seconds=100))
        return [store.get(key) for key in keys]


@pytest.mark.parametrize("met", [(0, 0), (3, 0), (0, 7)])
def test_unequal_pasts(met):
    shared = dist.HashStore()
    found: dict[int, list[list[bytes]]] = {}
    all_met = threading.Barrier(2)

    def run(rank: int) -> None:
        exchange = Exchange(met[rank])
        # In between, a store as C++ calls it.
        from_zero = FromZero(dist.PrefixStore("ep_ops", shared))
        store = dist.PrefixStore("group", from_zero)
        found[rank] = [exchange.all_gather(store, rank, 2) for _ in range(3)]
        all_met.wait(100)
        from_zero.forget()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert shared.num_keys() == 0
    assert found == {rank: [[bytes([0, 0, 255]), bytes([1, 0, 255])]] * 3 for rank in range(2)}


def test_group_is_found():
    """A group is found by its name, as torch looks for it, and is not found after it has been removed."""
    shared = dist.HashStore()
    with registered(FromZero(shared), 1, 3) as name:
        gc.collect()
        group = _resolve_process_group(name)
        assert (group.rank(), group.size()) == (1, 3)
        group.get_group_store().set("Kind/5/1", "here")
        del group
        gc.collect()
        assert _resolve_process_group(name).size() == 3
    assert shared.get("Kind/0/1") == b"here"
    with pytest.raises(RuntimeError):
        _resolve_process_group(name)
