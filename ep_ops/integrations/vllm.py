"""vLLM 0.26 and 0.33: classes before and after the experts in its modular kernels, for bfloat16 and FP8 activations.

With ``EP_OPS_VLLM=1`` in the environment, ep_ops' plugin makes all MoE layers of a server use them
(:mod:`ep_ops.integrations.vllm_server`). By hand:

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
import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
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
        f"ep_ops.integrations.vllm needs vLLM 0.26 or 0.33, which failed to import: {error}. Install it with"
        " pip install 'vllm>=0.33,<0.34' (what to install where there is no GPU: CONTRIBUTING.md)."
    ) from error

from ep_ops.communicator import Communicator
from ep_ops.records import Dispatched, Route

Pair = tuple[Callable[[], Any], Callable[[], Any]]
"""What vLLM calls hook and receiver: the first waits for the other ranks, the second hands out what came."""


class _PrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """The common part of both formats.

    With one communicator and without shared experts, a dispatch and a combine are one operator each. Otherwise a
    combine starts and ends separately, and the shared experts or the other micro-batch run in between; with several
    communicators a dispatch does so as well.
    """

    def __init__(self, *comms: Communicator, sp_size: int, shared_experts: bool) -> None:
        super().__init__()
        if not comms:
            raise ValueError("comms is empty; give one communicator for each micro-batch in progress")
        self._comms, self._sp_size, self._shared_experts = comms, sp_size, shared_experts
        self._sent: list[Dispatched | None] = [None] * len(comms)

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def num_dispatchers(self) -> int:
        return self._comms[0].world_size

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return self._shared_experts or len(self._comms) > 1

    def supports_dbo(self) -> bool:
        return len(self._comms) > 1

    def prepare(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> mk.PrepareResultType:  # fmt: skip
        """Send tokens to their experts and return the rows that arrive.

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
        given = a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input, quant_config
        return self._received(at, comm.dispatch(**self._to_send(comm, *given, defer_input_quant)), quant_config)

    def prepare_async(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None,
        apply_router_weight_on_input: bool, quant_config: Any, defer_input_quant: bool = False,
    ) -> Pair:  # fmt: skip
        """Start :meth:`prepare`; return the hook that waits and the receiver that returns the rows.

        With one communicator nothing runs in between, so the rows have arrived when this method returns.
        """
        if len(self._comms) == 1:
            given = a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config
            rows = self.prepare(*given, defer_input_quant)
            return _nothing, lambda: rows
        at, comm = self._at()
        own = a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input, quant_config
        started = comm.dispatch_start(**self._to_send(comm, *own, defer_input_quant))
        arrived = functools.cache(functools.partial(comm.dispatch_wait, started))
        return arrived, lambda: self._received(at, arrived(), quant_config)

    def finalize(
        self, output: Tensor, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:  # fmt: skip
        """Return rows to their owners and copy each token's sum to ``output`` [T, H].

        Args:
            fused_expert_output: what the experts computed of the rows that prepare returned.
            topk_weights, topk_ids: those that prepare returned.
            weight_and_reduce_impl: how the experts want rows to be weighted and summed over K.

        Raises:
            RuntimeError: prepare was not called before.
            ValueError: ``weight_and_reduce_impl`` is of another kind.
        """
        given = topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        comm, y, route, weights = self._to_combine(fused_expert_output, *given)
        output.copy_(comm.combine(y, route, weights))

    def finalize_async(
        self, output: Tensor, fused_expert_output: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Pair:  # fmt: skip
        """Start :meth:`finalize`; return the hook that waits and the receiver that writes ``output``."""
        given = topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        comm, y, route, weights = self._to_combine(fused_expert_output, *given)
        dbo_maybe_run_recv_hook()
        started = comm.combine_start(y, route, weights)
        arrived = functools.cache(functools.partial(comm.combine_wait, started))
        return arrived, lambda: output.copy_(arrived())

    def _to_send(
        self, comm: Communicator, a1: Tensor, weights: Tensor, ids: Tensor, num_experts: int, on_input: bool,
        quant_config: Any, deferred: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the arguments of a dispatch."""
        if num_experts != comm.num_experts:
            raise ValueError(f"num_experts is {num_experts}; communicator {comm.name!r} has {comm.num_experts}")
        if on_input:
            if ids.shape[1] != 1:
                raise ValueError(
                    f"topk_ids has shape {tuple(ids.shape)}; with apply_router_weight_on_input it must be [T, 1]"
                )
            a1 = a1 * weights.to(a1.dtype)
        given = {"x": a1, "topk_idx": ids, "topk_weights": weights, **self._sizes(comm)}
        return given if deferred else given | self._quantized(quant_config, a1)

    def _received(self, at: int, sent: Dispatched, quant_config: Any) -> mk.PrepareResultType:
        self._sent[at] = sent
        comm = self._comms[at]
        counts = mk.ExpertTokensMetadata(expert_num_tokens=sent.route.counts, expert_num_tokens_cpu=None)
        rows, ids, weights = self._rows(comm, sent)
        scales = None
        if sent.scales is not None:
            static = quant_config.a1_scale if quant_config.is_per_tensor else None
            scales = self._scales(comm, sent.scales, static)
        return rows, scales, counts, ids, weights

    def _to_combine(
        self, y: Tensor, weights: Tensor, ids: Tensor, on_input: bool, reduction: mk.TopKWeightAndReduce
    ) -> tuple[Communicator, Tensor, Route, Tensor | None]:
        """Return the arguments of a combine."""
        at, comm = self._at()
        sent, self._sent[at] = self._sent[at], None
        if sent is None:
            raise RuntimeError("finalize was called before prepare, which plans the route of the rows")
        y, row_weights = self._reduced(sent, y, weights, ids, on_input, reduction)
        return comm, y, sent.route, row_weights

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

    def _sizes(self, comm: Communicator) -> dict[str, Any]:
        """Return the layout and sizes of a dispatch."""
        raise NotImplementedError

    def _rows(self, comm: Communicator, sent: Dispatched) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return rows in this format, and ids and weights that replace the router's, or None to keep them."""
        raise NotImplementedError

    def _reduced(
        self, sent: Dispatched, y: Tensor, weights: Tensor, ids: Tensor, on_input: bool, reduction: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return rows [R, H] and weights for a combine."""
        raise NotImplementedError


class PrepareAndFinalize(_PrepareAndFinalize):
    """The "standard" format: token-major rows [R, H], one for each (token, rank), with global ids and weights [R, K].

    R is W times the largest number of tokens of any rank, and nothing is dropped. Where an id names an expert of
    another rank, or nothing, a row has the id of an expert of another rank (-1 if there is none), which vLLM's experts
    leave out, and the weight 0. Rows after those that were sent are undefined, and all their ids are of that kind.

    vLLM 0.26's ``TritonExperts`` compute such places as well; :func:`skipping_triton_experts` replaces them.

    Args:
        comms: a communicator for each micro-batch in progress: two for vLLM's dual batch overlap.
        sp_size: ranks that share the tokens of one data-parallel rank, ``moe.moe_parallel_config.sp_size``.
        shared_experts: whether the layer has shared experts that run during a combine.
    """

    def __init__(self, *comms: Communicator, sp_size: int = 1, shared_experts: bool = False) -> None:
        super().__init__(*comms, sp_size=sp_size, shared_experts=shared_experts)

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> None:
        """Return None: experts of this format need no batch size."""
        return None

    def post_init_setup(self, fused_experts: Any) -> None:
        """Let vLLM 0.26's ``TritonExperts`` leave out experts of other ranks, as later versions do."""
        skipping = skipping_triton_experts()
        if skipping is not None and type(fused_experts) is skipping.__base__:
            fused_experts.__class__ = skipping

    def _sizes(self, comm: Communicator) -> dict[str, Any]:
        return {"layout": "token_major", "max_tokens": self._max_tokens(comm)}

    def _rows(self, comm: Communicator, sent: Dispatched) -> tuple[Tensor, Tensor, Tensor]:
        assert sent.weights is not None and sent.local_idx is not None
        first, ids = comm.first_local_expert, sent.local_idx  # -1: another rank's expert, or none
        if first:
            ids = ids + first  # -1 becomes the last expert of the rank before
        elif comm.num_local_experts < comm.num_experts:
            ids = torch.remainder(ids, comm.num_experts)  # -1 becomes the last expert, of the last rank
        return sent.x, ids, sent.weights

    def _reduced(
        self, sent: Dispatched, y: Tensor, weights: Tensor, ids: Tensor, on_input: bool, reduction: Any
    ) -> tuple[Tensor, None]:
        if isinstance(reduction, TopKWeightAndReduceDelegate):
            reduction = TopKWeightAndReduceContiguous()
        kinds = TopKWeightAndReduceNoOP, TopKWeightAndReduceContiguous
        _check_reduction(reduction, *kinds, TopKWeightAndReduceDelegate)
        given = {"topk_weights": weights, "topk_ids": ids, "apply_router_weight_on_input": on_input}
        return reduction.apply(output=None, fused_expert_output=y, **given), None


@functools.cache
def skipping_triton_experts() -> type | None:
    """Return a subclass of vLLM 0.26's ``TritonExperts`` that does not compute the experts of other ranks.

    The entries of other ranks' experts are left out where rows are sorted by expert, and in the sum over K. Those of
    ``TritonExperts`` write zeros for them and add these. Returns None for later versions, which leave them out.
    """
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    theirs: Any = triton_moe.TritonExperts
    if "topk_ids" in inspect.signature(theirs.moe_sum).parameters:
        return None
    skipped: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("skipped", default=None)
    assign = triton_moe._prepare_expert_assignment

    def assignment(*args: Any, **kwargs: Any) -> Any:
        return assign(*args, **kwargs | ({} if skipped.get() is None else {"ignore_invalid_experts": True}))

    triton_moe._prepare_expert_assignment = assignment

    class SkippingTritonExperts(theirs):  # type: ignore[misc]
        def apply(self, **given: Any) -> None:  # as vLLM calls it
            whole_scale = self.quant_dtype is not None and given["a2_scale"] is None and self.block_shape is None
            whole_scale = whole_scale and not self.per_act_token_quant  # of rows that would hold no numbers
            skips = given["expert_map"] is not None and self._lora_context is None and not whole_scale
            token = skipped.set((given["topk_ids"], given["expert_map"]) if skips else None)
            try:
                super().apply(**given)
            finally:
                skipped.reset(token)

        def moe_sum(self, input: Tensor, output: Tensor) -> None:
            triton_moe.ops.moe_sum(input, output, *(skipped.get() or ()))

    return SkippingTritonExperts


class BatchedPrepareAndFinalize(_PrepareAndFinalize):
    """The "batched experts" format: rows [local experts, slots, H], and their number int32 [local experts].

    Rows after those are undefined. vLLM sizes such experts for ``max_num_tokens_per_rank() * num_dispatchers()`` slots.
    ``dropped`` (int64 [local experts], on the device) counts the rows of each local expert that did not fit.

    Args:
        comms, sp_size, shared_experts: as for :class:`PrepareAndFinalize`.
        slots: rows of each local expert, a multiple of the number of ranks; what does not fit is dropped and counted.
            None: the worst case, in which all tokens of all ranks name the expert.
    """

    def __init__(
        self, *comms: Communicator, slots: int | None = None, sp_size: int = 1, shared_experts: bool = False
    ) -> None:
        super().__init__(*comms, sp_size=sp_size, shared_experts=shared_experts)
        self._packed = False
        ranks = comms[0].world_size
        most = ranks * comms[0].max_tokens_per_rank
        self._slots = most if slots is None else slots
        if self._slots < ranks or self._slots % ranks:
            raise ValueError(f"slots is {slots}; allowed: a positive multiple of the number of ranks, {ranks}")
        self._drops = self._slots < most
        self.dropped = torch.zeros(comms[0].num_local_experts, dtype=torch.int64, device=comms[0].device)

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def post_init_setup(self, fused_experts: Any) -> None:
        """Note whether the experts take four exponents of power-of-two scales in an int32."""
        self._packed = fused_experts.supports_packed_ue8m0_act_scales()

    def max_num_tokens_per_rank(self) -> int:
        """Return the slots of each rank, which experts of this format multiply by the number of ranks."""
        return self._slots // self.num_dispatchers()

    def _sizes(self, comm: Communicator) -> dict[str, Any]:
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
        if self._drops:
            self.dropped.add_(sent.dropped)
        return sent.x.view(comm.num_local_experts, self._slots, comm.hidden_size), None, None

    def _reduced(
        self, sent: Dispatched, y: Tensor, weights: Tensor, ids: Tensor, on_input: bool, reduction: Any
    ) -> tuple[Tensor, Tensor | None]:
        _check_reduction(reduction, TopKWeightAndReduceDelegate)
        return y.view(-1, y.shape[-1]), None if on_input else sent.weights


def _check_reduction(given: Any, *allowed: type) -> None:
    if not isinstance(given, allowed):
        names = ", ".join(kind.__name__ for kind in allowed)
        raise ValueError(f"weight_and_reduce_impl is {type(given).__name__}; allowed: {names}")


def _nothing() -> None:
    """The hook of a dispatch that has ended."""
