"""The table of operators. Registration, gradients, test cases and the documentation are derived from it.

All operators are functional: they mutate nothing, and every output is newly allocated. The communicator is passed by
name (``comm``), and each int that sets the size of an output is an argument, so compiled graphs, their caches and
exported programs depend on nothing else.

T tokens of this rank, K top_k, H hidden size, R rows, W ranks, El local experts. x, y, out, residual and their
gradients are [., H] in the communicator's dtype; weights and their gradients are float32 (float64 with float64 rows);
all other tensors are int32 (``ep_ops.backends.reference`` defines their values). Optional results that were not
requested have shape [0]. A dispatch with a ``format`` takes and returns quantized rows and their scales
(docs/formats.md). With ``layout`` "token_major" (docs/token-major.md) R counts copies, and recv_weights, its gradient
and recv_idx are [R, K]. Combines do not depend on the layout.

``*_start`` and ``*_wait``, called with the same arguments, form a split operation. The ticket between them is an empty
tensor, float32 [0]. It orders the two operators, and autograd passes through it, so that the gradient of a wait starts
and the gradient of a start waits. The wait of a gradient takes sizes only; ``given`` keeps the inputs of its start
alive. ``flight`` distinguishes split operations that are in progress at the same time (docs/overlap.md).
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import meta_kernels

from .. import checks
from ..backends.base import Backend
from ..backends.split import parts_of
from ..config import Member
from ..records import GROUPED, UNBOUNDED, Delivery, Placed, Received, Route, Sizes
from . import gradients
from .gradients import Gradient


@dataclass(frozen=True)
class Operator:
    """One operator, ``torch.ops.ep.<name>``. ``check`` and ``given`` take the operator's arguments as a record
    with the schema's names. The function of that name in ``meta_kernels`` is its fake."""

    name: str
    schema: str
    does: str  # a sentence for the documentation
    check: Callable[[Member, Any], None]  # raises TypeError or ValueError; ``flight`` has been checked
    given: Callable[[Any], tuple[Any, ...]]  # the arguments of the backend's method
    gradient: Gradient | None = None
    exact: bool = False  # sizes of outputs depend on data: waits for the device

    @functools.cached_property
    def arguments(self) -> Any:
        """Return the class of the record of the operator's arguments, a named tuple in schema order."""
        arguments = torch._C.parse_schema(f"ep::{self.name}{self.schema}").arguments
        defaults = [a.default_value for a in arguments if a.has_default_value()]
        return collections.namedtuple(self.name, [a.name for a in arguments], defaults=defaults)

    @functools.cached_property
    def run(self) -> Callable[[Backend, Any], Any]:
        """Return what runs the operator on a backend: the method of its name, or the start or wait of that method."""
        (whole, part), given = parts_of(self.name), self.given
        if part:
            return lambda backend, a: getattr(backend, part)(a.flight, whole, *given(a))
        return lambda backend, a: getattr(backend, whole)(*given(a))

    @property
    def starts(self) -> str | None:
        """Return the operator that this one ends, if it is the wait of a split operation."""
        whole, part = parts_of(self.name)
        return f"{whole}_start" if part == "wait" else None

    @property
    def overload(self) -> torch._ops.OpOverload:
        """Return ``torch.ops.ep.<name>.default``, which must be registered."""
        return getattr(torch.ops.ep, self.name).default


_new = tuple.__new__
"""Makes records as their own constructors do, in a third of the time. It is part of every step of a decoder."""


_sizes = operator.attrgetter(*Sizes._fields)
_delivery = operator.attrgetter(*Delivery._fields)
"""What these records take of an operator's arguments, by name. They take a third of the time of a Python function."""


def _accept(comm: Member, a: Any) -> None:
    """Check nothing: the wait of a gradient takes sizes that its start has determined."""


def route(a: Any, num_rows: int, layout: str = GROUPED, slots: int = 0) -> Route:
    """Return the route in the arguments of an operator. Combines take no layout, because they do not depend on it."""
    tensors = a.topk_idx, a.send_rows, a.arrivals, a.offs, a.counts
    return _new(Route, (*tensors, a.alignment, num_rows, a.max_tokens, None, slots, layout, None, None))


# The arguments of backends' methods, from those of operators.


def _sent(a: Any) -> tuple[Any, ...]:
    return a.x, a.topk_weights, a.topk_idx, _new(Sizes, _sizes(a)), _new(Delivery, _delivery(a))


