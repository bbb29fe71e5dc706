"""Operators on the latency kernels: which calls they support, and the roles of their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cute_kernels import marks
from cute_kernels.formats import Form
from cute_kernels.heap import Problem
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.latency.sizes import WARPS

from ...formats import OF_TOKENS
from ...records import TOKEN_MAJOR, Delivery, DispatchTensors, Route, Sizes
from .launcher import Launcher, Plans
from .outputs import Outputs, published_slots
from .row_format import RowFormat, row_format

SMALL_BATCH_TOKENS = 16
"""A dispatch of fewer tokens uses more sending blocks: one packet for each block is faster than more receiving blocks.
"""

NOTHING: Any = DispatchTensors(*[None] * len(DispatchTensors._fields))  # type: ignore[arg-type]
"""The outputs of a kernel that only sends."""

PARTS = WHOLE, *_ = ((True, True), (True, False), (False, True))
"""Whether a kernel sends and receives: a whole operation, a start, a wait."""

Dispatches = Callable[[Tensor, Tensor | None, Tensor, Tensor | None], DispatchTensors]
"""Runs dispatches of the same sizes and format; takes (x, topk_weights, topk_idx, scales)."""
Combines = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Any]
"""Runs combines of the same sizes and format; takes (y, recv_weights, topk_idx, send_rows, arrivals)."""

Deal = tuple[int, int, int]
"""Roles of a kernel's blocks: number that send, first that receives, number of blocks."""


def kernels_of(problem: Problem, tokens: int) -> list[Any]:
    """Return every latency kernel that the operators of such a communicator launch."""
    found: list[Any] = []
    for weights, parts in itertools.product((False, True), PARTS):
        found += [LatencyDispatch(problem, tokens, weights, *parts), LatencyCombine(problem, tokens, weights, *parts)]
        if parts[1]:
            found.append(LatencyDispatch(problem, tokens, weights, *parts, token_major=True))
    return found


def takes_sums(problem: Problem, format: str) -> bool:
    """Return whether latency kernels run combines whose sums are sent in a format (empty: the rows' dtype). The owner
    quantizes the sum of each other domain again, packet by packet, and blocks of 128 numbers can lie in two packets."""
    if not format or problem.domain_ranks in (1, problem.world_size):
        return True
    return Form(format, problem.hidden_size).block <= 32


def kernels_of_format(problem: Problem, tokens: int, how: RowFormat) -> list[Any]:
    """Return the kernels of dispatches and combines in a format, for quantized and unquantized x."""
    given = (False, True) if how.layout else (False,)
    found: list[Any] = []
    for weights, (send, receive), g in itertools.product((False, True), PARTS, given):
        layout = how.layout if receive else ""
        token_major = (False, True) if receive and how.layout in ("", *OF_TOKENS) else (False,)
        found += [
            LatencyDispatch(problem, tokens, weights, send, receive, how.format, layout, g, t) for t in token_major
        ]
    if how.sums and takes_sums(problem, how.format):
        both = itertools.product((False, True), PARTS)
        found += [LatencyCombine(problem, tokens, weights, *parts, how.format) for weights, parts in both]
    return found


