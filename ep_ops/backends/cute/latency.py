"""Operators on the latency kernels: which calls they support, and the roles of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_kernels import marks
from cute_kernels.formats import Form
from cute_kernels.heap import Problem
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.latency.sizes import WARPS
from meta_kernels.arguments import AnyCombine, AnySizedDispatch

from ...records import DispatchTensors
from ...specs import PLAIN, CombineSpec, DispatchSpec, Spec
from .call_state import BEGUN, LAUNCHING
from .launcher import Launcher
from .outputs import Outputs, published_slots
from .tuning import count, text_of

NOTHING: Any = DispatchTensors(*[None] * len(DispatchTensors._fields))  # type: ignore[arg-type]
"""The outputs of a kernel that only sends."""

PARTS = WHOLE, SEND, RECEIVE = ((True, True), (True, False), (False, True))
"""Whether a kernel sends and receives: a whole operation, a start, a wait."""

Deal = tuple[int, int, int]
"""Roles of a kernel's blocks: number that send, first that receives, number of blocks."""


def takes_sums(problem: Problem, format: str) -> bool:
    """Return whether latency kernels run combines whose sums are sent in a format (empty: the rows' dtype). The owner
    quantizes the sum of each other domain again, packet by packet, and blocks of 128 numbers can lie in two packets."""
    if not format or problem.domain_ranks in (1, problem.world_size):
        return True
    return Form(format, problem.hidden_size).block <= 32


