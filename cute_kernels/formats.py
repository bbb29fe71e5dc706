"""Quantized rows as they are sent: the bytes of a row's codes and scales.

A format has the name that operators use, without ``wire:``, which only affects the receiver (`delivery.py`).
docs/formats.md defines codes and scales.
"""

from dataclasses import dataclass

FORMATS = ("", "e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx", "e4m3/row/fp32")
"""By the index that marks carry."""


@dataclass(frozen=True)
class Form:
    """A format and the number of codes, one byte each, in a row."""

    name: str
    hidden_size: int

    @property
    def whole_row(self) -> bool:
        """Whether a row has one scale."""
        return self.name.split("/")[1] == "row"

    @property
    def block(self) -> int:
        """Numbers that share a scale."""
        return self.hidden_size if self.whole_row else int(self.name.split("/")[1])

    @property
    def kind(self) -> str:
        """Kind of scales: "pow2", "fp32" or "mx"."""
        return self.name.split("/")[2]

    @property
    def in_bytes(self) -> bool:
        """Whether a scale is sent as its exponent, else as fp32."""
        return self.kind == "mx"

    @property
    def scales(self) -> int:
        """Number of scales of a row."""
        return self.hidden_size // self.block

    @property
    def scale_words(self) -> int:
        """Number of 4-byte words of a row's scales."""
        return -(-self.scales // 4) if self.in_bytes else self.scales

    @property
    def staged_bytes(self) -> int:
        """Size of a staged row in bytes: its codes, its scales, and padding to a multiple of 16."""
        return -(-(self.hidden_size + 4 * self.scale_words) // 16) * 16
