"""Ranks, threads and processes that call a communicator in another order than the others, or leave without them."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from ranks import run_ranks

import ep_ops
from ep_ops.group import leaving
from ep_ops.integrations import deep_ep
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig

PATIENT = 600.0
"""A timeout in seconds that no test waits for: ranks that wait for it are killed before (tests/cpu/ranks.py)."""
SIZES: dict[str, Any] = {
    "num_experts": 6, "hidden_size": 64, "top_k": 2, "max_tokens_per_rank": 16, "device": "cpu", "timeout": PATIENT,
}  # fmt: skip


def raised(run: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        run(*args, **options)
    return f"{type(error.value).__name__}: {error.value}"


def right(comm: ep_ops.Communicator, seed: int) -> bool:
    """Whether a dispatch and a combine return what they should."""
    x, idx, _ = toy.inputs(5, seed=seed)
    sent = comm.dispatch(x, idx)
    return torch.equal(comm.combine(sent.x, sent.route), (idx >= 0).sum(1, keepdim=True) * x)


# ---------------------------------------------------------------------- collective methods


def moe_step(moe: MoECommunicator) -> bool:
    draw = torch.Generator().manual_seed(moe.comm.rank)
    x, ids = torch.randn(4, 64, generator=draw).bfloat16(), torch.rand(4, 6, generator=draw).topk(2).indices
    output, handle = moe.dispatch(x, ids)
    return torch.equal(moe.combine(output.x, handle), 2 * x)


def buffer_step(buffer: deep_ep.Buffer) -> None:
    draw = torch.Generator().manual_seed(buffer.rank)
    x, ids = torch.randn(4, 128, generator=draw).bfloat16(), torch.rand(4, 6, generator=draw).topk(2).indices
    per_rank, _, per_expert, there, _ = buffer.get_dispatch_layout(ids, 6)
    got = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=there, num_tokens_per_expert=per_expert, topk_idx=ids,
        topk_weights=torch.ones(4, 2),
    )  # fmt: skip
    out, _, _ = buffer.combine(got[0], got[4])
    assert torch.equal(out, there.sum(1, keepdim=True).bfloat16() * x)


def methods(check: str) -> dict[str, Any]:
    """Return what each rank raises if rank 0 calls a method one step before rank 1, and whether the next step is
    right."""
    rank, found = dist.get_rank(), dict[str, Any]()
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    config = MoECommunicatorConfig(placement=(0, 1, 2, 3, 4, 5, 0, 1), statistics=True, check=check, **sizes)
    with MoECommunicator(config, device="cpu") as moe:
        buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
        buffer_step(buffer)
        moe_step(moe)
        calls: dict[str, Callable[[], Any]] = {
            "place": lambda: moe.place((1, 0, 2, 3, 4, 5, 0, 1)),
            "load": moe.load,
            "warmup": moe.warmup,
            "sibling": moe.sibling,
            "create Communicator": lambda: ep_ops.Communicator(**SIZES),
            "create MoECommunicator": lambda: MoECommunicator(config, device="cpu"),
            "Buffer.dispatch": lambda: buffer_step(buffer),
        }
        for name, call in calls.items():
            first, second = (call, lambda: moe_step(moe)) if rank == 0 else (lambda: moe_step(moe), call)
            found[name] = raised(first), moe_step(moe)
        # Two methods, and the same methods of two communicators.
        other = MoECommunicator(config, device="cpu")
        found["load, place"] = raised(calls["load"] if rank else calls["place"])
        found["other load"] = raised(other.load if rank else moe.load)
        found["names"] = moe.comm.name, other.comm.name
        assert moe_step(other) and moe_step(moe)
        buffer_step(buffer)
        buffer.destroy()
        other.destroy()
    return found


@pytest.mark.parametrize("check", ["0", pytest.param("1", marks=pytest.mark.drawn)])
def test_methods_out_of_order(check: str) -> None:
    """Both ranks raise at once, with both names, and go on."""
    mine, theirs = run_ranks(2, methods, check)
    name, other = mine.pop("names")
    assert theirs.pop("names") == (name, other)
    assert mine == theirs
    said = "RuntimeError: ranks make different calls at the same time (rank 0: {}, rank 1: {}); all ranks must make the"
    assert mine.pop("load, place").startswith(said.format(f"place of '{name}'", f"load of '{name}'"))
    assert mine.pop("other load").startswith(said.format(f"load of '{name}'", f"load of '{other}'"))
    for call, (text, works) in mine.items():
        own = call if " " in call or "." in call else f"{call} of '{name}'"
        assert text.startswith(said.format(own, f"ep::dispatch of '{name}'")), text
        assert works, call


# ---------------------------------------------------------------------- one rank rejects a method


def rejected_methods() -> list[str]:
    rank = dist.get_rank()
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    config = MoECommunicatorConfig(placement=range(6), **sizes)
    with MoECommunicator(config, device="cpu") as moe:
        said = [
            raised(moe.comm.warmup, ["e4m3"] if rank else ()),
            raised(moe.place, range(6) if rank == 0 else [0]),
            raised(moe.sibling, range(6) if rank == 0 else "abcdef"),
            raised(moe.place, range(6) if rank == 0 else [5, 4, 3, 2, 1, 0]),
        ]
        assert moe_step(moe)
    return said


def test_methods_that_one_rank_rejects() -> None:
    mine, theirs = run_ranks(2, rejected_methods)
    for own, other in zip(theirs[:3], mine[:3], strict=True):
        assert other == f"ValueError: rejected by rank 1: {own.removeprefix('ValueError: ')}"
    assert mine[3] == theirs[3] and "ranks disagree on placement: its checksums are" in mine[3]


# ---------------------------------------------------------------------- threads


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at the same time, in threads of their own."""
    results: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            results[index] = call()
        except Exception as error:
            results[index] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def begins(comm: ep_ops.Communicator) -> threading.Event:
    """Return an event that is set when the communicator begins an operation, in which it waits for other ranks."""
    waits, begun = comm.backend._waits, threading.Event()
    begin = waits.begin

    def noting(call: str) -> None:
        begun.set()
        begin(call)

    waits.begin = noting
    return begun


