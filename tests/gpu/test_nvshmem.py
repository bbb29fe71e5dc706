"""NVSHMEM between processes, which may share one GPU: its symmetric memory, and batches of rows over every wire.

`torchrun --nproc-per-node 4 -m pytest tests/gpu/test_nvshmem.py`, with the extra nvshmem-cu12 or nvshmem-cu13.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from operators import ranks
from sharing import SHARING, fewer
from torch import Tensor

import ep_ops
from ep_ops import symmetric
from ep_ops.symmetric import nvshmem

MAX_TOKENS, HIDDEN = 40, 512
STEPS = fewer(100, 10)
KINDS = ("nvlink", "adversary", "nvshmem")


@pytest.fixture(autouse=True)
def usable() -> None:
    """Skips on all ranks alike: they were all started in one environment."""
    if ranks()[1] == 1:
        pytest.skip("needs several ranks")
    if why := nvshmem.problem():
        pytest.skip(f"needs NVSHMEM: {why}")
    if SHARING > 1:
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_memory(device, together):
    """Every rank reads what each has written, in memory that one reaches through NVLink."""
    rank, world_size = ranks()
    with together():
        first = symmetric.allocate(1024, dist.group.WORLD, device, over_domains=True)
        second = symmetric.allocate(4096, dist.group.WORLD, device, over_domains=True)
        assert not first.local.any() and not second.local.any()
        assert first.addresses[rank] == first.local.data_ptr()
        first.local.fill_(1 + rank)
        second.local.fill_(101 + rank)
        torch.cuda.synchronize()
    dist.barrier()
    with together():
        for peer in range(world_size):
            if first.addresses[peer]:
                assert first.read(peer, 1000, 24) == bytes([1 + peer] * 24)
                assert second.read(peer, 4000, 96) == bytes([101 + peer] * 96)
    dist.barrier()
    first.free()
    third = symmetric.allocate(1024, dist.group.WORLD, device, over_domains=True)
    with together():
        assert not third.local.any() and second.local.eq(101 + rank).all()
    third.free()
    second.free()


def test_subgroup_is_refused(device, together):
    rank, world_size = ranks()
    symmetric.allocate(16, dist.group.WORLD, device, over_domains=True).free()
    few = dist.new_group(range(max(2, world_size - 1)))
    if world_size > 2 and rank < world_size - 1:
        with pytest.raises(ValueError, match="a process has one, of the first group"):
            symmetric.allocate(16, few, device, over_domains=True)
    with together():
        pass


# ---------------------------------------------------------------------- batches


class Sent(NamedTuple):
    """A step's inputs of all ranks, the same on all: counts [W, W], x [W, W, max_tokens, H]."""

    counts: Tensor
    x: Tensor

    @staticmethod
    def drawn(world_size: int, seed: int) -> Sent:
        noise = torch.Generator().manual_seed(seed)
        most = (1, 1 + MAX_TOKENS // 3, 1 + MAX_TOKENS)[seed % 3]
        counts = torch.randint(0, most, (world_size, world_size), generator=noise).int()
        x = torch.randn(world_size, world_size, MAX_TOKENS, HIDDEN, generator=noise)
        return Sent(counts, x.to(torch.bfloat16))

    def check(self, rank: int, out: Tensor, came: Tensor) -> None:
        assert torch.equal(came.cpu(), self.counts[:, rank])
        for source, count in enumerate(self.counts[:, rank].tolist()):
            assert torch.equal(out[source, :count].cpu(), self.x[source, rank, :count]), f"rows from rank {source}"


class Wired:
    """A kernel on this rank, in NVSHMEM's memory, over a wire of a kind."""

    def __init__(self, kind: str, device: torch.device, heap: Any, kernel: Any, terms: int) -> None:
        from cute_kernels import sync
        from cute_kernels.heap import EPOCH, STATE_BYTES
        from cute_kernels.internode.courier import Courier

        self.rank, self.world_size = ranks()
        self.memory = symmetric.allocate(heap.nbytes, dist.group.WORLD, device, over_domains=True)
        if kind != "nvshmem" and 0 in self.memory.addresses:
            pytest.skip("needs ranks that map each other's memory")
        self.memory.local[:STATE_BYTES].view(torch.int64)[EPOCH] = 1
        self.report = torch.zeros(4 * sync.REPORT_WORDS, dtype=torch.int64, pin_memory=True)
        self.side, self.epoch = torch.cuda.Stream(device), 0
        self.ranks = (
            self.memory.table.data_ptr(), self.memory.addresses[self.rank], self.rank, self.report.data_ptr(),
            int(20e9 * SHARING), terms,
        )  # fmt: skip
        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}a"
        self.run = loaded(kernel, arch)
        adversary = kind == "adversary"
        self.courier = loaded(Courier(heap.problem, heap, kernel.wire.depth), arch) if adversary else None
        if (
            self.courier is not None
        ):  # of an operation that has ended: loading it while a kernel waits for it would hang
            self.courier(*self.ranks, 0, 0, 2, self.side.cuda_stream)
        torch.cuda.synchronize()
        dist.barrier()

    def launch(self, seed: int, tensors: tuple[Tensor, ...], *numbers: int) -> None:
        """One operation."""
        self.epoch += 1
        addresses = (tensor.data_ptr() for tensor in tensors)
        self.run(*self.ranks, *addresses, *numbers, torch.cuda.current_stream().cuda_stream)
        if self.courier is not None:
            self.courier(*self.ranks, self.epoch, seed % 2**30, 2, self.side.cuda_stream)

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.memory.free()


