"""Methods, layers and gradients call the implementation itself only where nobody but autograd wants to hear of the
operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cases
import pytest
import torch
from calls import counted
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import ep_ops
from ep_ops.backends import calls as remembered
from ep_ops.operators import OPERATORS, table
from meta_kernels.arguments import CombineArgs, DispatchArgs


@pytest.fixture
def comm() -> Iterator[ep_ops.Communicator]:
    with ep_ops.Communicator(
        num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=6, device="cpu", dtype=torch.float32, strict=False
    ) as made:
        yield made


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Implementations that were called directly, with and without their gradients."""
    made: list[str] = []

    def counted(name, run):
        def runs(*args):
            made.append(name)
            return run(*args)

        return runs

    for op in (each.registered for each in OPERATORS):
        monkeypatch.setattr(op, "run", counted(op.name, op.run))
        if op.differentiable is not None:
            monkeypatch.setattr(op, "differentiable", counted(op.name, op.differentiable))
    names: dict[Any, str] = {}
    add, remember = remembered.CallCache.add, remembered.Call.remember

    def added(self, key, call):
        names[call] = key[0].name
        return add(self, key, call)

    def remembers(self, *given):
        remember(self, *given)
        if (accepts := self.accepts) is not None:
            self.accepts = lambda *given: accepts(*given) and (made.append(names[self]) or True)

    monkeypatch.setattr(remembered.CallCache, "add", added)
    monkeypatch.setattr(remembered.Call, "remember", remembers)
    return made


def given(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    idx = torch.tensor([[0, 1], [2, 3], [1, -1]], dtype=torch.int32, device=device)
    return torch.randn(3, 8, device=device), idx, torch.rand(3, 2, device=device)


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


def many(comm: ep_ops.Communicator, *args: Any, **more: Any) -> Any:
    """The result of a call that is recognized."""
    for _ in range(3):
        sent = comm.dispatch(*args, **more)
    return sent


def no_longer_aligned(x: torch.Tensor) -> torch.Tensor:
    moved = torch.empty(x.numel() + 2, dtype=x.dtype)[2:].view_as(x).copy_(x)
    assert moved.data_ptr() % 16 == 8, "which is not enough"
    return moved


WRONG = {
    "dtype": (lambda x, idx, w: (x.double(), idx, w), "x has dtype torch.float64"),
    "shape": (lambda x, idx, w: (x[:, :4], idx, w), "x has shape"),
    "fewer rows": (lambda x, idx, w: (x[:2], idx, w), "x has shape"),
    "strides": (lambda x, idx, w: (x.T.contiguous().T, idx, w), "allowed: contiguous"),
    "address": (lambda x, idx, w: (no_longer_aligned(x), idx, w), "multiples of 16 bytes"),
    "no tensor": (lambda x, idx, w: (x.tolist(), idx, w), "x is a list"),
    "weights": (lambda x, idx, w: (x, idx, w[:, :1]), "topk_weights has shape"),
    "ids": (lambda x, idx, w: (x, idx.float(), w), "topk_idx has dtype"),
    "no dimensions": (lambda x, idx, w: (x[0, 0], idx, w), r"x has shape \(\)"),
    "ids without dimensions": (lambda x, idx, w: (x, idx[0, 0], w), r"topk_idx has shape \(\)"),
}


@torch.no_grad()
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_not_recognized(comm, calls, what):
    x, idx, weights = given()
    many(comm, x, idx, weights)
    change, reason = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=reason):
        comm.dispatch(*change(x, idx, weights))
    with pytest.raises(ValueError, match="capacity is 7"):
        comm.dispatch(x, idx, weights, capacity=7, alignment=2)
    calls.clear()
    comm.dispatch(x, idx, weights)
    assert calls == ["dispatch"]


