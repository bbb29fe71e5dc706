"""Check the arguments of operators on the host, before anything is sent.

:func:`spec` checks what is neither a tensor nor a size, once. The other functions, one for each operator, take the
communicator (:class:`ep_ops.config.Member`) and the operator's arguments, and check tensors and sizes. A wrong dtype
raises TypeError; a wrong value, shape, device or memory layout raises ValueError. Correct arguments pass within a few
microseconds, because texts are only made for errors. The values in tensors are not checked here, since that would
synchronize the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meta_kernels.arguments import (
    AnyCombine,
    AnyCombineBackward,
    AnyDispatch,
    AnyDispatchBackward,
    AnyRouted,
    AnySizedDispatch,
    CombineArgs,
    CombineGatheredArgs,
    DispatchDynamicArgs,
    DispatchPlannedArgs,
    PlanArgs,
)

from .arrivals import rows_of, size
from .config import Member
from .formats import (
    ELEMENT,
    FORMATS,
    LAYOUTS,
    OF_TOKENS,
    Format,
    combine_format_problem,
    format_of,
    layout_of,
    per_row,
    reject_hidden,
)
from .records import (
    DISTINCT,
    FLIGHTS,
    INT32_LIMIT,
    MAX_ALIGNMENT,
    PADDED,
    ROW_LAYOUTS,
    TOKEN_MAJOR,
    described,
    whole,
    wrong_type,
)
from .specs import CombineSpec, DispatchBackwardSpec, DispatchSpec, PlanSpec, Spec

_INT32 = torch.int32
_STRIDED = torch.strided
_ROW_BYTES = 16  # rows begin at multiples of it, as bulk copies require
_PAIR_BYTES = 8  # arrivals, which holds pairs of int32, begins at a multiple of it
WIRE = tuple(name for name, form in FORMATS.items() if form.wire)
_QUANTIZED = ", ".join(repr(name) for name, form in FORMATS.items() if not form.wire)
_MOST_HIDDEN = 2**16  # limit of rows in a format on GPUs: the ring of a pulling block holds whole rows
_OF_ROUTE = "the rows of the route, hidden_size"
_OF_IDS = "the tokens of topk_idx, hidden_size"
_WEIGHTS_OF_ROUTE = " for each row of the route, like the weights that dispatch returns; pass None for no weights"
_ONE = f"one{_WEIGHTS_OF_ROUTE}"
_TOP_K = f"top_k{_WEIGHTS_OF_ROUTE}"
_EXACT = ", ".join(repr(layout) for layout in ROW_LAYOUTS if layout != PADDED)


def spec(m: Member, s: Spec) -> None:
    """Check a specification, once for each communicator."""
    if isinstance(s, (PlanSpec, DispatchSpec, DispatchBackwardSpec)) and s.layout not in (*ROW_LAYOUTS, DISTINCT):
        raise ValueError(f"layout is {s.layout!r}; allowed: {', '.join(map(repr, ROW_LAYOUTS))}")
    if isinstance(s, DispatchSpec):
        if s.kind == "dispatch_dynamic" and s.layout == PADDED:
            raise ValueError(f"layout is {PADDED!r}, whose rows are slots; allowed with exact sizes: {_EXACT}")
        if s.format or s.scaled or s.scales_as:
            _row_format(m, s)
    if isinstance(s, CombineSpec):
        if s.grad_format:
            if s.grad_format not in WIRE:
                allowed = ", ".join(map(repr, WIRE))
                raise ValueError(
                    f"grad_format is {s.grad_format!r}; allowed: '' (the gradient is sent unquantized), {allowed}"
                )
            _divides(m, "grad_format", format_of(s.grad_format))
        if s.format:
            if problem := combine_format_problem("format", s.format):
                raise ValueError(problem)
            _divides(m, "format", format_of(s.format))


def plan(m: Member, a: PlanArgs | AnySizedDispatch) -> None:
    _same_sizes(m, a.num_local_experts, a.world_size)
    if not 0 <= a.max_tokens <= m.max_tokens_per_rank:  # before the capacity, which may follow from it
        raise _wrong_max_tokens(m, a)
    _layout(a.layout, a.alignment, a.slots)
    _rows_asked(m, a.capacity, a.alignment, a.slots)
    _tokens(m, a)


def dispatch(m: Member, a: AnySizedDispatch) -> None:
    plan(m, a)
    _of_tokens(m, a)


def dispatch_dynamic(m: Member, a: DispatchDynamicArgs) -> None:
    _same_sizes(m, a.num_local_experts, a.world_size)
    _layout(a.layout, a.alignment, 0)
    _tokens(m, a)
    _of_tokens(m, a)


def dispatch_planned(m: Member, a: DispatchPlannedArgs) -> None:
    _route(m, a, a.num_rows)
    _layout(a.layout, a.alignment, a.slots)
    if a.slots and a.num_rows != m.num_local_experts * a.slots:
        raise ValueError(
            f"slots is {a.slots}; allowed: num_rows {a.num_rows} / num_local_experts {m.num_local_experts}"
        )
    _of_tokens(m, a)


def combine(m: Member, a: AnyCombine) -> None:
    rows = _route(m, a)
    _rows(m, "y", a.y, rows, _OF_ROUTE)
    if a.recv_weights is not None:
        try:
            _tensor(m, "recv_weights", a.recv_weights, m.weights_dtype, (rows,), _ONE)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}. (Methods call this argument `weights`.)") from None
    if isinstance(a, CombineArgs) and a.residual is not None:
        _rows(m, "residual", a.residual, a.topk_idx.shape[0], _OF_IDS)


def combine_gathered(m: Member, a: CombineGatheredArgs) -> None:
    _rows(m, "y", a.y, _route(m, a), _OF_ROUTE)


def dispatch_backward(m: Member, a: AnyDispatchBackward) -> None:
    rows = _route(m, a)
    if a.grad_recv_x is None and a.grad_recv_weights is None:
        raise ValueError("grad_recv_x and grad_recv_weights are both None; one of them must be given")
    if a.grad_recv_x is not None:
        _rows(m, "grad_recv_x", a.grad_recv_x, rows, _OF_ROUTE)
    if a.grad_recv_weights is not None:
        shape, why = ((rows, m.top_k), _TOP_K) if a.layout == TOKEN_MAJOR else ((rows,), _ONE)
        _tensor(m, "grad_recv_weights", a.grad_recv_weights, m.weights_dtype, shape, why)


def combine_backward(m: Member, a: AnyCombineBackward) -> None:
    rows = _route(m, a, a.num_rows)
    _rows(m, "grad_out", a.grad_out, a.topk_idx.shape[0], _OF_IDS)
    if a.y is not None:
        _rows(m, "y", a.y, rows, _OF_ROUTE)
    if a.recv_weights is not None:
        _tensor(m, "recv_weights", a.recv_weights, m.weights_dtype, (rows,), _ONE)


def flight(number: Any) -> None:
    """Check the flight of a split operation."""
    if number not in range(FLIGHTS):
        raise ValueError(
            f"flight is {number}; allowed: 0..{FLIGHTS - 1}, since {FLIGHTS} split operations of a communicator can be"
            " in progress at once"
        )


def empty_rows(m: Member, num_rows: int) -> None:
    """Check the number of rows of :meth:`Communicator.empty_rows`."""
    if not 0 <= whole("num_rows", num_rows) <= m.symmetric_rows:
        raise ValueError(f"num_rows is {num_rows}; allowed: 0..{m.symmetric_rows}, the symmetric_rows of {m.name!r}")


def problem_of_formats(formats: Sequence[tuple[str, str]]) -> str | None:
    """Return what is wrong with the formats of a warmup, or None."""
    try:
        for one in formats:
            if isinstance(one, str) or len(one) != 2:
                return f"formats has {one!r}; allowed: pairs (format, scales_as), such as ('e4m3/128/pow2', 'columns')"
            name, scales_as = one
            layout_of(format_of(name), scales_as)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- communicator and ints


def _same_sizes(comm: Member, num_local_experts: int, world_size: int) -> None:
    if num_local_experts != comm.num_local_experts:
        own = comm.num_local_experts
        raise ValueError(f"num_local_experts is {num_local_experts}; communicator {comm.name!r} has {own} on this rank")
    if world_size != comm.world_size:
        raise ValueError(f"world_size is {world_size}; communicator {comm.name!r} has {comm.world_size} ranks")


def _alignment(alignment: int) -> None:
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"alignment is {alignment}; allowed: 1..{MAX_ALIGNMENT}")


def _layout(layout: str, alignment: int, slots: int) -> None:
    _alignment(alignment)
    if layout == TOKEN_MAJOR and alignment != 1:
        raise ValueError(f"alignment is {alignment}; allowed with layout {TOKEN_MAJOR!r}: 1 (it has no segments)")
    if layout != PADDED:
        if slots:
            raise ValueError(f"slots is {slots}, with layout {layout!r}; allowed: 0 (only layout {PADDED!r} has slots)")
    elif slots <= 0 or slots % alignment:
        raise ValueError(
            f"slots is {slots}, with layout {PADDED!r}; allowed: positive multiples of alignment {alignment}"
        )


def _rows_asked(comm: Member, capacity: int, alignment: int, slots: int) -> None:
    if not 0 <= capacity < INT32_LIMIT:
        raise ValueError(f"capacity is {capacity}; allowed: 0..2**31 - 1")
    if capacity % alignment:
        raise ValueError(f"capacity is {capacity}; allowed: a multiple of alignment {alignment}")
    if slots and capacity != comm.num_local_experts * slots:
        raise ValueError(
            f"capacity is {capacity}; allowed with slots {slots}: num_local_experts {comm.num_local_experts} x slots"
            f" = {comm.num_local_experts * slots}"
        )


# ---------------------------------------------------------------------- tensors


def _tokens(comm: Member, a: PlanArgs | AnyDispatch | AnyRouted) -> None:
    """Check ``max_tokens`` and ``topk_idx``."""
    if not 0 <= a.max_tokens <= comm.max_tokens_per_rank:
        raise _wrong_max_tokens(comm, a)
    _tensor(comm, "topk_idx", a.topk_idx, _INT32)
    shape = a.topk_idx.shape
    if len(shape) != 2 or shape[1] != comm.top_k:
        raise ValueError(f"topk_idx has shape {tuple(shape)}; allowed: [T, {comm.top_k}] (top_k of {comm.name!r})")
    if shape[0] > a.max_tokens:
        bound = "max_tokens" if a.max_tokens < comm.max_tokens_per_rank else "max_tokens_per_rank"
        raise ValueError(f"topk_idx has {shape[0]} tokens; allowed: at most {bound} {a.max_tokens}")


def _wrong_max_tokens(comm: Member, a: PlanArgs | AnyDispatch | AnyRouted) -> ValueError:
    return ValueError(f"max_tokens is {a.max_tokens}; allowed: 0..max_tokens_per_rank {comm.max_tokens_per_rank}")


def _of_tokens(comm: Member, a: AnyDispatch) -> None:
    """Check ``x``, its scales and ``topk_weights``."""
    shape = a.topk_idx.shape
    _rows(comm, "x", a.x, shape[0], _OF_IDS, None if a.scales is None else _scaled(comm, a))
    if a.topk_weights is not None:
        _tensor(comm, "topk_weights", a.topk_weights, comm.weights_dtype, shape, "the shape of topk_idx")


def _route(comm: Member, a: AnyRouted, num_rows: int | None = None) -> int:
    """Check the tensors of a route, and ``num_rows`` if it is given. Return the number of rows."""
    try:
        _tensor(comm, "arrivals", a.arrivals, _INT32)
        if a.arrivals.data_ptr() % _PAIR_BYTES:
            raise _misaligned("arrivals", a.arrivals, _PAIR_BYTES)
        shape = a.arrivals.shape
        rows = rows_of(shape[0], comm.world_size) if len(shape) == 1 else -1
        if rows < 0:
            least = size(0, comm.world_size)
            raise ValueError(
                f"arrivals has shape {tuple(shape)}; allowed: [4 R + {least}] for R rows (world_size"
                f" {comm.world_size} + 3)"
            )
        if num_rows is not None and num_rows != rows:
            raise ValueError(f"num_rows is {num_rows}; allowed: {rows} (the rows of the route)")
        _tokens(comm, a)
        _tensor(comm, "send_rows", a.send_rows, _INT32, a.topk_idx.shape, "the shape of topk_idx")
        _tensor(comm, "offs", a.offs, _INT32, (comm.num_local_experts,), "one for each local expert")
        _tensor(comm, "counts", a.counts, _INT32, (comm.num_local_experts,), "one for each local expert")
        _alignment(a.alignment)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}. Pass a route of communicator {comm.name!r}.") from None
    return rows


def _divides(comm: Member, argument: str, form: Format) -> None:
    """Raise ValueError if the communicator's rows cannot be sent in a format."""
    reject_hidden(comm.hidden_size, form)
    if comm.config.backend == "cute" and comm.hidden_size > _MOST_HIDDEN:
        raise ValueError(
            f"{argument} is {form.name!r}, and hidden_size {comm.hidden_size}; allowed on backend 'cute': at most"
            f" {_MOST_HIDDEN}"
        )
    if comm.dtype is torch.float64:
        raise ValueError(
            f"{argument} is {form.name!r}, and rows are torch.float64; allowed: '' (or rows of a narrower dtype)"
        )


