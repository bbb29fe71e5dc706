"""Megatron-core's and vLLM's own code on DeepEP's interface (ep_ops.integrations.deep_ep), against dense models."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOP_K, Given, draw
from ranks import run_ranks
from torch import Tensor

from ep_ops.integrations import deep_ep
from ep_ops.integrations.deep_ep import Buffer, ElasticBuffer

# ---------------------------------------------------------------------- Megatron-core


def _megatron(given: list[Given], up: Tensor, flags: bool) -> list[Tensor]:
    """Its fused dispatch and combine, with experts between them: output and gradients."""
    deep_ep.install()
    from megatron.core.transformer.moe import fused_a2a

    rank = dist.get_rank()
    fused_a2a.set_deepep_num_sms(20)
    x = given[rank].x.float().requires_grad_()
    weights = given[rank].weights.clone().requires_grad_()
    own = up[rank * OWN : (rank + 1) * OWN].clone().requires_grad_()
    rows, idx, probs, counts, handle = fused_a2a.fused_dispatch(
        x, given[rank].idx, weights, EXPERTS, dist.group.WORLD, flags, flags
    )
    y = torch.zeros_like(rows)
    for k in range(TOP_K):
        chosen = torch.einsum("nh,nhj->nj", rows, own[idx[:, k].clamp(min=0)]).tanh()
        y = y + torch.where(idx[:, k, None] >= 0, chosen * probs[:, k, None], 0)
    out, _ = fused_a2a.fused_combine(y, dist.group.WORLD, handle, flags, flags)
    out.sin().sum().backward()
    fused_a2a._buffer.communicators.destroy()
    fused_a2a._buffer = None
    assert counts.tolist() == [int((idx == expert).sum()) for expert in range(OWN)]
    return [out.detach(), x.grad, weights.grad, own.grad]


needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs Megatron-core 0.16, which is not installed"
)


@needs_megatron
@pytest.mark.parametrize("flags", [False, True])
def test_megatrons_fused_operations(flags: bool) -> None:
    seed = cases.fresh_seed()
    given = draw(seed)
    up = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) / HIDDEN**0.5
    results = run_ranks(RANKS, _megatron, given, up, flags)
    all_up = up.clone().requires_grad_()
    inputs, outs = [], []
    for one in given:
        x, weights = one.x.float().requires_grad_(), one.weights.clone().requires_grad_()
        inputs += [x, weights]
        chosen = torch.einsum("th,tkhj->tkj", x, all_up[one.idx.clamp(min=0)]).tanh()
        outs.append((chosen * torch.where(one.idx >= 0, weights, 0)[..., None]).sum(1))
    grads = torch.autograd.grad(sum(out.sin().sum() for out in outs), [*inputs, all_up])
    for rank, got in enumerate(results):
        wanted = [outs[rank], *grads[2 * rank : 2 * rank + 2], grads[-1][rank * OWN : (rank + 1) * OWN]]
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other)


def _layer(given: list[Given]) -> dict[str, Any]:
    """Megatron's MoE layer with its flex dispatcher: what it is made of, its output, its gradients."""
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
    x = given[dist.get_rank()].x.float()[:, None].requires_grad_()  # [sequence, batch, hidden]
    with (  # where it puts its router, and a name that it lacks without Transformer Engine
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
    ):
        layer = MoELayer(config, spec.submodules, layer_number=1)
        dist.broadcast(layer.router.weight.data, 0)
        out, _ = layer(x)
        out.sin().sum().backward()
    fused_a2a._buffer.communicators.destroy()
    fused_a2a._buffer = None
    parallel_state.destroy_model_parallel()
    learns = {name: (p.detach(), p.grad) for name, p in layer.named_parameters()}
    return {"out": out.detach()[:, 0], "grad": x.grad[:, 0], "learns": learns}


@needs_megatron
def test_megatrons_layer() -> None:
    given = draw(cases.fresh_seed())
    results = run_ranks(RANKS, _layer, given)
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
        torch.testing.assert_close(result["out"], out.detach())
        torch.testing.assert_close(result["grad"], x.grad)
        assert len(own) == 1 + 2 * OWN
        for name, p in own.items():
            torch.testing.assert_close(result["learns"][name][1], p.grad)


# ---------------------------------------------------------------------- vLLM

WIDE = 2048  # the least that vLLM has a low-latency kernel for


