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
``recv_rows`` [W, max_tokens, K], the row here of (source rank, token, k), -1 where none; ``counts`` [El], kept rows of
each local expert; ``offs`` [El] = begin + pad(counts). Planning also gives ``dropped`` [El].

**Contents.** A kept row of ``recv_x`` holds x of its token, of ``recv_weights`` the weight of its (token, k). The
padding rows of each segment, [begin + counts, offs), hold zeros. What other rows hold is undefined
(``ReferenceBackend.unused`` here) and nothing reads them.

**Combine.** On the expert's rank, for each (source rank, token): fp32 sum over k ascending of weight times row (each
product and each sum rounded), rounded to y's dtype. On the owner: fp32 sum of these over ranks ascending, then of the
token's residual if there is one, rounded once to y's dtype. With fp64 rows everything is fp64.

**Gathered.** ``combine_gathered`` is combine without weights, of rows that its caller has put where peers can read
them (``empty_rows``; here any tensor will do).

**Backwards.** Of dispatch: rows are combined without weights, weights go back to their (token, k), 0 where there is no
row. Of combine: with g the rows of ``grad_out`` dispatched along the route, ``grad_y = g`` or ``weight * g`` rounded to
its dtype, and ``grad_recv_weights`` the fp32 dot product of g and y.

**Halves.** ``*_start`` followed by ``*_wait`` with the same arguments is the whole operator.

**Meeting.** Before anything else moves, ranks tell each other which operator they run, how many rows they will send
and whether they refuse their input; any mismatch raises on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import DispatchTensors, RouteTensors
from .budget import Budget
from .exchange import Exchange
from .halves import ticket

if TYPE_CHECKING:
    from ..communicator import Communicator

_OPERATORS = (
    "plan", "dispatch", "dispatch_dynamic", "dispatch_planned", "combine", "dispatch_backward", "combine_backward",
    "combine_gathered",
)  # fmt: skip
_UNBOUNDED = -1  # published instead of a capacity: as many rows as are asked for


