"""Across NVLink domains, and in one: calls that take several rounds, since memory is bounded."""

from __future__ import annotations

import domains
import pytest
import torch
import torch.distributed as dist
from domains import TOKENS, TOP_K, check, config, drawn, expected, half_of_the_memory, wrong
from operators import Call, make_comm, ranks
from torch import Tensor

from ep_ops.backends.cute.sizing import round_tokens

make = domains.make  # a fixture


def test_rounds(make, seed, together):
    """All operators, of more tokens than the memory takes at a time; no tokens of some ranks in some rounds."""
    rank, world_size = ranks()
    idx = drawn(seed, 4, TOKENS - 150 * (rank % 2))[1]
    check(make, 0, together, Call(idx, world_size * TOKENS // 16 * 16, 16, 0, TOKENS), seed, half=True)


def test_rounds_in_flight(make, seed, together):
    """Two calls of several rounds are under way at once, beside each other's waits, and then captured."""
    (x, idx, weights), (y, ids, scale) = (drawn(seed, step, TOKENS - 90 * (ranks()[0] % 2)) for step in (2, 3))
    with make("cute", "flights", True) as comm:
        comm.warmup()

        def step() -> list[Tensor]:
            started = [
                comm.dispatch_start(x, idx, weights, max_tokens=TOKENS, flight=0),
                comm.dispatch_start(y, ids, scale, max_tokens=TOKENS, flight=1),
            ]
            second, first = comm.dispatch_wait(started[1]), comm.dispatch_wait(started[0])
            sums = [
                comm.combine_start(sent.x, sent.route, sent.weights, flight=flight)
                for flight, sent in enumerate((first, second))
            ]
            return [comm.combine_wait(one) for one in sums]

        eager = step()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = step()
        for out in captured:
            out.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            for outs in (eager, captured):
                assert int(wrong(outs[0], expected(comm, x, idx, weights))) == 0
                assert int(wrong(outs[1], expected(comm, y, ids, scale))) == 0
        del graph


def test_rounds_in_one_domain(seed, together):
    """Memory is bounded there, too. Each round is an operation that ranks note; a gathering combine is one in any case,
    also where it is rejected, and a dynamic dispatch that is rejected ends with its plan."""
    rank, world_size = ranks()
    if world_size == 1:
        pytest.skip("needs several ranks")
    rows, half = TOKENS * world_size * TOP_K // 16 * 16, half_of_the_memory(world_size, None)
    with make_comm("cute", "one domain", symmetric_rows=rows, staging_bytes=half, **config(world_size)) as comm:
        comm.warmup()
        each = round_tokens(comm.config)
        assert each is not None and each < TOKENS and len(comm.domains) == 1
        x, idx, weights = drawn(seed, 1, TOKENS - 90 * (rank % 2))
        for turn in range(2):
            sent = comm.dispatch(x, idx, weights, capacity=rows, max_tokens=TOKENS)
            torch.cuda.synchronize()
            noted = [one.kind for one in comm.last_operations()]
            many = 1 + -(-TOKENS // each)
            with together():
                assert noted[:many] == ["dispatch"] * many and (turn or noted[many] != "dispatch")
            out = comm.combine(sent.x, sent.route, sent.weights)
            exact = comm.dispatch(x, idx, weights, max_tokens=TOKENS, exact=True)
            again = comm.combine(exact.x, exact.route, exact.weights)
            held = torch.arange(sent.x.shape[0], device="cuda") < sent.route.offs[-1]
            y = comm.empty_rows(sent.x.shape[0]).copy_(torch.where(held[:, None], sent.x, 0))
            gathered = comm.combine_gathered(y, sent.route)
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                for got, scale in ((out, weights), (again, weights), (gathered, None)):
                    assert int(wrong(got, expected(comm, x, idx, scale))) == 0
            for call, text in (
                (lambda s=sent, y=y: comm.combine_gathered(y.float() if rank == 0 else y, s.route), "y has dtype"),
                (
                    lambda: comm.dispatch(x.float() if rank == 0 else x, idx, max_tokens=TOKENS, exact=True),
                    "x has dtype",
                ),
                (lambda s=sent: comm.combine(s.x.float() if rank == 0 else s.x, s.route), "y has dtype"),
            ):
                with together():
                    if rank == 0:
                        with pytest.raises(TypeError, match=text):
                            call()
                    else:
                        with pytest.raises(ValueError, match=f"rejected by rank 0: {text}"):
                            call()
                            torch.cuda.synchronize()
                            comm.check_errors()
                        comm.check_errors()
