"""Launches kernels of rows that need no communicator: a device and its compiled functions. Tensors are contiguous;
everything runs on the current stream of their device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cute_kernels import jit
from cute_kernels.sum_rows import SumRows
from cute_kernels.swiglu import WARPS, SwiGLU

from ...formats import Segments
from .memory import DTYPES

BLOCKS = 4
"""Of a multiprocessor, at most: what is under way in their registers keeps its memory busy."""


def takes(x: Tensor, hidden: int) -> bool:
    """Whether kernels take rows of x with `hidden` numbers: of a dtype that they know, whole vectors of 16 bytes."""
    return x.dtype in DTYPES and hidden * x.element_size() % 16 == 0


def swiglu(
    kernel: SwiGLU, x: Tensor, out: Tensor, segments: Segments, slots: int, grad: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    rows, experts = x.shape[0], segments.offs.shape[0]
    if experts:
        tensors = x, grad, out, scales, segments.offs, segments.counts
        _launch(kernel, rows, x.device, tensors, rows, slots, experts, segments.alignment)


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None, out: Tensor) -> None:
    rows, terms = index.shape
    kernel = SumRows(x.shape[1], DTYPES[x.dtype], weights is not None, weights is None and terms == 1)
    _launch(kernel, rows, x.device, (x, index, weights, out), rows, terms)


def _launch(kernel: Any, rows: int, device: torch.device, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    blocks = min(-(-rows * kernel.pieces // WARPS), BLOCKS * _multiprocessors(device.index))
    if not blocks:
        return
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    with torch.cuda.device(device):
        function = jit.get(kernel, _arch(device.index), torch.cuda.is_current_stream_capturing)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        function(*addresses, *numbers, blocks, stream)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"sm_{properties.major}{properties.minor}a"
