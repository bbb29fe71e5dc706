"""The arguments of every ``ep`` operator as typed records, in the order of its schema, which is derived from them.

T tokens of this rank, K top_k, H hidden size, R rows of the receive buffer, W ranks, El local experts.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

Size = Annotated[int, "SymInt"]
"""An int that may be symbolic while a function is traced."""

GROUPED, TOKEN_MAJOR = "grouped", "token_major"
"""Layouts of received rows: sorted by expert, or one row for each (token, rank)."""


class PlanArgs(NamedTuple):
    """Arguments of ``ep::plan``."""

    topk_idx: Tensor
    capacity: Size
    alignment: int
    slots: Size
    max_tokens: Size
    num_local_experts: int
    world_size: int
    comm: str
    layout: str = GROUPED


class DispatchArgs(NamedTuple):
    """Arguments of ``ep::dispatch``."""

    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor
    capacity: Size
    alignment: int
    slots: Size
    max_tokens: Size
    num_local_experts: int
    world_size: int
    comm: str
    layout: str = GROUPED
    scales: Tensor | None = None
    format: str = ""
    scales_as: str = ""
    zeros: bool = True


class DispatchDynamicArgs(NamedTuple):
    """Arguments of ``ep::dispatch_dynamic``, whose number of rows depends on data."""

    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor
    alignment: int
    max_tokens: Size
    num_local_experts: int
    world_size: int
    comm: str
    layout: str = GROUPED
    scales: Tensor | None = None
    format: str = ""
    scales_as: str = ""
    zeros: bool = True


class DispatchPlannedArgs(NamedTuple):
    """Arguments of ``ep::dispatch_planned``, along an existing route."""

    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    num_rows: Size
    alignment: int
    max_tokens: Size
    comm: str
    layout: str = GROUPED
    slots: Size = 0
    scales: Tensor | None = None
    format: str = ""
    scales_as: str = ""
    zeros: bool = True


class DispatchStartArgs(NamedTuple):
    """Arguments of ``ep::dispatch_start``."""

    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor
    capacity: Size
    alignment: int
    slots: Size
    max_tokens: Size
    num_local_experts: int
    world_size: int
    comm: str
    layout: str = GROUPED
    scales: Tensor | None = None
    format: str = ""
    scales_as: str = ""
    zeros: bool = True
    flight: int = 0


class DispatchWaitArgs(NamedTuple):
    """Arguments of ``ep::dispatch_wait``: the ticket of the start, and its arguments."""

    ticket: Tensor
    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor
    capacity: Size
    alignment: int
    slots: Size
    max_tokens: Size
    num_local_experts: int
    world_size: int
    comm: str
    layout: str = GROUPED
    scales: Tensor | None = None
    format: str = ""
    scales_as: str = ""
    zeros: bool = True
    flight: int = 0


class CombineArgs(NamedTuple):
    """Arguments of ``ep::combine``."""

    y: Tensor
    recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    alignment: int
    max_tokens: Size
    comm: str
    residual: Tensor | None = None
    grad_format: str = ""
    format: str = ""


class CombineStartArgs(NamedTuple):
    """Arguments of ``ep::combine_start``."""

    y: Tensor
    recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    alignment: int
    max_tokens: Size
    comm: str
    flight: int = 0
    format: str = ""


class CombineWaitArgs(NamedTuple):
    """Arguments of ``ep::combine_wait``: the ticket of the start, and its arguments."""

    ticket: Tensor
    y: Tensor
    recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    alignment: int
    max_tokens: Size
    comm: str
    flight: int = 0
    format: str = ""


class CombineGatheredArgs(NamedTuple):
    """Arguments of ``ep::combine_gathered``."""

    y: Tensor
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    alignment: int
    max_tokens: Size
    comm: str


class DispatchBackwardArgs(NamedTuple):
    """Arguments of ``ep::dispatch_backward``."""

    grad_recv_x: Tensor | None
    grad_recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    alignment: int
    max_tokens: Size
    comm: str
    layout: str = GROUPED


class DispatchBackwardStartArgs(NamedTuple):
    """Arguments of ``ep::dispatch_backward_start``."""

    grad_recv_x: Tensor | None
    grad_recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    alignment: int
    max_tokens: Size
    comm: str
    layout: str = GROUPED
    flight: int = 0


class DispatchBackwardWaitArgs(NamedTuple):
    """Arguments of ``ep::dispatch_backward_wait``. ``given`` keeps the tensors of the start alive."""

    ticket: Tensor
    given: list[Tensor]
    dtype: torch.dtype
    tokens: Size
    hidden: Size
    top_k: int
    comm: str
    flight: int = 0


class CombineBackwardArgs(NamedTuple):
    """Arguments of ``ep::combine_backward``."""

    grad_out: Tensor
    y: Tensor | None
    recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    num_rows: Size
    alignment: int
    max_tokens: Size
    comm: str


class CombineBackwardStartArgs(NamedTuple):
    """Arguments of ``ep::combine_backward_start``."""

    grad_out: Tensor
    y: Tensor | None
    recv_weights: Tensor | None
    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    num_rows: Size
    alignment: int
    max_tokens: Size
    comm: str
    flight: int = 0


class CombineBackwardWaitArgs(NamedTuple):
    """Arguments of ``ep::combine_backward_wait``. ``given`` keeps the tensors of the start alive."""

    ticket: Tensor
    given: list[Tensor]
    dtype: torch.dtype
    num_rows: Size
    hidden: Size
    scalars: bool
    comm: str
    flight: int = 0


AnySizedDispatch = DispatchArgs | DispatchStartArgs | DispatchWaitArgs
"""Arguments of a dispatch along a new route of a given capacity."""
AnyDispatch = AnySizedDispatch | DispatchDynamicArgs | DispatchPlannedArgs
AnyCombine = CombineArgs | CombineStartArgs | CombineWaitArgs
AnyDispatchBackward = DispatchBackwardArgs | DispatchBackwardStartArgs
AnyCombineBackward = CombineBackwardArgs | CombineBackwardStartArgs
AnyRouted = DispatchPlannedArgs | AnyCombine | CombineGatheredArgs | AnyDispatchBackward | AnyCombineBackward
"""Arguments that contain the tensors of a route."""
AnyStart = DispatchStartArgs | CombineStartArgs | DispatchBackwardStartArgs | CombineBackwardStartArgs
"""Arguments of the start of a split operation."""
Args = PlanArgs | AnyDispatch | AnyRouted | DispatchBackwardWaitArgs | CombineBackwardWaitArgs

_NAMES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", list[Tensor]: "Tensor[]", Size: "SymInt", int: "int", str: "str",
    bool: "bool", torch.dtype: "ScalarType",
}  # fmt: skip


def schema_of(hints: dict[str, Any], defaults: dict[str, Any]) -> str:
    """Return the arguments of a schema, in parentheses, from the annotations and defaults of a record's fields."""
    return f"({', '.join(_argument(name, kind, defaults) for name, kind in hints.items())})"


def _argument(name: str, kind: Any, defaults: dict[str, Any]) -> str:
    if name not in defaults:
        return f"{_NAMES[kind]} {name}"
    default = defaults[name]
    text = f'"{default}"' if isinstance(default, str) else str(default)
    return f"{_NAMES[kind]} {name}={text}"
