"""SGLang's MoE dispatcher on ep_ops, without a GPU: each expert multiplies its rows by its number plus one."""

from __future__ import annotations

import contextlib
import importlib.machinery
import inspect
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, OWN, RANKS, TOP_K, Given
from torch import Tensor

WIDE, FEW, MANY = 256, 8, 40  # numbers of a token; tokens of a rank in low-latency and in normal mode


class Absent:
    """Finds modules that SGLang imports and that need a GPU or other builds, and gives them any attribute."""

    names: tuple[str, ...] = ("torchvision", "decord", "av", "sgl_kernel")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "99.0"
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def quantized(x: Tensor, group: int, **_: Any) -> tuple[Tensor, Tensor]:
    """Return codes, and a scale for each 128 numbers, as SGLang's kernel does."""
    blocks = x.float().unflatten(1, (-1, group))
    scales = blocks.abs().amax(-1).clamp_min(1e-10) / 448.0
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(1), scales


def decoded(rows: Tensor, scales: Tensor | None) -> Tensor:
    return rows.float() if scales is None else (rows.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)


@contextlib.contextmanager
def server(fp8: bool, mode: str, tbo: bool = False) -> Iterator[Any]:
    """The plugin in this process, with a server's settings. Yields a function that makes a layer's dispatcher."""
    if not any(isinstance(finder, Absent) for finder in sys.meta_path):
        sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
        from transformers import AutoProcessor  # noqa: F401

        Absent.names += ("torchcodec",)  # not before: transformers asks for the version of one that it finds
    os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ep_ops.integrations import plugins
    from ep_ops.integrations import sglang as ours

    dtypes = getattr(deepep, "DispatcherOutputDtype", None) or deepep.DeepEPOutputDtype
    group = SimpleNamespace(device_group=dist.group.WORLD)
    backend = MoeA2ABackend.DEEPEP
    with contextlib.ExitStack() as replaced:
        for owner, name, value in (
            (deepep, "get_deepep_output_dtype", lambda _: dtypes.FP8 if fp8 else dtypes.BF16),
            (deepep, "get_global_expert_distribution_recorder", mock.MagicMock()),
            (deepep.envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, "get", lambda: FEW),
            (ours.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
            (ours.deep_gemm_wrapper, "DEEPGEMM_BLACKWELL", False),
            (ours.deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", False), (ours, "quantization", lambda: quantized),
            (ours, "get_deepep_mode", lambda: DeepEPMode(mode)), (ours, "get_moe_a2a_backend", lambda: backend),
            (ours.two_batch_overlap, "is_tbo_enabled", lambda: tbo),
            (layer, "create_moe_dispatcher", layer.create_moe_dispatcher),
            (deepep.DeepEPBuffer, "clean_buffer", deepep.DeepEPBuffer.__dict__["clean_buffer"]),
        ):  # fmt: skip
            replaced.enter_context(mock.patch.object(owner, name, value))
        if hasattr(layer, "_get_deepep_comm_group"):
            replaced.enter_context(mock.patch.object(layer, "_get_deepep_comm_group", lambda _: dist.group.WORLD))
        else:
            replaced.enter_context(mock.patch.object(layer, "get_tp_group", lambda: group))
        replaced.enter_context(
            mock.patch.dict("os.environ", {"EP_OPS_SGLANG": "1", "EP_OPS_SGLANG_MAX_TOKENS": str(MANY)})
        )
        HookRegistry.reset()
        plugins.sglang()
        HookRegistry.apply_hooks()
        more = [None] * (len(inspect.signature(inspect.unwrap(layer.create_moe_dispatcher)).parameters) - 1)
        config = SimpleNamespace(num_experts=EXPERTS, hidden_size=WIDE, top_k=TOP_K, params_dtype=torch.bfloat16)
        try:
            yield lambda: layer.create_moe_dispatcher(config, *more)
        finally:
            HookRegistry.reset()


@contextlib.contextmanager
def extending(extend: bool) -> Iterator[None]:
    """A batch of prefill or of decode, from which the mode "auto" chooses."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    with mock.patch.object(deepep, "get_is_extend_in_batch", lambda: extend):
        yield


def of_experts(out: Any) -> Any:
    """Return the experts' output for a dispatch: weighted sums of rows of tokens, or unweighted rows."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    first = dist.get_rank() * OWN
    x = decoded(out.hidden_states, out.hidden_states_scale)
    if isinstance(out, deepep.DeepEPNormalDispatchOutput):
        assert out.topk_ids.dtype == torch.int64 and len(x) == len(out.topk_ids)
        counts = [int((out.topk_ids == i).sum()) for i in range(OWN)]
        assert out.num_recv_tokens_per_expert == [-(-count // 128) * 128 for count in counts]
        number = torch.where(out.topk_ids >= 0, (out.topk_ids + first + 1) * out.topk_weights, 0)
        y = (x * number.sum(1, keepdim=True)).bfloat16()
        return deepep.DeepEPNormalCombineInput(y, out.topk_ids, out.topk_weights)
    assert x.shape == (OWN, RANKS * FEW, WIDE) and out.masked_m.shape == (OWN,)
    number = torch.arange(first + 1, first + OWN + 1)[:, None, None]
    place = torch.arange(x.shape[1]) < out.masked_m[:, None]
    y = torch.where(place[..., None], x * number, torch.nan).bfloat16()
    return deepep.DeepEPLLCombineInput(y, out.topk_ids, out.topk_weights)


def check(one: Given, got: Tensor, fp8: bool) -> None:
    factor = torch.where(one.idx >= 0, (one.idx + 1) * one.weights, 0).sum(1, keepdim=True)
    tolerance = 8e-2 if fp8 else 2e-2
    torch.testing.assert_close(got.float(), one.x.float() * factor, rtol=tolerance, atol=tolerance)
