"""Launches of kernels on rows that need no communicator: a device and its compiled functions. Tensors are contiguous,
begin at multiples of 16 bytes (:func:`readable`), and everything runs on the current stream of their device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import jit
from cute_kernels.gemm.few_rows import FewRows, rows_of, tile_of
from cute_kernels.gemm.few_rows_e4m3 import FewRowsE4M3
from cute_kernels.gemm.few_rows_e4m3 import tile_of as tile_of_e4m3
from cute_kernels.local.expert_lists import MakeExpertLists
from cute_kernels.local.places_route import PlacesRoute
from cute_kernels.local.row_slices import WARPS
from cute_kernels.local.sum_rows import SumRows
from cute_kernels.local.swiglu import SwiGLURows

from ...formats import Segments
from .sizing import DTYPES

BLOCKS = 4
"""Largest number of blocks of a multiprocessor, which is enough to keep its memory busy."""


def takes(x: Tensor, hidden: int) -> bool:
    """Return whether kernels accept rows of x with `hidden` numbers: of a supported dtype, in whole vectors of 16
    bytes."""
    return x.dtype in DTYPES and hidden * x.element_size() % 16 == 0


def readable(tensor: Tensor) -> Tensor:
    """Return a tensor whose vectors of 16 bytes kernels can read: contiguous, at an aligned address. Copies others."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def swiglu(
    kernel: SwiGLURows, x: Tensor, out: Tensor, segments: Segments, slots: int, grad: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:  # fmt: skip
    rows, experts = x.shape[0], segments.offs.shape[0]
    if experts:
        tensors = x, grad, None, out, scales, None, None, segments.offs, segments.counts
        _launch(kernel, rows, x.device, tensors, rows, slots, experts, segments.alignment)


def swiglu_weighted(
    kernel: SwiGLURows, x: Tensor, grad: Tensor, weights: Tensor, made: tuple[Tensor, Tensor, Tensor],
    segments: Segments,
) -> None:  # fmt: skip
    """Run the backward of SwiGLU times weights. `made`: the gradient of x, the weighted result, and the gradients of
    the weights."""
    grad_x, out, dots = made
    rows, experts = x.shape[0], segments.offs.shape[0]
    if experts:
        tensors = x, grad, weights, grad_x, None, out, dots, segments.offs, segments.counts
        _launch(kernel, rows, x.device, tensors, rows, 0, experts, segments.alignment)


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None, out: Tensor) -> None:
    rows, terms = index.shape
    kernel = SumRows(x.shape[1], DTYPES[x.dtype], weights is not None, weights is None and terms == 1)
    _launch(kernel, rows, x.device, (x, index, weights, out, None), rows, terms, 0)


def copy_rows(x: Tensor, index: Tensor, ends: Tensor, out: Tensor) -> None:
    """Copy the rows that `index` names, up to the last of `ends`."""
    kernel = SumRows(x.shape[1], DTYPES[x.dtype], False, True, True)
    (rows,), (experts,) = index.shape, ends.shape
    _launch(kernel, rows, x.device, (x, index, None, out, ends), rows, 1, experts)


def expert_lists(local_idx: Tensor, experts: int, alignment: int, made: tuple[Tensor, ...]) -> None:
    """Fill the lists of experts. `made`: rows, flat, places, offs, counts, dropped."""
    entries, length = local_idx.numel(), made[0].shape[0]
    blocks = _blocks_for(max(entries, length), local_idx.device)
    numbers = entries, local_idx.shape[1], length, alignment
    _run(MakeExpertLists(experts), blocks, local_idx.device, (local_idx, *made), *numbers)


def places_route(
    given: list[Tensor], made: tuple[Tensor, Tensor], num_places: int, ranks: int, rank: int, each: int
) -> None:
    """Fill the route of places. `given`: topk_idx, send_rows, arrivals, places; `made`: the arrivals and send_rows of
    places."""
    topk_idx, _, _, places = given
    blocks = _blocks_for(max(topk_idx.numel(), places.numel()), places.device)
    numbers = places.shape[0], num_places, topk_idx.shape[0], topk_idx.shape[1], ranks, rank, each
    _run(PlacesRoute(), blocks, places.device, (*given, *made), *numbers)


class Share(NamedTuple):
    """Sizes of a call that bound the rows of a rank's experts."""

    tokens: int
    """Bound on the tokens of a rank."""
    top_k: int
    ranks: int
    """Number of ranks that send rows."""


