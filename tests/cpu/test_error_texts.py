"""Errors name the argument, what was given, and what is allowed."""

from __future__ import annotations

import pickle
from typing import Any

import numpy
import pytest
import torch

import ep_ops
from ep_ops import nn
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig

SIZES: dict[str, Any] = dict(num_experts=4, hidden_size=16, top_k=2, max_tokens_per_rank=8, dtype=torch.float32)
X, IDS, WEIGHTS = torch.ones(4, 16), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)


@pytest.fixture
def comm() -> Any:
    with ep_ops.Communicator(**SIZES, device="cpu") as made:
        yield made


@pytest.mark.parametrize("alignment", [0, -4])
def test_alignment_of_a_capacity(comm: ep_ops.Communicator, alignment: int) -> None:
    with pytest.raises(ValueError, match=f"alignment is {alignment}; allowed: an int of at least 1"):
        comm.capacity(alignment=alignment)


def test_bounds_beyond_int32_are_bounds(comm: ep_ops.Communicator) -> None:
    for bound in (2**31, 2**70):
        with pytest.raises(ValueError, match=f"max_tokens is {bound}; allowed: 0..max_tokens_per_rank 8"):
            comm.dispatch(X, IDS, max_tokens=bound)


@pytest.mark.parametrize(("given", "said"), [(2**40, "2147483647 or more"), (9, "9"), (-7, "-2")])
def test_ids_beyond_int32(comm: ep_ops.Communicator, given: int, said: str) -> None:
    ids = IDS.clone()
    ids[2, 1] = given
    with pytest.raises(ValueError, match=rf"topk_idx\[2, 1\] is {said} on rank 0; expert ids are 0..3, or -1 for none"):
        comm.dispatch(X, ids)


def test_weights_of_a_combine(comm: ep_ops.Communicator) -> None:
    sent = comm.dispatch(X, IDS, WEIGHTS)
    assert sent.weights is not None
    for weights, error in ((sent.weights[1:], ValueError), (sent.weights.double(), TypeError)):
        with pytest.raises(error, match=r"recv_weights has .*\(Methods call this argument `weights`.\)"):
            comm.combine(sent.x, sent.route, weights)


@pytest.mark.parametrize("value", [-9, 10**6])
@pytest.mark.parametrize("place", ["copies", "owned", "sources"])
def test_lists_of_other_numbers(comm: ep_ops.Communicator, value: int, place: str) -> None:
    sent = comm.dispatch(X, IDS, WEIGHTS)
    route = sent.route._replace(arrivals=sent.route.arrivals.clone())
    last = int(route.sources[-1])
    {"copies": route.copies[last], "owned": route.owned[3], "sources": route.sources[-1:]}[place].fill_(value)
    for call in (lambda: comm.combine(sent.x, route), lambda: comm.dispatch_planned(X, route)):
        with pytest.raises(ValueError, match="arrivals on rank 0 holds other numbers than those of a plan or dispatch"):
            call()
    assert comm.combine(sent.x, sent.route, sent.weights).shape == X.shape


def test_experts_per_rank_in_an_array() -> None:
    with pytest.raises(ValueError, match=r"experts_per_rank is array\(\[2, 2\]\); allowed: one int"):
        ep_ops.Communicator(**SIZES, experts_per_rank=numpy.array([2, 2]), device="cpu")


def test_layers_on_a_destroyed_communicator() -> None:
    comm = ep_ops.Communicator(**SIZES, device="cpu")
    comm.destroy()
    for kind in (nn.Experts, nn.MoELayer):
        with pytest.raises(RuntimeError, match="communicator .* was destroyed"):
            kind(comm, 8)


def test_pickles() -> None:
    with MoECommunicator(MoECommunicatorConfig(**SIZES), device="cpu") as moe:
        with pytest.raises(TypeError, match="a MoECommunicator cannot be pickled; create it in each process"):
            pickle.dumps(moe)
        assert pickle.loads(pickle.dumps(moe.comm)) is moe.comm


OPTIONS = [
    "num_experts", "hidden_size", "top_k", "max_tokens_per_rank", "dtype", "experts_per_rank", "alignment", "backend",
    "timeout", "dispatch_sms", "combine_sms", "latency_max_tokens", "symmetric_rows", "strict", "domain_size",
    "staging_bytes", "overflow", "name", "check", "wire", "bundle", "device", "group",
]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make", [ep_ops.Communicator, ep_ops.Communicator.shared])
def test_options_in_arrays(make: Any, option: str) -> None:
    given = {**SIZES, "device": "cpu", option: numpy.array([1, 2])}
    with pytest.raises((TypeError, ValueError), match=rf"{option} is array\(\[1, 2\]\); allowed: "):
        make(**given)


