"""Ranks of the reference backend compare their calls before an operation, and all of them raise if these differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import toy
from ranks import run_ranks

from ep_ops import arrivals
from ep_ops.backends.reference import ReferenceBackend
from ep_ops.backends.reference.meeting import Meeting


def two_communicators() -> str:
    rank = torch.distributed.get_rank()
    first, second = (toy.communicator(name=name) for name in ("one", "other"))
    x, idx, weights = toy.inputs(5, seed=rank)
    pair = (first, second) if rank == 0 else (second, first)
    with pytest.raises(RuntimeError) as error:
        for comm in pair:
            comm.dispatch(x, idx, weights)
    return str(error.value)


def test_communicators_in_different_orders() -> None:
    """Each would get the other's rows."""
    said = (
        "ranks make different calls at the same time (rank 0: ep::dispatch of 'one', rank 1: ep::dispatch of 'other');"
        " all ranks must make the calls of a process group in one order"
    )
    assert run_ranks(2, two_communicators) == [said] * 2


def other_pairs() -> str:
    """Two plans of as many rows in all, but between other pairs of ranks."""
    rank, comm = torch.distributed.get_rank(), toy.communicator()
    per_rank = comm.num_experts // 2
    own, far = rank * per_rank, (1 - rank) * per_rank
    idx = torch.full((4, comm.top_k), -1, dtype=torch.int32)
    idx[:, 0] = torch.tensor([own, own, far, far]) if rank == 0 else torch.tensor([own, own, far, far])
    even, _ = comm.plan(idx)
    idx[:, 0] = own
    local, _ = comm.plan(idx)
    assert int(even.counts.sum()) == int(local.counts.sum()) == 4
    with pytest.raises(RuntimeError) as error:
        comm.dispatch_planned(torch.zeros(4, comm.hidden_size), even if rank == 0 else local)
    return str(error.value)


def test_routes_of_equal_totals() -> None:
    for said in run_ranks(2, other_pairs):
        assert said.startswith("dispatch_planned: rank 0 sends ") and "the ranks must use routes of the same" in said


def test_routes_of_equal_sums() -> None:
    """Three ranks may each send and receive as many rows as is expected of them, and still other ones."""
    goes = torch.ones(3, 3, dtype=torch.int64)
    comes = torch.tensor([[1, 2, 0], [1, 0, 2], [1, 1, 1]])
    rows: Any = SimpleNamespace(sent=lambda route: (None, [1] * 3), received=lambda route: (None, [1] * 3))
    meeting: Any = object.__new__(Meeting)
    meeting._rows, meeting._rank, meeting._world_size = rows, 0, 3
    meeting.meet = lambda *args: torch.cat([goes, comes.T], 1)
    route: Any = SimpleNamespace(max_tokens=4, topk_idx=torch.zeros(4, 2), arrivals=None)
    known, consistent = lambda lists, ranks: torch.empty(0, 2), lambda lists, ranks: True
    with mock.patch.multiple(arrivals, known=known, are_consistent=consistent):
        with pytest.raises(RuntimeError, match="combine: rank 0 sends 1 rows to rank 1, which expects 2"):
            meeting.along("combine", {}, route)


def no_memory(after: bool) -> tuple[str, bool]:
    """Rank 0 has none for what it needs before the meeting; then all do the next one."""
    rank, comm = torch.distributed.get_rank(), toy.communicator()
    x, idx, weights = toy.inputs(5, seed=rank)
    plan, raised = ReferenceBackend._placed, ""

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    try:
        if rank == 0:
            ReferenceBackend._placed = fails  # type: ignore[method-assign, assignment]
        comm.dispatch_start(x, idx, weights) if after else comm.dispatch(x, idx, weights)
    except (ValueError, torch.OutOfMemoryError) as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        ReferenceBackend._placed = plan  # type: ignore[method-assign]
    sent = comm.dispatch(x, idx, weights)
    return raised, torch.equal(comm.combine(sent.x, sent.route), (idx >= 0).sum(1, keepdim=True) * x)


@pytest.mark.parametrize("start", [False, True])
def test_an_exception_on_one_rank(start: bool) -> None:
    """An exception on one rank ends the operation on all ranks, and the next one is as any other."""
    assert run_ranks(2, no_memory, start) == [
        ("OutOfMemoryError: no room", True),
        ("ValueError: dispatch: rejected by rank 0: OutOfMemoryError: no room", True),
    ]
