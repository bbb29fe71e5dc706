"""Failures on a device raise errors on the host: nothing hangs, and nothing is sent to a wrong place."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch
import torch.distributed as dist
from sharing import SHARING, TURNS

import ep_ops
from cute_kernels import jit

CONFIG = dict(num_experts=8, hidden_size=64, top_k=2, max_tokens_per_rank=64, latency_max_tokens=0, backend="cute")


def inputs(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(32, 64, generator=gen, device="cuda").bfloat16()
    return x, torch.rand(32, 8, generator=gen, device="cuda").topk(2).indices.int()


def test_bad_expert(together):
    with ep_ops.Communicator(**CONFIG) as comm:
        x, idx = inputs(comm.rank)
        bad = idx.clone()
        bad[3, 1] = 8
        sent = comm.dispatch(x, bad)
        torch.cuda.synchronize()
        with together():
            assert int(sent.route.send_rows[3, 1]) == -1
            with pytest.raises(ValueError, match=r"topk_idx holds 8 at flat index 7 .* from -1 \(none\) to 7"):
                comm.check_errors()
        sent = comm.dispatch(x, idx)  # usable again
        out = comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert torch.equal(out, 2 * x)  # two unweighted rows of each token


def test_absent_rank(together):
    """A rank that does not come is named by all that waited for it, and their kernels end."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    comm = ep_ops.Communicator(timeout=float(TURNS), **CONFIG)
    comm.warmup()
    absent = dist.get_world_size() - 1
    x, idx = inputs(comm.rank)
    if comm.rank != absent:
        sent = comm.dispatch(x, idx)
        comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
    with together():
        if comm.rank != absent:
            with pytest.raises(RuntimeError, match=rf"waited {TURNS} s for rank {absent} ") as told:
                comm.dispatch(x, idx)
            mine, theirs = comm.last_operations(), comm.last_operations(absent)
            assert mine[0].kind in ("dispatch", "combine") and mine[0].number > theirs[0].number
            (stopped,) = (noted for noted in mine if noted.number == theirs[0].number + 1)
            assert stopped.kind == "dispatch" and stopped.max_tokens == 64 and stopped.met is None
            assert absent in mine[0].unseen
            assert all(noted.met is not None and noted.met >= noted.begun for noted in theirs) and len(theirs) == 16
            text = str(told.value)
            for rank, last in ((comm.rank, mine[0]), (absent, theirs[0])):
                assert f"rank {rank}, last first: {last.number} ep::{last.kind} (max_tokens" in text, text
    # By now the absent one is told, too.
    if comm.rank != absent:
        comm.destroy()
    else:
        with pytest.raises(RuntimeError, match=rf"stopped because rank . waited {TURNS} s for rank {absent} "):
            time.sleep(1)
            comm.destroy()


@pytest.mark.parametrize("few", [0, None])
def test_a_server_that_replays_is_called_back(few, together):
    """A rank that waits learns of a failure without calling anything; one that is waited for, when it asks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    comm = ep_ops.Communicator(timeout=2.0 * TURNS, **{**CONFIG, "latency_max_tokens": few})
    comm.warmup()
    told: list[str] = []
    comm.on_failure(told.append)
    absent = dist.get_world_size() - 1
    x, idx = inputs(comm.rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        sent = comm.dispatch(x, idx)
        comm.combine(sent.x, sent.route)
    dist.barrier()
    if comm.rank != absent:
        graph.replay()
        torch.cuda.synchronize()
    end = time.monotonic() + 10 * TURNS
    while not told and time.monotonic() < end:
        if comm.rank == absent:  # nothing runs there that would notice
            with contextlib.suppress(RuntimeError):
                comm.check_errors()
        time.sleep(0.01)
    with together():
        assert len(told) == 1 and f"s for rank {absent} " in told[0], told
        with pytest.raises(RuntimeError, match=f"s for rank {absent} "):
            comm.check_errors()
    comm.destroy()


def test_order_mismatch(together):
    """Ranks that call different operators are told so, long before the deadline."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    comm = ep_ops.Communicator(timeout=20.0 * TURNS, **CONFIG)
    comm.warmup()
    x, idx = inputs(comm.rank)
    sent = comm.dispatch(x, idx)
    torch.cuda.synchronize()
    dist.barrier()
    if comm.rank == 0:
        comm.plan(idx)
    else:
        comm.combine(sent.x, sent.route)
    torch.cuda.synchronize()
    with together():
        with pytest.raises(RuntimeError, match="call operators in different orders"):
            comm.check_errors()
    comm.destroy()


