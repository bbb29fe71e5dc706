"""The latency kernels' side of the cute backend: which calls they take, and how their blocks are dealt out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.heap import Problem
from cute_kernels.latency.combine import Combine
from cute_kernels.latency.dispatch import Dispatch
from cute_kernels.latency.heap import LatencyHeap, most_tokens

from .base import DispatchTensors, RouteTensors

if TYPE_CHECKING:
    from ..config import Config
    from .cute import CuteBackend

DEFAULT_TOKENS = 256
"""Calls of at most this many tokens a rank run here, if the communicator does not say otherwise."""


FEW_TOKENS = 16
"""With fewer, a packet a block is worth more than blocks that only receive."""

Deal = tuple[int, int, int]
"""How a kernel's blocks are dealt out: blocks that send, first block that receives, number of blocks."""


def token_bound(config: Config, problem: Problem) -> int:
    """The largest `max_tokens` of a call that runs on the latency kernels; the same on every rank, 0: none."""
    asked = DEFAULT_TOKENS if config.latency_max_tokens is None else config.latency_max_tokens
    return min(asked, most_tokens(problem))


def heap_of(problem: Problem, tokens: int) -> LatencyHeap:
    """Symmetric memory of a backend whose latency kernels take calls of up to `tokens` tokens (more than 0)."""
    return LatencyHeap(problem, tokens)


def kernels_of(problem: Problem, tokens: int) -> list[Any]:
    """Every latency kernel that the operators of such a communicator launch."""
    return [kernel(problem, tokens, weights) for kernel in (Dispatch, Combine) for weights in (False, True)]


class LatencyPath:
    """Dispatch and combine of calls whose token bound is at most `tokens`, one kernel each.

    Same rows, order and bits as the throughput kernels; operations of both kinds alternate freely.
    """

    def __init__(self, backend: CuteBackend, tokens: int, multiprocessors: int) -> None:
        self.tokens = tokens
        self._backend = backend
        self._device = backend._device
        self._multiprocessors = multiprocessors
        self._alone = backend._problem.world_size == 1
        self.deal: Deal | None = None  # instead of the choice below; benchmarks set it

    def _dispatch_deal(self, max_tokens: int) -> Deal:
        """Few tokens: a packet a block. Many: the link is busy whoever sends, and receivers store several copies."""
        sms = self._multiprocessors
        senders = 0 if self._alone else sms * 3 // 10 if max_tokens < FEW_TOKENS else sms * 2 // 11
        return self.deal or (senders, senders, sms)

    def _combine_deal(self, max_tokens: int) -> Deal:
        sms = self._multiprocessors
        senders = 0 if self._alone else sms // 2
        return self.deal or (senders, senders, sms)

    def dispatch(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
    ) -> DispatchTensors:
        """ep::dispatch. Complete when the kernel ends: every row that any rank routed here has been seen."""
        route = self._backend._new_route(topk_idx, max_tokens)
        recv_x = x.new_empty(capacity, x.shape[1])
        recv_weights = x.new_empty(0 if topk_weights is None else capacity, dtype=torch.float32)
        self._backend._launch(
            Dispatch, (self.tokens, topk_weights is not None), "dispatch", x, topk_weights, topk_idx, *route, recv_x,
            recv_weights, topk_idx.shape[0], max_tokens, capacity, alignment, slots, *self._dispatch_deal(max_tokens),
        )  # fmt: skip
        return (recv_x, recv_weights, *route)

    def combine(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors) -> Tensor:
        """ep::combine. Complete when the kernel ends: every sum that the route expects has been seen."""
        topk_idx, send_rows, recv_rows, _, _ = route
        tokens, max_tokens = topk_idx.shape[0], recv_rows.shape[1]
        out = y.new_empty(tokens, y.shape[1])
        self._backend._launch(
            Combine, (self.tokens, recv_weights is not None), "combine", y, recv_weights, topk_idx, send_rows,
            recv_rows, out, tokens, max_tokens, *self._combine_deal(max_tokens),
        )  # fmt: skip
        return out
