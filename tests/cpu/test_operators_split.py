"""Split operations: the whole's results and gradients, and what runs between start and wait stays there."""

from __future__ import annotations

import re

import pytest
import torch
import toy
from ranks import run_ranks
from torch._inductor.utils import run_and_get_code

from ep_ops.nn import interleave
from ep_ops.records import StartedCombine
from meta_kernels.arguments import CombineStartArgs


def whole(comm, x, topk_idx, weights, scale, shared):
    rows = comm.dispatch(x, topk_idx, weights)
    beside = torch.tanh(x @ shared)
    out = comm.combine(toy.experts(rows, scale), rows.route, rows.weights)
    return out + torch.tanh(beside @ shared)


def split(comm, x, topk_idx, weights, scale, shared):
    """The shared expert's products stand between starts and waits and are used at the very end."""
    started = comm.dispatch_start(x, topk_idx, weights)
    beside = torch.tanh(x @ shared)
    rows = comm.dispatch_wait(started)
    sent = comm.combine_start(toy.experts(rows, scale), rows.route, rows.weights)
    beside = torch.tanh(beside @ shared)
    return comm.combine_wait(sent) + beside


def arguments(tokens, grad, seed=0):
    shared = torch.randn(toy.HIDDEN, toy.HIDDEN, generator=torch.Generator().manual_seed(3)) / 8
    return *toy.inputs(tokens, seed=seed, grad=grad), toy.scales(grad=grad), shared.requires_grad_(grad)


def step(layer, comm, tokens, grad):
    args = arguments(tokens, grad)
    out = layer(comm, *args)
    if not grad:
        return [out]
    out.sin().sum().backward()
    return [out.detach(), *(arg.grad for arg in args)]


@pytest.mark.parametrize(("grad", "backend"), [
    (False, None), (False, "aot_eager"), pytest.param(False, "inductor", marks=pytest.mark.drawn),
    (True, None), (True, "aot_eager"), pytest.param(True, "inductor", marks=pytest.mark.drawn),
])  # fmt: skip
def test_split_operations_are_the_whole(grad, backend):
    torch._dynamo.reset()
    with toy.communicator() as comm:
        layer = torch.compile(split, backend=backend, fullgraph=True) if backend else split
        for tokens in (7, 0, 16):
            torch.testing.assert_close(step(layer, comm, tokens, grad), step(whole, comm, tokens, grad))


def order_in(code: str) -> list[str]:
    """Operators of ep and matrix products, in the order in which compiled code runs them."""
    return re.findall(r"torch\.ops\.ep\.(\w+)\.default\(|extern_kernels\.(?:add)?(mm)\(", code)


BACKWARD = [
    "combine_backward_start", "mm", "combine_backward_wait", "dispatch_backward_start", "mm", "dispatch_backward_wait",
]  # fmt: skip
FORWARD = ["dispatch_start", "mm", "dispatch_wait", "combine_start", "mm", "combine_wait"]


def test_inductor_leaves_between_what_stands_between():
    """Inductor leaves work between start and wait, in a graph for inference, in one for training, and in its backward,
    where the gradient of a wait starts."""
    torch._dynamo.reset()
    with toy.communicator() as comm:
        _, (forward, *_) = run_and_get_code(torch.compile(split, fullgraph=True), comm, *arguments(7, False))
        assert [operator or product for operator, product in order_in(forward)] == FORWARD

        def train():
            torch.compile(split, fullgraph=True)(comm, *arguments(7, True)).sin().sum().backward()

        _, (forward, backward) = run_and_get_code(train)
        assert [operator or product for operator, product in order_in(forward)] == FORWARD
        names = [operator or "mm" for operator, _ in order_in(backward)]
        turns = [name for before, name in zip(["", *names], names) if name != before]  # noqa: B905
        assert turns[:6] == BACKWARD
        for operator in ("combine_backward", "dispatch_backward"):
            given = (
                re.search(rf"{operator}_start\.default\(((?:\w+, )+?)(?:44, )?4, 16, ", backward).group(1).strip(", ")
            )
            held = re.search(rf"{operator}_wait\.default\(\w+, \[(.+?)\]", backward).group(1)
            assert held == given, "what a start was given lives until the wait"


