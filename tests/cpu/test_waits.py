"""Ranks of the reference backend say which rank is late, has skipped an operation, or cannot go on with one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import toy
from ranks import run_ranks

import ep_ops
from ep_ops.backends.reference import waits
from ep_ops.backends.reference.transfer import Transfer
from ep_ops.group.leaving import store_of


class Warnings(logging.Handler):
    """The texts that `ep_ops` logs inside a ``with`` block. ``then``: what is called after each."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.then()

    def __enter__(self) -> list[str]:
        logging.getLogger("ep_ops").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ep_ops").removeHandler(self)


def on_a_group(name: str, timeout: float) -> ep_ops.Communicator:
    """Whose connections nobody else needs."""
    return toy.communicator(group=dist.new_group(), name=name, timeout=timeout)


def raised(run: Any, *args: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        run(*args)
    return str(error.value)


def destroyed(comm: ep_ops.Communicator) -> None:
    """Destroy a communicator that has failed. The last rank deletes its keys from the store."""
    store = store_of(comm.group, comm.number)
    assert store.check(["failed"])
    comm.destroy()
    dist.barrier()
    assert not [key for key in ("failed", "ended", "gone", "at/0", "at/1", "left/0", "left/1") if store.check([key])]


def soon(seconds: float) -> Any:
    """Let waits lose patience after some seconds, whatever the timeout."""
    return mock.patch.object(waits, "patience", lambda timeout: seconds)


def is_late(rank: int) -> list[str]:
    """Rank 1 comes to the second operation when rank 0 has warned of it: nothing but a warning."""
    store = dist.distributed_c10d._get_default_store()
    with Warnings(lambda: store.set("warned", "")) as texts, on_a_group("late", 60.0) as comm:
        x, idx, _ = toy.inputs(5, seed=rank)
        sent = comm.dispatch(x, idx)
        if rank == 1:
            store.wait(["warned"])
        with soon(0.1) if rank == 0 else contextlib.nullcontext():
            assert torch.equal(comm.combine(sent.x, sent.route), (idx >= 0).sum(1, keepdim=True) * x)
        return list(texts)


def differ(rank: int) -> list[str]:
    """Rank 1 calls another operator, then one with another bound; what follows is as ever."""
    with toy.communicator(name="differ") as comm:
        x, idx, _ = toy.inputs(5, seed=rank)
        said = [raised(comm.plan, idx) if rank else raised(comm.dispatch, x, idx)]
        with pytest.raises(ValueError) as error:
            comm.dispatch(x, idx, max_tokens=9 + rank)
        sent = comm.dispatch(x, idx)
        assert torch.equal(comm.combine(sent.x, sent.route), (idx >= 0).sum(1, keepdim=True) * x)
        return [*said, str(error.value)]


def skips(rank: int) -> list[str]:
    """Rank 0 calls a second dispatch, and rank 1 calls `destroy` instead."""
    comm = on_a_group("skipped", 60.0)
    with Warnings() as texts, soon(0.1):
        given, said = toy.inputs(5, seed=rank), []
        comm.dispatch(*given)
        if rank == 0:
            store_of(comm.group, comm.number).wait(["left/1"])
            said += [raised(comm.dispatch, *given), raised(comm.plan, given[1])]
            comm.destroy()  # which has nothing to add
        else:
            said.append(raised(comm.destroy))
        return said + [text for text in texts if "destroy waits" not in text]  # that one may come first


def comes_too_late(rank: int) -> list[str]:
    """Rank 1 comes when rank 0 has given up: by an operation, and by `check_errors` alone."""
    comm = on_a_group("too late", 0.5)
    with Warnings():
        if rank == 1:
            store_of(comm.group, comm.number).wait(["failed"])
            comm.backend.listen()
            assert comm.backend.has_failed()
            comm.backend._waits.failed = None  # as if it had not looked
        said = [raised(comm.dispatch, *toy.inputs(5, seed=rank))]
        destroyed(comm)
        return said


def fails_within(rank: int) -> list[str]:
    """Rank 0 has no memory for what comes behind the meeting."""
    comm = on_a_group("within", 30.0)
    to_rows, given = Transfer.to_rows, toy.inputs(5, seed=rank)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    try:
        if rank == 0:
            Transfer.to_rows = fails  # type: ignore[method-assign, assignment]
        said = [raised(comm.dispatch, *given)]
    finally:
        Transfer.to_rows = to_rows  # type: ignore[method-assign]
    said.append(raised(comm.check_errors))
    with pytest.raises(RuntimeError):
        comm.dispatch(*given)
    destroyed(comm)
    return said


def all_of_them() -> list[list[str]]:
    rank = dist.get_rank()
    return [scenario(rank) for scenario in (is_late, differ, skips, comes_too_late, fails_within)]


def test_ranks_that_do_not_come() -> None:
    mine, theirs = run_ranks(2, all_of_them)
    (late, differing, skipped, too_late, within), (late_1, differing_1, skipped_1, too_late_1, within_1) = mine, theirs

    doing = "rank 0, in ep::combine (operation 2 of this communicator)"
    assert late == [f"communicator 'late': {doing}, still waits for rank 1; it gives up after 60 s"] and late_1 == []

    operators = (
        "ranks make different calls at the same time (rank 0: ep::dispatch of 'differ', rank 1: ep::plan of 'differ');"
        " all ranks must make the calls of a process group in one order"
    )
    disagree = "dispatch: ranks disagree on max_tokens: [9, 10] by rank; all ranks must pass the same"
    assert differing == differing_1 == [operators, disagree]

    doing = "rank 0, in ep::dispatch (operation 2 of this communicator)"
    failed, end = "communicator 'skipped' failed: ", "; destroy it and make a new one on a new process group"
    awaited = "rank 1, which has called destroy"
    why = f"{doing}, waited 0.1 s for {awaited}"
    assert skipped == [f"{failed}{why}{end}"] * 2
    next_one = "rank 1, which has not begun operation 2 of this communicator"
    assert skipped_1 == [f"{failed}{next_one}, stopped because {why}{end}"]

    failed = "communicator 'too late' failed: "
    of = "in ep::dispatch (operation 1 of this communicator)"
    why = f"rank 0, {of}, waited 0.5 s for rank 1"
    assert too_late == [f"{failed}{why}{end}"] and too_late_1 == [f"{failed}rank 1, {of}, stopped because {why}{end}"]

    failed = "communicator 'within' failed: "
    why = "rank 0 gave up at operation 1: ep::dispatch: OutOfMemoryError: no room"
    assert within == ["no room", f"{failed}{why}{end}"]
    assert within_1 == [f"{failed}rank 1, {of}, stopped because {why}{end}"] * 2


def uses_the_group_again() -> None:
    """Rank 1 leaves, so rank 0 gives up a collective that has not ended: an all_gather of 14 numbers. A later one would
    receive them."""
    rank, comm = dist.get_rank(), on_a_group("again", 5.0)
    group = comm.group
    inputs = toy.inputs(5, seed=rank)
    with torch.device("cuda"), contextlib.suppress(RuntimeError):  # the program's default device
        if rank == 0:
            raised(comm.dispatch, *inputs)
        comm.destroy()
    gathered = [torch.zeros(14, dtype=torch.int64) for _ in range(2)]
    raised(dist.all_gather, gathered, torch.full((14,), rank + 1), group)
    with pytest.raises(RuntimeError):
        toy.communicator(group=group, name="anew")
    assert not any(map(torch.any, gathered))


def test_a_process_group_is_not_used_again() -> None:
    run_ranks(2, uses_the_group_again)


class Never:
    """A collective that other ranks do not join, or join when this one has looked twice."""

    def __init__(self, looks: int | None = None) -> None:
        self.looks = looks

    def wait(self, seconds: Any) -> None:
        if self.looks == 0:
            return
        self.looks = None if self.looks is None else self.looks - 1
        time.sleep(0.001)
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_who_is_named_and_who_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four ranks in one process, those that wait as well are not named. A rank gives up when one has left, and
    whoever learns that waits no longer. All of them close their connections, which ends the others' waits."""
    store, closed = dist.HashStore(), []
    monkeypatch.setattr(waits, "store_of", lambda group, number: store)
    monkeypatch.setattr(waits, "has_left", lambda group, number, rank: rank == 3)
    monkeypatch.setattr(waits, "gone", lambda group, number: None)
    monkeypatch.setattr(waits, "disconnect", lambda group, peer: closed.append((peer - 1) % 4))

    def rank_of(rank: int, timeout: float, begins: bool = True) -> waits.Waits:
        config = SimpleNamespace(timeout=timeout)
        member: Any = SimpleNamespace(name="four", rank=rank, world_size=4, group=None, number=1, config=config)
        made = waits.Waits(member)
        if begins:
            made.begin("ep::dispatch")
        return made

    rank_of(1, 1.0).end(Never(looks=2))
    why = "rank 0, in ep::dispatch (operation 1 of this communicator), waited 0.2 s for rank 2 and rank 3, which has"
    assert why in raised(rank_of(0, 2.0).end, Never()) and closed == [0]
    begun = time.monotonic()
    assert f"rank 2, in ep::dispatch (operation 1 of this communicator), stopped because {why}" in raised(
        rank_of(2, 60.0).end, Never()
    )
    assert time.monotonic() - begun < 60 and closed == [0, 2]

    store.delete_key("failed")
    first, second = (rank_of(rank, 1.0, begins=False) for rank in (0, 1))
    first.give_up("why")
    second.give_up("the same")
    why = "rank 0 gave up at operation 0: why"
    stopped = f"rank 1, which has not begun operation 1 of this communicator, stopped because {why};"
    assert why in raised(first.check) and stopped in raised(second.check)
