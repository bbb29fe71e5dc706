"""Refuse bad input on the host, before anything is sent.

One function per operator; it takes the communicator and the operator's tensor and int arguments in schema order.
TypeError for a wrong dtype, ValueError for a wrong value, shape, device or layout, RuntimeError for a destroyed
communicator. What is right passes in a few microseconds: the text of a refusal is only made when it is needed.
Values inside tensors are not looked at here: that would wait for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .config import INT32_LIMIT, MAX_ALIGNMENT

if TYPE_CHECKING:
    from .communicator import Communicator

_INT32 = torch.int32
_ROW_BYTES = 16  # rows begin at multiples of this, which bulk copies need


def check_plan(
    comm: Communicator,
    topk_idx: Tensor,
    capacity: int,
    alignment: int,
    slots: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
) -> None:
    """Refuse what ep::plan cannot take."""
    _living(comm)
    _same_sizes(comm, num_local_experts, world_size)
    _rows_asked(comm, capacity, alignment, slots)
    _tokens(comm, topk_idx, max_tokens)


def check_dispatch(
    comm: Communicator,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    capacity: int,
    alignment: int,
    slots: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
) -> None:
    """Refuse what ep::dispatch cannot take."""
    _living(comm)
    _same_sizes(comm, num_local_experts, world_size)
    _rows_asked(comm, capacity, alignment, slots)
    _tokens(comm, topk_idx, max_tokens)
    _rows(comm, "x", x, topk_idx.shape[0], "rows as topk_idx has")
    if topk_weights is not None:
        _tensor(comm, "topk_weights", topk_weights, comm.weights_dtype, topk_idx.shape, "the shape of topk_idx")


def check_dispatch_dynamic(
    comm: Communicator,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    alignment: int,
    max_tokens: int,
    num_local_experts: int,
    world_size: int,
) -> None:
    """Refuse what ep::dispatch_dynamic cannot take."""
    _living(comm)
    _same_sizes(comm, num_local_experts, world_size)
    _alignment(alignment)
    _tokens(comm, topk_idx, max_tokens)
    _rows(comm, "x", x, topk_idx.shape[0], "rows as topk_idx has")
    if topk_weights is not None:
        _tensor(comm, "topk_weights", topk_weights, comm.weights_dtype, topk_idx.shape, "the shape of topk_idx")


def check_dispatch_planned(
    comm: Communicator,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    num_rows: int,
    alignment: int,
) -> None:
    """Refuse what ep::dispatch_planned cannot take."""
    _living(comm)
    _route(comm, topk_idx, send_rows, recv_rows, offs, counts)
    _num_rows(num_rows)
    _alignment(alignment)
    _rows(comm, "x", x, topk_idx.shape[0], "rows as topk_idx has")
    if topk_weights is not None:
        _tensor(comm, "topk_weights", topk_weights, comm.weights_dtype, topk_idx.shape, "the shape of topk_idx")


def check_combine(
    comm: Communicator,
    y: Tensor,
    recv_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    alignment: int,
    residual: Tensor | None = None,
) -> None:
    """Refuse what ep::combine cannot take."""
    _living(comm)
    _route(comm, topk_idx, send_rows, recv_rows, offs, counts)
    _alignment(alignment)
    _rows(comm, "y", y, None, "")
    if recv_weights is not None:
        _row_weights(comm, "recv_weights", recv_weights, y.shape[0])
    if residual is not None:
        _rows(comm, "residual", residual, topk_idx.shape[0], "rows as topk_idx has")


def check_empty_rows(comm: Communicator, num_rows: int) -> None:
    """Refuse more rows than lie in symmetric memory."""
    _living(comm)
    if not 0 <= num_rows <= comm.symmetric_rows:
        raise ValueError(
            f"num_rows is {num_rows}; allowed: 0..{comm.symmetric_rows}, the symmetric_rows of {comm.name!r}"
        )


def check_combine_gathered(
    comm: Communicator,
    y: Tensor,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    alignment: int,
) -> None:
    """Refuse what ep::combine_gathered cannot take. Where y lies is the backend's affair."""
    check_combine(comm, y, None, topk_idx, send_rows, recv_rows, offs, counts, alignment)


