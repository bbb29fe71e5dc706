"""Kernels across NVLink domains that are declared, over both wires, to the bits of the reference backend.

`torchrun --nproc-per-node 4 -m pytest tests/gpu/test_domains.py`; the wire `nvshmem` needs an extra (docs/domains.md).
Ranks may share a GPU. `tests/gpu/precompile.py domains4` compiles the kernels before, on all cores.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from operators import Call, compare, make_comm, ranks, run_all
from sharing import SHARING, few_processes, fewer
from test_throughput import inputs
from torch import Tensor

import ep_ops
from ep_ops import backends
from ep_ops.symmetric import nvshmem

HIDDEN, TOP_K, TOKENS = 1032, 3, 200
"""Rows of an odd number of vectors, several batches of them."""
STEPS = int(os.environ.get("EP_OPS_TEST_STEPS", fewer(300, 8)))
ROUTES = ("random", "all_to_one_rank", "no_tokens_on_last_rank", "over_capacity", "nothing_to_last_rank", "padded")
"""Routes that one communicator can take."""

FORMAT_HIDDEN = 1152
FORMATS = (("e4m3/128/pow2", "columns"), ("wire:e4m3/32/mx", ""))
"""Of rows, with the layout of their scales."""

Over = tuple[int, str]
"""Ranks of each domain, and the wire between them."""


def overs(world_size: int) -> list[Over]:
    """All that there are for so many ranks."""
    sizes = [size for size in range(1, world_size) if world_size % size == 0]
    return [(size, wire) for size in sizes for wire in ("nvlink", "nvshmem")]


def config(world_size: int) -> dict[str, Any]:
    """Of every communicator here, so that all have the same kernels."""
    return dict(num_experts=4 * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS)


Make = Callable[..., ep_ops.Communicator]


@pytest.fixture(params=overs(int(os.environ.get("WORLD_SIZE", 1))), ids=lambda over: f"{over[0]}-{over[1]}")
def make(request, monkeypatch) -> Make:
    """make(backend, name, **more): a communicator of domains of so many ranks, over that wire. Skips on all ranks
    alike, which were started in one environment."""
    size, wire = request.param
    if wire == "nvshmem":
        if why := nvshmem.problem() or backends.no_device_library():
            pytest.skip(f"needs NVSHMEM: {why}")
        if SHARING > 1:
            os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("EP_OPS_WIRE", wire)

    def made(backend: str, name: str, **more: Any) -> ep_ops.Communicator:
        comm = make_comm(backend, f"domains {name}", domain_size=size, **{**config(ranks()[1]), **more})
        assert comm.backend.name == backend and len(comm.domains) == comm.world_size // size
        assert backend == "reference" or comm.config.wire == wire
        return comm

    return made


# ---------------------------------------------------------------------- every operator


@contextlib.contextmanager
def both(make: Make, **more: Any) -> Iterator[tuple[ep_ops.Communicator, ep_ops.Communicator]]:
    with make("cute", "both", **more) as comm, make("reference", "both", **more) as ref:
        yield comm, ref


def check(make: Make, together: Any, call: Call, seed: int) -> None:
    given = inputs(seed, call.topk_idx.shape[0], HIDDEN, TOP_K, call.capacity, torch.bfloat16)
    with both(make, alignment=call.alignment) as (comm, ref):
        got = run_all(comm, call, *given)
        torch.cuda.synchronize()
        comm.check_errors()
        expected = run_all(ref, call, *given)
        with together():
            compare(got, expected, call)


@pytest.mark.parametrize("name", ROUTES)
def test_every_operator(name, make, seed, together):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    check(make, together, call, seed)


def drawn(seed: int, step: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh tokens of this rank: x, topk_idx (a tenth -1, skewed from step to step), topk_weights."""
    rank, world_size = ranks()
    gen = torch.Generator(device="cuda").manual_seed(seed + 7919 * step + rank)
    x = torch.randn(tokens, HIDDEN, generator=gen, device="cuda").bfloat16()
    scores = torch.rand(tokens, 4 * world_size, generator=gen, device="cuda")
    scores[:, : step % (4 * world_size)] *= 0.5
    idx = scores.argsort(1)[:, :TOP_K].int()
    idx[torch.rand(idx.shape, generator=gen, device="cuda") < 0.1] = -1
    return x, idx, torch.rand(idx.shape, generator=gen, device="cuda")


