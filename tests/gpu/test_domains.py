"""Kernels across NVLink domains that are declared, over all wires, to the bits of the reference backend: stores,
NVSHMEM, and an adversary that delivers late, in pieces and in any order (adversary.py).

`torchrun --nproc-per-node 4 -m pytest tests/gpu/test_domains.py`; the wire `nvshmem` needs an extra (docs/domains.md).
Ranks may share a GPU. `tests/gpu/precompile.py domains4` compiles the kernels before, on all cores.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import adversary
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
from ep_ops.backends.cute.memory import round_tokens
from ep_ops.symmetric import nvshmem

HIDDEN, TOP_K, TOKENS = 1032, 3, 200
"""Rows of an odd number of vectors, several batches of them."""
STEPS = int(os.environ.get("EP_OPS_TEST_STEPS", fewer(300, 8)))
SOAK = int(os.environ.get("EP_OPS_TEST_SOAK", 500 if SHARING < 3 else 20))
FEW = 9
ROUTES = ("random", "all_to_one_rank", "no_tokens_on_last_rank", "over_capacity", "nothing_to_last_rank", "padded")
"""Routes that one communicator can take."""

FORMAT_HIDDEN = 1152
FORMATS = (("e4m3/128/pow2", "columns"), ("wire:e4m3/32/mx", ""))
"""Of rows, with the layout of their scales."""

Formats = Sequence[tuple[str, str]]
Over = tuple[int, str]
"""Ranks of each domain, and the wire between them."""


def overs(world_size: int) -> list[Over]:
    """All that there are for so many ranks."""
    sizes = [size for size in range(1, world_size) if world_size % size == 0]
    return [(size, wire) for size in sizes for wire in ("nvlink", "nvshmem", "adversary")]


def config(world_size: int) -> dict[str, Any]:
    """Of every communicator here, so that all have the same kernels."""
    return dict(num_experts=4 * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS)


def half_of_the_memory(world_size: int, size: int | None) -> int:
    """Bytes of symmetric memory in which calls of TOKENS go in rounds; `size`: ranks of each domain, None: of one."""
    plan = ep_ops.memory_plan(world_size=world_size, domain_size=size, latency_max_tokens=0, **config(world_size))
    return sum(nbytes for purpose, nbytes in plan.items() if purpose.startswith("symmetric")) // 2


Make = Callable[..., ep_ops.Communicator]
in_rounds = pytest.mark.parametrize("half", [False, True], ids=["whole", "rounds"])
"""Whether a communicator has half of the memory. `-k rounds` runs what goes in rounds."""


@pytest.fixture(params=overs(int(os.environ.get("WORLD_SIZE", 1))), ids=lambda over: f"{over[0]}-{over[1]}")
def make(request, monkeypatch) -> Make:
    """make(backend, name, half, formats=(), **more): a communicator of domains of so many ranks, over that wire, which
    will send rows in these formats, if any are named, and no others. Skips on all ranks alike."""
    size, wire = request.param
    if wire == "nvshmem":
        if why := nvshmem.problem() or backends.no_device_library():
            pytest.skip(f"needs NVSHMEM: {why}")
        if SHARING > 1:
            os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("EP_OPS_WIRE", wire)
    if wire == "adversary":
        adversary.install(monkeypatch.setattr)

    def made(backend: str, name: str, half: bool = False, formats: Formats = (), **more: Any) -> ep_ops.Communicator:
        if half and more.get("latency_max_tokens"):
            pytest.skip("latency kernels take what they take at a time")
        if half and backend == "cute":
            more["staging_bytes"] = half_of_the_memory(ranks()[1], size)
        comm = make_comm(backend, f"domains {name}", domain_size=size, **{**config(ranks()[1]), **more})
        assert comm.backend.name == backend and len(comm.domains) == comm.world_size // size
        assert backend == "reference" or comm.config.wire == wire
        assert comm.config.bundle == os.environ.get("EP_OPS_BUNDLE", comm.config.bundle)
        assert backend == "reference" or not half or round_tokens(comm.config) < TOKENS
        if backend == "cute" and wire == "adversary":
            if not formats:
                comm.warmup()
            for format, layout in formats:
                x = torch.empty(0, comm.hidden_size, dtype=comm.dtype, device="cuda")
                idx = torch.empty(0, TOP_K, dtype=torch.int32, device="cuda")
                send(comm, x, idx, idx.float(), format, layout)
            refuse(comm)
            adversary.wake(comm)
        return comm

    return made


def refuse(comm: ep_ops.Communicator) -> None:
    """A call that all ranks refuse: it launches the kernel that tells others of it, which no warm-up does."""
    idx = torch.empty(0, TOP_K, dtype=torch.int32, device="cuda")
    with pytest.raises(TypeError, match="x has dtype"):
        comm.dispatch(torch.empty(0, comm.hidden_size, device="cuda"), idx, idx.float())
    torch.cuda.synchronize()
    with contextlib.suppress(ValueError):  # another rank's refusal
        comm.check_errors()
    comm.check_errors()


# ---------------------------------------------------------------------- every operator


@pytest.fixture(params=[(0, "0"), (TOKENS, "0"), (TOKENS, "1")], ids=["throughput", "latency", "bundled"])
def few(request, monkeypatch) -> int:
    """The bound of the latency kernels: none of the calls here, or all that they take, whose rows for one rank are then
    put one by one, or together."""
    tokens, bundle = request.param
    monkeypatch.setenv("EP_OPS_BUNDLE", bundle)
    return tokens


@contextlib.contextmanager
def both(make: Make, **more: Any) -> Iterator[tuple[ep_ops.Communicator, ep_ops.Communicator]]:
    with make("cute", "both", **more) as comm, make("reference", "both", **more) as ref:
        yield comm, ref


def check(make: Make, few: int, together: Any, call: Call, seed: int, half: bool = False) -> None:
    given = inputs(seed, call.topk_idx.shape[0], HIDDEN, TOP_K, call.capacity, torch.bfloat16)
    with both(make, half=half, alignment=call.alignment, latency_max_tokens=few) as (comm, ref):
        got = run_all(comm, call, *given)
        torch.cuda.synchronize()
        comm.check_errors()
        expected = run_all(ref, call, *given)
        with together():
            compare(got, expected, call)


@pytest.mark.parametrize("name", ROUTES)
def test_every_operator(name, make, few, seed, together):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    check(make, few, together, call, seed)


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
def test_tokens(tokens, make, few, seed, together):
    """As many as there may be, another number on each rank, none at all, and none that names an expert."""
    rank, world_size = ranks()
    count = {"many": TOKENS, "unequal": TOKENS * (rank + 1) // world_size - rank, "none": 0, "nowhere": 50}[tokens]
    idx = drawn(seed, 3, count)[1]
    if tokens == "nowhere":
        idx.fill_(-1)
    capacity = (TOKENS * world_size * TOP_K + 4 * 16) // 16 * 16
    check(make, few, together, Call(idx, capacity, 16, 0, TOKENS), seed)


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
    also where it is refused, and a dynamic dispatch that is refused ends with its plan."""
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
            exact = comm.dispatch_dynamic(x, idx, weights, max_tokens=TOKENS)
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
                (lambda: comm.dispatch_dynamic(x.float() if rank == 0 else x, idx, max_tokens=TOKENS), "x has dtype"),
                (lambda s=sent: comm.combine(s.x.float() if rank == 0 else s.x, s.route), "y has dtype"),
            ):
                with together():
                    if rank == 0:
                        with pytest.raises(TypeError, match=text):
                            call()
                    else:
                        with pytest.raises(ValueError, match=f"refused by rank 0: {text}"):
                            call()
                            torch.cuda.synchronize()
                            comm.check_errors()
                        comm.check_errors()


