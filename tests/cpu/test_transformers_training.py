"""Training models of transformers whose experts are spread: gradients under data parallelism, and checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import pathlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers_cases import MODELS, as_by_torchrun, loss_of, made, tokens

import ep_ops
from ep_ops.nn import expert_parameters, keep_experts_apart


def tied_experts() -> None:
    from ep_ops.integrations.transformers import spread_experts

    model, dense = made("qwen3_moe", "grouped_mm"), made("qwen3_moe", "grouped_mm")
    for whole in (model, dense):
        first, second = (layer.mlp.experts for layer in whole.model.layers)
        second.gate_up_proj = first.gate_up_proj
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = spread_experts(model, max_tokens_per_rank=16)
    first, second = (model.get_submodule(name) for name in names)
    assert second.gate_up_proj is first.gate_up_proj and second.down_proj is not first.down_proj
    keep_experts_apart(model, ranks)
    assert len(expert_parameters(model)) == 3
    loss_of(model, tokens(rank))[1].backward()
    torch.stack([loss_of(dense, tokens(r))[1] for r in range(ranks)]).mean().backward()
    for name in ("gate_up_proj", "down_proj"):
        expected = getattr(dense.model.layers[0].mlp.experts, name).grad.chunk(ranks)[rank]
        torch.testing.assert_close(getattr(first, name).grad.to_local(), expected, rtol=1e-3, atol=1e-6)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_tied_experts() -> None:
    run_ranks(2, tied_experts)


def divided(kind: str) -> None:
    """Gradients of the mean loss over ranks, after what trainers do with a model."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from ep_ops.integrations.transformers import spread_experts

    rank, ranks = dist.get_rank(), dist.get_world_size()
    dense = made(kind, "grouped_mm", **{name: 5 for name in MODELS[kind] if "experts" in name})
    torch.stack([loss_of(dense, tokens(r))[1] for r in range(ranks)]).mean().backward()

    def pickled(model: Any) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    def sharded(model: Any) -> Any:
        return fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model)))

    def checkpointed(model: Any) -> Any:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        assert model.is_gradient_checkpointing
        return sharded(model)

    mesh = dist.init_device_mesh("cpu", (ranks,))
    ways: dict[str, Any] = {
        "moved": lambda m: DistributedDataParallel(m.to("cpu")).module,
        "copied": lambda m: DistributedDataParallel(copy.deepcopy(m)).module,
        "pickled": lambda m: DistributedDataParallel(pickled(m)).module,
        "twice": lambda m: DistributedDataParallel(keep_experts_apart(m, ranks)).module,
        "sharded": sharded,
        "without": lambda m: [setattr(m.get_submodule(n), "gradient_divisor", None) for n in names] and sharded(m),
    }
    if kind == "qwen3_moe":
        ways |= {"token-major": ways["moved"], "token-major, checkpointed": checkpointed}
    for way, change in ways.items():
        model = made(kind, "grouped_mm", **{name: 5 for name in MODELS[kind] if "experts" in name})
        rows = {"rows": "token_major", "redispatch": True} if "token-major" in way else {}
        names = spread_experts(model, max_tokens_per_rank=16, **rows)
        model = change(keep_experts_apart(model, ranks))
        assert len(expert_parameters(model)) == sum("experts." in name for name, _ in model.named_parameters())
        if way == "without":
            with pytest.raises(ValueError, match="FSDP2 averages the gradients of parameters around .*Experts over 2"):
                loss_of(model, tokens(rank))
            continue
        loss_of(model, tokens(rank))[1].backward()
        for (name, p), q in zip(model.named_parameters(), dense.named_parameters(), strict=True):
            if "experts." in name and q[1].grad is not None:
                got = p.grad.full_tensor()
                torch.testing.assert_close(got, q[1].grad, rtol=1e-3, atol=1e-6, msg=lambda t, w=way: f"{w}: {t}")
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_divided_gradients(kind: str) -> None:
    run_ranks(2, divided, kind)


def trained_by_trainer(folder: str) -> None:
    """One step of transformers' Trainer, which moves the model and wraps it, against one process."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from ep_ops.integrations.transformers import spread_experts

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with as_by_torchrun():
        model, dense = made("mixtral", "grouped_mm"), made("mixtral", "grouped_mm")
        spread_experts(model, max_tokens_per_rank=16)
        keep_experts_apart(model, ranks)
        samples = [3 + (tokens(0)[0] + number) % 61 for number in range(8)]
        data = [{"input_ids": one, "labels": one} for one in samples]
        steps: list[Any] = []

        class Noting(Trainer):
            def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(model, inputs, *args, **kwargs)
                grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
                steps.append((inputs["input_ids"].clone(), grads))
                return loss

        how: dict[str, Any] = dict(
            use_cpu=True, per_device_train_batch_size=2, max_steps=1, learning_rate=0.0, max_grad_norm=0.0,
            report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        Noting(model=model, args=TrainingArguments(folder, **how), train_dataset=data).train()
        ((ids, grads),) = steps
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, ids)
        torch.stack([dense(one, labels=one).loss for one in everyone]).mean().backward()
        compared = 0
        for name, p in dense.named_parameters():
            if p.grad is not None:
                got = grads[name].full_tensor() if isinstance(grads[name], DTensor) else grads[name]
                torch.testing.assert_close(got, p.grad, rtol=1e-3, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
                compared += "experts" in name
        assert compared == 4

        accelerator = Accelerator(cpu=True)
        model, dense = made("mixtral", "grouped_mm"), made("mixtral", "grouped_mm")
        spread_experts(model, max_tokens_per_rank=16)
        wrapped = accelerator.prepare(keep_experts_apart(model, ranks))
        accelerator.backward(loss_of(wrapped, tokens(rank))[1])
        torch.stack([loss_of(dense, tokens(r))[1] for r in range(ranks)]).mean().backward()
        for name in ("gate_up_proj", "down_proj"):
            got, expected = (getattr(whole.model.layers[1].mlp.experts, name).grad for whole in (model, dense))
            torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-3, atol=1e-6)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_trainer(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, which Trainer uses")
    run_ranks(2, trained_by_trainer, str(tmp_path))


def adamw(model: Any, steps: int) -> torch.optim.Optimizer:
    """Gradients depend on parameter and step only, so that every number of ranks trains the same model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(steps):
        for number, p in enumerate(model.parameters()):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number))
            p.grad = distribute(grad, p) if isinstance(p, DTensor) else grad
        optimizer.step()
    return optimizer