class LatencyPath:
    """Dispatch and combine of calls whose token bound is at most `tokens` (0: none), one kernel each.

    Same rows, order and bits as the throughput kernels; operations of both kinds alternate freely.
    """

    def __init__(self, launcher: Launcher, outputs: Outputs, tokens: int) -> None:
        self.tokens = tokens
        self._kernel, self._outputs, self._state = launcher.get, outputs, launcher.state
        self._multiprocessors, self._tuning = launcher.multiprocessors, launcher.tuning
        self._problem = problem = launcher.problem
        self._alone = problem.world_size == 1
        self._far = problem.world_size - problem.domain_ranks
        self._far_rows = min(problem.top_k, self._far)  # of a token
        self._near_copies = min(problem.top_k, problem.domain_ranks - 1)  # of a token, at most

    def _senders(self, operation: str, max_tokens: int, layout: str, format: str) -> int:
        """Return how many blocks send, by the table: at least one, unless there is nobody to send to."""
        knobs = self._tuning.knobs(operation, layout, format, max_tokens)
        return 0 if self._alone else max(1, count(knobs.send, self._multiprocessors))

    def _dispatch_deal(self, max_tokens: int, send: bool, receive: bool, spec: DispatchSpec = PLAIN) -> Deal:
        """Choose the roles of a dispatch's blocks. Few tokens: one packet for each block. Many: any number of senders
        saturates the link, and receivers store a row several times."""
        layout = "token_major" if spec.token_major else "grouped"
        senders = self._senders("latency dispatch", max_tokens, layout, text_of(spec.format, spec.scales_layout))
        if not receive:  # the other multiprocessors are left to concurrent kernels
            return senders, 0, max(senders, 1)
        return self._with_puts(senders, self._far + self._far_rows * max_tokens, send)

    def _with_puts(self, senders: int, puts: int, send: bool) -> Deal:
        """Add blocks for puts to other NVLink domains. A block makes one put after the other and waits for each, so as
        many blocks send as there are puts. If that is more than half of all blocks, all send before they receive."""
        sms = self._multiprocessors
        if self._far:
            senders = max(senders, puts)
        if senders > max(sms // 2, 1):
            return sms, 0, sms
        return senders, senders if send else 0, sms

    def _combine_deal(self, max_tokens: int, row_packets: int, send: bool, receive: bool, format: str = "") -> Deal:
        """Choose the roles of a combine's blocks: some push and the others receive if no warp pushes more than one
        packet; otherwise all do both. `row_packets`: packets of a sum."""
        sms = self._multiprocessors
        senders = self._senders("latency combine", max_tokens, "grouped", format)
        if not receive:  # the other multiprocessors are left to concurrent kernels
            return senders, 0, max(senders, 1)
        if max_tokens * self._near_copies * row_packets > senders * WARPS and not self._alone:
            senders = sms
        return self._with_puts(senders, self._far * max_tokens, send)

    def takes(self, spec: Spec, a: Any) -> bool:
        """Return whether these kernels run such calls."""
        if isinstance(spec, DispatchSpec):
            fits = spec.kind == "dispatch" and spec.latency
        else:
            fits = isinstance(spec, CombineSpec) and not spec.residual and takes_sums(self._problem, spec.sent_as)
        return fits and self.tokens > 0 and a.max_tokens <= self.tokens

    def launches(self, spec: Spec, a: Any, part: tuple[bool, bool] = WHOLE) -> Callable[[Any], Any]:
        """Return a function that runs calls which differ from these arguments in tensors only. `part`: what the kernel
        does; a part that only sends returns nothing of use."""
        if isinstance(spec, DispatchSpec):
            return self._dispatches(spec, a, part)
        assert isinstance(spec, CombineSpec)
        return self._combines(spec, a, part)

    def _dispatches(
        self, spec: DispatchSpec, a: AnySizedDispatch, part: tuple[bool, bool]
    ) -> Callable[[Any], DispatchTensors]:
        """A dispatch is complete when its kernel ends, because the kernel has seen every row that any rank sends
        here."""
        tokens, max_tokens = a.topk_idx.shape[0], a.max_tokens
        # Where rows only leave, it does not matter how they arrive.
        layout, by_token = (spec.scales_layout, spec.token_major) if part[1] else ("", False)
        senders, first_receiver, blocks = self._dispatch_deal(max_tokens, *part, spec)
        send, receive = part
        bind = self._kernel(
            LatencyDispatch, tokens=self.tokens, weights=spec.weighted, send=send, receive=receive,
            format=spec.sent_as, layout=layout, given=spec.scaled, token_major=by_token,
        )  # fmt: skip
        terms = marks.pack(
            "dispatch", max_tokens, spec.weighted, latency=True, format=spec.sent_as, token_major=spec.token_major
        )
        launch = bind(
            terms, tokens=tokens, max_tokens=max_tokens, capacity=a.capacity, alignment=a.alignment,
            slots=published_slots(a), zeros=spec.clears, senders=senders, first_receiver=first_receiver,
            blocks=blocks,
        )  # fmt: skip
        make = self._outputs.dispatched(spec, tokens, a.capacity, a.slots) if part[1] else lambda: NOTHING
        state = self._state

        def run(a: AnySizedDispatch) -> DispatchTensors:
            out = make()
            recv_x, recv_scales, recv_weights, send_rows, arrivals, offs, counts, dropped, recv_idx = out
            state.stage = LAUNCHING
            launch(
                a.x, a.topk_weights, a.scales, a.topk_idx, send_rows, arrivals, offs, counts, dropped, recv_x,
                recv_weights, recv_scales, recv_idx,
            )  # fmt: skip
            state.stage = BEGUN
            state.launched += 1
            return out

        return run

    def _combines(self, spec: CombineSpec, a: AnyCombine, part: tuple[bool, bool]) -> Callable[[Any], Any]:
        """A combine is complete when its kernel ends, because the kernel has seen every sum that the route expects."""
        tokens, max_tokens, format = a.topk_idx.shape[0], a.max_tokens, spec.sent_as
        row_packets = LatencyCombine(self._problem, self.tokens, spec.weighted, format=format).row_packets
        senders, first_receiver, blocks = self._combine_deal(max_tokens, row_packets, *part, spec.format)
        send, receive = part
        launch = self._kernel(
            LatencyCombine, tokens=self.tokens, weighted=spec.weighted, send=send, receive=receive, format=format
        )(
            marks.pack("combine", max_tokens, latency=True, format=format), tokens=tokens, max_tokens=max_tokens,
            num_rows=a.y.shape[0], senders=senders,
            first_receiver=first_receiver, blocks=blocks,
        )  # fmt: skip
        make = self._outputs.sums(tokens) if part[1] else lambda: None
        state = self._state

        def run(a: AnyCombine) -> Any:
            out = make()
            state.stage = LAUNCHING
            launch(a.y, a.recv_weights, a.topk_idx, a.send_rows, a.arrivals, out)
            state.stage = BEGUN
            state.launched += 1
            return out

        return run
