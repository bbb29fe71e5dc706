"""What functions hand to each other instead of long positional lists.

W ranks, T tokens of this rank, K = top_k, El local experts, R rows, C = min(K, W).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import arrivals as lists
from .formats.groups import Segments

MAX_ALIGNMENT = 1024
FLIGHTS = 2
"""How many split operations of a communicator may be under way at once: as many as staging has banks."""
INT32_LIMIT = 2**31
UNKNOWN_ROW = INT32_LIMIT - 1
"""In ``send_rows``: there is a row, and which one it is at its rank is not known here."""


ROW_LAYOUTS = GROUPED, PADDED, TOKEN_MAJOR = "grouped", "padded", "token_major"
"""The order of received rows. Grouped: segments by local expert, one behind the other. Padded: [El, slots, H].
Token-major: one row for each (token, rank)."""
UNBOUNDED = -1
"""In the place of a capacity: as many rows as are received."""


class Sizes(NamedTuple):
    """How much room a plan has, and how it is laid out."""

    capacity: int  # rows of the receive buffer, a multiple of alignment
    alignment: int  # segments of rows are padded to a multiple of it; token-major: 1
    slots: int  # padded: rows of each local expert, a multiple of alignment; else 0
    max_tokens: int  # bound on T that all ranks share
    layout: str = GROUPED  # one of ROW_LAYOUTS


class Delivery(NamedTuple):
    """How the rows of a dispatch arrive (docs/formats.md)."""

    scales: Tensor | None = None  # of an x that is quantized already, [T, G], or [T] of whole rows
    format: str = ""  # what rows arrive as; empty: as they were given
    scales_as: str = ""  # how the scales of received rows lie; empty: the format's first layout
    zeros: bool = True  # whether padding rows hold zeros; else they are undefined


class NoElements(dict[torch.device, Tensor]):
    """A tensor of no elements for each device: an output that was not asked for. All calls return the same one, because
    making one takes a noticeable part of a decode step."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __missing__(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # else it could be used nowhere else
            made = self[device] = torch.empty(0, dtype=self._dtype, device=device)
        return made


NO_SCALES = NoElements(torch.float32)
NO_IDS = NoElements(torch.int32)


class Placed(NamedTuple):
    """What a plan returns: int32 tensors."""

    send_rows: Tensor  # [T, K] row at the destination rank, -1 where there is none or it was dropped
    arrivals: Tensor  # [4 R + W + 3] what arrives here: three lists, see ep_ops.arrivals
    offs: Tensor  # [El] end of each local expert's segment, padded to the alignment
    counts: Tensor  # [El] kept rows of each local expert
    dropped: Tensor  # [El] rows routed here that did not fit
    recv_idx: (
        Tensor  # token-major: [R, K] the local expert of each (row, k), -1 where it is none of this rank's; else [0]
    )


class Received(NamedTuple):
    """What a dispatch along a known route returns."""

    recv_x: Tensor  # [R, H]
    recv_scales: Tensor  # as the layout of scales has them; [0] where rows have none
    recv_weights: Tensor  # [R], token-major [R, K]; [0] where no weights were given


class DispatchTensors(NamedTuple):
    """What the operators of a dispatch return: the fields of :class:`Received`, then those of :class:`Placed`."""

    recv_x: Tensor
    recv_scales: Tensor
    recv_weights: Tensor
    send_rows: Tensor
    arrivals: Tensor
    offs: Tensor
    counts: Tensor
    dropped: Tensor
    recv_idx: Tensor


