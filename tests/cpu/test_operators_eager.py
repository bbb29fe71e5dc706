"""Methods, layers and gradients call implementations directly, unless a mode, transform or trace must see operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from calls import counted
from one_rank import communicator, direct_calls, given, many
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import ep_ops
from ep_ops.operators import table


@pytest.fixture
def comm() -> Iterator[ep_ops.Communicator]:
    with communicator() as made:
        yield made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return direct_calls(monkeypatch)


class Hears(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("off", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_directly_without_gradients(comm, calls, off):
    """Gradients may be on where nothing asks for one, and something may ask for one where they are off."""
    x, idx, weights = given()
    there = comm.dispatch(x, idx, weights)
    expected = torch.ops.ep.combine(there.x, there.weights, *there.route.tensors, *there.route.ints, comm.name)
    calls.clear()
    with off():
        asks = off is not contextlib.nullcontext
        sent = comm.dispatch(torch.nn.Parameter(x, asks), idx, weights)
        assert torch.equal(comm.combine(sent.x, sent.route, sent.weights), expected)
        started = comm.dispatch_start(x, idx, weights)
        split = comm.dispatch_wait(started)
        assert torch.equal(comm.combine_wait(comm.combine_start(split.x, split.route, split.weights)), expected)
        comm.plan(idx)
        comm.dispatch(x, idx, exact=True)
        comm.dispatch_planned(x, sent.route)
    assert calls == [
        "dispatch", "combine", "dispatch_start", "dispatch_wait", "combine_start", "combine_wait", "plan",
        "dispatch_dynamic", "dispatch_planned",
    ]  # fmt: skip


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("token_major", [False, True], ids=["grouped", "token-major"])
def test_directly_with_gradients(comm, calls, token_major, split):
    """The gradients are those that the dispatcher gives, and backward leaves it out as well."""
    idx, seed = given()[1], cases.fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    x, weights, by = (torch.randn(shape, generator=draw) for shape in ((3, 8), (3, 2), (3, 8)))

    def run() -> list[torch.Tensor]:
        rows, scale = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if not split:
            sent = (
                comm.dispatch(rows, idx, scale, layout="token_major")
                if token_major
                else comm.dispatch(rows, idx, scale)
            )
        elif token_major:
            sent = comm.dispatch_wait(comm.dispatch_start(rows, idx, scale, layout="token_major"))
        else:
            sent = comm.dispatch_wait(comm.dispatch_start(rows, idx, scale))
        each = None if token_major else sent.weights
        y = sent.x * sent.weights.sum(1, keepdim=True) if token_major else sent.x
        out = (
            comm.combine_wait(comm.combine_start(y, sent.route, each))
            if split else comm.combine(y, sent.route, each)
        )  # fmt: skip
        (out * by).sum().backward()
        return [out.detach(), rows.grad, scale.grad]

    found = run()
    assert len(calls) == (8 if split else 4), calls
    calls.clear()
    with Hears() as mode:
        expected = run()
    assert calls == [] and sum("ep." in name for name in mode.heard) == (8 if split else 4)
    assert all(map(torch.equal, found, expected)) and all(bool(t.any()) for t in found)


@torch.no_grad()
def test_modes_hear_of_it(comm, calls):
    """Modes intercept every call, also calls like earlier ones."""
    args = given()
    many(comm, *args)
    calls.clear()
    with Hears() as mode:
        comm.dispatch(*args)
    assert "ep.dispatch.default" in mode.heard and calls == []


@torch.no_grad()
def test_fake_tensors_come_of_it(comm, calls):
    """A fake tensor mode gets fake results, also of calls like earlier ones with real tensors: guards do not notice the
    mode."""
    args = given()
    many(comm, *args)
    calls.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        sent = comm.dispatch(*args)
    assert isinstance(sent.x, FakeTensor) and calls == []


@torch.no_grad()
def test_transforms_and_levels_hear_of_it(comm, calls):
    """Transforms and forward-mode levels intercept every call, also calls like earlier ones whose tensors are not
    wrapped."""
    args = given()
    many(comm, *args)
    calls.clear()
    torch.func.vmap(lambda rows: rows + comm.dispatch(*args).x[0])(torch.zeros(2, 8))
    torch.func.functionalize(lambda rows: rows + comm.dispatch(*args).x[0])(torch.zeros(8))
    with pytest.raises(NotImplementedError, match="does not support the transforms of torch.func"):
        torch.func.grad(lambda rows: comm.dispatch(rows, *args[1:]).x.sum())(args[0])
    with BaseTorchFunctionMode():
        comm.dispatch(*args)
    with forward_ad.dual_level():
        comm.dispatch(*args)
    assert calls == []
    comm.dispatch(*args)
    assert calls == ["dispatch"]


@torch.no_grad()
def test_profilers_see_it(comm, calls):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        comm.dispatch(*given())
    assert any(event.name == "ep::dispatch" for event in seen.events() or ()) and calls == []


@torch.no_grad()
def test_traces_hold_operators(comm, calls):
    """Traces contain the operators, also of calls like earlier ones. Outputs of kernels would be constants of the
    trace."""
    x, idx, weights = given()
    many(comm, x, idx, weights)
    calls.clear()
    traced = torch.jit.trace(lambda rows: comm.dispatch(rows, idx, weights).x, x, check_trace=False)
    assert "ep::dispatch" in str(traced.graph) and calls == []
    sent = comm.dispatch(x * 2, idx, weights)
    held = sent.route.recv_from >= 0
    assert torch.equal(traced(x * 2)[held], sent.x[held])


@torch.no_grad()
def test_meta_tensors_have_shapes_alone(comm, calls):
    sent = comm.dispatch(*given("meta"))
    assert sent.x.is_meta and sent.x.shape == (comm.capacity(), 8) and calls == []


@torch.no_grad()
def test_subclasses_are_heard_of(comm, calls):
    class Own(torch.Tensor):
        pass

    x, idx, weights = given()
    comm.dispatch(x.as_subclass(Own), idx, weights)
    assert calls == []


@torch.no_grad()
def test_transforms_are_rejected(comm, calls):
    x, idx, _ = given()
    route, _ = comm.plan(idx)
    calls.clear()
    both = torch.func.vmap(lambda rows: comm.dispatch_planned(rows, route).x)
    with pytest.raises(NotImplementedError, match="does not support torch.vmap"):
        both(torch.stack([x, 2 * x]))
    assert calls == []


@torch.no_grad()
def test_while_something_is_compiled(comm, calls):
    """Code that a broken graph left outside is run with Dynamo looking on: it goes the long way."""
    x, idx, weights = given()

    def step(x):
        torch._dynamo.graph_break()
        return comm.dispatch(x, idx, weights).x * 2

    sent = comm.dispatch(x, idx, weights)
    held = sent.route.recv_from >= 0
    calls.clear()
    assert torch.equal(torch.compile(step, backend="eager")(x)[held], sent.x[held] * 2)
    assert calls == []


@torch.no_grad()
def test_what_is_no_tensor(comm, calls):
    _, idx, _ = given()
    with pytest.raises(TypeError, match="x is a list; allowed: a tensor"):
        comm.dispatch([[1.0]], idx)
    with pytest.raises(TypeError, match="x is None; allowed: a tensor"):
        comm.dispatch(None, idx)
    assert calls == []


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
def test_jagged_tensors_are_rejected_on_all_ranks(comm, monkeypatch, name):
    told: list[str] = []
    monkeypatch.setattr(comm.backend, "reject", lambda operator, text, *args: told.append(text))
    args = dict(zip(("x", "topk_idx", "topk_weights"), given(), strict=True))
    args[name] = torch.nested.nested_tensor([args[name][:1], args[name][1:]], layout=torch.jagged)
    with pytest.raises(TypeError, match=rf"{name} is a NestedTensor; .* such as {name}\.values\(\)"):
        comm.dispatch(**args)
    assert len(told) == 1 and told[0].startswith(f"{name} is a NestedTensor")


def without_backend(comm: ep_ops.Communicator, name: str, call: Any) -> None:
    """Let repetitions of a call of that operator return its results, in place of what the backend does."""
    for key, made in list(comm.calls.items()):
        if key[0].name == name:
            run, results = made.run, []
            made.run = lambda a, run=run, results=results: results.append(run(a)) or results[-1]
            call()
            if results:
                made.run = lambda a, results=results: results[0]


MOST_CALLS = {
    "plan": (14, 17),
    "dispatch": (11, 18),
    "dispatch_dynamic": (11, 20),
    "dispatch_planned": (12, 19),
    "combine": (5, 15),
    "combine_gathered": (8, 14),
    "dispatch_start": (16, 20),
    "dispatch_wait": (8, 15),
    "combine_start": (10, 17),
    "combine_wait": (8, 14),
}
"""Method -> Python functions and C functions that a call of it takes on its way to the backend, whose own do not count.
Python 3.11 and torch 2.13 were counted; other releases may take a few more inside torch (``OTHERS``).
From the third time on arguments are recognized, and not checked one by one."""
OTHERS = 2


@torch.no_grad()
@pytest.mark.parametrize("name", MOST_CALLS)
def test_host_time_of_a_call(comm, monkeypatch, name):
    """Only a few calls, of some 0.1 us each, stand between a method and its backend. Whoever adds one changes the
    number here."""
    x, idx, weights = given()
    rows = comm.dispatch(x, idx, weights)
    route = rows.route
    begun, sent = comm.dispatch_start(x, idx, weights), comm.combine_start(rows.x, route, rows.weights)
    calls = {
        "plan": lambda: comm.plan(idx),
        "dispatch": lambda: comm.dispatch(x, idx, weights),
        "dispatch_dynamic": lambda: comm.dispatch(x, idx, weights, exact=True),
        "dispatch_planned": lambda: comm.dispatch_planned(x, route, weights),
        "combine": lambda: comm.combine(rows.x, route, rows.weights),
        "combine_gathered": lambda: comm.combine_gathered(rows.x, route),
        "dispatch_start": lambda: comm.dispatch_start(x, idx, weights),
        "dispatch_wait": lambda: comm.dispatch_wait(begun),
        "combine_start": lambda: comm.combine_start(rows.x, route, rows.weights),
        "combine_wait": lambda: comm.combine_wait(sent),
    }
    calls[name]()  # the first call fills caches
    without_backend(comm, name, calls[name])
    calls[name](), calls[name]()  # the second one is remembered
    python, c = counted(calls[name])
    print(f"{name}: {python} Python functions, {c} C functions")
    most_python, most_c = MOST_CALLS[name]
    assert 0 < python <= most_python + OTHERS and 0 < c <= most_c + OTHERS


MOST_WITH_GRADIENT = {"dispatch": (34, 42), "combine": (25, 43)}
"""The same where something asks for a gradient: a guard checks the arguments."""


@pytest.mark.parametrize("name", MOST_WITH_GRADIENT)
def test_host_time_of_a_call_with_a_gradient(comm, monkeypatch, name):
    x, idx, weights = given()
    sent = comm.dispatch(x, idx, weights)
    asks, y = x.clone().requires_grad_(), sent.x.clone().requires_grad_()
    calls = {
        "dispatch": lambda: comm.dispatch(asks, idx, weights),
        "combine": lambda: comm.combine(y, sent.route, sent.weights),
    }
    calls[name](), calls[name]()  # the second one makes the guard
    without_backend(comm, name, calls[name])
    python, c = counted(calls[name])
    print(f"{name}: {python} Python functions, {c} C functions")
    most_python, most_c = MOST_WITH_GRADIENT[name]
    assert 0 < python <= most_python + OTHERS and 0 < c <= most_c + OTHERS


@torch.no_grad()
def test_an_error_of_a_call_that_has_begun_is_not_rejected_as_well(comm):
    """Behind PyTorch's dispatcher other ranks learn of it once, from the backend."""

    def failing(a):
        raise torch.OutOfMemoryError("no room")

    x, idx, weights = given()
    with (
        mock.patch.multiple(comm.backend, bind=lambda spec, a: failing, interrupted=mock.DEFAULT, reject=mock.DEFAULT)
        as told,
        BaseTorchFunctionMode(),
        pytest.raises(torch.OutOfMemoryError, match="no room"),
    ):  # fmt: skip
        comm.dispatch(x, idx, weights)
    assert told["interrupted"].call_count == 1 and not told["reject"].called