def check_dispatch_backward(
    comm: Communicator,
    grad_recv_x: Tensor | None,
    grad_recv_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    alignment: int,
) -> None:
    """Refuse what ep::dispatch_backward cannot take."""
    _living(comm)
    _route(comm, topk_idx, send_rows, recv_rows, offs, counts)
    _alignment(alignment)
    if grad_recv_x is None and grad_recv_weights is None:
        raise ValueError("grad_recv_x and grad_recv_weights are both None; one of them must be given")
    if grad_recv_x is not None:
        _rows(comm, "grad_recv_x", grad_recv_x, None, "")
    if grad_recv_weights is not None:
        rows = grad_recv_weights.numel() if grad_recv_x is None else grad_recv_x.shape[0]
        _row_weights(comm, "grad_recv_weights", grad_recv_weights, rows)


def check_combine_backward(
    comm: Communicator,
    grad_out: Tensor,
    y: Tensor | None,
    recv_weights: Tensor | None,
    topk_idx: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    num_rows: int,
    alignment: int,
) -> None:
    """Refuse what ep::combine_backward cannot take."""
    _living(comm)
    _route(comm, topk_idx, send_rows, recv_rows, offs, counts)
    _num_rows(num_rows)
    _alignment(alignment)
    _rows(comm, "grad_out", grad_out, topk_idx.shape[0], "rows as topk_idx has")
    if y is not None:
        _rows(comm, "y", y, num_rows, "num_rows rows")
    if recv_weights is not None:
        _row_weights(comm, "recv_weights", recv_weights, num_rows)


# ---------------------------------------------------------------------- communicator and ints


def _living(comm: Communicator) -> None:
    if comm.destroyed:
        raise RuntimeError(f"communicator {comm.name!r} was destroyed")


def _same_sizes(comm: Communicator, num_local_experts: int, world_size: int) -> None:
    if num_local_experts != comm.num_local_experts:
        own = comm.num_local_experts
        raise ValueError(f"num_local_experts is {num_local_experts}; communicator {comm.name!r} has {own} on this rank")
    if world_size != comm.world_size:
        raise ValueError(f"world_size is {world_size}; communicator {comm.name!r} has {comm.world_size} ranks")


def _alignment(alignment: int) -> None:
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"alignment is {alignment}; allowed: 1..{MAX_ALIGNMENT}")


def _num_rows(num_rows: int) -> None:
    if not 0 <= num_rows < INT32_LIMIT:
        raise ValueError(f"num_rows is {num_rows}; allowed: 0..2**31 - 1")


def _rows_asked(comm: Communicator, capacity: int, alignment: int, slots: int) -> None:
    _alignment(alignment)
    if not 0 <= capacity < INT32_LIMIT:
        raise ValueError(f"capacity is {capacity}; allowed: 0..2**31 - 1")
    if capacity % alignment:
        raise ValueError(f"capacity is {capacity}; it must be a multiple of alignment {alignment}")
    if slots:
        if slots < 0 or slots % alignment:
            raise ValueError(
                f"slots is {slots}; allowed: 0 (flat layout) or a positive multiple of alignment {alignment}"
            )
        if capacity != comm.num_local_experts * slots:
            needed = comm.num_local_experts * slots
            raise ValueError(
                f"capacity is {capacity}; with slots {slots} it must be num_local_experts"
                f" {comm.num_local_experts} x slots = {needed}"
            )


# ---------------------------------------------------------------------- tensors


