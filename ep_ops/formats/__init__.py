"""Quantised rows: what their formats are (``meta_kernels.formats``), how numbers become codes and scales (quantise),
how scales lie for those who read them (layouts), and what grouped GEMMs take beside rows (groups).

docs/formats.md says all of it in one page.
"""

from __future__ import annotations

from meta_kernels.formats import FORMATS, LAYOUTS, OF_TOKENS, Format, Grid, format_of, layout_of, per_row, scales_shape
from meta_kernels.rows import exact_dtype

from .groups import Segments
from .layouts import ScaleLayout, view
from .quantise import dequantise, quantise

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "OF_TOKENS",
    "Format",
    "Grid",
    "ScaleLayout",
    "Segments",
    "dequantise",
    "exact_dtype",
    "format_of",
    "layout_of",
    "per_row",
    "quantise",
    "scales_shape",
    "view",
]
