"""Operations end whoever else runs on the GPU: blocks that do not go, other communicators and NCCL in another order on
another rank, dependents that would fill the GPU, experts between dispatch and combine, and parts of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda.bindings import driver
from foreign import Foreign
from operators import of_kernels
from sharing import MPS, own_gpu
from torch import Tensor

import ep_ops
from ep_ops.backends.cute import residency
from ep_ops.nn import few_rows_mlp

pytestmark = own_gpu
TIMEOUT = 5.0
HIDDEN, EXPERTS, TOP_K, TOKENS = 512, 16, 4, 256
FEW, WIDTH = 64, 4096
"""Tokens of a call on latency kernels in front of experts, and the experts' width: their blocks fill the GPU."""
WHOLE, HALF = 220 * 1024, 100 * 1024
"""Shared memory of foreign blocks: a multiprocessor of their own, or one beside a block of the latency kernels."""
UNRESERVED = 8 if MPS else 0
"""Multiprocessors that a rank may not get although they are in its share: MPS limits processes and reserves nothing. Of
four processes with 32 of an H100's 132, one ran 20 blocks at once while the others ran 32: 16 of 132 were of no use."""


def ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def config(world_size: int) -> dict[str, Any]:
    return dict(
        num_experts=EXPERTS * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS, backend="cute"
    )


def experts_kernels(world_size: int) -> tuple[Any, ...]:
    """Return the kernels that `Layers` launches besides those of communicators, for precompile.py."""
    from ep_ops.backends.cute.local_kernels import Share, few_rows_kernels

    return few_rows_kernels(EXPERTS, HIDDEN, WIDTH, "bf16", Share(FEW, TOP_K, world_size), (False, False))


def make(few: int) -> ep_ops.Communicator:
    """Calls with `max_tokens` of at most `few` run on the latency kernels, the others on throughput kernels."""
    comm = ep_ops.Communicator(latency_max_tokens=few, timeout=TIMEOUT, **config(ranks()[1]))
    comm.warmup()
    return comm


@pytest.fixture(scope="module")
def comms() -> Iterator[dict[str, tuple[ep_ops.Communicator, ep_ops.Communicator]]]:
    made = {kind: (make(few), make(few)) for kind, few in (("many", 0), ("few", TOKENS), ("both", FEW))}
    yield made
    for pair in made.values():
        for comm in pair:
            comm.destroy()


def room_for_two(comm: ep_ops.Communicator, pulls: bool = False) -> None:
    """Skip a test whose two communicators find no room for the blocks that wait for each other. `pulls`: both run
    throughput dispatches along a new route, whose pulling blocks wait as well.

    With 66 multiprocessors for each of two ranks, such a dispatch keeps 16 tile and 30 pulling blocks, and the other
    one needs 21 multiprocessors: 67 together.
    """
    kernels = of_kernels(comm)
    launcher = kernels._launcher
    needed = kept = residency.needed(launcher.problem)
    if pulls:
        kept = launcher.problem.tiles + max(kernels.budget.dispatch, kernels.budget.beyond)
    if launcher.multiprocessors - UNRESERVED < kept + needed:
        pytest.skip(f"two communicators at once need more than {launcher.multiprocessors - UNRESERVED} multiprocessors")


class Steps:
    """Round trips of whole numbers, whose results are known."""

    def __init__(self, comm: ep_ops.Communicator, seed: int, stream: torch.cuda.Stream | None = None) -> None:
        draw = torch.Generator(device="cuda").manual_seed(seed * 100 + comm.rank)
        self.comm, self.out = comm, []
        self.stream = stream or torch.cuda.Stream()
        self.x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=draw, device="cuda").to(comm.dtype)
        scores = torch.rand(TOKENS, comm.num_experts, generator=draw, device="cuda")
        self.idx = scores.topk(TOP_K).indices.int()
        # What torch launches beside is loaded, and memory is there: neither is to wait for a foreign kernel.
        torch.cuda.synchronize()
        for _ in range(10):
            self.step()
            self.out.append(self.out[-1] + self.x[: self.out[-1].shape[0]])
        torch.cuda.synchronize()
        self.out.clear()

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            sent = self.comm.dispatch(self.x, self.idx)
            again = self.comm.dispatch_planned(self.x, sent.route).x
            self.out.append(self.comm.combine(sent.x, sent.route))
            self.out.append(self.comm.combine(again, sent.route, residual=self.x))

    def check(self) -> None:
        self.comm.check_errors()
        for i, out in enumerate(self.out):
            assert torch.equal(out, self.x * (TOP_K + i % 2)), f"result {i} of {self.comm.name}"
        self.out.clear()


