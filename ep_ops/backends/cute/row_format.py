"""The compile-time part of a `Delivery`: which kernels its rows need."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...formats import COMBINE_FORMATS, format_of, layout_of
from ...records import Delivery


class RowFormat(NamedTuple):
    """How the rows of a call are sent and stored."""

    format: str = ""  # format in which rows are sent, without "wire:"; empty: the rows' dtype
    layout: str = ""  # of the scales that arrive; empty: none
    given: bool = False  # x is quantized already
    zeros: bool = True  # whether padding is cleared

    @property
    def latency(self) -> bool:
        """Whether latency kernels support it. They do not know the scale of a whole row before its first packet."""
        return "row" not in self.format

    @property
    def sums(self) -> bool:
        """Whether the sums of a combine can be sent in this format."""
        return not self.layout and f"wire:{self.format}" in COMBINE_FORMATS


AS_GIVEN = RowFormat()


def row_format(delivery: Delivery) -> RowFormat:
    if not delivery.format and delivery.zeros:
        return AS_GIVEN
    return _row_format(delivery.format, delivery.scales_as, delivery.scales is not None, delivery.zeros)


@functools.cache
def _row_format(format: str, scales_as: str, given: bool, zeros: bool) -> RowFormat:
    layout = layout_of(format_of(format), scales_as) if format else ""
    return RowFormat(format.removeprefix("wire:"), layout, given, zeros)
