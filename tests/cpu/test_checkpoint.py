"""Checkpoints of models with experts: saved by some number of ranks, loaded by another, by PyTorch's usual calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import ep_ops
from ep_ops.nn import DenseMoE, MoELayer, load_experts

E, H, F = 5, 16, 8
SIZES: dict[str, Any] = dict(num_experts=E, hidden_size=H, top_k=2, max_tokens_per_rank=8, dtype=torch.float32)


class Model(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.moe = nn.Linear(H, H), moe


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    groups = [{"params": others}, {"params": list(model.moe.experts.parameters())}]
    return torch.optim.AdamW(groups, lr=0.1, foreach=True)


def train(model: Model, steps: int) -> torch.optim.Optimizer:
    """Gradients that depend on parameter, expert and step only, so that every number of ranks trains the same model."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        for at, p in enumerate(model.parameters()):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + at))
            if isinstance(p, DTensor):
                first = model.moe.comm.first_local_expert
                grad = model.moe.experts.from_local(grad[first : first + model.moe.comm.num_local_experts].clone())
            p.grad = grad
        optimizer.step()
    return optimizer


def save(path: str) -> tuple[list[str], list[int]]:
    with ep_ops.Communicator(**SIZES, device="cpu") as comm:
        model = Model(MoELayer(comm, F, capacity=64))
        optimizer = train(model, 2)
        state, optim = get_state_dict(model, optimizer)
        writing = dcp.async_save({"model": state, "optim": optim}, checkpoint_id=path)
        for p in model.parameters():  # training goes on while the files are written
            (p.to_local() if isinstance(p, DTensor) else p).data.fill_(torch.nan)
        optimizer.step()
        writing.result()
        return sorted(state), list(comm.experts_per_rank)


def load(path: str) -> int:
    """Load model and optimizer; compare them with ones that were trained on this number of ranks."""
    with ep_ops.Communicator(**SIZES, device="cpu") as comm:
        model, expected = (Model(MoELayer(comm, F)) for _ in range(2))
        wanted, optimizer = train(expected, 2), optimizer_of(model)
        for p in model.parameters():
            (p.to_local() if isinstance(p, DTensor) else p).data.fill_(torch.nan)
        state, optim = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optim": optim}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
        compared = 0
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            pairs = [(p, q)] + [(optimizer.state[p][key], wanted.state[q][key]) for key in ("exp_avg", "exp_avg_sq")]
            assert optimizer.state[p]["step"] == 2
            for got, same in pairs:
                assert type(got) is type(same)
                got, same = (t.to_local() if isinstance(t, DTensor) else t for t in (got, same))
                assert torch.equal(got, same)
                compared += 1
        train_more = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # goes on from the loaded state: momentum moves parameters
        assert all(
            not torch.equal(old, getattr(p, "_local_tensor", p)) or not old.numel()
            for old, p in zip(train_more, model.parameters(), strict=True)
        )
        return compared


def test_model_and_optimizer_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Five experts on four ranks (the last one holds none) are saved while training goes on; 1, 2 and 8 ranks load."""
    kept, held = run_ranks(4, save, str(tmp_path))[3]
    assert held == [2, 2, 1, 0]
    assert kept == ["first.bias", "first.weight", "moe.experts.w_in", "moe.experts.w_out", "moe.router.weight"]
    for ranks in (1, 2, 8):
        assert run_ranks(ranks, load, str(tmp_path)) == [15] * ranks


def full_tensors() -> None:
    with ep_ops.Communicator(**SIZES, device="cpu") as comm:
        model, dense = Model(MoELayer(comm, F, seed=1)), Model(DenseMoE(comm, F, seed=2))
        with pytest.raises(TypeError, match="moe.experts.w_in is a Tensor.*set_model_state_dict"):
            model.load_state_dict(dense.state_dict())
        with pytest.raises(TypeError, match="set_model_state_dict"):
            model.load_state_dict(dense.state_dict(), assign=True)
        given = dense.state_dict() if comm.rank == 0 else {}
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        back = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in dense.state_dict().items():
            assert torch.equal(back[name], value), name

        # Names and layout of Hugging Face: a matrix for each expert and projection, [out, in].
        names: list[str] = []

        def read(name: str) -> torch.Tensor:
            names.append(name)
            _, expert, projection, _ = name.split(".")
            w_in, w_out = (w[int(expert)] for w in dense.moe.experts.parameters())
            return {"gate_proj": w_in[:, :F].t(), "up_proj": w_in[:, F:].t(), "down_proj": w_out.t()}[projection]

        layer = MoELayer(comm, F, seed=3)
        load_experts(layer.experts, read, "experts.")
        for got, whole in zip(layer.experts.parameters(), dense.moe.experts.parameters(), strict=True):
            assert torch.equal(got.full_tensor(), whole)
        first = comm.first_local_expert
        assert {int(name.split(".")[1]) for name in names} == set(range(first, first + comm.num_local_experts))
        with pytest.raises(ValueError, match=r"experts.\d.gate_proj.weight has shape \(3, 16\); allowed: \(8, 16\)"):
            load_experts(layer.experts, lambda name: torch.zeros(3, H), "experts.")
        dist.barrier()


def test_full_tensors_and_one_tensor_for_each_expert() -> None:
    run_ranks(2, full_tensors)
