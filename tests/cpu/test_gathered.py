"""Rows in symmetric memory and their combine, on the reference backend: the interface, gradients and rejections."""

from __future__ import annotations

import re

import pytest
import torch
import toy
from ranks import run_ranks
from torch._inductor.utils import run_and_get_code

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


def several(comm, x, topk_idx, w, combine):
    """Rows of two products that are there before the first combine, the second of which is read again at the end, of a
    generated kernel and of another operator."""
    rows = comm.dispatch(x, topk_idx, capacity=44)
    own = torch.where(ep_ops.nn.expert_of_rows(rows.route)[:, None] >= 0, rows.x, 0)
    first, second = own @ w, own @ w.t()
    made = [first, second, torch.tanh(own) * 3, own.sort(1).values]
    return torch.cat([combine(y, rows.route) for y in made]), second.square().sum()


@pytest.mark.drawn
@pytest.mark.drawn
def test_compiled_rows_are_written_in_place():
    """Inductor computes rows in place; the reference backend would show rows that are overwritten too early as NaN."""
    torch._dynamo.reset()
    with toy.communicator(symmetric_rows=44) as comm:
        x, topk_idx, _ = toy.inputs(5)
        w = torch.randn(toy.HIDDEN, toy.HIDDEN)
        results, placed = [], []
        gather, memory = comm.backend._combine_gathered, comm.empty_rows(1).data_ptr()
        comm.backend._combine_gathered = lambda a: placed.append(a.y.data_ptr() == memory) or gather(a)
        compiled = torch.compile(several, fullgraph=True)
        for run, combine in ((compiled, comm.combine_gathered), (several, comm.combine)):
            leaf = x.clone().requires_grad_()
            out, kept = run(comm, leaf, topk_idx, w, combine)
            (out.sin().sum() + kept).backward()
            results.append([out.detach(), kept.detach(), leaf.grad])
        torch.testing.assert_close(*results)
        assert placed == [True] * 4


def test_compiled_rows_are_written_once():
    """The kernel that computes rows writes them once: there is no other between dispatch and combine. Rows from outside
    of the graph are handed on as they are, wherever they lie."""
    torch._dynamo.reset()
    with toy.communicator(symmetric_rows=44) as comm, torch.no_grad():
        x, topk_idx, _ = toy.inputs(5)
        w = torch.randn(toy.HIDDEN, toy.HIDDEN)

        def layer(outside, x, topk_idx, w, combine):
            rows = comm.dispatch(x, topk_idx, capacity=44)
            out = combine(outside, rows.route)
            out = out + combine(torch.tanh(rows.x) * 3, rows.route)
            rows = comm.dispatch(out, topk_idx, capacity=44)
            return combine(rows.x @ w, rows.route)

        compiled, args = torch.compile(layer, fullgraph=True), (x, topk_idx, w)
        outside = comm.dispatch(x.sin(), topk_idx, capacity=44).x
        expected = layer(outside, *args, comm.combine)
        got, (code,) = run_and_get_code(compiled, outside, *args, comm.combine_gathered)
        torch.testing.assert_close(got, expected)
        there = comm.empty_rows(44).copy_(outside)
        torch.testing.assert_close(compiled(there, *args, comm.combine_gathered), expected)
    calls = re.findall(r"^ +(?:\w+ = )?(torch\.ops\.ep\.\w+|extern_kernels\.\w+|cpp_fused)", code, re.M)
    operators = [call.rpartition(".")[2] for call in calls]
    first, second = (["rows_to_gather", kernel, "combine_gathered"] for kernel in ("cpp_fused", "mm"))
    assert operators == ["dispatch", "combine_gathered", *first, "cpp_fused", "dispatch", *second]


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


def test_rows_elsewhere_are_copied():
    """Rows that lie elsewhere are copied into the memory that empty_rows returns, where nothing else is in use."""
    with toy.communicator(symmetric_rows=44) as comm:
        x, topk_idx, _ = toy.inputs(5)
        rows = comm.dispatch(x, topk_idx, capacity=40)
        expected = comm.combine(rows.x, rows.route)
        y = comm.empty_rows(40).fill_(7)
        assert torch.equal(comm.combine_gathered(rows.x, rows.route), expected)
        assert torch.equal(y.nan_to_num(), rows.x.nan_to_num())
        assert torch.equal(comm.combine_gathered(y, rows.route), expected)


def test_rejections():
    x, topk_idx, _ = toy.inputs(5)
    with toy.communicator(symmetric_rows=44) as comm:
        rows = comm.dispatch(x, topk_idx, capacity=40)
        with pytest.raises(ValueError, match="y lies in symmetric memory, and not at its beginning"):
            comm.combine_gathered(comm.empty_rows(44)[4:], rows.route)
        rows = comm.dispatch(x, topk_idx, capacity=48)
        with pytest.raises(ValueError, match="y has 48 rows; allowed: at most 44, the symmetric_rows of"):
            comm.combine_gathered(rows.x, rows.route)
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
    with pytest.raises(RuntimeError, match=r"rank 0: ep::combine of .*, rank 1: ep::combine_gathered of "):
        run_ranks(2, check_all_must_gather)


def test_memory_is_planned():
    pytest.importorskip("cutlass", reason="the cute backend needs nvidia-cutlass-dsl")
    sizes = dict(world_size=4, num_experts=4, hidden_size=64, top_k=4, max_tokens_per_rank=8)
    for dtype, nbytes in ((torch.bfloat16, 12800), (torch.float32, 25600)):
        plan = ep_ops.memory_plan(**sizes, dtype=dtype, symmetric_rows=100)
        assert dict(plan) == {**ep_ops.memory_plan(**sizes, dtype=dtype), "symmetric: rows to be gathered": nbytes}
