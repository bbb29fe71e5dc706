"""DeepEP's ``ElasticBuffer`` (V2): dispatch and combine of token-major rows, or of expanded rows by expert."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_ops.formats import round_up
from ep_ops.group import meeting
from ep_ops.group.exchange import Exchange
from ep_ops.group.topology import divide, gpu_facts
from ep_ops.integrations.deep_ep.communicators import (
    Bias,
    Communicators,
    Rows,
    alignment_of,
    bound_of,
    check_rows,
    check_tokens,
    format_of,
    with_scales,
)
from ep_ops.integrations.deep_ep.utils import EventHandle, EventOverlap, after, wait_for
from ep_ops.records import Route, check_types


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Return the number of NVLink domains of ``group`` and of ranks in each. Collective.

    Ranks without a GPU are in one domain.

    Raises:
        ValueError: the domains have unequally many ranks.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    exchange = Exchange(group, device)
    with exchange.turn:
        meeting.meet(exchange, "get_physical_domain_size")
        domains = divide(exchange.all_gather_object(gpu_facts(device)), None)
    return len(domains), len(domains[0])


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return the grid that counts and row orders follow: 1 and the number of ranks.

    DeepEP orders rows by scale-up rank, of which there are fewer than ranks in its hybrid mode. Here rows are ordered
    by source rank, and ``allow_hybrid_mode`` changes nothing.
    """
    return 1, dist.get_world_size(group)