@in_rounds
def test_gathered(half, make, seed, together):
    """Rows are copied where nobody can fetch them; what is asked of them stays the same."""
    x, idx, _ = drawn(seed, 1, TOKENS)
    rows = TOKENS * ranks()[1] * TOP_K
    outs = []
    with both(make, half=half, symmetric_rows=rows) as pair:
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


@in_rounds
def test_steps(half, make, few, seed, together):
    """Back to back, without a host synchronisation, some of them in two halves; tokens and their bound change from step
    to step."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    host = torch.Generator().manual_seed(seed + ranks()[0])
    with make("cute", "steps", half, latency_max_tokens=few) as comm:
        for step in range(STEPS // 6 if half else STEPS):
            bound = FEW if step % 3 == 2 else TOKENS
            x, idx, scale = drawn(seed, step, int(torch.randint(0, bound + 1, (), generator=host)))
            weights = scale if step % 2 else None
            residual = x.flip(0) if step % 7 == 3 else None
            if step % 4 == 1 and residual is None:
                sent = comm.dispatch_wait(comm.dispatch_start(x, idx, weights, max_tokens=bound))
                out = comm.combine_wait(comm.combine_start(sent.x, sent.route, sent.weights))
            else:
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


@in_rounds
def test_captured(half, make, few, seed, together):
    """One graph of a forward and a backward pass, replayed on other inputs than were captured."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make("cute", "captured", half, latency_max_tokens=few) as comm:
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


