"""Lists of token-major rows for GEMMs that gather: the rows of each local expert, and the places of each row.

    sent = comm.dispatch(x, topk_idx, topk_weights, layout="token_major")  # rows [R, H], local ids and weights [R, K]
    lists = expert_lists(sent.local_idx, comm.num_local_experts)
    y = experts(sent.x, lists.rows, lists.offs)                 # a grouped GEMM that gathers: [L, H]
    out = comm.combine(reduce_rows(y, lists, sent.weights), sent.route)     # or ep_ops.nn.places in one step

Lists follow each other like the segments of grouped rows, in the same order. With the same alignment and enough room,
``sent.x[lists.rows]`` are the rows of a grouped ``comm.dispatch``, and ``out`` has the bits of its weighted combine.
All sizes are known to the host, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops.formats import exact_dtype
from ep_ops.nn import list_operators as operators
from ep_ops.nn.sums import of_index, sum_rows
from ep_ops.records import check_types


class ExpertLists(NamedTuple):
    """Lists of the rows of each local expert. All tensors are int32.

    R rows, K experts for each token, El local experts, L places. The places of an expert, its *list*, are contiguous.
    """

    rows: Tensor  # [L] the row of each place; padding repeats a row of its expert, and any row follows the last list
    flat: Tensor  # [L] row * K + k of each place; R * K in empty places
    places: Tensor  # [R, K] the place of each (row, k), -1 where it has none
    offs: Tensor  # [El] where each list ends, its padding included
    counts: Tensor  # [El] places of each list that are not empty
    dropped: Tensor  # [El] (row, k) that found no place
    alignment: int  # lists are padded to a multiple of it

    @property
    def cu_seqlens(self) -> Tensor:
        """Return the start of each list and the end of the last one, [El + 1]: quack's ``cu_seqlens_m`` (``rows`` is
        its ``A_idx``)."""
        return torch.nn.functional.pad(self.offs, (1, 0))

    @property
    def blocks(self) -> Tensor:
        """Return the expert of each block of ``alignment`` places, [L / alignment], -1 after the last list.

        These are the ``expert_ids`` of Triton's fused MoE; ``flat`` are its ``sorted_token_ids``, and ``offs[-1:]`` is
        its ``num_tokens_post_padded``.
        """
        begin = torch.arange(self.rows.shape[0] // self.alignment, device=self.offs.device) * self.alignment
        expert = torch.searchsorted(self.offs.long(), begin, right=True)
        return torch.where(expert < self.offs.shape[0], expert, -1).int()


def expert_lists(
    local_idx: Tensor, num_local_experts: int, *, alignment: int = 1, capacity: int | None = None, exact: bool = False
) -> ExpertLists:
    """Return the lists of token-major rows.

    The list of an expert contains the (row, k) that name it, in this order. Does not wait for the device, unless
    ``exact`` is True.

    Args:
        local_idx: local expert of each (row, k), int32 or int64 [R, K], -1 for none: ``Dispatched.local_idx``.
        num_local_experts: El.
        alignment: each list is padded to a multiple of this number of places, at least 1.
        capacity: number of places L, a multiple of ``alignment``. None: the largest number that R rows can need.
            (row, k) that do not fit are dropped and counted.
        exact: whether there are exactly as many places as the lists need, padding included, which synchronizes the host
            once. Cannot be combined with ``capacity``.

    Returns:
        ExpertLists: the lists.

    Raises:
        TypeError: ``local_idx`` is not a tensor or has another dtype.
        ValueError: ``local_idx`` has another shape, ``alignment`` or ``capacity`` is out of range, ``exact`` is given
            with a capacity, or, on CPUs, an id is out of range. On GPUs ids are not checked, and the result for an
            invalid one is undefined.
    """
    check_types(Tensor, local_idx=local_idx)
    if local_idx.dim() != 2:
        raise ValueError(f"local_idx has shape {tuple(local_idx.shape)}; allowed: [R, K]")
    if local_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"local_idx has dtype {local_idx.dtype}; allowed: torch.int32, torch.int64")
    if alignment < 1:
        raise ValueError(f"alignment is {alignment}; allowed: an int of at least 1")
    if capacity is not None and (capacity < alignment or capacity % alignment):
        raise ValueError(f"capacity is {capacity}; allowed: positive multiples of alignment {alignment}")
    if exact:
        if capacity is not None:
            raise ValueError(f"capacity is {capacity} and exact is True; allowed: one of the two")
        return ExpertLists._make((*operators.exact_lists(local_idx, num_local_experts, alignment), alignment))
    taken = local_idx.shape[0] * local_idx.shape[1]
    room = places_at_most(taken, num_local_experts, alignment)
    length = room if capacity is None else min(capacity, room)
    return ExpertLists._make((*operators.expert_lists(local_idx, num_local_experts, alignment, length), alignment))


def places_at_most(taken: int, num_local_experts: int, alignment: int) -> int:
    """Return the largest number of places of ``taken`` (row, k), padding included: a multiple of ``alignment``."""
    return (taken + min(num_local_experts, taken) * (alignment - 1)) // alignment * alignment


def gather_rows(x: Tensor, lists: ExpertLists) -> Tensor:
    """Copy the row of each place, for GEMMs that do not gather. Differentiable.

    The gradient of a row is the sum of the gradients of its places, in ascending order of k, as in :func:`reduce_rows`.

    Args:
        x: rows [R, H]; codes and scales of quantized rows are allowed.
        lists: lists of these rows.

    Returns:
        [L, H], zeros in empty places.

    Raises:
        TypeError: x is not a tensor, or ``lists`` are not ExpertLists.
        ValueError: x has another number of rows than the lists.
    """
    check_types(Tensor, x=x)
    check_types(ExpertLists, lists=lists)
    if x.shape[0] != lists.places.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows; allowed: {lists.places.shape[0]}, the rows of the lists")
    return _Gather.apply(x, *_tensors_of(lists))


def reduce_rows(y: Tensor, lists: ExpertLists, weights: Tensor | None = None) -> Tensor:
    """Sum the places of each row, times weights. Differentiable in y and weights.

    Sums are computed in fp32 (fp64 if y is fp64), in ascending order of k, with each product and each sum rounded.
    The result is rounded to the dtype of y. A combine of grouped rows does the same on the expert's rank.

    Args:
        y: outputs of the experts, [L, H].
        lists: the lists.
        weights: [R, K], such as ``Dispatched.weights``. None: 1.

    Returns:
        [R, H], zeros for rows without places.

    Raises:
        TypeError: y or ``weights`` is not a tensor, or ``lists`` are not ExpertLists.
        ValueError: sizes differ from those of the lists.
    """
    check_types(Tensor, y=y)
    check_types(ExpertLists, lists=lists)
    if weights is not None:
        check_types(Tensor, weights=weights)
    if y.shape[0] != lists.rows.shape[0]:
        raise ValueError(f"y has {y.shape[0]} rows; allowed: {lists.rows.shape[0]}, the places of the lists")
    if weights is not None and weights.shape != lists.places.shape:
        allowed = f"{tuple(lists.places.shape)}, the shape of local_idx"
        raise ValueError(f"weights has shape {tuple(weights.shape)}; allowed: {allowed}")
    return _Reduce.apply(y, weights, *_tensors_of(lists))


def _tensors_of(lists: ExpertLists) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row of each place [L, 1], -1 if empty; ``flat`` [L]; ``places`` [R, K]."""
    rows = torch.where(lists.flat < lists.places.numel(), lists.rows, -1)
    return rows[:, None], lists.flat, lists.places


# Each is the gradient of the other. rows, flat and places are the results of `_tensors_of`.


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