@dataclasses.dataclass(eq=False)
class EPHandle:
    """The result of a dispatch that combines and further dispatches need, with the attributes that clients read.

    T tokens of this rank, K experts a token, W ranks, El local experts, C = ``num_max_tokens_per_rank``. Every
    attribute may be assigned; operations use ``route`` and ignore what is assigned to the others.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor  # the ids that were passed, or a copy
    num_recv_tokens: int  # N, (token, rank) pairs received; W C if the host did not wait
    num_expanded_tokens: int  # rows of an expanded dispatch, else 0
    num_recv_tokens_per_expert_list: list[int]  # aligned; [] if the host did not wait
    psum_num_recv_tokens_per_scaleup_rank: Tensor  # int32 [W] (token, rank) pairs received from ranks 0 .. i
    psum_num_recv_tokens_per_expert: Tensor  # int32 [El] sums of aligned counts; expanded: the end of each segment
    num_unaligned_recv_tokens_per_expert: Tensor  # int32 [El]
    route: Route
    local_idx: Tensor | None  # [N, K] of token-major rows
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @functools.cached_property
    def recv_src_metadata(self) -> Tensor:
        """int32 [N, 2 + K]: where each received (token, rank) pair comes from. Computed when it is first read.

        Column 0 is source rank * C + token, column 1 source rank * K + the first k that names this rank. The others are
        the rows of an expanded dispatch, -1 for experts of other ranks; -1 for token-major rows. Rows beyond the last
        received pair are -1 (where the host did not wait).
        """
        return self._sources

    @functools.cached_property
    def _sources(self) -> Tensor:
        """Return :attr:`recv_src_metadata`, also if another value was assigned to that."""
        route, (tokens, top_k) = self.route, (self.num_max_tokens_per_rank, self.topk_idx.shape[1])
        pairs, ranks = self.num_recv_tokens, self.psum_num_recv_tokens_per_scaleup_rank.shape[0]
        begin, home = route.copies[:pairs].long().unbind(1)
        number = torch.arange(pairs, device=home.device)
        received = number < route.sources[-1]
        source_token = torch.where(received, home // min(top_k, ranks), -1)
        first = route.owned[torch.where(received, begin, 0)].long()  # the pair's first row, and its entry
        metadata = torch.full((pairs, 2 + top_k), -1, dtype=torch.int32, device=home.device)
        metadata[:, 0] = source_token
        metadata[:, 1] = torch.where(received, source_token // max(tokens, 1) * top_k + first[:, 1] % top_k, -1)
        if self.do_expand:
            asker = route.recv_from.long()  # [R] (source * C + token) * K + k, -1 for padding
            ascending = torch.where(received, source_token, ranks * tokens)
            pair = torch.searchsorted(ascending, asker // top_k)
            place = torch.where(asker >= 0, pair * top_k + asker % top_k, pairs * top_k)  # padding: after the last
            rows = torch.arange(asker.numel(), dtype=torch.int32, device=home.device)
            slots = rows.new_full((pairs * top_k + 1,), -1).scatter(0, place, rows)
            metadata[:, 2:] = slots[:-1].view(pairs, top_k)
        return metadata

    @functools.cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """int32 [T, K]: the row at the destination rank, -1 for none; token-major: only at the first k that names the
        rank."""
        return self.route.send_rows


class ElasticBuffer:
    """DeepEP's V2 buffer. All ranks of the group create communicators together when sizes first need them.

    Nothing has a gradient. Arguments that tune DeepEP are accepted and have no effect: ``num_bytes``,
    ``num_cpu_bytes``, ``hidden``, ``num_topk``, ``use_fp8_dispatch``, ``allow_hybrid_mode``,
    ``prefer_overlap_with_compute``, ``sl_idx``, ``num_allocated_qps``, timeouts, ``num_sms``, ``num_qps``,
    ``allocate_on_comm_stream``. Rows always have the order of ``deterministic`` ones.

    Args:
        group: a process group with any torch.distributed backend.
        num_max_tokens_per_rank: C, the most tokens of any rank, unless a dispatch has another bound.
        allow_multiple_reduction: whether combines of expanded rows round a rank's partial sum of a token to the dtype
            of the rows before it is sent. If False, partial sums stay float32, which doubles the bytes that a combine
            sends and copies its rows to float32 first; such combines take no ``topk_weights``.
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
        self.num_allocated_qps = num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.communicators = Communicators(group)

    def destroy(self) -> None:
        """Free all memory. Collective. RuntimeError unless ``explicitly_destroy`` was set, as in DeepEP."""
        if not self.explicitly_destroy:
            raise RuntimeError("destroy was called on an ElasticBuffer without explicitly_destroy")
        self.communicators.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """Return 0: communicators allocate their own memory."""
        return 0

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of the current stream."""
        return EventHandle()

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *_: Any, **__: Any) -> int:
        """Return a number that has no effect."""
        return 20

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return a number that has no effect: there are no queue pairs to allocate."""
        return min(num_sms, self.num_allocated_qps)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return 1 and the number of ranks, see :func:`ep_ops.integrations.deep_ep.get_logical_domain_size`."""
        return get_logical_domain_size(self.group)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of NVLink domains and of ranks in each. Collective."""
        return get_physical_domain_size(self.group)

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Run a barrier of the process group.

        Args:
            with_cpu_sync: synchronize the device before and after.
        """
        synchronizes = with_cpu_sync and torch.cuda.is_available()
        if synchronizes:
            torch.cuda.synchronize()
        dist.barrier(self.group)
        if synchronizes:
            torch.cuda.synchronize()

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
        """Send tokens to the ranks of their experts.

        Args:
            x: [T, H], or float8_e4m3fn [T, H] and scales: float32 [T, H / 128], or int32 with four UE8M0 exponents in
                each.
            handle: of an earlier dispatch, whose route rows and weights follow.
            do_expand: one row for each (token, expert), grouped by expert and padded with zeros to
                ``expert_alignment``. Otherwise one row for each (token, rank), in the order of (source rank, token).
            do_cpu_sync: False: N is the worst case, unused rows are undefined, and the host is not synchronized.
                Otherwise N rows arrive, and it is.
            use_tma_aligned_col_major_sf: received scales are column-major.

        Returns:
            Rows as x; local ids [N, K], -1 for experts of other ranks (expanded: None); weights [N, K], 0 there
                (expanded: [N]); a handle; an event.
        """
        wait_for(previous_event, previous_event_before_epilogue)
        rows, scales = x if isinstance(x, tuple) else (x, None)
        own, columns = self.communicators, use_tma_aligned_col_major_sf
        if handle is not None:
            with own.informing("dispatch", "dispatch_planned", bound_of(handle)):
                if topk_idx is not None or do_cpu_sync:
                    raise ValueError("topk_idx or do_cpu_sync is given with handle, which decides both; allowed: None")
                check_types(EPHandle, handle=handle)
                check_types(Tensor, x=rows)
                asked = format_of(rows, scales, columns)
            route = handle.route
            comm = own.along(rows, handle.num_experts, route, "dispatch_planned", "dispatch")
            again = comm.dispatch_planned(rows, route, topk_weights, zeros=True, **asked)
            received = with_scales(again.x, again.scales, scales)
            return received, handle.local_idx, again.weights, handle, after(async_with_compute_stream)

        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        sync = do_cpu_sync is None or do_cpu_sync
        operator = "dispatch_dynamic" if sync else "dispatch"
        with own.informing("dispatch", operator, most):
            if topk_idx is None or num_experts is None or most <= 0:
                raise ValueError(
                    f"topk_idx or num_experts is None, or num_max_tokens_per_rank is {most}; all of them are needed"
                )
            check_tokens(rows, topk_idx)
            own.reject_experts("dispatch", num_experts)
            align = alignment_of(expert_alignment or 1)
            asked = format_of(rows, scales, columns)
        comm = own.of(rows, num_experts, topk_idx.shape[1], most, "dispatch", operator)
        layout: dict[str, Any] = {"alignment": align, "zeros": True} if do_expand else {"layout": "token_major"}
        sent = comm.dispatch(rows, topk_idx, topk_weights, max_tokens=most, exact=sync, **layout, **asked)
        route, local_idx = sent.route, sent.local_idx
        if local_idx is None:
            psum = route.psum
        else:
            local_idx = local_idx.to(topk_idx.dtype)
            psum = round_up(route.counts, align).cumsum(0, dtype=torch.int32)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += route.counts
        copies = route.sources[1:]
        made = EPHandle(
            do_expand, num_experts, align, most, num_sms or self.get_theoretical_num_sms(num_experts, 0),
            topk_idx.clone() if do_handle_copy else topk_idx, int(copies[-1]) if sync else self.num_ranks * most,
            sent.x.shape[0] if do_expand else 0,
            round_up(route.counts, align).tolist() if sync else [],
            copies, psum, route.counts, route, local_idx,
        )  # fmt: skip
        received = with_scales(sent.x, sent.scales, scales)
        return received, local_idx, sent.weights, made, after(async_with_compute_stream)

    @torch.no_grad()
    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None, bias: Bias = None, num_sms: int = 0,
        num_qps: int = 0, previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None, async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        """Return rows ``x`` [N, H] to their owners and sum them without weights. Biases are added in fp32.

        The expanded rows of a token are summed on their rank first, over k ascending.

        Args:
            topk_weights: [N, K], or [N] of expanded rows, which are returned as well.

        Returns:
            Sums [T, H]; weights, float32 [T, K], or None; an event.
        """
        wait_for(previous_event, previous_event_before_epilogue)
        with self.communicators.informing("combine", "combine", bound_of(handle)):
            check_types(EPHandle, handle=handle)
            check_rows(x, topk_weights, bias, *(() if handle.do_expand else (handle.route.topk_idx.shape[1],)))
            if topk_weights is not None and handle.do_expand and not self.allow_multiple_reduction:
                raise ValueError("topk_weights of expanded rows are given; they need allow_multiple_reduction")
        route, experts, weights = handle.route, handle.num_experts, None
        slots = handle._sources[:, 2:] if handle.do_expand and isinstance(bias, tuple) else None
        out = self.communicators.combined(x, route, experts, bias, slots, self.allow_multiple_reduction, "combine")
        if topk_weights is not None and not handle.do_expand:
            weights = self.communicators.summed(topk_weights, route, experts)
        elif topk_weights is not None:
            comm = self.communicators.along(x, experts, route, "dispatch_backward")
            given = topk_weights.float().contiguous()
            _, weights = torch.ops.ep.dispatch_backward(None, given, *route.tensors, *route.ints, comm.name)
        return out, weights, after(async_with_compute_stream)
