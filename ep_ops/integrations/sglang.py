"""SGLang 0.5.14 and 0.5.23: a dispatcher of its MoE layers on ep_ops, which needs no module deep_ep.

With ``EP_OPS_SGLANG=1`` in the environment, ep_ops' plugin registers it, and layers use it if the server runs with
``--moe-a2a-backend deepep``. Both modes of SGLang are supported, and "auto", which chooses by batch:

- normal: rows of tokens, as experts of the format "deepep_normal" take them. The host waits for the counts.
- low latency: rows by expert ("deepep_ll"), for CUDA graphs. A layer has two exchanges and no small operators, if the
  ids are int32 and the weights float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from sglang.srt.batch_overlap import two_batch_overlap
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import get_deepep_mode, get_moe_a2a_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as error:
    raise ImportError(
        f"ep_ops.integrations.sglang needs SGLang 0.5.14 or 0.5.23, which failed to import: {error}. Install it with"
        " pip install sglang==0.5.23."
    ) from error

from ep_ops.communicator import Communicator
from ep_ops.integrations.deep_ep.buffer import destinations
from ep_ops.integrations.deep_ep.communicators import counts_of, format_of, with_scales
from ep_ops.integrations.plugins import quantization
from ep_ops.operators.rejection import reject
from ep_ops.records import Dispatched

_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
_CLEAN = "sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPBuffer.clean_buffer"
_BOUND = "EP_OPS_SGLANG_MAX_TOKENS"


def install() -> None:
    """Register the dispatcher with SGLang's hooks, which plugins do before SGLang applies them."""
    HookRegistry.register(_LAYER, _around, HookType.AROUND)
    HookRegistry.register(_CLEAN, _nothing, HookType.REPLACE)  # SGLang calls it where graphs are replayed


def _around(original: Callable[..., Any], config: Any, *rest: Any) -> Any:
    return make_dispatcher(config) if get_moe_a2a_backend().is_deepep() else original(config, *rest)


def _nothing(*_: Any) -> None:
    """Take the place of ``DeepEPBuffer.clean_buffer``: there is no buffer."""


def make_dispatcher(config: Any) -> Any:
    """Return SGLang's ``MaybeTboDeepEPDispatcher`` with a dispatcher of ep_ops for each batch in progress.

    Args:
        config: the layer's ``MoeRunnerConfig``.
    """
    batches = 2 if two_batch_overlap.is_tbo_enabled() else 1
    made = two_batch_overlap.MaybeTboDeepEPDispatcher.__new__(two_batch_overlap.MaybeTboDeepEPDispatcher)
    super(two_batch_overlap.MaybeTboDeepEPDispatcher, made).__init__()
    made._inners = [EpOpsDispatcher(config, batch, batches) for batch in range(batches)]
    return made


class EpOpsDispatcher(deepep.DeepEPDispatcher):
    """SGLang's ``DeepEPDispatcher`` whose two modes use a communicator. Layers of equal sizes share it.

    Args:
        config: the layer's ``MoeRunnerConfig``.
        batch, batches: number of this batch, and of batches in progress. Each has a communicator.
    """

    def __init__(self, config: Any, batch: int = 0, batches: int = 1) -> None:
        super(deepep.DeepEPDispatcher, self).__init__()  # SGLang's own needs the module deep_ep
        self.deepep_mode = get_deepep_mode()
        tokens = deepep.envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        normal = _most_tokens(tokens) if self.deepep_mode.enable_normal() else tokens
        comm = _communicator(config, max(tokens, normal), tokens)
        if batch:
            comm = _communicator(config, max(tokens, normal), tokens, f"{comm.name}-batch{batch}")
        if self.deepep_mode.enable_low_latency():
            self._low_latency_dispatcher = LatencyMode(config, comm, tokens, batches > 1)
        if self.deepep_mode.enable_normal():
            self._normal_dispatcher = NormalMode(config, comm, normal)
        self._stage = deepep._Stage.INITIAL
        self._deepep_dispatch_hooks = deepep.DeepEPPDispatchHooks()
        self.expert_mask_gpu = None


