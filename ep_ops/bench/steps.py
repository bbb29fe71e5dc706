"""Dispatch and combine at decode sizes: the steps of a graph, each with rows and a route of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator
from ep_ops.formats import dequantize, format_of, quantize

from .operators import relative_error
from .workloads import Workload, draw_route, goes_to


class Steps:
    """`count` steps of one layout; the methods that take `i` use the data of step `i % count`."""

    def __init__(
        self, comm: Communicator, workload: Workload, count: int, *, alignment: int = 1, slots: int = 0,
        format: str = "", scales_as: str = "", zeros: bool = False, token_major: bool = False,
    ):  # fmt: skip
        self.format, self.token_major = format, token_major
        self.comm, self.workload, self.count = comm, workload, count
        tokens, device = workload.tokens, comm.device
        self.sizes: dict[str, Any] = {"alignment": alignment, "max_tokens": tokens, "zeros": zeros}
        if token_major:
            self.sizes = {"layout": "token_major", "max_tokens": tokens}
        elif slots:
            self.sizes |= {"layout": "padded", "slots": slots}
        else:  # the least that holds every route
            routed = comm.world_size * tokens * min(comm.top_k, comm.num_local_experts)
            rows = routed + min(routed, comm.num_local_experts) * (alignment - 1)
            self.sizes["capacity"] = -(-rows // alignment) * alignment
        draw = torch.Generator(device).manual_seed(1000 * tokens + comm.rank)
        shape = (count, tokens)
        x = torch.randn(*shape, comm.hidden_size, generator=draw, device=device).to(comm.dtype)
        weights = torch.rand(*shape, comm.top_k, generator=draw, device=device)
        routes = [draw_route(workload, comm.rank, seed, device, comm.world_size) for seed in range(count)]
        self.inputs = list(zip(x.unbind(), routes, weights.unbind(), strict=True))
        if format:
            self.sizes |= {"format": format, "scales_as": scales_as}
        self._dispatched: list[Any] = []
        self._rows: list[Tensor] = []
        self._codes: list[Tensor | None] = [None] * count
        self.outs: list[Tensor | None] = [None] * count
        """Result of the latest pair of each step: where a captured pair stores its result."""

    def given(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, expert ids and weights."""
        return self.inputs[i % self.count]

    def dispatched(self, i: int) -> Any:
        """Return what a combine alone needs."""
        if not self._dispatched:
            self._dispatched = [self.dispatch(i) for i in range(self.count)]
        return self._dispatched[i % self.count]

    def dispatch(self, i: int) -> Any:
        return self.comm.dispatch(*self.given(i), **self.sizes)

    def combine(self, i: int, format: str = "") -> Tensor:
        """Combine the outputs of experts. `format`: format in which sums are sent."""
        return self._combine(self.dispatched(i), i, format)

    def pair(self, i: int) -> Tensor:
        d = self.dispatch(i)
        if self.format:
            self._codes[i % self.count] = d.x
        out = self.outs[i % self.count] = self._combine(d, i)
        return out

    def _combine(self, d: Any, i: int, format: str = "") -> Tensor:
        return self.comm.combine(self._outputs(d, i), d.route, None if self.token_major else d.weights, format=format)

    def _outputs(self, d: Any, i: int) -> Tensor:
        """Return the outputs of experts: the received rows, dequantized (once for each step)."""
        if not self.format:
            return d.x
        if not self._rows:
            form = format_of(self.format)
            sent = [self.dispatched(i) for i in range(self.count)]
            self._rows = [dequantize(s.x, s.scales.contiguous(), form, self.comm.dtype) for s in sent]
        return self._rows[i % self.count]

    # ------------------------------------------------------------------ split operations

    def dispatch_split(self, i: int, between: Callable[[], None] = lambda: None) -> Any:
        """Dispatch by a start and a wait, and run `between` in between."""
        started = self.comm.dispatch_start(*self.given(i), **self.sizes)
        between()
        return self.comm.dispatch_wait(started)

    def combine_split(self, i: int, between: Callable[[], None] = lambda: None) -> Tensor:
        d = self.dispatched(i)
        started = self.comm.combine_start(d.x, d.route, d.weights)
        between()
        return self.comm.combine_wait(started)

    # ------------------------------------------------------------------ is it right?

    def error(self, run: Callable[[], None]) -> float:
        """Return the error of the results that `run` writes to `outs`, which is filled with NaN before. Every expert is
        the identity, so a token returns multiplied by the sum of its weights, or token-major by the number of ranks
        that it is sent to. The result is the largest relative error of a row; NaN counts as infinite."""
        for out in (*self.outs, *self._codes):
            if out is not None:
                out.view(torch.uint8).fill_(0x7F if out.dtype == torch.float8_e4m3fn else 0xFF)  # not a number
        run()
        worst = 0.0
        for i, out in enumerate(self.outs):
            x, topk_idx, weights = self.given(i)
            times = weights.sum(1, keepdim=True)
            if self.token_major:
                times = goes_to(topk_idx, self.workload.experts, self.comm.world_size).sum(0)[:, None]
            if self.format:
                form = format_of(self.format)
                x = dequantize(*quantize(x, form), form, x.dtype)
                worst = max(worst, 0.0 if self._same_codes(i) else float("inf"))
            expected = x.float() * times
            worst = max(worst, float("inf") if out is None else relative_error(out, expected))
        return worst

    def _same_codes(self, i: int) -> bool:
        """Return whether the latest pair received the same codes as the step's first dispatch, in rows that hold a
        token."""
        codes, first = self._codes[i], self.dispatched(i)
        held = first.route.recv_from >= 0
        return codes is not None and torch.equal(codes.view(torch.uint8)[held], first.x.view(torch.uint8)[held])


class Idle:
    """A kernel that keeps the stream busy, but one multiprocessor at most."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.cuda = device.type == "cuda"
        self.cycles = 40_000 + 400 * tokens  # of the GPU's clock: some 20 µs, and 0.2 µs a token

    def __call__(self, i: int = 0) -> None:
        if self.cuda:
            torch.cuda._sleep(self.cycles)
        else:
            time.sleep(1e-9 * self.cycles)
