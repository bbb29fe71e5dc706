"""Fresh tensors for an operator's results; what they hold is undefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]

from cute_kernels.heap import Problem
from meta_kernels.arguments import AnySizedDispatch, PlanArgs

from ... import arrivals
from ...formats import Grid, format_of, scales_shape
from ...records import DISTINCT, NO_IDS, NO_SCALES, DispatchTensors, Placed, Received
from ...specs import PLAIN, DispatchSpec
from .sizing import DTYPES

Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of an output."""
New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Allocator of an output of a :data:`Kind`; the values are undefined."""


_new = tuple.__new__  # makes records in a third of the time
# Looked up once, because attribute lookups take a noticeable part of a decode step.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # builds for CPUs have none
_deterministic = torch._C._get_deterministic_algorithms


def allocator(device: torch.device) -> Callable[[], New]:
    """Return a function that returns the allocator for a device, which depends on the current device and modes.

    Memory of the current CUDA device is allocated as compiled graphs do it, which takes half the host time of
    torch.empty, but does not fill memory if deterministic algorithms are enabled."""

    def general(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    if device.type != "cuda":
        return lambda: general
    index = device.index
    return lambda: _empty_strided_cuda if _current_device() == index and not _deterministic() else general


WEIGHTED = PLAIN._replace(weighted=True)
"""Unquantized rows, with a number for each."""


def published_slots(a: PlanArgs | AnySizedDispatch) -> int:
    """Return what kernels that publish a route get as `slots`: -1 if the ids of a token must be distinct."""
    return -1 if a.layout == DISTINCT else a.slots


class Outputs:
    """Makes the outputs of one communicator's operators, on its device."""

    def __init__(self, problem: Problem, num_local_experts: int, device: torch.device) -> None:
        self._world_size, self._hidden, self._top_k = problem.world_size, problem.hidden_size, problem.top_k
        self._dtype = {name: dtype for dtype, name in DTYPES.items()}[problem.dtype]
        self._local = (num_local_experts,)
        self._device, self._allocator = device, allocator(device)

    def dispatched(self, spec: DispatchSpec, tokens: int, num_rows: int, slots: int) -> Callable[[], DispatchTensors]:
        """Return a function that allocates the results of a dispatch of `tokens` tokens."""
        allocator = self._allocator
        rows, scales, weights = self._received(spec, num_rows, slots)
        sent, lists, local, ids = self._placed(tokens, num_rows, spec.token_major)
        no_scales, no_ids = NO_SCALES[self._device], NO_IDS[self._device]

        def make() -> DispatchTensors:
            new = allocator()
            made = (
                new(*rows), no_scales if scales is None else new(*scales), new(*weights),
                new(*sent), new(*lists), new(*local), new(*local), new(*local), no_ids if ids is None else new(*ids),
            )  # fmt: skip
            return _new(DispatchTensors, made)

        return make

    def placed(self, tokens: int, num_rows: int, token_major: bool = False) -> Placed:
        """Allocate the results of a plan."""
        new, (sent, lists, local, ids) = self._allocator(), self._placed(tokens, num_rows, token_major)
        recv_idx = NO_IDS[self._device] if ids is None else new(*ids)
        return _new(Placed, (new(*sent), new(*lists), new(*local), new(*local), new(*local), recv_idx))

    def received(self, spec: DispatchSpec, num_rows: int, slots: int = 0) -> Received:
        """Allocate received rows, or rows of gradients, with their scales and weights."""
        new = self._allocator()
        rows, scales, weights = self._received(spec, num_rows, slots)
        return _new(Received, (new(*rows), NO_SCALES[self._device] if scales is None else new(*scales), new(*weights)))

    def _placed(self, tokens: int, num_rows: int, token_major: bool) -> tuple[Kind, Kind, Kind, Kind | None]:
        """Return the kinds of `send_rows`, `arrivals`, each tensor of the local experts, and `recv_idx`."""
        top_k, ints = self._top_k, torch.int32
        lists = arrivals.size(num_rows, self._world_size)
        ids = _kind(ints, num_rows, top_k) if token_major else None
        return _kind(ints, tokens, top_k), _kind(ints, lists), _kind(ints, *self._local), ids

    def _received(self, spec: DispatchSpec, num_rows: int, slots: int) -> tuple[Kind, Kind | None, Kind]:
        """Return the kinds of the fields of `Received`."""
        layout, weighted = spec.scales_layout, spec.weighted
        rows = _kind(torch.float8_e4m3fn if layout else self._dtype, num_rows, self._hidden)
        scales = None
        if layout:
            grid = Grid(num_rows, slots, self._local[0], self._hidden)
            shape, dtype = scales_shape(format_of(spec.format), layout, grid)
            scales = _kind(dtype, *shape)
        shape = (num_rows, self._top_k) if weighted and spec.token_major else (num_rows if weighted else 0,)
        return rows, scales, _kind(torch.float32, *shape)

    def sums(self, tokens: int) -> Callable[[], Tensor]:
        """Return a function that allocates [tokens, H] for sums of rows."""
        allocator, (shape, strides, dtype) = self._allocator, _kind(self._dtype, tokens, self._hidden)
        return lambda: allocator()(shape, strides, dtype)

    def scalars(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate float32 for weights or their gradients."""
        return torch.empty(shape, dtype=torch.float32, device=self._device)


def _kind(dtype: torch.dtype, *shape: int) -> Kind:
    """Return the kind of contiguous tensors."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return shape, tuple(strides), dtype
