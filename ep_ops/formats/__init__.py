"""Quantized rows: what their formats are (``meta_kernels.formats``), how numbers become codes and scales (quantize),
how scales lie for those who read them (layouts), and what grouped GEMMs take beside rows (groups).

docs/formats.md says all of it in one page.
"""

from __future__ import annotations

from meta_kernels.formats import (
    COMBINE_FORMATS,
    ELEMENT,
    FORMATS,
    LAYOUTS,
    OF_TOKENS,
    Format,
    Grid,
    format_of,
    layout_of,
    per_row,
    scales_shape,
)
from meta_kernels.rows import exact_dtype

from .groups import Segments
from .layouts import ScaleLayout, view
from .quantize import dequantize, quantize

__all__ = [
    "COMBINE_FORMATS",
    "ELEMENT",
    "FORMATS",
    "LAYOUTS",
    "OF_TOKENS",
    "Format",
    "Grid",
    "ScaleLayout",
    "Segments",
    "dequantize",
    "exact_dtype",
    "format_of",
    "layout_of",
    "per_row",
    "quantize",
    "scales_shape",
    "view",
]