def own_groups() -> list[Any]:
    """Two threads, each with a communicator of a group of its own, which it creates and destroys."""
    groups = [dist.new_group() for _ in range(2)]

    def work(group: dist.ProcessGroup) -> str:
        with toy.communicator(group=group) as comm:
            for step in range(15):
                time.sleep(0.002 * torch.rand(()).item())
                assert right(comm, step)
            return comm.name

    return in_threads(*(lambda group=group: work(group) for group in groups))


def one_group() -> list[Any]:
    """Two threads that call communicators of one group: in one order on rank 0, in the other on rank 1."""
    comms = [toy.communicator(name=name) for name in ("one", "other")]
    order = comms if dist.get_rank() == 0 else comms[::-1]
    within = begins(order[0])

    def late() -> bool:
        within.wait()
        return right(order[1], 1)

    found = in_threads(lambda: right(order[0], 0), late)
    assert right(comms[0], 2) and right(comms[1], 2)
    for comm in comms:
        comm.destroy()
    return found


def one_communicator(remembered: bool, call: str) -> list[Any]:
    """A second thread of rank 0 calls a communicator while its first waits for rank 1 in a combine, which may end."""
    with toy.communicator(group=dist.new_group(), timeout=PATIENT, name="mine") as comm:
        x, idx, _ = toy.inputs(5, seed=comm.rank)
        for _ in range(4 if remembered else 1):
            sent = comm.dispatch(x, idx)
            comm.combine(sent.x, sent.route)
        store, called = dist.distributed_c10d._get_default_store(), f"called {comm.number}"
        if comm.rank == 1:
            comm.dispatch(x, idx)
            store.wait([called])
            in_threads(lambda: comm.combine(sent.x, sent.route))
            return [raised(comm.dispatch, x, idx), raised(comm.check_errors)]
        comm.dispatch(x, idx)
        calls: dict[str, Callable[[], Any]] = {
            "ep::dispatch": lambda: comm.dispatch(x, idx),
            "dispatch": lambda: comm.dispatch(x, idx, layout="other"),  # which this rank rejects by itself
            "warmup": comm.warmup,
            "destroy": comm.destroy,
        }

        within = begins(comm)

        def second() -> Any:
            try:
                within.wait()
                return calls[call]()
            finally:
                store.set(called, "")

        _, rejected = in_threads(lambda: comm.combine(sent.x, sent.route), second)
        return [rejected, raised(comm.dispatch, x, idx)]


