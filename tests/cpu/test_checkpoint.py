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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils.parametrize import register_parametrization

import ep_ops
from ep_ops.nn import DenseMoE, Experts, MoELayer, load_experts

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
        model, expected = (Model(MoELayer(comm, F, rows=rows)) for rows in ("token_major", "grouped"))
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


def of_another_rank(path: str) -> None:
    """Files that rank 0 has written with torch.save: a state dict, and a whole model."""
    with ep_ops.Communicator(**SIZES, device="cpu", name="experts") as comm:
        model = Model(MoELayer(comm, F))
        if comm.rank == 0:
            torch.save(model.state_dict(), f"{path}/state")
            torch.save(model, f"{path}/model")
        dist.barrier()
        for assign in (False, True):
            other = Model(MoELayer(comm, F, seed=1))
            state = torch.load(f"{path}/state")
            if comm.rank == 0:  # whose own experts these are
                other.load_state_dict(state, assign=assign)
                assert torch.equal(other.moe.experts.w_in.to_local(), model.moe.experts.w_in.to_local())
            else:
                with pytest.raises(ValueError, match="moe.experts.w_in is the shard of the rank that saved it, with"):
                    other.load_state_dict(state, assign=assign)
        if comm.rank == 0:
            whole = torch.load(f"{path}/model", weights_only=False)
            assert torch.equal(whole.moe.experts.w_in.to_local(), model.moe.experts.w_in.to_local())
        else:
            with pytest.raises(ValueError, match=r"w_in is the shard of the rank with coordinate \[0\], which created"):
                torch.load(f"{path}/model", weights_only=False)
        other = Model(MoELayer(comm, F))
        parts = [None, None]
        dist.all_gather_object(parts, other.moe.experts.w_in)
        other.moe.experts.w_in = parts[0]  # found when the layer is used
        if comm.rank == 1:
            with pytest.raises(ValueError, match=r"w_in is the shard of the rank with coordinate \[0\]"):
                other.moe.experts.local_weight("w_in")
        replicated = Model(MoELayer(comm, F, seed=1))
        full = {
            name: value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }
        replicated.load_state_dict(full)  # every rank has all experts
        assert torch.equal(replicated.moe.experts.w_out.to_local(), model.moe.experts.w_out.to_local())
        alone = dist.new_group([comm.rank], use_local_synchronization=True)
        with ep_ops.Communicator(alone, **SIZES, device="cpu", name=f"alone {comm.rank}") as one:
            single = Model(MoELayer(one, F))
            for assign in (False, True):
                with pytest.raises(TypeError, match="moe.experts.w_in is a DTensor, of which 2 ranks hold parts, but"):
                    single.load_state_dict(torch.load(f"{path}/state"), assign=assign)


def test_files_of_another_rank(tmp_path: Path) -> None:
    run_ranks(2, of_another_rank, str(tmp_path))


class LowRank(nn.Module):
    def __init__(self, experts: Experts, name: str) -> None:
        super().__init__()
        held, rows, columns = experts.comm.num_local_experts, *getattr(experts, name).shape[1:]
        self.a = nn.Parameter(experts.from_local(torch.ones(held, rows, 2)))
        self.b = nn.Parameter(experts.from_local(torch.ones(held, 2, columns)))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.bmm(self.a, self.b)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


class Split(nn.Module):
    """Two stored tensors."""

    def forward(self, whole: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return whole + rest

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.trunc(), weight - weight.trunc()


def parametrized(sharded: bool) -> None:
    def read(name: str) -> torch.Tensor:
        _, expert, projection, _ = name.split(".")
        shape = (H, F) if projection == "down_proj" else (F, H)
        return torch.randn(shape, generator=torch.Generator().manual_seed(hash((int(expert), len(projection)))))

    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "ep"))
    with ep_ops.Communicator(mesh["ep"], **SIZES, device="cpu") as comm:
        plain = Experts(comm, F, seed=4)
        initial = [p.to_local().clone() for p in plain.parameters()]
        load_experts(plain, read, "experts.")
        loaded = [p.to_local().clone() for p in plain.parameters()]
        for kinds in ((LowRank,), (LowRank, LowRank), (Doubled,), (Doubled, LowRank), (Split,)):
            experts = Experts(comm, F, seed=4)
            for name in ("w_in", "w_out"):
                for kind in kinds:
                    args = (experts, name) if kind is LowRank else ()
                    register_parametrization(experts, name, kind(*args))
            if sharded:
                fully_shard(experts, mesh=mesh["replica"], shard_placement_fn=lambda p: Shard(1))
            added = 2 * kinds.count(LowRank)  # by each adapter
            for fill, wanted in ((experts.reset_parameters, initial), (None, loaded)):
                with torch.no_grad():
                    for chain in experts.parametrizations.values():
                        for name, p in chain.named_parameters():
                            if name.startswith("original"):
                                p.to_local().fill_(torch.nan)
                load_experts(experts, read, "experts.") if fill is None else fill()
                if sharded:
                    experts.unshard()
                for name, value in zip(("w_in", "w_out"), wanted, strict=True):
                    got = getattr(experts, name).to_local()
                    torch.testing.assert_close(got, value + added, msg=lambda text, kinds=kinds: f"{kinds}: {text}")
                if sharded:
                    experts.reshard()


@pytest.mark.parametrize("sharded", [False, True])
def test_parametrized_experts(sharded: bool) -> None:
    run_ranks(2, parametrized, sharded)


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