@pytest.mark.parametrize("tokens", ["many", "unequal", "none", "nowhere"])
def test_tokens(tokens, make, seed, together):
    """As many as there may be, another number on each rank, none at all, and none that names an expert."""
    rank, world_size = ranks()
    count = {"many": TOKENS, "unequal": TOKENS * (rank + 1) // world_size - rank, "none": 0, "nowhere": 50}[tokens]
    idx = drawn(seed, 3, count)[1]
    if tokens == "nowhere":
        idx.fill_(-1)
    capacity = (TOKENS * world_size * TOP_K + 4 * 16) // 16 * 16
    check(make, together, Call(idx, capacity, 16, 0, TOKENS), seed)


def test_gathered(make, seed, together):
    """Rows are copied where nobody can fetch them; what is asked of them stays the same."""
    x, idx, _ = drawn(seed, 1, TOKENS)
    rows = TOKENS * ranks()[1] * TOP_K
    outs = []
    with both(make, symmetric_rows=rows) as pair:
        for comm in pair:
            route, _ = comm.plan(idx, capacity=rows // 16 * 16)
            y = comm.dispatch_planned(x, route)[0]
            held = torch.arange(y.shape[0], device="cuda") < route.offs[-1]
            y = torch.where(held[:, None], y * 3, 0)
            outs.append(comm.combine_gathered(comm.empty_rows(y.shape[0]).copy_(y), route))
        torch.cuda.synchronize()
        with together():
            assert torch.equal(*outs)


# ---------------------------------------------------------------------- many steps


def added(comm: ep_ops.Communicator, rows: Tensor, idx: Tensor, residual: Tensor | None = None) -> Tensor:
    """What a combine makes of a row for each (token, k), float32 `rows` [T, K, H], in plain PyTorch on this rank
    alone, to the bit: domain by domain, rank by rank, k by k."""
    holder = idx.div(4, rounding_mode="floor")  # below 0 where there is none
    total = rows.new_zeros(idx.shape[0], HIDDEN)
    for domain in comm.domains:
        of_domain = torch.zeros_like(total)
        for rank in domain:
            of_rank = torch.zeros_like(total)
            for k in range(TOP_K):
                of_rank = of_rank + torch.where((holder[:, k] == rank)[:, None], rows[:, k], 0.0)
            of_domain = of_domain + of_rank.bfloat16().float()
        total = total + (of_domain if comm.rank in domain else of_domain.bfloat16().float())
    return (total if residual is None else total + residual.float()).bfloat16()


def expected(
    comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """combine(dispatch(x)), to the bit."""
    scale = torch.ones(idx.shape, device=idx.device) if weights is None else weights
    return added(comm, x.float()[:, None] * scale[..., None], idx, residual)


def wrong(out: Tensor, want: Tensor) -> Tensor:
    return (out != want).sum() + out.isnan().sum()


def wrong_gradients(
    comm: ep_ops.Communicator, grads: tuple[Tensor, ...], x: Tensor, idx: Tensor, weights: Tensor, grad_out: Tensor
) -> Tensor:
    """How many elements of the gradients of x (to the bit) and of the weights (sums in any order) are wrong."""
    rows = (grad_out.float()[:, None] * weights[..., None]).bfloat16().float()
    dots = (x.float() * grad_out.float()).sum(1, keepdim=True)
    near = (grads[1] - torch.where(idx >= 0, dots, 0.0)).abs() < 1e-2
    return wrong(grads[0], added(comm, rows, idx)) + (~near).sum()


def test_steps(make, seed, together):
    """Back to back, without a host synchronisation; tokens and their bound change from step to step."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    host = torch.Generator().manual_seed(seed + ranks()[0])
    with make("cute", "steps") as comm:
        for step in range(STEPS):
            bound = 9 if step % 3 == 2 else TOKENS
            x, idx, scale = drawn(seed, step, int(torch.randint(0, bound + 1, (), generator=host)))
            weights = scale if step % 2 else None
            residual = x.flip(0) if step % 7 == 3 else None
            sent = comm.dispatch(x, idx, weights, max_tokens=bound)
            out = comm.combine(sent.x, sent.route, sent.weights, residual=residual)
            bad += wrong(out, expected(comm, x, idx, weights, residual)) + sent.dropped.sum()
            if step % 5 == 0:
                again, _ = comm.dispatch_planned(x, sent.route)
                bad += wrong(comm.combine(again, sent.route), expected(comm, x, idx, None))
            if step % 5 == 2:
                leaf, leaf_weights = x.detach().requires_grad_(), scale.detach().requires_grad_()
                sent = comm.dispatch(leaf, idx, leaf_weights, max_tokens=bound)
                out = comm.combine(sent.x, sent.route, sent.weights)
                grads = torch.autograd.grad(out, (leaf, leaf_weights), x.flip(0))
                bad += wrong_gradients(comm, grads, x, idx, scale, x.flip(0))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0


def test_captured(make, seed, together):
    """One graph of a forward and a backward pass, replayed on other inputs than were captured."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make("cute", "captured") as comm:
        comm.warmup()
        x, idx, weights = drawn(seed, 0, TOKENS)

        def step() -> tuple[Tensor, ...]:
            leaf, scale = x.detach().requires_grad_(), weights.detach().requires_grad_()
            sent = comm.dispatch(leaf, idx, scale)
            out = comm.combine(sent.x, sent.route, sent.weights)
            return (out, *torch.autograd.grad(out, (leaf, scale), x))

        step()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out, *grads = step()
        for number in range(1, 1 + fewer(40, 4)):
            for kept, fresh in zip((x, idx, weights), drawn(seed, number, TOKENS), strict=True):
                kept.copy_(fresh)
            graph.replay()
            bad += wrong(out, expected(comm, x, idx, weights))
            bad += wrong_gradients(comm, tuple(grads), x, idx, weights, x)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0
        del graph


def layer(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    sent = comm.dispatch(x, idx, weights, max_tokens=TOKENS)
    row = torch.arange(sent.x.shape[0], device="cuda")
    covered = torch.where((row < sent.route.offs[-1])[:, None], sent.x, 0)
    return comm.combine(covered * 2, sent.route, sent.weights, residual=x)


def step_of(layer: Callable[..., Tensor], comm: ep_ops.Communicator, seed: int) -> list[Tensor]:
    x, idx, weights = drawn(seed, 5, TOKENS - 7 * comm.rank)
    x.requires_grad_(), weights.requires_grad_()
    out = layer(comm, x, idx, weights)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weights))]


@few_processes
def test_compiled(make, seed, together):
    with make("cute", "compiled") as comm:
        got, want = (step_of(run, comm, seed) for run in (torch.compile(layer, fullgraph=True), layer))
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
        torch.compiler.reset()


def test_checked(make, seed, together, monkeypatch):
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    with make("cute", "checked") as comm:
        with together():
            step_of(layer, comm, seed)


# ---------------------------------------------------------------------- failures


def test_what_one_rank_refuses(make, seed, together):
    """All are told, and go on."""
    with make("cute", "refused") as comm:
        x, idx, weights = drawn(seed, 1, 50)
        for _ in range(2):
            with together():
                if comm.rank == 0:
                    with pytest.raises(TypeError, match="x has dtype"):
                        comm.dispatch(x.float(), idx, weights)
                else:
                    comm.dispatch(x, idx, weights)
                    torch.cuda.synchronize()
                    with pytest.raises(ValueError, match="refused by rank 0: x has dtype"):
                        comm.check_errors()
            sent = comm.dispatch(x, idx, weights)
            out = comm.combine(sent.x, sent.route, sent.weights)
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                assert int(wrong(out, expected(comm, x, idx, weights))) == 0


def test_what_no_kernel_takes(make, seed, together):
    """Is refused before anything is sent."""
    with make("cute", "untaken") as comm:
        x, idx, _ = drawn(seed, 1, 8)
        with together():
            with pytest.raises(ValueError, match="has no kernel for them across NVLink domains"):
                comm.dispatch_tokens(x, idx)
        torch.cuda.synchronize()
        with contextlib.suppress(ValueError):  # every rank was told by the others, too
            comm.check_errors()


@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way[0])
def test_formats(way, make, seed, monkeypatch):
    """Rows that are quantised on the way; the checking mode raises the first difference from the reference."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    name, layout = way
    with make("cute", "formats", hidden_size=FORMAT_HIDDEN) as comm:
        for step, tokens in enumerate((TOKENS, 3 + comm.rank, 0)):
            idx = drawn(seed, step, tokens)[1]
            x = torch.randn(tokens, FORMAT_HIDDEN, device="cuda").mul(10.0 ** (step - 2)).bfloat16()
            weights = torch.rand(idx.shape, device="cuda")
            sent = comm.dispatch(x, idx, weights, format=name, scales_as=layout)
            comm.dispatch_planned(x, sent.route, weights, format=name, scales_as=layout)
            torch.cuda.synchronize()
            comm.check_errors()


def test_absent_rank(make, seed, together):
    """A rank that does not come is named by all, within the deadline, in its own domain and in others; destroy does not
    hang."""
    seconds = 2.0 * SHARING
    x, idx, _ = drawn(seed, 1, 30)
    comm = make("cute", "absent", timeout=seconds)
    comm.warmup()
    absent = comm.world_size - 1
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.monotonic()
    if comm.rank != absent:
        sent = comm.dispatch(x, idx)
        comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
    with together():
        if comm.rank != absent:
            assert time.monotonic() - begun < 10 * seconds
            with pytest.raises(RuntimeError, match=rf"s for rank {absent} ") as told:
                comm.check_errors()
            assert f"rank {comm.rank}, last first: " in str(told.value)
    if comm.rank == absent:
        end = time.monotonic() + 10 * seconds
        while not comm.backend.has_failed() and time.monotonic() < end:
            comm.backend.listen()
            time.sleep(0.01)
    begun = time.monotonic()
    with together():
        if comm.rank == absent:
            with pytest.raises(RuntimeError, match=rf"was told that rank . waited .* s for rank {absent} "):
                comm.destroy()
        else:
            comm.destroy()
        assert time.monotonic() - begun < seconds
