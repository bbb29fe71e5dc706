"""The memory of a communicator is as large as planned: results of calls, rounds, ranks and experts."""

from __future__ import annotations

import re

import pytest
import torch
from test_communicator import SIZES, make

import ep_ops
from ep_ops.backends.cute.sizing import sizes_of, token_bound
from ep_ops.memory import MemoryPlan, planned


def test_memory_plan() -> None:
    sizes = {key: SIZES[key] for key in ("num_experts", "hidden_size", "top_k", "max_tokens_per_rank")}
    plan = ep_ops.memory_plan(world_size=4, backend="reference", **sizes)
    rows = 4 * 4 * 2 + 2 * 15 + 2  # W * tokens * min(K, El), padding, rounded up to 16
    assert plan["call: recv_x"] == rows * 16 and plan["call: recv_weights"] == rows * 4
    assert all(line.endswith("B") for line in str(plan).splitlines()) and len(str(plan).splitlines()) == len(plan)
    last = ep_ops.memory_plan(world_size=4, backend="reference", rank=3, capacity=32, **sizes)
    assert last["call: recv_x"] == 32 * 16
    with pytest.raises(ValueError, match="top_k is 99"):
        ep_ops.memory_plan(world_size=4, backend="reference", **sizes | {"top_k": 99})
    with make(backend="reference") as comm:
        assert comm.memory_plan() == ep_ops.memory_plan(world_size=1, backend="reference", **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_planned_bytes_are_those_of_the_results(dtype: torch.dtype) -> None:
    with make(dtype=dtype, alignment=4) as comm:
        x, topk_idx = torch.zeros(4, 8, dtype=dtype), torch.zeros(4, 2, dtype=torch.int32)
        topk_idx[:, 1] = 1
        got = comm.dispatch(x, topk_idx, torch.ones(4, 2, dtype=comm.weights_dtype))
        route = (got.route.send_rows, got.route.arrivals, got.route.offs, got.route.counts, got.dropped)
        assert comm.memory_plan() == {  # the reference backend holds nothing
            "call: recv_x": got.x.nbytes,
            "call: recv_weights": got.weights.nbytes,
            "call: route": sum(tensor.nbytes for tensor in route),
            "call: combined out": comm.combine(got.x, got.route, got.weights).nbytes,
        }


def test_bounded_staging() -> None:
    """Memory keeps the bound, in as few rounds as it takes; one that cannot be kept is rejected with what can."""
    sizes = dict(
        world_size=16, num_experts=64, hidden_size=1024, top_k=4, max_tokens_per_rank=1000, domain_size=2,
        latency_max_tokens=0,
    )  # fmt: skip

    def held(bound: int | None) -> int:
        plan = ep_ops.memory_plan(staging_bytes=bound, **sizes)
        return sum(nbytes for purpose, nbytes in plan.items() if purpose.startswith("symmetric"))

    whole = held(None)
    assert held(whole + 4096) == whole, "guards apart"
    before = whole
    for part in (2, 3, 8):
        bound = whole // part
        assert bound * 0.5 < held(bound) <= bound < before
        before = held(bound)
    with pytest.raises(
        ValueError, match="staging_bytes is 1000; in 64 rounds of 16 tokens backend 'cute' holds"
    ) as told:
        held(1000)
    (least,) = re.findall(r"holds (\d+) bytes", str(told.value))
    assert held(int(least)) <= int(least) < whole / 8
    with pytest.raises(ValueError, match="allowed: at least as many"):
        held(int(least) - 1)
    with pytest.raises(ValueError, match="staging_bytes is 0; allowed: None or an int of at least 1"):
        held(0)
    sizes["domain_size"] = None  # one domain: bounded as well
    whole = held(None)
    assert held(whole // 2) <= whole // 2
    sizes["latency_max_tokens"] = 128  # their memory is within the bound, and no call of theirs goes in rounds
    most = held(None) // 4
    assert held(most) <= most
    given = {name: value for name, value in sizes.items() if name != "world_size"}
    small = planned(ep_ops.Config(**given, staging_bytes=most), 16)
    assert 0 < token_bound(small, sizes_of(small)) <= sizes_of(small).max_tokens < 1000


def test_memory_plan_of_uneven_experts() -> None:
    sizes = {key: SIZES[key] for key in ("num_experts", "hidden_size", "top_k", "max_tokens_per_rank")}
    plans = [
        ep_ops.memory_plan(world_size=2, experts_per_rank=(5, 1), alignment=1, backend="reference", rank=rank, **sizes)
        for rank in range(2)
    ]
    assert [plan["call: recv_x"] for plan in plans] == [2 * 4 * 2 * 16, 2 * 4 * 1 * 16]
    with pytest.raises(ValueError, match=r"experts_per_rank is \(-1, 7\); allowed: one int >= 0"):
        ep_ops.memory_plan(world_size=2, experts_per_rank=(-1, 7), backend="reference", **sizes)


def test_bytes_are_readable() -> None:
    sizes = {"none": 0, "bytes": 1023, "kibi": 1024, "more": 1536 * 1024, "giga": 5 * 2**29}
    text = str(MemoryPlan(sizes))
    assert [line.split() for line in text.splitlines()] == [
        ["none", "0", "B"],
        ["bytes", "1023", "B"],
        ["kibi", "1.00", "KiB"],
        ["more", "1.50", "MiB"],
        ["giga", "2.50", "GiB"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns"
