"""Code of the host between a call and a backend whose failures show on other ranks alone."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import toy

import ep_ops
from ep_ops import creation
from ep_ops.backends import calls
from ep_ops.backends.cute.sizing import MOST_ROUNDS, least_round, round_tokens
from ep_ops.config import Config
from ep_ops.operators.table import DISPATCH_START


def test_what_the_others_are_told_of_a_misfit() -> None:
    """The flight and the bound of the call, each in its place."""
    with toy.communicator() as comm:
        x, idx, _ = toy.inputs(5)
        by_type = {"Tensor": idx, "int": 1, "str": "", "bool": True, "Optional[Tensor]": None}
        given = {"x": "no tensor", "flight": 1, "max_tokens": 9, "comm": comm.name}
        arguments = torch.ops.ep.dispatch_start.default._schema.arguments
        args = [given.get(argument.name, by_type[str(argument.type)]) for argument in arguments]
        with mock.patch.object(comm.backend, "reject") as reject:
            with pytest.raises(TypeError, match="x is a str; allowed: a tensor"):
                DISPATCH_START.registered(*args)
        assert reject.call_args.args == ("dispatch_start", "x is a str; allowed: a tensor", 1, 9)


@pytest.mark.parametrize("unfit", [0, 1])
def test_any_rank_may_be_unfit_for_kernels(unfit: int) -> None:
    """Where "auto" was asked for all take the reference backend, for what one of them lacks."""
    with toy.communicator() as comm:
        own = dataclasses.replace(comm.config, backend="auto")
    words = [(own, None, None, "dtype is not one of them" if rank == unfit else None) for rank in range(2)]
    device = torch.device("cpu")
    exchange: Any = SimpleNamespace(rank=0, world_size=2, device=device, all_gather_object=lambda word: words)
    with (
        mock.patch.object(creation, "choose_backend", lambda facts: ("cute", "")),
        mock.patch.object(creation, "divide", lambda facts, size: ((0, 1),)),
    ):
        assert creation.agree(exchange, own, None, words[0][3], 132).backend == "reference"


def test_calls_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator with too many calls forgets those that were not used for longest."""
    monkeypatch.setattr(calls, "MOST_CALLS", 8)
    cache, unused = calls.CallCache(), calls.Call(lambda arguments: None)
    for key in "abcde":
        cache.add(key, unused)
    assert cache["a"] is unused, "found in the older half, and used now"
    for key in "fgh":
        cache.add(key, unused)
    assert cache["a"] is cache["e"] is unused and cache["b"] is cache["c"] is None
    cache.forget()
    assert cache["a"] is cache["h"] is None


def test_as_many_rounds_as_a_rejection_counts() -> None:
    """A rejection counts at least the most rounds that memory can take, and no more."""
    sizes: dict[str, Any] = dict(
        world_size=2, num_experts=8, hidden_size=4096, top_k=2, max_tokens_per_rank=MOST_ROUNDS * 256,
        latency_max_tokens=0,
    )  # fmt: skip
    with pytest.raises(ValueError) as told:
        ep_ops.memory_plan(staging_bytes=1000, **sizes)
    (least,) = re.findall(r"holds (\d+) bytes", str(told.value))
    ep_ops.memory_plan(staging_bytes=int(least), **sizes)
    with pytest.raises(ValueError, match="in 64 rounds of 256 tokens"):
        ep_ops.memory_plan(staging_bytes=int(least) - 1, **sizes)
    given = {**sizes, "experts_per_rank": (4, 4), "backend": "cute", "name": "x", "device_type": "cuda"}
    fields = {field.name for field in dataclasses.fields(Config)}
    config = Config(**{name: value for name, value in given.items() if name in fields}, staging_bytes=int(least))
    assert round_tokens(dataclasses.replace(config, domains=((0, 1),))) == least_round(config) == 256
