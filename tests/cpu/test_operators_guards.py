"""Calls with gradients and calls of ``torch.ops.ep`` check arguments like those of an earlier call by a guard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import torch
from one_rank import WRONG, communicator, given

import ep_ops
from ep_ops.backends import calls as remembered
from ep_ops.operators import OPERATORS, table
from ep_ops.operators.gradients import COMBINE_BACKWARD, DISPATCH_BACKWARD, DISPATCH_PLANNED
from ep_ops.operators.operator import Operator
from meta_kernels.arguments import (
    CombineArgs,
    CombineBackwardArgs,
    CombineGatheredArgs,
    DispatchArgs,
    DispatchBackwardArgs,
    DispatchPlannedArgs,
    PlanArgs,
)


@pytest.fixture
def comm() -> Iterator[ep_ops.Communicator]:
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=6, symmetric_rows=64)
    with ep_ops.Communicator(**sizes, device="cpu", dtype=torch.float32, strict=False) as made:
        yield made


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose arguments are checked one by one."""
    names: list[str] = []

    def noting(op: Operator) -> Callable[[Any, Any], None]:
        check = op.check

        def run(comm: Any, a: Any) -> None:
            names.append(op.name)
            check(comm, a)

        return run

    for op in OPERATORS:
        monkeypatch.setattr(op, "check", noting(op))
    return names


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_training_steps_are_checked_once(comm, checked, weighted, split):
    """From the third step on no argument of forward and backward is checked one by one, and gradients are the same. A
    step in which other tensors ask for gradients is checked again."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    x, by = torch.randn(3, 8, generator=draw), torch.randn(3, 8, generator=draw)
    idx, weights = given()[1], torch.rand(3, 2, generator=draw)

    def step(more: float = 0.0, ask: bool = True) -> list[torch.Tensor]:
        rows, scale = (x + more).requires_grad_(), weights.clone().requires_grad_(ask) if weighted else None
        if split:
            sent = comm.dispatch_wait(comm.dispatch_start(rows, idx, scale))
            out = comm.combine_wait(comm.combine_start(sent.x, sent.route, sent.weights))
        else:
            sent = comm.dispatch(rows, idx, scale)
            out = comm.combine(sent.x, sent.route, sent.weights)
        (out * by).sum().backward()
        return [out.detach(), rows.grad, *([] if scale is None or not ask else [scale.grad])]

    first = step()
    step(), step()
    checked.clear()
    again = step()
    kept = [name for name in checked if name not in ("dispatch_backward_wait", "combine_backward_wait")]
    assert kept == [] and all(map(torch.equal, first, again)) and all(bool(found.any()) for found in again)
    moved = step(1.0)
    assert checked == kept + [name for name in checked if "backward_wait" in name]
    comm.calls.forget()
    assert all(map(torch.equal, moved, step(1.0)))
    if weighted and not split:
        checked.clear()
        step(ask=False)
        assert checked != [], "the guards are for weights that ask for a gradient"


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("way", ["gradients", "operator"])
def test_what_is_wrong_is_rejected_behind_a_guard(comm, what, way):
    x, idx, weights = given()

    def dispatch(x: Any, idx: Any, weights: Any) -> Any:
        if way == "gradients":
            return comm.dispatch(x.requires_grad_() if isinstance(x, torch.Tensor) else x, idx, weights, capacity=32).x
        return torch.ops.ep.dispatch(x, weights, idx, 32, 16, 0, 6, 4, 1, comm.name)[0]

    expected = [dispatch(x.clone(), idx, weights).detach() for _ in range(4)][-1]
    change, reason = WRONG[what]
    if way == "operator" and what == "no tensor":
        reason = "expected a .*Tensor|Expected a value of type 'Tensor'"
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=reason):
            dispatch(*change(x.clone().detach(), idx, weights))
    found = dispatch(x.clone(), idx, weights)
    held = ~expected.isnan()
    assert torch.equal(found.detach()[held], expected[held]) and bool(held.any())


def _calls(comm: ep_ops.Communicator) -> dict[str, tuple[Operator, Any]]:
    """Right arguments of operators."""
    x, idx, weights = given()
    sent = comm.dispatch(x, idx, weights)
    route, name = sent.route, comm.name
    own = comm.num_local_experts, comm.world_size, name
    along, rows = (*route.tensors, *route.ints, name), sent.x.nan_to_num()
    known = *route.tensors, route.num_rows, *route.ints, name
    return {
        "plan": (table.PLAN, PlanArgs(idx, 64, 16, 0, 6, *own)),
        "dispatch": (table.DISPATCH, DispatchArgs(x, weights, idx, 64, 16, 0, 6, *own)),
        "dispatch_planned": (DISPATCH_PLANNED, DispatchPlannedArgs(x, weights, *known)),
        "combine": (table.COMBINE, CombineArgs(rows, sent.weights.nan_to_num(), *along)),
        "combine_gathered": (table.COMBINE_GATHERED, CombineGatheredArgs(rows, *along)),
        "dispatch_backward": (DISPATCH_BACKWARD, DispatchBackwardArgs(rows, sent.weights.nan_to_num(), *along)),
        "combine_backward": (COMBINE_BACKWARD, CombineBackwardArgs(x, rows, sent.weights.nan_to_num(), *known)),
    }


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda t: None,
    "dtype": lambda t: t.double() if t.is_floating_point() else t.long(),
    "fewer": lambda t: t[: max(0, t.shape[0] - 1)],
    "dimensions": lambda t: t[None],
    "flat": lambda t: t.flatten(),
    "no dimensions": lambda t: t.flatten()[0],
    "strides": lambda t: torch.stack((t, t), -1)[..., 0],
    "address": _misaligned,
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "same": lambda t: t.clone(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["plan", "dispatch", "dispatch_planned", "combine", "combine_gathered",
                                  "dispatch_backward", "combine_backward"])  # fmt: skip
def test_results_and_errors_do_not_depend_on_guards(comm, checked, name):
    """Whatever replaces a tensor or a number, the operator returns or raises what it does without earlier calls."""
    op, a = _calls(comm)[name]

    def outcome(given: Any) -> Any:
        try:
            made = op.registered.direct(tuple(given))[0]
        except Exception as error:
            return type(error), re.sub("0x[0-9a-f]+|communicator '.*?'", "", str(error))
        return made if isinstance(made, tuple) else (made,)

    def same(one: Any, other: Any) -> bool:
        if isinstance(one[0], type) or isinstance(other[0], type):
            return one == other
        return all(torch.equal(p, q) or torch.allclose(p, q, equal_nan=True) for p, q in zip(one, other, strict=True))

    changed: list[tuple[str, Any]] = []
    for field, value in a._asdict().items():
        if isinstance(value, torch.Tensor):
            changed += [(f"{field}: {how}", a._replace(**{field: change(value)})) for how, change in CHANGES.items()]
        elif isinstance(value, int):
            others = (bool(value), float(value), value + 1, value - 1, -1)
            changed += [(f"{field}: {other!r}", a._replace(**{field: other})) for other in others]
    comm.calls.forget()
    fresh = []
    for what, other in changed:
        comm.calls.forget()
        fresh.append((what, other, outcome(other)))
    comm.calls.forget()
    for _ in range(3):
        expected = outcome(a)
    checked.clear()
    assert same(outcome(a), expected) and checked == [], "a guard replaces the checks"
    for what, other, wanted in fresh:
        if "meta" in what and not isinstance(wanted[0], type):
            continue
        assert same(outcome(other), wanted), what
        checked.clear()
        assert same(outcome(a), expected) and checked == [], what
    assert sum(isinstance(wanted[0], type) for _, _, wanted in fresh) > len(fresh) // 3


def test_a_bounded_number_of_guards_is_kept(comm, checked, monkeypatch):
    monkeypatch.setattr(remembered, "MOST_GUARDS", 2)
    x, idx, weights = given()

    def dispatch(rows: bool, scale: bool) -> None:
        comm.dispatch(x.clone().requires_grad_(rows), idx, weights.clone().requires_grad_(scale))

    for _ in range(3):
        for asks in ((True, True), (True, False), (False, True)):
            dispatch(*asks)
    assert [len(call.checked) for call in comm.calls.values()] == [2]


def test_tensors_of_ended_transforms_are_unwrapped():
    """Tensors that a transform of torch.func leaves behind stand for those that they wrap, also with gradients."""
    left: list[torch.Tensor] = []
    x, idx, weights = given()
    torch.func.vjp(lambda rows: (left.append(rows), rows.sum())[1], x)
    (dead,) = left
    assert torch._C._functorch.is_functorch_wrapped_tensor(dead)
    asks = weights.clone().requires_grad_()
    with communicator() as comm:
        for _ in range(3):
            expected = comm.dispatch(x, idx, asks)
            found = comm.dispatch(dead, idx, asks)
            held = expected.route.recv_from >= 0
            assert torch.equal(found.x[held], expected.x[held]) and bool(held.any())
            assert found.weights is not None and found.weights.requires_grad
