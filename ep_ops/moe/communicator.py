"""One object for the exchange of an MoE layer: configured once, then dispatch and combine.

    moe = MoECommunicator(MoECommunicatorConfig(num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096))
    output, handle = moe.dispatch(x, topk_ids, weights)
    y = experts(output.x, output.offs)
    out = moe.combine(y, handle)

docs/moe-communicator.md says all of it in one page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ep_ops import backends
from ep_ops.arguments import device_of, group_of
from ep_ops.communicator import Communicator, refuse_destroyed
from ep_ops.config import most_token_rows
from ep_ops.group.exchange import Exchange
from ep_ops.operators.rejection import reject
from ep_ops.overflow import recomputing
from ep_ops.records import PADDED, TOKEN_MAJOR, Dispatched, StartedCombine, StartedDispatch

from . import placement as placements
from .config import EXACT, MoECommunicatorConfig, Quant, latency_problem, text_problem
from .placement import ReplicaMap
from .ranges import ranged
from .records import DispatchHandle, DispatchOutput, Request
from .statistics import Counts, Stats, last, row_bytes


class MoECommunicator:
    """Dispatch and combine of MoE layers of one size, in one mode, layout and format, with experts where a placement
    has them.

    Collective, as :class:`ep_ops.Communicator`, of which it makes one (``comm``): all ranks make it with the same
    configuration, call its methods in the same order, and destroy it together. Its methods compile with
    ``fullgraph=True``, run in CUDA graphs, and are differentiable in the input and the weights, on both backends.

    ValueError on all ranks for a configuration that cannot be, and where placements differ between ranks.

    Args:
        config: the options.
        device: device of this rank. None: the current CUDA device if there is one, else the CPU.

    Attributes:
        comm: the communicator beneath. Its other operators may be called, too; they take physical ids.
        num_physical_experts: P, of all ranks.
        placement: the current one, None if there is none.
    """

    def __init__(self, config: MoECommunicatorConfig, *, device: torch.device | str | int | None = None) -> None:
        exchange = Exchange(group_of(config.group), device_of(device)[0])
        placements.agree(exchange, config.placement, config.problem_of_layer())
        comm = Communicator(config.group, config.of_communicator(), device=device)
        if config.mode == "latency" and (most := backends.latency_tokens(comm.config)) < config.max_tokens_per_rank:
            comm.destroy()
            config_of_kernels = dataclasses.replace(comm.config, backend="cute", staging_bytes=None)
            if why := backends.problem(config_of_kernels):
                raise ValueError(f"mode 'latency' has no kernels for this: {why}; allowed: mode 'auto'")
            bound = "" if config.staging_bytes is None else f" within staging_bytes {config.staging_bytes}"
            raise ValueError(
                f"max_tokens_per_rank is {config.max_tokens_per_rank}; mode 'latency' takes at most {most} of"
                f" {comm.world_size} ranks, {comm.num_experts} experts and top_k {config.top_k}{bound}; allowed: that,"
                " or mode 'auto'"
            )
        self._begin(config, comm, exchange)

    def _begin(self, config: MoECommunicatorConfig, comm: Communicator, exchange: Exchange) -> None:
        self.config, self.comm, self._exchange = config, comm, exchange
        self.num_physical_experts = comm.num_experts
        self.placement = None if config.placement is None else tuple(config.placement)
        self._map: ReplicaMap | None = None
        if self.placement is not None:
            sizes = config.num_experts, comm.max_tokens_per_rank, comm.rank, comm.device
            self._map = ReplicaMap(self.placement, *sizes)
        self._quant, self._latency = config.quant, config.mode == "latency"
        self._exact = config.capacity == EXACT
        self._operator = "dispatch_dynamic" if self._exact else "dispatch"
        self._splits = config.overlap and not self._exact
        self._usual = self._given(config.quant, None, self._operator)
        self._counts: Counts | None = None
        # Rows kept and dropped, before a place().
        self._past = torch.zeros(2, config.num_experts, dtype=torch.int64, device="cpu")
        if config.statistics:
            bytes_of = row_bytes(comm.hidden_size, comm.dtype.itemsize)
            self._counts = Counts(comm.num_local_experts, comm.world_size, bytes_of, comm.device)

    def sibling(self, placement: Sequence[int] | None = None) -> MoECommunicator:
        """One for another layer: with the same communicator and its memory, and with a placement (this one's, unless
        another of as many physical experts is given) and statistics of its own. Collective. Calls of siblings follow
        each other as those of one do; to destroy one is to destroy them all. Errors of :meth:`place`.
        """
        placement = self.placement if placement is None else placement
        if placement is not None:
            self._agreed(placement)
        made = MoECommunicator.__new__(MoECommunicator)
        made._begin(dataclasses.replace(self.config, placement=placement), self.comm, self._exchange)
        return made

    # ------------------------------------------------------------------ dispatch and combine

    @ranged("ep_ops.moe.dispatch")
    def dispatch(
        self,
        input: Tensor,
        topk_ids: Tensor | None,
        weights: Tensor | None = None,
        quant: Quant | None = None,
        previous_handle: DispatchHandle | None = None,
        *,
        max_tokens: int | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:
        """Send the rows of ``input`` [T, H], and their weights [T, K], to the logical experts that ``topk_ids`` [T, K]
        names (int32 or int64, -1 none). T may be several dimensions ([B, S, H] with [B, S, K]).

        Args:
            quant: how rows are quantized on their way, or were already; None: as the configuration says.
            previous_handle: of an earlier dispatch, whose route these rows take, whatever the placement has become
                since; then ``topk_ids`` is None. (Not in mode "latency": known routes have throughput kernels alone.)
            max_tokens: bound on T that all ranks share for this call; default: ``max_tokens_per_rank``. In mode "auto"
                it says which kernels run, and the buffer is no larger than it needs.

        Does not touch the host, unless the capacity is "exact". Differentiable. Errors are those of
        :meth:`ep_ops.Communicator.dispatch`, on all ranks.
        """
        if previous_handle is not None:
            return self._along(input, topk_ids, weights, quant, previous_handle)
        how = self._quant if quant is None else self._how(quant, max_tokens, self._operator)
        ids: Any = topk_ids if self._map is None or topk_ids is None else self._map.of(topk_ids)
        given = self._usual if quant is None and max_tokens is None else self._given(how, max_tokens, self._operator)
        return self._arrived(self.comm.dispatch(input, ids, weights, exact=self._exact, **given), how)

    @ranged("ep_ops.moe.combine")
    def combine(self, expert_output: Tensor, handle: DispatchHandle) -> Tensor:
        """Bring rows home along the handle's route, in the shape that the dispatch's ``x`` had, and add them up, times
        ``handle.weights`` if there are any: [T, H]. Differentiable.

        Token-major rows are what :func:`ep_ops.nn.reduce_rows` gives, or a kernel that does the same: weights are
        applied there.
        """
        if not isinstance(handle, DispatchHandle):
            self._reject_handle("combine", "handle", handle)
        out = self.comm.combine(expert_output, handle.route, handle.weights)
        if self._counts is not None:
            self._returned(handle)
        return out

    @ranged("ep_ops.moe.dispatch_async")
    def dispatch_async(
        self,
        input: Tensor,
        topk_ids: Tensor | None,
        weights: Tensor | None = None,
        quant: Quant | None = None,
        previous_handle: DispatchHandle | None = None,
        *,
        max_tokens: int | None = None,
        flight: int = 0,
    ) -> Request[tuple[DispatchOutput, DispatchHandle]]:
        """:meth:`dispatch`, whose result the request's ``wait()`` returns. With ``overlap`` this is a split operation:
        :meth:`ep_ops.Communicator.dispatch_start` says what may stand between, what runs beside it, and which
        ``flight`` a second request takes while a first is under way. Without, with "exact" capacity, and along a
        previous handle everything has run already.
        """
        if not self._splits or previous_handle is not None:
            done = self.dispatch(input, topk_ids, weights, quant, previous_handle, max_tokens=max_tokens)
            return Request(lambda: done)
        operator = "dispatch_start"
        how = self._quant if quant is None else self._how(quant, max_tokens, operator, flight)
        ids: Any = topk_ids if self._map is None or topk_ids is None else self._map.of(topk_ids)
        given = self._given(how, max_tokens, operator, flight)
        started = self.comm.dispatch_start(input, ids, weights, flight=flight, **given)
        return Request(lambda: self._dispatch_wait(started, how))

    @ranged("ep_ops.moe.combine_async")
    def combine_async(self, expert_output: Tensor, handle: DispatchHandle, *, flight: int = 0) -> Request[Tensor]:
        """:meth:`combine`, whose result the request's ``wait()`` returns; see :meth:`dispatch_async`."""
        if not self._splits:
            done = self.combine(expert_output, handle)
            return Request(lambda: done)
        if not isinstance(handle, DispatchHandle):
            self._reject_handle("combine_start", "handle", handle, flight)
        started = self.comm.combine_start(expert_output, handle.route, handle.weights, flight=flight)
        return Request(lambda: self._combine_wait(started, handle))

    @ranged("ep_ops.moe.dispatch_wait")
    def _dispatch_wait(self, started: StartedDispatch, how: Quant) -> tuple[DispatchOutput, DispatchHandle]:
        return self._arrived(self.comm.dispatch_wait(started), how)

    @ranged("ep_ops.moe.combine_wait")
    def _combine_wait(self, started: StartedCombine, handle: DispatchHandle) -> Tensor:
        out = self.comm.combine_wait(started)
        if self._counts is not None:
            self._returned(handle)
        return out

    def _along(
        self, input: Tensor, topk_ids: Tensor | None, weights: Tensor | None, quant: Quant | None,
        handle: DispatchHandle,
    ) -> tuple[DispatchOutput, DispatchHandle]:  # fmt: skip
        """A dispatch along a known route."""
        operator = "dispatch_planned"
        if not isinstance(handle, DispatchHandle):
            self._reject_handle(operator, "previous_handle", handle)
        route = handle.route
        how = self._quant if quant is None else self._how(quant, route.max_tokens, operator)
        if topk_ids is not None:
            reason = "topk_ids is given with previous_handle, whose route is known; allowed: None"
            self._reject(operator, reason, route.max_tokens)
        if self._latency:
            reason = "previous_handle is given; mode 'latency' has no kernels for known routes; allowed: mode 'auto'"
            self._reject(operator, reason, route.max_tokens)
        given: dict[str, Any] = {"scales": how.scales, "format": how.format, "scales_as": how.scales_as}
        return self._arrived(self.comm.dispatch_planned(input, route, weights, **given), how)

    def _arrived(self, sent: Dispatched, how: Quant) -> tuple[DispatchOutput, DispatchHandle]:
        x, weights, route, dropped, scales, local_idx = sent
        if self._counts is not None and not recomputing():
            self._counts.dispatched(route, dropped, how.format)
        handle = DispatchHandle(route, weights if local_idx is None else None)
        if route.slots:
            x = x.view(-1, route.slots, x.shape[-1])
            weights = None if weights is None else weights.view(-1, route.slots)
        return DispatchOutput(x, weights, scales, route.counts, route.offs, dropped, local_idx), handle

    def _returned(self, handle: DispatchHandle) -> None:
        """Counts what a combine has given back."""
        if self._counts is not None and not recomputing():
            self._counts.combined(handle.route)

    # ------------------------------------------------------------------ what a call is told

    def _how(self, quant: Quant, max_tokens: int | None, operator: str, flight: int = 0) -> Quant:
        if isinstance(quant, Quant):
            problem = text_problem(quant) or (latency_problem(quant) if self._latency else None)
        else:
            problem = f"quant is {quant!r}; allowed: None, or an ep_ops.moe.Quant"
        if problem is not None:
            self._reject(operator, problem, max_tokens, flight)
        return quant

    def _given(self, how: Quant, max_tokens: int | None, operator: str, flight: int = 0) -> dict[str, Any]:
        if not (max_tokens is None or type(max_tokens) is int or hasattr(max_tokens, "__index__")):
            self._reject(operator, f"max_tokens is {max_tokens!r}; it must be an int", None, flight)
        room = self._room(self.comm.max_tokens_per_rank if max_tokens is None else max_tokens)
        return {
            **room,
            "layout": self.config.layout,
            "scales": how.scales,
            "format": how.format,
            "scales_as": how.scales_as,
        }

    def _room(self, max_tokens: int) -> dict[str, Any]:
        """For as many tokens of each rank; no more than the worst case takes."""
        capacity, comm = self.config.capacity, self.comm
        if self._exact:
            return {"max_tokens": max_tokens}
        if self.config.layout == PADDED:
            most = -(-comm.world_size * max_tokens // comm.alignment) * comm.alignment  # all tokens name one expert
            most = max(most, comm.alignment)
            return {"slots": most if capacity is None else min(capacity, most), "max_tokens": max_tokens}  # type: ignore[type-var]
        if capacity is not None:
            most = comm.capacity(max_tokens)
            if self.config.layout == TOKEN_MAJOR:
                most = most_token_rows(comm.world_size, max_tokens, comm.num_local_experts)
            capacity = min(capacity, most)  # type: ignore[type-var]
        return {"capacity": capacity, "max_tokens": max_tokens}

    def _reject(self, operator: str, reason: str, max_tokens: int | None, flight: int = 0) -> None:
        """``max_tokens``: of the call."""
        most = self.comm.max_tokens_per_rank if max_tokens is None else max_tokens
        reject(operator, self.comm.backend, ValueError(reason), flight, most)

    def _reject_handle(self, operator: str, name: str, handle: Any, flight: int = 0) -> None:
        reason = f"{name} is a {type(handle).__name__}; allowed: a DispatchHandle, the second of what dispatch returns"
        self._reject(operator, reason, None, flight)

    # ------------------------------------------------------------------ placement

    def place(self, placement: Sequence[int]) -> None:
        """Dispatches that follow use ``placement`` (the same number of physical experts). Collective, outside of
        compiled functions; nothing is compiled or captured anew, since the map lies in device memory, which this writes
        in the order of the current stream. The weights are the caller's to move, before (``ep_ops.moe.moves``). Handles
        keep the route that they were made with. Waits for the device if there are statistics, which count a dispatch
        by the placement when it ends: let requests end before, and take no ``previous_handle`` of the one before.

        ValueError on all ranks for a placement of another length, one that leaves out an expert, or where ranks differ.
        """
        self._agreed(placement)
        assert self._map is not None
        if self._counts is not None:
            self._past = self._past + self._logical(self._counts.rows)
            self._counts.forget_rows()
        self._map.set(placement)
        self.placement = tuple(placement)

    def _agreed(self, placement: Sequence[int]) -> None:
        refuse_destroyed(self.comm)
        if self._map is None:
            raise ValueError("placement is given, but the configuration has none; allowed: where it has one")
        problem = placements.problem_of(placement, self.config.num_experts)
        if problem is None and len(placement) != self.num_physical_experts:
            problem = f"placement has {len(placement)} places; allowed: {self.num_physical_experts}, as at first"
        placements.agree(self._exchange, placement, problem)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical experts whose weights lie on this rank, in the order of its physical experts."""
        first, count = self.comm.first_local_expert, self.comm.num_local_experts
        everywhere = range(self.num_physical_experts) if self.placement is None else self.placement
        return tuple(everywhere[first : first + count])

    # ------------------------------------------------------------------ statistics

    def stats(self) -> Stats:
        """What has been counted on this rank, and of the last operations when ranks began them, and who waited for whom
        for how long. Waits for the device.
        ValueError where the configuration has no ``statistics``."""
        counts = self._counted()
        rows, dropped = self._past + self._logical(counts.rows)
        received, returned = counts.bytes
        noted = [self.comm.last_operations(rank) for rank in range(self.comm.world_size)]
        return Stats(self.comm.rank, counts.dispatches, rows, dropped, received, returned, *last(noted))

    def load(self) -> Tensor:
        """int64 [E], the same on all ranks: rows that all ranks together have asked of each logical expert since the
        last reset, dropped ones included: what :func:`ep_ops.moe.balanced` takes. Collective; waits for the device.
        ValueError where the configuration has no ``statistics``."""
        refuse_destroyed(self.comm)
        asked = (self._past + self._logical(self._counted().rows)).sum(0)
        return self._exchange.all_gather(asked).sum(0).cpu()

    def reset_stats(self) -> None:
        """Counts start from 0 again. ValueError where the configuration has no ``statistics``."""
        self._counted().reset()
        self._past = torch.zeros_like(self._past)

    def _counted(self) -> Counts:
        if self._counts is None:
            raise ValueError("statistics is False in the configuration, so nothing is counted; allowed: True")
        return self._counts

    def _logical(self, rows: Tensor) -> Tensor:
        """[2, E] of what physical experts of this rank have, [2, El]."""
        found = torch.zeros_like(self._past)
        return found.index_add_(1, torch.tensor(self.local_experts, dtype=torch.int64, device="cpu"), rows)

    # ------------------------------------------------------------------ lifetime

    def warmup(self) -> None:
        """Compile and load every kernel, those of the configuration's format included. Collective; call it before
        capturing a CUDA graph."""
        format, scales_as, _ = self._quant
        self.comm.warmup([(format, scales_as)] if format else [])

    def check_errors(self) -> None:
        """:meth:`ep_ops.Communicator.check_errors`."""
        self.comm.check_errors()

    def destroy(self) -> None:
        """:meth:`ep_ops.Communicator.destroy`, of siblings too. Collective."""
        self._exchange.group = None  # what outlives it keeps the group's threads alive
        self.comm.destroy()

    def __enter__(self) -> MoECommunicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exchange.group = None
        self.comm.__exit__(kind, error, at)

    def __copy__(self) -> MoECommunicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MoECommunicator:
        """Copies of a model use what it uses."""
        return self

    def __repr__(self) -> str:
        config, rows = self.config, self.config.quant.format or self.config.dtype
        return f"<ep_ops.MoECommunicator {config.mode} {config.layout} {rows} of {self.comm}>"
