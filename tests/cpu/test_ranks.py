"""The test helper itself: results in rank order, exceptions with their type, no hang and no leaked worker."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import _pools, run_ranks


def _sum(offset):
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), value, os.getpid()


def _raise_on(rank):
    if rank in (-1, dist.get_rank()):
        raise KeyError(f"rank {dist.get_rank()}")


def _sleep_on(rank):
    if rank == dist.get_rank():
        time.sleep(60)


def _leave_on(rank):
    if rank == dist.get_rank():
        os._exit(3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_and_reuse(world_size):
    first = run_ranks(world_size, _sum, 1)
    second = run_ranks(world_size, _sum, 2)
    assert [r[0] for r in first] == list(range(world_size))
    assert all(r[1].item() == world_size * (world_size + 1) // 2 for r in first)
    assert [r[2] for r in first] == [r[2] for r in second], "workers must be reused"


def test_exceptions_keep_type_and_pool():
    before = [r[2] for r in run_ranks(2, _sum, 0)]
    with pytest.raises(KeyError, match="rank 0") as info:
        run_ranks(2, _raise_on, -1)
    assert "_raise_on" in str(info.value.__cause__)
    errors = run_ranks(2, _raise_on, -1, return_exceptions=True)
    assert [type(e) for e in errors] == [KeyError, KeyError]
    assert before == [r[2] for r in run_ranks(2, _sum, 0)]


def test_timeout_and_death_leave_no_worker(monkeypatch):
    monkeypatch.setattr("ranks.GRACE", 0.5)
    run_ranks(2, _sum, 0)
    workers = _pools[2].workers
    with pytest.raises(TimeoutError, match="of 2 did not return from _sleep_on"):
        run_ranks(2, _sleep_on, 1, timeout=1.0)
    assert not any(w.is_alive() for w in workers)
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 3"):
        run_ranks(2, _leave_on, 1)
    assert run_ranks(2, _sum, 1)[0][1].item() == 3