@pytest.mark.parametrize("taken", [1, residency.MARGIN, 60, None])
@pytest.mark.parametrize("kind", ["many", "few"])
def test_blocks_that_stay(kind, taken, comms, together) -> None:
    """Operations end while another kernel holds some multiprocessors, or all but those that are needed (None), until
    they have."""
    launcher = comms[kind][0].backend._launcher
    left = residency.needed(launcher.problem) if kind == "many" else -(-launcher.multiprocessors // 2)
    most = launcher.multiprocessors - left - UNRESERVED
    if most < 1:
        pytest.skip(f"operations need {left + UNRESERVED} of {launcher.multiprocessors} multiprocessors")
    taken = most if taken is None else min(taken, most)
    steps, theirs = Steps(comms[kind][0], taken), torch.cuda.Stream()
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    with Foreign(steps.comm) as foreign:
        with torch.cuda.stream(theirs):
            foreign.take(taken, WHOLE)
        for _ in range(5):
            steps.step()
        steps.stream.synchronize()
        assert not theirs.query(), "the foreign kernel ended too soon: nothing was tested"
    with together():
        steps.check()


@pytest.mark.parametrize("first", ["many", "few"])
@pytest.mark.parametrize("second", ["many", "few"])
def test_two_communicators_in_opposite_order(first, second, comms, together) -> None:
    """Operations of two communicators on two streams of each rank end, although what one rank launches first is last at
    the next one."""
    room_for_two(comms[first][0], pulls=first == second == "many")
    both = [Steps(comms[first][0], 1), Steps(comms[second][1], 2)]
    order = both if ranks()[0] % 2 == 0 else both[::-1]
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    for _ in range(10):
        for steps in order:
            steps.step()
    torch.cuda.synchronize()
    with together():
        for steps in both:
            steps.check()


@pytest.mark.parametrize("kind", ["many", "few"])
def test_nccl_in_opposite_order(kind, comms, together) -> None:
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        pytest.skip("needs NCCL between several ranks")
    rank, world_size = ranks()
    steps, theirs = Steps(comms[kind][0], 3), torch.cuda.Stream()
    summed = [torch.ones(1 << 23, device="cuda") for _ in range(5)]
    dist.all_reduce(summed[0].clone())
    torch.cuda.synchronize()
    dist.barrier()

    def reduce(tensor: Tensor) -> None:
        with torch.cuda.stream(theirs):
            dist.all_reduce(tensor)

    for tensor in summed:
        if rank % 2:
            reduce(tensor)
        steps.step()
        if rank % 2 == 0:
            reduce(tensor)
    torch.cuda.synchronize()
    with together():
        steps.check()
        assert all(bool((tensor == world_size).all()) for tensor in summed)


@pytest.mark.skipif(MPS, reason="needs a GPU for each rank: fails under MPS, for an unknown reason")
def test_dependents_do_not_take_the_gpu(comms, together) -> None:
    """A kernel that is launched ahead of its turn behind an operation, and fills the GPU, does so when the operation
    has seen its peers: until then another communicator's finds room, in whatever order ranks launch them."""
    room_for_two(comms["few"][0])
    both = [Steps(comms["few"][0], 4), Steps(comms["few"][1], 5)]
    order = both if ranks()[0] % 2 == 0 else both[::-1]
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    with Foreign(both[0].comm) as foreign:
        foreign.take(1, HALF, dependent=True)  # compiled and loaded
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        for _ in range(5):
            for steps in order:
                with torch.cuda.stream(steps.stream):
                    sent = steps.comm.dispatch(steps.x, steps.idx)
                    foreign.take(sms, HALF, dependent=True)
                    steps.out.append(steps.comm.combine(sent.x, sent.route))
                    foreign.take(sms, HALF, dependent=True)
                    steps.out.append(steps.out[-1] + steps.x)
        torch.cuda.synchronize()
    with together():
        for steps in both:
            steps.check()


class Layers(Steps):
    """Layers whose experts are the kernels for few rows. Nothing, a plan or a dispatch of many tokens precedes each."""

    def __init__(self, comm: ep_ops.Communicator, seed: int, before: str) -> None:
        draw = torch.Generator(device="cuda").manual_seed(comm.rank)
        shapes = (comm.num_local_experts, HIDDEN, 2 * WIDTH), (comm.num_local_experts, WIDTH, HIDDEN)
        self.weights = [(torch.randn(shape, generator=draw, device="cuda") / 64).to(comm.dtype) for shape in shapes]
        self.before = before
        super().__init__(comm, seed)
        self.step()
        torch.cuda.synchronize()
        self.expected = self.out.pop()

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            if self.before == "plan":
                self.comm.plan(self.idx)
            elif self.before == "dispatch":
                self.comm.dispatch(self.x, self.idx)
            got = self.comm.dispatch(self.x[:FEW], self.idx[:FEW], max_tokens=FEW)
            y = few_rows_mlp(got.x, *self.weights, got.route, self.comm.world_size)
            self.out.append(self.comm.combine(y, got.route))

    def check(self) -> None:
        self.comm.check_errors()
        assert self.expected.isfinite().all() and self.expected.abs().max() > 0
        assert all(torch.equal(out, self.expected) for out in self.out), self.comm.name
        self.out.clear()


@pytest.mark.parametrize("before", ["nothing", "plan", "dispatch"])
def test_experts_behind_a_dispatch(before, comms, together) -> None:
    """The first GEMM is launched ahead of its turn behind a dispatch, the second behind the first, and the combine
    behind that. Two communicators run such layers on two streams; neighboring ranks launch them in opposite order."""
    room_for_two(comms["both"][0], pulls=before == "dispatch")
    both = [Layers(comm, 7 + i, before) for i, comm in enumerate(comms["both"])]
    order = both if ranks()[0] % 2 == 0 else both[::-1]
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    for _ in range(10):
        for layers in order:
            layers.step()
    torch.cuda.synchronize()
    with together():
        for layers in both:
            layers.check()


@contextlib.contextmanager
def part(sms: int) -> Iterator[int]:
    """So many multiprocessors of the GPU; its context, which torch may leave where it sets a device."""
    if MPS:
        pytest.skip("MPS has no green contexts")
    green = pytest.importorskip("torch.cuda.green_contexts")
    if not green.SUPPORTED:
        pytest.skip("torch has no green contexts")
    made = green.GreenContext.create(num_sms=sms, device_id=torch.cuda.current_device())
    made.set_context()
    _, context = driver.cuCtxGetCurrent()
    try:
        yield context
    finally:
        driver.cuCtxSetCurrent(context)
        made.pop_context()


def test_part_of_a_gpu(together) -> None:
    """In a green context kernels have blocks for its multiprocessors; where it has too few the sizes are rejected."""
    with part(48) as context:
        comm = make(0)
        driver.cuCtxSetCurrent(context)
        steps = Steps(comm, 6, torch.cuda.current_stream())
        for _ in range(3):
            steps.step()
        torch.cuda.synchronize()
        with together():
            assert (
                48 <= comm.multiprocessors < 132 and of_kernels(comm)._launcher.multiprocessors == comm.multiprocessors
            )
            steps.check()
    comm.destroy()
    with part(8), together():
        with pytest.raises(ValueError, match="8 multiprocessors for this process; the cute backend needs"):
            make(0)