def threads() -> list[list[Any]]:
    kinds = [(False, "ep::dispatch"), (True, "ep::dispatch"), (True, "warmup"), (False, "dispatch"), (False, "destroy")]
    return [own_groups(), one_group(), *(one_communicator(*kind) for kind in kinds)]


def test_threads() -> None:
    mine, theirs = run_ranks(2, threads)
    names, one, *same = mine
    assert sorted(names) == sorted(set(names)) and all(name.startswith("ep") for name in names), names
    assert theirs[0] == names, "threads created the same communicators on both ranks"
    # The first calls of both ranks meet, and the second ones.
    for texts in (one, theirs[1]):
        for text in texts:
            assert "different calls at the same time" in text and "of 'one'" in text and "of 'other'" in text, text
    calls = ["ep::dispatch", "ep::dispatch", "warmup", "dispatch", "destroy"]
    for (first, second), (other, next_one), call in zip(same, theirs[2:], calls, strict=True):
        why = f"{call} was called while another thread was calling the same communicator; allowed: one thread at a time"
        failed, destroyed = ("RuntimeError: communicator 'mine' " + word for word in ("failed", "was destroyed"))
        assert all(why in text and text.startswith("RuntimeError: ") for text in (first, other, next_one))
        assert other.startswith(failed) and next_one.startswith(failed)
        assert second.startswith(destroyed) if call == "destroy" else why in second, second


def alone() -> str:
    """A second thread calls a communicator of one rank, while the first is within a call."""
    with toy.communicator() as comm:
        x, idx, _ = toy.inputs(5)
        comm.busy.acquire()
        (said,) = in_threads(lambda: comm.dispatch(x, idx))
        comm.busy.release()
        assert right(comm, 0)
    return said


def test_threads_of_one_rank() -> None:
    assert "ep::dispatch was called while another thread was calling the same communicator" in alone()


# ---------------------------------------------------------------------- creation


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "misspelled": ({"top_kk": 2}, TypeError, "Communicator got unknown arguments top_kk"),
    "missing": ({"num_experts": ...}, TypeError, "Communicator needs num_experts, or an ep_ops.Config"),
    "config": ({"config": 64}, TypeError, "Communicator: config is 64; expected an ep_ops.Config"),
    "index": ({"device": 0}, ValueError, "device is 0; allowed: a torch.device, its name, or None"),
    "device": ({"device": "cuda:7"}, ValueError, "device is 'cuda:7', but torch"),
    "no device": ({"device": "gpu"}, ValueError, "device is 'gpu'; allowed: a torch.device, its name, or None"),
    "type": ({"device": 1.5}, ValueError, "device is 1.5; allowed: a torch.device, its name, or None"),
    "array": ({"num_experts": torch.tensor([4, 4])}, ValueError, "num_experts is tensor([4, 4])"),
    "function": ({"top_k": len}, ValueError, "top_k is <built-in function len>; allowed: an int"),
    "local function": ({"backend": lambda: "cute"}, ValueError, "backend is <function <lambda> at"),
    "held": ({"experts_per_rank": 3}, ValueError, "experts_per_rank is 3"),
    "value": ({"hidden_size": -4}, ValueError, "hidden_size is -4"),
    "unhashable": ({"name": ["ep"]}, ValueError, "name is ['ep']; allowed: a str"),
}


