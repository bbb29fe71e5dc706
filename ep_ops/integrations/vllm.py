"""vLLM 0.33: classes before and after the experts in its modular kernels, for bfloat16 and FP8 activations.

    comm = Communicator.shared(
        get_ep_group().device_group, num_experts=moe.num_experts, hidden_size=moe.hidden_dim,
        top_k=moe.experts_per_token, max_tokens_per_rank=moe.max_num_tokens, dtype=moe.in_dtype,
    )
    kernel = FusedMoEKernel(PrepareAndFinalize(comm), experts)  # or BatchedPrepareAndFinalize

where ``moe`` is a ``FusedMoEConfig`` and the experts have the same activation format. The host is not synchronized and
sizes do not depend on routing, so both classes can be captured in CUDA graphs. There are no gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP,
    )
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_maybe_run_recv_hook
except ImportError as error:
    raise ImportError(
        f"ep_ops.integrations.vllm needs vLLM 0.33, which failed to import: {error}. Install it with"
        " pip install 'vllm>=0.33,<0.34' (what to install where there is no GPU: docs/recipes.md)."
    ) from error

from ep_ops.communicator import Communicator
from ep_ops.records import Dispatched

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""What vLLM calls hook and receiver: the first waits for the other ranks, the second hands out what came."""


class _PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """The common part of both formats. ``dropped`` (int64 [local experts], on the device) counts the rows of each local
    expert that did not fit."""

    dropped: Tensor
    reduces: tuple[type, ...]  # kinds of reduction that finalize supports

    def __init__(self, *comms: Communicator, sp_size: int) -> None:
        super().__init__()
        if not comms:
            raise ValueError("comms is empty; give one communicator for each micro-batch in progress")
        self._comms, self._sp_size = comms, sp_size
        self._sent: list[Dispatched | None] = [None] * len(comms)
        self.dropped = torch.zeros(comms[0].num_local_experts, dtype=torch.int64, device=comms[0].device)

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def num_dispatchers(self) -> int:
        return self._comms[0].world_size

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    def supports_dbo(self) -> bool:
        return len(self._comms) > 1

    def prepare_async(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Pair:  # fmt: skip
        """Send tokens to their experts; return the hook that waits and the receiver that returns the rows.

        Unless ``defer_input_quant`` is set, rows are quantized to e4m3 for sending if ``quant_config`` requires it:
        with a scale for each 128 numbers of a row, for each row, or with the static scale ``a1_scale`` of all rows.

        Args:
            a1: tokens [T, H] in the communicator's dtype.
            topk_weights, topk_ids: weights and experts [T, K]; -1 means no expert.
            num_experts: number of experts, which the ranks hold in contiguous blocks.
            expert_map: ignored.

        Raises:
            NotImplementedError: another quantization.
            ValueError: another number of experts, or weights on the input with K other than 1.
        """
        at, comm = self._at()
        if num_experts != comm.num_experts:
            raise ValueError(f"num_experts is {num_experts}; communicator {comm.name!r} has {comm.num_experts}")
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(
                    f"topk_ids has shape {tuple(topk_ids.shape)}; with apply_router_weight_on_input it must be [T, 1]"
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        quantized = {} if defer_input_quant else self._quantized(quant_config, a1)
        a1 = quantized.pop("x", a1)
        started = comm.dispatch_start(a1, topk_ids, topk_weights, **self._room(comm), zeros=True, **quantized)
        arrived = functools.cache(functools.partial(comm.dispatch_wait, started))

        def receiver() -> mk.PrepareResultType:
            self._sent[at] = sent = arrived()
            self.dropped.add_(sent.dropped)
            counts = mk.ExpertTokensMetadata(expert_num_tokens=sent.route.counts, expert_num_tokens_cpu=None)
            rows, ids, weights = self._rows(comm, sent)
            scales = None
            if sent.scales is not None:
                static = quant_config.a1_scale if quant_config.is_per_tensor else None
                scales = self._scales(comm, sent.scales, static)
            return rows, scales, counts, ids, weights

        return arrived, receiver

    def prepare(self, *args: Any, **kwargs: Any) -> mk.PrepareResultType:
        """Run :meth:`prepare_async` to its end."""
        return _ended(self.prepare_async(*args, **kwargs))

    def finalize_async(
        self, output: Tensor, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Pair:  # fmt: skip
        """Return rows to their owners and write each token's sum to ``output`` [T, H].

        ``fused_expert_output`` has the shape of the rows that prepare returned. The weights of prepare are applied in
        float32 in the sum, unless the experts (``TopKWeightAndReduceNoOP``) or prepare have applied them.

        Raises:
            RuntimeError: prepare was not called before.
            ValueError: ``weight_and_reduce_impl`` is of another kind.
        """
        at, comm = self._at()
        sent = self._sent[at]
        if sent is None:
            raise RuntimeError("finalize was called before prepare, which plans the route of the rows")
        if not isinstance(weight_and_reduce_impl, self.reduces):
            raise ValueError(
                f"weight_and_reduce_impl is {type(weight_and_reduce_impl).__name__}; allowed:"
                f" {', '.join(kind.__name__ for kind in self.reduces)}"
            )
        self._sent[at] = None
        weighted = apply_router_weight_on_input or isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP)
        dbo_maybe_run_recv_hook()
        y = fused_expert_output.view(-1, fused_expert_output.shape[-1])
        started = comm.combine_start(y, sent.route, None if weighted else sent.weights)
        arrived = functools.cache(functools.partial(comm.combine_wait, started))

        def receiver() -> None:
            output.copy_(arrived())

        return arrived, receiver

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """Run :meth:`finalize_async` to its end."""
        _ended(self.finalize_async(*args, **kwargs))

    def _at(self) -> tuple[int, Communicator]:
        """Return the micro-batch of this thread and its communicator."""
        at = dbo_current_ubatch_id()
        if at >= len(self._comms):
            raise ValueError(f"comms holds {len(self._comms)}; micro-batch {at} needs a communicator of its own")
        return at, self._comms[at]

    def _max_tokens(self, comm: Communicator) -> int:
        """Return a bound on the tokens of any rank: that of vLLM's data-parallel ranks for this step, if known."""
        metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
        if metadata is None:
            return comm.max_tokens_per_rank
        return math.ceil(int(metadata.num_tokens_across_dp_cpu.max()) / self._sp_size)

    def _quantized(self, quant_config: Any, a1: Tensor) -> dict[str, Any]:
        """Return the arguments of a dispatch for ``quant_config``, with ``x`` if rows are quantized before it."""
        dtype, block, static = quant_config.quant_dtype, quant_config.block_shape, quant_config.a1_scale
        if dtype is None:
            return {}
        if dtype == torch.float8_e4m3fn:
            if block is not None and block[1] == 128:
                return {"format": "e4m3/128/pow2" if self._powers() else "e4m3/128/fp32", "scales_as": self._layout()}
            if block is None and quant_config.is_per_act_token:
                return {"format": "e4m3/row/fp32"}
            if block is None and static is not None and static.numel() == 1:
                codes = (a1.float() / static.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
                scales = static.float().reshape(1).expand(a1.shape[0]).contiguous()
                return {"x": codes, "scales": scales, "format": "e4m3/row/fp32"}
        raise NotImplementedError(
            f"quant_config has quant_dtype {dtype}, block_shape {block}, per_act_token_quant"
            f" {quant_config.per_act_token_quant} and {'no' if static is None else 'an'} a1_scale; allowed: None, or"
            " float8_e4m3fn with blocks of 128, with a scale for each token, or with a static a1_scale of one number"
        )

    def _powers(self) -> bool:
        """Return whether experts take scales that are powers of two."""
        return is_deep_gemm_e8m0_used()

    def _layout(self) -> str:
        """Return the layout of received block scales."""
        return "rows"

    def _scales(self, comm: Communicator, scales: Tensor, static: Tensor | None) -> Tensor:
        """Return received scales in the shape that vLLM passes to experts."""
        if static is not None:
            return static
        return scales.unsqueeze(1) if scales.dim() == 1 else scales

    def _room(self, comm: Communicator) -> dict[str, Any]:
        """Return the sizes of a dispatch."""
        raise NotImplementedError

    def _rows(self, comm: Communicator, sent: Dispatched) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return rows in this format, and ids and weights that replace the router's, or None to keep them."""
        raise NotImplementedError


class PrepareAndFinalize(_PrepareAndFinalize):
    """The "standard" format: one row for each (token, expert), [R, H], treated as a token of one expert.

    Rows have global ids [R, 1] and weights [R, 1] and are in the order of the local experts; ``expert_num_tokens``
    holds their numbers. Later rows are undefined and have id -1.

    Args:
        comms: a communicator for each micro-batch in progress: two for vLLM's dual batch overlap.
        capacity_factor: rows of a rank as a part of the worst case, in (0, 1]; what does not fit is dropped and
            counted. 1: the worst case, in which every token names ``min(top_k, local experts)`` experts of this rank.
        sp_size: ranks that share the tokens of one data-parallel rank, ``moe.moe_parallel_config.sp_size``.
    """

    reduces = TopKWeightAndReduceNoOP, TopKWeightAndReduceDelegate, TopKWeightAndReduceContiguous

    def __init__(self, *comms: Communicator, capacity_factor: float = 1.0, sp_size: int = 1) -> None:
        super().__init__(*comms, sp_size=sp_size)
        if not isinstance(capacity_factor, (int, float)) or not 0 < capacity_factor <= 1:
            raise ValueError(f"capacity_factor is {capacity_factor!r}; allowed: in (0, 1]")
        self._factor = capacity_factor

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> None:
        """Return None: experts of this format need no batch size."""
        return None

    def _room(self, comm: Communicator) -> dict[str, Any]:
        tokens = self._max_tokens(comm)
        capacity = None if self._factor == 1 else math.ceil(comm.capacity(tokens, 1) * self._factor)
        return {"capacity": capacity, "max_tokens": tokens, "alignment": 1}

    def _rows(self, comm: Communicator, sent: Dispatched) -> tuple[Tensor, Tensor, Tensor]:
        assert sent.weights is not None
        row = torch.arange(sent.x.shape[0], dtype=torch.int32, device=comm.device)
        local = torch.searchsorted(sent.route.offs, row, right=True, out_int32=True)  # alignment 1: no gaps
        ids = torch.where(local < comm.num_local_experts, local + comm.first_local_expert, -1)
        return sent.x, ids.unsqueeze(1), sent.weights.unsqueeze(1)


class BatchedPrepareAndFinalize(_PrepareAndFinalize):
    """The "batched experts" format: rows [local experts, slots, H], and their number int32 [local experts].

    Rows after those are undefined. vLLM sizes such experts for ``max_num_tokens_per_rank() * num_dispatchers()`` slots.

    Args:
        comms, sp_size: as for :class:`PrepareAndFinalize`.
        slots: rows of each local expert, a multiple of the number of ranks; what does not fit is dropped and counted.
            None: the worst case, in which all tokens of all ranks name the expert.
    """

    reduces = (TopKWeightAndReduceDelegate,)

    def __init__(self, *comms: Communicator, slots: int | None = None, sp_size: int = 1) -> None:
        super().__init__(*comms, sp_size=sp_size)
        self._packed = False
        ranks = comms[0].world_size
        self._slots = ranks * comms[0].max_tokens_per_rank if slots is None else slots
        if self._slots < ranks or self._slots % ranks:
            raise ValueError(f"slots is {slots}; allowed: a positive multiple of the number of ranks, {ranks}")

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def post_init_setup(self, fused_experts: Any) -> None:
        """Note whether the experts take four exponents of power-of-two scales in an int32."""
        self._packed = fused_experts.supports_packed_ue8m0_act_scales()

    def max_num_tokens_per_rank(self) -> int:
        """Return the slots of each rank, which experts of this format multiply by the number of ranks."""
        return self._slots // self.num_dispatchers()

    def _room(self, comm: Communicator) -> dict[str, Any]:
        return {"layout": "padded", "slots": self._slots, "max_tokens": self._max_tokens(comm), "alignment": 1}

    def _powers(self) -> bool:
        return self._packed

    def _layout(self) -> str:
        return "packed" if self._packed else "columns"

    def _scales(self, comm: Communicator, scales: Tensor, static: Tensor | None) -> Tensor:
        if static is not None:
            return static.reshape(1, 1, 1).expand(comm.num_local_experts, 1, 1)
        return scales.view(comm.num_local_experts, self._slots, 1) if scales.dim() == 1 else scales

    def _rows(self, comm: Communicator, sent: Dispatched) -> tuple[Tensor, None, None]:
        return sent.x.view(comm.num_local_experts, self._slots, comm.hidden_size), None, None


def _ended(pair: Pair) -> Any:
    hook, receiver = pair
    hook()
    return receiver()
