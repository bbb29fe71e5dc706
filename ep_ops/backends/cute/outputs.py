"""Fresh tensors for an operator's results; what they hold is undefined."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

from cute_kernels.heap import Problem

from ... import arrivals
from ...formats import Grid, format_of, scales_shape
from ...records import NO_IDS, NO_SCALES, Placed, Received
from .row_format import AS_GIVEN, RowFormat
from .sizing import DTYPES

New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""What makes an output: (shape, strides, dtype) -> a tensor whose values are undefined."""


_new = tuple.__new__  # makes records in a third of the time


def allocator(device: torch.device) -> New:
    """Return an allocator for a CUDA device. It allocates as compiled graphs do, which takes half the host time of
    torch.empty, but it only supports the current device, and does not fill memory if deterministic algorithms are
    enabled."""
    if torch._C._cuda_getDevice() == device.index and not torch._C._get_deterministic_algorithms():
        return _empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class Outputs:
    """Makes the outputs of one communicator's operators, on its device."""

    def __init__(self, problem: Problem, num_local_experts: int, device: torch.device) -> None:
        self._world_size, self._hidden, self._top_k = problem.world_size, problem.hidden_size, problem.top_k
        self._dtype = {name: dtype for dtype, name in DTYPES.items()}[problem.dtype]
        self._local = (num_local_experts,)
        self._device = device

    def placed(self, topk_idx: Tensor, num_rows: int, token_major: bool = False) -> Placed:
        new, (tokens, top_k) = allocator(self._device), topk_idx.shape
        ints, local = torch.int32, self._local
        made = (
            new((tokens, top_k), (top_k, 1), ints),
            new((arrivals.size(num_rows, self._world_size),), (1,), ints),
            new(local, (1,), ints),
            new(local, (1,), ints),
            new(local, (1,), ints),
            new((num_rows, top_k), (top_k, 1), ints) if token_major else NO_IDS[self._device],
        )
        return _new(Placed, made)

    def received(
        self, x: Tensor, weighted: bool, num_rows: int, how: RowFormat = AS_GIVEN, slots: int = 0,
        token_major: bool = False,
    ) -> Received:  # fmt: skip
        """Allocate received rows of x, or of gradients like x, with their scales and weights."""
        new, hidden = allocator(self._device), x.shape[1]
        dtype = x.dtype if not how.format else torch.float8_e4m3fn if how.layout else self._dtype
        rows = new((num_rows, hidden), (hidden, 1), dtype)
        scales = self._scales(new, how, num_rows, slots) if how.layout else NO_SCALES[self._device]
        if weighted and token_major:
            weights = new((num_rows, self._top_k), (self._top_k, 1), torch.float32)
        else:
            weights = new((num_rows if weighted else 0,), (1,), torch.float32)
        return _new(Received, (rows, scales, weights))

    def _scales(self, new: New, how: RowFormat, num_rows: int, slots: int) -> Tensor:
        grid = Grid(num_rows, slots, self._local[0], self._hidden)
        shape, dtype = scales_shape(format_of(how.format), how.layout, grid)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return new(tuple(shape), tuple(strides), dtype)

    def tokens(self, y: Tensor, tokens: int) -> Tensor:
        """Allocate [tokens, H] for the sums of rows `y`."""
        hidden = y.shape[1]
        return allocator(self._device)((tokens, hidden), (hidden, 1), y.dtype)

    def scalars(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate float32 for weights or their gradients."""
        return torch.empty(shape, dtype=torch.float32, device=self._device)
