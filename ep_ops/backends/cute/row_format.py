"""Of a delivery, what kernels are compiled for, and what they are given."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from ...formats import format_of, layout_of
from ...records import NO_SCALES, Delivery


class RowFormat(NamedTuple):
    """How the rows of a call travel and arrive."""

    format: str = ""  # what rows travel as, without "wire:"; empty: as they are
    layout: str = ""  # of the scales that arrive; empty: none
    given: bool = False  # x is quantised already
    zeros: bool = True  # whether padding is cleared

    @property
    def latency(self) -> bool:
        """Whether the latency kernels take it: the scale of a whole row is known too late for its first packet."""
        return "row" not in self.format


AS_IT_IS = RowFormat()


def row_format(delivery: Delivery | None) -> RowFormat:
    if delivery is None:
        return AS_IT_IS
    return _row_format(delivery.format, delivery.scales_as, delivery.scales is not None, delivery.zeros)


@functools.cache
def _row_format(format: str, scales_as: str, given: bool, zeros: bool) -> RowFormat:
    layout = layout_of(format_of(format), scales_as) if format else ""
    return RowFormat(format.removeprefix("wire:"), layout, given, zeros)


def given_scales(delivery: Delivery | None) -> Tensor | None:
    return None if delivery is None else delivery.scales


def with_scales(out: tuple[Tensor, ...], recv_scales: Tensor | None, delivery: Delivery | None) -> tuple[Tensor, ...]:
    """What a dispatch returns: scales behind the rows where it was told of a delivery, of no elements if there are
    none."""
    if delivery is None:
        return out
    recv_x = out[0]
    scales = NO_SCALES[recv_x.device] if recv_scales is None else recv_scales
    return (recv_x, scales, *out[1:])