def _row_format(comm: Member, s: DispatchSpec) -> None:
    """Check the format of a dispatch that has any."""
    if s.token_major and s.scales_as in LAYOUTS and s.scales_as not in OF_TOKENS:
        allowed = ", ".join(map(repr, OF_TOKENS))
        raise ValueError(f"scales_as is {s.scales_as!r}; allowed for token-major rows: {allowed}, '' for the first")
    if not s.format:
        given = "scales are given" if s.scaled else f"scales_as is {s.scales_as!r}"
        raise ValueError(f"format is '' and {given}; allowed: the format of quantized rows, {_QUANTIZED}")
    form = format_of(s.format)
    layout_of(form, s.scales_as)
    _divides(comm, "format", form)
    if s.scaled and form.wire:
        raise ValueError(f"scales are given, and format is {s.format!r}, which quantizes x itself; allowed: none")


def _scaled(comm: Member, a: AnyDispatch) -> torch.dtype:
    """Check the scales of an x that is quantized already. Return the dtype of its rows."""
    form = format_of(a.format)
    if a.x is not None and a.x.dtype is not ELEMENT:
        raise TypeError(f"x has dtype {a.x.dtype}, and scales are given; allowed: {ELEMENT} (or x without scales)")
    count = a.topk_idx.shape[0]
    shape = (count, per_row(form, comm.hidden_size)) if form.block else (count,)
    assert a.scales is not None
    _tensor(comm, "scales", a.scales, form.scale_dtype, shape, f"of the rows of x in format {a.format!r}")
    return ELEMENT


