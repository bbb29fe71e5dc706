"""Across NVLink domains: token-major rows."""

from __future__ import annotations

import domains
import torch
import torch.distributed as dist
from domains import TOKENS, both, drawn, in_rounds, step_of
from operators import ranks
from sharing import few_processes
from torch import Tensor

import ep_ops

make = domains.make  # a fixture


@in_rounds
def test_token_major(half, make, seed, monkeypatch):
    """All dispatches, with and without weights and drops, their gradients, and what runs along their routes; the
    checking mode raises the first difference from the reference."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    world_size = ranks()[1]
    with make("cute", "tokens", half) as comm:
        for turn, share in enumerate((1.0, 0.5, 0.0)):
            x, idx, weights = drawn(seed, turn, 0 if turn == 1 and comm.rank == world_size - 1 else TOKENS - 7 * turn)
            idx[::5, 1] = idx[::5, 0]
            capacity = int(world_size * TOKENS * share)
            sent = comm.dispatch(x, idx, weights, capacity=capacity, layout="token_major")
            plain = comm.dispatch(x, idx, capacity=capacity, layout="token_major")
            comm.dispatch_wait(comm.dispatch_start(x, idx, weights, capacity=capacity, layout="token_major"))
            exact = comm.dispatch(x, idx, weights, layout="token_major", exact=True)
            for got in (sent, plain, exact):
                along = (*got.route.tensors, *got.route.ints, comm.name)
                comm.dispatch_planned(x, got.route, weights)
                comm.dispatch_planned(x, got.route)
                comm.dispatch_planned(x, got.route._replace(layout="grouped"))  # as the backward of a combine does
                y = torch.randn(got.x.shape, device="cuda").bfloat16()
                row_weights = torch.randn(got.local_idx.shape, device="cuda")
                torch.ops.ep.dispatch_backward(y, row_weights, *along, "token_major")
                torch.ops.ep.dispatch_backward(y, None, *along, "token_major")
                torch.ops.ep.dispatch_backward(None, row_weights, *along, "token_major")
                comm.combine(y, got.route)
                comm.combine_wait(comm.combine_start(y, got.route))
                comm.combine(y, got.route, residual=x)
        torch.cuda.synchronize()
        comm.check_errors()


def token_layer(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """An expert doubles a row: a rank's rows times the sum of their weights."""
    sent = comm.dispatch(x, idx, weights, max_tokens=TOKENS, layout="token_major")
    held = torch.arange(sent.x.shape[0], device="cuda") < sent.route.sources[-1]
    y = torch.where(held[:, None], sent.x.float() * 2 * sent.weights.sum(1, keepdim=True), 0).bfloat16()
    return comm.combine(y, sent.route, residual=x)


@few_processes
def test_token_major_compiled(make, seed, together):
    """Values and gradients: compiled ones beside eager ones, eager ones beside the reference's."""
    with both(make) as (comm, ref):
        got, want, true = (
            step_of(run, of, seed)
            for run, of in ((torch.compile(token_layer, fullgraph=True), comm), (token_layer, comm), (token_layer, ref))
        )
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            for one, other, right in zip(got, want, true, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
                torch.testing.assert_close(other, right, rtol=0, atol=0)
        torch.compiler.reset()


@in_rounds
def test_token_major_captured(half, make, seed, together):
    """Replays bring what is there then, along the route that is asked for then."""
    with make("cute", "tokens_captured", half) as comm:
        comm.warmup()
        x, idx, weights = drawn(seed, 0, TOKENS)

        def step() -> tuple[Tensor, ...]:
            sent = comm.dispatch(x, idx, weights, layout="token_major")
            held = (torch.arange(sent.x.shape[0], device="cuda") < sent.route.sources[-1])[:, None]
            rows = torch.where(held, sent.x, 0)
            return rows, sent.weights, sent.local_idx, sent.route.send_rows, comm.combine(rows, sent.route)

        step()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = step()
        for turn in range(1, 4):
            for kept, fresh in zip((x, idx, weights), drawn(seed, turn, TOKENS), strict=True):
                kept.copy_(fresh)
            for tensor in captured:
                tensor.fill_(77)
            graph.replay()
            eager = step()
            torch.cuda.synchronize()
            with together():
                for number, (mine, theirs) in enumerate(zip(captured, eager, strict=True)):
                    assert torch.equal(mine, theirs), (turn, number)
        comm.check_errors()
        del graph