class ReferenceBackend:
    """Runs on any device; holds no memory. Every operator synchronises with the host."""

    name = "reference"

    def __init__(self, comm: Communicator) -> None:
        self.exchange = Exchange(comm.group, comm.device)
        self.world_size, self.rank, self.device = comm.world_size, comm.rank, comm.device
        self.num_experts = comm.num_experts
        self.experts_per_rank = comm.experts_per_rank
        ranks = torch.arange(self.world_size, device=self.device)
        per_rank = torch.tensor(self.experts_per_rank, device=self.device)
        self.rank_of_expert = torch.repeat_interleave(ranks, per_rank)  # [E]
        self.rows_dtype, self.weights_dtype = comm.dtype, comm.weights_dtype
        self.hidden_size = comm.hidden_size
        self.budget = Budget(1, 2)  # nothing uses it
        self.unused = 0.0  # what rows that nobody may read are filled with; tests set it to NaN

    # ------------------------------------------------------------------ planning

    def plan(
        self, topk_idx: Tensor, capacity: int, alignment: int, slots: int, max_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """-> send_rows, recv_rows, offs, counts, dropped"""
        return self._plan("plan", topk_idx, capacity, alignment, slots, max_tokens, weighted=False)

    def _plan(
        self,
        operator: str,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
        weighted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        same = {"max_tokens": max_tokens, "topk_weights given": int(weighted)}
        published = self._meet(operator, same, (capacity, alignment, slots), self._invalid_expert(topk_idx))

        padded_idx = topk_idx.new_full((max_tokens, topk_idx.shape[1]), -1)
        padded_idx[: topk_idx.shape[0]] = topk_idx
        everyone = self.exchange.all_gather(padded_idx).long()  # [W, max_tokens, K], the same on all ranks
        position, asked = self._number_askers(everyone)

        begins, kept = [], []
        for rank_asked, terms in zip(asked.split(self.experts_per_rank), published.tolist(), strict=True):
            begin, keep = _segments(rank_asked, *terms)
            begins.append(begin)
            kept.append(keep)
        begin, keep = torch.cat(begins), torch.cat(kept)  # [E]

        expert = everyone.clamp(min=0)
        has_row = (everyone >= 0) & (position < keep[expert])
        rows = torch.where(has_row, begin[expert] + position, -1)
        here = self.rank_of_expert[expert] == self.rank
        mine = slice(sum(self.experts_per_rank[: self.rank]), sum(self.experts_per_rank[: self.rank + 1]))
        counts = keep[mine]
        return (
            rows[self.rank, : topk_idx.shape[0]].int(),
            torch.where(here, rows, -1).int(),
            (begin[mine] + _pad(counts, alignment)).int(),
            counts.int(),
            (asked[mine] - counts).int(),
        )

    def _number_askers(self, everyone: Tensor) -> tuple[Tensor, Tensor]:
        """Number of each (source rank, token, k) among the askers of its expert, and how many ask for each expert."""
        none_last = torch.where(everyone < 0, self.num_experts, everyone).flatten()
        asked = torch.bincount(none_last, minlength=self.num_experts + 1)
        order = none_last.argsort(stable=True)  # by expert, then (source rank, token, k)
        before = asked.cumsum(0) - asked
        position = torch.empty_like(none_last)
        position[order] = torch.arange(order.numel(), device=self.device) - before[none_last[order]]
        return position.view_as(everyone), asked[: self.num_experts]

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
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
    ) -> DispatchTensors:
        """Plan and move. -> recv_x [capacity, H], recv_weights, send_rows, recv_rows, offs, counts, dropped"""
        weighted = topk_weights is not None
        planned = self._plan("dispatch", topk_idx, capacity, alignment, slots, max_tokens, weighted)
        send_rows, recv_rows, offs, counts, dropped = planned
        route = (topk_idx, send_rows, recv_rows, offs, counts)
        return *self._to_rows(x, topk_weights, route, capacity, alignment), *planned

    def dispatch_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, alignment: int, max_tokens: int
    ) -> DispatchTensors:
        """:meth:`dispatch` into exactly ``offs[-1]`` rows; nothing is dropped."""
        weighted = topk_weights is not None
        planned = self._plan("dispatch_dynamic", topk_idx, _UNBOUNDED, alignment, 0, max_tokens, weighted)
        send_rows, recv_rows, offs, counts, dropped = planned
        num_rows = int(offs[-1]) if offs.numel() else 0
        route = (topk_idx, send_rows, recv_rows, offs, counts)
        return *self._to_rows(x, topk_weights, route, num_rows, alignment), *planned

    def dispatch_planned(
        self, x: Tensor, topk_weights: Tensor | None, route: RouteTensors, num_rows: int, alignment: int
    ) -> tuple[Tensor, Tensor]:
        """Move along a known route. -> recv_x [num_rows, H], recv_weights [num_rows] or [0]"""
        same = {"topk_weights given": int(topk_weights is not None)}
        self._meet_along("dispatch_planned", same, route, num_rows)
        return self._to_rows(x, topk_weights, route, num_rows, alignment)

    def _to_rows(
        self, x: Tensor, topk_weights: Tensor | None, route: RouteTensors, num_rows: int, alignment: int
    ) -> tuple[Tensor, Tensor]:
        asker, sent, recv_counts = self._copies(route)
        _, _, recv_rows, offs, counts = route
        recv_row = recv_rows[recv_rows >= 0].long()  # in the order of (source rank, token, k), as copies arrive
        token = asker // recv_rows.shape[2]

        recv_x = self._blank_rows((num_rows, x.shape[1]), x.dtype, offs, counts, alignment)
        recv_x[recv_row] = self.exchange.all_to_all(x[token], sent, recv_counts)
        if topk_weights is None:
            return recv_x, recv_x.new_empty(0, dtype=self.weights_dtype)
        recv_weights = self._blank_rows((num_rows,), topk_weights.dtype, offs, counts, alignment)
        recv_weights[recv_row] = self.exchange.all_to_all(topk_weights.flatten()[asker], sent, recv_counts)
        return recv_x, recv_weights

    def _blank_rows(
        self, shape: tuple[int, ...], dtype: torch.dtype, offs: Tensor, counts: Tensor, alignment: int
    ) -> Tensor:
        """Rows yet to be filled: zeros in the padding, ``unused`` everywhere else."""
        blank = torch.full(shape, self.unused, dtype=dtype, device=self.device)
        row = torch.arange(shape[0], device=self.device)
        end = offs.long()[:, None]
        padding = (row < end) & (row >= end - (_pad(counts.long(), alignment) - counts)[:, None])  # [El, R]
        blank[padding.any(0)] = 0
        return blank

    # ------------------------------------------------------------------ combine

    def combine(
        self,
        y: Tensor,
        recv_weights: Tensor | None,
        route: RouteTensors,
        alignment: int,
        residual: Tensor | None = None,
    ) -> Tensor:
        """-> out [T, H] in y's dtype"""
        same = {"recv_weights given": int(recv_weights is not None), "residual given": int(residual is not None)}
        self._meet_along("combine", same, route, y.shape[0])
        return self._to_tokens(y, recv_weights, route, residual)

    def empty_rows(self, num_rows: int) -> Tensor:
        """-> ordinary memory [num_rows, H]"""
        return torch.full((num_rows, self.hidden_size), self.unused, dtype=self.rows_dtype, device=self.device)

    def combine_gathered(self, y: Tensor, route: RouteTensors, alignment: int) -> Tensor:
        """-> out [T, H] in y's dtype"""
        self._meet_along("combine_gathered", {}, route, y.shape[0])
        return self._to_tokens(y, None, route)

    def _to_tokens(
        self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors, residual: Tensor | None = None
    ) -> Tensor:
        topk_idx, send_rows, recv_rows, _, _ = route
        exact = torch.float64 if y.dtype == torch.float64 else torch.float32

        came = (recv_rows >= 0).any(2)  # [W, max_tokens]: tokens with a row here
        rows = recv_rows[came].long()  # [tokens, K], in the order of (source rank, token)
        partial = torch.zeros(rows.shape[0], y.shape[1], dtype=exact, device=self.device)
        for k in range(rows.shape[1]):
            present = rows[:, k] >= 0
            row = rows[present, k]
            term = y[row].to(exact)
            if recv_weights is not None:
                term = term * recv_weights[row].to(exact)[:, None]
            partial[present] += term

        destination = self._destinations(topk_idx, send_rows)  # [T, K]
        went = torch.stack([(destination == rank).any(1) for rank in range(self.world_size)])  # [W, T]
        went_counts = went.sum(1).tolist()
        arrived = self.exchange.all_to_all(partial.to(y.dtype), came.sum(1).tolist(), went_counts)

        out = torch.zeros(topk_idx.shape[0], y.shape[1], dtype=exact, device=self.device)
        for rank, from_rank in enumerate(arrived.split(went_counts)):
            out[went[rank]] += from_rank.to(exact)
        if residual is not None:
            out += residual.to(exact)
        return out.to(y.dtype)

    # ------------------------------------------------------------------ halves

    def dispatch_start(self, x: Tensor, *args: Any) -> Tensor:
        """Nothing yet: the second half does it all."""
        return ticket(x)

    def dispatch_wait(self, *args: Any) -> DispatchTensors:
        """:meth:`dispatch`."""
        return self.dispatch(*args)

    def combine_start(self, y: Tensor, *args: Any) -> Tensor:
        """Nothing yet: the second half does it all."""
        return ticket(y)

    def combine_wait(self, *args: Any) -> Tensor:
        """:meth:`combine`."""
        return self.combine(*args)

    # ------------------------------------------------------------------ backwards

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: RouteTensors, alignment: int
    ) -> tuple[Tensor, Tensor]:
        """-> grad_x [T, H] or [0], grad_topk_weights [T, K] or [0]"""
        same = {
            "grad_recv_x given": int(grad_recv_x is not None),
            "grad_recv_weights given": int(grad_recv_weights is not None),
        }
        given = grad_recv_x if grad_recv_x is not None else grad_recv_weights
        self._meet_along("dispatch_backward", same, route, None if given is None else given.shape[0])
        grad_x = grad_topk_weights = torch.empty(0, dtype=self.weights_dtype, device=self.device)
        if grad_recv_x is not None:
            grad_x = self._to_tokens(grad_recv_x, None, route)
        if grad_recv_weights is not None:
            asker, sent, recv_counts = self._copies(route)
            topk_idx, _, recv_rows, _, _ = route
            grads = grad_recv_weights[recv_rows[recv_rows >= 0].long()]
            grad_topk_weights = grads.new_zeros(topk_idx.shape)
            grad_topk_weights.view(-1)[asker] = self.exchange.all_to_all(grads, recv_counts, sent)
        return grad_x, grad_topk_weights

    def combine_backward(
        self,
        grad_out: Tensor,
        y: Tensor | None,
        recv_weights: Tensor | None,
        route: RouteTensors,
        num_rows: int,
        alignment: int,
    ) -> tuple[Tensor, Tensor]:
        """-> grad_y [num_rows, H], grad_recv_weights [num_rows] or [0]"""
        same = {"y given": int(y is not None), "recv_weights given": int(recv_weights is not None)}
        self._meet_along("combine_backward", same, route, num_rows)
        _, _, recv_rows, offs, counts = route
        grad_y, none = self._to_rows(grad_out, None, route, num_rows, alignment)
        if recv_weights is None:
            return grad_y, none
        exact = torch.float64 if grad_y.dtype == torch.float64 else torch.float32
        row = recv_rows[recv_rows >= 0].long()
        g = grad_y[row].to(exact)
        grad_y[row] = (g * recv_weights[row].to(exact)[:, None]).to(grad_y.dtype)
        if y is None:
            return grad_y, none
        grad_recv_weights = self._blank_rows((num_rows,), recv_weights.dtype, offs, counts, alignment)
        grad_recv_weights[row] = (g * y[row].to(exact)).sum(1).to(recv_weights.dtype)
        return grad_y, grad_recv_weights

    # ------------------------------------------------------------------ along a route

    def _destinations(self, topk_idx: Tensor, send_rows: Tensor) -> Tensor:
        """The rank that holds the row of each (token, k) [T, K]; world_size where there is none."""
        rank = self.rank_of_expert[topk_idx.long().clamp(0, self.num_experts - 1)]
        return torch.where(send_rows >= 0, rank, self.world_size)

    def _copies(self, route: RouteTensors) -> tuple[Tensor, list[int], list[int]]:
        """What dispatch sends: flat (token, k) sorted by destination; how many go to and come from each rank."""
        topk_idx, send_rows, recv_rows, _, _ = route
        destination = self._destinations(topk_idx, send_rows).flatten()
        sent = torch.bincount(destination, minlength=self.world_size + 1)[: self.world_size].tolist()
        asker = destination.argsort(stable=True)[: sum(sent)]
        return asker, sent, (recv_rows >= 0).sum((1, 2)).tolist()

    def _meet_along(self, operator: str, same: dict[str, int], route: RouteTensors, num_rows: int | None) -> None:
        """Meet, and make sure that both ends of the route expect the same number of rows."""
        _, sent, recv_counts = self._copies(route)
        recv_rows = route[2]
        last = int(recv_rows.max()) if recv_rows.numel() else -1
        problem = None
        if num_rows is not None and last >= num_rows:
            problem = f"the route of rank {self.rank} fills row {last}, but only {num_rows} rows were given"
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
        message = [_OPERATORS.index(operator), int(problem is not None), *same.values()]
        offset = len(message)
        message += own
        message += [0] * (8 + 2 * self.world_size - len(message))  # one length for all operators
        gathered = self.exchange.all_gather(torch.tensor(message)).cpu()
        operators = gathered[:, 0].tolist()
        if len(set(operators)) > 1:
            running = ", ".join(f"rank {rank}: {_OPERATORS[index]}" for rank, index in enumerate(operators))
            raise RuntimeError(f"ranks run different operators at the same time ({running})")
        refusing = gathered[:, 1].nonzero().flatten().tolist()
        if refusing:
            raise ValueError(f"{operator}: {problem or f'refused by ranks {refusing}, whose errors say why'}")
        for column, field in enumerate(same, start=2):
            values = gathered[:, column].tolist()
            if len(set(values)) > 1:
                raise ValueError(f"{operator}: ranks disagree on {field}: {values} by rank")
        return gathered[:, offset : offset + len(own)]

    # ------------------------------------------------------------------ the rest of a backend

    def memory_plan(self) -> dict[str, int]:
        """Nothing is held."""
        return {}

    def compile(self) -> None:
        """Nothing to do."""

    def warmup(self) -> None:
        """Nothing to do."""

    def check_errors(self) -> None:
        """Errors are raised at once."""

    def destroy(self) -> None:
        """Lets go of the process group: what outlives it keeps its threads alive into Python's finalization."""
        self.exchange.group = None


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
