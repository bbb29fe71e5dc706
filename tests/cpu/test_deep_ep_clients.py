"""Megatron-core's and vLLM's own code on DeepEP's interface (ep_ops.integrations.deep_ep), against dense models."""

from __future__ import annotations

import importlib.util

import cases
import megatron_cases
import pytest
import torch
import vllm_cases
from deep_ep_cases import EXPERTS, HIDDEN, RANKS, draw
from ranks import run_ranks

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


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.33, which is not installed")
@pytest.mark.parametrize("how", ["whole", "asynchronous"])
@pytest.mark.parametrize("kind", vllm_cases.KINDS)
def test_vllms_prepare_and_finalize(kind: str, how: str) -> None:
    given = draw(cases.fresh_seed())
    for one, out in zip(given, run_ranks(RANKS, vllm_cases.run, given, kind, how, timeout=240.0), strict=True):
        vllm_cases.check(one, out, kind)