def test_a_wait_in_another_graph():
    """Tensors given to a start are not overwritten by operations that follow it in its graph if the wait is in another
    graph."""

    def wait(started, other, product):
        beside = torch.sin(other @ product)  # as large as what is sent back, and its gradients come behind that
        return comm.dispatch_wait(started).x.nan_to_num() * 2 + beside

    torch._dynamo.reset()
    with toy.communicator() as comm:
        results = []
        for function in (wait, torch.compile(wait, fullgraph=True)):
            x, idx, weights, _, product = arguments(7, True)
            other = torch.linspace(0, 1, comm.capacity() * toy.HIDDEN).view(-1, toy.HIDDEN).requires_grad_()

            def train(function=function, given=(x, idx, weights), beside=(other, product)):
                function(comm.dispatch_start(*given), *beside).sin().sum().backward()

            _, code = run_and_get_code(train)
            results.append([x.grad, other.grad, product.grad])
        torch.testing.assert_close(*results)
        begun = next(part for part in code if "dispatch_backward_start.default(" in part)
        given, behind = re.search(r"dispatch_backward_start\.default\((\w+), (?s:.*?)\)\n(?s:(.*))", begun).groups()
        assert "extern_kernels.mm(" in behind and not re.search(rf"= {given};", behind)


def in_turns(comm, a, b, scale, shared):
    """Two micro-batches on one communicator, the shared expert beside the first operation of each."""
    first = comm.first_local_expert
    scale = scale[first : first + comm.num_local_experts]

    def steps(x, idx, weights, flight):
        started = comm.dispatch_start(x, idx, weights, flight=flight)
        beside = torch.tanh(x @ shared)
        yield None
        rows = comm.dispatch_wait(started)
        started = comm.combine_start(toy.experts(rows, scale), rows.route, rows.weights, flight=flight)
        yield None
        yield comm.combine_wait(started) + beside

    return torch.cat(interleave(steps(*a, 0), steps(*b, 1)))


def one_by_one(comm, a, b, scale, shared):
    return torch.cat([toy.layer(comm, *given, scale) + torch.tanh(given[0] @ shared) for given in (a, b)])


def train_turns(layer, comm):
    rank = comm.rank
    a, b = (toy.inputs(5 + 3 * rank + batch, seed=2 * rank + batch, grad=True) for batch in range(2))
    shared = arguments(1, True)[-1]
    scale = toy.scales(grad=True)
    layer(comm, a, b, scale, shared).sin().sum().backward()
    return [given.grad for given in (*a, *b, scale, shared) if given.is_floating_point()]


def _turns():
    with toy.communicator() as comm:
        return train_turns(in_turns, comm), train_turns(one_by_one, comm)


def test_micro_batches_in_turns_between_ranks():
    for got, expected in run_ranks(2, _turns):
        torch.testing.assert_close(got, expected)


TURNS = [
    ("dispatch_start", 0), ("dispatch_start", 1), ("dispatch_wait", 0), ("combine_start", 0), ("dispatch_wait", 1),
    ("combine_start", 1), ("combine_wait", 0), ("combine_wait", 1),
]  # fmt: skip


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.drawn)])
def test_micro_batches_in_turns(backend, monkeypatch):
    """Forward; backward the other way round, starts for waits."""
    torch._dynamo.reset()
    with toy.communicator() as comm:
        calls, bind_start, wait = [], comm.backend.bind_start, comm.backend.wait

        def noted_start(spec, a):
            start = bind_start(spec, a)
            return lambda a: (calls.append((f"{spec.kind}_start", a.flight)), start(a))[1]

        def noted_wait(operator, flight, again):
            calls.append((f"{operator}_wait", flight))
            return wait(operator, flight, again)

        monkeypatch.setattr(comm.backend, "bind_start", noted_start)
        monkeypatch.setattr(comm.backend, "wait", noted_wait)
        layer = torch.compile(in_turns, fullgraph=True) if backend else in_turns
        got = train_turns(layer, comm)
        other = {"start": "wait", "wait": "start"}
        back = [(*name.split("_"), flight) for name, flight in reversed(TURNS)]
        assert calls == TURNS + [(f"{operator}_backward_{other[part]}", flight) for operator, part, flight in back]
        torch.testing.assert_close(got, train_turns(one_by_one, comm))


def test_a_generator_without_a_result():
    with pytest.raises(RuntimeError, match="generator 1 ended without yielding a result"):
        interleave(iter([None, 1]), iter([None]))


