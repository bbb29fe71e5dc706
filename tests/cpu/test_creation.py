"""If one rank lacks something for a communicator, creating it fails on all ranks with that reason."""

from __future__ import annotations

import contextlib
import inspect
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops import backends, config
from ep_ops.symmetric import torch_symm


def allocate(lacking: int) -> tuple[str, list[str]]:
    """Return what a rank raises where rank ``lacking`` has no memory, and what it has done."""
    done: list[str] = []

    def empty(nbytes: int, **_: Any) -> torch.Tensor:
        if dist.get_rank() == lacking:
            raise torch.OutOfMemoryError("no room for it")
        done.append("allocated")
        return torch.zeros(nbytes, dtype=torch.uint8)

    with (
        mock.patch.object(torch_symm.symm_mem, "empty", empty),
        mock.patch.object(torch_symm, "meet", lambda *_: dist.barrier() or done.append("met")),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
        pytest.raises(RuntimeError) as error,
    ):
        torch_symm.allocate(64, dist.group.WORLD, torch.device("cpu"))
    return f"{type(error.value).__name__}: {error.value}", done


def test_no_symmetric_memory_on_one_rank() -> None:
    """If one rank has no symmetric memory, all ranks learn it before anybody waits for that rank in the rendezvous."""
    mine, theirs = run_ranks(2, allocate, 0)
    assert mine == ("OutOfMemoryError: no room for it", [])
    said = "allocating 64 bytes of symmetric memory: rank 0: OutOfMemoryError: no room for it"
    assert theirs == (f"RuntimeError: {said}", ["allocated"])


def make(lacking: int) -> tuple[str, list[bool]]:
    destroyed: list[bool] = []

    class Backend:
        def __init__(self, member: Any) -> None:
            if member.rank == lacking:
                raise torch.OutOfMemoryError("no room for a table")

        def destroy(self, keep: bool) -> None:
            destroyed.append(keep)

    member = types.SimpleNamespace(
        rank=dist.get_rank(), group=dist.group.WORLD, device=torch.device("cpu"), name="ep",
        config=types.SimpleNamespace(check=""),
    )  # fmt: skip
    with mock.patch.dict("sys.modules", {"ep_ops.backends.cute.backend": types.SimpleNamespace(CuteBackend=Backend)}):
        if lacking < 0:
            return type(backends.make("cute", member)).__name__, destroyed  # type: ignore[arg-type]
        with pytest.raises(RuntimeError) as error:
            backends.make("cute", member)  # type: ignore[arg-type]
    return f"{type(error.value).__name__}: {error.value}", destroyed


def test_no_backend_on_one_rank() -> None:
    """Others would find out in their first operation, by the deadline."""
    assert run_ranks(2, make, 1) == [
        ("RuntimeError: creating communicator 'ep': rank 1: OutOfMemoryError: no room for a table", [False]),
        ("OutOfMemoryError: no room for a table", []),
    ]
    assert run_ranks(2, make, -1) == [("Backend", [])] * 2


def test_editors_complete_the_options() -> None:
    """`ConfigOptions`, which editors read, and the signature, which help() prints, name every option of `Config`."""
    known = config.options()
    typed = {name: kind.__forward_arg__ for name, kind in config.ConfigOptions.__annotations__.items()}
    fields = {name: option.type for name, option in known.items()}
    assert typed == fields | {"experts_per_rank": "Sequence[int]"}
    shown = inspect.signature(ep_ops.Communicator).parameters
    assert [*shown] == ["group", "config", "device", *known]
    assert shown["top_k"].default is inspect.Parameter.empty and shown["alignment"].default == 16
