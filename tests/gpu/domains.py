"""Communicators of NVLink domains that are declared, over all wires (stores, NVSHMEM, and an adversary that delivers
late, in pieces and in any order: adversary.py), and what they are compared with: the bits of the reference backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import adversary
import pytest
import torch
from operators import Call, compare, make_comm, ranks, run_all
from sharing import SHARING
from test_throughput import inputs
from torch import Tensor

import ep_ops
from ep_ops import backends
from ep_ops.backends.cute.sizing import round_tokens
from ep_ops.formats import COMBINE_FORMATS
from ep_ops.symmetric import nvshmem

HIDDEN, TOP_K, TOKENS = 1032, 3, 200
"""Rows of an odd number of vectors, several batches of them."""
FORMAT_HIDDEN = 1152
FORMATS = (("e4m3/128/pow2", "columns"), ("wire:e4m3/32/mx", ""))
"""Of rows, with the layout of their scales."""

Formats = Sequence[tuple[str, str]]
Over = tuple[int, str]
"""Ranks of each domain, and the wire between them."""
Make = Callable[..., ep_ops.Communicator]
in_rounds = pytest.mark.parametrize("half", [False, True], ids=["whole", "rounds"])
"""Whether a communicator has half of the memory. `-k rounds` runs what goes in rounds."""


def overs(world_size: int) -> list[Over]:
    """All that there are for so many ranks."""
    sizes = [size for size in range(1, world_size) if world_size % size == 0]
    return [(size, wire) for size in sizes for wire in ("nvlink", "nvshmem", "adversary")]


def config(world_size: int) -> dict[str, Any]:
    """Return the options of every communicator here, so that all have the same kernels."""
    return dict(num_experts=4 * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS)


def half_of_the_memory(world_size: int, size: int | None) -> int:
    """Bytes of symmetric memory in which calls of TOKENS go in rounds; `size`: ranks of each domain, None: of one."""
    plan = ep_ops.memory_plan(world_size=world_size, domain_size=size, latency_max_tokens=0, **config(world_size))
    return sum(nbytes for purpose, nbytes in plan.items() if purpose.startswith("symmetric")) // 2


@pytest.fixture(params=overs(int(os.environ.get("WORLD_SIZE", 1))), ids=lambda over: f"{over[0]}-{over[1]}")
def make(request, monkeypatch, seed) -> Make:
    """make(backend, name, half, formats=(), **more): a communicator of domains of so many ranks, over that wire, which
    will send rows in these formats, if any are named, and no others. Skips on all ranks alike. What torch draws in the
    test differs from rank to rank, so that another rank's rows are wrong rows."""
    torch.manual_seed(seed + ranks()[0])
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
            reject(comm)
            adversary.wake(comm)
        return comm

    return made


@pytest.fixture(params=[(0, "0"), (TOKENS, "0"), (TOKENS, "1")], ids=["throughput", "latency", "bundled"])
def few(request, monkeypatch) -> int:
    """The bound of the latency kernels: none of the calls here, or all that they take, whose rows for one rank are then
    put one by one, or together."""
    tokens, bundle = request.param
    monkeypatch.setenv("EP_OPS_BUNDLE", bundle)
    return tokens


def reject(comm: ep_ops.Communicator) -> None:
    """A call that all ranks reject: it launches the kernel that tells others of it, which no warm-up does."""
    idx = torch.empty(0, TOP_K, dtype=torch.int32, device="cuda")
    with pytest.raises(TypeError, match="x has dtype"):
        comm.dispatch(torch.empty(0, comm.hidden_size, device="cuda"), idx, idx.float())
    torch.cuda.synchronize()
    with contextlib.suppress(ValueError):  # another rank's rejection
        comm.check_errors()
    comm.check_errors()


def send(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor, format: str, layout: str) -> None:
    """Rows in a format, expert-grouped and token-major, along a new route and along the same, and sums in it, if they
    can travel so."""
    sent = comm.dispatch(x, idx, weights, format=format, scales_as=layout)
    comm.dispatch_planned(x, sent.route, weights, format=format, scales_as=layout)
    tokens = comm.dispatch(x, idx, weights, format=format, scales_as=layout, layout="token_major")
    comm.dispatch_planned(x, tokens.route, weights, format=format, scales_as=layout)
    if format in COMBINE_FORMATS:
        comm.combine(sent.x, sent.route, sent.weights, residual=x, format=format)
        comm.combine(sent.x, sent.route, format=format)
        comm.combine_wait(comm.combine_start(sent.x, sent.route, sent.weights, format=format))
        comm.combine(tokens.x, tokens.route, format=format)


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


def added(comm: ep_ops.Communicator, rows: Tensor, idx: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the combine of a row for each (token, k), float32 `rows` [T, K, H], in plain PyTorch on this rank alone,
    to the bit: domain by domain, rank by rank, k by k."""
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


def step_of(layer: Callable[..., Tensor], comm: ep_ops.Communicator, seed: int) -> list[Tensor]:
    x, idx, weights = drawn(seed, 5, TOKENS - 7 * comm.rank)
    x.requires_grad_(), weights.requires_grad_()
    out = layer(comm, x, idx, weights)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weights))]
