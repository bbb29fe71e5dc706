"""NVSHMEM between processes, which may share one GPU: its symmetric memory, and batches of rows and the latency kernels
over every wire.

`torchrun --nproc-per-node 4 -m pytest tests/gpu/test_nvshmem.py`, with the extra nvshmem-cu12 or nvshmem-cu13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from operators import ranks
from sharing import SHARING, fewer
from torch import Tensor

import ep_ops
from ep_ops import symmetric
from ep_ops.config import consecutive_domains
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


def test_subgroup_is_rejected(device, together):
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
    """Kernels on this rank, in NVSHMEM's memory, over a wire of a kind."""

    def __init__(self, kind: str, device: torch.device, heap: Any, kernels: Sequence[Any]) -> None:
        from courier import Courier, mailbox_bytes

        from cute_kernels import sync
        from cute_kernels.domains import position_words
        from cute_kernels.heap import EPOCH, STATE_BYTES

        self.rank, self.world_size = ranks()
        self.memory = symmetric.allocate(heap.nbytes, dist.group.WORLD, device, over_domains=True)
        adversary = kind == "adversary"
        depth = heap.problem.wire.depth if adversary else 0
        self.mailbox = torch.zeros(mailbox_bytes(depth), dtype=torch.uint8, device=device)
        words = [*self.memory.addresses, *position_words(heap.problem.domains), self.mailbox.data_ptr()]
        self.table = torch.tensor(words, dtype=torch.int64, device=device)
        self.served = torch.arange(1 + 2 * STEPS, dtype=torch.int64, device=device)
        if kind != "nvshmem" and 0 in self.memory.addresses:
            pytest.skip("needs ranks that map each other's memory")
        self.memory.local[:STATE_BYTES].view(torch.int64)[EPOCH] = 1
        self.report = torch.zeros(4 * sync.REPORT_WORDS, dtype=torch.int64, pin_memory=True)
        self.side, self.epoch = torch.cuda.Stream(device), 0
        self.ranks = (
            self.table.data_ptr(), self.memory.addresses[self.rank], self.rank, self.report.data_ptr(),
            int(20e9 * SHARING),
        )  # fmt: skip
        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}a"
        self.run = {kernel: loaded(kernel, arch) for kernel in kernels}
        self.courier = loaded(Courier(heap.problem, depth), arch) if adversary else None
        if self.courier is not None:  # of an operation that has ended: loaded while a kernel waits for it it would hang
            self.log = torch.zeros(4, dtype=torch.int64, device=device)
            self.courier(*self.ranks, 0, self.served.data_ptr(), self.log.data_ptr(), 0, 2, self.side.cuda_stream)
        torch.cuda.synchronize()
        dist.barrier()

    def launch(self, kernel: Any, terms: int, seed: int, **values: Any) -> None:
        """One operation; arguments that are not given are 0."""
        self.epoch += 1
        given = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in values.items()}
        fields = kernel.Args._fields[1:]
        assert set(given) <= set(fields)
        stream = torch.cuda.current_stream().cuda_stream
        self.run[kernel](*self.ranks, terms, *(given.get(name, 0) for name in fields), stream)
        if self.courier is not None:
            served = self.served.data_ptr() + 8 * self.epoch
            log = self.log.data_ptr()
            self.courier(*self.ranks, terms, served, log, seed % 2**30, 2, self.side.cuda_stream)

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.memory.free()


def wire_of(kind: str, depth: int) -> Any:
    from courier import Adversary

    from cute_kernels.internode import wire

    if kind == "nvlink":
        return wire.Nvlink()
    if kind == "adversary":
        return Adversary(depth)
    library = wire.find_library()
    if library is None:
        pytest.skip("needs NVSHMEM's device library")
    return wire.Nvshmem(library)


