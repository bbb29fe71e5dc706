"""Work between start and wait of a split operation runs concurrently with it: the profiler's timeline shows that.

The device has all of a step before it begins: it sleeps in front, on all ranks for as long as the slowest host takes to
call the step (`seen`). So the order of events is the device's own and not the host's. Tests require an order, never a
speed: a product runs while rows are being sent, and of few tokens the kernel that receives begins when the one that
sends has ended. `pytest -s` shows the timeline.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from sharing import own_gpu
from test_latency import BF16, DELAY, Oracle, both, ranks
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import ep_ops

pytestmark = own_gpu
TOKENS, HIDDEN = 256, 7168  # as much as these kernels send
PRODUCTS = 4  # between start and wait; each reads 100 MB of weights
STEPS = 8
DOUBLINGS = 8  # of the sleep in front of a step, at most
SHARE = 0.1
"""The least share of a start's time for which products must run beside it: more than an accident."""

PRODUCT = re.compile("gemm|nvjet|cutlass|triton.*mm")
LOST = 64
"""Kernels that the timeline may lack at its beginning: CUPTI before CUDA 13.1 mistimes one for each earlier profile."""


class Kernel(NamedTuple):
    start: float  # µs
    end: float
    name: str


class Operation(NamedTuple):
    """The kernels of start and wait, and the µs for which products ran beside the first."""

    send: Kernel
    receive: Kernel
    beside: float

    @property
    def share(self) -> float:
        return self.beside / (self.send.end - self.send.start)


def timeline(run: Callable[[], None]) -> list[Kernel]:
    """Return the kernels that ran on the device, by start."""
    filler = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(LOST):
            filler.add_(1)
        run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    return sorted(Kernel(event.time_range.start, event.time_range.end, event.name) for event in events)


def seen(steps: Callable[[int, int], bool]) -> list[Kernel]:
    """The timeline of `steps(number, delay)`. Each step sleeps for so many cycles, and `steps` says whether the host
    had called all of each one by then. The sleep is doubled until it had, on all ranks."""
    delay = DELAY
    for _ in range(DOUBLINGS):
        ahead: list[bool] = []
        kernels = timeline(functools.partial(_note, ahead, steps, delay))
        if dist.is_initialized():
            said: list[bool] = [False] * dist.get_world_size()
            dist.all_gather_object(said, ahead[0])
            ahead = said
        if all(ahead):
            return kernels
        delay *= 2
    raise AssertionError(f"the host of rank {ahead.index(False)} takes longer for a step than {delay // 2} cycles")


def _note(ahead: list[bool], steps: Callable[[int, int], bool], delay: int) -> None:
    ahead.append(steps(STEPS, delay))


class Sleep:
    """Puts the device to sleep; `lasts` says whether it sleeps still."""

    def __init__(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)
        self._end = torch.cuda.Event()
        self._end.record()

    @property
    def lasts(self) -> bool:
        return not self._end.query()


def operations(kernels: list[Kernel], name: str) -> list[Operation]:
    """The last ones come first."""

    def last_first(half: str) -> Iterator[Kernel]:
        return (k for k in reversed(kernels) if f"{name}_{half}" in k.name)

    products = [k for k in kernels if PRODUCT.search(k.name) and "ep_" not in k.name]
    found = []
    for send, receive in zip(last_first("start"), last_first("wait"), strict=False):
        beside = sum(max(0.0, min(send.end, p.end) - max(send.start, p.start)) for p in products)
        found.append(Operation(send, receive, beside))
    return found


def picture(kernels: list[Kernel]) -> str:
    """The last step, from the start of its dispatch to the wait of its combine."""
    parts = [i for i, kernel in enumerate(kernels) if "ep_latency" in kernel.name][-4:]
    if not parts:
        return "no start or wait was seen, but " + (
            ", ".join(sorted({kernel.name[:60] for kernel in kernels})) or "nothing"
        )
    shown = kernels[parts[0] : parts[-1] + 1]
    zero = shown[0].start
    return "\n".join(f"{k.start - zero:9.1f} .. {k.end - zero:9.1f} us  {k.name[:40]}" for k in shown)