@pytest.mark.parametrize(("option", "value"), [("group", 8), ("device", -1), ("strict", "no"), ("strict", 2)])
def test_options_of_other_types(option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{option} is {value!r}; allowed: "):
        ep_ops.Communicator(**{**SIZES, "device": "cpu", option: value})


def test_a_group_without_this_rank() -> None:
    with pytest.raises(TypeError, match="group does not contain this rank; allowed: "):
        ep_ops.Communicator(torch.distributed.GroupMember.NON_GROUP_MEMBER, **SIZES, device="cpu")


@pytest.mark.parametrize("given", ["", "abc", "1", "0", "-3"])
def test_a_world_size_that_says_nothing(given: str, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", given)
    ep_ops.Communicator(**SIZES, device="cpu").destroy()
    assert not [one for one in recwarn if "WORLD_SIZE" in str(one.message)]


PLAN: dict[str, Any] = {**SIZES, "world_size": 2}


@pytest.mark.parametrize(("layer", "text"), [
    ({"width": 8}, "layer has the keys width; allowed: intermediate_size, which is required, rows, places, redispatch"),
    ({"intermediate_size": 8, "capacity": 3}, "layer has the keys intermediate_size, capacity; allowed: intermediate"),
    ({}, "layer has the keys none; allowed: intermediate_size, which is required"),
    (8, "layer is an int; allowed: a dict of arguments of ep_ops.nn.Experts"),
])  # fmt: skip
def test_layers_of_a_memory_plan(layer: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ep_ops.memory_plan(**PLAN, layer=layer)


def test_arguments_of_functions_between_dispatch_and_combine(comm: ep_ops.Communicator) -> None:
    """Shapes that torch would accept with a wrong result, or reject without naming the argument, raise here."""
    sent = comm.dispatch(X, IDS, WEIGHTS, layout="token_major")
    assert sent.local_idx is not None and sent.weights is not None
    lists = nn.expert_lists(sent.local_idx, 4)
    rows = sent.x.shape[0]
    for call, error, text in (
        (lambda: nn.expert_lists(sent.local_idx[0], 4), ValueError, r"local_idx has shape \(2,\); allowed: \[R, K\]"),
        (lambda: nn.expert_lists(sent.x, 4), TypeError, "local_idx has dtype torch.float32; allowed: torch.int32"),
        (lambda: nn.weights_of_places(sent.weights[1:], lists), ValueError,
            rf"weights has shape \({rows - 1}, 2\); allowed: \({rows}, 2\)"),
        (lambda: nn.weights_of_places(torch.ones(rows + 1, 2), lists), ValueError, "weights has shape"),
        (lambda: nn.swiglu(torch.ones(3, 3)), ValueError, r"gate_and_up has shape \(3, 3\); allowed: \[..., 2F\]"),
        (lambda: nn.load_balancing_loss(torch.ones(2, 2, 4), IDS[:3]), ValueError,
            r"topk_idx has shape \(3, 2\); allowed: \[..., K\] of 4 tokens, like logits"),
        (lambda: nn.router_z_loss(torch.ones(4, 4), IDS[:1]), ValueError, r"topk_idx has shape \(1, 2\); allowed: "),
        (lambda: nn.router_z_loss(4), TypeError, "logits is an int; allowed: a tensor"),  # type: ignore[arg-type]
        (lambda: nn.Router(4, 16, "2"), ValueError, "top_k is '2'; allowed: an int"),  # type: ignore[arg-type]
        (lambda: comm.empty_rows("2"), ValueError, "num_rows is '2'; allowed: an int"),  # type: ignore[arg-type]
        (lambda: comm.last_operations("0"), ValueError, "rank is '0'; allowed: an int"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    grouped = comm.dispatch(X, IDS)
    narrow = torch.ones(grouped.route.num_rows, 64)
    with pytest.raises(ValueError, match=r"F \(half the columns of gate_and_up\) is 32; format 'e4m3/128/pow2' takes"):
        nn.swiglu_quantized(narrow, grouped.route)
    logits = torch.ones(2, 2, 4)
    assert nn.load_balancing_loss(logits, IDS).isfinite() and nn.router_z_loss(logits, IDS).isfinite()


class Gives(torch.nn.Module):
    """A router with a given result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result


@pytest.mark.parametrize("steps", [False, True])
def test_results_of_routers(comm: ep_ops.Communicator, steps: bool) -> None:
    """A linear layer in place of a router, or a tuple of two, raises an error that says what a router returns."""
    for result, given in (
        (X, "a Tensor"),
        ((IDS, WEIGHTS), "a tuple of 2"),
        (None, "a NoneType"),
        ([X] * 4, "a list of 4"),
    ):
        layer = nn.MoELayer(comm, 8, router=Gives(result))
        with pytest.raises(TypeError, match=rf"router returned {given}; allowed: \(topk_idx, topk_weights, logits\)"):
            list(layer.steps(X)) if steps else layer(X)
    layer = nn.MoELayer(comm, 8, router=Gives([IDS, WEIGHTS, None]))
    out = list(layer.steps(X))[-1] if steps else layer(X)
    assert out.shape == X.shape
    with pytest.raises(TypeError, match="experts is a MoELayer; allowed: an Experts"):
        nn.load_experts(layer, lambda name: X, "x.")  # type: ignore[arg-type]
