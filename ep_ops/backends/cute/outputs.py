"""Fresh tensors for an operator's results; what they hold is undefined."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

from cute_kernels.heap import Problem

from ... import arrivals
from ...formats import Grid, format_of, scales_shape
from ...records import Placed, Sizes
from ..base import DispatchTensors
from .row_format import AS_IT_IS, RowFormat
from .sizing import DTYPES

New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""What makes an output: (shape, strides, dtype) -> a tensor whose values are undefined."""


def allocator(device: torch.device) -> New:
    """How to allocate on a CUDA device: as compiled graphs do, which takes half the host time of torch.empty.

    That way knows the current device alone, and does not fill memory where deterministic algorithms are asked for.
    """
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

    def placed(self, topk_idx: Tensor, num_rows: int) -> Placed:
        return Placed(*self._placed(allocator(self._device), topk_idx, num_rows))

    def dispatched(
        self, x: Tensor, weighted: bool, topk_idx: Tensor, sizes: Sizes, how: RowFormat, token_major: bool = False
    ) -> DispatchTensors:
        """What a dispatch returns, without scales; of token-major rows with local ids."""
        rows = self.rows(x, weighted, sizes.capacity, how, token_major)
        placed = self._placed(allocator(self._device), topk_idx, sizes.capacity)
        return (*rows, *placed, self.ids(sizes.capacity)) if token_major else (*rows, *placed)

    def ids(self, num_rows: int) -> Tensor:
        """int32 [num_rows, K] for local ids."""
        return allocator(self._device)((num_rows, self._top_k), (self._top_k, 1), torch.int32)

    def _row_dtype(self, x: Tensor, how: RowFormat) -> torch.dtype:
        return x.dtype if not how.format else torch.float8_e4m3fn if how.layout else self._dtype

    def scales(self, how: RowFormat, num_rows: int, slots: int) -> Tensor | None:
        """For the scales of rows that arrive; None where they have none."""
        if not how.layout:
            return None
        grid = Grid(num_rows, slots, self._local[0], self._hidden)
        shape, dtype = scales_shape(format_of(how.format), how.layout, grid)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return allocator(self._device)(tuple(shape), tuple(strides), dtype)

    def _placed(self, new: New, topk_idx: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        tokens, top_k = topk_idx.shape
        ints, local = torch.int32, self._local
        return (
            new((tokens, top_k), (top_k, 1), ints),
            new((arrivals.size(num_rows, self._world_size),), (1,), ints),
            new(local, (1,), ints),
            new(local, (1,), ints),
            new(local, (1,), ints),
        )

    def rows(
        self, x: Tensor, weighted: bool, num_rows: int, how: RowFormat = AS_IT_IS, token_major: bool = False
    ) -> tuple[Tensor, Tensor]:
        """[num_rows, H] like x, or as they arrive in a format, and float32 [num_rows] for weights, [num_rows, K] of
        token-major rows, or [0]."""
        new = allocator(self._device)
        hidden = x.shape[1]
        rows = new((num_rows, hidden), (hidden, 1), self._row_dtype(x, how))
        if weighted and token_major:
            return rows, new((num_rows, self._top_k), (self._top_k, 1), torch.float32)
        return rows, new((num_rows if weighted else 0,), (1,), torch.float32)

    def tokens(self, y: Tensor, tokens: int) -> Tensor:
        """[tokens, H] for what rows `y` come home as."""
        hidden = y.shape[1]
        return allocator(self._device)((tokens, hidden), (hidden, 1), y.dtype)

    def scalars(self, shape: tuple[int, ...]) -> Tensor:
        """float32 for weights, or for gradients of weights."""
        return torch.empty(shape, dtype=torch.float32, device=self._device)