class Route(NamedTuple):
    """What goes where: int32 tensors, and what they were planned with."""

    topk_idx: Tensor  # [T, K] global expert id, -1 none
    send_rows: Tensor  # [T, K] row at the destination rank, -1 where there is none or it was dropped
    arrivals: Tensor  # [4 R + W + 3] what arrives here: three lists, see ep_ops.arrivals
    offs: Tensor  # [El] end of each local expert's segment, padded to the alignment; token-major: the sums of counts
    counts: Tensor  # [El] kept rows of each local expert; token-major: of how many (row, k) it is the expert
    alignment: int  # segments are padded to a multiple of it
    num_rows: int  # R: rows of the buffers that it fills, the capacity or what a dynamic dispatch needed
    max_tokens: int  # bound on T that all ranks shared
    batch: tuple[int, ...] | None = None  # what stands for T in the tensors of the model, where that is several numbers
    slots: int = 0  # padded: rows of each local expert; else 0
    layout: str = (
        GROUPED  # of rows, one of ROW_LAYOUTS; token-major: send_rows at the first k that names a rank, alignment 1
    )
    dropped: Tensor | None = None  # [El] rows routed here that did not fit; None where an operator follows the route
    local_idx: Tensor | None = None  # token-major: [R, K] the local expert of each (row, k), -1 where it is none here

    @property
    def ints(self) -> tuple[int, int]:
        """What operators that do not take ``num_rows`` take behind the tensors: alignment, max_tokens."""
        return self.alignment, self.max_tokens

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Without the ints."""
        return self.topk_idx, self.send_rows, self.arrivals, self.offs, self.counts

    @property
    def copies(self) -> Tensor:
        """[R + 1, 2] for each copy, by (source rank, token): where its rows begin in ``owned``, and its home,
        ``(source * max_tokens + token) * C + copy number``. Behind the last: the number of owned rows, and something
        undefined."""
        return lists.views(self.arrivals, self.num_rows).copies

    @property
    def owned(self) -> Tensor:
        """[R, 2] the owned rows in the order of (source rank, token, k): the row, and who asked for it,
        ``(source * max_tokens + token) * K + k``; undefined behind the last."""
        return lists.views(self.arrivals, self.num_rows).owned

    @property
    def recv_from(self) -> Tensor:
        """[R] who asked for each row, ``(source * max_tokens + token) * K + k``; -1 for rows that nobody owns. It is
        worked out at every call, on the device, without waiting for it."""
        return lists.recv_from(self.arrivals, self.num_rows)

    @property
    def sources(self) -> Tensor:
        """[W + 1] where in ``copies`` those of each source rank begin; the last: the number of copies."""
        return lists.views(self.arrivals, self.num_rows).sources

    @property
    def segments(self) -> Segments:
        """The rows of each local expert. ValueError for token-major rows, here and below."""
        if self.layout == TOKEN_MAJOR:
            raise ValueError("token-major rows are not grouped by expert; take ep_ops.nn.expert_lists")
        return Segments(self.offs, self.counts, self.alignment)

    @property
    def psum(self) -> Tensor:
        """int32 [El] where the kept rows of each local expert end: with the alignment, DeepGEMM's layout of that name.
        Worked out at every call, on the device, without waiting for it."""
        return self.segments.psum

    @property
    def m_indices(self) -> Tensor:
        """int32 [R] the local expert of each kept row, -1 for all others: DeepGEMM's ``grouped_layout``. Worked out at
        every call, on the device, without waiting for it."""
        return self.segments.m_indices(self.num_rows)


class Dispatched(NamedTuple):
    """What a dispatch brought here."""

    x: Tensor  # [R, H] rows in the layout that was asked for; those that hold nothing are undefined
    weights: (
        Tensor | None
    )  # [R] weight of each row, token-major [R, K], 0 where local_idx is -1; None if none were given
    route: Route
    dropped: Tensor  # int32 [El] rows routed here that did not fit; token-major: (token, k) whose row did not fit
    scales: Tensor | None = None  # of quantized rows, in the layout that was asked for (docs/formats.md)
    local_idx: Tensor | None = None  # int32 [R, K] local expert of each (row, k), -1 if none here; token-major only


class StartedDispatch(NamedTuple):
    """A dispatch that has been started; what it was given stays as it is until the wait."""

    ticket: Tensor
    x: Tensor
    topk_weights: Tensor | None
    topk_idx: Tensor
    sizes: Sizes
    batch: tuple[int, ...] | None = None  # see Route
    delivery: Delivery = Delivery()
    flight: int = 0  # which of the communicator's operations that are under way


class StartedCombine(NamedTuple):
    """A combine that has been started; what it was given stays as it is until the wait."""

    ticket: Tensor
    y: Tensor
    weights: Tensor | None
    route: Route
    flight: int = 0  # see StartedDispatch
    format: str = ""  # what sums travel as


class Operation(NamedTuple):
    """What a rank has noted of an operation. Times are seconds of the clock of its GPU (which follows the host's)."""

    number: int  # on its communicator, from 1 on
    kind: str  # the operator
    scalars: bool  # weights, or gradients of weights, traveled
    rows: bool  # rows traveled
    latency: bool  # on latency kernels
    max_tokens: int  # modulo 2**17
    format: str  # what rows traveled as; empty: as they are
    token_major: bool  # its rows are token-major (combines do not say)
    begun: float
    met: float | None  # when it had seen that all ranks have begun it; None: it has not
    waits: tuple[float, ...] = ()  # for each rank, the longest that a thread here waited for it in this operation
    unseen: tuple[int, ...] = ()  # of the last two operations: ranks that have not begun it, as far as is known here


def no_route(given: object) -> str:
    """Return the text of the error for something that stands in the place of a route."""
    return f"route is a {type(given).__name__}; allowed: a Route, such as the field `route` of a dispatch's result"