@torch.no_grad()
@pytest.mark.parametrize("method", ["dispatch", "dispatch_planned", "combine", "combine_gathered", "plan", "starts"])
def test_equal_values_of_another_type_are_not_recognized(method: str) -> None:
    """1 equals True and 16.0 equals 16, but they are rejected however often the right call has been made."""
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=1, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, device="cpu", alignment=1, symmetric_rows=8) as comm:
        x, idx, weights = torch.ones(1, 8), torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2)
        sent = comm.dispatch(x, idx, weights)
        routes = {name: sent.route._replace(**{name: True}) for name in ("alignment", "max_tokens")}
        routes["max_tokens is a float"] = sent.route._replace(max_tokens=1.0)
        of_routes: dict[str, dict[str, Any]] = {name: {"route": route} for name, route in routes.items()}
        flags: dict[str, dict[str, Any]] = {"zeros is an int": {"zeros": 1}, "zeros is a float": {"zeros": 1.0}}
        sizes = {name: {name: True} for name in ("max_tokens", "alignment")}

        def start(flight: Any = 0, route: Any = sent.route, **more: Any) -> None:
            started = comm.dispatch_start(x, idx, flight=flight, **more)
            comm.dispatch_wait(started)
            comm.combine_wait(comm.combine_start(sent.x, route, flight=flight))

        call, wrong = {
            "dispatch": (lambda **more: comm.dispatch(x, idx, weights, **{"zeros": True} | more), flags | sizes),
            "dispatch_planned": (
                lambda route=sent.route, **more: comm.dispatch_planned(x, route, weights, **{"zeros": True} | more),
                flags | of_routes | {"num_rows": {"route": sent.route._replace(num_rows=float(sent.route.num_rows))}},
            ),
            "combine": (lambda route=sent.route: comm.combine(sent.x, route, sent.weights), of_routes),
            "combine_gathered": (lambda route=sent.route: comm.combine_gathered(sent.x, route), of_routes),
            "plan": (lambda **more: comm.plan(idx, **more), sizes),
            "starts": (
                start,
                flags | of_routes | {"flight is a bool": {"flight": False}, "flight is a float": {"flight": 0.0}},
            ),
        }[method]
        for name, more in wrong.items():
            for _ in range(3):
                call()
            with pytest.raises((TypeError, ValueError), match=name):
                call(**more)


@torch.no_grad()
@pytest.mark.parametrize("field", ["topk_idx", "send_rows", "arrivals", "offs", "counts"])
def test_a_route_without_a_tensor_is_not_recognized(comm, monkeypatch, field):
    """A route without a tensor is not recognized, nor mistaken for a call without weights. The other ranks are
    informed."""
    x, idx, _ = given()
    sent = many(comm, x, idx)
    for _ in range(3):
        comm.combine(sent.x, sent.route)
        comm.dispatch_planned(x, sent.route)
    told: list[str] = []
    monkeypatch.setattr(comm.backend, "reject", lambda operator, *args: told.append(operator))
    route = sent.route._replace(**{field: None})
    for call in (lambda: comm.combine(sent.x, route), lambda: comm.dispatch_planned(x, route)):
        with pytest.raises(TypeError, match=f"{field} is None; allowed: a tensor"):
            call()
    assert told == ["combine", "dispatch_planned"]


