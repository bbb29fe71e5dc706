"""The meaning of every operator, in plain torch over torch.distributed. Kernels have to agree with this file.

Experts lie on ranks in contiguous blocks. Rank r has T_r <= max_tokens tokens, each naming K experts (-1: none).

**Rows.** Every (source rank, token, k) that names an expert e asks for one row of the receive buffer of e's rank.
The askers of e are numbered 0, 1, ... in the order of (source rank, token, k). With ``pad(n)`` = n rounded up to
``alignment``, the segment of e begins

* flat layout (slots == 0): where that of the expert before it ends: at the sum of ``pad(askers)`` of the rank's
  earlier experts, but never past the rank's ``capacity``, which is also where the last one ends;
* padded layout (slots > 0): at ``(local index of e) * slots``, and ends ``slots`` rows later.

Asker number p gets row ``begin + p`` if that lies within the segment, and is *dropped* otherwise. Each rank's own
capacity, alignment and slots apply to its rows; all ranks learn them. A naming outside [-1, E) is refused.

**Route.** Five int32 tensors: ``topk_idx`` [T, K]; ``send_rows`` [T, K], the row at the expert's rank, -1 where none;
``arrivals`` [4 R + W + 3]; ``counts`` [El], kept rows of each local expert; ``offs`` [El] = begin + pad(counts).
Planning also gives ``dropped`` [El]. R is the number of rows of the receive buffer: the capacity, or ``offs[-1]`` of a
dynamic dispatch.

``arrivals`` holds three lists, one after the other. A token has a *copy* at each rank where rows of it were kept. The
distinct ranks that its ids name, ascending, number its copies 0, 1, ..., those included that have kept none of its
rows. C = min(K, W).

* ``copies`` [R + 1, 2]: for each copy here, in the order of (source rank, token), where its rows begin in ``owned``
  and its *home*, (source rank * max_tokens + token) * C + copy number; behind the last one the number of kept rows, and
  something undefined;
* ``owned`` [R, 2]: the kept rows in the order of (source rank, token, k), each with (source rank * max_tokens + token)
  * K + k of its asker;
* ``sources`` [W + 1]: where in ``copies`` those of each source rank begin; the last one is the number of copies.

What lies behind the last copy and behind the last kept row is undefined (here -1) and no operator reads it. Operators
along a route take the ``max_tokens`` that it was planned with, and rows as many as it was planned for.

**Contents.** A kept row of ``recv_x`` holds x of its token, of ``recv_weights`` the weight of its (token, k). The
padding rows of each segment, [begin + counts, offs), hold zeros. What other rows hold is undefined (here NaN, so that
a model that reads them is found out; zeros in a communicator that is not ``strict``) and no operator reads them.

**Formats.** With a ``format`` (docs/formats.md), x of each token is quantised at its owner as
``ep_ops.formats.quantise`` says, or was quantised already. A kept row of ``recv_x`` holds the token's codes, and in
``recv_scales`` its scales lie where ``ep_ops.formats.layouts`` says. The padding rows of each segment hold codes and
scales of 0, and swizzled scales are 0 behind each segment in its last tile too; whatever else no kept row has is
undefined (here NaN: code 0x7F, byte 255). With ``wire:`` a kept row holds code times scale instead, rounded to x's
dtype, and there are no scales. Without ``zeros`` padding rows are undefined, in any format. Scales that came with x
and should be powers of two, but are none, are refused.

**Combine.** On the expert's rank, for each (source rank, token): fp32 sum over k ascending of weight times row (each
product and each sum rounded), rounded to y's dtype. For each NVLink domain: fp32 sum of these over its ranks
ascending, rounded to y's dtype unless it is the owner's own. On the owner: fp32 sum of these over domains, in the order
of their lowest ranks, then of the token's residual if there is one, rounded once to y's dtype. With fp64 rows
everything is fp64.

**Gathered.** ``combine_gathered`` is combine without weights, of rows that its caller has put where peers can read
them (``empty_rows``; any tensor will do in a communicator that is not ``strict``).

**Backwards.** Of dispatch, in whatever format: rows are combined without weights, weights go back to their (token,
k), 0 where there is no row. Of combine: with g the rows of ``grad_out`` dispatched along the route, ``grad_y = g`` or
``weight * g`` rounded to its dtype, and ``grad_recv_weights`` the fp32 dot product of g and y.

**Token-major.** ``dispatch_tokens`` gives a row to each *copy* and not to each (token, k): the copies for a rank are
numbered 0, 1, ... in the order of (source rank, token), copy number p has row p if p is below the rank's capacity, and
is dropped otherwise, with all that it asks for. Its route is that of a dispatch in which every rank is one expert
(alignment 1), asked for by the first k of a token that names it: ``send_rows`` holds the row there, and -1 at the k
behind it; ``copies``, ``owned`` and ``sources`` say what they always do, R counting copies. So combines and their
backwards run along it as along any other, and add up one row for each rank. But ``counts`` [El] has how many (row, k)
name each local expert, ``offs`` [El] their sums up to and with each, and ``dropped`` [El] those of dropped copies.
``recv_idx`` [R, K] holds, for each k of the token, the local expert that it names, -1 where it names none of this rank
and in rows without a copy; ``recv_weights`` [R, K] the weight beside it, and 0 where that is -1. Backward, rows are
combined, and the weight of a (token, k) gets what its place in the row of its copy has; other places are not read.

**Split operations.** ``*_start`` followed by ``*_wait`` with the same arguments is the whole operator; so it is of
gradients, whose waits take sizes alone. Between the two nothing of the communicator may run but split operations of
other flights.

**Meeting.** Before anything else moves, ranks tell each other which operator they run, how many rows they will send
and whether they refuse their input; any mismatch, and the reason of a refusal, raises on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import arrivals
from ..config import Member
from ..exchange import Exchange
from ..records import Delivery, Operation, Placed, Route, Sizes
from . import quantised, tree
from .base import Blank, DispatchTensors, Formats
from .budget import Budget
from .split import Order, parts_of, ticket

_OPERATORS = (
    "plan", "dispatch", "dispatch_dynamic", "dispatch_planned", "combine", "dispatch_backward", "combine_backward",
    "combine_gathered", "dispatch_tokens", "dispatch_tokens_dynamic", "dispatch_tokens_planned",
    "dispatch_tokens_backward",
)  # fmt: skip
_UNBOUNDED = -1  # published instead of a capacity: as many rows as are asked for


class ReferenceBackend:
    """Runs on any device; holds no memory but the rows of empty_rows. Every operator synchronises with the host."""

    name = "reference"

    def __init__(self, member: Member) -> None:
        self.exchange = Exchange(member.group, member.device)
        self.world_size, self.rank, self.device = member.world_size, member.rank, member.device
        self.domains = member.config.domains
        self.num_experts = member.num_experts
        self.experts_per_rank = member.experts_per_rank
        ranks = torch.arange(self.world_size, device=self.device)
        per_rank = torch.tensor(self.experts_per_rank, device=self.device)
        self.rank_of_expert = torch.repeat_interleave(ranks, per_rank)  # [E]
        self.first_expert = per_rank.cumsum(0) - per_rank  # [W]
        self.name_of_communicator, self.strict = member.name, member.strict
        self.rows_dtype, self.weights_dtype = member.dtype, member.weights_dtype
        self.hidden_size, self.symmetric_rows = member.hidden_size, member.symmetric_rows
        self.budget = Budget(1, 2)  # checked, and used by nothing
        self.unused = float("nan") if member.strict else 0.0  # what rows that nobody may read are filled with
        self._order = Order(member.name)
        self._in_start = False  # whether an operation runs as part of its start
        self._ended: dict[int, tuple[Tensor, ...] | Tensor] = {}  # flight -> what its wait is to return
        self._rows: Tensor | None = None  # what empty_rows hands out

    # ------------------------------------------------------------------ planning

    def plan(self, topk_idx: Tensor, sizes: Sizes) -> Placed:
        self._begin()
        return self._plan("plan", topk_idx, sizes, {})

    def _begin(self) -> None:
        """By every operator that is neither start nor wait."""
        if self.strict and not self._in_start:
            self._order.check()

    def _plan(
        self, operator: str, topk_idx: Tensor, sizes: Sizes, same: dict[str, int], problem: str | None = None,
        token_major: bool = False,
    ) -> Placed:  # fmt: skip
        """``same``: what ranks must agree on besides ``max_tokens``."""
        capacity, alignment, slots, max_tokens = sizes
        same = {"max_tokens": max_tokens, **same}
        published = self._meet(operator, same, (capacity, alignment, slots), problem or self._invalid_expert(topk_idx))

        padded_idx = topk_idx.new_full((max_tokens, topk_idx.shape[1]), -1)
        padded_idx[: topk_idx.shape[0]] = topk_idx
        everyone = self.exchange.all_gather(padded_idx).long()  # [W, max_tokens, K], the same on all ranks
        destination = self._ranks_named(everyone)
        asks, held = everyone, self.experts_per_rank
        if token_major:  # a rank is what its tokens ask for, once
            asks, held = _first_named(destination, self.world_size), (1,) * self.world_size
        position, asked = self._number_askers(asks, sum(held))

        begins, kept = [], []
        for rank_asked, room in zip(asked.split(held), published.tolist(), strict=True):
            begin, keep = _segments(rank_asked, *room)
            begins.append(begin)
            kept.append(keep)
        begin, keep = torch.cat(begins), torch.cat(kept)  # [E], or [W] of ranks

        asked_for = asks.clamp(min=0)
        has_row = (asks >= 0) & (position < keep[asked_for])
        rows = torch.where(has_row, begin[asked_for] + position, -1)
        mine = slice(sum(held[: self.rank]), sum(held[: self.rank + 1]))
        counts = keep[mine]
        offs = begin[mine] + _pad(counts, alignment)
        if capacity == _UNBOUNDED:
            capacity = int(offs[-1]) if offs.numel() else 0
        table = torch.where(destination == self.rank, rows, -1)
        dropped = asked[mine] - counts
        if token_major:
            counts, dropped = self._named_here(everyone, destination, (table >= 0).any(2))
            offs = counts.cumsum(0)
        return Placed(
            rows[self.rank, : topk_idx.shape[0]].int(),
            arrivals.pack(table, capacity, self._copy_numbers(destination)),
            offs.int(),
            counts.int(),
            dropped.int(),
        )

    def _number_askers(self, asks: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Number of each (source rank, token, k) among those that ask for the same, and how many ask for each of 0 ..
        ``groups``; -1 asks for nothing."""
        none_last = torch.where(asks < 0, groups, asks).flatten()
        asked = torch.bincount(none_last, minlength=groups + 1)
        order = none_last.argsort(stable=True)  # by what is asked for, then (source rank, token, k)
        before = asked.cumsum(0) - asked
        position = torch.empty_like(none_last)
        position[order] = torch.arange(order.numel(), device=self.device) - before[none_last[order]]
        return position.view_as(asks), asked[:groups]

    def _named_here(self, everyone: Tensor, destination: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """How many (token, k) name each local expert, of copies that are ``kept`` [W, max_tokens] and of others."""
        here, local = destination == self.rank, everyone - self.first_expert[self.rank]
        held = self.experts_per_rank[self.rank]
        of_kept, of_others = (torch.bincount(local[here & which[..., None]], minlength=held) for which in (kept, ~kept))
        return of_kept, of_others

    def _ranks_named(self, topk_idx: Tensor) -> Tensor:
        """The rank of each expert that is named; world_size where there is none."""
        rank = self.rank_of_expert[topk_idx.long().clamp(0, self.num_experts - 1)]
        return torch.where(topk_idx >= 0, rank, self.world_size)

    def _copy_numbers(self, destination: Tensor) -> Tensor:
        """[W, max_tokens] number of each token's copy here: how many earlier ranks its ids name."""
        number = torch.zeros(destination.shape[:2], dtype=torch.long, device=self.device)
        for rank in range(self.rank):
            number += (destination == rank).any(2)
        return number

    def _invalid_expert(self, topk_idx: Tensor) -> str | None:
        invalid = (topk_idx < -1) | (topk_idx >= self.num_experts)
        if not bool(invalid.any()):
            return None
        token, k = invalid.nonzero()[0].tolist()
        return (
            f"topk_idx[{token}, {k}] is {int(topk_idx[token, k])} on rank {self.rank}; expert ids are"
            f" 0..{self.num_experts - 1}, or -1 for none"
        )

    # ------------------------------------------------------------------ dispatch

    def dispatch(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery | None = None
    ) -> DispatchTensors:
        """Plan and move."""
        self._begin()
        same, problem = _terms(topk_weights, delivery), quantised.problem(delivery)
        placed = self._plan("dispatch", topk_idx, sizes, same, problem)
        return *self._to_rows(x, topk_weights, _along(topk_idx, placed, sizes), delivery), *placed

    def dispatch_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, alignment: int, max_tokens: int,
        delivery: Delivery | None = None,
    ) -> DispatchTensors:  # fmt: skip
        """:meth:`dispatch` into exactly ``offs[-1]`` rows; nothing is dropped."""
        self._begin()
        sizes = Sizes(_UNBOUNDED, alignment, 0, max_tokens)
        same, problem = _terms(topk_weights, delivery), quantised.problem(delivery)
        placed = self._plan("dispatch_dynamic", topk_idx, sizes, same, problem)
        num_rows = arrivals.rows_of(placed.arrivals.numel(), self.world_size)
        route = _along(topk_idx, placed, sizes._replace(capacity=num_rows))
        return *self._to_rows(x, topk_weights, route, delivery), *placed

    def dispatch_planned(
        self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery | None = None
    ) -> tuple[Tensor, ...]:
        """Move along a known route."""
        self._begin()
        self._meet_along("dispatch_planned", _terms(topk_weights, delivery), route, quantised.problem(delivery))
        return self._to_rows(x, topk_weights, route, delivery)

    # ------------------------------------------------------------------ token-major dispatch

    def dispatch_tokens(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes, delivery: Delivery | None = None
    ) -> DispatchTensors:
        """Plan and move; ``sizes`` has alignment 1 and no slots."""
        return self._dispatch_tokens("dispatch_tokens", x, topk_weights, topk_idx, sizes, delivery)

    def dispatch_tokens_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, max_tokens: int,
        delivery: Delivery | None = None,
    ) -> DispatchTensors:  # fmt: skip
        """:meth:`dispatch_tokens` into as many rows as there are copies; nothing is dropped."""
        sizes = Sizes(_UNBOUNDED, 1, 0, max_tokens)
        return self._dispatch_tokens("dispatch_tokens_dynamic", x, topk_weights, topk_idx, sizes, delivery)

    def _dispatch_tokens(
        self, operator: str, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes,
        delivery: Delivery | None,
    ) -> DispatchTensors:  # fmt: skip
        self._begin()
        same, problem = _terms(topk_weights, delivery), quantised.problem(delivery)
        placed = self._plan(operator, topk_idx, sizes, same, problem, token_major=True)
        num_rows = arrivals.rows_of(placed.arrivals.numel(), self.world_size)
        route = _along(topk_idx, placed, sizes._replace(capacity=num_rows))
        local = topk_idx - self.first_expert.int()[self._ranks_named(topk_idx).clamp(max=self.world_size - 1)]
        recv_idx = self._to_copies(local, route, -1)
        return *self._to_token_rows(x, topk_weights, route, delivery), *placed, recv_idx

    def dispatch_tokens_planned(
        self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery | None = None
    ) -> tuple[Tensor, ...]:
        """Move along the route of a token-major dispatch."""
        self._begin()
        same, problem = _terms(topk_weights, delivery), quantised.problem(delivery)
        self._meet_along("dispatch_tokens_planned", same, route, problem)
        return self._to_token_rows(x, topk_weights, route, delivery)

    def _to_token_rows(
        self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery | None = None
    ) -> tuple[Tensor, ...]:
        """As _to_rows. The copies are rows of one group, which begins at row 0."""
        copies = route.sources[-1:]
        *recv, none = self._to_rows(x, None, route._replace(offs=copies, counts=copies), delivery)
        return *recv, none if topk_weights is None else self._to_copies(topk_weights, route, 0)

    def _to_copies(self, values: Tensor, route: Route, none: int) -> Tensor:
        """``values`` [T, K] of those (token, k) whose experts are here, by copy [R, K]; ``none`` elsewhere."""
        asker, sent = self._sent(route)
        recv_row, recv_counts = self._received(route)
        goes = torch.where(self._named_there(route, asker), values[asker // values.shape[1]], none)
        blank = values.new_full((route.num_rows, values.shape[1]), none)
        blank[recv_row] = self.exchange.all_to_all(goes, sent, recv_counts)
        return blank

    def _named_there(self, route: Route, asker: Tensor) -> Tensor:
        """bool [sent, K]: which k of the token of each copy that is sent name an expert of the rank where it goes."""
        ranks = self._ranks_named(route.topk_idx)
        return ranks[asker // ranks.shape[1]] == ranks.flatten()[asker][:, None]

    # ------------------------------------------------------------------ rows

    def _to_rows(
        self, x: Tensor, topk_weights: Tensor | None, route: Route, delivery: Delivery | None = None
    ) -> tuple[Tensor, ...]:
        """recv_x, recv_scales if that is told of a delivery, recv_weights."""
        asker, sent = self._sent(route)
        recv_row, recv_counts = self._received(route)
        token = asker // route.topk_idx.shape[1]

        def moved(values: Tensor, unused: float) -> Tensor:
            """``values`` of what goes out, as rows here."""
            zeros = delivery is None or delivery.zeros
            blank = self._blank_rows((route.num_rows, *values.shape[1:]), values.dtype, route, unused, zeros)
            blank[recv_row] = self.exchange.all_to_all(values, sent, recv_counts)
            return blank

        if delivery is not None and delivery.format:
            recv: tuple[Tensor, ...] = quantised.to_rows(x, token, delivery, route, moved, self.unused)
        else:
            recv_x = moved(x[token], self.unused)
            recv = (recv_x,) if delivery is None else (recv_x, recv_x.new_empty(0, dtype=torch.float32))
        if topk_weights is None:
            return *recv, x.new_empty(0, dtype=self.weights_dtype)
        return *recv, moved(topk_weights.flatten()[asker], self.unused)

    def _blank_rows(
        self, shape: tuple[int, ...], dtype: torch.dtype, route: Route, unused: float, zeros: bool = True
    ) -> Tensor:
        """Rows yet to be filled: zeros in the padding if there are to be, ``unused`` everywhere else."""
        blank = torch.full(shape, unused, dtype=dtype, device=self.device)
        if zeros:
            row = torch.arange(shape[0], device=self.device)
            end, counts = route.offs.long()[:, None], route.counts.long()
            padding = (row < end) & (row >= end - (_pad(counts, route.alignment) - counts)[:, None])  # [El, R]
            blank[padding.any(0)] = 0
        return blank

    # ------------------------------------------------------------------ combine

    def combine(self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None) -> Tensor:
        self._begin()
        same = {"recv_weights given": int(recv_weights is not None), "residual given": int(residual is not None)}
        self._meet_along("combine", same, route)
        return self._to_tokens(y, recv_weights, route, residual)

    def empty_rows(self, num_rows: int) -> Tensor:
        """Ordinary memory, the same in every call."""
        if self._rows is None:
            shape = self.symmetric_rows, self.hidden_size
            self._rows = torch.empty(shape, dtype=self.rows_dtype, device=self.device)
        return self._rows[:num_rows].detach().fill_(self.unused)

    def combine_gathered(self, y: Tensor, route: Route) -> Tensor:
        self._begin()
        problem = None
        if self.strict and self.symmetric_rows == 0:
            name = self.name_of_communicator
            problem = f"communicator {name!r} has no rows in symmetric memory: symmetric_rows is 0"
        elif self.strict and y.numel() and (self._rows is None or y.data_ptr() != self._rows.data_ptr()):
            problem = "y does not lie in symmetric memory; pass the tensor that empty_rows returned"
        self._meet_along("combine_gathered", {}, route, problem)
        return self._to_tokens(y, None, route)

    def _to_tokens(
        self, y: Tensor, recv_weights: Tensor | None, route: Route, residual: Tensor | None = None
    ) -> Tensor:
        topk_idx, table = route.topk_idx, self._table(route)
        exact = torch.float64 if y.dtype == torch.float64 else torch.float32

        came = (table >= 0).any(2)  # [W, max_tokens]: tokens with a row here
        rows = table[came].long()  # [tokens, K], in the order of (source rank, token)
        partial = torch.zeros(rows.shape[0], y.shape[1], dtype=exact, device=self.device)
        for k in range(rows.shape[1]):
            present = rows[:, k] >= 0
            row = rows[present, k]
            summand = y[row].to(exact)
            if recv_weights is not None:
                summand = summand * recv_weights[row].to(exact)[:, None]
            partial[present] += summand

        destination = self._destinations(topk_idx, route.send_rows)  # [T, K]
        went = torch.stack([(destination == rank).any(1) for rank in range(self.world_size)])  # [W, T]
        went_counts = went.sum(1).tolist()
        arrived = self.exchange.all_to_all(partial.to(y.dtype), came.sum(1).tolist(), went_counts)

        out = torch.zeros(topk_idx.shape[0], y.shape[1], dtype=exact, device=self.device)
        tree.add_up(out, arrived.split(went_counts), went, self.domains, self.rank)
        if residual is not None:
            out += residual.to(exact)
        return out.to(y.dtype)

    # ------------------------------------------------------------------ split operations

    def dispatch_start(
        self, flight: int, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes,
        delivery: Delivery | None = None,
    ) -> Tensor:  # fmt: skip
        return self._start(flight, "dispatch", ticket(x), x, topk_weights, topk_idx, sizes, delivery)

    def dispatch_wait(
        self, flight: int, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes,
        delivery: Delivery | None = None,
    ) -> DispatchTensors:  # fmt: skip
        return self._wait(flight, "dispatch", x, topk_weights, topk_idx, sizes, delivery)

    def dispatch_tokens_start(
        self, flight: int, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes,
        delivery: Delivery | None = None,
    ) -> Tensor:  # fmt: skip
        return self._start(flight, "dispatch_tokens", ticket(x), x, topk_weights, topk_idx, sizes, delivery)

    def dispatch_tokens_wait(
        self, flight: int, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, sizes: Sizes,
        delivery: Delivery | None = None,
    ) -> DispatchTensors:  # fmt: skip
        return self._wait(flight, "dispatch_tokens", x, topk_weights, topk_idx, sizes, delivery)

    def combine_start(self, flight: int, y: Tensor, recv_weights: Tensor | None, route: Route) -> Tensor:
        return self._start(flight, "combine", ticket(y), y, recv_weights, route)

    def combine_wait(self, flight: int, y: Tensor, recv_weights: Tensor | None, route: Route) -> Tensor:
        return self._wait(flight, "combine", y, recv_weights, route)

    def dispatch_backward_start(
        self, flight: int, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> Tensor:
        made = ticket(route.topk_idx)
        return self._start(flight, "dispatch_backward", made, grad_recv_x, grad_recv_weights, route)

    def dispatch_tokens_backward_start(
        self, flight: int, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> Tensor:
        made = ticket(route.topk_idx)
        return self._start(flight, "dispatch_tokens_backward", made, grad_recv_x, grad_recv_weights, route)

    def combine_backward_start(
        self, flight: int, grad_out: Tensor, y: Tensor | None, recv_weights: Tensor | None, route: Route
    ) -> Tensor:
        return self._start(flight, "combine_backward", ticket(grad_out), grad_out, y, recv_weights, route)

    def backward_wait(self, flight: int, operator: str, blank: Blank) -> tuple[Tensor, Tensor]:
        if not self.strict and flight not in self._order.started:
            grad_rows, grad_weights = blank()
            return grad_rows.zero_(), grad_weights.zero_()
        self._order.wait(flight, operator)
        return self._ended.pop(flight)  # type: ignore[return-value]

    def _start(self, flight: int, operator: str, made: Tensor, *args: Any) -> Tensor:
        """Runs the whole operation; its wait returns what came of it. (Where waits may come without a start, in tools
        that try operators one by one, those that are given all arguments run it; of gradients they return zeros.)"""
        if self.strict:
            self._order.free(flight)
        elif "backward" not in operator:
            return made
        self._in_start = True
        try:
            self._ended[flight] = getattr(self, operator)(*args)
        finally:
            self._in_start = False
        self._order.start(flight, operator)
        return made

    def _wait(self, flight: int, operator: str, *args: Any) -> Any:
        if not self.strict:
            return getattr(self, operator)(*args)
        self._order.wait(flight, operator)
        return self._ended.pop(flight)

    # ------------------------------------------------------------------ backwards

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        return self._dispatch_backward("dispatch_backward", grad_recv_x, grad_recv_weights, route)

    def dispatch_tokens_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        return self._dispatch_backward("dispatch_tokens_backward", grad_recv_x, grad_recv_weights, route)

    def _dispatch_backward(
        self, operator: str, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        """``grad_recv_weights`` [R], or [R, K] of token-major rows."""
        self._begin()
        same = {
            "grad_recv_x given": int(grad_recv_x is not None),
            "grad_recv_weights given": int(grad_recv_weights is not None),
        }
        self._meet_along(operator, same, route)
        grad_x = grad_topk_weights = torch.empty(0, dtype=self.weights_dtype, device=self.device)
        if grad_recv_x is not None:
            grad_x = self._to_tokens(grad_recv_x, None, route)
        if grad_recv_weights is not None:
            asker, sent = self._sent(route)
            recv_row, recv_counts = self._received(route)
            grads = self.exchange.all_to_all(grad_recv_weights[recv_row], recv_counts, sent)
            grad_topk_weights = grads.new_zeros(route.topk_idx.shape)
            if grads.dim() == 2:
                named, top_k = self._named_there(route, asker), grads.shape[1]
                token = (asker // top_k * top_k)[:, None]
                asker, grads = (token + torch.arange(top_k, device=self.device))[named], grads[named]
            grad_topk_weights.view(-1)[asker] = grads
        return grad_x, grad_topk_weights

    def combine_backward(
        self, grad_out: Tensor, y: Tensor | None, recv_weights: Tensor | None, route: Route
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        same = {"y given": int(y is not None), "recv_weights given": int(recv_weights is not None)}
        self._meet_along("combine_backward", same, route)
        grad_y, none = self._to_rows(grad_out, None, route)
        if recv_weights is None:
            return grad_y, none
        exact = torch.float64 if grad_y.dtype == torch.float64 else torch.float32
        row, _ = self._received(route)
        g = grad_y[row].to(exact)
        grad_y[row] = (g * recv_weights[row].to(exact)[:, None]).to(grad_y.dtype)
        if y is None:
            return grad_y, none
        grad_recv_weights = self._blank_rows((route.num_rows,), recv_weights.dtype, route, self.unused)
        grad_recv_weights[row] = (g * y[row].to(exact)).sum(1).to(recv_weights.dtype)
        return grad_y, grad_recv_weights

    # ------------------------------------------------------------------ along a route

    def _destinations(self, topk_idx: Tensor, send_rows: Tensor) -> Tensor:
        """The rank that holds the row of each (token, k) [T, K]; world_size where there is none."""
        return torch.where(send_rows >= 0, self._ranks_named(topk_idx), self.world_size)

    def _sent(self, route: Route) -> tuple[Tensor, list[int]]:
        """What dispatch sends: flat (token, k) sorted by destination, and how many go to each rank."""
        destination = self._destinations(route.topk_idx, route.send_rows).flatten()
        sent = torch.bincount(destination, minlength=self.world_size + 1)[: self.world_size].tolist()
        asker = destination.argsort(stable=True)[: sum(sent)]
        return asker, sent

    def _received(self, route: Route) -> tuple[Tensor, list[int]]:
        """Where dispatch puts what arrives: rows by (source rank, token, k), and how many come from each rank."""
        table = self._table(route)
        return table[table >= 0].long(), (table >= 0).sum((1, 2)).tolist()

    def _table(self, route: Route) -> Tensor:
        """The row here of (source rank, token, k) [W, max_tokens, K], -1 where there is none."""
        return arrivals.table(route.arrivals, self.world_size, route.max_tokens, route.topk_idx.shape[1])

    def refuse(self, operator: str, reason: str, flight: int = 0) -> None:
        """Meets the others where they run the operator (a split one: in its start), who raise the reason."""
        whole, part = parts_of(operator)
        started = self._order.started
        if part == "wait" and self.strict:
            if started.get(flight) == whole:  # it has run; nobody wants what came of it
                del started[flight], self._ended[flight]
        elif not started or (part == "start" and flight not in started):  # else the others refuse it as well
            self._gather(whole, reason)

    def _meet_along(self, operator: str, same: dict[str, int], route: Route, problem: str | None = None) -> None:
        """Meet, and make sure that both ends of the route expect the same number of rows."""
        same = {"max_tokens": route.max_tokens, **same}
        _, sent = self._sent(route)
        askers = arrivals.known(route.arrivals, self.world_size)[:, 1]
        last = int(askers.max()) if askers.numel() else -1
        if last < self.world_size * route.max_tokens * route.topk_idx.shape[1]:
            _, recv_counts = self._received(route)
        else:
            recv_counts = [0] * self.world_size
            problem = (
                problem or f"max_tokens is {route.max_tokens}; the route of rank {self.rank} was planned with more"
            )
        published = self._meet(operator, same, (*sent, *recv_counts), problem)
        goes, comes = published[:, : self.world_size], published[:, self.world_size :].T
        if not torch.equal(goes, comes):
            source, target = (goes != comes).nonzero()[0].tolist()
            raise RuntimeError(
                f"{operator}: rank {source} sends {int(goes[source, target])} rows to rank {target}, which expects"
                f" {int(comes[source, target])}; the ranks must use routes of the same plan or dispatch"
            )

    def _meet(self, operator: str, same: dict[str, int], own: Sequence[int], problem: str | None) -> Tensor:
        """``own`` of all ranks [W, len(own)], once they run the same operator with equal ``same`` and no problem."""
        gathered, refusals = self._gather(operator, problem, (*same.values(), *own))
        if refusals:
            raise ValueError(f"{operator}: {problem}" if problem else f"{operator}: {'; '.join(refusals)}")
        for column, field in enumerate(same):
            values = gathered[:, column].tolist()
            if len(set(values)) > 1:
                values = [quantised.NAMES[field][value] for value in values] if field in quantised.NAMES else values
                raise ValueError(f"{operator}: ranks disagree on {field}: {values} by rank")
        return gathered[:, len(same) : len(same) + len(own)]

    def _gather(self, operator: str, problem: str | None, told: Sequence[int] = ()) -> tuple[Tensor, list[str]]:
        """``told`` of all ranks [W, at least len(told)], and the refusals of those that have a problem."""
        message = [_OPERATORS.index(operator), int(problem is not None), *told]
        message += [0] * (8 + 2 * self.world_size - len(message))  # one length for all operators
        gathered = self.exchange.all_gather(torch.tensor(message)).cpu()
        operators = gathered[:, 0].tolist()
        if len(set(operators)) > 1:
            running = ", ".join(f"rank {rank}: {_OPERATORS[index]}" for rank, index in enumerate(operators))
            raise RuntimeError(f"ranks run different operators at the same time ({running})")
        refusing = gathered[:, 1].nonzero().flatten().tolist()
        if not refusing:
            return gathered[:, 2:], []
        reasons = self.exchange.all_gather_text(problem or "")
        return gathered[:, 2:], [f"refused by rank {rank}: {reasons[rank]}" for rank in refusing]

    # ------------------------------------------------------------------ the rest of a backend

    def compile(self, formats: Formats = ()) -> None:
        """Nothing to do."""

    def warmup(self) -> None:
        """Nothing to do."""

    def last_operations(self, rank: int) -> list[Operation]:
        """Nothing is noted."""
        return []

    def has_failed(self) -> bool:
        return False

    def unsaid(self) -> str | None:
        return None

    def call_on_failure(self, callback: Callable[[str], None]) -> None:
        """There is nothing that runs on: whoever fails raises."""

    def listen(self) -> None:
        """Whoever fails raises at once."""

    def check_errors(self) -> None:
        """Errors are raised at once."""

    def destroy(self, keep: bool) -> None:
        """Lets go of the process group: what outlives it keeps its threads alive into Python's finalization."""
        self.exchange.group = None
        self._rows = None


def _terms(topk_weights: Tensor | None, delivery: Delivery | None) -> dict[str, int]:
    """What ranks must agree on in a dispatch."""
    return {"topk_weights given": int(topk_weights is not None), **quantised.agreed(delivery)}


def _along(topk_idx: Tensor, placed: Placed, sizes: Sizes) -> Route:
    ints = sizes.alignment, sizes.capacity, sizes.max_tokens
    return Route(topk_idx, *placed[:4], *ints, slots=sizes.slots)


def _first_named(destination: Tensor, none: int) -> Tensor:
    """The rank of each (source rank, token, k), where none of the token's earlier k names it; else -1."""
    first = destination != none
    for k in range(1, destination.shape[2]):
        first[:, :, k] &= (destination[:, :, :k] != destination[:, :, k : k + 1]).all(2)
    return torch.where(first, destination, -1)


def _pad(count: Tensor, alignment: int) -> Tensor:
    return (count + alignment - 1) // alignment * alignment


def _segments(asked: Tensor, capacity: int, alignment: int, slots: int) -> tuple[Tensor, Tensor]:
    """First row and number of kept rows of each expert of one rank, for which ``asked`` [El] rows are wanted."""
    if slots:
        return torch.arange(asked.numel(), device=asked.device) * slots, asked.clamp(max=slots)
    padded = _pad(asked, alignment)
    begin = padded.cumsum(0) - padded
    if capacity == _UNBOUNDED:
        return begin, asked
    begin = begin.clamp(max=capacity)
    return begin, torch.minimum(asked, capacity - begin)
