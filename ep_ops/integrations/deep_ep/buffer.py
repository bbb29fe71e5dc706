"""DeepEP's ``Buffer``: dispatch and combine of many tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops.integrations.deep_ep.communicators import (
    Bias,
    Communicators,
    Rows,
    format_of,
    refuse_experts,
    with_scales,
)
from ep_ops.integrations.deep_ep.config import Config
from ep_ops.integrations.deep_ep.low_latency import LowLatency
from ep_ops.integrations.deep_ep.utils import EventHandle, EventOverlap, after, wait_for
from ep_ops.records import Route

Layout = tuple[Tensor, None, Tensor, Tensor, EventOverlap]
Dispatched = tuple[Rows, Tensor | None, Tensor | None, list[int] | None, "Handle | None", EventOverlap]


class Handle(NamedTuple):
    """What a dispatch has decided, for combines and further dispatches. DeepEP's has other tensors behind the first."""

    rank_prefix_matrix: Tensor  # int32 [W, W]: [i, rank]: rows from ranks 0 .. i here; -1 in columns of other ranks
    route: Route
    num_experts: int


class Buffer(LowLatency):
    """One of a group. Sizes come with the calls: communicators are made when they are first needed, by all ranks
    together, as all calls are. Nothing has a gradient, as in DeepEP.

    T tokens of this rank, K experts a token, E experts of all ranks (W times as many as each holds, in contiguous
    blocks), N rows received, H hidden size. Everything runs on the current stream. Arguments that tune DeepEP's kernels
    and memory are taken and followed by nothing: ``num_nvl_bytes``, ``num_rdma_bytes``, ``num_qps_per_rank``,
    ``allow_*``, ``use_fabric``, ``config``, ``allocate_on_comm_stream``, ``num_sms``.

    Args:
        group: a process group, of whatever backend of torch.distributed.
        low_latency_mode: kept; both kinds of operations may be called in any order.
        explicitly_destroy: whether :meth:`destroy` may be called; else all that is held stays until the process ends.

    NotImplementedError for ``enable_shrink`` and for an MPI ``comm``.
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
            raise NotImplementedError("Buffer takes a torch.distributed process group; an MPI communicator is none")
        if enable_shrink:
            raise NotImplementedError(
                "enable_shrink is set: ranks cannot be masked; Communicator.shrink makes one of those that are left"
            )
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.communicators = Communicators(group)

    def destroy(self) -> None:
        """Collective. RuntimeError unless ``explicitly_destroy`` was set, as in DeepEP."""
        if not self.explicitly_destroy:
            raise RuntimeError("destroy was called on a Buffer without explicitly_destroy")
        self.communicators.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: FP8 rows are supported."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """ValueError for an odd number, as in DeepEP."""
        if new_num_sms % 2:
            raise ValueError(f"num_sms is {new_num_sms}; it must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    # ------------------------------------------------------------------ many tokens

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Layout:  # fmt: skip
        """Of ids [T, K] (-1 none): int32 [W] tokens that go to each rank, None, int32 [E] how many name each expert,
        bool [T, W] whether a token goes to a rank, and an event. Waits for nobody. Ids that are none count as -1 here:
        dispatches refuse them, on all ranks."""
        refuse_experts(num_experts, self.group_size)
        wait_for(previous_event)
        named = (topk_idx >= 0) & (topk_idx < num_experts)
        ids = torch.where(named, topk_idx, num_experts).long()
        per_expert = ids.new_zeros(num_experts + 1).scatter_add(0, ids.flatten(), torch.ones_like(ids).flatten())
        held = num_experts // self.group_size
        in_rank = torch.zeros(ids.shape[0], self.group_size + 1, dtype=torch.bool, device=ids.device)
        in_rank = in_rank.scatter(1, ids // held, True)[:, : self.group_size]
        per_rank = in_rank.sum(0, dtype=torch.int32)
        return per_rank, None, per_expert[:num_experts].int(), in_rank.contiguous(), after(async_finish)

    @torch.no_grad()
    def dispatch(
        self, x: Rows, handle: Handle | None = None, num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None, is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Config | None = None, previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:  # fmt: skip
        """A row for each (token, rank), in the order of (source rank, token): x, local ids [N, K] (-1 elsewhere),
        weights [N, K] (0 there), a count for each local expert, rounded up to ``expert_alignment``, a handle, an event.

        ``x``: [T, H], or a pair of float8_e4m3fn [T, H] and scales, float32 [T, H / 128] or int32 with four UE8M0
        exponents in each; the rows likewise. Where rows go follows from ``topk_idx``; without it from
        ``is_token_in_rank``, and there are no ids and weights then. N is
        as large as needed, and the host waits; with ``num_worst_tokens``, W times the most tokens of any rank, it is
        that, nothing waits, counts are [], and behind the rows that came ids are -1 and x is undefined.

        With a ``handle``, rows go where those of that dispatch went: x, four times None, an event.

        ValueError for sizes that do not fit.
        """
        wait_for(previous_event)
        rows, scales = x if isinstance(x, tuple) else (x, None)
        asked = format_of(rows, scales)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("topk_idx or topk_weights are given beside handle, which has them; allowed: None")
            route = handle.route
            comm = self.communicators.of(rows, handle.num_experts, route.topk_idx.shape[1], route.max_tokens)
            again = comm.dispatch_planned(rows, route, **asked)
            return with_scales(again.x, again.scales, scales), None, None, None, None, after(async_finish)

        if num_tokens_per_expert is None or num_tokens_per_rank is None or is_token_in_rank is None:
            raise ValueError(
                "num_tokens_per_rank, num_tokens_per_expert or is_token_in_rank is None; get_dispatch_layout"
            )
        num_experts = num_tokens_per_expert.shape[0]
        refuse_experts(num_experts, self.group_size)
        ids = topk_idx
        if ids is None:  # whichever expert of a rank stands for it
            first = torch.arange(self.group_size, device=rows.device) * (num_experts // self.group_size)
            ids = torch.where(is_token_in_rank, first, -1)
        if num_worst_tokens:
            comm = self.communicators.of(rows, num_experts, ids.shape[1], num_worst_tokens // self.group_size)
            bound = num_worst_tokens // self.group_size
            room: dict[str, Any] = {"capacity": num_worst_tokens, "max_tokens": bound}
            sent = comm.dispatch(rows, ids, topk_weights, layout="token_major", **room, **asked)
            counts: list[int] = []
        else:
            bound = self.max_tokens_per_rank or self.communicators.agreed(rows.shape[0], rows.device)
            comm = self.communicators.of(rows, num_experts, ids.shape[1], bound)
            room = {"exact": True, "max_tokens": bound}
            sent = comm.dispatch(rows, ids, topk_weights, layout="token_major", **room, **asked)
            named = sent.route.counts
            if topk_idx is None:
                own = num_experts // self.group_size
                named = self.communicators.total(num_tokens_per_expert)[self.rank * own : (self.rank + 1) * own]
            counts = [-(-count // expert_alignment) * expert_alignment for count in named.tolist()]
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
        """The rows ``x`` [N, H] home, unweighted: [T, H], the fp32 sum over ranks ascending, then of ``bias`` [T, H],
        on all ranks or on none, rounded once (with two of them rows travel as float32). With ``topk_weights``
        [N, K] their sums as well, float32 [T, K]. And an event."""
        wait_for(previous_event)
        route, experts = handle.route, handle.num_experts
        out = self.communicators.combined(x, route, experts, bias)
        weights = None if topk_weights is None else self.communicators.summed(topk_weights, route, experts)
        return out, weights, after(async_finish)

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> Tensor:
        """There is no buffer of bytes."""
        raise NotImplementedError("get_local_buffer_tensor: a communicator's memory is not handed out")
