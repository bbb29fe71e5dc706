"""Models of transformers whose experts compute in another dtype than their parameters have, and quantized experts."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers_cases import made, tokens

import ep_ops
from ep_ops.nn import expert_parameters, keep_experts_apart

KINDS = ["qwen3_moe", "gpt_oss"]


def destroy_all() -> None:
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape and got.isfinite().all()
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def mixed(kind: str, how: str, autocast: bool, dtype: torch.dtype | None) -> None:
    """float32 parameters; activations in float32, or in bfloat16 as far as autocast does that."""
    from ep_ops.integrations.transformers import register, spread_experts

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, dense = made(kind, "grouped_mm"), made(kind, "grouped_mm")
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    options: dict[str, Any] = dict(max_tokens_per_rank=16, timeout=20) | ({} if dtype is None else {"dtype": dtype})
    if how == "spread":
        assert spread_experts(model, **options) == names
    else:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        register(**options)
        mesh = dist.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
        plan = {
            f"{name}.{p}": "grouped_gemm" for name in names for p, _ in model.get_submodule(name).named_parameters()
        }
        apply_expert_parallelism(
            model, mesh["ep"], mesh["tp"], plan | dict.fromkeys(names, "ep_dispatch_experts"), "ep_ops"
        )
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with cast:
        got, wanted = (one(tokens(rank), use_cache=False).logits for one in (model, dense))
    (comm,) = ep_ops.registry.living.values()
    assert comm.dtype == (dtype or torch.float32) and got.dtype == wanted.dtype
    assert relative(got, wanted) < (0.1 if autocast or dtype == torch.bfloat16 else 1e-5)
    got.float().square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        sum(dense(tokens(r), use_cache=False).logits.float().square().mean() for r in range(ranks)).backward()
    held = dict(dense.named_parameters())
    for name in names:
        for last, p in model.get_submodule(name).named_parameters():
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            assert p.dtype == grad.dtype == torch.float32
            assert relative(grad, held[f"{name}.{last}"].grad.chunk(ranks)[rank]) < 0.2
    destroy_all()


@pytest.mark.parametrize(("kind", "how", "autocast", "dtype"), [
    ("qwen3_moe", "spread", False, torch.bfloat16),
    ("qwen3_moe", "registered", True, torch.bfloat16),
    pytest.param("gpt_oss", "registered", False, torch.bfloat16, marks=pytest.mark.drawn),
    pytest.param("gpt_oss", "spread", True, torch.bfloat16, marks=pytest.mark.drawn),
    pytest.param("gpt_oss", "spread", True, None, marks=pytest.mark.drawn),
    pytest.param("qwen3_moe", "registered", True, None, marks=pytest.mark.drawn),
])  # fmt: skip
def test_parameters_in_float32(kind: str, how: str, autocast: bool, dtype: torch.dtype | None) -> None:
    if how == "registered":
        from ep_ops.integrations import transformers as ours

        if ours._no_interface is not None:
            pytest.skip("needs transformers 5.23 or later")
    run_ranks(2, mixed, kind, how, autocast, dtype)


def under_fsdp2() -> None:
    """Mixed precision of FSDP2, which casts activations to bfloat16 and ignores the experts."""
    from ep_ops.integrations.transformers import spread_experts

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wanted = made("qwen3_moe", "grouped_mm").bfloat16()(tokens(rank), use_cache=False).logits
    for dtype in (torch.bfloat16, None):
        model = made("qwen3_moe", "grouped_mm")
        spread_experts(model, max_tokens_per_rank=16, timeout=20, **({} if dtype is None else {"dtype": dtype}))
        keep_experts_apart(model, ranks=ranks)
        own = set(expert_parameters(model))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=own)
            part.set_force_sum_reduction_for_comms(True)
        got = model(tokens(rank), use_cache=False).logits
        assert got.dtype == torch.bfloat16 and relative(got, wanted) < 0.1
        got.float().square().mean().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        (comm,) = ep_ops.registry.living.values()
        assert comm.dtype == (dtype or torch.float32)
        destroy_all()


def test_mixed_precision_of_fsdp2() -> None:
    run_ranks(2, under_fsdp2)


def quantized(experts: int) -> None:
    """transformers' FP8 experts, whose kernels need a GPU: here their products are computed in float32."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations import finegrained_fp8

    from ep_ops.integrations.transformers import spread_experts

    def linear(self: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, activation_scale: Any) -> Any:
        assert scales.dtype == torch.float32 and x.dtype == torch.bfloat16
        blocks = codes.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)) * scales[:, None, :, None]
        return (x.float() @ blocks.flatten(2).flatten(0, 1).t()).to(x.dtype)

    whole = made(
        "qwen3_moe", "eager", num_experts=experts, hidden_size=128, moe_intermediate_size=128, num_hidden_layers=1
    ).bfloat16()
    quantization = FineGrainedFP8Config(weight_block_size=(128, 128))
    whole = finegrained_fp8.replace_with_fp8_linear(
        whole, modules_to_not_convert=["lm_head"], quantization_config=quantization
    )
    part = whole.model.layers[0].mlp.experts
    assert part.gate_up_proj.is_meta and part.gate_up_proj.dtype == torch.float8_e4m3fn
    spread_experts(torch.nn.ModuleList([torch.nn.Linear(2, 2).bfloat16(), copy.deepcopy(part)]), max_tokens_per_rank=16)
    type(part).linear = linear
    part.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(1)
    for name, p in part.named_parameters():
        values = torch.rand(p.shape, generator=draw) + (0.5 if "scale" in name else -0.5)
        p.requires_grad_(False).copy_(values)
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2).bfloat16(), part])
    dense = copy.deepcopy(model)
    assert spread_experts(model, max_tokens_per_rank=16, timeout=20) == ["1"]
    assert all(isinstance(p, DTensor) for p in model[1].parameters()) and model[1].comm.dtype == torch.bfloat16
    draw.manual_seed(2 + dist.get_rank())
    x = torch.randn(5, 128, generator=draw).bfloat16()
    ids, weights = torch.rand(5, experts, generator=draw).topk(2).indices, torch.rand(5, 2, generator=draw)
    got, wanted = model[1](x, ids, weights), dense[1](x, ids, weights)
    assert got.dtype == torch.bfloat16 and relative(got, wanted) < 0.02
    destroy_all()


