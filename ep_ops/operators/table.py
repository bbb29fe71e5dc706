"""Every operator, once: from this table come registration, gradients, the tests' cases and the documentation's table.

All are functional: they mutate nothing, and every output is fresh memory. A communicator goes by its name (``comm``),
state lives behind that name, and each int that sets the size of an output is an argument: compiled graphs, their
caches and exported programs depend on nothing else.

T tokens of this rank, K top_k, H hidden size, R rows, W ranks, El local experts. x, y, out and their gradients are
[., H] of the communicator's dtype, as is the residual, weights and their gradients float32 (float64 with float64
rows), everything else int32 (see ``ep_ops.backends.reference`` for what the values mean). Optional results that were
not asked for have shape [0]. A dispatch with a ``format`` takes and returns quantised rows and their scales
(docs/formats.md). ``dispatch_tokens*`` bring token-major rows (docs/token-major.md): R counts copies, recv_weights and
its gradient are [R, K]; everything that runs along a route takes theirs as any other.

``*_start`` and ``*_wait``, called with the same arguments, are a split operation. The ticket between them holds nothing
(float32 [0]): it tells whoever orders operators that the one follows the other, and autograd passes through it, so that
the gradient of a wait starts and the gradient of a start waits. A gradient's wait knows sizes alone; ``given`` is what
its start was given, which must live as long. ``flight`` says which of the operations under way it is (docs/overlap.md).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meta_kernels

from .. import checks
from ..backends.base import Backend
from ..config import Member
from ..records import NO_SCALES, Delivery, Route, Sizes
from . import gradients
from .gradients import Gradient


@dataclass(frozen=True)
class Operator:
    """What there is to say of ``torch.ops.ep.<name>``.

    ``check``, ``run`` and ``fake`` take the operator's arguments as a record with the schema's names.
    """

    name: str
    schema: str
    does: str  # a sentence for the documentation
    check: Callable[[Member, Any], None]  # TypeError or ValueError for what cannot be taken
    run: Callable[[Backend, Any], Any]
    fake: Callable[[Any], Any]
    gradient: Gradient | None = None
    starts: str | None = None  # the operator that this one ends, where it is the wait of a split operation
    exact: bool = False  # sizes of outputs depend on data: waits for the device

    @functools.cached_property
    def arguments(self) -> Any:
        """The record (a named tuple) of the operator's arguments, in schema order."""
        arguments = torch._C.parse_schema(f"ep::{self.name}{self.schema}").arguments
        defaults = [a.default_value for a in arguments if a.has_default_value()]
        return collections.namedtuple(self.name, [a.name for a in arguments], defaults=defaults)

    @property
    def overload(self) -> torch._ops.OpOverload:
        """``torch.ops.ep.<name>.default``, once it is registered."""
        return getattr(torch.ops.ep, self.name).default


_new = tuple.__new__
"""Makes records as their own constructors do, in a third of the time. It is part of every step of a decoder."""


def route(a: Any, num_rows: int, slots: int = 0) -> Route:
    """The route among the arguments of an operator that follows a known one."""
    along = a.topk_idx, a.send_rows, a.arrivals, a.offs, a.counts, a.alignment, num_rows, a.max_tokens
    return _new(Route, (*along, None, slots, False))


def route_of(y: Tensor, along: tuple[Any, ...]) -> Route:
    """The route that fills the rows ``y``; ``along``: its tensors, alignment and max_tokens."""
    return _new(Route, (*along[:6], y.size(0), along[6], None, 0, False))


def _given_rows(a: Any) -> int:
    """Rows of the gradients that are given."""
    return a.grad_recv_weights.shape[0] if a.grad_recv_x is None else a.grad_recv_x.shape[0]


_UNDEFINED = (Delivery(zeros=False),)