def test_what_is_recognized_has_right_values(comm):
    """Other values, no weights, fewer tokens, gradients and other modes behind a call that is recognized."""
    x, idx, weights = given()
    many(comm, x, idx, weights)
    many(comm, x, idx)
    for rows, ids, by in ((x + 1, idx.flip(0), weights * 2), (x[:2], idx[:2], weights[:2]), (x * 3, idx, None)):
        sent, fresh = comm.dispatch(rows, ids, by), torch.ops.ep.dispatch(
            rows, by, ids, comm.capacity(), comm.alignment, 0, 6, 4, 1, comm.name
        )  # fmt: skip
        held = sent.route.recv_from >= 0
        assert torch.equal(sent.x[held], fresh[0][held]) and torch.equal(
            sent.route.recv_from, comm.dispatch(rows, ids).route.recv_from
        )
        assert (sent.weights is None) == (by is None) and (
            by is None or torch.equal(sent.weights[held], fresh[2][held])
        )
    asks = x.clone().requires_grad_()
    comm.dispatch(asks, idx, weights).x.sum().backward()
    assert asks.grad is not None and bool(asks.grad.any())
    asks = weights.clone().requires_grad_()
    with torch.no_grad():
        many(comm, x, idx, asks)
    comm.dispatch(x, idx, asks).weights.nan_to_num().sum().backward()
    assert asks.grad is not None and bool(asks.grad.any())
    expected = comm.dispatch(x, idx).x[held]
    with torch.inference_mode():
        assert torch.equal(many(comm, x, idx).x[held], expected)
    comm.destroy()
    with pytest.raises(RuntimeError, match="was destroyed"):
        comm.dispatch(x, idx, weights)


@torch.no_grad()
def test_what_needs_conversion_is_not_recognized(comm, calls):
    """Calls are looked up before their tensors are converted: others than those of the earlier call are converted."""
    x, idx, weights = given()
    sent = many(comm, x, idx, weights)
    expected = [comm.combine(sent.x, sent.route, sent.weights) for _ in range(3)][0]
    wide, halves = idx.long(), weights.bfloat16()
    exact = comm.dispatch(x, idx, halves.float())
    by_halves = comm.combine(exact.x, exact.route, exact.weights)
    for _ in range(3):
        for ids, by, wanted in ((wide, weights, expected), (idx, halves, by_halves), (wide, halves, by_halves)):
            for shape in ((3,), (1, 3), (3, 1)):
                got = comm.dispatch(x.view(*shape, 8), ids.view(*shape, 2), by.view(*shape, 2))
                assert got.route.batch == (shape if len(shape) > 1 else None)
                assert got.route.topk_idx.dtype == torch.int32 and torch.equal(got.route.topk_idx, idx)
                home = comm.combine(got.x, got.route, got.weights)
                assert home.shape == (*shape, 8) and torch.equal(home.view(3, 8), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            got = comm.dispatch(x.bfloat16(), idx, weights)
        assert got.x.dtype == torch.float32 and torch.equal(got.route.recv_from, sent.route.recv_from)
    calls.clear()
    got = comm.dispatch(x, idx, weights)
    comm.combine(got.x, got.route, got.weights)
    assert calls == ["dispatch", "combine"]


@torch.no_grad()
def test_weights_of_token_major_rows_are_not_recognized(comm):
    """A combine of grouped rows with weights is remembered, and the tensors of both have the same shapes."""
    x, idx, weights = given()
    sizes = {"capacity": 16, "alignment": 1}
    grouped = many(comm, x, idx, weights, **sizes)
    for _ in range(3):
        comm.combine(grouped.x, grouped.route, grouped.weights)
    rows = comm.dispatch(x, idx, weights, layout="token_major", **sizes)
    for _ in range(3):
        comm.combine(rows.x, rows.route)
        with pytest.raises(ValueError, match="weights are given for token-major rows"):
            comm.combine(rows.x, rows.route, grouped.weights)


@torch.no_grad()
def test_calls_that_differ_in_one_argument_are_recognized_in_turns(comm, calls):
    """A call is compared with the latest one first, and each argument tells it from others: the results are its own."""
    x, idx, weights = given()
    sizes: list[dict[str, Any]] = [
        {}, {"topk_weights": None}, {"capacity": 16}, {"layout": "token_major"}, {"zeros": True}, {"max_tokens": 5}
    ]  # fmt: skip
    ways = [{"x": x, "topk_idx": idx, "topk_weights": weights, "zeros": False, **more} for more in sizes]
    ways.append(ways[0] | {name: ways[0][name][:2] for name in ("x", "topk_idx", "topk_weights")})

    def run(way: dict[str, Any]) -> list[Any]:
        sent = comm.dispatch(**way)
        each = None if sent.route.layout == "token_major" else sent.weights
        held = sent.route.recv_from >= 0
        home = comm.combine(sent.x, sent.route, each)
        more = comm.combine(sent.x, sent.route, each, residual=home)
        return [sent.x[held], sent.x.shape, sent.route.ints, sent.weights is None, home, more]

    fresh = []
    for way in ways:
        comm.calls.forget()
        fresh.append(run(way))
    for _ in range(2):
        [run(way) for way in ways]
    calls.clear()
    for way, expected in [*zip(ways, fresh, strict=True)] + [*zip(ways, fresh, strict=True)][::-1]:
        for got, wanted in zip(run(way), expected, strict=True):
            assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted, way
    assert calls.count("dispatch") == 2 * len(ways), "all of them are recognized"


@torch.no_grad()
def test_other_tensors_are_not_compared(comm, monkeypatch):
    """A residual or scales have no place in a remembered call. Comparing them with it takes longer than its checks."""
    x, idx, weights = given()
    sent = many(comm, x, idx, weights)
    for _ in range(3):
        comm.combine(sent.x, sent.route, sent.weights)
    along = *sent.route.tensors, *sent.route.ints, comm.name
    sizes = sent.route.num_rows, sent.route.alignment, 0, 6, 4, 1, comm.name
    args: list[Any] = [CombineArgs(sent.x, sent.weights, *along), DispatchArgs(x, weights, idx, *sizes)]
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda *_: pytest.fail("tensors are compared"))
    for op, a, other in zip((table.COMBINE, table.DISPATCH), args, ("residual", "scales"), strict=True):
        assert op.repeat(a._replace(**{other: x})) is None