@pytest.fixture(scope="module")
def profiler() -> None:
    """Starts it, which takes seconds, before any graph is captured. All ranks skip if one of them sees nothing."""
    a = torch.zeros(1024, 1024, dtype=BF16, device="cuda")
    sees = [bool(timeline(lambda: torch.mm(a, a)))]
    if dist.is_initialized():
        own, sees = sees[0], [False] * dist.get_world_size()
        dist.all_gather_object(sees, own)
    if not all(sees):
        pytest.skip(f"torch.profiler sees no kernels on rank {sees.index(False)}: no CUPTI, or no permission to use it")


@pytest.fixture(scope="module")
def comms(profiler) -> Iterator[tuple[ep_ops.Communicator, ep_ops.Communicator]]:
    with both("overlap", HIDDEN) as pair:
        yield pair


def captured(step: Callable[..., Any], *given: Tensor) -> Callable[..., Any]:
    """To be called with the same tensors."""
    step(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*given)

    def replay(*_: Tensor) -> Any:
        graph.replay()
        return results

    return replay


def kernels_of_steps(
    how: str, comms: tuple[ep_ops.Communicator, ep_ops.Communicator], tokens: int, seed: int, together: Any
) -> list[Kernel]:
    """Return the kernels of steps whose dispatch and combine have products between their halves, each step on fresh
    data and compared with the whole operators."""
    fast, slow = comms
    torch.manual_seed(seed + ranks()[0])
    oracle = Oracle(tokens, HIDDEN)
    weight = torch.randn(HIDDEN, HIDDEN, dtype=BF16, device="cuda") / HIDDEN**0.5

    def shared(x: Tensor) -> Tensor:
        for _ in range(PRODUCTS):
            x = x @ weight
        return x

    def step(x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        started = fast.dispatch_start(x, idx, weights, max_tokens=tokens)
        beside = shared(x)
        rows = fast.dispatch_wait(started)
        sent = fast.combine_start(rows.x, rows.route, rows.weights)
        beside = shared(beside)
        return fast.combine_wait(sent), beside

    given = oracle.draw()
    runs: dict[str, Callable[[], Callable[..., Any]]] = {
        "eager": lambda: step,
        "graph": lambda: captured(step, *given),
        "compiled": lambda: torch.compile(step, fullgraph=True),
        "compiled graph": lambda: torch.compile(step, fullgraph=True, mode="reduce-overhead"),
    }
    run = runs[how]()

    def steps(number: int, delay: int = DELAY) -> bool:
        ahead = True
        for _ in range(number):
            for tensor, fresh in zip(given, oracle.draw(), strict=True):
                tensor.copy_(fresh)
            sleep = Sleep(delay)
            out, beside = run(*given)
            ahead = sleep.lasts and ahead
            rows = slow.dispatch(*given, max_tokens=tokens)
            oracle.wrong += (out != slow.combine(rows.x, rows.route, rows.weights)).sum()
            oracle.wrong += (~torch.isclose(beside, shared(shared(given[0])), rtol=0.1, atol=0.1)).sum()
        return ahead

    with torch.no_grad():
        steps(4)  # the first ones compile, warm up, capture
        oracle.verdict(fast, together)
        kernels = seen(steps)
    oracle.verdict(fast, together)
    torch._dynamo.reset()
    return kernels


@pytest.mark.parametrize("how", ["eager", "graph", "compiled", "compiled graph"])
def test_products_run_while_rows_are_sent(how, comms, seed, together):
    rank, world_size = ranks()
    kernels = kernels_of_steps(how, comms, TOKENS, seed, together)
    if rank == 0:
        print(f"{how}:\n{picture(kernels)}")
    with together():
        for name in ("ep_latency_dispatch", "ep_latency_combine"):
            found = operations(kernels, name)
            shares = [operation.share for operation in found]
            if rank == 0:
                print(f"{name}: products ran for {', '.join(f'{share:.0%}' for share in shares)} of its sending")
            assert STEPS // 2 < len(found) <= STEPS, f"{name}: {len(found)} operations\n{picture(kernels)}"
            assert all(one.send.end <= one.receive.start for one in found), f"{name}:\n{picture(kernels)}"
            if world_size > 1:  # a single rank sends nothing
                assert statistics.median(shares) >= SHARE, f"{name}: {shares}\n{picture(kernels)}"


# ---------------------------------------------------------------------- many tokens

MANY = 512  # on throughput kernels, which run to their end between start and wait


def spans(kernels: list[Kernel]) -> dict[str, list[Operation]]:
    """Operations in the order of their first kernels, by whose names they go."""
    ours = [k for k in kernels if re.search("ep_(publish|pull_scaled|pull|combine)", k.name)]
    products = [k for k in kernels if PRODUCT.search(k.name) and "ep_" not in k.name]
    runs: dict[str, list[list[Kernel]]] = {}
    run: list[Kernel] = []
    for kernel in ours:
        name = re.search("ep_(publish|pull_scaled|pull|combine)", kernel.name).group(0)  # type: ignore[union-attr]
        if name in ("ep_publish", "ep_combine") or (run and "ep_combine" in run[0].name):
            run = []  # an operation begins
        if not run:
            runs.setdefault(name, []).append(run)
        run.append(kernel)
    found: dict[str, list[Operation]] = {}
    for name, operations in runs.items():
        for one in operations:
            whole = Kernel(one[0].start, max(k.end for k in one), one[0].name)
            beside = sum(max(0.0, min(whole.end, p.end) - max(whole.start, p.start)) for p in products)
            found.setdefault(name, []).append(Operation(whole, whole, beside))
    return found


@pytest.mark.parametrize("how", ["eager", "graph", "compiled", "compiled graph"])
def test_products_run_beside_many_tokens(how, comms, seed, together):
    rank, world_size = ranks()
    kernels = kernels_of_steps(how, comms, MANY, seed, together)
    with together():
        found = spans(kernels)
        for name in ("ep_publish", "ep_combine"):
            ours = found[name][-2::-2]  # the last one is slow's
            shares = [operation.share for operation in ours]
            if rank == 0:
                print(f"{how}, {name}: products ran for {', '.join(f'{share:.0%}' for share in shares)} of its time")
            assert STEPS // 2 < len(ours) <= STEPS, f"{name}: {len(ours)} operations"
            if world_size > 1:
                assert statistics.median(shares) >= SHARE, f"{name}: {shares}"


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_products_run_beside_gradients(how, comms, seed, together):
    """In backward the product's gradient runs between the halves of the combine's and the dispatch's."""
    rank, world_size = ranks()
    fast, _ = comms
    torch.manual_seed(seed + rank)
    oracle = Oracle(MANY, HIDDEN)
    weight = torch.randn(HIDDEN, HIDDEN, dtype=BF16, device="cuda") / HIDDEN**0.5

    def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        started = fast.dispatch_start(x, idx, weights, max_tokens=MANY)
        beside = x
        for _ in range(PRODUCTS):
            beside = beside @ weight
        rows = fast.dispatch_wait(started)
        out = fast.combine_wait(fast.combine_start(rows.x, rows.route, rows.weights))
        return out + beside

    run = step if how == "eager" else torch.compile(step, fullgraph=True)

    def steps(number: int, delay: int = DELAY) -> bool:
        ahead = True
        for _ in range(number):
            x, idx, weights = oracle.draw()
            grad = torch.ones_like(x)
            sleep = Sleep(delay)
            run(x.requires_grad_(), idx, weights.requires_grad_()).backward(grad)
            ahead = sleep.lasts and ahead
        return ahead

    steps(4)
    kernels = seen(steps)
    oracle.verdict(fast, together)
    torch._dynamo.reset()
    with together():
        combines = spans(kernels)["ep_combine"]
        ours = combines[-1::-2]  # of a step the second: the gradient of its dispatch
        shares = [operation.share for operation in ours]
        if rank == 0:
            print(f"{how}: products ran for {', '.join(f'{share:.0%}' for share in shares)} of the dispatch's gradient")
        assert STEPS // 2 < len(ours) <= STEPS, f"{len(ours)} operations"
        if world_size > 1:
            assert statistics.median(shares) >= SHARE, str(shares)