def _rows(comm: Member, name: str, rows: Tensor, count: int, why: str, dtype: torch.dtype | None = None) -> None:
    """Check rows [count, H] of ``dtype`` (None: the communicator's), which begin at a multiple of 16 bytes."""
    _tensor(comm, name, rows, comm.dtype if dtype is None else dtype, (count, comm.hidden_size), why)
    if rows.data_ptr() % _ROW_BYTES:
        raise _misaligned(name, rows, _ROW_BYTES)


def _misaligned(name: str, tensor: Tensor, unit: int) -> ValueError:
    return ValueError(
        f"{name} begins at address {tensor.data_ptr():#x} (storage_offset {tensor.storage_offset()}); allowed:"
        f" multiples of {unit} bytes, as of {name}.clone()"
    )


def _tensor(
    comm: Member, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None, why: str = ""
) -> None:
    """Check a tensor, which must be contiguous. ``shape`` None: the caller checks it."""
    if tensor is None:  # PyTorch accepts it where a schema says Tensor
        raise wrong_type(name, tensor, Tensor)
    if tensor.layout is not _STRIDED or tensor.is_nested:  # it may have neither sizes nor strides
        raise ValueError(f"{name} is {described(tensor)}; allowed: an ordinary (strided) tensor")
    if tensor.dtype is not dtype:
        also = ", or torch.int64 in methods of Communicator" if name == "topk_idx" else ""
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}{also}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {list(shape)} ({why})")
    if tensor.device != comm.device:
        raise ValueError(f"{name} is on {tensor.device}; communicator {comm.name!r} is on {comm.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: contiguous")
