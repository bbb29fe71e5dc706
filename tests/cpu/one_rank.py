"""A communicator of one rank, calls of it, and a record of the implementations that it calls directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ep_ops
from ep_ops.backends import calls as remembered
from ep_ops.operators import OPERATORS


def communicator() -> ep_ops.Communicator:
    return ep_ops.Communicator(
        num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=6, device="cpu", dtype=torch.float32, strict=False
    )


def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of implementations that are called directly, with or without gradients."""
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


def many(comm: ep_ops.Communicator, *args: Any, **more: Any) -> Any:
    """Return the result of a dispatch that is recognized from then on."""
    for _ in range(3):
        sent = comm.dispatch(*args, **more)
    return sent


def no_longer_aligned(x: torch.Tensor) -> torch.Tensor:
    moved = torch.empty(x.numel() + 2, dtype=x.dtype)[2:].view_as(x).copy_(x)
    assert moved.data_ptr() % 16 == 8, "which is not enough"
    return moved


WRONG: dict[str, tuple[Any, str]] = {
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
"""Change of (x, topk_idx, topk_weights) that a dispatch rejects, and the reason."""