def _sent_exactly(a: Any) -> tuple[Any, ...]:
    sizes = UNBOUNDED, a.alignment, 0, a.max_tokens, a.layout
    return a.x, a.topk_weights, a.topk_idx, _new(Sizes, sizes), _new(Delivery, _delivery(a))


def _returned(a: Any) -> tuple[Any, ...]:
    residual = getattr(a, "residual", None)  # split combines have none
    return a.y, a.recv_weights, route(a, a.y.size(0)), residual, a.format


def _of_rows(a: Any) -> tuple[Any, ...]:
    rows = a.grad_recv_weights if a.grad_recv_x is None else a.grad_recv_x
    return a.grad_recv_x, a.grad_recv_weights, route(a, rows.size(0), a.layout)


def _of_sums(a: Any) -> tuple[Any, ...]:
    return a.grad_out, a.y, a.recv_weights, route(a, a.num_rows)


_ROUTE = "Tensor topk_idx, Tensor send_rows, Tensor arrivals, Tensor offs, Tensor counts"
_LAYOUT = f'str layout="{GROUPED}"'
_COMM = f"int num_local_experts, int world_size, str comm, {_LAYOUT}"
_PLACED = ", ".join(f"Tensor {name}" for name in Placed._fields)
_RECEIVED = ", ".join(f"Tensor {name}" for name in Received._fields)
_DISPATCHED = f"({_RECEIVED}, {_PLACED})"
_ALONG = "int alignment, SymInt max_tokens, str comm"  # ends the arguments along a known route
_TOKENS = "Tensor x, Tensor? topk_weights, Tensor topk_idx"
_SIZES = "SymInt capacity, int alignment, SymInt slots, SymInt max_tokens"
_DELIVERY = 'Tensor? scales=None, str format="", str scales_as="", bool zeros=True'
_COMBINE = f"Tensor y, Tensor? recv_weights, {_ROUTE}, {_ALONG}"
_FLIGHT = "int flight=0"
_SUMS = 'str format=""'  # format in which the sums of a combine are sent
_GRADIENTS = f"Tensor? grad_recv_x, Tensor? grad_recv_weights, {_ROUTE}, {_ALONG}, {_LAYOUT}"
_TO_TOKENS = "(Tensor grad_x, Tensor grad_topk_weights)"
_WAIT = "Tensor ticket, Tensor[] given, ScalarType dtype"  # the wait of a gradient
_COMBINE_GRADIENTS = f"Tensor grad_out, Tensor? y, Tensor? recv_weights, {_ROUTE}, SymInt num_rows, {_ALONG}"
_TO_ROWS = "(Tensor grad_y, Tensor grad_recv_weights)"