@torch.no_grad()
def test_calls_of_other_sizes_are_recognized_in_turns(comm, monkeypatch):
    """Other numbers of tokens, or of rows, are calls of their own: none takes the place of another one."""
    x, idx, weights = given()

    def turn() -> None:
        for tokens, capacity in ((3, 32), (2, 32), (3, 48)):
            sent = comm.dispatch(x[:tokens], idx[:tokens], weights[:tokens], capacity=capacity, alignment=16)
            comm.combine(sent.x, sent.route, sent.weights)
            comm.combine_wait(comm.combine_start(sent.x, sent.route, sent.weights))

    turn()
    assert all(call.accepts is None for call in comm.calls.values()), "a call that comes once is not worth its guard"
    turn()
    for op in OPERATORS:
        monkeypatch.setattr(op.registered, "run", lambda *args, name=op.name: pytest.fail(f"{name} is checked"))
    turn()


@torch.no_grad()
def test_one_token_is_recognized_whatever_its_stride(comm, calls, monkeypatch):
    x, idx, weights = given()
    many(comm, x[:1], idx[:1], weights[:1])
    wide = torch.randn(1, 24)[:, 8:16]
    assert wide.is_contiguous() and wide.stride() != x[:1].stride()
    monkeypatch.setattr(table.DISPATCH.registered, "run", lambda *args: pytest.fail("it is checked again"))
    sent = comm.dispatch(wide, idx[:1], weights[:1])
    held = sent.route.recv_from >= 0
    assert torch.equal(sent.x[held], wide.expand(2, 8))


@torch.no_grad()
def test_what_is_remembered(comm, monkeypatch):
    """A bounded number of calls is remembered, the ones used last. A call with a tensor behind ``comm``, which no guard
    would compare, is checked each time."""
    x, idx, weights = given()
    sent = comm.dispatch(x, idx, weights)
    for _ in range(3):
        comm.combine(sent.x, sent.route, sent.weights, residual=x)
    assert [call.accepts for call in comm.calls.values()] == [None, None]
    monkeypatch.setattr(remembered, "MOST_CALLS", 4)
    for tokens in range(4):
        many(comm, x[:tokens], idx[:tokens])
        many(comm, x, idx)
        assert len({**comm.calls, **comm.calls._older}) <= 4
    monkeypatch.setattr(table.DISPATCH.registered, "run", lambda *args: pytest.fail("it is checked again"))
    comm.dispatch(x, idx)


