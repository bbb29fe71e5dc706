"""Quantized rows: formats (``meta_kernels.formats``), quantization (quantize), memory layouts of scales (layouts), and
the arguments of grouped GEMMs (groups). docs/formats.md describes them.
"""

from __future__ import annotations

from meta_kernels.fakes import exact_dtype
from meta_kernels.formats import (
    COMBINE_FORMATS,
    ELEMENT,
    FORMATS,
    LAYOUTS,
    OF_TOKENS,
    Format,
    Grid,
    combine_format_problem,
    format_of,
    layout_of,
    per_row,
    round_up,
    scales_shape,
)

from .groups import Segments
from .layouts import ScaleLayout, view
from .quantize import dequantize, quantize, reject_hidden

__all__ = [
    "COMBINE_FORMATS", "ELEMENT", "FORMATS", "LAYOUTS", "OF_TOKENS", "Format", "Grid", "ScaleLayout", "Segments",
    "combine_format_problem", "dequantize", "exact_dtype", "format_of", "layout_of", "per_row", "quantize",
    "reject_hidden", "round_up", "scales_shape", "view",
]  # fmt: skip
