"""Launches cute_kernels: NVIDIA GPUs of one NVLink domain, one process each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels import jit, marks
from cute_kernels.heap import BAD_ID, EPOCH, Problem
from cute_kernels.rows import Slices
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled

from .. import symmetric
from . import latency
from .base import DispatchTensors, RouteTensors
from .budget import Traffic, default_budget
from .fresh import New, allocator
from .halves import Order, ticket
from .report import Report
from .sizes import heap_of, memory_plan, problem_of, rows_bytes, token_bound

if TYPE_CHECKING:
    from ..communicator import Communicator

NO_CAPACITY_LIMIT = 2**31 - 2**16
"""Capacity published by a dispatch into exactly as many rows as come; alignments (up to 1024) fit below 2**31."""

STAGING_BLOCKS = 16
"""Multiprocessors that a budget leaves to staging and announcing. Fewer have not been tried, but for a single one that
staged and announced, which took 3.9 ms for 59 MB."""


def kernels_of(problem: Problem) -> list[Any]:
    """Every kernel that the operators of such a communicator launch."""
    alone = problem.world_size == 1
    rows_too = not alone  # a single rank reads its own rows where they are
    publish = [(True, rows_too, weights, False) for weights in (False, True)]
    publish += [(True, False, False, True)]
    publish += [(False, rows_too, weights, False) for weights in (False, True) if rows_too or weights]
    combine = [(True, weights, False, residual) for weights in (False, True) for residual in (False, True)]
    combine += [(rows, False, True, False) for rows in (False, True)]  # with the gradients of weights
    variants: dict[Any, Sequence[tuple[Any, ...]]] = {
        Publish: publish,
        Pull: [
            (weights, alone and not placed and not weights, placed)
            for weights in (False, True)
            for placed in (False, True)
        ],
        Combine: combine,
        PullScaled: [(alone,)],
        Gather: [()],
    }
    return [kernel(problem, *variant) for kernel, made in variants.items() for variant in made]


class CuteBackend:
    """Operators of one communicator as kernel launches on the current stream.

    Calls of one communicator must be ordered on the device: on one stream, or by events between streams.
    """

    name = "cute"

    def __init__(self, comm: Communicator) -> None:
        self._config = comm.config
        self._rank = comm.rank
        self._problem = problem = problem_of(comm.config)
        self._device, self._index = comm.device, comm.device.index
        self._local_experts = comm.num_local_experts
        properties = torch.cuda.get_device_properties(comm.device)
        self._arch = f"sm_{properties.major}{properties.minor}a"
        sms = properties.multi_processor_count
        self._all_blocks = sms
        slices = Slices(problem.row_bytes, problem.dtype).slices
        self._traffic = Traffic.of(problem.experts_per_rank, problem.top_k, problem.row_bytes, slices)
        # Beside a pull run the blocks that place the route and some that stage rows.
        self.budget = default_budget(
            self._traffic, sms, sms - problem.tiles - STAGING_BLOCKS, comm.config.dispatch_sms, comm.config.combine_sms
        )
        self._buffer = symmetric.allocate(heap_of(comm.config).nbytes, comm.group, comm.device)
        self._rows: symmetric.SymmetricBuffer | None = None
        if comm.symmetric_rows:
            self._rows = symmetric.allocate(rows_bytes(comm.config), comm.group, comm.device)
        self._state = self._buffer.local[:256].view(torch.int64)
        self._state[EPOCH] = 1
        torch.cuda.synchronize(comm.device)
        self._report = Report(problem.num_experts, comm.config.timeout)
        self._ranks = (self._buffer.addresses, comm.rank, self._report.address, int(comm.config.timeout * 1e9))
        self._functions: dict[Any, Callable[..., None]] = {}
        self._latency_tokens = token_bound(comm.config, problem) or -1  # a call's bound may be 0
        self.latency = latency.LatencyPath(self, max(0, self._latency_tokens), sms)
        self._order = Order(comm.name)

    # ------------------------------------------------------------------ operators

    def plan(
        self, topk_idx: Tensor, capacity: int, alignment: int, slots: int, max_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self._begin()
        return self._plan(topk_idx, capacity, alignment, slots, max_tokens)

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
        self._begin()
        if max_tokens <= self._latency_tokens:
            return self.latency.dispatch(x, topk_weights, topk_idx, capacity, alignment, slots, max_tokens)
        new = allocator(self._device)
        route = self._new_route(new, topk_idx, max_tokens)
        recv_x, recv_weights = self._new_rows(new, x, topk_weights, capacity)
        terms = marks.pack("dispatch", max_tokens, topk_weights is not None)
        self._publish(
            terms, True, x, topk_weights, topk_idx, route, recv_weights, capacity, alignment, slots, max_tokens,
            self.budget.dispatch,
        )  # fmt: skip
        self._pull(terms, x, topk_weights, route[1:4], recv_x, recv_weights, alignment, False, True)
        return (recv_x, recv_weights, *route)

    def dispatch_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, alignment: int, max_tokens: int
    ) -> DispatchTensors:
        self._begin()
        capacity = NO_CAPACITY_LIMIT // alignment * alignment
        route = self._plan(topk_idx, capacity, alignment, 0, max_tokens)
        send_rows, recv_rows, offs, counts, _ = route
        num_rows = int(offs[-1]) if self._local_experts else 0
        if self._report.failed() is not None:
            self.check_errors()  # the host has waited: say it now
        known = (topk_idx, send_rows, recv_rows, offs, counts)
        return (*self._along("dispatch_planned", x, topk_weights, known, num_rows, alignment), *route)

    def dispatch_planned(
        self, x: Tensor, topk_weights: Tensor | None, route: RouteTensors, num_rows: int, alignment: int
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        return self._along("dispatch_planned", x, topk_weights, route, num_rows, alignment)

    def combine(
        self,
        y: Tensor,
        recv_weights: Tensor | None,
        route: RouteTensors,
        alignment: int,
        residual: Tensor | None = None,
    ) -> Tensor:
        self._begin()
        if residual is None and route[2].shape[1] <= self._latency_tokens:
            return self.latency.combine(y, recv_weights, route)
        out = self._new_tokens(y, route[0].shape[0])
        self._combine("combine", y, recv_weights, None, route, residual, out, None)
        return out

    def empty_rows(self, num_rows: int) -> Tensor:
        if self._rows is None:
            return torch.empty(0, self._config.hidden_size, dtype=self._config.dtype, device=self._device)
        rows = self._rows.local.view(self._config.dtype).view(-1, self._config.hidden_size)
        return rows[:num_rows].detach()  # what autograd notes when it is written to ends with this tensor

    def combine_gathered(self, y: Tensor, route: RouteTensors, alignment: int) -> Tensor:
        self._begin()
        if self._rows is None:
            raise ValueError(f"communicator {self._config.name!r} has no rows in symmetric memory: symmetric_rows is 0")
        bases = self._rows.addresses
        if y.numel() and y.data_ptr() != bases[self._rank]:
            raise ValueError("y does not lie in symmetric memory; pass the tensor that empty_rows returned")
        topk_idx, send_rows, _, _, _ = route
        out = self._new_tokens(y, topk_idx.shape[0])
        self._launch(
            Gather, (), marks.pack("combine_gathered", route[2].shape[1]), (topk_idx, send_rows, out),
            (topk_idx.shape[0], self.budget.gather, bases),
        )  # fmt: skip
        return out

    def dispatch_start(self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, *terms: int) -> Tensor:
        self._begin()
        few = terms[-1] <= self._latency_tokens
        sent = self.latency.dispatch_start(x, topk_weights, topk_idx, *terms) if few else ticket(x)
        self._order.start("dispatch")  # it has not, where that raises
        return sent

    def dispatch_wait(self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, *terms: int) -> DispatchTensors:
        self.check_errors()
        self._order.wait("dispatch")
        if terms[-1] <= self._latency_tokens:
            return self.latency.dispatch_wait(x, topk_weights, topk_idx, *terms)
        return self.dispatch(x, topk_weights, topk_idx, *terms)

    def combine_start(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors, alignment: int) -> Tensor:
        self._begin()
        few = route[2].shape[1] <= self._latency_tokens
        sent = self.latency.combine_start(y, recv_weights, route) if few else ticket(y)
        self._order.start("combine")  # it has not, where that raises
        return sent

    def combine_wait(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors, alignment: int) -> Tensor:
        self.check_errors()
        self._order.wait("combine")
        if route[2].shape[1] <= self._latency_tokens:
            return self.latency.combine_wait(y, recv_weights, route)
        return self.combine(y, recv_weights, route, alignment)

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: RouteTensors, alignment: int
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        topk_idx = route[0]
        new = functools.partial(torch.empty, dtype=torch.float32, device=self._device)
        grad_x = new(0) if grad_recv_x is None else self._new_tokens(grad_recv_x, topk_idx.shape[0])
        grad_weights = new(0 if grad_recv_weights is None else topk_idx.shape)
        self._combine("dispatch_backward", grad_recv_x, None, grad_recv_weights, route, None, grad_x, grad_weights)
        return grad_x, grad_weights

    def combine_backward(
        self,
        grad_out: Tensor,
        y: Tensor | None,
        recv_weights: Tensor | None,
        route: RouteTensors,
        num_rows: int,
        alignment: int,
    ) -> tuple[Tensor, Tensor]:
        self._begin()
        if recv_weights is None:
            grad_y, _ = self._along("combine_backward", grad_out, None, route, num_rows, alignment)
            return grad_y, grad_out.new_empty(0, dtype=torch.float32)
        topk_idx, _, recv_rows, offs, counts = route
        max_tokens = recv_rows.shape[1]
        grad_y, grad_weights = self._new_rows(allocator(self._device), grad_out, recv_weights, num_rows)
        blocks = self.budget.scaled
        terms = marks.pack("combine_backward", max_tokens, scalars=True)
        published = self._publish(
            terms, False, grad_out, None, topk_idx, (None,) * 5, None, 0, 1, 0, max_tokens, blocks
        )
        # Without y the rows of grad_y stand in for it: the products that come of them are thrown away.
        self._launch(
            PullScaled, (not published,), terms,
            (grad_out, grad_y if y is None else y, recv_weights, recv_rows, offs, counts, grad_y, grad_weights),
            (max_tokens, alignment, blocks),
        )  # fmt: skip
        return grad_y, grad_weights[:0].clone() if y is None else grad_weights

    # ------------------------------------------------------------------ launches

    def _begin(self) -> None:
        """By every whole operator and every first half: what kernels reported is raised, halves are not interrupted."""
        self.check_errors()
        self._order.check()

    def _new_route(self, new: New, topk_idx: Tensor, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """send_rows, recv_rows, offs, counts, dropped"""
        tokens, top_k = topk_idx.shape
        ranks, local, ints = self._problem.world_size, (self._local_experts,), torch.int32
        return (
            new((tokens, top_k), (top_k, 1), ints),
            new((ranks, max_tokens, top_k), (max(max_tokens, 1) * top_k, top_k, 1), ints),
            new(local, (1,), ints),
            new(local, (1,), ints),
            new(local, (1,), ints),
        )

    def _new_rows(self, new: New, x: Tensor, topk_weights: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
        """recv_x, recv_weights"""
        hidden = x.shape[1]
        weights = new((0 if topk_weights is None else num_rows,), (1,), torch.float32)
        return new((num_rows, hidden), (hidden, 1), x.dtype), weights

    def _new_tokens(self, y: Tensor, tokens: int) -> Tensor:
        """[tokens, H] for what rows `y` come home as"""
        hidden = y.shape[1]
        return allocator(self._device)((tokens, hidden), (hidden, 1), y.dtype)

    def _publish(
        self,
        terms: int,
        with_route: bool,
        x: Tensor | None,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        route: tuple[Tensor | None, ...],
        recv_weights: Tensor | None,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
        pulling: int,
    ) -> bool:
        """Launch the publish kernel, unless it has nothing to do: then False.

        It leaves `pulling` multiprocessors to the kernel that comes next, which runs at the same time.
        """
        rows, weights = x is not None and self._problem.world_size > 1, topk_weights is not None
        if not (with_route or rows or weights):
            return False
        variant = (with_route, rows, weights, x is None)  # a plan alone moves no rows
        tiles = self._problem.tiles if with_route or weights else 0
        # Staging takes one block that announces, and all others that there are.
        blocks = tiles + (1 + max(1, self._all_blocks - tiles - pulling - 1) if rows else 0)
        self._launch(
            Publish, variant, terms, (x, topk_idx, topk_weights, *route, recv_weights),
            (topk_idx.shape[0], max_tokens, capacity, alignment, slots, blocks),
        )  # fmt: skip
        return True

    def _plan(
        self, topk_idx: Tensor, capacity: int, alignment: int, slots: int, max_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The route alone."""
        route = self._new_route(allocator(self._device), topk_idx, max_tokens)
        terms = marks.pack("plan", max_tokens, rows=False)
        self._publish(terms, True, None, None, topk_idx, route, None, capacity, alignment, slots, max_tokens, 0)
        return route

    def _along(
        self, kind: str, x: Tensor, topk_weights: Tensor | None, route: RouteTensors, num_rows: int, alignment: int
    ) -> tuple[Tensor, Tensor]:
        """Dispatch along a known route."""
        topk_idx, _, recv_rows, offs, counts = route
        recv_x, recv_weights = self._new_rows(allocator(self._device), x, topk_weights, num_rows)
        placed = (None, recv_rows, None, None, None)
        terms = marks.pack(kind, recv_rows.shape[1], topk_weights is not None)
        published = self._publish(
            terms, False, x, topk_weights, topk_idx, placed, recv_weights, 0, 1, 0, recv_rows.shape[1],
            self.budget.dispatch,
        )  # fmt: skip
        self._pull(
            terms, x, topk_weights, (recv_rows, offs, counts), recv_x, recv_weights, alignment, not published, False
        )
        return recv_x, recv_weights

    def _pull(
        self,
        terms: int,
        x: Tensor,
        topk_weights: Tensor | None,
        route: tuple[Tensor, ...],
        recv_x: Tensor,
        recv_weights: Tensor,
        alignment: int,
        begins: bool,
        placed: bool,
    ) -> None:
        recv_rows, offs, counts = route
        self._launch(
            Pull, (topk_weights is not None, begins, placed), terms,
            (x, recv_rows, offs, counts, recv_x, recv_weights), (recv_rows.shape[1], alignment, self.budget.dispatch),
        )  # fmt: skip

    def _combine(
        self,
        kind: str,
        y: Tensor | None,
        recv_weights: Tensor | None,
        scalars: Tensor | None,
        route: RouteTensors,
        residual: Tensor | None,
        out: Tensor,
        out_scalars: Tensor | None,
    ) -> None:
        topk_idx, send_rows, recv_rows, _, _ = route
        variant = (y is not None, recv_weights is not None, scalars is not None, residual is not None)
        blocks = self.budget.combine
        terms = marks.pack(kind, recv_rows.shape[1], scalars is not None, y is not None)
        self._launch(
            Combine, variant, terms,
            (y, recv_weights, scalars, topk_idx, send_rows, recv_rows, residual, out, out_scalars),
            (topk_idx.shape[0], recv_rows.shape[1], self._traffic.pushers(blocks), blocks),
        )  # fmt: skip

    def _launch(
        self,
        kernel: type,
        variant: tuple[int, ...],
        terms: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int | tuple[int, ...], ...],
    ) -> None:
        """Launch on the current stream. Tensors go as addresses, None as 0, numbers behind them as they are."""
        function = self._functions.get((kernel, variant))
        if function is None:
            function = self._functions[kernel, variant] = jit.get(
                kernel(self._problem, *variant), self._arch, torch.cuda.is_current_stream_capturing
            )
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        index = self._index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                function(*self._ranks, terms, *addresses, *numbers, torch._C._cuda_getCurrentRawStream(index))
        else:
            function(*self._ranks, terms, *addresses, *numbers, torch._C._cuda_getCurrentRawStream(index))

    # ------------------------------------------------------------------ lifetime

    def memory_plan(self) -> dict[str, int]:
        return memory_plan(self._config, self._rank)

    def compile(self) -> None:
        kernels = kernels_of(self._problem)
        if self.latency.tokens:
            kernels += latency.kernels_of(self._problem, self.latency.tokens)
        for kernel in kernels:
            jit.get(kernel, self._arch, torch.cuda.is_current_stream_capturing)

    def warmup(self) -> None:
        """Runs every kernel once, on no tokens."""
        config = self._config
        x = torch.empty(0, config.hidden_size, dtype=config.dtype, device=self._device)
        topk_idx = torch.empty(0, config.top_k, dtype=torch.int32, device=self._device)
        weights = torch.empty(0, config.top_k, dtype=torch.float32, device=self._device)
        align = config.alignment
        self.plan(topk_idx, align, align, 0, 1)
        for given in (None, weights):
            for bound in (1, config.max_tokens_per_rank):  # latency kernels, throughput kernels
                moved = self.dispatch(x, given, topk_idx, align, align, 0, bound)
                recv_x, recv_weights, route = moved[0], moved[1], _route(topk_idx, moved)
                row_weights = None if given is None else recv_weights
                self.combine(recv_x, row_weights, route, align)
                self.combine(recv_x, row_weights, route, align, x)
            halved = (x, given, topk_idx, align, align, 0, 1)
            self.dispatch_start(*halved)
            few = self.dispatch_wait(*halved)
            self.combine_start(few[0], row_weights, _route(topk_idx, few), align)
            self.combine_wait(few[0], row_weights, _route(topk_idx, few), align)
            self.dispatch_planned(x, given, route, align, align)
            self.dispatch_backward(recv_x, row_weights, route, align)
            self.combine_backward(x, recv_x, row_weights, route, align, align)
            self.combine_backward(x, None, row_weights, route, align, align)
        self.dispatch_backward(None, recv_weights, route, align)
        if config.symmetric_rows:
            self.combine_gathered(self.empty_rows(0), route, align)
        torch.cuda.synchronize(self._device)
        self.check_errors()

    def check_errors(self) -> None:
        if not self._report.pending():
            return
        failed = self._report.failed()
        if failed is not None:
            raise RuntimeError(f"communicator {self._config.name!r} failed: {failed}; destroy it and make a new one")
        bad = self._report.bad_expert()
        self._state[BAD_ID] = 0
        raise ValueError(f"communicator {self._config.name!r}: {bad}")

    def destroy(self) -> None:
        self._functions.clear()
        self._buffer.free()
        if self._rows is not None:
            self._rows.free()


def _route(topk_idx: Tensor, dispatched: DispatchTensors) -> RouteTensors:
    _, _, send_rows, recv_rows, offs, counts, _ = dispatched
    return topk_idx, send_rows, recv_rows, offs, counts
