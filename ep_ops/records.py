"""Records that functions pass to each other.

Shapes: W ranks, T tokens of this rank, K = top_k, H hidden size, El local experts, R rows of the receive buffer,
C = min(K, W), the largest number of ranks that a token is sent to.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meta_kernels.arguments import (
    GROUPED,
    TOKEN_MAJOR,
    AnyDispatchBackward,
    AnyRouted,
    AnySizedDispatch,
    CombineStartArgs,
    DispatchDynamicArgs,
    DispatchStartArgs,
    PlanArgs,
)

from . import arrivals as lists
from .formats.groups import Segments

MAX_ALIGNMENT = 1024
FLIGHTS = 2
"""Number of split operations of a communicator that can be in progress at once: one for each bank of staging."""
INT32_LIMIT = 2**31
UNKNOWN_ROW = INT32_LIMIT - 1
"""Value in ``send_rows``: there is a row, and its index at its rank is not known here."""


PADDED = "padded"
ROW_LAYOUTS = GROUPED, PADDED, TOKEN_MAJOR
"""Order of received rows. Grouped: one segment for each local expert. Padded: [El, slots, H]. Token-major: one row for
each (token, rank)."""
DISTINCT = "distinct"
"""Layout that operators take for grouped rows if the caller sets no size of the receive buffer. The buffer has room for
tokens whose ids are distinct. An id that repeats within a token is invalid, and its later entries are not sent."""
UNBOUNDED = -1
"""Value of a capacity: as many rows as are received."""


class NoElements(dict[torch.device, Tensor]):
    """An empty tensor for each device, returned for outputs that were not requested.

    All calls return the same tensor, because creating one takes a noticeable part of a decode step.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __missing__(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # an inference tensor could not be used in autograd
            made = self[device] = torch.empty(0, dtype=self._dtype, device=device)
        return made


NO_SCALES = NoElements(torch.float32)
NO_IDS = NoElements(torch.int32)


class Placed(NamedTuple):
    """Result of a plan: int32 tensors."""

    send_rows: Tensor  # [T, K] row at the destination rank, -1 where there is none or it was dropped
    arrivals: Tensor  # [4 R + W + 3] what arrives here: three lists (ep_ops.arrivals)
    offs: Tensor  # [El] end of each local expert's segment, padded to the alignment
    counts: Tensor  # [El] kept rows of each local expert
    dropped: Tensor  # [El] rows routed here that did not fit
    recv_idx: Tensor  # token-major: [R, K] the local expert of each (row, k), -1 if it is on another rank; else [0]


class Received(NamedTuple):
    """Result of a dispatch along an existing route."""

    recv_x: Tensor  # [R, H]
    recv_scales: Tensor  # in the requested layout; [0] if rows have none
    recv_weights: Tensor  # [R], token-major [R, K]; [0] where no weights were given


class DispatchTensors(NamedTuple):
    """Results of the dispatch operators: the fields of :class:`Received`, then those of :class:`Placed`."""

    recv_x: Tensor
    recv_scales: Tensor
    recv_weights: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    dropped: Tensor
    recv_idx: Tensor

    @property
    def placed(self) -> Placed:
        """Return the fields of :class:`Placed`."""
        return Placed(self.send_rows, self.arrivals, self.offs, self.counts, self.dropped, self.recv_idx)


class Route(NamedTuple):
    """The route of a plan or dispatch: int32 tensors that say where each row goes, and the sizes of the plan."""

    topk_idx: Tensor  # [T, K] global expert id, -1 none
    send_rows: Tensor  # [T, K] row at the destination rank, -1 where there is none or it was dropped
    arrivals: Tensor  # [4 R + W + 3] what arrives here: three lists (ep_ops.arrivals)
    offs: Tensor  # [El] end of each local expert's segment, padding included; token-major: cumulative counts
    counts: Tensor  # [El] kept rows of each local expert; token-major: number of (row, k) that name it
    alignment: int  # segments are padded to a multiple of it
    num_rows: int  # R: rows of the receive buffer
    max_tokens: int  # bound on T, equal on all ranks
    batch: tuple[int, ...] | None = None  # shape of the tokens without H, if it has several dimensions
    slots: int = 0  # padded layout: rows of each local expert; 0 for other layouts
    layout: str = GROUPED  # one of ROW_LAYOUTS; token-major: send_rows at the first k that names a rank, alignment 1
    dropped: Tensor | None = None  # [El] rows routed here that did not fit; None inside operators
    local_idx: Tensor | None = None  # token-major: [R, K] the local expert of each (row, k), else -1

    @property
    def ints(self) -> tuple[int, int]:
        """Return alignment and max_tokens, for operators that do not take ``num_rows``."""
        return self.alignment, self.max_tokens

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors in the order of the operators' arguments."""
        return self.topk_idx, self.send_rows, self.arrivals, self.offs, self.counts

    @property
    def copies(self) -> Tensor:
        """Return the copies that have rows on this rank, int32 [R + 1, 2], in the order of (source rank, token).

        A copy is a token that was sent to this rank. Each pair contains the index in ``owned`` where the rows of the
        copy begin, and the home of the copy, ``(source * max_tokens + token) * C + copy number`` (docs/schemas.md).
        The pair after the last copy contains the number of owned rows and an undefined number.
        """
        return lists.views(self.arrivals, self.num_rows).copies

    @property
    def owned(self) -> Tensor:
        """Return the rows that hold a token, int32 [R, 2], in the order of (source rank, token, k).

        Each pair contains the row and the number of its (token, k), ``(source * max_tokens + token) * K + k``. Pairs
        after the last row are undefined.
        """
        return lists.views(self.arrivals, self.num_rows).owned

    @property
    def recv_from(self) -> Tensor:
        """Return the (token, k) of each row, int32 [R], as ``(source * max_tokens + token) * K + k``; -1 for no token.

        Computed on the device at every access, without synchronizing the host.
        """
        return lists.recv_from(self.arrivals, self.num_rows)

    @property
    def sources(self) -> Tensor:
        """Return where each source rank's copies begin in ``copies``, int32 [W + 1]; the last entry is their number."""
        return lists.views(self.arrivals, self.num_rows).sources

    @property
    def segments(self) -> Segments:
        """Return the segments of the local experts. ValueError for token-major rows, which have no segments."""
        if self.layout == TOKEN_MAJOR:
            raise ValueError("token-major rows are not grouped by expert; use ep_ops.nn.expert_lists")
        return Segments(self.offs, self.counts, self.alignment)

    @property
    def psum(self) -> Tensor:
        """Return the end of the kept rows of each local expert, int32 [El], which DeepGEMM calls a psum layout.

        Computed on the device at every access, without synchronizing the host.
        """
        return self.segments.psum

    @property
    def m_indices(self) -> Tensor:
        """Return the local expert of each kept row, and -1 for other rows, int32 [R]: DeepGEMM's ``grouped_layout``.

        Computed on the device at every access, without synchronizing the host.
        """
        return self.segments.m_indices(self.num_rows)


def route_of(placed: Placed, plan: PlanArgs) -> Route:
    """Return the route that a plan with these arguments has placed."""
    tensors = plan.topk_idx, placed.send_rows, placed.arrivals, placed.offs, placed.counts
    num_rows = lists.rows_of(placed.arrivals.numel(), plan.world_size)
    layout = GROUPED if plan.layout == DISTINCT else plan.layout
    return Route(*tensors, plan.alignment, num_rows, plan.max_tokens, None, plan.slots, layout)


def route_in(a: AnyRouted, num_rows: int, layout: str = GROUPED, slots: int = 0) -> Route:
    """Return the route in the arguments of an operator. Combines take no layout, because they do not depend on it."""
    return Route(
        a.topk_idx, a.send_rows, a.arrivals, a.offs, a.counts, a.alignment, num_rows, a.max_tokens, None, slots, layout
    )


def gradient_route(a: AnyDispatchBackward) -> Route:
    """Return the route in the arguments of the gradient of a dispatch, of which one gradient is given."""
    rows = a.grad_recv_weights if a.grad_recv_x is None else a.grad_recv_x
    assert rows is not None
    return route_in(a, rows.shape[0], a.layout)


def plan_in(a: AnySizedDispatch | DispatchDynamicArgs, capacity: int = UNBOUNDED) -> PlanArgs:
    """Return the arguments of the plan of a dispatch along a new route. ``capacity``: that of an exact one."""
    rows, slots = (capacity, 0) if isinstance(a, DispatchDynamicArgs) else (a.capacity, a.slots)
    own = a.num_local_experts, a.world_size, a.comm
    return PlanArgs(a.topk_idx, rows, a.alignment, slots, a.max_tokens, *own, a.layout)


class Dispatched(NamedTuple):
    """Result of a dispatch."""

    x: Tensor  # [R, H] rows in the requested layout; rows that hold no token are undefined
    weights: Tensor | None  # [R] weight of each row; token-major [R, K], 0 where local_idx is -1; None if not given
    route: Route
    dropped: Tensor  # int32 [El] number of rows that did not fit; token-major: of (token, k) of such rows
    scales: Tensor | None = None  # scales of quantized rows, in the requested layout (docs/formats.md)
    local_idx: Tensor | None = None  # token-major: int32 [R, K] local expert of each (row, k), else -1


class StartedDispatch(NamedTuple):
    """A started dispatch. Its tensors must not be modified before the wait."""

    ticket: Tensor
    arguments: DispatchStartArgs
    batch: tuple[int, ...] | None = None  # see Route


class StartedCombine(NamedTuple):
    """A started combine. Its tensors must not be modified before the wait."""

    ticket: Tensor
    arguments: CombineStartArgs
    route: Route


class Operation(NamedTuple):
    """A rank's record of an operation. Times are in seconds of its GPU's clock. Clocks of GPUs may differ, also
    within a host."""

    number: int  # its number on the communicator, starting at 1
    kind: str  # the operator
    scalars: bool  # whether weights, or gradients of weights, were sent
    rows: bool  # whether rows were sent
    latency: bool  # whether it ran on latency kernels
    max_tokens: int  # modulo 2**17
    format: str  # format in which rows were sent; empty: none
    token_major: bool  # its rows are token-major (not known for combines)
    begun: float  # when the rank began it
    met: float | None  # when it had observed that all ranks had begun; None: not yet
    waits: tuple[float, ...] = ()  # for each rank, the longest wait of a thread for it
    unseen: tuple[int, ...] = ()  # ranks not known to have begun it, for the last two operations


_TYPES: dict[type, str] = {Tensor: "a tensor", Route: "a Route, such as the field `route` of a dispatch's result"}


def wrong_type(name: str, given: object, allowed: type | str) -> TypeError:
    """Return the error for an argument that does not have the type ``allowed``, or the one that this text describes."""
    text = allowed if isinstance(allowed, str) else _TYPES.get(allowed) or _with_article(allowed)
    found = "None" if given is None else _with_article(type(given))
    return TypeError(f"{name} is {found}; allowed: {text}")


def _with_article(kind: type) -> str:
    name = kind.__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def whole(name: str, given: Any) -> int:
    """Return an argument that must be an int: the int, or a number of another library. ValueError for anything else."""
    if isinstance(given, torch.SymInt):
        return given  # type: ignore[return-value]
    try:
        number = None if isinstance(given, bool) else operator.index(given)
    except Exception:
        number = None
    if number is None:
        raise ValueError(f"{name} is {given!r}; allowed: an int")
    return number


def is_ordinary(given: object) -> TypeGuard[Tensor]:
    """Return whether an argument is a tensor of this rank with strides: neither nested, sparse nor mkldnn, nor a
    DTensor."""
    if not isinstance(given, Tensor) or isinstance(given, DTensor):
        return False
    return not given.is_nested and given.layout is torch.strided


def described(tensor: Tensor) -> str:
    """Return a text for a tensor that is not ordinary."""
    if isinstance(tensor, DTensor):
        return "a DTensor"
    return "a nested tensor" if tensor.is_nested else f"a tensor with layout {tensor.layout}"


def check_rows_of_experts(layout: object, places: object, redispatch: bool, alignment: int) -> None:
    """Check the arguments ``rows`` (``layout``), ``places`` and ``redispatch`` of layers. ``alignment``: the
    communicator's.

    Raises:
        ValueError: a value is not allowed, or not together with another one.
    """
    if layout not in (GROUPED, TOKEN_MAJOR):
        raise ValueError(f"rows is {layout!r}; allowed: {GROUPED!r}, {TOKEN_MAJOR!r}")
    if layout == GROUPED:
        for name, given in (("places", places), ("redispatch", redispatch or None)):
            if given is not None:
                raise ValueError(f"{name} is {given} with rows {GROUPED!r}; allowed only with rows {TOKEN_MAJOR!r}")
    elif places is not None and (type(places) is not int or places < alignment or places % alignment):
        raise ValueError(f"places is {places!r}; allowed: None, or a positive multiple of alignment {alignment}")


def check_types(allowed: type, **given: object) -> None:
    """Raise TypeError for an argument of another type, such as a ``Dispatched`` in place of one of its fields."""
    for name, one in given.items():
        if not isinstance(one, allowed):
            raise wrong_type(name, one, allowed)
