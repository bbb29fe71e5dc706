"""Token-major rows for GEMMs that gather: of each local expert the list of its rows, and of each row its places there.

    sent = comm.dispatch(x, topk_idx, topk_weights, layout="token_major")  # rows [R, H], local ids and weights [R, K]
    lists = expert_lists(sent.local_idx, comm.num_local_experts)
    y = experts(sent.x, lists.rows, lists.offs)                 # a grouped GEMM that gathers: [L, H]
    out = comm.combine(reduce_rows(y, lists, sent.weights), sent.route)     # in one: ep_ops.nn.places

The lists lie one after the other as the segments of rows grouped by expert do, and in the same order: with the same
alignment and room enough in both, ``sent.x[lists.rows]`` are the rows of ``comm.dispatch``, ``out`` that of its combine
with weights, to the bit. Everything here has sizes that the host knows, and never waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops.formats import exact_dtype
from ep_ops.nn import list_operators as operators
from ep_ops.nn.sums import of_index, sum_rows


class ExpertLists(NamedTuple):
    """R rows, K experts a token, El local experts; L places, those of an expert next to each other: its *list*. All
    int32."""

    rows: Tensor  # [L] the row of each place; where none is, some row that there is (of the same expert in its padding)
    flat: Tensor  # [L] row * K + k of each place, R * K where nothing is
    places: Tensor  # [R, K] the place of each (row, k), -1 where it has none
    offs: Tensor  # [El] where each list ends, its padding included
    counts: Tensor  # [El] places of each that hold something
    dropped: Tensor  # [El] (row, k) that found no place
    alignment: int  # lists are padded to a multiple of it

    @property
    def cu_seqlens(self) -> Tensor:
        """[El + 1] where each list begins, and where the last one ends: quack's ``cu_seqlens_m``, beside ``rows`` as
        its ``A_idx``."""
        return torch.nn.functional.pad(self.offs, (1, 0))

    @property
    def blocks(self) -> Tensor:
        """[L / alignment] the expert of each run of ``alignment`` places, -1 behind the last list: ``expert_ids`` of
        Triton's fused MoE, beside ``flat`` as its ``sorted_token_ids`` and ``offs[-1:]`` as its
        ``num_tokens_post_padded``."""
        begin = torch.arange(self.rows.shape[0] // self.alignment, device=self.offs.device) * self.alignment
        expert = torch.searchsorted(self.offs.long(), begin, right=True)
        return torch.where(expert < self.offs.shape[0], expert, -1).int()


def expert_lists(
    local_idx: Tensor, num_local_experts: int, *, alignment: int = 1, capacity: int | None = None
) -> ExpertLists:
    """The lists of ``local_idx`` (int32 [R, K], -1 none), what token-major rows have beside them.

    Of an expert's list: the (row, k) that name it, in this order. Lists follow each other, each padded to a multiple of
    ``alignment``. L is what R rows can take at most, or ``capacity``, a multiple of it, if one is given that is less. A
    (row, k) that finds no place below L is left out and counted, as in a dispatch.

    ValueError for an alignment below 1, or a capacity that is no positive multiple of it; on CPUs for an id that is no
    local expert's (on GPUs, where nobody looks, what comes of it is undefined).
    """
    if alignment < 1:
        raise ValueError(f"alignment is {alignment}; allowed: from 1 on")
    if capacity is not None and (capacity < alignment or capacity % alignment):
        raise ValueError(f"capacity is {capacity}; allowed: positive multiples of alignment {alignment}")
    taken = local_idx.shape[0] * local_idx.shape[1]
    room = places_at_most(taken, num_local_experts, alignment)
    length = room if capacity is None else min(capacity, room)
    rows, flat, places, offs, counts, dropped = operators.expert_lists(local_idx, num_local_experts, alignment, length)
    return ExpertLists(rows, flat, places, offs, counts, dropped, alignment)


def places_at_most(taken: int, num_local_experts: int, alignment: int) -> int:
    """Places that lists of so many (row, k) can take, padding included: a multiple of ``alignment``."""
    return (taken + min(num_local_experts, taken) * (alignment - 1)) // alignment * alignment


def gather_rows(x: Tensor, lists: ExpertLists) -> Tensor:
    """x [R, H] -> [L, H]: the row of each place, zeros where nothing is. For GEMMs that do not gather themselves; codes
    and scales of quantized rows may be gathered as well.

    The gradient of a row is the sum of its places', k ascending, as of :func:`reduce_rows`. ValueError for another
    number of rows than the lists were made of.
    """
    if x.shape[0] != lists.places.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows; allowed: {lists.places.shape[0]}, of which the lists were made")
    return _Gather.apply(x, *_along(lists))


def reduce_rows(y: Tensor, lists: ExpertLists, weights: Tensor | None = None) -> Tensor:
    """y [L, H] -> [R, H]: of each row the sum of its places, times ``weights`` [R, K] if given; zeros where none are.

    In fp32 (fp64 where y is), k ascending, each product and each sum rounded, then rounded once to y's dtype: what a
    combine of rows grouped by expert does on the expert's rank. Differentiable in y and weights; in y, places that hold
    nothing get zeros. ValueError for sizes that are not those of the lists.
    """
    if y.shape[0] != lists.rows.shape[0]:
        raise ValueError(f"y has {y.shape[0]} rows; allowed: {lists.rows.shape[0]}, the places of the lists")
    if weights is not None and weights.shape != lists.places.shape:
        allowed = f"{tuple(lists.places.shape)}, the shape of local_idx"
        raise ValueError(f"weights has shape {tuple(weights.shape)}; allowed: {allowed}")
    return _Reduce.apply(y, weights, *_along(lists))


def _along(lists: ExpertLists) -> tuple[Tensor, Tensor, Tensor]:
    """[L, 1] the row of each place, -1 where nothing is; `flat` [L]; `places` [R, K]."""
    rows = torch.where(lists.flat < lists.places.numel(), lists.rows, -1)
    return rows[:, None], lists.flat, lists.places


# Each is the other's gradient. The three of int32 are those that `_along` gives.


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, flat: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, flat, places)
        return sum_rows(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Reduce.apply(grad, None, *ctx.saved_tensors), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, rows: Tensor, flat: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(y if weights is not None else None, weights, rows, flat, places)
        return sum_rows(y, places, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        y, weights, rows, flat, places = ctx.saved_tensors
        grad_y = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_y = _Gather.apply(grad, rows, flat, places)
            if weights is not None:
                each = torch.nn.functional.pad(weights.flatten(), (0, 1))[flat]
                grad_y = (grad_y.to(exact_dtype(y.dtype)) * each.to(exact_dtype(y.dtype))[:, None]).to(y.dtype)
        if ctx.needs_input_grad[1]:
            wide = grad.to(exact_dtype(y.dtype))
            dots = [(wide * of_index(y, places[:, k])).sum(1) for k in range(places.shape[1])]
            grad_weights = torch.stack(dots, 1).to(weights.dtype)
        return grad_y, grad_weights, None, None, None