def wire_of(kind: str, depth: int) -> Any:
    from cute_kernels.internode import wire

    if kind == "nvlink":
        return wire.Nvlink()
    if kind == "adversary":
        return wire.Adversary(depth)
    library = wire.find_library()
    if library is None:
        pytest.skip("needs NVSHMEM's device library")
    return wire.Nvshmem(library)


class Batched(Wired):
    """The kernel of tests/batches.py."""

    def __init__(self, kind: str, device: torch.device) -> None:
        from batches import Batches, BatchHeap

        from cute_kernels import marks
        from cute_kernels.heap import Problem

        world_size = ranks()[1]
        problem = Problem(world_size, (1,) * world_size, 1, HIDDEN, "bf16", MAX_TOKENS)
        heap = BatchHeap(problem)
        kernel = Batches(problem, wire_of(kind, heap.depth))
        super().__init__(kind, device, heap, kernel, marks.pack("dispatch", MAX_TOKENS))

    def step(self, x: Tensor, counts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Launches; out [W, max_tokens, H] and came [W]."""
        out = torch.full((self.world_size, MAX_TOKENS, HIDDEN), torch.nan, dtype=x.dtype, device=x.device)
        came = torch.full((self.world_size,), -1, dtype=torch.int32, device=x.device)
        self.launch(seed, (x, counts, out, came), 2)
        return out, came

    def given(self, sent: Sent) -> tuple[Tensor, Tensor]:
        return sent.x[self.rank].cuda(), sent.counts[self.rank].cuda()


def loaded(kernel: Any, arch: str) -> Callable[..., None]:
    """Not kept on disk: what kernels of tests are made of has no part in a file's name."""
    from cute_kernels import jit
    from cute_kernels.linked import LinkedFunction

    compiled = jit.compile_kernel(kernel, arch)
    return LinkedFunction(compiled, len(kernel.signature()), nvshmem.register) if kernel.linked else compiled


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind, device, seed, together):
    """Step behind step: nobody waits but the kernels."""
    wired = Batched(kind, device)
    sent = [Sent.drawn(wired.world_size, seed + number) for number in range(STEPS)]
    given = [wired.given(one) for one in sent]
    torch.cuda.synchronize()
    with together():
        got = [wired.step(*inputs, seed + number) for number, inputs in enumerate(given)]
        torch.cuda.synchronize()
        assert not wired.report.any(), wired.report.tolist()
        for one, outputs in zip(sent, got, strict=True):
            one.check(wired.rank, *outputs)
    wired.close()


@pytest.mark.parametrize("kind", ("nvlink", "nvshmem"))
def test_captured(kind, device, seed, together):
    """In a CUDA graph, replayed with other rows than were captured."""
    wired = Batched(kind, device)
    sent = [Sent.drawn(wired.world_size, seed + number) for number in range(4)]
    x, counts = wired.given(sent[0])
    with together():
        wired.step(x, counts, seed)
        torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = wired.step(x, counts, seed)
    with together():
        for one in sent:
            x.copy_(one.x[wired.rank])
            counts.copy_(one.counts[wired.rank])
            graph.replay()
            torch.cuda.synchronize()
            assert not wired.report.any(), wired.report.tolist()
            one.check(wired.rank, *outputs)
    wired.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("domain_size", (1, 2, 4))
def test_combine(domain_size, kind, device, seed, together):
    """The bits of the reference backend, on domains that are declared."""
    from cute_kernels import marks
    from cute_kernels.heap import Problem
    from cute_kernels.internode.combine import Combine

    rank, world_size = ranks()
    if world_size % domain_size:
        pytest.skip(f"needs a multiple of {domain_size} ranks")
    experts, top_k, tokens = 4 * world_size, 6, 20
    problem = Problem(world_size, (4,) * world_size, top_k, HIDDEN, "bf16", tokens)
    kernel = Combine(problem, wire_of(kind, 4 * world_size), tokens, True, True)
    wired = Wired(kind, device, kernel.heap, kernel, marks.pack("combine", tokens, few=True))
    draw = torch.Generator().manual_seed(seed + rank)
    steps: list[tuple[tuple[Tensor, ...], Tensor, Tensor]] = []
    with ep_ops.Communicator(
        num_experts=experts, hidden_size=HIDDEN, top_k=top_k, max_tokens_per_rank=tokens, device=device,
        backend="reference", domain_size=domain_size,
    ) as comm:  # fmt: skip
        of = [next(d for d, members in enumerate(comm.domains) if r in members) for r in range(world_size)]
        domains = torch.tensor(of, dtype=torch.int32, device=device)
        for _ in range(fewer(20, 4)):
            count = int(torch.randint(0, tokens + 1, (), generator=draw))
            idx = torch.randint(-1, experts, (count, top_k), generator=draw).int().to(device)
            route, _ = comm.plan(idx)
            spread = torch.randn(route.num_rows, 1, generator=draw).mul(2).exp()
            y = (spread * torch.randn(route.num_rows, HIDDEN, generator=draw)).bfloat16().to(device)
            weights = torch.randn(route.num_rows, generator=draw).to(device)
            residual = torch.randn(count, HIDDEN, generator=draw).bfloat16().to(device)
            want = comm.combine(y, route, weights, residual=residual)
            given = (y, weights, idx, route.send_rows, route.arrivals, domains, residual)
            steps.append((given, torch.full_like(residual, torch.nan), want))
    torch.cuda.synchronize()
    dist.barrier()
    with together():
        for number, (given, out, _) in enumerate(steps):
            count, rows = out.shape[0], given[0].shape[0]
            wired.launch(seed + number, (*given, out), count, tokens, rows, 4)
        torch.cuda.synchronize()
        assert not wired.report.any(), wired.report.tolist()
        for _, out, want in steps:
            assert torch.equal(out, want)
    wired.close()