@pytest.mark.parametrize("experts", [5, pytest.param(2, marks=pytest.mark.drawn)])  # 2: a rank holds none
def test_fp8_experts(experts: int) -> None:
    run_ranks(3, quantized, experts)


def test_options() -> None:
    from ep_ops.integrations.transformers import register, spread_experts

    calls: list[tuple[str, Any]] = [("spread_experts", lambda **more: spread_experts(torch.nn.Linear(2, 2), **more))]
    calls += [("register", register)]
    for name, call in calls:
        for wrong in ("num_experts", "hidden_size", "max_token", "config"):
            with pytest.raises((TypeError, ImportError), match=f"{name} (got unknown arguments {wrong}|needs)"):
                call(max_tokens_per_rank=4, **{wrong: 3})


def test_experts_without_the_interface_are_named() -> None:
    from ep_ops.integrations.transformers import spread_experts

    class StepExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.down_proj = 2, torch.nn.Parameter(torch.zeros(2, 4, 4))

    model = torch.nn.ModuleDict({"experts": StepExperts()})
    with pytest.raises(
        ValueError, match=r"interface of experts: experts \(StepExperts\) does not have it; register\(\)"
    ):
        spread_experts(model, max_tokens_per_rank=4)


def test_parameters_after_an_error_in_their_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    from ep_ops.integrations import local_experts

    experts = torch.nn.Module()
    for name in ("gate_up_proj", "down_proj"):
        experts.register_parameter(name, torch.nn.Parameter(torch.ones(2, 2)))
    experts.expert_names = ("gate_up_proj", "down_proj")  # type: ignore[assignment]
    before = dict(experts.named_parameters())

    def local_part(_: Any, p: torch.nn.Parameter) -> torch.Tensor:
        if p is before["down_proj"]:
            raise RuntimeError("out of memory")
        return p.detach()

    monkeypatch.setattr(local_experts, "local_part", local_part)
    with pytest.raises(RuntimeError, match="out of memory"), local_experts._local_parameters(experts, torch.bfloat16):
        pass
    after = dict(experts.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is p for name, p in before.items())