def _most_tokens(latency: int) -> int:
    """Return the largest number of tokens that a rank passes to a layer.

    It is ``EP_OPS_SGLANG_MAX_TOKENS``, or else follows from the server's arguments.
    """
    given = os.environ.get(_BOUND) or None
    if given is not None:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{_BOUND} is {given!r}; expected a positive integer")
        return int(given)
    try:
        from sglang.srt.runtime_context import get_schedule, get_spec
    except ImportError:  # SGLang 0.5.14
        from sglang.srt.server_args import get_global_server_args as get_schedule

        get_spec = get_schedule
    settings = get_schedule()
    chunk = settings.chunked_prefill_size
    if chunk is None or chunk <= 0:
        chunk = settings.max_prefill_tokens
    decoding = (settings.max_running_requests or 0) * (get_spec().speculative_num_draft_tokens or 1)
    return max(latency, chunk + decoding if settings.enable_mixed_chunk else max(chunk, decoding))


def _communicator(config: Any, tokens: int, latency: int, name: str = "") -> Communicator:
    return Communicator.shared(
        _group(), num_experts=config.num_experts, hidden_size=config.hidden_size, top_k=config.top_k,
        max_tokens_per_rank=tokens, dtype=config.params_dtype, alignment=1, latency_max_tokens=max(latency, 256),
        name=name,
    )  # fmt: skip


def _group() -> Any:
    """Return the process group of the experts."""
    from sglang.srt.layers.moe.fused_moe_triton import layer

    if hasattr(layer, "_get_deepep_comm_group"):
        return layer._get_deepep_comm_group(get_moe_a2a_backend())
    return layer.get_tp_group().device_group  # SGLang 0.5.14


class _Mode(deepep._DeepEPDispatcherImplBase):  # type: ignore[misc]
    """The common part of both modes."""

    def __init__(self, config: Any, comm: Communicator, tokens: int, split: bool = False) -> None:
        # Not SGLang's own __init__, which needs the module deep_ep.
        self.comm, self.tokens, self.split = comm, tokens, split
        self.num_experts, self.runner_backend = config.num_experts, getattr(config, "runner_backend", None)
        self.overlap_args = self.meta_overlap_args = None
        self._sent: Dispatched | None = None
        self.set_quant_config({})

    def _check_tokens(self, operator: str, x: Tensor, variable: str) -> None:
        """Raise ValueError on all ranks if a batch has more tokens than memory was allocated for."""
        if x.shape[0] > self.tokens:
            error = ValueError(
                f"SGLang passed {x.shape[0]} tokens to a layer in mode {self.dispatch_mode.value!r}; allowed: at most"
                f" {self.tokens}. Set {variable} to a larger number"
            )
            reject(operator, self.comm, error, max_tokens=self.tokens)

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """Choose the format of rows as SGLang does for DeepEP.

        Raises:
            NotImplementedError: neither the model's dtype nor float8_e4m3fn.
        """
        super().set_quant_config(quant_config)
        for name in ("nvfp4", "mxfp4", "mxfp8"):
            if getattr(self, f"use_{name}", False):
                raise NotImplementedError(f"SGLang chose {name} rows; EP_OPS_SGLANG supports bf16 and fp8")

    def _taken(self) -> Dispatched:
        sent, self._sent = self._sent, None
        if sent is None:
            raise RuntimeError("combine was called before dispatch, which plans the route of the rows")
        return sent