def widened(one: Given) -> Tensor:
    """x of more numbers."""
    return one.x.repeat(1, WIDE // HIDDEN)


def _vllm(given: list[Given], kind: str, how: str) -> Tensor:
    """vLLM's prepare and finalize on DeepEP; each expert gives its rows times its number plus one."""
    deep_ep.install()
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )
    from vllm.utils.import_utils import has_deep_ep

    assert has_deep_ep()
    rank, one = dist.get_rank(), given[dist.get_rank()]
    buffer: Any = Buffer(group=dist.group.WORLD, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=True)
    x, out = widened(one), torch.full((one.x.shape[0], WIDE), 7.0).bfloat16()
    arguments = x, one.weights, one.idx, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG, False
    if kind == "many":
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize

        ours = DeepEPHTPrepareAndFinalize(buffer, RANKS, RANKS, rank * OWN)
        tensor = torch.tensor
        with mock.patch.object(torch, "tensor", lambda *a, pin_memory=None, **k: tensor(*a, **k)):  # a CPU pins none
            got = ours.prepare(*arguments) if how == "whole" else ours.prepare_async(*arguments)()
        rows, scales, meta, ids, weights = got
        mine = ids // OWN == rank
        assert torch.equal(meta.expert_num_tokens, torch.stack([(ids == rank * OWN + i).sum() for i in range(OWN)]))
        y = (rows.float() * torch.where(mine, (ids + 1) * weights, 0).sum(1, keepdim=True)).bfloat16()
        rest = out, y, weights, ids, False, TopKWeightAndReduceNoOP()
    elif kind == "expanded":
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize

        buffer = ElasticBuffer(
            group=dist.group.WORLD, num_max_tokens_per_rank=12, hidden=WIDE, num_topk=TOP_K, use_fp8_dispatch=False,
            allow_hybrid_mode=False, prefer_overlap_with_compute=True, allow_multiple_reduction=False,
            explicitly_destroy=True,
        )  # fmt: skip
        ours = DeepEPV2PrepareAndFinalize(buffer, RANKS, RANKS, rank * OWN, EXPERTS, TOP_K)
        tensor = torch.tensor
        with mock.patch.object(torch, "tensor", lambda *a, pin_memory=None, **k: tensor(*a, **k)):  # a CPU pins none
            got = ours.prepare(*arguments) if how == "whole" else ours.prepare_async(*arguments)()
        rows, scales, meta, ids, weights = got
        assert ids.shape == weights.shape == (len(rows), 1) and meta.expert_num_tokens.sum() == len(rows)
        y = (rows.float() * (ids + 1) * weights).bfloat16()
        rest = out, y, weights, ids, False, TopKWeightAndReduceNoOP()
    else:
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize

        fp8 = kind == "few fp8"
        ours = DeepEPLLPrepareAndFinalize(
            buffer, max_tokens_per_rank=12, num_dispatchers=RANKS, use_fp8_dispatch=fp8
        )  # fmt: skip
        if fp8:
            quantized = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
            arguments = (*arguments[:6], quantized, False)
        if how == "whole":
            rows, scales, meta, *_ = ours.prepare(*arguments)
        else:
            hook, receiver = ours.prepare_async(*arguments)
            hook()
            rows, scales, meta, *_ = receiver()
        if fp8:
            assert rows.dtype == torch.float8_e4m3fn and scales.stride(-1) > 1  # columns
            rows, scales = (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2), None
        place = torch.arange(rows.shape[1]) < meta.expert_num_tokens[:, None]
        number = torch.arange(1, OWN + 1)[:, None, None] + rank * OWN
        y = torch.where(place[..., None], rows.float() * number, torch.nan).bfloat16()
        rest = out, y, one.weights, one.idx, False, TopKWeightAndReduceDelegate()
    assert scales is None
    if how == "whole":
        ours.finalize(*rest)
    elif not kind.startswith("few"):
        ours.finalize_async(*rest)()
    else:
        hook, receiver = ours.finalize_async(*rest)
        hook()
        receiver()
    buffer.destroy()
    return out


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.33, which is not installed")
@pytest.mark.parametrize("how", ["whole", "asynchronous"])
@pytest.mark.parametrize("kind", ["many", "few", "few fp8", "expanded"])
def test_vllms_prepare_and_finalize(kind: str, how: str) -> None:
    given = draw(cases.fresh_seed())
    for one, out in zip(given, run_ranks(RANKS, _vllm, given, kind, how, timeout=240.0), strict=True):
        factor = torch.where(one.idx >= 0, (one.idx + 1) * one.weights, 0).sum(1, keepdim=True)
        wanted, tolerance = widened(one).float() * factor, 7e-2 if kind == "few fp8" else 2e-2
        torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)
