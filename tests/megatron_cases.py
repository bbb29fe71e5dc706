"""Megatron-core's own code on DeepEP's interface, and what dense models make of the same tokens."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOP_K, Given
from torch import Tensor

from ep_ops.integrations import deep_ep

Layer = dict[str, Any]
"""The output of a layer, the gradient of its input, and its parameters with their gradients."""


def fused(given: list[Given], up: Tensor, flags: bool, device: str = "cpu") -> list[Tensor]:
    """Run fused dispatch and combine with experts between them. Return the output and the gradients."""
    deep_ep.install()
    from megatron.core.transformer.moe import fused_a2a

    rank = dist.get_rank()
    mine = given[rank].to(device)
    fused_a2a.set_deepep_num_sms(20)
    x = mine.x.float().requires_grad_()
    weights = mine.weights.clone().requires_grad_()
    own = up[rank * OWN : (rank + 1) * OWN].to(device, copy=True).requires_grad_()
    rows, idx, probs, counts, handle = fused_a2a.fused_dispatch(
        x, mine.idx, weights, EXPERTS, dist.group.WORLD, flags, flags
    )
    y = torch.zeros_like(rows)
    for k in range(TOP_K):
        chosen = torch.einsum("nh,nhj->nj", rows, own[idx[:, k].clamp(min=0)]).tanh()
        y = y + torch.where(idx[:, k, None] >= 0, chosen * probs[:, k, None], 0)
    out, _ = fused_a2a.fused_combine(y, dist.group.WORLD, handle, flags, flags)
    out.sin().sum().backward()
    _free(fused_a2a)
    assert counts.tolist() == [int((idx == expert).sum()) for expert in range(OWN)]
    return [out.detach(), x.grad, weights.grad, own.grad]


def _free(fused_a2a: Any) -> None:
    fused_a2a._buffer.communicators.destroy()
    fused_a2a._buffer = None


def dense(given: list[Given], up: Tensor) -> list[list[Tensor]]:
    """Return what :func:`fused` returns, for each rank."""
    all_up = up.clone().requires_grad_()
    inputs, outs = [], []
    for one in given:
        x, weights = one.x.float().requires_grad_(), one.weights.clone().requires_grad_()
        inputs += [x, weights]
        chosen = torch.einsum("th,tkhj->tkj", x, all_up[one.idx.clamp(min=0)]).tanh()
        outs.append((chosen * torch.where(one.idx >= 0, weights, 0)[..., None]).sum(1))
    grads = torch.autograd.grad(sum(out.sin().sum() for out in outs), [*inputs, all_up])
    return [
        [out.detach(), *grads[2 * rank : 2 * rank + 2], grads[-1][rank * OWN : (rank + 1) * OWN]]
        for rank, out in enumerate(outs)
    ]


def layer(given: list[Given], device: str = "cpu") -> Layer:
    """Run Megatron's MoE layer with its flex dispatcher, forward and backward."""
    deep_ep.install()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import fused_a2a, moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_ffn_hidden_size=16, add_bias_linear=False, expert_model_parallel_size=RANKS, use_cpu_initialization=True,
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep", moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none", moe_router_dtype="fp32", perform_initialization=True,
        params_dtype=torch.float32,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(dist.get_rank())
    x = given[dist.get_rank()].x.to(device).float()[:, None].requires_grad_()  # [sequence, batch, hidden]
    with contextlib.ExitStack() as replaced:
        # A name that it lacks without Transformer Engine, and on a CPU where it puts its router.
        replaced.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        if device == "cpu":
            replaced.enter_context(mock.patch.object(torch.cuda, "current_device", return_value="cpu"))
        made = MoELayer(config, spec.submodules, layer_number=1).to(device)
        dist.broadcast(made.router.weight.data, 0)
        out, _ = made(x)
        out.sin().sum().backward()
    _free(fused_a2a)
    parallel_state.destroy_model_parallel()
    learns = {name: (p.detach().cpu(), p.grad.cpu()) for name, p in made.named_parameters()}
    return {"out": out.detach()[:, 0].cpu(), "grad": x.grad[:, 0].cpu(), "learns": learns}


def check_layers(given: list[Given], results: list[Layer], **tolerance: float) -> None:
    """Compare the layers of all ranks with a dense model that has their parameters."""
    learns = [{name: p.requires_grad_() for name, (p, _) in result["learns"].items()} for result in results]
    experts = [
        tuple(own[f"experts.local_experts.{i}.linear_{part}.weight"] for part in ("fc1", "fc2"))
        for own in learns for i in range(OWN)
    ]  # fmt: skip
    xs, outs = [one.x.float().requires_grad_() for one in given], []
    for own, x in zip(learns, xs, strict=True):
        weights, chosen = torch.softmax(x @ own["router.weight"].t(), -1).topk(TOP_K)
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(experts):
            weight = torch.where(chosen == expert, weights, 0).sum(1, keepdim=True)
            out = out + torch.nn.functional.gelu(x @ up.t()) * weight @ down.t()
        outs.append(out)
    sum(out.sin().sum() for out in outs).backward()
    for result, own, x, out in zip(results, learns, xs, outs, strict=True):
        torch.testing.assert_close(result["out"], out.detach(), **tolerance)
        torch.testing.assert_close(result["grad"], x.grad, **tolerance)
        assert len(own) == 1 + 2 * OWN
        for name, p in own.items():
            torch.testing.assert_close(result["learns"][name][1], p.grad, **tolerance)
