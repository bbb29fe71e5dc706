"""Gradients of a Qwen3-MoE in mixed precision under FSDP2, in every way that spreads its experts, against float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23 or later")

import torch
import torch.distributed as dist
from clients.run_transformers_trainer import SMALL, config_of, local, loss_of, made, own
from ranks import run_ranks
from torch import Tensor
from transformers_cases import need_implementations, rows_as_received

import ep_ops

KINDS = ("embed_tokens", "self_attn", "mlp.gate.", "gate_up_proj", "down_proj", "norm", "lm_head")
"""Parts of parameters' names. Errors are compared for all parameters of a kind together."""
WAYS = ("fsdp", "transformers", "register", "register+capacity", "spread")
LENGTH = 32


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
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), config_of(SMALL)
    numbers = torch.randint(config.vocab_size, (1, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
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
        model = made(way, config, LENGTH, torch.device("cpu"), lambda name, *_: weights[name])
        fix_routes(model, chosen, False)
        with rows_as_received():
            loss_of(model, numbers).backward()
        found[way] = {kind: (error, slope) for kind, error, slope in errors_of(model, wanted)}
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()
    return found


def test_mixed_precision() -> None:
    """Gradients are as far from float64 as those of FSDP2 without expert parallelism, and no factor is wrong."""
    need_implementations()
    found = run_ranks(2, compared)[0]
    for way in WAYS:
        for kind in KINDS:
            (error, slope), (plain, _) = found[way][kind], found["fsdp"][kind]
            assert 1e-4 < error < 1.5 * plain < 0.1, (way, kind, error, plain)
            assert abs(slope - 1) < 0.02, (way, kind, slope)