class NormalMode(_Mode):
    """Many tokens: one row for each (token, rank), with local ids and weights."""

    dispatch_mode = deepep.DeepEPMode.NORMAL

    def __init__(self, config: Any, comm: Communicator, tokens: int) -> None:
        super().__init__(config, comm, tokens)
        # Once: an import that fails, as in SGLang 0.5.14, searches for the module each time.
        self._quantize = quantization()

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> tuple[Any, ...]:
        """Quantize the tokens if SGLang quantizes them before they are sent to DeepGEMM."""
        scales = None
        if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and self.use_fp8:
            packed = deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
            hidden_states, scales = self._quantize(
                hidden_states, 128, column_major_scales=packed, scale_tma_aligned=packed, scale_ue8m0=packed
            )
        return hidden_states, scales, topk_output.topk_ids, topk_output.topk_weights

    @torch.no_grad()
    def dispatch_b(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Any:
        """Exchange the tokens. The host waits for the counts."""
        self._check_tokens("dispatch_dynamic", x, _BOUND)
        sent = self.comm.dispatch(
            x, ids, weights.float(), layout="token_major", exact=True, max_tokens=self.tokens, **format_of(x, scales)
        )
        self._sent = sent
        assert sent.local_idx is not None
        counts = counts_of(sent, self.comm, 128 if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1)
        recorder = deepep.get_global_expert_distribution_recorder()
        if recorder.recording:
            per_rank, per_expert, _ = destinations(ids, self.num_experts, self.comm.world_size)
            recorder.on_deepep_dispatch_normal(
                counts, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=None, num_tokens_per_expert=per_expert
            )
        rows = with_scales(sent.x, sent.scales, scales)
        rows, received = rows if isinstance(rows, tuple) else (rows, None)
        return deepep.DeepEPNormalDispatchOutput(rows, received, sent.local_idx.long(), sent.weights, counts)

    def combine_a(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Any, ...]:
        """Take the weighted sums of the experts, one row for each (token, rank)."""
        return (hidden_states,)

    @torch.no_grad()
    def combine_b(self, hidden_states: Tensor) -> Tensor:
        """Return the sums to the tokens' ranks."""
        return self.comm.combine(hidden_states, self._taken().route)


class LatencyMode(_Mode):
    """Few tokens: rows [local experts, W C, H]. ``split``: starts and waits are separate, for two batches in turns."""

    dispatch_mode = deepep.DeepEPMode.LOW_LATENCY

    @torch.no_grad()
    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> tuple[Any, ...]:
        """Send tokens and weights."""
        comm, ids, weights = self.comm, topk_output.topk_ids, topk_output.topk_weights
        how: dict[str, Any] = {}
        if self.use_fp8:
            packed = deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and deep_gemm_wrapper.DEEPGEMM_BLACKWELL
            how = {"format": "e4m3/128/fp32", "scales_as": "columns"}
            if packed:
                how = {"format": "e4m3/128/pow2", "scales_as": "packed"}
        operator = "dispatch_start" if self.split else "dispatch"
        self._check_tokens(operator, hidden_states, "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK")
        send: Any = getattr(comm, operator)
        started = send(
            hidden_states.contiguous(), ids, weights.float(), layout="padded", slots=comm.world_size * self.tokens,
            alignment=1, max_tokens=self.tokens, **how,
        )  # fmt: skip
        rows = hidden_states.shape[0] * comm.world_size * ids.shape[1]
        return started, ids, weights, (rows + self.num_experts) // self.num_experts

    @torch.no_grad()
    def dispatch_b(self, started: Any, ids: Tensor, weights: Tensor, expected: int) -> Any:
        """Return the rows that have arrived."""
        sent = self.comm.dispatch_wait(started) if self.split else started
        self._sent = sent
        counts = sent.route.counts
        deepep.get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(counts)
        rows = sent.x.view(len(counts), -1, sent.x.shape[-1])
        return deepep.DeepEPLLDispatchOutput(rows, sent.scales, ids, weights, counts, expected)

    @torch.no_grad()
    def combine_a(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Any, ...]:
        """Send the rows of the experts, weighted and summed.

        Raises:
            NotImplementedError: SGLang's single-batch overlap is enabled.
        """
        if self.overlap_args is not None:
            raise NotImplementedError("EP_OPS_SGLANG does not support --enable-single-batch-overlap")
        sent = self._taken()
        send: Any = self.comm.combine_start if self.split else self.comm.combine
        return (send(hidden_states.view(-1, hidden_states.shape[-1]), sent.route, sent.weights),)

    @torch.no_grad()
    def combine_b(self, started: Any) -> Tensor:
        """Return the sums at the tokens' ranks."""
        return self.comm.combine_wait(started) if self.split else started
