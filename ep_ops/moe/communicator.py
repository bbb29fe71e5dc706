"""Dispatch and combine of an MoE layer, configured once.

    moe = MoECommunicator(MoECommunicatorConfig(num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096))
    output, handle = moe.dispatch(x, topk_ids, weights)
    y = experts(output.x, output.offs)
    out = moe.combine(y, handle)

docs/moe-communicator.md describes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ep_ops import backends
from ep_ops.arguments import device_of, group_of
from ep_ops.communicator import Communicator, together
from ep_ops.config import most_token_rows
from ep_ops.formats import round_up
from ep_ops.group import meeting
from ep_ops.group.exchange import Exchange
from ep_ops.nn.ranges import ranged
from ep_ops.operators.rejection import reject
from ep_ops.overflow import recomputing, static_zeros
from ep_ops.records import (
    PADDED,
    TOKEN_MAJOR,
    Dispatched,
    StartedCombine,
    StartedDispatch,
    check_types,
    whole,
    wrong_type,
)

from . import placement as placements
from .config import EXACT, MoECommunicatorConfig, Quant, quant_problem
from .placement import ReplicaMap
from .records import DispatchHandle, DispatchOutput, Request


class MoECommunicator:
    """Dispatch and combine of MoE layers with one size, mode, layout and format, and with a placement of experts.

    It owns an :class:`ep_ops.Communicator` (``comm``) and is collective in the same way: all ranks create it with the
    same configuration, call its methods in the same order, and destroy it together. Its methods compile with
    ``fullgraph=True``, run in CUDA graphs, and are differentiable in the input and the weights.

    Args:
        config: the options.
        device: device of this rank. None: the current CUDA device if there is one, else the CPU.

    Attributes:
        comm (Communicator): the communicator. Its operators can be called as well; they take physical expert ids.
        num_physical_experts (int): P, the number of physical experts of all ranks.
        placement (tuple[int, ...] | None): the current placement, or None.

    Raises:
        TypeError: ``config`` has another type.
        ValueError: an option is not allowed, or placements differ between ranks. Every rank raises it.
    """

    def __init__(self, config: MoECommunicatorConfig, *, device: torch.device | str | int | None = None) -> None:
        check_types(MoECommunicatorConfig, config=config)
        problem, at = config.problem_of_layer(), torch.device("cpu")
        try:
            at = device_of(device)
        except ValueError as error:  # raised after the other ranks have been informed
            problem = str(error)
        exchange = Exchange(group_of(config.group), at)
        mine = 0 if problem else placements.checksum(config.placement)
        with exchange.turn:
            found = meeting.meet(exchange, "create MoECommunicator", problem=problem, values=(mine,))
        placements.compare(found[:, 0])
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
        self._begin(config, comm)

    def _begin(self, config: MoECommunicatorConfig, comm: Communicator) -> None:
        self.config, self.comm = config, comm
        self.num_physical_experts = comm.num_experts
        self.placement = None if config.placement is None else tuple(config.placement)
        self._map: ReplicaMap | None = None
        if self.placement is not None:
            self._map = ReplicaMap(self.placement, config.num_experts, comm.max_tokens_per_rank, comm.rank, comm.device)
        exact = config.capacity == EXACT
        self._operator = "dispatch_dynamic" if exact else "dispatch"
        self._splits = config.overlap and not exact
        self._usual = self._dispatch_arguments(config.quant, None, self._operator)
        self._requested: Tensor | None = None  # rows requested of each local expert
        if config.statistics:
            self._requested = static_zeros(comm.num_local_experts, dtype=torch.int64, device=comm.device)
        self._past = torch.zeros(config.num_experts, dtype=torch.int64, device="cpu")  # under earlier placements

    def sibling(self, placement: Sequence[int] | None = None) -> MoECommunicator:
        """Return a MoECommunicator for another layer, which uses the same communicator and memory. Collective.

        It has its own placement and load. Calls of siblings follow the same rules as calls of one of them, and
        destroying one destroys all.

        Args:
            placement: its placement, with the same number of physical experts. None: this one's.

        Raises:
            ValueError: as for :meth:`place`.
        """
        placement = self.placement if placement is None else placement
        self._agree("sibling", placement)
        made = MoECommunicator.__new__(MoECommunicator)
        made._begin(dataclasses.replace(self.config, placement=placement), self.comm)
        return made

    # ------------------------------------------------------------------ dispatch and combine

    @ranged("ep_ops.moe.dispatch")
    def dispatch(
        self, input: Tensor, topk_ids: Tensor | None, weights: Tensor | None = None, quant: Quant | None = None,
        previous_handle: DispatchHandle | None = None, *, max_tokens: int | None = None,
    ) -> tuple[DispatchOutput, DispatchHandle]:  # fmt: skip
        """Send the rows of ``input`` to their experts and return the rows that arrive at this rank.

        Collective and differentiable. Does not synchronize the host on the cute backend, unless the capacity is
        "exact".

        Args:
            input: tokens, [T, H] or [..., H].
            topk_ids: logical expert ids, int32 or int64 [T, K] or [..., K]; -1 means no expert. None with
                ``previous_handle``.
            weights: routing weights, [T, K] or [..., K]. None: rows carry no weights.
            quant: quantization of this call. None: that of the configuration.
            previous_handle: handle of an earlier dispatch, whose route the rows follow even if the placement has
                changed. Not in mode "latency", which has no kernels for existing routes.
            max_tokens: bound on T in this call, the same on all ranks. None: ``max_tokens_per_rank``. Mode "auto"
                chooses the kernels by it, and the buffer is no larger than it needs.

        Returns:
            The received rows, and the handle for :meth:`combine`.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`ep_ops.Communicator.dispatch`, on all ranks.
        """
        if previous_handle is not None:
            return self._dispatch_along(input, topk_ids, weights, quant, previous_handle)
        ids, given = self._arguments_of(topk_ids, quant, max_tokens, self._operator)
        return self._output_of(self.comm.dispatch(input, ids, weights, **given))

    @ranged("ep_ops.moe.combine")
    def combine(self, expert_output: Tensor, handle: DispatchHandle) -> Tensor:
        """Return rows to the owners of their tokens and sum the rows of each token, times ``handle.weights`` if given.

        Collective and differentiable.

        Args:
            expert_output: outputs of the experts, in the rows of the dispatch. Token-major rows are already weighted
                and summed, as :func:`ep_ops.nn.reduce_rows` does.
            handle: handle of the dispatch.

        Returns:
            Sums [T, H], or [..., H] in the shape of the dispatch's ``input``.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`ep_ops.Communicator.combine`.
        """
        self._check_handle("combine", "handle", handle)
        return self.comm.combine(expert_output, handle.route, handle.weights, format=self.config.combine_format)

    @ranged("ep_ops.moe.dispatch_async")
    def dispatch_async(
        self, input: Tensor, topk_ids: Tensor | None, weights: Tensor | None = None, quant: Quant | None = None,
        previous_handle: DispatchHandle | None = None, *, max_tokens: int | None = None, flight: int = 0,
    ) -> Request[tuple[DispatchOutput, DispatchHandle]]:  # fmt: skip
        """Start :meth:`dispatch` and return a request whose ``wait()`` returns the result.

        With ``overlap`` it is a split operation, for which the rules of :meth:`ep_ops.Communicator.dispatch_start`
        apply. Without ``overlap``, with capacity "exact" and with ``previous_handle`` the whole dispatch runs in this
        call.

        Args:
            input, topk_ids, weights, quant, previous_handle, max_tokens: as for :meth:`dispatch`.
            flight: 0 or 1; distinguishes two operations in progress at the same time.
        """
        if not self._splits or previous_handle is not None:
            done = self.dispatch(input, topk_ids, weights, quant, previous_handle, max_tokens=max_tokens)
            return Request(lambda: done)
        ids, given = self._arguments_of(topk_ids, quant, max_tokens, "dispatch_start", flight)
        started = self.comm.dispatch_start(input, ids, weights, flight=flight, **given)
        return Request(lambda: self._dispatch_wait(started))

    @ranged("ep_ops.moe.combine_async")
    def combine_async(self, expert_output: Tensor, handle: DispatchHandle, *, flight: int = 0) -> Request[Tensor]:
        """Start :meth:`combine` and return a request whose ``wait()`` returns the result, as :meth:`dispatch_async`."""
        if not self._splits:
            done = self.combine(expert_output, handle)
            return Request(lambda: done)
        self._check_handle("combine_start", "handle", handle, flight)
        format = self.config.combine_format
        started = self.comm.combine_start(expert_output, handle.route, handle.weights, format=format, flight=flight)
        return Request(lambda: self._combine_wait(started))

    @ranged("ep_ops.moe.dispatch_wait")
    def _dispatch_wait(self, started: StartedDispatch) -> tuple[DispatchOutput, DispatchHandle]:
        return self._output_of(self.comm.dispatch_wait(started))

    @ranged("ep_ops.moe.combine_wait")
    def _combine_wait(self, started: StartedCombine) -> Tensor:
        return self.comm.combine_wait(started)

    def _dispatch_along(
        self, input: Tensor, topk_ids: Tensor | None, weights: Tensor | None, quant: Quant | None,
        handle: DispatchHandle,
    ) -> tuple[DispatchOutput, DispatchHandle]:  # fmt: skip
        """Dispatch along an existing route."""
        operator = "dispatch_planned"
        self._check_handle(operator, "previous_handle", handle)
        route = handle.route
        how = self.config.quant if quant is None else self._valid_quant(quant, route.max_tokens, operator)
        if topk_ids is not None:
            reason = "topk_ids is given with previous_handle, whose route is known; allowed: None"
            self._reject(operator, reason, route.max_tokens)
        if self.config.mode == "latency":
            reason = "previous_handle is given; mode 'latency' has no kernels for known routes; allowed: mode 'auto'"
            self._reject(operator, reason, route.max_tokens)
        sent = self.comm.dispatch_planned(
            input, route, weights, scales=how.scales, format=how.format, scales_as=how.scales_as
        )
        return self._output_of(sent)

    def _output_of(self, sent: Dispatched) -> tuple[DispatchOutput, DispatchHandle]:
        x, weights, route, dropped, scales, local_idx = sent
        if self._requested is not None and not recomputing():
            self._requested.add_(route.counts).add_(dropped)
        handle = DispatchHandle(route, weights if local_idx is None else None)
        if route.slots:
            x = x.view(-1, route.slots, x.shape[-1])
            weights = None if weights is None else weights.view(-1, route.slots)
        return DispatchOutput(x, weights, scales, route.counts, route.offs, dropped, local_idx), handle

    # ------------------------------------------------------------------ arguments of a call

    def _arguments_of(
        self, topk_ids: Any, quant: Quant | None, max_tokens: int | None, operator: str, flight: int = 0
    ) -> tuple[Any, dict[str, Any]]:
        """Return the physical ids and the other arguments of a dispatch."""
        how = self.config.quant if quant is None else self._valid_quant(quant, max_tokens, operator, flight)
        ids = topk_ids if self._map is None else self._map.of(topk_ids)
        usual = quant is None and max_tokens is None
        return ids, self._usual if usual else self._dispatch_arguments(how, max_tokens, operator, flight)

    def _valid_quant(self, quant: Quant, max_tokens: int | None, operator: str, flight: int = 0) -> Quant:
        if problem := quant_problem(quant, self.config.mode):
            self._reject(operator, problem, max_tokens, flight)
        return quant

    def _dispatch_arguments(self, how: Quant, max_tokens: int | None, operator: str, flight: int = 0) -> dict[str, Any]:
        try:
            room = self._sizes(self.comm.max_tokens_per_rank if max_tokens is None else whole("max_tokens", max_tokens))
        except ValueError as error:
            self._reject(operator, str(error), None, flight)
        named = {"format": how.format, "scales_as": how.scales_as, "scales": how.scales}
        return {"layout": self.config.layout, **room, **named}

    def _sizes(self, max_tokens: int) -> dict[str, Any]:
        """Return the sizes for ``max_tokens`` tokens of each rank, at most those of the worst case."""
        capacity, comm = self.config.capacity, self.comm
        if isinstance(capacity, str):  # EXACT
            return {"exact": True, "max_tokens": max_tokens}
        if self.config.layout == PADDED:
            most = round_up(max(comm.world_size * max_tokens, 1), comm.alignment)  # all tokens name one expert
            return {"slots": most if capacity is None else min(capacity, most), "max_tokens": max_tokens}
        if capacity is not None:
            most = comm.capacity(max_tokens)
            if self.config.layout == TOKEN_MAJOR:
                most = most_token_rows(comm.world_size, max_tokens, comm.num_local_experts)
            capacity = min(capacity, most)
        return {"capacity": capacity, "max_tokens": max_tokens}

    def _reject(self, operator: str, reason: str, max_tokens: int | None, flight: int = 0) -> NoReturn:
        most = self.comm.max_tokens_per_rank if max_tokens is None else max_tokens
        reject(operator, self.comm, ValueError(reason), flight, most)

    def _check_handle(self, operator: str, name: str, handle: Any, flight: int = 0) -> None:
        if not isinstance(handle, DispatchHandle):
            error = wrong_type(name, handle, "a DispatchHandle, the second result of dispatch")
            reject(operator, self.comm, error, flight, self.comm.max_tokens_per_rank)

    # ------------------------------------------------------------------ placement

    def place(self, placement: Sequence[int]) -> None:
        """Use ``placement`` for the following dispatches. Collective.

        Call it outside of compiled functions. It writes the map of experts to device memory, in the order of the
        current stream, so nothing is compiled or captured again. Move the weights before (:func:`ep_ops.moe.moves`).
        Existing handles keep their routes. With statistics it synchronizes the host, and the load counts a dispatch by
        the placement at its end: wait for all requests before, and do not use a ``previous_handle`` from before.

        Args:
            placement: logical expert of each physical expert, as many as before.

        Raises:
            ValueError: the length differs, an expert is missing, or placements differ between ranks. Every rank raises
                it.
        """
        self._agree("place", placement)
        assert self._map is not None
        if self._requested is not None:
            self._past = self._load(self._requested)
            self._requested.zero_()
        self._map.set(placement)
        self.placement = tuple(placement)

    def _agree(self, call: str, placement: Sequence[int] | None) -> None:
        """Meet the other ranks in a method, and raise ValueError on all ranks unless all pass the same placement."""
        problem = None if placement is None and self._map is None else self._problem_of(placement)
        mine = 0 if problem else placements.checksum(placement)
        with together(self.comm, call, problem, (mine,)) as found:
            placements.compare(found[:, 0])

    def _problem_of(self, placement: Any) -> str | None:
        if self._map is None:
            return "placement is given, but the configuration has none; allowed: only if it has one"
        problem = placements.problem_of(placement, self.config.num_experts)
        if problem is None and len(placement) != self.num_physical_experts:
            problem = f"placement has {len(placement)} places; allowed: {self.num_physical_experts}, as configured"
        return problem

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Return the logical experts whose weights this rank holds, in the order of its physical experts."""
        first, count = self.comm.first_local_expert, self.comm.num_local_experts
        everywhere = range(self.num_physical_experts) if self.placement is None else self.placement
        return tuple(everywhere[first : first + count])

    # ------------------------------------------------------------------ load

    def load(self) -> Tensor:
        """Return the rows that all ranks requested of each logical expert since the last reset, int64 [E] on the CPU.

        Dropped rows are included. It is the input of :func:`ep_ops.moe.balanced`. Collective; synchronizes the host.

        Raises:
            ValueError: the configuration has no ``statistics``.
        """
        requested = self._counted()
        with together(self.comm, "load"):
            return self.comm.exchange.all_gather(self._load(requested)).sum(0).cpu()

    def reset_load(self) -> None:
        """Reset this rank's share of the load to 0. ValueError if the configuration has no ``statistics``."""
        self._counted().zero_()
        self._past = torch.zeros_like(self._past)

    def _counted(self) -> Tensor:
        if self._requested is None:
            raise ValueError("statistics is False in the configuration, so nothing is counted; allowed: True")
        return self._requested

    def _load(self, requested: Tensor) -> Tensor:
        """Return the rows requested of this rank's experts by logical expert, int64 [E] on the CPU."""
        of_local = torch.tensor(self.local_experts, dtype=torch.int64, device="cpu")
        return self._past.index_add(0, of_local, requested.cpu())

    # ------------------------------------------------------------------ lifetime

    def warmup(self) -> None:
        """Compile and load every kernel, including those of the configured formats. Collective. Call it before
        capturing a CUDA graph."""
        format, scales_as, _ = self.config.quant
        asked = (format, scales_as), (self.config.combine_format, "")
        self.comm.warmup([pair for pair in dict.fromkeys(asked) if pair[0]])

    def check_errors(self) -> None:
        """Call :meth:`ep_ops.Communicator.check_errors`."""
        self.comm.check_errors()

    def destroy(self) -> None:
        """Destroy the communicator, and with it all siblings. Collective."""
        self.comm.destroy()

    def __enter__(self) -> MoECommunicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.comm.__exit__(kind, error, at)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a MoECommunicator cannot be pickled; create it in each process (a Communicator is pickled by its name)"
        )

    def __copy__(self) -> MoECommunicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MoECommunicator:
        """Return this object, so that copies of a model use the communicator of the original."""
        return self

    def __repr__(self) -> str:
        config, rows = self.config, self.config.quant.format or self.config.dtype
        return f"<ep_ops.MoECommunicator {config.mode} {config.layout} {rows} of {self.comm}>"