def test_soak(make, seed, together):
    """Steps of a graph that draws its tokens itself, so that no host is waited for: forward and backward of many,
    forward of few. Each time other experts are named, by more or less of them, mostly by low or by high ids."""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.manual_seed(seed + ranks()[0])
    with make("cute", "soak") as comm:

        def step(bound: int, backward: bool) -> None:
            x = torch.randn(bound, HIDDEN, device="cuda").bfloat16().requires_grad_()
            lean = torch.linspace(-1, 1, comm.num_experts, device="cuda") * torch.randn((), device="cuda")
            chosen = (torch.rand(bound, comm.num_experts, device="cuda") + lean).argsort(1)[:, :TOP_K].int()
            named = torch.rand(chosen.shape, device="cuda") < 2 * torch.rand((), device="cuda")
            idx, weights = torch.where(named, chosen, -1), torch.rand(chosen.shape, device="cuda").requires_grad_()
            sent = comm.dispatch(x, idx, weights, max_tokens=bound)
            out = comm.combine(sent.x, sent.route, sent.weights)
            bad.add_(wrong(out.detach(), expected(comm, x.detach(), idx, weights.detach())))
            if backward:
                grads = torch.autograd.grad(out, (x, weights), x.detach())
                bad.add_(wrong_gradients(comm, grads, x.detach(), idx, weights.detach(), x.detach()))

        comm.warmup()
        step(TOKENS, True)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step(TOKENS, True)
            step(FEW, False)
        for _ in range(SOAK // 2):
            graph.replay()
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
@in_rounds
def test_compiled(half, make, seed, together):
    with make("cute", "compiled", half) as comm:
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


@in_rounds
def test_what_one_rank_refuses(half, make, few, seed, together):
    """All are told, once, and go on."""
    with make("cute", "refused", half, latency_max_tokens=few) as comm:
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
                    comm.check_errors()
            sent = comm.dispatch(x, idx, weights)
            out = comm.combine(sent.x, sent.route, sent.weights)
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                assert int(wrong(out, expected(comm, x, idx, weights))) == 0


# ---------------------------------------------------------------------- token-major rows


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
            sent = comm.dispatch_tokens(x, idx, weights, capacity=capacity)
            plain = comm.dispatch_tokens(x, idx, capacity=capacity)
            comm.dispatch_tokens_wait(comm.dispatch_tokens_start(x, idx, weights, capacity=capacity))
            exact = comm.dispatch_tokens_dynamic(x, idx, weights)
            for got in (sent, plain, exact):
                along = (*got.route.tensors, *got.route.ints, comm.name)
                comm.dispatch_tokens_planned(x, got.route, weights)
                comm.dispatch_tokens_planned(x, got.route)
                comm.dispatch_planned(x, got.route)
                y = torch.randn(got.x.shape, device="cuda").bfloat16()
                row_weights = torch.randn(got.local_idx.shape, device="cuda")
                torch.ops.ep.dispatch_tokens_backward(y, row_weights, *along)
                torch.ops.ep.dispatch_tokens_backward(y, None, *along)
                torch.ops.ep.dispatch_tokens_backward(None, row_weights, *along)
                comm.combine(y, got.route)
                comm.combine_wait(comm.combine_start(y, got.route))
                comm.combine(y, got.route, residual=x)
        torch.cuda.synchronize()
        comm.check_errors()


def token_layer(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """An expert doubles a row: a rank's rows times the sum of their weights."""
    sent = comm.dispatch_tokens(x, idx, weights, max_tokens=TOKENS)
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
            sent = comm.dispatch_tokens(x, idx, weights)
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


def send(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor, format: str, layout: str) -> None:
    """Rows in a format, expert-grouped and token-major, along a new route and along the same."""
    sent = comm.dispatch(x, idx, weights, format=format, scales_as=layout)
    comm.dispatch_planned(x, sent.route, weights, format=format, scales_as=layout)
    tokens = comm.dispatch_tokens(x, idx, weights, format=format, scales_as=layout)
    comm.dispatch_tokens_planned(x, tokens.route, weights, format=format, scales_as=layout)


@in_rounds
@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way[0])
def test_formats(way, half, make, few, seed, monkeypatch):
    """Rows that are quantised on the way; the checking mode raises the first difference from the reference."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    name, layout = way
    with make("cute", "formats", half, [way], hidden_size=FORMAT_HIDDEN, latency_max_tokens=few) as comm:
        for step, tokens in enumerate((TOKENS, 3 + comm.rank, 0)):
            idx = drawn(seed, step, tokens)[1]
            x = torch.randn(tokens, FORMAT_HIDDEN, device="cuda").mul(10.0 ** (step - 2)).bfloat16()
            weights = torch.rand(idx.shape, device="cuda")
            send(comm, x, idx, weights, name, layout)
            torch.cuda.synchronize()
            comm.check_errors()


def test_absent_rank(make, few, seed, together):
    """A rank that does not come is named by all, within the deadline, in its own domain and in others; destroy does not
    hang."""
    seconds = 2.0 * SHARING
    x, idx, _ = drawn(seed, 1, 30)
    comm = make("cute", "absent", timeout=seconds, latency_max_tokens=few)
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
