"""Models saved by some number of ranks and loaded by another, through torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ep_ops
from ep_ops.nn import MoELayer, expert_parameters, resharding_state_dict

E, H = 5, 16
SIZES: dict[str, Any] = dict(num_experts=E, hidden_size=H, top_k=2, max_tokens_per_rank=8, dtype=torch.float32)


class Model(nn.Module):
    def __init__(self, comm: ep_ops.Communicator) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(H, H), MoELayer(comm, 8, capacity=64)


def filled(model: Model, comm: ep_ops.Communicator) -> None:
    """Numbers that tell parameter and expert, the same whoever holds them."""
    for at, (_, p) in enumerate(model.named_parameters()):
        draw = torch.Generator().manual_seed(at)
        own = any(p is q for q in expert_parameters(model))
        whole = torch.randn(E, *p.shape[1:], generator=draw) if own else torch.randn(p.shape, generator=draw)
        first = comm.first_local_expert
        p.data.copy_(whole[first : first + comm.num_local_experts] if own else whole)


def save(path: str, wrapped: bool = False) -> list[str]:
    with ep_ops.Communicator(**SIZES, device="cpu") as comm:
        model = Model(comm)
        filled(model, comm)
        if wrapped:  # which state dicts do not tell
            model.moe = checkpoint_wrapper(model.moe)
            model = checkpoint_wrapper(model)
        state = resharding_state_dict(model, comm)
        dcp.save(state, checkpoint_id=path)
        return sorted(state)


def load(path: str) -> float:
    """The largest difference of a parameter from what was saved."""
    with ep_ops.Communicator(**SIZES, device="cpu") as comm:
        model, expected = Model(comm), Model(comm)
        filled(expected, comm)
        for p in model.parameters():
            p.data.fill_(torch.nan)
        dcp.load(resharding_state_dict(model, comm), checkpoint_id=path)
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return max(float((p - q).abs().nan_to_num(torch.inf).max()) if p.numel() else 0.0 for p, q in pairs)


@pytest.mark.parametrize(("ranks", "wrapped"), [(1, False), (2, False), (4, False), (2, True)])
def test_ranks_may_be_others(ranks: int, wrapped: bool, tmp_path: Path) -> None:
    """Two ranks with three and two experts save; others load."""
    kept = run_ranks(2, save, str(tmp_path), wrapped)
    assert "first.weight" in kept[0] and "moe.w_in.2" in kept[0] and "moe.w_in.3" not in kept[0]
    assert "moe.w_in.3" in kept[1] and "moe.w_in" not in kept[1]
    assert run_ranks(ranks, load, str(tmp_path)) == [0.0] * ranks


def test_what_is_no_expert_is_refused() -> None:
    with ep_ops.Communicator(**SIZES, device="cpu") as comm, ep_ops.Communicator(**SIZES | {"num_experts": 7}) as other:
        with pytest.raises(ValueError, match=r"moe.w_\w+ has shape \(5, .*allowed: 7 first, the experts of rank 0"):
            resharding_state_dict(Model(comm), other)
