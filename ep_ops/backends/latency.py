"""The latency kernels' side of the cute backend: which calls they take, and how their blocks are dealt out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.latency.combine import Combine
from cute_kernels.latency.dispatch import Dispatch

from .base import DispatchTensors, RouteTensors
from .fresh import allocator
from .halves import ticket

if TYPE_CHECKING:
    from .cute import CuteBackend

FEW_TOKENS = 16
"""With fewer, a packet a block is worth more than blocks that only receive."""

Deal = tuple[int, int, int]
"""How a kernel's blocks are dealt out: blocks that send, first block that receives, number of blocks."""


def kernels_of(problem: Problem, tokens: int) -> list[Any]:
    """Every latency kernel that the operators of such a communicator launch."""
    halves = ((True, True), (True, False), (False, True))
    return [k(problem, tokens, weights, *h) for k in (Dispatch, Combine) for weights in (False, True) for h in halves]


class LatencyPath:
    """Dispatch and combine of calls whose token bound is at most `tokens`, one kernel each.

    Same rows, order and bits as the throughput kernels; operations of both kinds alternate freely.
    """

    def __init__(self, backend: CuteBackend, tokens: int, multiprocessors: int) -> None:
        self.tokens = tokens
        self._backend = backend
        self._device = backend._device
        self._multiprocessors = multiprocessors
        self._side = torch.cuda.Stream(backend._device, priority=-1)  # sends begin before what stands between halves
        self._alone = backend._problem.world_size == 1
        self.deal: Deal | None = None  # instead of the choice below; benchmarks set it

    def _dispatch_deal(self, max_tokens: int, send: bool, receive: bool) -> Deal:
        """Few tokens: a packet a block. Many: the link is busy whoever sends, and receivers store several copies."""
        sms = self._multiprocessors
        senders = 0 if self._alone else sms * 3 // 10 if max_tokens < FEW_TOKENS else sms * 2 // 11
        if not receive:  # leaves the rest to what runs beside it
            return senders, 0, max(senders, 1)
        return self.deal or (senders, senders if send else 0, sms)

    def _combine_deal(self, send: bool, receive: bool) -> Deal:
        sms = self._multiprocessors
        senders = 0 if self._alone else sms // 2
        if not receive:  # leaves the rest to what runs beside it
            return senders, 0, max(senders, 1)
        return self.deal or (senders, senders if send else 0, sms)

    def dispatch(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
        *,
        send: bool = True,
    ) -> DispatchTensors:
        """ep::dispatch. Complete when the kernel ends: every row that any rank routed here has been seen."""
        backend = self._backend
        new = allocator(self._device)
        route = backend._new_route(new, topk_idx, max_tokens)
        recv_x, recv_weights = backend._new_rows(new, x, topk_weights, capacity)
        terms = capacity, alignment, slots, max_tokens
        self._launch_dispatch((send, True), x, topk_weights, topk_idx, route, recv_x, recv_weights, *terms)
        return (recv_x, recv_weights, *route)

    def dispatch_start(self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, *terms: int) -> Tensor:
        """Sends, beside what follows on the current stream."""
        with self._beside():
            self._launch_dispatch((True, False), x, topk_weights, topk_idx, (None,) * 5, None, None, *terms)
        return ticket(x)

    def dispatch_wait(self, *args: Any) -> DispatchTensors:
        """Receives. Complete when it ends, as :meth:`dispatch`."""
        self._join()
        return self.dispatch(*args, send=False)

    def _launch_dispatch(
        self,
        halves: tuple[bool, bool],
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        route: tuple[Tensor | None, ...],
        recv_x: Tensor | None,
        recv_weights: Tensor | None,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
    ) -> None:
        self._backend._launch(
            Dispatch, (self.tokens, topk_weights is not None, *halves),
            marks.pack("dispatch", max_tokens, topk_weights is not None, few=True),
            (x, topk_weights, topk_idx, *route, recv_x, recv_weights),
            (topk_idx.shape[0], max_tokens, capacity, alignment, slots, *self._dispatch_deal(max_tokens, *halves)),
        )  # fmt: skip

    def combine(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors) -> Tensor:
        """ep::combine. Complete when the kernel ends: every sum that the route expects has been seen."""
        out = self._backend._new_tokens(y, route[0].shape[0])
        self._launch_combine((True, True), y, recv_weights, route, out)
        return out

    def combine_start(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors) -> Tensor:
        """Adds up and sends, beside what follows on the current stream."""
        with self._beside():
            self._launch_combine((True, False), y, recv_weights, route, None)
        return ticket(y)

    def combine_wait(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors) -> Tensor:
        """Receives and adds up. Complete when it ends, as :meth:`combine`."""
        self._join()
        out = self._backend._new_tokens(y, route[0].shape[0])
        self._launch_combine((False, True), y, recv_weights, route, out)
        return out

    # A kernel that sends lasts until the link has taken everything. It runs on a stream of its own, between the two
    # halves: nothing of it is left when the second one runs, and since that one is given the same tensors, they live
    # until then.

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._side)

    def _join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def _launch_combine(
        self,
        halves: tuple[bool, bool],
        y: Tensor,
        recv_weights: Tensor | None,
        route: RouteTensors,
        out: Tensor | None,
    ) -> None:
        topk_idx, send_rows, recv_rows, _, _ = route
        self._backend._launch(
            Combine, (self.tokens, recv_weights is not None, *halves),
            marks.pack("combine", recv_rows.shape[1], few=True),
            (y, recv_weights, topk_idx, send_rows, recv_rows, out),
            (topk_idx.shape[0], recv_rows.shape[1], *self._combine_deal(*halves)),
        )  # fmt: skip
