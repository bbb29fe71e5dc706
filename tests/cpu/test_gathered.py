"""Rows in symmetric memory and their combine, on the reference backend: the interface, gradients and refusals."""

from __future__ import annotations

import pytest
import torch
import toy
from ranks import run_ranks

import ep_ops


def layer(comm, x, topk_idx, weights, scale, gathered):
    rows = comm.dispatch(x, topk_idx)
    made = toy.experts(rows, scale)
    if not gathered:
        return comm.combine(made, rows.route)
    y = comm.empty_rows(made.shape[0])
    y.copy_(made)
    return comm.combine_gathered(y, rows.route)


def step(comm, tokens, seed, gathered):
    x, topk_idx, weights = toy.inputs(tokens, seed=seed, grad=True)
    first = comm.first_local_expert
    scale = toy.scales()[first : first + comm.num_local_experts].clone().requires_grad_()
    out = layer(comm, x, topk_idx, weights, scale, gathered)
    out.sin().sum().backward()
    return [out.detach(), x.grad, scale.grad]


def check_gathered_is_combine():
    with toy.communicator(symmetric_rows=200) as comm:
        for tokens in (5 + comm.rank, 0, 16):
            got, expected = (step(comm, tokens, comm.rank, gathered) for gathered in (True, False))
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_is_combine(world_size):
    run_ranks(world_size, check_gathered_is_combine)


def test_compiled_where_the_rows_come_from_outside():
    torch._dynamo.reset()
    with toy.communicator(symmetric_rows=44) as comm:
        x, topk_idx, _ = toy.inputs(5)
        rows = comm.dispatch(x, topk_idx, capacity=44)
        y = comm.empty_rows(44).copy_(rows.x)
        home = torch.compile(lambda y: comm.combine_gathered(y, rows.route) + 1, fullgraph=True)
        torch.testing.assert_close(home(y), comm.combine(rows.x, rows.route) + 1)


def test_empty_rows():
    with toy.communicator(symmetric_rows=8) as comm:
        for count in (8, 0):
            rows = comm.empty_rows(count)
            assert rows.shape == (count, toy.HIDDEN) and rows.dtype == comm.dtype and rows.device == comm.device
        for count in (9, -1):
            with pytest.raises(ValueError, match=rf"num_rows is {count}; allowed: 0..8, the symmetric_rows of"):
                comm.empty_rows(count)
    with pytest.raises(RuntimeError, match="was destroyed"):
        comm.empty_rows(1)
    with toy.communicator() as comm, pytest.raises(ValueError, match="num_rows is 1; allowed: 0..0"):
        comm.empty_rows(1)


def test_rows_lie_in_symmetric_memory():
    """As on GPUs, where ordinary memory cannot be fetched from."""
    with toy.communicator(symmetric_rows=44) as comm:
        x, topk_idx, _ = toy.inputs(5)
        rows = comm.dispatch(x, topk_idx, capacity=40)
        y = comm.empty_rows(44)
        for elsewhere in (rows.x, y[4:]):
            with pytest.raises(ValueError, match="y does not lie in symmetric memory"):
                comm.combine_gathered(elsewhere, rows.route)
        y = comm.empty_rows(40).copy_(rows.x)
        assert torch.equal(comm.combine_gathered(y, rows.route), comm.combine(rows.x, rows.route))
    with toy.communicator() as comm, pytest.raises(ValueError, match="symmetric_rows is 0"):
        rows = comm.dispatch(x, topk_idx)
        comm.combine_gathered(rows.x, rows.route)


def check_all_must_gather():
    with toy.communicator(symmetric_rows=200) as comm:
        x, topk_idx, _ = toy.inputs(3)
        rows = comm.dispatch(x, topk_idx)
        y = comm.empty_rows(rows.x.shape[0]).copy_(rows.x)
        comm.combine_gathered(y, rows.route) if comm.rank else comm.combine(y, rows.route)


def test_all_ranks_must_gather():
    with pytest.raises(RuntimeError, match=r"rank 0: combine, rank 1: combine_gathered"):
        run_ranks(2, check_all_must_gather)


def test_memory_is_planned():
    pytest.importorskip("cutlass", reason="the cute backend needs nvidia-cutlass-dsl")
    sizes = dict(world_size=4, num_experts=4, hidden_size=64, top_k=4, max_tokens_per_rank=8)
    plan = ep_ops.memory_plan(**sizes, symmetric_rows=100)
    assert plan["symmetric: rows to be gathered"] == 100 * 64 * 2
    assert dict(plan) == {**ep_ops.memory_plan(**sizes), "symmetric: rows to be gathered": 12800}
