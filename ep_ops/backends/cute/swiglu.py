"""Launches the kernels of `ep_ops.nn.live_rows`, which need no communicator: a device and its compiled functions."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cute_kernels import jit
from cute_kernels.swiglu import WARPS, SwiGLU

from ...formats import Segments
from .memory import DTYPES

BLOCKS = 4
"""Of a multiprocessor, at most: what is under way in their registers keeps its memory busy."""


def takes(x: Tensor, hidden: int) -> bool:
    """Whether kernels take rows of x with `hidden` numbers: of a dtype that they know, whole vectors of 16 bytes."""
    return x.dtype in DTYPES and hidden * x.element_size() % 16 == 0


def launch(
    kernel: SwiGLU, x: Tensor, out: Tensor, segments: Segments, slots: int, grad: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    """On the current stream of x's device. Tensors are contiguous."""
    rows, experts = x.shape[0], segments.offs.shape[0]
    blocks = min(-(-rows * kernel.pieces // WARPS), BLOCKS * _multiprocessors(x.device.index))
    if not blocks or not experts:
        return
    addresses = [0 if t is None else t.data_ptr() for t in (x, grad, out, scales, segments.offs, segments.counts)]
    with torch.cuda.device(x.device):
        function = jit.get(kernel, _arch(x.device.index), torch.cuda.is_current_stream_capturing)
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        function(*addresses, rows, slots, experts, segments.alignment, blocks, stream)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"sm_{properties.major}{properties.minor}a"