OPERATORS: tuple[Operator, ...] = (
    Operator(
        "plan",
        f"(Tensor topk_idx, {_SIZES}, {_COMM}) -> ({_PLACED})",
        "compute a route, without sending rows",
        checks.plan,
        lambda a: (a.topk_idx, _new(Sizes, _sizes(a))),
    ),
    Operator(
        "dispatch",
        f"({_TOKENS}, {_SIZES}, {_COMM}, {_DELIVERY}) -> {_DISPATCHED}",
        "send tokens [T, H] and weights [T, K] to the ranks of their experts; return the received rows [R, H]. The"
        " caller sets R. Does not synchronize the host on GPUs",
        checks.dispatch,
        _sent,
        gradients.OF_DISPATCH,
    ),
    Operator(
        "dispatch_dynamic",
        f"({_TOKENS}, int alignment, SymInt max_tokens, {_COMM}, {_DELIVERY}) -> {_DISPATCHED}",
        "`dispatch` with R equal to the number of rows that arrive; synchronizes the host once",
        checks.dispatch_dynamic,
        _sent_exactly,
        gradients.OF_DISPATCH,
        exact=True,
    ),
    Operator(
        "dispatch_planned",
        f"(Tensor x, Tensor? topk_weights, {_ROUTE}, SymInt num_rows, {_ALONG}, {_LAYOUT}, SymInt slots=0,"
        f" {_DELIVERY}) -> ({_RECEIVED})",
        "`dispatch` along an existing route",
        checks.dispatch_planned,
        lambda a: (a.x, a.topk_weights, route(a, a.num_rows, a.layout, a.slots), _new(Delivery, _delivery(a))),
        gradients.OF_DISPATCH,
    ),
    Operator(
        "combine",
        f'({_COMBINE}, Tensor? residual=None, str grad_format="", {_SUMS}) -> Tensor out',
        "return the outputs of the experts, rows [R, H], to the ranks of their tokens, and return the weighted sum for"
        " each token [T, H], plus an optional residual. The order of summation is fixed. Sums and gradients can be sent"
        " [quantized](formats.md#sums-on-the-wire)",
        checks.combine,
        _returned,
        gradients.OF_COMBINE,
    ),
    Operator(
        "combine_gathered",
        f"(Tensor y, {_ROUTE}, {_ALONG}) -> Tensor out",
        "`combine` without weights. The rank of each token reads the token's rows from symmetric memory"
        " (`Communicator.empty_rows`) on the other ranks",
        checks.combine_gathered,
        lambda a: (a.y, route(a, a.y.size(0))),
        gradients.OF_GATHERED,
    ),
    Operator(
        "dispatch_backward",
        f"({_GRADIENTS}) -> {_TO_TOKENS}",
        "gradients of a dispatch",
        checks.dispatch_backward,
        _of_rows,
    ),
    Operator(
        "combine_backward",
        f"({_COMBINE_GRADIENTS}) -> {_TO_ROWS}",
        "gradients of a combine",
        checks.combine_backward,
        _of_sums,
    ),
    Operator(
        "dispatch_start",
        f"({_TOKENS}, {_SIZES}, {_COMM}, {_DELIVERY}, {_FLIGHT}) -> Tensor ticket",
        "start a dispatch, which then runs concurrently with the current stream",
        checks.dispatch,
        _sent,
        gradients.OF_DISPATCH_START,
    ),
    Operator(
        "dispatch_wait",
        f"(Tensor ticket, {_TOKENS}, {_SIZES}, {_COMM}, {_DELIVERY}, {_FLIGHT}) -> {_DISPATCHED}",
        "finish a started dispatch; return what `dispatch` returns",
        checks.dispatch,
        _sent,
        gradients.OF_DISPATCH_WAIT,
    ),
    Operator(
        "dispatch_backward_start",
        f"({_GRADIENTS}, {_FLIGHT}) -> Tensor ticket",
        "start the gradients of a dispatch",
        checks.dispatch_backward,
        _of_rows,
    ),
    Operator(
        "dispatch_backward_wait",
        f"({_WAIT}, SymInt tokens, SymInt hidden, int top_k, str comm, {_FLIGHT}) -> {_TO_TOKENS}",
        "finish the gradients of a dispatch",
        _accept,
        lambda a: (functools.partial(meta_kernels.dispatch_backward_wait, a),),
    ),
    Operator(
        "combine_start",
        f"({_COMBINE}, {_FLIGHT}, {_SUMS}) -> Tensor ticket",
        "start a combine, which then runs concurrently with the current stream",
        checks.combine,
        _returned,
        gradients.OF_COMBINE_START,
    ),
    Operator(
        "combine_wait",
        f"(Tensor ticket, {_COMBINE}, {_FLIGHT}, {_SUMS}) -> Tensor out",
        "finish a started combine; return what `combine` returns",
        checks.combine,
        _returned,
        gradients.OF_COMBINE_WAIT,
    ),
    Operator(
        "combine_backward_start",
        f"({_COMBINE_GRADIENTS}, {_FLIGHT}) -> Tensor ticket",
        "start the gradients of a combine",
        checks.combine_backward,
        _of_sums,
    ),
    Operator(
        "combine_backward_wait",
        f"({_WAIT}, SymInt num_rows, SymInt hidden, bool scalars, str comm, {_FLIGHT}) -> {_TO_ROWS}",
        "finish the gradients of a combine",
        _accept,
        lambda a: (functools.partial(meta_kernels.combine_backward_wait, a),),
    ),
)


def markdown() -> str:
    """Return the table of operators of docs/operators.md."""
    lines = ["| operator (`torch.ops.ep`) | purpose | gradient |", "|---|---|---|"]
    for op in OPERATORS:
        gradient = "none" if op.gradient is None else " or ".join(f"`{name}`" for name in op.gradient.operators)
        lines.append(f"| `{op.name}` | {op.does} | {gradient} |")
    return "\n".join(lines)
