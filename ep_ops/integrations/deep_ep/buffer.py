"""DeepEP's ``Buffer``: throughput operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops.formats import round_up
from ep_ops.integrations.deep_ep.communicators import (
    Bias,
    Communicators,
    Rows,
    alignment_of,
    bound_of,
    check_rows,
    check_tokens,
    counts_of,
    format_of,
    reject_experts,
    with_scales,
)
from ep_ops.integrations.deep_ep.frameworks import send_weights
from ep_ops.integrations.deep_ep.low_latency import LowLatency
from ep_ops.integrations.deep_ep.utils import EventHandle, EventOverlap, after, wait_for
from ep_ops.records import Route, check_types

Layout = tuple[Tensor, None, Tensor, Tensor, EventOverlap]
Dispatched = tuple[Rows, Tensor | None, Tensor | None, list[int] | None, "Handle | None", EventOverlap]


@dataclass(frozen=True)
class Config:
    """Tuning options of DeepEP's kernels, which have no effect here. Hints for the sizes of buffers are 0, because
    communicators allocate their own memory."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """The route of a dispatch, for combines and further dispatches. Only the first tensor is as in DeepEP."""

    rank_prefix_matrix: Tensor  # int32 [W, W]: [i, rank]: rows from ranks 0 .. i here; -1 in columns of other ranks
    route: Route
    num_experts: int


class Buffer(LowLatency):
    """DeepEP's V1 buffer. All ranks of the group create communicators together when sizes first need them.

    T tokens of this rank, K experts a token, E experts of all ranks (in contiguous blocks of the same size), N rows
    received, H hidden size. Everything runs on the current stream. Nothing has a gradient, as in DeepEP. Arguments that
    tune DeepEP are accepted and have no effect: ``num_nvl_bytes``, ``num_rdma_bytes``, ``num_qps_per_rank``,
    ``allow_*``, ``use_fabric``, ``config``, ``allocate_on_comm_stream``, ``num_sms``.

    Args:
        group: a process group with any torch.distributed backend.
        low_latency_mode: ignored: both kinds of operations may be called in any order.
        explicitly_destroy: whether :meth:`destroy` may be called; otherwise memory is held until the process ends.

    Raises:
        NotImplementedError: ``enable_shrink`` or an MPI ``comm`` is given.
    """

    num_sms: int = 20
    max_tokens_per_rank: int | None = None
    """A bound on the tokens that any rank passes to a dispatch, the same on all ranks. Without it, every dispatch
    agrees on the largest number of tokens, which waits for all ranks. :func:`ep_ops.integrations.deep_ep.install` sets
    it."""

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None, use_fabric: bool = False,
    ) -> None:  # fmt: skip
        if group is None or comm is not None:
            raise NotImplementedError("group must be a torch.distributed process group; MPI is not supported")
        if enable_shrink:
            raise NotImplementedError(
                "enable_shrink is set: ranks cannot be masked; Communicator.shrink continues without them"
            )
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.communicators = Communicators(group)
        send_weights()

    def destroy(self) -> None:
        """Free all memory. Collective. RuntimeError unless ``explicitly_destroy`` was set, as in DeepEP."""
        if not self.explicitly_destroy:
            raise RuntimeError("destroy was called on a Buffer without explicitly_destroy")
        self.communicators.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: FP8 rows are supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set ``num_sms``, which has no effect. ValueError for an odd number, as in DeepEP."""
        if new_num_sms % 2:
            raise ValueError(f"num_sms is {new_num_sms}; allowed: even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    # ------------------------------------------------------------------ many tokens

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Layout:  # fmt: skip
        """Count the destinations of ids [T, K] (-1 for none). Not collective; dispatches reject invalid ids on all
        ranks.

        Returns:
            Tokens for each rank, int32 [W]; None; entries for each expert, int32 [E]; whether each token goes to each
                rank, bool [T, W]; an event.
        """
        reject_experts(num_experts, self.group_size)
        wait_for(previous_event)
        per_rank, per_expert, in_rank = destinations(topk_idx, num_experts, self.group_size)
        return per_rank, None, per_expert, in_rank, after(async_finish)

    @torch.no_grad()
    def dispatch(
        self, x: Rows, handle: Handle | None = None, num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None, is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:  # fmt: skip
        """Send tokens to the ranks of their experts, with one row for each (token, rank) in the order of (source rank,
        token).

        Args:
            x: [T, H], or a pair of float8_e4m3fn [T, H] and scales: float32 [T, H / 128], or int32 with four UE8M0
                exponents in each.
            handle: of an earlier dispatch, whose route the rows follow.
            is_token_in_rank: destinations if there is no ``topk_idx``; rows then have no ids and weights.
            num_worst_tokens: W times the largest number of tokens of any rank. N is this number, and the host is not
                synchronized. 0: N rows arrive, and the host is synchronized.
            expert_alignment: counts are rounded up to a multiple of it.

        Returns:
            Rows as x; local ids [N, K], -1 for other ranks' experts and unused rows; weights [N, K], 0 there; a list of
                counts of local experts ([] with ``num_worst_tokens``); a handle; an event. With ``handle``: rows, four
                times None, an event.

        Raises:
            ValueError: arguments do not fit together.
        """
        wait_for(previous_event)
        rows, scales = x if isinstance(x, tuple) else (x, None)
        own = self.communicators
        if handle is not None:
            with own.informing("dispatch", "dispatch_planned", bound_of(handle)):
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError("topk_idx or topk_weights are given with handle, which has them; allowed: None")
                check_types(Handle, handle=handle)
                check_types(Tensor, x=rows)
                asked = format_of(rows, scales)
            route = handle.route
            comm = own.along(rows, handle.num_experts, route, "dispatch_planned", "dispatch")
            again = comm.dispatch_planned(rows, route, **asked)
            return with_scales(again.x, again.scales, scales), None, None, None, None, after(async_finish)

        bound = num_worst_tokens // self.group_size if num_worst_tokens else self.max_tokens_per_rank
        room: dict[str, Any] = {"capacity": num_worst_tokens} if num_worst_tokens else {"exact": True}
        operator = "dispatch" if num_worst_tokens else "dispatch_dynamic"
        with own.informing("dispatch", operator, bound, bound is None):
            if num_tokens_per_expert is None or num_tokens_per_rank is None or is_token_in_rank is None:
                raise ValueError(
                    "num_tokens_per_rank, num_tokens_per_expert or is_token_in_rank is None; call get_dispatch_layout"
                )
            num_experts = num_tokens_per_expert.shape[0]
            own.reject_experts("dispatch", num_experts)
            ids = topk_idx
            if ids is None:  # any expert of a rank stands for the rank
                first = torch.arange(self.group_size, device=rows.device) * (num_experts // self.group_size)
                ids = torch.where(is_token_in_rank, first, -1)
            check_tokens(rows, ids)
            align = alignment_of(expert_alignment)
            asked = format_of(rows, scales)
        if bound is None:
            bound = own.agreed(rows.shape[0], rows.device)
        comm = own.of(rows, num_experts, ids.shape[1], bound, "dispatch", operator)
        sent = comm.dispatch(rows, ids, topk_weights, layout="token_major", max_tokens=bound, **room, **asked)
        counts: list[int] = []
        if not num_worst_tokens:
            if topk_idx is None:
                held = num_experts // self.group_size
                named = own.total(num_tokens_per_expert)[self.rank * held : (self.rank + 1) * held]
                counts = round_up(named, align).tolist()
            else:
                counts = counts_of(sent, comm, align)
        prefix = sent.route.sources.new_full((self.group_size, self.group_size), -1)
        prefix[:, self.rank] = sent.route.sources[1:]
        recv_idx = None if topk_idx is None or sent.local_idx is None else sent.local_idx.to(topk_idx.dtype)
        made = Handle(prefix, sent.route, num_experts)
        received = with_scales(sent.x, sent.scales, scales)
        return received, recv_idx, sent.weights, counts, made, after(async_finish)

    @torch.no_grad()
    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None,
        bias: Bias = None, config: Config | None = None, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        """Return rows ``x`` [N, H] to their owners and sum them without weights, in fp32 over ranks ascending, rounded
        once.

        Args:
            bias: [T, H], or two of them, added to the sums, on all ranks or on none. With two, rows are sent as
                float32.
            topk_weights: [N, K], whose sums are returned as well.

        Returns:
            Sums [T, H]; sums of weights, float32 [T, K], or None; an event.
        """
        wait_for(previous_event)
        with self.communicators.informing("combine", "combine", bound_of(handle)):
            check_types(Handle, handle=handle)
            check_rows(x, topk_weights, bias, handle.route.topk_idx.shape[1])
        route, experts = handle.route, handle.num_experts
        out = self.communicators.combined(x, route, experts, bias, method="combine")
        weights = None if topk_weights is None else self.communicators.summed(topk_weights, route, experts)
        return out, weights, after(async_finish)

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> Tensor:
        """Raise NotImplementedError: there is no buffer of bytes."""
        raise NotImplementedError("get_local_buffer_tensor is not supported: the memory of communicators is internal")


def destinations(topk_idx: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count the destinations of ids [T, K].

    Returns:
        Tokens for each rank, int32 [W]; entries for each expert, int32 [E]; whether each token goes to each rank, bool
            [T, W].
    """
    named = (topk_idx >= 0) & (topk_idx < num_experts)
    ids = torch.where(named, topk_idx, num_experts).long()
    per_expert = ids.new_zeros(num_experts + 1).scatter_add(0, ids.flatten(), torch.ones_like(ids).flatten())
    in_rank = torch.zeros(ids.shape[0], ranks + 1, dtype=torch.bool, device=ids.device)
    in_rank = in_rank.scatter(1, ids // (num_experts // ranks), True)[:, :ranks]
    return in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts].int(), in_rank.contiguous()
