"""Calls with tensors and sizes like those of an earlier call run without checks, on their own tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_rank import WRONG, communicator, direct_calls, given, many

import ep_ops
from ep_ops.backends import calls as remembered
from ep_ops.operators import OPERATORS, table
from meta_kernels.arguments import CombineArgs, DispatchArgs


@pytest.fixture
def comm() -> Iterator[ep_ops.Communicator]:
    with communicator() as made:
        yield made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return direct_calls(monkeypatch)


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
@pytest.mark.parametrize("scales", [False, True], ids=["", "scales"])
def test_int64_ids_are_converted_before_calls_are_looked_up(comm, calls, monkeypatch, scales):
    """A call with int64 ids is looked up once, and every other argument keeps its place."""
    x, idx, weights = given()
    expected = many(comm, x, idx, weights, capacity=32, zeros=True)
    monkeypatch.setattr(table.DISPATCH, "repeat", lambda a: pytest.fail("ids are not converted"))
    wide = idx.long()
    wide[2, 1] = 2**32 - 1  # which must not become a valid id
    with pytest.raises(ValueError, match=r"topk_idx\[2, 1\] is 2147483647 or more"):
        comm.dispatch(x, wide, weights, capacity=32, zeros=True)
    calls.clear()
    found = comm.dispatch(x, idx.long(), weights, capacity=32, zeros=True)
    assert calls == ["dispatch"] and found.route.topk_idx.dtype == torch.int32
    assert torch.equal(found.x, expected.x) and torch.equal(found.route.recv_from, expected.route.recv_from)
    taken: list[DispatchArgs] = []
    monkeypatch.setattr(table.DISPATCH, "call", lambda a: taken.append(a) or expected)
    monkeypatch.setattr(comm, "_dispatched", lambda *given: None)
    by = torch.zeros(3, 1) if scales else None
    how: dict[str, Any] = dict(layout="padded", alignment=2, slots=8, scales=by, format="f", scales_as="s", zeros=True)
    comm.dispatch(x, idx.long(), weights, **how)
    (a,) = taken
    assert type(a) is DispatchArgs and a.topk_idx.dtype == torch.int32 and a.x is x and a.topk_weights is weights
    assert a[3:] == (32, 2, 8, 6, 4, 1, comm.name, "padded", by, "f", "s", True)


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
    bind = comm.backend.bind

    def counted(spec, a):
        bound.append((spec, a.topk_idx.shape[0]))
        return bind(spec, a)

    monkeypatch.setattr(comm.backend, "bind", counted)
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
def test_forgotten_calls_are_bound_anew(comm, monkeypatch):
    """All of them, the latest one and those that were not used for long too: a choice that a launch was bound with may
    have changed."""
    monkeypatch.setattr(remembered, "MOST_CALLS", 4)
    x, idx, _ = given()
    for tokens in (1, 2, 3):
        many(comm, x[:tokens], idx[:tokens])
    bound: list[int] = []
    bind = comm.backend.bind
    monkeypatch.setattr(comm.backend, "bind", lambda spec, a: bound.append(a.topk_idx.shape[0]) or bind(spec, a))
    for tokens in (3, 2, 3):
        comm.dispatch(x[:tokens], idx[:tokens])
    assert not bound, "they are remembered"
    for tokens in (3, 2):
        comm.calls.forget()
        comm.dispatch(x[:tokens], idx[:tokens])
    assert bound == [3, 2]


@torch.no_grad()
def test_a_destroyed_communicator_remembers_nothing(comm, monkeypatch):
    """Calls of a destroyed communicator run neither on its own backend nor on that of another one of its name."""
    args = given()
    many(comm, *args)
    comm.destroy()
    assert not comm.calls
    monkeypatch.setattr(comm.backend, "bind", lambda spec, a: pytest.fail("runs on a destroyed backend"))
    with ep_ops.Communicator(config=comm.config, device="cpu") as other:
        assert other.name == comm.name
        many(other, *args)
        with pytest.raises(RuntimeError, match="was destroyed"):
            many(comm, *args)
        assert len(other.calls) == 1
    assert not comm.calls
