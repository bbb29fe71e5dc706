"""DeepEP's ``Buffer``: latency operations, with rows by local expert."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ep_ops import arrivals
from ep_ops.communicator import Communicator
from ep_ops.integrations.deep_ep.communicators import (
    Communicators,
    bound_of,
    check_ids,
    check_tokens,
    latency_bound,
)
from ep_ops.integrations.deep_ep.utils import EventOverlap, after
from ep_ops.records import Dispatched, Route, check_types, whole

Packed = Tensor | tuple[Tensor, Tensor]
Hook = Callable[[], None]


class LowLatencyHandle(Sequence[Any]):
    """DeepEP's tuple, and the route of a dispatch.

    The entries are: source token of each row, int32 [El, W C]; begin << 32 | count of each source's rows, int64 [El,
    W]; C; H; E. The two tensors are computed on the device each time they are read, because serving frameworks do not
    read them.

    Args:
        sent: result of the dispatch.
        sizes: C, H and E.
        topk_idx, topk_weights: arguments of the dispatch.
        constant: whether the caller is known not to write to these two before the combine. It matters for inference
            tensors, for which PyTorch does not count writes.
    """

    def __init__(
        self, sent: Dispatched, sizes: tuple[int, int, int], topk_idx: Tensor, topk_weights: Tensor | None,
        constant: bool,
    ) -> None:  # fmt: skip
        self.route, self.row_weights, self.sizes = sent.route, sent.weights, sizes
        self._constant = constant
        self._ids, self._weights = (topk_idx, self._version(topk_idx)), topk_weights
        self._weights_version = None if topk_weights is None else self._version(topk_weights)

    def __len__(self) -> int:
        return 2 + len(self.sizes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):  # ends an iteration
            raise IndexError(f"the handle has {len(self)} entries; entry {at} was read")
        at %= len(self)
        return self.sizes[at - 2] if at > 1 else self._sources()[at]

    def of_same_ids(self, topk_idx: Tensor) -> bool:
        """Return whether these are the ids of the dispatch, which nobody has changed."""
        ids, version = self._ids
        return topk_idx is ids and self._version(topk_idx) == version

    def of_same_weights(self, topk_weights: Tensor) -> bool:
        """Return whether these are the weights of the dispatch, which nobody has changed."""
        return topk_weights is self._weights and self._version(topk_weights) == self._weights_version

    def _version(self, tensor: Tensor) -> object:
        """Return what equals the result of an earlier call only if the tensor has not been written to since then."""
        if not tensor.is_inference():
            return tensor._version
        return None if self._constant else object()

    @property
    def slots(self) -> int:
        """Return W C, the number of rows of each local expert."""
        return self.route.slots

    def _sources(self) -> tuple[Tensor, Tensor]:
        route, tokens = self.route, max(self.sizes[0], 1)
        ranks = route.sources.shape[0] - 1
        asker = route.recv_from.view(-1, self.slots)  # [El, W C], in the order of source rank and token
        asked_by = asker // route.topk_idx.shape[1]
        source = torch.where(asker >= 0, asked_by // tokens, ranks).long()
        count = source.new_zeros(source.shape[0], ranks + 1).scatter_add(1, source, torch.ones_like(source))
        count = count[:, :ranks]
        ranges = (count.cumsum(1) - count) << 32 | count
        return torch.where(asker >= 0, asked_by % tokens, -1).int(), ranges


_UNKNOWN: Any = object()
_weights_of_caller: ContextVar[Tensor | None] = ContextVar("weights_of_caller", default=_UNKNOWN)


@contextmanager
def sending_weights(topk_weights: Tensor | None) -> Iterator[None]:
    """Let low-latency dispatches in this block send ``topk_weights`` with the tokens, if their caller passes none.

    Plugins use it around dispatches of frameworks that have the weights but do not pass them, and that do not write to
    the ids and weights before the combine.
    """
    token = _weights_of_caller.set(topk_weights)
    try:
        yield
    finally:
        _weights_of_caller.reset(token)


_MASKED = -0.0
"""Weight of an entry that a combine leaves out. Routing weights are positive, or 0.0."""


class LowLatency:
    """The latency operations of :class:`ep_ops.integrations.deep_ep.Buffer`. C is the bound on the tokens of any
    rank."""

    communicators: Communicators
    group_size: int
    _combine_rows: Tensor | None = None
    _slow_is_known = False
    _bound: tuple[Communicator | None, float] = None, 0.0  # the communicator of the last dispatch, and its bound

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
        topk_weights: Tensor | None = None,
    ) -> tuple[Packed, Tensor, LowLatencyHandle, EventOverlap, Hook]:  # fmt: skip
        """Send tokens to their experts. All rows have arrived when this function returns. K must name distinct experts.

        Args:
            use_fp8: quantize rows to float8_e4m3fn, with scales float32 [El, W C, H / 128], columns contiguous.
                (docs/formats.md has the formulas; unrounded scales differ from DeepEP's in the last place.)
            round_scale: scales are powers of two.
            use_ue8m0: with ``round_scale``: four exponents in an int32, [El, W C, ceil(H / 512)].
            topk_weights: [T, K], not in DeepEP's interface: the weights that the combine applies. They are sent with
                the tokens, on all ranks or on none. A combine with this tensor and the same ``topk_idx``, both
                unchanged, then needs no exchange of its own for the weights; this must hold on all ranks or on none.
                PyTorch does not count writes through ``.data``, nor those of Triton's and others' kernels. After such a
                write, pass the combine another tensor (``topk_weights.clone()``).

        A RuntimeWarning says once if there are more tokens than the latency kernels take, in which case the throughput
        kernels run.

        Returns:
            Rows [El, W C, H], those of an expert first, by source rank and token; their number, int32 [El]; a handle;
                an event; a hook, which does nothing. Other rows are undefined.

        Raises:
            NotImplementedError: ``use_nvfp4``, ``x_global_scale`` or ``dispatch_wait_recv_cost_stats`` is given.
        """
        tokens, own = num_max_dispatch_tokens_per_rank, self.communicators
        of_caller = _weights_of_caller.get()
        if topk_weights is None and of_caller is not _UNKNOWN:
            topk_weights = of_caller
        informing = functools.partial(own.informing, "low_latency_dispatch", "dispatch", tokens)
        with informing():
            check_tokens(x, topk_idx)
            if topk_weights is not None:
                check_types(Tensor, topk_weights=topk_weights)
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
        self._say_if_slow(comm, tokens)
        asked: dict[str, Any] = {}
        if use_fp8:
            asked["format"] = "e4m3/128/pow2" if round_scale else "e4m3/128/fp32"
            asked["scales_as"] = "packed" if use_ue8m0 else "columns"
        weights = None if topk_weights is None else topk_weights.float().contiguous()
        sent = comm.dispatch(
            x.contiguous(), topk_idx, weights, max_tokens=tokens, layout="padded", slots=slots, alignment=1, **asked
        )
        counts = sent.route.counts
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts
        given = topk_idx, topk_weights, of_caller is not _UNKNOWN
        handle = LowLatencyHandle(sent, (tokens, x.shape[1], num_experts), *given)
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

        Entries whose id in ``topk_idx`` is negative are left out. If there are none, pass the tensor of the dispatch,
        which saves some small kernels unless it is an inference tensor, whose changes cannot be noticed. After writes
        through ``.data`` or of a Triton kernel, which PyTorch does not count, pass a clone of it.

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
        with own.informing("low_latency_combine", max_tokens=bound_of(handle)):
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
            route, (_, hidden, num_experts) = handle.route, handle.sizes
            if x.dim() < 2 or x.shape[-1] != hidden:
                raise ValueError(f"x has shape {tuple(x.shape)}; allowed: [El, W C, {hidden}]")
        row_weights, method = handle.row_weights, "low_latency_combine"
        if not handle.of_same_ids(topk_idx) or not handle.of_same_weights(topk_weights):
            route, row_weights = self._weighted(handle, topk_idx, topk_weights)
            method = ""  # that of its first operator
        rows = x.reshape(-1, hidden)
        combined = own.along(rows, num_experts, route, "combine", method).combine(rows, route, row_weights)
        return combined if out is None else out.copy_(combined), after(async_finish), _nothing

    def _weighted(
        self, handle: LowLatencyHandle, topk_idx: Tensor, topk_weights: Tensor
    ) -> tuple[Route, Tensor | None]:
        """Send the weights of a combine along the route of its dispatch, with the smallest x, to the ranks that sum.

        Returns:
            The route, without the entries whose id is negative now; the weights of its rows.
        """
        route, masked = handle.route, None if handle.of_same_ids(topk_idx) else topk_idx < 0
        blank = topk_weights.new_zeros(topk_weights.shape[0], 4, dtype=torch.float32)
        comm = self.communicators.along(blank, handle.sizes[2], route, "dispatch_planned", "low_latency_combine")
        weights = topk_weights.float().contiguous()
        if masked is not None:
            weights = torch.where(masked, _MASKED, weights)
        row_weights = comm.dispatch_planned(blank, route, weights).weights
        if masked is not None:
            assert row_weights is not None
            left_out = (row_weights == 0) & row_weights.signbit()
            lists = arrivals.without(route.arrivals, self.group_size, left_out)
            route = route._replace(send_rows=torch.where(masked, -1, route.send_rows), arrivals=lists)
        return route, row_weights

    def _say_if_slow(self, comm: Communicator, tokens: int) -> None:
        """Warn once if a dispatch for ``tokens`` of each rank does not run on the latency kernels."""
        if self._bound[0] is not comm:
            self._bound = comm, latency_bound(comm)
        bound = self._bound[1]
        if self._slow_is_known or tokens <= bound:
            return
        self._slow_is_known = True
        warnings.warn(
            f"low_latency_dispatch: num_max_dispatch_tokens_per_rank is {tokens}, but the latency kernels take at most"
            f" {bound} tokens of each rank here, so the throughput kernels run. install(latency_max_tokens=) or"
            " EP_OPS_DEEP_EP_LATENCY_TOKENS raises this bound, as far as the sizes allow.",
            RuntimeWarning,
            stacklevel=4,
        )

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return bfloat16 memory [El, W C, H] for rows of a combine with ``zero_copy``, the same for equal sizes."""
        counts = handle.route.counts
        shape = counts.shape[0], handle.slots, handle.sizes[1]
        if self._combine_rows is None or self._combine_rows.shape != shape:
            self._combine_rows = torch.zeros(shape, dtype=torch.bfloat16, device=counts.device)
        return self._combine_rows

    def low_latency_update_mask_buffer(self, *_: Any, **__: Any) -> None:
        """Raise NotImplementedError, as the other methods of masks do."""
        raise NotImplementedError("ranks cannot be masked; Communicator.shrink continues without them")

    low_latency_query_mask_buffer = low_latency_clean_mask_buffer = low_latency_update_mask_buffer


def _nothing() -> None:
    """The hook of an operation that has ended."""