def disagree(together, message: str, call, **config) -> None:
    """`call(comm, x, idx, odd)` on all ranks, rank 0 the odd one: all are told at once what differs."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    comm = ep_ops.Communicator(timeout=20.0 * TURNS, **{**CONFIG, **config})
    comm.warmup()
    call(comm, *inputs(comm.rank), comm.rank == 0)
    torch.cuda.synchronize()
    with together():
        with pytest.raises(RuntimeError, match=message):
            comm.check_errors()
    comm.destroy()


@pytest.mark.parametrize("few", [0, None])
def test_token_bounds_differ(few, together):
    """Throughput kernels cut the route into tiles by the bound, latency kernels send it in packets."""

    def call(comm, x, idx, odd):
        comm.dispatch(x, idx, max_tokens=64 if odd else 32)

    disagree(together, "which passed max_tokens (32, not 64|64, not 32)", call, latency_max_tokens=few)


def test_few_and_many_tokens(together):
    """One rank's bound is for the latency kernels, the others' is not."""

    def call(comm, x, idx, odd):
        comm.dispatch(x, idx, max_tokens=64 if odd else 32)

    disagree(together, "which passed max_tokens (32, not 64|64, not 32)", call, latency_max_tokens=32)


@pytest.mark.parametrize("few", [0, None])
def test_weights_on_one_rank(few, together):
    def call(comm, x, idx, odd):
        comm.dispatch(x, idx, torch.ones(32, 2, device="cuda") if odd else None)

    disagree(together, "only one of them passed weights", call, latency_max_tokens=few)


def test_residual_on_one_rank(together):
    def call(comm, x, idx, odd):
        sent = comm.dispatch(x, idx)
        comm.combine(sent.x, sent.route, residual=x if odd else None)

    disagree(together, "only one of them passed a residual", call, latency_max_tokens=None)


def weighted(started, weights):
    return started._replace(arguments=started.arguments._replace(recv_weights=weights))


@pytest.mark.parametrize("few", [0, None])
@pytest.mark.parametrize("kind", ["dispatch", "dynamic", "combine", "planned", "gathered", "start", "wait"])
def test_rejections_reach_everybody(kind, few, together):
    """When one rank rejects an operation, it ends on all ranks at once with the reason, and they can go on."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    config = {**CONFIG, "latency_max_tokens": few, "symmetric_rows": 1024 * dist.get_world_size() + 1}
    with ep_ops.Communicator(timeout=60.0, **config) as comm:
        comm.warmup()
        x, idx = inputs(comm.rank)
        sent = comm.dispatch(x, idx)
        y = comm.empty_rows(sent.x.shape[0]).copy_(sent.x)
        off = comm.empty_rows(sent.x.shape[0] + 1)[1:]
        wrong = comm.rank == 0  # which has experts, however many ranks there are
        calls = {
            "dispatch": lambda: comm.dispatch(x[1:] if wrong else x, idx),
            "dynamic": lambda: comm.dispatch(x[1:] if wrong else x, idx, exact=True),
            "combine": lambda: comm.combine(sent.x.float() if wrong else sent.x, sent.route),
            "planned": lambda: comm.dispatch_planned(x, sent.route._replace(num_rows=-1) if wrong else sent.route),
            "gathered": lambda: comm.combine_gathered(off if wrong else y, sent.route),
            "start": lambda: comm.dispatch_wait(comm.dispatch_start(x[1:] if wrong else x, idx)),
            "wait": lambda: comm.combine_wait(
                weighted(comm.combine_start(sent.x, sent.route), x[0] if wrong else None)
            ),
        }
        texts = {
            "dispatch": "x has shape", "dynamic": "x has shape", "combine": "y has dtype", "planned": "num_rows is -1",
            "gathered": "y lies in symmetric memory", "start": "x has shape", "wait": "recv_weights has dtype",
        }  # fmt: skip
        for _ in range(3):
            rejection = None
            if wrong:
                with pytest.raises((TypeError, ValueError), match=texts[kind]):
                    calls[kind]()
            else:
                try:
                    calls[kind]()
                except ValueError as told:  # a wait may have seen it
                    rejection = str(told)
            torch.cuda.synchronize()
            with together():
                try:
                    comm.check_errors()
                except ValueError as told:
                    rejection = str(told)
                if wrong:
                    assert rejection is None
                elif kind != "wait" or rejection is not None:  # what a start has begun may have ended
                    assert rejection is not None and f"rejected by rank 0: {texts[kind]}" in rejection
            again = comm.dispatch(x, idx)  # usable again
            out = comm.combine(again.x, again.route)
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                assert torch.equal(out, 2 * x)


def test_destroy_gives_memory_back(together):
    """At once, not when Python's collector comes by: that may be during a capture, where it may not be."""
    config = dict(CONFIG, hidden_size=4096, max_tokens_per_rank=4096)
    gc.disable()
    try:
        free = []
        for _ in range(3):
            ep_ops.Communicator(**config).destroy()
            if dist.is_initialized():
                dist.barrier()  # a rank's memory is given back when its peers, too, have let go of it
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
    finally:
        gc.enable()
    with together():
        if SHARING == 1:
            assert free[0] - free[2] < 2**26, free


def test_compile_during_capture(together, monkeypatch):
    config = dict(CONFIG, hidden_size=88)
    monkeypatch.setenv("EP_OPS_CACHE_DIR", "")
    with ep_ops.Communicator(**config) as comm:
        idx = inputs(comm.rank)[1]
        graph = torch.cuda.CUDAGraph()
        with together():
            with pytest.raises(jit.CompileDuringCapture, match="warmup"):
                with torch.cuda.graph(graph):
                    comm.plan(idx)