def wrong_arguments() -> list[tuple[str, str]]:
    rank, found = dist.get_rank(), []
    for changed, _, _ in WRONG.values():
        options = SIZES | changed if rank == 1 else SIZES
        said = raised(ep_ops.Communicator, **{name: given for name, given in options.items() if given is not ...})
        found.append(said)
    with toy.communicator() as comm:
        assert right(comm, rank)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="devices that it names exist")
def test_an_argument_that_is_wrong_on_one_rank() -> None:
    mine, theirs = run_ranks(2, wrong_arguments)
    for (_, kind, text), other, own in zip(WRONG.values(), mine, theirs, strict=True):
        prefix = "" if kind is TypeError else "rank 1: "
        assert own.startswith(f"{kind.__name__}: {prefix}{text}"), own
        assert other.startswith(f"ValueError: rank 1: {text}"), other


# ---------------------------------------------------------------------- children


def in_a_child(call: Callable[[], Any]) -> str:
    """Return what a function raises in a process that is forked from this one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = raised(call)
        except BaseException as error:
            text = f"came: {error}"
        os.write(write, pickle.dumps(text))
        os._exit(0)
    os.waitpid(child, 0)
    return pickle.loads(os.read(read, 65536))


def inherited() -> tuple[list[str], int]:
    with toy.communicator(name="mine", timeout=PATIENT) as comm:
        x, idx, _ = toy.inputs(5, seed=comm.rank)
        for _ in range(3):
            sent = comm.dispatch(x, idx)
            comm.combine(sent.x, sent.route)
        calls: list[Callable[[], Any]] = [
            lambda: comm.dispatch(x, idx),
            lambda: comm.combine(sent.x, sent.route),
            lambda: torch.ops.ep.plan(idx, 80, 4, 0, 16, 2, 2, "mine", "grouped"),
            comm.warmup,
            lambda: comm.empty_rows(0),
        ]
        said = [in_a_child(call) for call in calls]
        assert right(comm, comm.rank)
    return said, os.getpid()


def test_a_child_process() -> None:
    for said, parent in run_ranks(2, inherited):
        begin = f"RuntimeError: communicator 'mine' was created by process {parent}, from which"
        assert all(text.startswith(begin) for text in said), said


# ---------------------------------------------------------------------- leaving


def leaves(waiting: bool) -> str:
    """Rank 1 leaves the block of a communicator by an exception, between operations."""
    said = ""
    try:
        with toy.communicator(group=dist.new_group(), name="left", timeout=PATIENT) as comm:
            assert right(comm, comm.rank)
            dist.barrier()
            if comm.rank == 1:
                raise KeyError("not found")
            if waiting:
                right(comm, 0)
    except (KeyError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    return said


def shrinks() -> None:
    """Rank 1 calls shrink, rank 0 destroys the communicator."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    comm = toy.communicator(timeout=PATIENT)
    if comm.rank == 1:
        comm.shrink(groups[1]).destroy()
    else:
        comm.destroy()


def departures() -> tuple[Any, ...]:
    shrinks()
    return leaves(False), leaves(True)


def absent() -> tuple[list[int], int]:
    """Return the ranks for which rank 0 waits in vain, and how often it asks whether the communicator has failed."""
    asked: list[int] = []
    if dist.get_rank() == 0:
        return leaving.meet(dist.group.WORLD, "left", 77, 3.0, lambda: not asked.append(1)), len(asked)
    return [], 0


def test_nobody_waits_for_ranks_of_a_failed_communicator() -> None:
    """When a communicator has failed, destroy does not wait for the ranks that have not left it."""
    assert run_ranks(2, absent)[0] == ([1], 1)


def test_leaving_by_an_exception() -> None:
    (quiet, waits), (own, other) = run_ranks(2, departures)
    assert own == other == "KeyError: 'not found'"
    assert quiet == "", "rank 0 leaves its block without an error"
    doing = "rank 0, in ep::dispatch (operation 3 of this communicator)"
    why = f"{doing}, stopped because rank 1 left the block of the communicator: KeyError: 'not found'"
    failed = f"communicator 'left' failed: {why}; destroy it and make a new one on a new process group"
    assert waits == f"RuntimeError: {failed}"