def distribute(whole: torch.Tensor, like: DTensor) -> DTensor:
    held = like.to_local().shape[0]
    first = sum(map(len, whole.chunk(like.device_mesh.size())[: like.device_mesh.get_local_rank()]))
    local = whole[first : first + held].clone()
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def save_spread(path: str) -> None:
    from transformers import AutoModelForCausalLM

    from ep_ops.integrations.transformers import spread_experts

    model, dense = made("qwen3_moe", "grouped_mm", num_experts=5), made("qwen3_moe", "grouped_mm", num_experts=5)
    (first, *_) = spread_experts(model, max_tokens_per_rank=16)
    with pytest.raises(TypeError, match=rf"{first}.gate_up_proj is a .*set_model_state_dict"):
        model.load_state_dict(dense.state_dict())
    set_model_state_dict(model, dense.state_dict(), options=StateDictOptions(full_state_dict=True))
    for number, saving in enumerate((model, copy.deepcopy(model))):
        with torch.no_grad():
            for p in model.parameters():  # the copy keeps its own
                p.fill_(0) if number else None
        saving.save_pretrained(f"{path}/whole{number}", max_shard_size="20KB")
        dist.barrier()
        read = AutoModelForCausalLM.from_pretrained(f"{path}/whole{number}")
        torch.testing.assert_close(read.state_dict(), dense.state_dict(), rtol=0, atol=0)
    set_model_state_dict(model, dense.state_dict(), options=StateDictOptions(full_state_dict=True))
    state, optim = get_state_dict(model, adamw(model, 2))
    dcp.save({"model": state, "optim": optim}, checkpoint_id=f"{path}/dcp")
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def load_spread(path: str) -> int:
    """Load model and optimizer; compare them with a model that is not spread."""
    from ep_ops.integrations.transformers import spread_experts

    model, dense = made("qwen3_moe", "grouped_mm", num_experts=5), made("qwen3_moe", "grouped_mm", num_experts=5)
    wanted = adamw(dense, 2)
    spread_experts(model, max_tokens_per_rank=16)
    optimizer = adamw(model, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    state, optim = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optim}, checkpoint_id=f"{path}/dcp")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    shards = 0
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        for key in ("", "exp_avg", "exp_avg_sq"):
            got, expected = (optimizer.state[p][key], wanted.state[q][key]) if key else (p, q)
            if isinstance(got, DTensor):
                shards, got = shards + 1, got.full_tensor()
            assert torch.equal(got, expected)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()
    return shards


def test_checkpoints(tmp_path: pathlib.Path) -> None:
    """Five experts on two ranks (3, 2) are saved and read on three (2, 2, 1), on one, and as a whole model."""
    run_ranks(2, save_spread, str(tmp_path))
    assert run_ranks(3, load_spread, str(tmp_path)) == [12] * 3
    assert run_ranks(1, load_spread, str(tmp_path)) == [0]


def saved_by_rank_0(path: str) -> None:
    """Save on rank 0 alone, as transformers' Trainer does during training, and on all ranks."""
    from ep_ops.integrations.transformers import spread_experts

    model, ids = made("qwen3_moe", "grouped_mm"), tokens(0)
    spread_experts(model, max_tokens_per_rank=16)
    wanted = loss_of(model, ids)[0]

    def a_second() -> Any:
        """Let save_pretrained, but no layer, wait for a second only."""
        comm = next(m.comm for m in model.modules() if hasattr(m, "comm"))
        return mock.patch.object(comm, "config", dataclasses.replace(comm.config, timeout=1))

    if dist.get_rank() == 0:
        with (
            a_second(),
            pytest.raises(
                RuntimeError, match=r"waited 1 s for ranks \[1\].*every rank must call it.*save_strategy='no'"
            ),
        ):
            model.save_pretrained(f"{path}/alone")
    dist.barrier()  # data of the process group is not out of order
    torch.testing.assert_close(loss_of(model, ids)[0], wanted)
    if dist.get_rank() == 1:
        with a_second(), pytest.raises(RuntimeError, match=r"waited 1 s for ranks \[0\]"):
            model.save_pretrained(f"{path}/alone")
    dist.barrier()
    for number in range(2):
        model.save_pretrained(f"{path}/{number}")
        dist.barrier()
        assert os.path.exists(f"{path}/{number}/model.safetensors")
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_saving_on_one_rank(tmp_path: pathlib.Path) -> None:
    run_ranks(2, saved_by_rank_0, str(tmp_path))
