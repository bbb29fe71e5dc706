"""Outputs are fresh memory: they overlap neither inputs, nor each other, nor what the next call returns."""

from __future__ import annotations

import itertools

import pytest
import torch
import toy
from ranks import run_ranks

from ep_ops.operators import OPERATORS


def every_operator(comm):
    """(name, inputs, outputs) of one call of each, with and without the optional arguments."""
    rank = comm.rank
    x, topk_idx, weights = toy.inputs(3 + rank, seed=rank)
    sizes = (comm.num_local_experts, comm.world_size, comm.name)
    capacity = comm.capacity()
    flat, grouped = (capacity, 4, 0, 16, *sizes), (16 * comm.num_local_experts, 4, 16, 16, *sizes, "padded")
    rows = comm.dispatch(x, topk_idx, weights)
    along = (*rows.route.tensors, *rows.route.ints, comm.name)
    planned = (*rows.route.tensors, capacity, *rows.route.ints, comm.name)
    tokens = comm.dispatch(x, topk_idx, weights, capacity=20, layout="token_major")
    copied = (*tokens.route.tensors, *tokens.route.ints, comm.name, "token_major")
    by_token = (20, 1, 0, 16, *sizes, "token_major")
    grad = torch.ones_like(x)
    ticket = torch.empty(0)
    back_tokens, back_rows = (ticket, [], grad.dtype, len(x), 8, 2, comm.name), (ticket, [], grad.dtype, capacity, 8)
    for name, *args in (
        ("plan", topk_idx, *flat),
        ("dispatch", x, weights, topk_idx, *flat),
        ("dispatch", x, weights, topk_idx, *grouped),
        ("dispatch", x, None, topk_idx, *flat),
        ("dispatch_dynamic", x, weights, topk_idx, 4, 16, *sizes),
        ("dispatch_planned", x, weights, *planned),
        ("dispatch_planned", x, None, *planned),
        ("combine", rows.x, rows.weights, *along),
        ("combine", rows.x, None, *along),
        ("combine", rows.x, rows.weights, *along, grad),
        ("combine_gathered", comm.empty_rows(capacity).copy_(rows.x), *along),
        ("dispatch_backward", rows.x, rows.weights, *along),
        ("dispatch_backward", None, rows.weights, *along),
        ("combine_backward", grad, rows.x, rows.weights, *planned),
        ("combine_backward", grad, None, None, *planned),
        ("dispatch_backward_start", rows.x, rows.weights, *along),
        ("dispatch_backward_wait", *back_tokens),
        ("combine_backward_start", grad, rows.x, rows.weights, *planned),
        ("combine_backward_wait", *back_rows, True, comm.name),
        ("dispatch_start", x, weights, topk_idx, *flat),
        ("dispatch_wait", ticket, x, weights, topk_idx, *flat),
        ("plan", topk_idx, *by_token),
        ("dispatch", x, weights, topk_idx, *by_token),
        ("dispatch", x, None, topk_idx, *by_token),
        ("dispatch_dynamic", x, weights, topk_idx, 1, 16, *sizes, "token_major"),
        ("dispatch_planned", x, weights, *copied[:5], 20, *copied[5:]),
        ("dispatch_backward", tokens.x, tokens.weights, *copied),
        ("dispatch_backward_start", tokens.x, tokens.weights, *copied),
        ("dispatch_backward_wait", *back_tokens),
        ("dispatch_start", x, weights, topk_idx, *by_token),
        ("dispatch_wait", ticket, x, weights, topk_idx, *by_token),
        ("combine", tokens.x, None, *copied[:-1]),
        ("combine_start", rows.x, rows.weights, *along),
        ("combine_wait", ticket, rows.x, rows.weights, *along),
    ):
        out = getattr(torch.ops.ep, name)(*args)
        yield (
            name,
            [a for a in args if isinstance(a, torch.Tensor)],
            [out] if isinstance(out, torch.Tensor) else list(out),
        )


def bytes_of(tensor):
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def overlaps(one, other):
    a, b = bytes_of(one), bytes_of(other)
    return max(a.start, b.start) < min(a.stop, b.stop)


def check_fresh():
    with toy.communicator(symmetric_rows=1000) as comm:
        kept, names = [], set()  # outputs of earlier calls stay alive: a buffer that is used again shows
        for name, inputs, outputs in itertools.chain(every_operator(comm), every_operator(comm)):
            names.add(name)
            for out in outputs:
                assert not any(overlaps(out, other) for other in (*inputs, *kept)), name
                kept.append(out)
        assert names == {op.name for op in OPERATORS}
    return len(kept)


@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_are_fresh(world_size):
    assert all(count > 50 for count in run_ranks(world_size, check_fresh))


def test_the_same_call_twice_can_be_added():
    with toy.communicator() as comm:
        x, topk_idx, weights = toy.inputs(6)

        def sent(x):
            rows = comm.dispatch(x, topk_idx, weights)
            return comm.combine(rows.x, rows.route, rows.weights)

        one, two = sent(x), sent(2 * x)
        torch.testing.assert_close(one + two, 3 * one)
