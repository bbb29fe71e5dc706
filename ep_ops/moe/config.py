"""What a MoECommunicator is told once, and what of that it cannot take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops.config import is_int
from ep_ops.formats import format_of, layout_of

from .placement import problem_of

MODES = ("auto", "latency", "throughput")
LAYOUTS = ("grouped", "padded", "token_major")
EXACT = "exact"


class Quant(NamedTuple):
    """How rows are quantised on their way to experts (docs/formats.md)."""

    format: str = ""  # what rows arrive as, such as "e4m3/128/pow2"; empty: as the input is
    scales_as: str = ""  # how the scales of received rows lie; empty: the format's first layout
    scales: Tensor | None = None  # of an input that is quantised already: of dispatches, not of a configuration


@dataclasses.dataclass(frozen=True)
class MoECommunicatorConfig:
    """What a :class:`MoECommunicator` is made of; the same on all ranks, but for ``capacity`` as a number and for
    ``statistics``.

    Args:
        num_experts: E, the logical experts: those whose ids a router gives.
        hidden_size, top_k, max_tokens_per_rank, dtype, alignment: as of :class:`ep_ops.Communicator`.
        group: the process group; None: the default group.
        placement: for each physical expert the logical one whose weights lie there, at first (:meth:`place` changes
            it). Physical experts are room for P experts' weights, spread over the ranks in contiguous blocks; a logical
            expert that is named several times has so many replicas. None: the experts of the router are those of the
            ranks, and there is no map.
        mode: which kernels dispatches and combines run on (their gradients have throughput kernels alone). "latency":
            those for few tokens; "throughput": those for many; "auto": the first for calls whose ``max_tokens`` is at
            most ``latency_max_tokens``, the second for all others. Results are the same to the bit, and so are those of
            the reference backend, which has no such kernels.
        layout: where rows lie. "grouped": [R, H], segments of local experts one behind the other; "padded":
            [local experts, slots, H]; "token_major": [R, H], a row for each token and rank.
        capacity: room for rows. None: the worst case, nothing is dropped. A number: R, or of "padded" the slots of each
            local expert, 1 at least; what does not fit is dropped and counted. "exact": as many rows as come, for which
            every dispatch waits for the device (not "padded").
        quant: of dispatches that name none.
        dispatch_sms, combine_sms: multiprocessors that throughput kernels may take; None: a model's choice.
        latency_max_tokens: the bound of "auto"; None: the backend's choice.
        overlap: what of the ``_async`` forms runs before their wait. True: they are split operations, whose transfer
            runs beside what stands between, as far as ``Communicator.dispatch_start`` says. False: everything.
        statistics: whether rows, drops and bytes are counted, on the device, for :meth:`MoECommunicator.stats`: a few
            additions of small tensors for each call.
    """

    num_experts: int
    hidden_size: int
    top_k: int
    max_tokens_per_rank: int
    group: Any = None
    dtype: torch.dtype = torch.bfloat16
    alignment: int = 16
    placement: Sequence[int] | None = None
    mode: str = "auto"
    layout: str = "grouped"
    capacity: int | str | None = None
    quant: Quant = Quant()
    dispatch_sms: int | None = None
    combine_sms: int | None = None
    latency_max_tokens: int | None = None
    overlap: bool = False
    statistics: bool = False

    def problem(self) -> str | None:
        """What is wrong with what a Communicator does not look at itself, or None."""
        if self.mode not in MODES:
            return f"mode is {self.mode!r}; it must be one of {', '.join(map(repr, MODES))}"
        if self.layout not in LAYOUTS:
            return f"layout is {self.layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}"
        if self.capacity is not None and self.capacity != EXACT and (not is_int(self.capacity) or self.capacity < 0):  # type: ignore[operator]
            return f"capacity is {self.capacity!r}; it must be None, 'exact' or an int of at least 0"
        if self.capacity == EXACT and self.layout == "padded":
            return "capacity is 'exact'; layout 'padded' has as many slots for each expert; allowed: None or an int"
        if self.capacity == 0 and self.layout == "padded":
            return "capacity is 0; layout 'padded' has a slot for each expert at least; allowed: None or that many"
        if self.latency_max_tokens is not None and self.mode != "auto":
            return f"latency_max_tokens is {self.latency_max_tokens!r}; mode {self.mode!r} has no bound; allowed: None"
        if self.placement is not None and (wrong := problem_of(self.placement, self.num_experts)):
            return wrong
        return self._quant_problem() or (self._latency_problem() if self.mode == "latency" else None)

    def _quant_problem(self) -> str | None:
        if not isinstance(self.quant, Quant):
            return f"quant is {self.quant!r}; allowed: an ep_ops.moe.Quant"
        format, scales_as, scales = self.quant
        if scales is not None:
            return "quant has scales; allowed: those of a dispatch's own Quant, beside the input that they belong to"
        if wrong := text_problem(self.quant):
            return wrong
        try:
            if format:
                layout_of(format_of(format), scales_as)
        except ValueError as error:
            return str(error)
        return None

    def _latency_problem(self) -> str | None:
        if self.capacity == EXACT:
            return "capacity is 'exact'; mode 'latency' has no kernels for exact sizes; allowed: None or an int"
        return latency_problem(self.quant)


def text_problem(quant: Quant) -> str | None:
    """What of a format's names is no text, which operators take alone."""
    for name, given in (("format", quant.format), ("scales_as", quant.scales_as)):
        if not isinstance(given, str):
            return f"{name} of quant is {given!r}; it must be a str"
    return None


def latency_problem(quant: Quant) -> str | None:
    """What of a format the latency kernels do not take."""
    if "row" in quant.format:
        return f"format is {quant.format!r}; mode 'latency' has no kernels for a scale of the row; allowed: mode 'auto'"
    return None
