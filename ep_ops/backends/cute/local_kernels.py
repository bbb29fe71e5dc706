"""Launches of kernels on rows that need no communicator: a device and its compiled functions. Tensors are contiguous,
and everything runs on the current stream of their device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cute_kernels import jit
from cute_kernels.local.expert_lists import ExpertLists
from cute_kernels.local.places_route import PlacesRoute
from cute_kernels.local.row_pieces import WARPS
from cute_kernels.local.sum_rows import SumRows
from cute_kernels.local.swiglu import SwiGLU

from ...formats import Segments
from .sizing import DTYPES

BLOCKS = 4
"""Largest number of blocks of a multiprocessor, which is enough to keep its memory busy."""


def takes(x: Tensor, hidden: int) -> bool:
    """Return whether kernels accept rows of x with `hidden` numbers: of a supported dtype, in whole vectors of 16
    bytes."""
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


def expert_lists(local_idx: Tensor, experts: int, alignment: int, made: tuple[Tensor, ...]) -> None:
    """Fill the lists of experts. `made`: rows, flat, places, offs, counts, dropped."""
    entries, length = local_idx.numel(), made[0].shape[0]
    blocks = _blocks_for(max(entries, length), local_idx.device)
    numbers = entries, local_idx.shape[1], length, alignment
    _run(ExpertLists(experts), blocks, local_idx.device, (local_idx, *made), *numbers)


def places_route(
    given: list[Tensor], made: tuple[Tensor, Tensor], num_places: int, ranks: int, rank: int, each: int
) -> None:
    """Fill the route of places. `given`: topk_idx, send_rows, arrivals, places; `made`: the arrivals and send_rows of
    places."""
    topk_idx, _, _, places = given
    blocks = _blocks_for(max(topk_idx.numel(), places.numel()), places.device)
    numbers = places.shape[0], num_places, topk_idx.shape[0], topk_idx.shape[1], ranks, rank, each
    _run(PlacesRoute(), blocks, places.device, (*given, *made), *numbers)


def _blocks_for(entries: int, device: torch.device) -> int:
    """Return the number of blocks that each run two steps of a warp, limited by the multiprocessors."""
    return max(1, min(-(-entries // 64), _multiprocessors(device.index)))


def _launch(kernel: Any, rows: int, device: torch.device, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    blocks = min(-(-rows * kernel.pieces // WARPS), BLOCKS * _multiprocessors(device.index))
    if blocks:
        _run(kernel, blocks, device, tensors, *numbers)


def _run(kernel: Any, blocks: int, device: torch.device, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
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