@torch.no_grad()
def test_launches_are_bound_once(comm, monkeypatch):
    """Launches are bound once for given sizes, with and without weights, also by calls that are checked. Other ranks
    learn of errors in calls that are not checked."""
    x, idx, weights = given()
    bound: list[Any] = []
    prepare = comm.backend.prepare

    class Counted:
        def __init__(self, spec):
            self.spec, self.prepared = spec, prepare(spec)

        def bind(self, a):
            bound.append((self.spec, a.topk_idx.shape[0]))
            return self.prepared.bind(a)

    monkeypatch.setattr(comm.backend, "prepare", Counted)
    for tokens, by in ((3, weights), (3, None), (2, None)):
        many(comm, x[:tokens], idx[:tokens], by)
    assert [(spec.kind, spec.weighted, tokens) for spec, tokens in bound] == [
        ("dispatch", True, 3), ("dispatch", False, 3), ("dispatch", False, 2)
    ]  # fmt: skip
    of = table.DISPATCH.registered
    (call,) = [call for key, call in comm.calls.items() if key[0] is of and key[2:] == (False, 3, 3)]

    def failing(a):
        raise torch.OutOfMemoryError("no room")

    run, told = call.run, []
    monkeypatch.setattr(comm.backend, "interrupted", lambda *args: told.append(args))
    monkeypatch.setattr(call, "run", failing)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        comm.dispatch(x, idx, weights)
    ((name, error, again, flight, max_tokens),) = told
    assert (name, flight, max_tokens) == ("dispatch", 0, 6) and isinstance(error, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        again()
    monkeypatch.setattr(call, "run", run)
    assert comm.dispatch(x, idx, weights).x.shape == (comm.capacity(), 8)


@torch.no_grad()
def test_a_destroyed_communicator_remembers_nothing(comm, monkeypatch):
    """Calls of a destroyed communicator run neither on its own backend nor on that of another one of its name."""
    args = given()
    many(comm, *args)
    comm.destroy()
    assert not comm.calls
    monkeypatch.setattr(comm.backend, "prepare", lambda spec: pytest.fail("runs on a destroyed backend"))
    with ep_ops.Communicator(config=comm.config, device="cpu") as other:
        assert other.name == comm.name
        many(other, *args)
        with pytest.raises(RuntimeError, match="was destroyed"):
            many(comm, *args)
        assert len(other.calls) == 1
    assert not comm.calls


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
    "plan": (16, 18),
    "dispatch": (13, 19),
    "dispatch_dynamic": (13, 21),
    "dispatch_planned": (14, 20),
    "combine": (8, 15),
    "combine_gathered": (13, 16),
    "dispatch_start": (19, 24),
    "dispatch_wait": (10, 18),
    "combine_start": (14, 20),
    "combine_wait": (13, 17),
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


MOST_WITH_GRADIENT = {"dispatch": (61, 60), "combine": (51, 67)}
"""The same where something asks for a gradient: every argument is checked each time."""


@pytest.mark.parametrize("name", MOST_WITH_GRADIENT)
def test_host_time_of_a_call_with_a_gradient(comm, monkeypatch, name):
    x, idx, weights = given()
    sent = comm.dispatch(x, idx, weights)
    asks, y = x.clone().requires_grad_(), sent.x.clone().requires_grad_()
    calls = {
        "dispatch": lambda: comm.dispatch(asks, idx, weights),
        "combine": lambda: comm.combine(y, sent.route, sent.weights),
    }
    calls[name]()  # the first call fills caches
    without_backend(comm, name, calls[name])
    python, c = counted(calls[name])
    print(f"{name}: {python} Python functions, {c} C functions")
    most_python, most_c = MOST_WITH_GRADIENT[name]
    assert 0 < python <= most_python + OTHERS and 0 < c <= most_c + OTHERS


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
