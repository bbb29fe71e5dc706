"""Options of a MoECommunicator and their validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ep_ops.config import Config, is_int
from ep_ops.formats import combine_format_problem, format_of, layout_of, reject_hidden
from ep_ops.records import ROW_LAYOUTS

from .placement import problem_of

MODES = ("auto", "latency", "throughput")
EXACT = "exact"


class Quant(NamedTuple):
    """Quantization of rows on their way to the experts (docs/formats.md)."""

    format: str = ""  # format in which rows arrive, such as "e4m3/128/pow2"; empty: as the input
    scales_as: str = ""  # memory layout of the received scales; empty: the format's first
    scales: Tensor | None = None  # scales of a quantized input; not in a configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoECommunicatorConfig(Config):
    """Options of a :class:`MoECommunicator`: those of :class:`ep_ops.Config`, and the following.

    They must be equal on all ranks, except ``capacity`` as a number.

    Args:
        num_experts: number of logical experts E, which a router's ids name.
        experts_per_rank: number of physical experts on each rank.
        latency_max_tokens: bound for mode "auto", which must be None in other modes.
        group: process group; None: the default group.
        placement: initial map of experts (:meth:`MoECommunicator.place` changes it): for each physical expert, the
            logical expert whose weights it holds. Physical experts are the places for P experts' weights, in contiguous
            blocks on the ranks. A logical expert that is named several times has that many replicas. None: no map,
            logical and physical experts are the same.
        statistics: as for :class:`ep_ops.Config`, and count the rows of logical experts for
            :meth:`MoECommunicator.load`.
        mode: kernels for dispatch and combine; gradients always use throughput kernels. "latency", "throughput", or
            "auto": latency kernels for calls whose ``max_tokens`` is at most ``latency_max_tokens``. Results are
            bit-identical. The reference backend checks the mode, and runs the same code in each.
        layout: order of received rows. "grouped": [R, H], contiguous segments by local expert; "padded": [local
            experts, slots, H]; "token_major": [R, H], one row for each (token, rank).
        capacity: size of the receive buffer. None: the worst case, without drops. An int: R rows, or for "padded" the
            slots of each local expert (at least 1); rows that do not fit are dropped and counted. "exact": as many rows
            as arrive, for which each dispatch synchronizes with the device (not with "padded").
        quant: quantization of dispatches that do not pass their own.
        combine_format: format in which combines send their sums (``Communicator.combine``); empty: the rows' dtype.
        overlap: True: the ``_async`` methods start split operations, which run concurrently with the current stream
            (see ``Communicator.dispatch_start``). False: they run the whole operation.
    """

    group: Any = None
    placement: Sequence[int] | None = None
    mode: str = "auto"
    layout: str = "grouped"
    capacity: int | str | None = None
    quant: Quant = Quant()
    combine_format: str = ""
    overlap: bool = False

    def of_communicator(self) -> Config:
        """Return the configuration of the communicator, whose experts are the physical ones."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(Config)}
        if self.placement is not None:
            options["num_experts"] = len(self.placement)
        if self.mode != "auto":
            options["latency_max_tokens"] = self.max_tokens_per_rank if self.mode == "latency" else 0
        return Config(**options)

    def problem_of_layer(self) -> str | None:
        """Return what is wrong with the options that :class:`ep_ops.Config` does not have, or None."""
        if self.mode not in MODES:
            return f"mode is {self.mode!r}; allowed: one of {', '.join(map(repr, MODES))}"
        if self.layout not in ROW_LAYOUTS:
            return f"layout is {self.layout!r}; allowed: one of {', '.join(map(repr, ROW_LAYOUTS))}"
        if self.capacity is not None and self.capacity != EXACT and (not is_int(self.capacity) or self.capacity < 0):  # type: ignore[operator]
            return f"capacity is {self.capacity!r}; allowed: None, 'exact' or an int of at least 0"
        if self.capacity == EXACT and self.layout == "padded":
            return "capacity is 'exact'; layout 'padded' has a fixed number of slots; allowed: None or an int"
        if self.capacity == 0 and self.layout == "padded":
            return "capacity is 0; allowed with layout 'padded': None or an int of at least 1"
        if self.latency_max_tokens is not None and self.mode != "auto":
            return f"latency_max_tokens is {self.latency_max_tokens!r}; mode {self.mode!r} has no bound; allowed: None"
        if self.placement is not None and (wrong := problem_of(self.placement, self.num_experts)):
            return wrong
        if wrong := combine_format_problem("combine_format", self.combine_format):
            return wrong
        if self.capacity == EXACT and self.mode == "latency":
            return "capacity is 'exact'; mode 'latency' has no kernels for exact sizes; allowed: None or an int"
        return quant_problem(self.quant, self.mode) or self._formats_problem()

    def _formats_problem(self) -> str | None:
        format, scales_as, scales = self.quant
        if scales is not None:
            return "quant has scales; allowed: scales in the quant of a dispatch of quantized rows"
        try:
            if format:
                layout_of(format_of(format), scales_as)
            for name in filter(None, (format, self.combine_format)):
                reject_hidden(self.hidden_size, format_of(name))
        except ValueError as error:
            return str(error)
        return None


def quant_problem(quant: Any, mode: str) -> str | None:
    """Return what is wrong with the types of a quantization, or why a mode does not support it, or None."""
    if not isinstance(quant, Quant):
        return f"quant is {quant!r}; allowed: an ep_ops.moe.Quant (or None in a dispatch)"
    for name, given in (("format", quant.format), ("scales_as", quant.scales_as)):
        if not isinstance(given, str):
            return f"{name} of quant is {given!r}; allowed: a str"
    if mode == "latency" and "row" in quant.format:
        return f"format is {quant.format!r}; mode 'latency' has no kernels for one scale a row; allowed: mode 'auto'"
    return None
