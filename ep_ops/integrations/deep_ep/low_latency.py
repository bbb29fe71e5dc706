"""DeepEP's ``Buffer``: latency operations, with rows by local expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_ops import arrivals
from ep_ops.integrations.deep_ep.communicators import Communicators, bound_of, check_ids, check_tokens
from ep_ops.integrations.deep_ep.utils import EventOverlap, after
from ep_ops.records import Route, check_types, whole

Packed = Tensor | tuple[Tensor, Tensor]
Hook = Callable[[], None]


class LowLatencyHandle(tuple[Any, ...]):
    """DeepEP's tuple, and the route.

    The tuple holds: source token of each row, int32 [El, W C]; begin << 32 | count of each source's rows, int64 [El,
    W]; C; H; E.
    """

    route: Route
    topk_idx: Tensor  # of the dispatch
    version: int  # of topk_idx


_MASKED = -0.0
"""Weight of an entry that a combine leaves out. Routing weights are positive, or 0.0."""


class LowLatency:
    """The latency operations of :class:`ep_ops.integrations.deep_ep.Buffer`. C is the bound on the tokens of any
    rank."""

    communicators: Communicators
    group_size: int
    _combine_rows: Tensor | None = None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return 0: communicators allocate their own memory."""
        return 0

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: operations of both kinds may follow each other."""

    @torch.no_grad()
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None, dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, use_nvfp4: bool = False, x_global_scale: Tensor | None = None,
    ) -> tuple[Packed, Tensor, LowLatencyHandle, EventOverlap, Hook]:  # fmt: skip
        """Send tokens to their experts. All rows have arrived when this function returns. K must name distinct experts.

        Args:
            use_fp8: quantize rows to float8_e4m3fn, with scales float32 [El, W C, H / 128], columns contiguous.
                (docs/formats.md has the formulas; unrounded scales differ from DeepEP's in the last place.)
            round_scale: scales are powers of two.
            use_ue8m0: with ``round_scale``: four exponents in an int32, [El, W C, ceil(H / 512)].

        Returns:
            Rows [El, W C, H], those of an expert first, by source rank and token; their number, int32 [El]; a handle;
                an event; a hook, which does nothing. Other rows are undefined.

        Raises:
            NotImplementedError: ``use_nvfp4``, ``x_global_scale`` or ``dispatch_wait_recv_cost_stats`` is given.
        """
        tokens, own = num_max_dispatch_tokens_per_rank, self.communicators
        informing = functools.partial(own.informing, "low_latency_dispatch", "dispatch", tokens)
        with informing():
            check_tokens(x, topk_idx)
            own.reject_experts("low_latency_dispatch", num_experts)
            slots = self.group_size * whole("num_max_dispatch_tokens_per_rank", tokens)
        comm = own.of(x, num_experts, topk_idx.shape[1], tokens, "low_latency_dispatch")
        with informing():
            if use_nvfp4 or x_global_scale is not None:
                raise NotImplementedError(
                    "use_nvfp4 or x_global_scale is given: rows travel as bfloat16 or e4m3, not NVFP4"
                )
            if dispatch_wait_recv_cost_stats is not None:
                raise NotImplementedError("dispatch_wait_recv_cost_stats: how long ranks wait is not measured")
        asked: dict[str, Any] = {}
        if use_fp8:
            asked["format"] = "e4m3/128/pow2" if round_scale else "e4m3/128/fp32"
            asked["scales_as"] = "packed" if use_ue8m0 else "columns"
        sent = comm.dispatch(
            x.contiguous(), topk_idx, max_tokens=tokens, layout="padded", slots=slots, alignment=1, **asked
        )
        counts = sent.route.counts
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts

        asker = sent.route.recv_from.view(-1, slots)  # [El, W C], in the order of source rank and token
        asked_by = asker // topk_idx.shape[1]
        source = torch.where(asker >= 0, asked_by // max(tokens, 1), self.group_size).long()
        count = source.new_zeros(source.shape[0], self.group_size + 1).scatter_add(1, source, torch.ones_like(source))
        count = count[:, : self.group_size]
        ranges = (count.cumsum(1) - count) << 32 | count
        src_info = torch.where(asker >= 0, asked_by % max(tokens, 1), -1).int()
        handle = LowLatencyHandle((src_info, ranges, tokens, x.shape[1], num_experts))
        handle.route, handle.topk_idx, handle.version = sent.route, topk_idx, _version(topk_idx)
        packed = sent.x.view(-1, slots, x.shape[1])
        rows = packed if sent.scales is None else (packed, sent.scales)
        return rows, counts, handle, after(async_finish), _nothing

    @torch.no_grad()
    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, use_logfmt: bool = False,
        zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        out: Tensor | None = None, combine_wait_recv_cost_stats: Tensor | None = None, overlap: bool = False,
        packed_recv_count: Tensor | None = None, comp_signal: Tensor | None = None, block_m: int = 0,
        threshold: int = 0, num_sms: int = 0, src_signals: Tensor | None = None, src_signal_expect_value: int = 0,
    ) -> tuple[Tensor, EventOverlap, Hook]:  # fmt: skip
        """Return rows ``x`` [El, W C, H] to their owners and sum them, times ``topk_weights`` [T, K].

        Entries whose id in ``topk_idx`` is negative are left out. If there are none, pass the tensor of the dispatch.

        Arguments after ``overlap`` are SGLang's for its single-batch overlap and have no effect: the combine begins
        after the work on the current stream.

        Args:
            zero_copy: the rows are those of :meth:`get_next_low_latency_combine_buffer`.
            use_logfmt: ignored; rows are sent in their own dtype.
            out: [T, H] to write to.

        Returns:
            Sums [T, H]; an event; a hook, which does nothing.

        Raises:
            NotImplementedError: ``overlap`` is set, because combines cannot wait for signals of a running GEMM, or
                ``combine_wait_recv_cost_stats`` is given.
        """
        own = self.communicators
        with own.informing("low_latency_combine", "dispatch_planned", bound_of(handle)):
            if overlap:
                raise NotImplementedError(
                    "overlap is set: a combine cannot follow the signals (comp_signal, src_signals) of a GEMM that"
                    " still runs; allowed: False"
                )
            if combine_wait_recv_cost_stats is not None:
                raise NotImplementedError("combine_wait_recv_cost_stats: how long ranks wait is not measured")
            if zero_copy:
                if self._combine_rows is None:
                    raise ValueError("zero_copy is set, and nobody has called get_next_low_latency_combine_buffer")
                x = self._combine_rows
            check_types(LowLatencyHandle, handle=handle)
            check_types(Tensor, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
            check_ids(handle.route, topk_idx=topk_idx, topk_weights=topk_weights)
        route, hidden, num_experts = handle.route, *handle[3:]
        # DeepEP passes weights to combine only, so they are dispatched to their rows here, with the smallest x.
        masked = None if topk_idx is handle.topk_idx and _version(topk_idx) == handle.version else topk_idx < 0
        blank = x.new_zeros(topk_weights.shape[0], 4, dtype=torch.float32)
        comm = own.along(blank, num_experts, route, "low_latency_combine")
        weights = topk_weights.float().contiguous()
        if masked is not None:
            weights = torch.where(masked, _MASKED, weights)
        row_weights = comm.dispatch_planned(blank, route, weights).weights
        if masked is not None:
            assert row_weights is not None
            left_out = (row_weights == 0) & row_weights.signbit()
            lists = arrivals.without(route.arrivals, self.group_size, left_out)
            route = route._replace(send_rows=torch.where(masked, -1, route.send_rows), arrivals=lists)
        rows = x.reshape(-1, hidden)
        combined = self.communicators.along(rows, num_experts, route).combine(rows, route, row_weights)
        return combined if out is None else out.copy_(combined), after(async_finish), _nothing

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return bfloat16 memory [El, W C, H] for rows of a combine with ``zero_copy``, the same for equal sizes."""
        shape = handle[0].shape[0], handle[0].shape[1], handle[3]
        if self._combine_rows is None or self._combine_rows.shape != shape:
            self._combine_rows = torch.zeros(shape, dtype=torch.bfloat16, device=handle[0].device)
        return self._combine_rows

    def low_latency_update_mask_buffer(self, *_: Any, **__: Any) -> None:
        """Raise NotImplementedError, as the other methods of masks do."""
        raise NotImplementedError("ranks cannot be masked; Communicator.shrink continues without them")

    low_latency_query_mask_buffer = low_latency_clean_mask_buffer = low_latency_update_mask_buffer


def _version(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written to; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def _nothing() -> None:
    """The hook of an operation that has ended."""