@torch.no_grad()
def test_methods_put_every_argument_in_its_field(comm, monkeypatch):
    """The records of frequent calls are made by position."""
    x, idx, weights = given()
    sent = comm.dispatch(x, idx, weights)
    taken: list[Any] = []

    def call(a):
        taken.append(a._asdict())
        raise KeyboardInterrupt

    scales, residual = torch.zeros(3, 1), torch.zeros(3, 8)
    shared = dict(topk_idx=idx, comm=comm.name, num_local_experts=4, world_size=1)
    how = dict(layout="padded", scales=scales, format="f", scales_as="s", zeros=True)
    grouped = how | {"layout": "grouped"}
    along = {name: getattr(sent.route, name) for name in ("send_rows", "arrivals", "offs", "counts", "alignment")}
    along |= dict(topk_idx=sent.route.topk_idx, max_tokens=sent.route.max_tokens, comm=comm.name)
    cases = [
        (
            table.DISPATCH,
            lambda: comm.dispatch(x, idx, weights, slots=3, max_tokens=5, alignment=7, **how),
            dict(x=x, topk_weights=weights, capacity=12, alignment=7, slots=3, max_tokens=5, **shared, **how),
        ),
        (
            table.DISPATCH_DYNAMIC,
            lambda: comm.dispatch(x, idx, weights, max_tokens=5, alignment=7, exact=True, **grouped),
            dict(x=x, topk_weights=weights, alignment=7, max_tokens=5, **shared, **grouped),
        ),
        (
            table.COMBINE,
            lambda: comm.combine(sent.x, sent.route, sent.weights, residual=residual, format="f", grad_format="g"),
            dict(y=sent.x, recv_weights=sent.weights, residual=residual, format="f", grad_format="g", **along),
        ),
    ]
    for operator, method, expected in cases:
        monkeypatch.setattr(operator, "call", call)
        with pytest.raises(KeyboardInterrupt):
            method()
        found = taken.pop()
        assert found.keys() == expected.keys() and all(
            found[name] is expected[name] or found[name] == expected[name] for name in found
        ), operator.name
