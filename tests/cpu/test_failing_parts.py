"""A part of a layer raises on one rank: the error reaches all ranks, and their next calls belong together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

import ep_ops
from ep_ops import nn
from ep_ops.nn.grouped import grouped_mm, weights_gradient


class Faulty:
    """A function that raises on the last rank while ``armed``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.armed = function, False

    def __call__(self, *args: Any) -> Any:
        if self.armed and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("lost")
        return self.function(*args)


KINDS: dict[str, dict[str, Any]] = {
    "whole": {}, "dynamic": {"dynamic": True}, "token-major": {"rows": "token_major"},
    "split": {"shared_intermediate_size": 8}, "dynamic, shared": {"dynamic": True, "shared_intermediate_size": 8},
    "turns": {"shared_intermediate_size": 8},
}  # fmt: skip
"""How layers run. "turns": two micro-batches in steps."""


def faults(kind: str) -> dict[str, str]:
    """Return this rank's error for each part of the second layer that raises."""
    rank, kwargs, said = dist.get_rank(), KINDS[kind], {}
    sizes = dict(num_experts=5, hidden_size=16, top_k=2, max_tokens_per_rank=16, dtype=torch.float32, device="cpu")
    with ep_ops.Communicator(**sizes, timeout=20) as comm:
        gemm = Faulty(grouped_mm)
        shared = kwargs.get("shared_intermediate_size", 0)
        own = nn.Gemms(gemm, weights_gradient, late=False)
        first, second = (nn.MoELayer(comm, 8, seed=i, gemms=("torch", own)[i], **kwargs) for i in range(2))
        dense = [nn.DenseMoE(comm, 8, seed=i, shared_intermediate_size=shared) for i in range(2)]
        parts: dict[str, Any] = {"router": second.router, "experts": gemm, "shared": second.shared}
        for name in ("w_in", "w_out"):
            parts[name] = torch.nn.Identity()
            register_parametrization(second.experts, name, parts[name])
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                part.forward = parts[name] = Faulty(part.forward)

        def run(x: Tensor) -> Tensor:
            if kind != "turns":
                return second(first(x))
            return torch.cat(nn.interleave(*(second.steps(first(x[i]), i) for i in range(2))))

        for name, part in parts.items():
            for enabled in (True, False) if isinstance(part, Faulty) else ():
                torch.manual_seed(10 * rank + len(said))
                with torch.set_grad_enabled(enabled):
                    part.armed = True
                    x = torch.randn(2, 3 + rank, 16) if kind == "turns" else torch.randn(3 * rank, 16)
                    with pytest.raises((KeyError, ValueError)) as error:
                        run(x)
                    said[f"{name}, {enabled}"] = str(error.value)
                    part.armed = False
                    expected = dense[1](dense[0](x)).flatten(0, -2)
                    torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)
        for halves in (1, 2) if kind == "turns" else ():  # steps that all ranks leave
            left: Any = second.steps(first(x[0]), 0)
            for _ in range(halves):
                next(left)
            left.close()
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_reaches_all_ranks(kind: str) -> None:
    *others, raising = run_ranks(2, faults, kind)
    assert raising and set(raising.values()) == {"'lost'"}
    for said in others:
        assert said.keys() == raising.keys()
        assert all(text.endswith("rejected by rank 1: KeyError: 'lost'") for text in said.values())