def test_what_is_in_the_wrong_order():
    """A flight holds one operation at a time, and what is under way is not interrupted."""
    with toy.communicator() as comm:
        x, idx, weights = toy.inputs(7)
        with pytest.raises(RuntimeError, match="ep::combine_wait was called, but nothing was started in flight 0"):
            rows = comm.dispatch(x, idx, weights)
            along = *rows.route.tensors, *rows.route.ints, comm.name
            given = CombineStartArgs(rows.x, rows.weights, *along)
            comm.combine_wait(StartedCombine(torch.empty(0), given, rows.route))
        one, two = comm.dispatch_start(x, idx, weights), comm.dispatch_start(2 * x, idx, weights, flight=1)
        with pytest.raises(
            RuntimeError, match="flight 1 is in use: ep::dispatch_start must be followed by ep::dispatch_wait"
        ):
            comm.dispatch_start(x, idx, weights, flight=1)
        with pytest.raises(RuntimeError, match="dispatch_start must be followed by ep::dispatch_wait before an oper"):
            comm.dispatch(x, idx, weights)
        with pytest.raises(ValueError, match="flight is 2; allowed: 0..1"):
            comm.dispatch_start(x, idx, weights, flight=2)
        twice, once = comm.dispatch_wait(two), comm.dispatch_wait(one)  # in any order
        assert torch.equal(twice.x.nan_to_num(), 2 * once.x.nan_to_num())
        with pytest.raises(RuntimeError, match="ep::dispatch_wait was called, but nothing was started in flight 1"):
            comm.dispatch_wait(two)
        comm.dispatch(x, idx, weights)


def test_an_exception_between_start_and_wait():
    """The next operation names the wait to call; a block of flights leaves nothing under way, in backward either."""
    with toy.communicator() as comm:
        x, *_ = given = toy.inputs(7, grad=True)

        def raises(*_):
            raise KeyboardInterrupt

        def forward():
            comm.dispatch_start(*given, flight=1)
            raises()

        def backward():
            started = comm.dispatch_start(*given)
            beside = x * 2
            beside.register_hook(raises)  # between start and wait of the gradient
            (comm.dispatch_wait(started).x.nan_to_num().sum() + beside.sum()).backward()

        for step, operator in ((forward, "dispatch"), (backward, "dispatch_backward")):
            with pytest.raises(KeyboardInterrupt):
                step()
            with pytest.raises(RuntimeError, match=f"ep::{operator}_start must be followed by ep::{operator}_wait bef"):
                comm.dispatch(*given)
            comm.backend.end_flights()
            with pytest.raises(KeyboardInterrupt), comm.flights():
                step()
            comm.dispatch(*given)
        with comm.flights():
            started = comm.dispatch_start(*given)
        assert comm.dispatch_wait(started).x.shape == comm.dispatch(*given).x.shape
        comm.backend.end_flights = lambda: pytest.fail("asked of what is gone")
        with pytest.raises(KeyboardInterrupt), comm.flights():
            comm.destroy()
            raises()


def test_generators_are_closed_when_one_raises():
    """While somebody still holds the exception, which holds their frames."""
    closed = []

    def steps(turn):
        try:
            yield None
            if turn == 1:
                raise KeyError("expert")
            yield None
        finally:
            closed.append(turn)

    with pytest.raises(KeyError):
        interleave(steps(0), steps(1), iter([None, None, 1]))
    assert closed == [1, 0]


def test_a_start_without_gradients():
    with toy.communicator() as comm:
        x, idx, weights = toy.inputs(7, grad=True)
        with torch.no_grad():
            started = comm.dispatch_start(x, idx, weights)
        with pytest.raises(RuntimeError, match="ep::dispatch_wait got tensors that require a gradient, and a ticket"):
            comm.dispatch_wait(started)


def _on_a_rank():
    with toy.communicator() as comm:
        local = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        results = []
        for layer in (split, whole):
            x, idx, weights, scale, shared = arguments(5 + comm.rank, True, seed=comm.rank)
            scale = scale.detach()[local].clone().requires_grad_()
            out = layer(comm, x, idx, weights, scale, shared)
            out.sin().sum().backward()
            results.append([out.detach(), x.grad, weights.grad, scale.grad, shared.grad])
        return results


def test_between_ranks():
    for got, expected in run_ranks(2, _on_a_rank):
        torch.testing.assert_close(got, expected)