def few_rows(x: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor, segments: Segments, share: Share) -> None:
    """Run both GEMMs of SwiGLU experts on the kept rows of x."""
    rows, experts, width = x.shape[0], *w_out.shape[:2]
    entries = share.tokens * share.ranks * share.top_k
    if not min(rows, experts, entries):
        return
    inner = x.new_empty(rows, width)
    stored, transposed = zip(*map(_stored, (w_in, w_out)), strict=True)
    kernels = few_rows_kernels(experts, x.shape[1], width, DTYPES[x.dtype], share, transposed)
    for kernel, given, weights, made in zip(kernels, (x, inner), stored, (inner, out), strict=True):
        tensors = given, weights, made, segments.offs, segments.counts
        _run(kernel, min(experts, rows, entries) * kernel.shares, x.device, tensors, segments.alignment)


def few_rows_kernels(
    experts: int, hidden: int, width: int, dtype: str, share: Share, transposed: Sequence[bool]
) -> list[FewRows]:
    """Return the kernels of both GEMMs. `transposed`: how the weights of each lie in memory."""
    mean = share.tokens * share.top_k  # rows of a rank
    rows, named = rows_of(share.tokens * share.ranks, mean / experts), min(experts, mean)
    shapes = (hidden, width, True), (width, hidden, False)
    return [
        FewRows(experts, depth, columns, dtype, tile_of(columns, gated, turned, rows, named), gated, turned)
        for (depth, columns, gated), turned in zip(shapes, transposed, strict=True)
    ]


def few_rows_e4m3_kernels(experts: int, hidden: int, width: int, share: Share) -> tuple[FewRowsE4M3, FewRowsE4M3]:
    """Return the kernels of both GEMMs of SwiGLU experts with e4m3 weights."""
    rows = rows_of(share.tokens * share.ranks, share.tokens * share.top_k / experts)
    first, second = (
        FewRowsE4M3(experts, depth // 2, columns, "bf16", tile_of_e4m3(gated, rows), gated, True)
        for depth, columns, gated in ((hidden, width, True), (width, hidden, False))
    )
    return first, second


def few_rows_e4m3(
    x: Tensor, scales: Tensor, weights: tuple[Tensor, ...], out: Tensor, segments: Segments, share: Share
) -> None:
    """Run both GEMMs of SwiGLU experts with e4m3 weights on the kept rows of x. `weights`: w_in, in_scales, w_out,
    out_scales."""
    w_in, in_scales, w_out, out_scales = weights
    (rows, hidden), (experts, _, width) = x.shape, w_out.shape
    entries = share.tokens * share.ranks * share.top_k
    if not min(rows, experts, entries):
        return
    inner, inner_scales = x.new_empty(rows, width), scales.new_empty(rows, width // 128)
    first, second = few_rows_e4m3_kernels(experts, hidden, width, share)
    of = segments.offs, segments.counts
    for kernel, tensors in (
        (first, (x, scales, w_in, in_scales, inner, inner_scales, *of)),
        (second, (inner, inner_scales, w_out, out_scales, out, None, *of)),
    ):
        _run(kernel, min(experts, rows, entries) * kernel.shares, x.device, tensors, segments.alignment)


def _stored(weights: Tensor) -> tuple[Tensor, bool]:
    """Return weights as they lie in memory, and whether this is the transpose of what is given. Weights in another
    order, and those that do not begin at a multiple of 16 bytes, are copied."""
    transposed = not weights.is_contiguous() and weights.transpose(1, 2).is_contiguous()
    stored = weights.transpose(1, 2) if transposed else weights
    return readable(stored), transposed


def _blocks_for(entries: int, device: torch.device) -> int:
    """Return the number of blocks that each run two steps of a warp, limited by the multiprocessors."""
    return max(1, min(-(-entries // 64), _multiprocessors(device.index)))


def _launch(kernel: Any, rows: int, device: torch.device, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    blocks = min(-(-rows * kernel.slices.slices // WARPS), BLOCKS * _multiprocessors(device.index))
    if blocks:
        _run(kernel, blocks, device, tensors, *numbers)


def _run(kernel: Any, blocks: int, device: torch.device, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    for given in tensors:
        if given is not None and given.device != device:
            raise ValueError(f"an argument of {kernel.name} is on {given.device}; allowed: {device}, as the others")
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