class LatencyPath:
    """Dispatch and combine of calls whose token bound is at most `tokens`, one kernel each.

    Same rows, order and bits as the throughput kernels; operations of both kinds alternate freely.
    """

    def __init__(self, launcher: Launcher, outputs: Outputs, tokens: int) -> None:
        self.tokens = tokens
        self._kernel, self._outputs, self._course = launcher.get, outputs, launcher.course
        self._multiprocessors = launcher.multiprocessors
        self._problem = problem = launcher.problem
        self._alone = problem.world_size == 1
        self._far = problem.world_size - problem.domain_ranks
        self._far_rows = min(problem.top_k, self._far)  # of a token
        self._near_copies = min(problem.top_k, problem.domain_ranks - 1)  # of a token, at most
        self._plans = Plans()
        self.deal: Deal | None = None  # instead of the choice below; benchmarks set it

    def _dispatch_deal(self, max_tokens: int, send: bool, receive: bool) -> Deal:
        """Choose the roles of a dispatch's blocks. Few tokens: one packet for each block. Many: any number of senders
        saturates the link, and receivers store a row several times."""
        sms = self._multiprocessors
        senders = 0 if self._alone else sms * 3 // 10 if max_tokens < SMALL_BATCH_TOKENS else sms * 2 // 11
        if not receive:  # the other multiprocessors are left to concurrent kernels
            return senders, 0, max(senders, 1)
        return self.deal or self._with_puts(senders, self._far + self._far_rows * max_tokens, send)

    def _with_puts(self, senders: int, puts: int, send: bool) -> Deal:
        """Add blocks for puts to other NVLink domains. A block makes one put after the other and waits for each, so as
        many blocks send as there are puts. If that is more than half of all blocks, all send before they receive."""
        sms = self._multiprocessors
        if self._far:
            senders = max(senders, puts)
        if senders > max(sms // 2, 1):
            return sms, 0, sms
        return senders, senders if send else 0, sms

    def _combine_deal(self, max_tokens: int, row_packets: int, send: bool, receive: bool) -> Deal:
        """Choose the roles of a combine's blocks: half push and half receive if no warp pushes more than one packet;
        otherwise all do both. `row_packets`: packets of a sum."""
        sms = self._multiprocessors
        senders = 0 if self._alone else sms // 2
        if not receive:  # the other multiprocessors are left to concurrent kernels
            return senders, 0, max(senders, 1)
        if max_tokens * self._near_copies * row_packets > senders * WARPS and not self._alone:
            senders = sms
        return self.deal or self._with_puts(senders, self._far * max_tokens, send)

    def dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery,
        *, send: bool = True,
    ) -> DispatchTensors:  # fmt: skip
        """Run ep::dispatch. It is complete when the kernel ends, because the kernel has seen every row that any rank
        sends here."""
        run = self.dispatches(topk_weights is not None, topk_idx.shape[0], sizes, row_format(delivery), (send, True))
        return run(x, topk_weights, topk_idx, delivery.scales)

    def send_dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery
    ) -> None:
        """Run the first part of a dispatch. The second part is a dispatch that does not `send`."""
        run = self.dispatches(topk_weights is not None, topk_idx.shape[0], sizes, row_format(delivery), (True, False))
        run(x, topk_weights, topk_idx, delivery.scales)

    def dispatches(
        self, weighted: bool, tokens: int, sizes: Sizes, how: RowFormat, part: tuple[bool, bool] = WHOLE
    ) -> Dispatches:
        """Return the function that runs dispatches which differ only in tensors."""
        key = weighted, tokens, sizes, how, part, self.deal
        return self._plans.get(key) or self._plans.add(key, self._plan_dispatch(*key[:-1]))

    def _plan_dispatch(
        self, weighted: bool, tokens: int, sizes: Sizes, how: RowFormat, part: tuple[bool, bool]
    ) -> Dispatches:
        token_major, max_tokens = sizes.layout == TOKEN_MAJOR, sizes.max_tokens
        # Where rows only leave it is all the same how they arrive.
        layout, by_token = (how.layout, token_major) if part[1] else ("", False)
        senders, first_receiver, blocks = self._dispatch_deal(max_tokens, *part)
        bind = self._kernel(LatencyDispatch, self.tokens, weighted, *part, how.format, layout, how.given, by_token)
        launch = bind(
            marks.pack("dispatch", max_tokens, weighted, latency=True, format=how.format, token_major=token_major),
            tokens=tokens, max_tokens=max_tokens, capacity=sizes.capacity, alignment=sizes.alignment,
            slots=published_slots(sizes), zeros=int(how.zeros), senders=senders, first_receiver=first_receiver,
            blocks=blocks,
        )  # fmt: skip
        make = self._outputs.dispatched(weighted, tokens, sizes, how) if part[1] else lambda: NOTHING
        course = self._course

        def run(x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, scales: Tensor | None) -> DispatchTensors:
            out = make()
            recv_x, recv_scales, recv_weights, send_rows, arrivals, offs, counts, dropped, recv_idx = out
            course.open = True
            launch(
                x, topk_weights, scales, topk_idx, send_rows, arrivals, offs, counts, dropped, recv_x, recv_weights,
                recv_scales, recv_idx,
            )  # fmt: skip
            course.end()
            return out

        return run

    def combine(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, format: str = "", *, send: bool = True
    ) -> Tensor:
        """Run ep::combine. It is complete when the kernel ends, because the kernel has seen every sum that the route
        expects."""
        run = self.combines(recv_weights is not None, route, format, (send, True))
        return run(y, recv_weights, route.topk_idx, route.send_rows, route.arrivals)

    def send_combine(self, y: Tensor, recv_weights: Tensor | None, route: Route, format: str = "") -> None:
        """Run the first part of a combine. The second part is a combine that does not `send`."""
        run = self.combines(recv_weights is not None, route, format, (True, False))
        run(y, recv_weights, route.topk_idx, route.send_rows, route.arrivals)

    def combines(self, weighted: bool, route: Route, format: str, part: tuple[bool, bool] = WHOLE) -> Combines:
        """Return the function that runs combines which differ only in tensors."""
        key = weighted, route.topk_idx.shape[0], route.max_tokens, route.num_rows, format, part, self.deal
        return self._plans.get(key) or self._plans.add(key, self._plan_combine(*key[:-1]))

    def _plan_combine(
        self, weighted: bool, tokens: int, max_tokens: int, num_rows: int, format: str, part: tuple[bool, bool]
    ) -> Combines:
        row_packets = LatencyCombine(self._problem, self.tokens, weighted, format=format).row_packets
        senders, first_receiver, blocks = self._combine_deal(max_tokens, row_packets, *part)
        launch = self._kernel(LatencyCombine, self.tokens, weighted, *part, format)(
            marks.pack("combine", max_tokens, latency=True, format=format), tokens=tokens, max_tokens=max_tokens,
            num_rows=num_rows, senders=senders, first_receiver=first_receiver, blocks=blocks,
        )  # fmt: skip
        make = self._outputs.tokens if part[1] else lambda tokens: None
        course = self._course

        def run(y: Tensor, recv_weights: Tensor | None, topk_idx: Tensor, send_rows: Tensor, arrivals: Tensor) -> Any:
            out = make(tokens)
            course.open = True
            launch(y, recv_weights, topk_idx, send_rows, arrivals, out)
            course.end()
            return out

        return run
