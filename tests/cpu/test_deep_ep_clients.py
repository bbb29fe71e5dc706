"""Megatron-core's and vLLM's own code on DeepEP's interface (ep_ops.integrations.deep_ep), against dense models."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import cases
import megatron_cases
import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOP_K, Given, draw
from ranks import run_ranks
from torch import Tensor

from ep_ops.integrations import deep_ep
from ep_ops.integrations.deep_ep import Buffer, ElasticBuffer

# ---------------------------------------------------------------------- Megatron-core

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs Megatron-core 0.16, which is not installed"
)


@needs_megatron
@pytest.mark.parametrize("flags", [False, True])
def test_megatrons_fused_operations(flags: bool) -> None:
    seed = cases.fresh_seed()
    given = draw(seed)
    up = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) / HIDDEN**0.5
    results = run_ranks(RANKS, megatron_cases.fused, given, up, flags)
    for got, wanted in zip(results, megatron_cases.dense(given, up), strict=True):
        torch.testing.assert_close(got, wanted)


@needs_megatron
def test_megatrons_layer() -> None:
    given = draw(cases.fresh_seed())
    megatron_cases.check_layers(given, run_ranks(RANKS, megatron_cases.layer, given))


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
