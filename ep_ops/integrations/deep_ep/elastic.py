"""DeepEP's ``ElasticBuffer`` (V2): dispatch and combine of rows by token, or expanded, by expert."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor

from ep_ops.integrations.deep_ep.communicators import Bias, Communicators, format_of, refuse_experts
from ep_ops.integrations.deep_ep.utils import EventHandle, EventOverlap, after
from ep_ops.records import Route

Rows = Tensor | tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class EPHandle:
    """What a dispatch has decided, with what clients read of DeepEP's. El experts of this rank; psums are int32."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor  # as it was passed
    num_recv_tokens: int  # (token, rank) that came; the most there could be, where the host did not wait
    num_expanded_tokens: int  # rows of an expanded dispatch, else 0
    num_recv_tokens_per_expert_list: list[int]  # aligned; [] where the host did not wait
    psum_num_recv_tokens_per_scaleup_rank: Tensor  # [W] (token, rank) from ranks 0 .. i
    psum_num_recv_tokens_per_expert: Tensor  # [El] sums of aligned counts; expanded: where the rows of each end
    num_unaligned_recv_tokens_per_expert: Tensor  # int32 [El]
    route: Route
    local_idx: Tensor | None  # [N, K] of rows that are not expanded

    @property
    def recv_src_metadata(self) -> NoReturn:
        raise NotImplementedError("recv_src_metadata: where a row came from is route.recv_from, numbered as there")


