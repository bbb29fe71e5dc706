"""A wrong argument on one rank raises on all ranks, names the argument, and leaves a communicator that can be used."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from ranks import run_ranks
from wrong_calls import MODES, run_calls

from ep_ops.moe import MoECommunicator, MoECommunicatorConfig

OFTEN = "no gradients"


@pytest.mark.parametrize(
    "mode", [OFTEN, *(pytest.param(mode, marks=pytest.mark.drawn) for mode in MODES if mode != OFTEN)]
)
def test_some_wrong_arguments(mode: str) -> None:
    check(200, mode)


@pytest.mark.drawn
def test_2000_wrong_arguments() -> None:
    check(2000, OFTEN)


def check(count: int, mode: str) -> None:
    found = run_ranks(2, run_calls, fresh_seed(), count, mode, timeout=300)
    assert found == [[], []], "\n".join(sum(found, []))


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
