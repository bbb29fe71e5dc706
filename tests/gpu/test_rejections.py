"""A call that one rank rejects, or cannot run, ends on all ranks at once with its reason, and leaves them in step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharing import TURNS, own_gpu

import ep_ops
from ep_ops.symmetric import torch_symm

HIDDEN, EXPERTS, TOKENS = 64, 8, 32
SIZES: dict[str, Any] = dict(num_experts=EXPERTS, hidden_size=HIDDEN, top_k=2, max_tokens_per_rank=512)


@pytest.fixture(autouse=True)
def several() -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")


def make(name: str, **others: Any) -> Any:
    """With all kernels compiled and loaded."""
    comm = ep_ops.Communicator(**{**SIZES, "backend": "cute", "timeout": 30.0 * TURNS, "name": name, **others})
    comm.warmup()
    return comm


def tokens(value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(dist.get_rank())
    x = torch.full((TOKENS, HIDDEN), value, device="cuda", dtype=torch.bfloat16)
    return x, torch.rand(TOKENS, EXPERTS, generator=gen, device="cuda").topk(2).indices.int()


def in_step(comm: ep_ops.Communicator, together: Any, **sizes: Any) -> None:
    """The next steps are as any others."""
    for step in range(3):
        x, idx = tokens(float(step + 1))
        sent = comm.dispatch(x, idx, **sizes)
        out = comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
        counts = sent.route.counts.sum()
        comm.check_errors()
        total = [None] * dist.get_world_size()
        dist.all_gather_object(total, int(counts))
        with together():
            assert sum(total) == 2 * TOKENS * len(total), (step, total)  # type: ignore[arg-type]
            assert torch.equal(out, 2 * x), step


def raised(call: Callable[[], Any], comm: ep_ops.Communicator) -> tuple[BaseException | None, float]:
    """Return what the call raises, or a check behind it, and after how many seconds."""
    start, error = time.monotonic(), None
    try:
        call()
        torch.cuda.synchronize()
        comm.check_errors()
    except (RuntimeError, ValueError) as caught:
        error = caught
    return error, time.monotonic() - start


def test_max_tokens_beyond_the_most(together):
    """A rejected call with a wrong max_tokens takes as many operations as the others' call does."""
    with make("beyond", latency_max_tokens=0) as comm:
        x, idx = tokens()
        wrong = comm.rank == 0
        error, _ = raised(lambda: comm.dispatch(x, idx, max_tokens=2000 if wrong else 512), comm)
        with together():
            assert isinstance(error, ValueError) and "max_tokens" in str(error), error
            assert wrong or "rejected by rank 0" in str(error), error
        in_step(comm, together, max_tokens=512)


def test_no_memory_between_the_halves_of_a_dynamic_dispatch(monkeypatch, together):
    """The rank that has most rows has no room for them."""
    with make("halves") as comm:
        x, idx = tokens()
        comm.dispatch(x, idx, exact=True)
        with monkeypatch.context() as patch:
            if comm.rank == 0:
                patch.setattr(comm.backend.throughput, "along", failing)
            error, seconds = raised(lambda: comm.dispatch(x, idx, exact=True), comm)
        with together():
            assert error is not None and "OutOfMemoryError: injected" in f"{type(error).__name__}: {error}", error
            assert seconds < 15 * TURNS, seconds
        in_step(comm, together)


def failing(*args: Any, **values: Any) -> Any:
    # A new one each time: its traceback would keep the frames of the call, and their memory, until Python exits.
    raise torch.OutOfMemoryError("injected")


def without(comm: Any, name: str, launched: bool) -> Callable[..., Any]:
    """How kernels are found where that one cannot be loaded, or, if it is `launched`, fails of that."""
    get = comm.backend.throughput._kernel

    def found(kernel: Any, **variant: Any) -> Any:
        if kernel.__name__ != name:
            return get(kernel, **variant)
        return (lambda terms, **numbers: failing) if launched else failing()

    return found


def test_a_kernel_that_cannot_be_loaded(monkeypatch, together):
    """Nothing was launched: the operation ends on all ranks, and the communicator goes on."""
    with make("loads", latency_max_tokens=0) as comm:
        x, idx = tokens()
        with monkeypatch.context() as patch:
            if comm.rank == 0:
                patch.setattr(comm.backend.throughput, "_kernel", without(comm, "Pull", launched=False))
            error, seconds = raised(lambda: comm.dispatch(x, idx), comm)
        with together():
            assert error is not None and "injected" in str(error) and seconds < 15 * TURNS, (error, seconds)
            assert comm.rank == 0 or "rejected by rank 0: ep::dispatch: OutOfMemoryError" in str(error), error
        in_step(comm, together)


