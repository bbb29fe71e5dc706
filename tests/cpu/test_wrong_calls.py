"""A wrong argument on one rank raises on all ranks, names the argument, and leaves a communicator that can be used."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from ranks import run_ranks
from wrong_calls import EXPERTS, METHODS, MODES, MOST, ROUTE_TENSORS, SURPLUS, Calls, H, K, run_calls

import ep_ops
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig

OFTEN = "no gradients"
SMALL: dict[str, Any] = {
    "num_experts": EXPERTS, "hidden_size": H, "top_k": K, "max_tokens_per_rank": MOST, "dtype": torch.float32,
    "device": "cpu", "timeout": 20, "symmetric_rows": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    "mode", [OFTEN, *(pytest.param(mode, marks=pytest.mark.drawn) for mode in MODES if mode != OFTEN)]
)
def test_some_wrong_arguments(mode: str) -> None:
    check(200, mode)


@pytest.mark.drawn
def test_2000_wrong_arguments() -> None:
    check(2000, OFTEN)


def check(count: int, mode: str) -> None:
    found = run_ranks(2, run_calls, fresh_seed(), count, mode, timeout=550)
    assert found == [[], []], "\n".join(sum(found, []))


def _not_in_signatures() -> list[str]:
    """Arguments that a method does not have, on rank 1, of calls with and without gradients."""
    found = []
    with ep_ops.Communicator(**SMALL) as comm:
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                calls = Calls(comm, gradients)
                for method in METHODS:
                    right = calls.arguments(method)
                    for name, value in {SURPLUS: ("padded",), "misspelled": 1}.items():
                        text = ""
                        try:
                            calls.run(method, right | {name: value} if comm.rank == 1 else right)
                        except (TypeError, ValueError) as error:
                            text = str(error)
                        found.append("" if f"{method} got" in text and name in text else f"{method}({name}): {text}")
                        calls.run(method, right)
    return found


def test_arguments_that_methods_do_not_have() -> None:
    assert run_ranks(2, _not_in_signatures) == [[""] * 28] * 2


def _replicas() -> list[str]:
    """A MoECommunicator with a placement, and wrong ids and bounds on rank 1."""
    wrong_rank, found = dist.get_rank() == 1, []
    sizes = dict(num_experts=4, hidden_size=16, top_k=2, max_tokens_per_rank=8, dtype=torch.float32, timeout=20)
    config = MoECommunicatorConfig(**sizes, placement=(0, 1, 2, 3, 0, 1))
    with MoECommunicator(config, device="cpu") as moe, torch.no_grad():
        x, ids = torch.ones(4, 16), torch.tensor([[0, 1]] * 4)
        moe.dispatch(x, ids)
        wrong: dict[str, tuple[Any, dict[str, Any]]] = {
            "topk_idx is a nested": (torch.nested.nested_tensor([ids]), {}), "topk_idx": (ids.to_sparse(), {}),
            "max_tokens is array": (ids, {"max_tokens": numpy.array([8, 8])}),
            "max_tokens": (ids, {"max_tokens": True}),
        }  # fmt: skip
        for name, (other, more) in wrong.items():
            text = ""
            try:
                moe.dispatch(x, other, **more) if wrong_rank else moe.dispatch(x, ids)
            except (TypeError, ValueError) as error:
                text = str(error)
            found.append("" if name in text else f"{name}: {text}")
            assert int(moe.dispatch(x, ids)[0].counts.sum()) > 0
    return found


def test_wrong_arguments_with_a_placement() -> None:
    assert run_ranks(2, _replicas) == [[""] * 4] * 2


def _nested() -> list[str]:
    """Remembered calls of which one tensor is nested on rank 1: of the route, or an argument."""
    found = []
    with ep_ops.Communicator(**SMALL) as comm, torch.no_grad():
        calls = Calls(comm, False)
        for method in ("combine", "combine_gathered", "dispatch_planned"):
            for name in ROUTE_TENSORS:
                right = calls.arguments(method)
                for _ in range(3):  # remembered
                    expected = calls.run(method, right)
                wrong = torch.nested.nested_tensor([getattr(right["route"], name)])
                given = right | {"route": right["route"]._replace(**{name: wrong})}
                text = ""
                try:
                    calls.run(method, given if comm.rank == 1 else right)
                except (TypeError, ValueError) as error:
                    text = str(error)
                found.append("" if f"{name} is a nested" in text else f"{method}({name}): {text}")
                for got, wanted in zip(calls.run(method, right), expected, strict=True):
                    assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
        for method, names in {"dispatch": ("x", "topk_idx", "topk_weights"), "combine": ("y", "weights")}.items():
            for name in names:
                right = calls.arguments(method)
                for _ in range(3):  # remembered
                    calls.run(method, right)
                wrong = right | {name: torch.nested.nested_tensor([right[name]])}
                text = ""
                try:
                    calls.run(method, wrong if comm.rank == 1 else right)
                except (TypeError, ValueError) as error:
                    text = str(error)
                found.append("" if "is a nested" in text else f"{method}({name}): {text}")
    return found


def test_nested_tensors_in_a_remembered_call() -> None:
    assert run_ranks(2, _nested) == [[""] * 20] * 2