class Batched(Wired):
    """The kernel of tests/batches.py."""

    def __init__(self, kind: str, device: torch.device) -> None:
        from batches import Batches, BatchHeap, depth_of, problem_of

        from cute_kernels import marks

        world_size = ranks()[1]
        problem = problem_of(world_size, HIDDEN, "bf16", MAX_TOKENS, wire_of(kind, depth_of(world_size)))
        self.kernel, self.terms = Batches(problem), marks.pack("dispatch", MAX_TOKENS)
        super().__init__(kind, device, BatchHeap(problem), [self.kernel])

    def step(self, x: Tensor, counts: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Launches; out [W, max_tokens, H] and came [W]."""
        out = torch.full((self.world_size, MAX_TOKENS, HIDDEN), torch.nan, dtype=x.dtype, device=x.device)
        came = torch.full((self.world_size,), -1, dtype=torch.int32, device=x.device)
        self.launch(self.kernel, self.terms, seed, x=x, counts=counts, out=out, came=came, blocks=2)
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
    """A CUDA graph returns the right rows when it is replayed with other rows than were captured."""
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


class Few(Wired):
    """The latency kernels."""

    def __init__(self, kind: str, device: torch.device, domain_size: int, tokens: int, top_k: int) -> None:
        from cute_kernels import marks
        from cute_kernels.heap import Problem
        from cute_kernels.latency.combine import LatencyCombine
        from cute_kernels.latency.dispatch import LatencyDispatch

        world_size = ranks()[1]
        problem = Problem(
            world_size, (4,) * world_size, top_k, HIDDEN, "bf16", tokens,
            consecutive_domains(world_size, domain_size), wire_of(kind, 4 * world_size),
        )  # fmt: skip
        self.tokens, self.rows = tokens, world_size * tokens * top_k
        self.kernels = LatencyDispatch(problem, tokens, True), LatencyCombine(problem, tokens, True)
        self.terms = [
            marks.pack("dispatch", tokens, scalars=True, latency=True), marks.pack("combine", tokens, latency=True)
        ]  # fmt: skip
        super().__init__(kind, device, self.kernels[0].heap, self.kernels)

    def pair(self, x: Tensor, idx: Tensor, weights: Tensor, y: Tensor, seed: int) -> dict[str, Tensor]:
        """Launches both; what comes of them, by name."""
        ints = dict(send_rows=idx.numel(), arrivals=4 * self.rows + self.world_size + 3, offs=4, counts=4, dropped=4)
        out = {name: torch.full((size,), -2, dtype=torch.int32, device=x.device) for name, size in ints.items()}
        out["send_rows"] = out["send_rows"].view_as(idx)
        out["recv_x"] = torch.full((self.rows, HIDDEN), torch.nan, dtype=x.dtype, device=x.device)
        out["recv_weights"] = torch.full((self.rows,), torch.nan, device=x.device)
        sizes = dict(tokens=idx.shape[0], max_tokens=self.tokens, senders=2, first_receiver=1, blocks=4)
        self.launch(
            self.kernels[0], self.terms[0], seed, x=x, topk_idx=idx, topk_weights=weights, capacity=self.rows,
            alignment=1, **sizes, **out,
        )  # fmt: skip
        out["out"] = torch.full_like(x, torch.nan)
        route = {name: out[name] for name in ("send_rows", "arrivals", "recv_weights", "out")}
        self.launch(self.kernels[1], self.terms[1], seed + 1, y=y, topk_idx=idx, num_rows=self.rows, **sizes, **route)
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("domain_size", (1, 2, 4))
def test_few_tokens(domain_size, kind, device, seed, together):
    """Dispatch and combine, step behind step: the bits of the reference backend, on domains that are declared."""
    rank, world_size = ranks()
    if world_size % domain_size or world_size == domain_size:
        pytest.skip(f"needs several domains of {domain_size} ranks")
    experts, top_k, tokens = 4 * world_size, 6, 20
    wired = Few(kind, device, domain_size, tokens, top_k)
    draw = torch.Generator().manual_seed(seed + rank)
    steps: list[tuple[tuple[Tensor, ...], ep_ops.Dispatched, Tensor]] = []
    with ep_ops.Communicator(
        num_experts=experts, hidden_size=HIDDEN, top_k=top_k, max_tokens_per_rank=tokens, device=device,
        backend="reference", domain_size=domain_size,
    ) as comm:  # fmt: skip
        for _ in range(fewer(20, 4)):
            count = int(torch.randint(0, tokens + 1, (), generator=draw))
            idx = torch.randint(-1, experts, (count, top_k), generator=draw).int().to(device)
            x = torch.randn(count, HIDDEN, generator=draw).bfloat16().to(device)
            weights = torch.randn(count, top_k, generator=draw).to(device)
            spread = torch.randn(wired.rows, 1, generator=draw).mul(2).exp()
            y = (spread * torch.randn(wired.rows, HIDDEN, generator=draw)).bfloat16().to(device)
            sent = comm.dispatch(x, idx, weights, capacity=wired.rows, alignment=1)
            want = comm.combine(y, sent.route, sent.weights)
            steps.append(((x, idx, weights, y), sent, want))
    torch.cuda.synchronize()
    dist.barrier()
    with together():
        got = [wired.pair(*given, seed + 2 * number) for number, (given, *_) in enumerate(steps)]
        torch.cuda.synchronize()
        assert not wired.report.any(), wired.report.tolist()
        for mine, (_, sent, want) in zip(got, steps, strict=True):
            held = int(sent.route.offs[-1])
            assert torch.equal(mine["offs"], sent.route.offs) and torch.equal(mine["send_rows"], sent.route.send_rows)
            assert torch.equal(mine["recv_x"][:held], sent.x[:held])
            assert torch.equal(mine["recv_weights"][:held], sent.weights[:held])
            assert torch.equal(mine["out"], want)
    wired.close()