def test_half_an_operation(monkeypatch, together):
    """The first kernel runs, the second is never launched: no rank takes rows of that operation for those of another
    one, and all raise the reason at once."""
    comm = make("half", latency_max_tokens=0)
    x, idx = tokens()
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(comm.backend.throughput, "_kernel", without(comm, "Pull", launched=True))
            with pytest.raises(torch.OutOfMemoryError, match="injected"):
                comm.dispatch(x, idx)

    def steps() -> None:
        for _ in range(3):
            comm.dispatch(x, idx)
            torch.cuda.synchronize()

    error, seconds = raised(steps, comm)
    with together():
        assert isinstance(error, RuntimeError) and seconds < 15 * TURNS, (error, seconds)
        said = "cannot launch the rest: ep::dispatch: OutOfMemoryError: injected"
        assert said in str(error) and (comm.rank == 0 or "stopped because rank 0 gave up" in str(error)), error
    comm.destroy()


def test_a_host_that_runs_ahead(together):
    """A host that runs ahead learns of a rejection some calls later. That call counts as well: whoever skips a call,
    and no more, has the rows of the same step as all others."""
    with make("ahead", latency_max_tokens=0) as comm:
        kept: list[tuple[int, Any]] = []
        skipped: list[int] = []
        for step in range(12):
            x, idx = tokens(float(step + 1))
            if comm.rank != 0:
                torch.cuda._sleep(3 * 10**6)
            try:
                kept.append((step, comm.dispatch(x[1:] if (comm.rank, step) == (0, 3) else x, idx)))
            except ValueError:
                skipped.append(step)
            if step == 6:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        with contextlib.suppress(ValueError):
            comm.check_errors()
        with together():
            assert len(skipped) == 1 and (comm.rank > 0 or skipped == [3]), skipped
            for step, sent in kept:
                if step == 3:  # nothing was placed
                    continue
                rows = sent.x[: int(sent.route.offs[-1]), 0]
                assert set(rows.tolist()) <= {0.0, float(step + 1)}, step
        in_step(comm, together)


def test_a_start_in_a_capture_that_fails(together):
    """Nothing of it runs, so the next start does not receive it."""
    with make("captured") as comm:
        x, idx = tokens()
        graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        with contextlib.suppress(KeyError, RuntimeError):
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                comm.dispatch_start(x, idx, max_tokens=TOKENS, capacity=2048, flight=0)
                raise KeyError("the user's code fails while it is captured")
        # Where ending the capture raises, torch leaves its stream, and its pool, which aborts the process at its exit.
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch.cuda.synchronize()
        sent = comm.dispatch_wait(comm.dispatch_start(x, idx, max_tokens=400, flight=1))
        out = comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert torch.equal(out, 2 * x)
        del graph


def test_a_start_outside_of_a_capture(together):
    """A start outside of a capture is received by its own wait, not in the capture of another start."""
    with make("outside") as comm:
        x, idx = tokens()
        started = comm.dispatch_start(x, idx, max_tokens=TOKENS, flight=0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            again = comm.dispatch_wait(comm.dispatch_start(x, idx, max_tokens=400, flight=1))
        sent = comm.dispatch_wait(started)
        out = comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert torch.equal(out, 2 * x)
        graph.replay()
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(again.route.counts.sum()) > 0 or comm.num_local_experts == 0
        del graph


def test_a_bad_id_that_is_heard_of_in_a_capture(together):
    """A capture goes on, the call after it raises, and others are reported after it, too."""
    with make("silenced") as comm:
        x, idx = tokens()
        bad = idx.clone()
        bad[3, 1] = 99
        comm.dispatch(x, bad, max_tokens=TOKENS)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            comm.dispatch(x, idx, max_tokens=TOKENS)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="topk_idx holds 99"):
            comm.dispatch(x, idx, max_tokens=TOKENS)
        comm.dispatch(x, idx, max_tokens=TOKENS)
        torch.cuda.synchronize()
        comm.check_errors()
        comm.dispatch(x, bad, max_tokens=TOKENS)
        torch.cuda.synchronize()
        with together():
            with pytest.raises(ValueError, match="topk_idx holds 99"):
                comm.check_errors()
        del graph


def test_no_memory_when_a_communicator_is_made(monkeypatch, together):
    with monkeypatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(torch_symm.symm_mem, "empty", failing)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="injected"):
            ep_ops.Communicator(**SIZES, backend="cute")
        seconds = time.monotonic() - start
    with together():
        assert seconds < 15 * TURNS, seconds
    with make("afterwards") as comm:
        in_step(comm, together)


@own_gpu
def test_communicators_in_different_orders(together):
    """Communicators in different orders on one stream of each rank wait for each other until the deadline; the text
    names both."""
    pair = [make(name, timeout=3.0, latency_max_tokens=0) for name in ("order a", "order b")]
    x, idx = tokens()
    dist.barrier()
    torch.cuda.synchronize()
    for comm in pair if dist.get_rank() == 0 else reversed(pair):
        comm.dispatch(x, idx)
    torch.cuda.synchronize()
    texts = []
    for comm in pair:
        try:
            comm.check_errors()
        except RuntimeError as error:
            texts.append(str(error))
    with together():
        assert any("'order a'" in text and "'order b'" in text for text in texts), texts
    for comm in pair:
        with contextlib.suppress(RuntimeError):
            comm.destroy()
