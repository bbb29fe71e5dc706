"""DeepEP's ``Buffer``: dispatch and combine of few tokens, whose rows lie by local expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_ops.integrations.deep_ep.communicators import Communicators, refuse_experts
from ep_ops.integrations.deep_ep.utils import EventOverlap, after
from ep_ops.records import Route

Packed = Tensor | tuple[Tensor, Tensor]
Hook = Callable[[], None]


class LowLatencyHandle(tuple[Any, ...]):
    """(source token of each row int32 [El, W C], begin << 32 | count of each source's rows int64 [El, W], C, H, E), and
    the route."""

    route: Route


class LowLatency:
    """Of :class:`ep_ops.integrations.deep_ep.Buffer`, which has what is named here. C tokens a rank at most, the same
    number on all ranks."""

    communicators: Communicators
    group_size: int
    _combine_rows: Tensor | None = None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """0: a communicator has memory of its own."""
        return 0

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to do: operations of both kinds may follow each other."""

    @torch.no_grad()
    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None, dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, use_nvfp4: bool = False, x_global_scale: Tensor | None = None,
    ) -> tuple[Packed, Tensor, LowLatencyHandle, EventOverlap, Hook]:  # fmt: skip
        """Rows [El, W C, H], those of an expert at its beginning, by source rank and token; int32 [El] how many; a
        handle, an event, and a hook, which does nothing: everything is there when this returns.

        ``use_fp8``: rows as float8_e4m3fn, and scales [El, W C, H / 128] float32, columns contiguous; ``round_scale``:
        powers of two; ``use_ue8m0`` besides: four of their exponents in an int32, [El, W C, ceil(H / 512)].
        (docs/formats.md has the formulas; unrounded scales differ from DeepEP's in the last place.) What nobody has
        sent is undefined. K may not name an expert twice.

        Raises:
            NotImplementedError: ``use_nvfp4`` or ``x_global_scale`` (NVFP4 rows), which branches of DeepEP take, or
                ``dispatch_wait_recv_cost_stats``.
        """
        if use_nvfp4 or x_global_scale is not None:
            raise NotImplementedError(
                "use_nvfp4 or x_global_scale is given: rows travel as bfloat16 or e4m3, not NVFP4"
            )
        if dispatch_wait_recv_cost_stats is not None:
            raise NotImplementedError("dispatch_wait_recv_cost_stats: how long ranks wait is not measured")
        refuse_experts(num_experts, self.group_size)
        tokens, slots = num_max_dispatch_tokens_per_rank, self.group_size * num_max_dispatch_tokens_per_rank
        asked: dict[str, Any] = {}
        if use_fp8:
            asked["format"] = "e4m3/128/pow2" if round_scale else "e4m3/128/fp32"
            asked["scales_as"] = "packed" if use_ue8m0 else "columns"
        comm = self.communicators.of(x, num_experts, topk_idx.shape[1], tokens)
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
        handle.route = sent.route
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
        """The rows ``x`` [El, W C, H] home, times ``topk_weights`` [T, K], added up: [T, H], in ``out`` if given; an
        event, and a hook, which does nothing. ``zero_copy``: the rows are those of
        :meth:`get_next_low_latency_combine_buffer`. ``use_logfmt`` allows rows to travel less exactly than they are;
        they do not.

        SGLang passes the arguments from ``overlap`` on with its single-batch overlap. Without ``overlap`` the others
        have no effect: the combine begins after the work on the current stream.

        Raises:
            NotImplementedError: ``overlap`` is set: combines cannot wait for the signals of a GEMM that still runs; or
                ``combine_wait_recv_cost_stats``.
        """
        if overlap:
            raise NotImplementedError(
                "overlap is set: a combine cannot follow the signals (comp_signal, src_signals) of a GEMM that still"
                " runs; allowed: False"
            )
        if combine_wait_recv_cost_stats is not None:
            raise NotImplementedError("combine_wait_recv_cost_stats: how long ranks wait is not measured")
        if zero_copy:
            if self._combine_rows is None:
                raise ValueError("zero_copy is set, and nobody has called get_next_low_latency_combine_buffer")
            x = self._combine_rows
        tokens, hidden, num_experts = handle[2:]
        route, top_k = handle.route, topk_idx.shape[1]
        # Weights come with the combine alone: they go to their rows, with the smallest x there is.
        blank = x.new_zeros(topk_weights.shape[0], 4, dtype=torch.float32)
        comm = self.communicators.of(blank, num_experts, top_k, tokens)
        row_weights = comm.dispatch_planned(blank, route, topk_weights.float().contiguous()).weights
        comm = self.communicators.of(x.view(-1, hidden), num_experts, top_k, tokens)
        combined = comm.combine(x.reshape(-1, hidden), route, row_weights)
        return combined if out is None else out.copy_(combined), after(async_finish), _nothing

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """[El, W C, H] bfloat16 to write rows to, for a combine with ``zero_copy``; the same memory for equal sizes."""
        shape = handle[0].shape[0], handle[0].shape[1], handle[3]
        if self._combine_rows is None or self._combine_rows.shape != shape:
            self._combine_rows = torch.zeros(shape, dtype=torch.bfloat16, device=handle[0].device)
        return self._combine_rows

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        _no_masks()

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        _no_masks()

    def low_latency_clean_mask_buffer(self) -> None:
        _no_masks()


def _no_masks() -> None:
    raise NotImplementedError("ranks cannot be masked; Communicator.shrink makes a communicator of those that are left")


def _nothing() -> None:
    """The hook of an operation that has ended."""