def _tokens(comm: Communicator, topk_idx: Tensor, max_tokens: int) -> None:
    if not 0 <= max_tokens <= comm.max_tokens_per_rank:
        raise ValueError(f"max_tokens is {max_tokens}; allowed: 0..max_tokens_per_rank {comm.max_tokens_per_rank}")
    if topk_idx is None:
        _no_tensor("topk_idx")
    shape = topk_idx.shape
    if len(shape) != 2 or shape[1] != comm.top_k:
        raise ValueError(f"topk_idx has shape {tuple(shape)}; allowed: [T, {comm.top_k}] (top_k of {comm.name!r})")
    if shape[0] > max_tokens:
        raise ValueError(f"topk_idx has {shape[0]} tokens; allowed: at most max_tokens {max_tokens}")
    if topk_idx.dtype is not _INT32 or topk_idx.device != comm.device or not topk_idx.is_contiguous():
        _wrong_kind(comm, "topk_idx", topk_idx, _INT32)


def _route(
    comm: Communicator, topk_idx: Tensor, send_rows: Tensor, recv_rows: Tensor, offs: Tensor, counts: Tensor
) -> None:
    if recv_rows is None:
        _no_tensor("recv_rows")
    came = recv_rows.shape
    if len(came) != 3 or came[0] != comm.world_size or came[2] != comm.top_k or came[1] > comm.max_tokens_per_rank:
        raise ValueError(
            f"recv_rows has shape {tuple(came)}; allowed: [world_size {comm.world_size}, max_tokens"
            f" 0..{comm.max_tokens_per_rank}, top_k {comm.top_k}]"
        )
    if recv_rows.dtype is not _INT32 or recv_rows.device != comm.device or not recv_rows.is_contiguous():
        _wrong_kind(comm, "recv_rows", recv_rows, _INT32)
    _tokens(comm, topk_idx, came[1])
    _tensor(comm, "send_rows", send_rows, _INT32, topk_idx.shape, "the shape of topk_idx")
    per_expert = (comm.num_local_experts,)
    _tensor(comm, "offs", offs, _INT32, per_expert, "one for each local expert")
    _tensor(comm, "counts", counts, _INT32, per_expert, "one for each local expert")


def _rows(comm: Communicator, name: str, rows: Tensor, count: int | None, why: str) -> None:
    """``rows`` [count, H] of the communicator's dtype, each at a multiple of 16 bytes; any count if None."""
    if rows is None:
        _no_tensor(name)
    shape = rows.shape
    if len(shape) != 2 or shape[1] != comm.hidden_size or (count is not None and shape[0] != count):
        length = "rows" if count is None else f"{count} ({why})"
        raise ValueError(f"{name} has shape {tuple(shape)}; allowed: [{length}, hidden_size {comm.hidden_size}]")
    if rows.dtype is not comm.dtype or rows.device != comm.device or not rows.is_contiguous():
        _wrong_kind(comm, name, rows, comm.dtype)
    if rows.data_ptr() % _ROW_BYTES:
        raise ValueError(f"{name} begins at address {rows.data_ptr():#x}; allowed: multiples of {_ROW_BYTES} bytes")


def _no_tensor(name: str) -> NoReturn:
    """PyTorch takes None where a schema says Tensor."""
    raise TypeError(f"{name} is None; allowed: a tensor")


def _row_weights(comm: Communicator, name: str, weights: Tensor, count: int) -> None:
    hint = "one for each row; pass None where there are no weights"
    _tensor(comm, name, weights, comm.weights_dtype, (count,), hint)


def _tensor(
    comm: Communicator, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], why: str
) -> None:
    if tensor is None:
        _no_tensor(name)
    if tensor.shape != shape and tensor.dtype is dtype:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {list(shape)} ({why})")
    if tensor.dtype is not dtype or tensor.device != comm.device or not tensor.is_contiguous():
        _wrong_kind(comm, name, tensor, dtype)


def _wrong_kind(comm: Communicator, name: str, tensor: Tensor, dtype: torch.dtype) -> NoReturn:
    """Says what is wrong besides the shape. Callers look first whether anything is: each call costs host time."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")
    if tensor.device != comm.device:
        raise ValueError(f"{name} is on {tensor.device}; communicator {comm.name!r} is on {comm.device}")
    raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
