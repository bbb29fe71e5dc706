"""Specifications of calls: all that is neither a tensor nor a size.

A specification selects kernels. A program uses few of them, so a communicator checks and prepares each one once and
looks it up by its value afterwards (``ep_ops.backends.calls``).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from meta_kernels.arguments import (
    AnyDispatch,
    Args,
    CombineArgs,
    CombineBackwardArgs,
    CombineBackwardStartArgs,
    CombineGatheredArgs,
    CombineStartArgs,
    CombineWaitArgs,
    DispatchArgs,
    DispatchBackwardArgs,
    DispatchBackwardStartArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    DispatchStartArgs,
    DispatchWaitArgs,
    PlanArgs,
)

from .formats import COMBINE_FORMATS, format_of, layout_of
from .records import GROUPED, TOKEN_MAJOR


@functools.cache
def _scales_layout(format: str, scales_as: str) -> str:
    return layout_of(format_of(format), scales_as) if format else ""


class PlanSpec(NamedTuple):
    """Specification of a plan."""

    layout: str

    @property
    def kind(self) -> str:
        """The operation."""
        return "plan"


class DispatchSpec(NamedTuple):
    """Specification of a dispatch.

    ``kind`` is "dispatch" (along a new route), "dispatch_dynamic" (along a new route with exactly as many rows as
    arrive) or "dispatch_planned" (along an existing route).
    """

    kind: str
    layout: str  # order of received rows
    weighted: bool = False  # whether routing weights are sent too
    format: str = ""  # format in which rows arrive (docs/formats.md); empty: as x
    scales_as: str = ""  # memory layout of received scales; empty: the format's first
    scaled: bool = False  # whether x is already quantized, and its scales are given
    zeros: bool = True  # padding rows hold zeros; otherwise they are undefined

    @property
    def token_major(self) -> bool:
        """Whether there is one row for each (token, rank)."""
        return self.layout == TOKEN_MAJOR

    @property
    def sent_as(self) -> str:
        """The format in which rows are sent, without "wire:"; empty: the rows' dtype."""
        return self.format.removeprefix("wire:")

    @property
    def scales_layout(self) -> str:
        """The layout of the scales that arrive; empty: none."""
        return _scales_layout(self.format, self.scales_as)

    @property
    def latency(self) -> bool:
        """Whether latency kernels support the format. They send the first packet of a row before they have read all of
        it, so they cannot compute one scale for the row."""
        return "row" not in self.format

    @property
    def clears(self) -> int:
        """The argument ``zeros`` of kernels: 1 to write zeros to padding rows. Token-major rows have no padding."""
        return int(self.zeros and not self.token_major)

    @property
    def sums(self) -> bool:
        """Whether the sums of a combine can be sent in this format."""
        return self.format in COMBINE_FORMATS


PLAIN = DispatchSpec("dispatch_planned", GROUPED)
"""A dispatch of unquantized rows without weights, along an existing route."""


class CombineSpec(NamedTuple):
    """Specification of a combine."""

    weighted: bool = False  # whether rows are multiplied by their weights
    residual: bool = False  # whether a residual is added to each token's sum
    format: str = ""  # format in which sums are sent, one of COMBINE_FORMATS; empty: the rows' dtype
    grad_format: str = ""  # format in which backward sends the gradient to the rows

    @property
    def kind(self) -> str:
        """The operation."""
        return "combine"

    @property
    def sent_as(self) -> str:
        """The format in which sums are sent, without "wire:"; empty: the rows' dtype."""
        return self.format.removeprefix("wire:")


class GatherSpec(NamedTuple):
    """Specification of a gathered combine."""

    @property
    def kind(self) -> str:
        """The operation."""
        return "combine_gathered"


class DispatchBackwardSpec(NamedTuple):
    """Specification of the gradients of a dispatch."""

    layout: str
    rows: bool  # whether to compute the gradient of x
    scalars: bool  # whether to compute the gradient of the routing weights

    @property
    def kind(self) -> str:
        """The operation."""
        return "dispatch_backward"

    @property
    def token_major(self) -> bool:
        """Whether there is one row for each (token, rank)."""
        return self.layout == TOKEN_MAJOR


class CombineBackwardSpec(NamedTuple):
    """Specification of the gradients of a combine."""

    weighted: bool  # whether rows were multiplied by their weights
    products: bool  # whether to compute the gradient of the weights, from the rows, which are then given

    @property
    def kind(self) -> str:
        """The operation."""
        return "combine_backward"


Spec = PlanSpec | DispatchSpec | CombineSpec | GatherSpec | DispatchBackwardSpec | CombineBackwardSpec


def spec_of(a: Args) -> Spec | None:
    """Return the specification of a call with these arguments. None: the wait of a gradient, which has none."""
    match a:
        case PlanArgs():
            return PlanSpec(a.layout)
        case DispatchArgs() | DispatchStartArgs() | DispatchWaitArgs():
            return _dispatch("dispatch", a)
        case DispatchDynamicArgs():
            return _dispatch("dispatch_dynamic", a)
        case DispatchPlannedArgs():
            return _dispatch("dispatch_planned", a)
        case CombineArgs():
            return CombineSpec(a.recv_weights is not None, a.residual is not None, a.format, a.grad_format)
        case CombineStartArgs() | CombineWaitArgs():
            return CombineSpec(a.recv_weights is not None, format=a.format)
        case CombineGatheredArgs():
            return GatherSpec()
        case DispatchBackwardArgs() | DispatchBackwardStartArgs():
            return DispatchBackwardSpec(a.layout, a.grad_recv_x is not None, a.grad_recv_weights is not None)
        case CombineBackwardArgs() | CombineBackwardStartArgs():
            return CombineBackwardSpec(a.recv_weights is not None, a.y is not None)
    return None


def _dispatch(kind: str, a: AnyDispatch) -> DispatchSpec:
    return DispatchSpec(
        kind, a.layout, a.topk_weights is not None, a.format, a.scales_as, a.scales is not None, a.zeros
    )
