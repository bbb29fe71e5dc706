"""Gradients of a Qwen3-MoE in mixed precision under FSDP2, in every way that spreads its experts, against float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from transformers_cases import need_implementations, rows_as_received

import ep_ops

KINDS = ("embed_tokens", "self_attn", "mlp.gate.", "gate_up_proj", "down_proj", "norm", "lm_head")
"""Parts of parameters' names. Errors are compared for all parameters of a kind together."""
WAYS = ("fsdp", "hf_ep", "ep", "ep_cap", "spread")
"""FSDP2 alone; transformers' own expert parallelism; ``register``, without and with a capacity; ``spread_experts``."""
LENGTH, VOCABULARY = 32, 128


def config_of() -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=48,
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, norm_topk_prob=True, tie_word_embeddings=False, router_aux_loss_coef=0.0,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "eager", "grouped_mm"
    return config


def own(whole: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient. FSDP2 and expert parallelism split dimension 0 alike."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def in_float64(config: Any) -> Any:
    """The whole model, whose norms transformers computes in float32."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.1)
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeRMSNorm":
            module.forward = lambda x, m=module: (
                m.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.variance_epsilon))
            )
    return model


def fix_routes(model: Any, chosen: list[Tensor], note: bool) -> None:
    """Make the routers choose ``chosen``, the experts of each layer, so that rounding changes no choice. ``note``: they
    choose themselves, and append what they chose."""
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    for number, router in enumerate(routers):

        def forward(x: Tensor, router: Any = router, number: int = number) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
            chances = logits.softmax(-1, dtype=torch.float64 if note else torch.float32)
            if note:
                chosen.append(chances.topk(router.top_k, dim=-1).indices)
            values = chances.gather(1, chosen[number])
            return logits, (values / values.sum(-1, keepdim=True)).to(logits.dtype), chosen[number]

        router.forward = forward


def made(way: str, config: Any, weights: dict[str, Tensor]) -> Any:
    """The model in one way: parameters in float32, computed in bfloat16, gradients reduced in float32."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from ep_ops.integrations.transformers import register, spread_experts

    ranks = dist.get_world_size()
    if way == "spread":
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(weights)
        spread_experts(model, max_tokens_per_rank=LENGTH, dtype=torch.bfloat16)
        ep_ops.nn.keep_experts_apart(model, ranks)
        mesh, apart = dist.init_device_mesh("cpu", (ranks,)), set(ep_ops.nn.expert_parameters(model))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh, ignored_params=apart, mp_policy=policy)
    else:
        if way.startswith("ep"):
            capacity = ranks * LENGTH * config.num_experts_per_tok if way == "ep_cap" else None
            register(way, max_tokens_per_rank=LENGTH, capacity=capacity)
        distributed = DistributedConfig(
            fsdp_size=ranks, ep_size=1 if way == "fsdp" else ranks, fsdp_mixed_precision=True,
            ep_implementation=way if way.startswith("ep") else "auto",
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        kind = type(model)
        with mock.patch.object(torch._C, "_get_accelerator", lambda: torch.device("cpu")):
            distributed, _, mesh = kind.prepare_distribute_model(distributed)
            model = kind.maybe_distribute_model(model, distributed, mesh)
        model.to_empty(device="cpu")
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config=rotary.config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                local(p).copy_(own(weights[name]))
    for module in model.modules():  # gloo has no average
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None and group._reduce_scatter_process_group.size() > 1:
            module.set_force_sum_reduction_for_comms(True)
    return model


def loss_of(model: Any, numbers: Tensor) -> Tensor:
    logits = model(input_ids=numbers[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide.flatten(0, 1), numbers[:, 1:].flatten())


def errors_of(model: Any, wanted: dict[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """Yield, for each kind of parameter, |g - r| / |r| of all ranks and <g, r> / <r, r>."""
    sums = {kind: torch.zeros(3, dtype=torch.float64) for kind in KINDS}
    for name, p in model.named_parameters():
        got, exact = local(p.grad).double(), wanted[name]
        assert p.dtype == p.grad.dtype == torch.float32 and got.shape == exact.shape, name
        kind = "norm" if "norm" in name else next(kind for kind in KINDS if kind in name)
        sums[kind] += torch.stack([(got - exact).square().sum(), exact.square().sum(), (got * exact).sum()])
    for kind, values in sums.items():
        dist.all_reduce(values)
        off, size, along = values.tolist()
        yield kind, (off / size) ** 0.5, along / size


def compared() -> dict[str, dict[str, tuple[float, float]]]:
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), config_of()
    numbers = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
    exact, chosen = in_float64(config), []
    fix_routes(exact, chosen, True)
    loss_of(exact, numbers).backward()
    for p in exact.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    wanted = {name: own(p.grad) for name, p in exact.named_parameters()}
    weights = {name: p.detach().float() for name, p in exact.named_parameters()}
    found = {}
    for way in WAYS:
        model = made(way, config, weights)
        fix_routes(model, chosen, False)
        with rows_as_received():
            loss_of(model, numbers).backward()
        found[way] = {kind: (error, slope) for kind, error, slope in errors_of(model, wanted)}
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()
    return found


def test_mixed_precision() -> None:
    """Gradients are as far from float64 as those of FSDP2 without expert parallelism, and no factor is wrong."""
    pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23 or later")
    need_implementations()
    found = run_ranks(2, compared)[0]
    for way in WAYS:
        for kind in KINDS:
            (error, slope), (plain, _) = found[way][kind], found["fsdp"][kind]
            assert 1e-4 < error < 1.5 * plain < 0.1, (way, kind, error, plain)
            assert abs(slope - 1) < 0.02, (way, kind, slope)
