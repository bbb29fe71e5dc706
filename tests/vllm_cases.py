"""vLLM's own classes for DeepEP: each expert multiplies its rows by its number plus one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOP_K, Given
from torch import Tensor

from ep_ops import Communicator
from ep_ops.integrations import deep_ep
from ep_ops.integrations.deep_ep import Buffer, ElasticBuffer

WIDE = 2048  # the least that vLLM has a low-latency kernel for
MOST = 12  # tokens of any rank
KINDS = ("many", "few", "few fp8", "expanded")
"""Throughput, latency with bfloat16 and FP8, and the second version without CUDA graphs. With them it is "compact",
which needs a GPU for a Triton kernel."""


def widened(one: Given) -> Given:
    """Return tokens of more numbers."""
    return Given(one.x.repeat(1, WIDE // HIDDEN), one.idx, one.weights, one.bias)


def check(one: Given, out: Tensor, kind: str) -> None:
    factor = torch.where(one.idx >= 0, (one.idx + 1) * one.weights, 0).sum(1, keepdim=True)
    tolerance = 7e-2 if kind == "few fp8" else 2e-2
    torch.testing.assert_close(out.float(), widened(one).x.float() * factor, rtol=tolerance, atol=tolerance)


def make(kind: str, how: str) -> tuple[Any, Callable[[Given, Tensor], None]]:
    """Return a buffer, and a function that fills [T, WIDE] with what the experts make of widened tokens."""
    deep_ep.install()
    from vllm.utils.import_utils import has_deep_ep

    assert has_deep_ep()
    rank = dist.get_rank()
    if kind in ("expanded", "compact"):
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize

        second = ElasticBuffer(
            group=dist.group.WORLD, num_max_tokens_per_rank=MOST, hidden=WIDE, num_topk=TOP_K, use_fp8_dispatch=False,
            allow_hybrid_mode=False, prefer_overlap_with_compute=True, allow_multiple_reduction=False,
            explicitly_destroy=True,
        )  # fmt: skip
        theirs = DeepEPV2PrepareAndFinalize(
            second, RANKS, RANKS, rank * OWN, EXPERTS, TOP_K, use_cudagraph=kind == "compact"
        )
        return second, lambda one, out: of_rows(theirs, kind, how, one, out)
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize

    buffer: Any = Buffer(group=dist.group.WORLD, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=True)
    if kind == "many":
        ht = DeepEPHTPrepareAndFinalize(buffer, RANKS, RANKS, rank * OWN)
        return buffer, lambda one, out: of_rows(ht, kind, how, one, out)
    ll = DeepEPLLPrepareAndFinalize(
        buffer, max_tokens_per_rank=MOST, num_dispatchers=RANKS, use_fp8_dispatch=kind == "few fp8"
    )
    return buffer, lambda one, out: of_slots(ll, kind == "few fp8", how, one, out)


def of_rows(theirs: Any, kind: str, how: str, one: Given, out: Tensor) -> None:
    """Run prepare, experts on rows of tokens or of (token, expert), and finalize."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    rank, tensor = dist.get_rank(), torch.tensor
    arguments = one.x, one.weights, one.idx, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG, False
    with contextlib.ExitStack() as replaced:
        if one.x.device.type == "cpu":  # which pins no memory
            replaced.enter_context(mock.patch.object(torch, "tensor", lambda *a, pin_memory=None, **k: tensor(*a, **k)))
        if kind == "compact":  # the model runner tells how many tokens the ranks have
            tokens = SimpleNamespace(num_tokens_across_dp_cpu=torch.full((RANKS,), MOST))
            context = SimpleNamespace(dp_metadata=tokens)
            module = sys.modules[type(theirs).__module__]
            replaced.enter_context(mock.patch.object(module, "get_forward_context", lambda: context))
        got = theirs.prepare(*arguments) if how == "whole" else theirs.prepare_async(*arguments)()
    rows, scales, meta, ids, weights = got
    assert scales is None
    if kind == "many":
        counts = torch.stack([(ids == rank * OWN + i).sum() for i in range(OWN)])
        assert torch.equal(meta.expert_num_tokens, counts)
    elif kind == "expanded":
        assert ids.shape == weights.shape == (len(rows), 1) and meta.expert_num_tokens.sum() == len(rows)
    mine = ids.long() // OWN == rank
    y = (rows.float() * torch.where(mine, (ids + 1) * weights, 0).sum(1, keepdim=True)).bfloat16()
    rest = out, y, weights, ids, False, TopKWeightAndReduceNoOP()
    if how == "whole":
        theirs.finalize(*rest)
    else:
        theirs.finalize_async(*rest)()


def of_slots(theirs: Any, fp8: bool, how: str, one: Given, out: Tensor) -> None:
    """Run prepare, experts on [local experts, slots, WIDE], and finalize."""
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    quantized = FUSED_MOE_UNQUANTIZED_CONFIG
    if fp8:
        quantized = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
    arguments = one.x, one.weights, one.idx, EXPERTS, None, False, quantized, False
    if how == "whole":
        rows, scales, meta, *_ = theirs.prepare(*arguments)
    else:
        hook, receiver = theirs.prepare_async(*arguments)
        hook()
        rows, scales, meta, *_ = receiver()
    if fp8:
        assert rows.dtype == torch.float8_e4m3fn and scales.stride(-1) > 1  # columns
        rows, scales = (rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2), None
    assert scales is None
    place = torch.arange(rows.shape[1], device=rows.device) < meta.expert_num_tokens[:, None]
    number = torch.arange(1, OWN + 1, device=rows.device)[:, None, None] + dist.get_rank() * OWN
    y = torch.where(place[..., None], rows.float() * number, torch.nan).bfloat16()
    rest = out, y, one.weights, one.idx, False, TopKWeightAndReduceDelegate()
    if how == "whole":
        theirs.finalize(*rest)
        return
    hook, receiver = theirs.finalize_async(*rest)
    hook()
    receiver()


def run(given: list[Given], kind: str, how: str) -> Tensor:
    """Run prepare and finalize once on CPU tensors."""
    one = widened(given[dist.get_rank()])
    out = torch.full_like(one.x, 7.0)
    buffer, call = make(kind, how)
    apart = mock.patch.object(Communicator, "dispatch_planned", side_effect=AssertionError("weights were sent apart"))
    with apart if kind.startswith("few") else contextlib.nullcontext():
        call(one, out)
    buffer.destroy()
    return out