def delivery(a: Any) -> tuple[Delivery, ...]:
    """What a backend is told besides, where rows do not arrive as they were given: the last argument of a dispatch."""
    if a.format:
        return (Delivery(a.scales, a.format, a.scales_as, a.zeros),)
    return () if a.zeros else _UNDEFINED


def arrived(a: Any, run: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """What a backend's dispatch gives, with recv_scales behind recv_x: it gives them if it is told of a delivery."""
    if a.format:
        return run(*args, *delivery(a))
    if not a.zeros:
        return run(*args, *_UNDEFINED)
    out = run(*args)
    recv_x = out[0]
    return (recv_x, NO_SCALES[recv_x.device], *out[1:])


def _copies(a: Any) -> Sizes:
    """The sizes of a token-major dispatch."""
    return _new(Sizes, (a.capacity, 1, 0, a.max_tokens))


def _formatted(a: Any) -> tuple[Delivery, ...]:
    """`delivery` of a token-major dispatch, whose rows have no padding."""
    return (Delivery(a.scales, a.format, a.scales_as),) if a.format else ()


def copied(a: Any, run: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """`arrived` of a token-major dispatch."""
    if a.format:
        return run(*args, *_formatted(a))
    recv_x, *others = run(*args)
    return (recv_x, NO_SCALES[recv_x.device], *others)


_ROUTE = "Tensor topk_idx, Tensor send_rows, Tensor arrivals, Tensor offs, Tensor counts"
_COMM = "int num_local_experts, int world_size, str comm"
_PLANNED = "Tensor send_rows, Tensor arrivals, Tensor offs, Tensor counts, Tensor dropped"
_ALONG = "int alignment, SymInt max_tokens, str comm"  # ends the arguments along a known route
_TOKENS = "Tensor x, Tensor? topk_weights, Tensor topk_idx"
_SIZES = "SymInt capacity, int alignment, SymInt slots, SymInt max_tokens"
_DELIVERY = 'Tensor? scales=None, str format="", str scales_as="", bool zeros=True'
_ARRIVED = "Tensor recv_x, Tensor recv_scales, Tensor recv_weights"
_DISPATCHED = f"({_ARRIVED}, {_PLANNED})"
_SCALES = 'Tensor? scales=None, str format="", str scales_as=""'
_TOKENS_DISPATCHED = f"({_ARRIVED}, {_PLANNED}, Tensor recv_idx)"
_COMBINE = f"Tensor y, Tensor? recv_weights, {_ROUTE}, {_ALONG}"
_FLIGHT = "int flight=0"
_GRADIENTS = f"Tensor? grad_recv_x, Tensor? grad_recv_weights, {_ROUTE}, {_ALONG}"
_TO_TOKENS = "(Tensor grad_x, Tensor grad_topk_weights)"
_WAIT = "Tensor ticket, Tensor[] given, ScalarType dtype"  # of a gradient
_TOKENS_WAIT = f"({_WAIT}, SymInt tokens, SymInt hidden, int top_k, str comm, {_FLIGHT}) -> {_TO_TOKENS}"
_COMBINE_GRADIENTS = f"Tensor grad_out, Tensor? y, Tensor? recv_weights, {_ROUTE}, SymInt num_rows, {_ALONG}"
_TO_ROWS = "(Tensor grad_y, Tensor grad_recv_weights)"

OPERATORS: tuple[Operator, ...] = (
    Operator(
        "plan",
        f"(Tensor topk_idx, {_SIZES}, {_COMM}) -> ({_PLANNED})",
        "the route alone: what goes where, as int32 tensors",
        checks.plan,
        lambda backend, a: backend.plan(a.topk_idx, _new(Sizes, a[1:5])),
        meta_kernels.plan,
    ),
    Operator(
        "dispatch",
        f"({_TOKENS}, {_SIZES}, {_COMM}, {_DELIVERY}) -> {_DISPATCHED}",
        "x [T, H] and weights [T, K] → rows [R, H] grouped by local expert, R fixed by the caller; no host"
        " synchronisation on GPUs",
        checks.dispatch,
        lambda backend, a: arrived(a, backend.dispatch, a.x, a.topk_weights, a.topk_idx, _new(Sizes, a[3:7])),
        meta_kernels.dispatch,
        gradients.OF_DISPATCH,
    ),
    Operator(
        "dispatch_dynamic",
        f"({_TOKENS}, int alignment, SymInt max_tokens, {_COMM}, {_DELIVERY}) -> {_DISPATCHED}",
        "the same with R exactly as large as needed; synchronises once",
        checks.dispatch_dynamic,
        lambda backend, a: arrived(
            a, backend.dispatch_dynamic, a.x, a.topk_weights, a.topk_idx, a.alignment, a.max_tokens
        ),
        meta_kernels.dispatch_dynamic,
        gradients.OF_DISPATCH,
        exact=True,
    ),
    Operator(
        "dispatch_planned",
        f"(Tensor x, Tensor? topk_weights, {_ROUTE}, SymInt num_rows, {_ALONG}, {_DELIVERY}, SymInt slots=0)"
        f" -> ({_ARRIVED})",
        "dispatch along a known route",
        checks.dispatch_planned,
        lambda backend, a: arrived(a, backend.dispatch_planned, a.x, a.topk_weights, route(a, a.num_rows, a.slots)),
        meta_kernels.dispatch_planned,
        gradients.OF_DISPATCH,
    ),
    Operator(
        "combine",
        f'({_COMBINE}, Tensor? residual=None, str grad_format="") -> Tensor out',
        "rows [R, H] → [T, H]: weighted by the row's weight and added up in a fixed order, with a residual last if one"
        " is given; its gradient may travel in a format",
        checks.combine,
        lambda backend, a: backend.combine(a.y, a.recv_weights, route_of(a.y, a[2:9]), a.residual),
        meta_kernels.combine,
        gradients.OF_COMBINE,
    ),
    Operator(
        "combine_gathered",
        f"(Tensor y, {_ROUTE}, {_ALONG}) -> Tensor out",
        "combine without weights, of rows in `Communicator.empty_rows`, or copied there: owners fetch them",
        checks.combine_gathered,
        lambda backend, a: backend.combine_gathered(a.y, route_of(a.y, a[1:8])),
        meta_kernels.combine,
        gradients.OF_GATHERED,
    ),
    Operator(
        "dispatch_backward",
        f"({_GRADIENTS}) -> {_TO_TOKENS}",
        "the gradients of a dispatch",
        checks.dispatch_backward,
        lambda backend, a: backend.dispatch_backward(a.grad_recv_x, a.grad_recv_weights, route(a, _given_rows(a))),
        meta_kernels.dispatch_backward,
    ),
    Operator(
        "combine_backward",
        f"({_COMBINE_GRADIENTS}) -> {_TO_ROWS}",
        "the gradients of a combine",
        checks.combine_backward,
        lambda backend, a: backend.combine_backward(a.grad_out, a.y, a.recv_weights, route(a, a.num_rows)),
        meta_kernels.combine_backward,
    ),
    Operator(
        "dispatch_start",
        f"({_TOKENS}, {_SIZES}, {_COMM}, {_DELIVERY}, {_FLIGHT}) -> Tensor ticket",
        "the start of a dispatch: what stands between start and wait runs beside it",
        checks.dispatch_start,
        lambda backend, a: backend.dispatch_start(
            a.flight, a.x, a.topk_weights, a.topk_idx, _new(Sizes, a[3:7]), *delivery(a)
        ),
        meta_kernels.dispatch_start,
        gradients.OF_DISPATCH_START,
    ),
    Operator(
        "dispatch_wait",
        f"(Tensor ticket, {_TOKENS}, {_SIZES}, {_COMM}, {_DELIVERY}, {_FLIGHT}) -> {_DISPATCHED}",
        "the wait of a dispatch: returns what the whole one does",
        checks.dispatch_wait,
        lambda backend, a: arrived(
            a, backend.dispatch_wait, a.flight, a.x, a.topk_weights, a.topk_idx, _new(Sizes, a[4:8])
        ),
        meta_kernels.dispatch,
        gradients.OF_DISPATCH_WAIT,
        starts="dispatch_start",
    ),
    Operator(
        "dispatch_backward_start",
        f"({_GRADIENTS}, {_FLIGHT}) -> Tensor ticket",
        "the start of a dispatch's gradients",
        checks.dispatch_backward_start,
        lambda backend, a: backend.dispatch_backward_start(
            a.flight, a.grad_recv_x, a.grad_recv_weights, route(a, _given_rows(a))
        ),
        meta_kernels.dispatch_backward_start,
    ),
    Operator(
        "dispatch_backward_wait",
        _TOKENS_WAIT,
        "their wait",
        checks.backward_wait,
        lambda backend, a: backend.backward_wait(
            a.flight, "dispatch_backward", functools.partial(meta_kernels.dispatch_backward_wait, a)
        ),
        meta_kernels.dispatch_backward_wait,
        starts="dispatch_backward_start",
    ),
    Operator(
        "combine_start",
        f"({_COMBINE}, {_FLIGHT}) -> Tensor ticket",
        "the start of a combine",
        checks.combine_start,
        lambda backend, a: backend.combine_start(a.flight, a.y, a.recv_weights, route_of(a.y, a[2:9])),
        meta_kernels.combine_start,
        gradients.OF_COMBINE_START,
    ),
    Operator(
        "combine_wait",
        f"(Tensor ticket, {_COMBINE}, {_FLIGHT}) -> Tensor out",
        "the wait of a combine: returns what the whole one does",
        checks.combine_start,
        lambda backend, a: backend.combine_wait(a.flight, a.y, a.recv_weights, route_of(a.y, a[3:10])),
        meta_kernels.combine,
        gradients.OF_COMBINE_WAIT,
        starts="combine_start",
    ),
    Operator(
        "combine_backward_start",
        f"({_COMBINE_GRADIENTS}, {_FLIGHT}) -> Tensor ticket",
        "the start of a combine's gradients",
        checks.combine_backward_start,
        lambda backend, a: backend.combine_backward_start(
            a.flight, a.grad_out, a.y, a.recv_weights, route(a, a.num_rows)
        ),
        meta_kernels.combine_backward_start,
    ),
    Operator(
        "combine_backward_wait",
        f"({_WAIT}, SymInt num_rows, SymInt hidden, bool scalars, str comm, {_FLIGHT}) -> {_TO_ROWS}",
        "their wait",
        checks.backward_wait,
        lambda backend, a: backend.backward_wait(
            a.flight, "combine_backward", functools.partial(meta_kernels.combine_backward_wait, a)
        ),
        meta_kernels.combine_backward_wait,
        starts="combine_backward_start",
    ),
    Operator(
        "dispatch_tokens",
        f"({_TOKENS}, SymInt capacity, SymInt max_tokens, {_COMM}, {_SCALES}) -> {_TOKENS_DISPATCHED}",
        "x [T, H] and weights [T, K] → token-major rows: one [R, H] for each token that has an expert here, with local"
        " ids and weights [R, K]; combines take its route",
        checks.dispatch_tokens,
        lambda backend, a: copied(a, backend.dispatch_tokens, a.x, a.topk_weights, a.topk_idx, _copies(a)),
        meta_kernels.dispatch_tokens,
        gradients.OF_DISPATCH_TOKENS,
    ),
    Operator(
        "dispatch_tokens_dynamic",
        f"({_TOKENS}, SymInt max_tokens, {_COMM}, {_SCALES}) -> {_TOKENS_DISPATCHED}",
        "the same with R exactly as large as needed; synchronises once",
        checks.dispatch_tokens_dynamic,
        lambda backend, a: copied(a, backend.dispatch_tokens_dynamic, a.x, a.topk_weights, a.topk_idx, a.max_tokens),
        meta_kernels.dispatch_tokens_dynamic,
        gradients.OF_DISPATCH_TOKENS,
        exact=True,
    ),
    Operator(
        "dispatch_tokens_planned",
        f"(Tensor x, Tensor? topk_weights, {_ROUTE}, SymInt num_rows, {_ALONG}, {_SCALES}) -> ({_ARRIVED})",
        "token-major dispatch along the route of an earlier one",
        checks.dispatch_tokens_planned,
        lambda backend, a: copied(a, backend.dispatch_tokens_planned, a.x, a.topk_weights, route(a, a.num_rows)),
        meta_kernels.dispatch_tokens_planned,
        gradients.OF_DISPATCH_TOKENS,
    ),
    Operator(
        "dispatch_tokens_backward",
        f"({_GRADIENTS}) -> {_TO_TOKENS}",
        "the gradients of a token-major dispatch",
        checks.dispatch_tokens_backward,
        lambda backend, a: backend.dispatch_tokens_backward(
            a.grad_recv_x, a.grad_recv_weights, route(a, _given_rows(a))
        ),
        meta_kernels.dispatch_backward,
    ),
    Operator(
        "dispatch_tokens_start",
        f"({_TOKENS}, SymInt capacity, SymInt max_tokens, {_COMM}, {_SCALES}, {_FLIGHT}) -> Tensor ticket",
        "the start of a token-major dispatch",
        checks.dispatch_tokens_start,
        lambda backend, a: backend.dispatch_tokens_start(
            a.flight, a.x, a.topk_weights, a.topk_idx, _copies(a), *_formatted(a)
        ),
        meta_kernels.dispatch_start,
        gradients.OF_DISPATCH_TOKENS_START,
    ),
    Operator(
        "dispatch_tokens_wait",
        f"(Tensor ticket, {_TOKENS}, SymInt capacity, SymInt max_tokens, {_COMM}, {_SCALES}, {_FLIGHT})"
        f" -> {_TOKENS_DISPATCHED}",
        "the wait of a token-major dispatch: returns what the whole one does",
        checks.dispatch_tokens_start,
        lambda backend, a: copied(
            a, backend.dispatch_tokens_wait, a.flight, a.x, a.topk_weights, a.topk_idx, _copies(a)
        ),
        meta_kernels.dispatch_tokens,
        gradients.OF_DISPATCH_TOKENS_WAIT,
        starts="dispatch_tokens_start",
    ),
    Operator(
        "dispatch_tokens_backward_start",
        f"({_GRADIENTS}, {_FLIGHT}) -> Tensor ticket",
        "the start of a token-major dispatch's gradients",
        checks.dispatch_tokens_backward_start,
        lambda backend, a: backend.dispatch_tokens_backward_start(
            a.flight, a.grad_recv_x, a.grad_recv_weights, route(a, _given_rows(a))
        ),
        meta_kernels.dispatch_backward_start,
    ),
    Operator(
        "dispatch_tokens_backward_wait",
        _TOKENS_WAIT,
        "their wait",
        checks.backward_wait,
        lambda backend, a: backend.backward_wait(
            a.flight, "dispatch_tokens_backward", functools.partial(meta_kernels.dispatch_backward_wait, a)
        ),
        meta_kernels.dispatch_backward_wait,
        starts="dispatch_tokens_backward_start",
    ),
)


def markdown() -> str:
    """The table of operators as the documentation shows it."""
    lines = ["| operator (`torch.ops.ep`) | does | gradient |", "|---|---|---|"]
    for op in OPERATORS:
        gradient = "none" if op.gradient is None else " or ".join(f"`{name}`" for name in op.gradient.operators)
        lines.append(f"| `{op.name}` | {op.does} | {gradient} |")
    return "\n".join(lines)