class ElasticBuffer:
    """One of a group. Communicators are made when they are first needed, by all ranks together. Nothing has a gradient.

    Arguments that tune DeepEP are taken and followed by nothing: ``num_bytes``, ``num_cpu_bytes``, ``hidden``,
    ``num_topk``, ``use_fp8_dispatch``, ``allow_hybrid_mode``, ``prefer_overlap_with_compute``, ``sl_idx``,
    ``num_allocated_qps``, timeouts, ``num_sms``, ``num_qps``, ``allocate_on_comm_stream``. Rows always lie as
    ``deterministic`` ones do.

    Args:
        group: a process group, of whatever backend of torch.distributed.
        num_max_tokens_per_rank: C, the most tokens of any rank, unless a dispatch has another bound.
        allow_multiple_reduction: whether combines of expanded rows take ``topk_weights``.
        explicitly_destroy: whether :meth:`destroy` may be called.
    """

    def __init__(
        self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0,
        hidden: int = 0, num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank
        self.allow_multiple_reduction, self.explicitly_destroy = allow_multiple_reduction, explicitly_destroy
        self.communicators = Communicators(group)

    def destroy(self) -> None:
        """Collective. RuntimeError unless ``explicitly_destroy`` was set, as in DeepEP."""
        if not self.explicitly_destroy:
            raise RuntimeError("destroy was called on an ElasticBuffer without explicitly_destroy")
        self.communicators.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """0: a communicator has memory of its own."""
        return 0

    @staticmethod
    def capture() -> EventHandle:
        """An event of the current stream."""
        return EventHandle()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """Some number: nothing follows it."""
        return 20

    @torch.no_grad()
    def dispatch(
        self, x: Rows, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None, num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False, handle: EPHandle | None = None, do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None, do_expand: bool = False, do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:  # fmt: skip
        """Rows, local ids, weights, a handle, an event.

        A row for each (token, rank), in the order of (source rank, token), with local ids [N, K] (-1 elsewhere) and
        weights [N, K] (0 there, where DeepEP has any number); or, with ``do_expand``, for each (token, expert), by
        expert, an expert's padded with zeros to ``expert_alignment``, with weights [N] and no ids. N is as large as
        needed, and the host waits, unless ``do_cpu_sync`` is False: then it is the most there can be, what nobody sent
        is undefined, and nothing waits.

        ``x``: [T, H], or float8_e4m3fn [T, H] and float32 scales [T, H / 128], which come in rows, or in columns
        (``use_tma_aligned_col_major_sf``). With a ``handle``, rows and weights go where those of that dispatch went.
        """
        for event in (previous_event, previous_event_before_epilogue):
            if event is not None:
                event.current_stream_wait()
        rows, scales = x if isinstance(x, tuple) else (x, None)
        asked = format_of(scales, use_tma_aligned_col_major_sf)
        if handle is not None:
            if topk_idx is not None or do_cpu_sync:
                raise ValueError("topk_idx or do_cpu_sync is given beside handle, which decides both; allowed: None")
            route = handle.route
            comm = self._communicator(rows, handle.num_experts, route)
            if handle.do_expand:
                recv_x, weights, *more = comm.dispatch_planned(rows, route, topk_weights, zeros=True, **asked)
                recv_scales = more[0] if more else None
            else:
                recv_x, weights, recv_scales = comm.dispatch_tokens_planned(rows, route, topk_weights, **asked)
            return _rows(recv_x, recv_scales), handle.local_idx, weights, handle, after(async_with_compute_stream)

        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        if topk_idx is None or num_experts is None or most <= 0:
            raise ValueError(
                f"topk_idx or num_experts is None, or num_max_tokens_per_rank is {most}; all of them are needed"
            )
        refuse_experts(num_experts, self.num_ranks)
        align, sync = expert_alignment or 1, do_cpu_sync is None or do_cpu_sync
        given, bound = (rows, topk_idx, topk_weights), {"max_tokens": most, **asked}
        comm = self.communicators.of(rows, num_experts, topk_idx.shape[1], most)
        if do_expand:
            how = comm.dispatch_dynamic if sync else comm.dispatch
            expanded = how(*given, alignment=align, zeros=True, **bound)
            recv_x, recv_scales, weights, route = expanded.x, expanded.scales, expanded.weights, expanded.route
            local_idx, psum = None, route.psum
        else:
            by_token = comm.dispatch_tokens_dynamic if sync else comm.dispatch_tokens
            sent = by_token(*given, **bound)
            recv_x, recv_scales, weights, route = sent.x, sent.scales, sent.weights, sent.route
            local_idx = sent.local_idx.to(topk_idx.dtype)
            psum = ((route.counts + align - 1) // align * align).cumsum(0, dtype=torch.int32)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += route.counts
        copies = route.sources[1:]
        made = EPHandle(
            do_expand, num_experts, align, most, num_sms or self.get_theoretical_num_sms(num_experts, 0),
            topk_idx.clone() if do_handle_copy else topk_idx, int(copies[-1]) if sync else self.num_ranks * most,
            recv_x.shape[0] if do_expand else 0,
            [-(-count // align) * align for count in route.counts.tolist()] if sync else [],
            copies, psum, route.counts, route, local_idx,
        )  # fmt: skip
        return _rows(recv_x, recv_scales), local_idx, weights, made, after(async_with_compute_stream)

    @torch.no_grad()
    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None, bias: Bias = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        """The rows ``x`` [N, H] home, unweighted: [T, H]; ``topk_weights`` [N, K], or [N] of expanded rows, home as
        well: float32 [T, K]; an event. Expanded rows of a token are added up on their rank first, k ascending."""
        for event in (previous_event, previous_event_before_epilogue):
            if event is not None:
                event.current_stream_wait()
        route, experts, weights = handle.route, handle.num_experts, None
        out = self.communicators.combined(x, route, experts, bias)
        if topk_weights is not None and not handle.do_expand:
            weights = self.communicators.summed(topk_weights, route, experts)
        elif topk_weights is not None:
            if not self.allow_multiple_reduction:
                raise ValueError("topk_weights of expanded rows are given; they need allow_multiple_reduction")
            comm = self._communicator(x, experts, route)
            given = topk_weights.float().contiguous()
            _, weights = torch.ops.ep.dispatch_backward(None, given, *route.tensors, *route.ints, comm.name)
        return out, weights, after(async_with_compute_stream)

    def _communicator(self, rows: Tensor, num_experts: int, route: Route) -> Any:
        """For what follows a route."""
        return self.communicators.of(rows, num_experts, route.topk_idx.shape[1], route.max_tokens)


def _rows(rows: Tensor, scales: Tensor | None) -> Rows:
    return rows if scales is None else (rows, scales)
