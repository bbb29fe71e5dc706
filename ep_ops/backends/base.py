"""What a backend offers. Arguments have passed :mod:`ep_ops.checks`; every result is a fresh tensor."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .budget import Budget

# topk_idx, send_rows, recv_rows, offs, counts: see ep_ops.backends.reference
RouteTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# recv_x, recv_weights, send_rows, recv_rows, offs, counts, dropped
DispatchTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Backend(Protocol):
    """Constructed as ``Backend(comm)``. A module that holds one which keeps memory also has a function
    ``memory_plan(config, rank) -> dict[str, int]`` that tells the bytes before anything is allocated."""

    name: str
    budget: Budget

    def plan(
        self, topk_idx: Tensor, capacity: int, alignment: int, slots: int, max_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """-> send_rows, recv_rows, offs, counts, dropped"""

    def dispatch(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
    ) -> DispatchTensors: ...

    def dispatch_dynamic(
        self, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, alignment: int, max_tokens: int
    ) -> DispatchTensors: ...

    def dispatch_planned(
        self, x: Tensor, topk_weights: Tensor | None, route: RouteTensors, num_rows: int, alignment: int
    ) -> tuple[Tensor, Tensor]:
        """-> recv_x, recv_weights"""

    def combine(
        self,
        y: Tensor,
        recv_weights: Tensor | None,
        route: RouteTensors,
        alignment: int,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def empty_rows(self, num_rows: int) -> Tensor:
        """[num_rows, H] for combine_gathered; at most ``symmetric_rows`` of the configuration."""

    def combine_gathered(self, y: Tensor, route: RouteTensors, alignment: int) -> Tensor: ...

    def dispatch_backward(
        self, grad_recv_x: Tensor | None, grad_recv_weights: Tensor | None, route: RouteTensors, alignment: int
    ) -> tuple[Tensor, Tensor]:
        """-> grad_x, grad_topk_weights"""

    def combine_backward(
        self,
        grad_out: Tensor,
        y: Tensor | None,
        recv_weights: Tensor | None,
        route: RouteTensors,
        num_rows: int,
        alignment: int,
    ) -> tuple[Tensor, Tensor]:
        """-> grad_y, grad_recv_weights"""

    def dispatch_start(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
    ) -> Tensor:
        """-> ticket [0]. No other operator of the communicator may run before dispatch_wait with the same arguments."""

    def dispatch_wait(
        self,
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        capacity: int,
        alignment: int,
        slots: int,
        max_tokens: int,
    ) -> DispatchTensors: ...

    def combine_start(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors, alignment: int) -> Tensor:
        """-> ticket [0]. No other operator of the communicator may run before combine_wait with the same arguments."""

    def combine_wait(self, y: Tensor, recv_weights: Tensor | None, route: RouteTensors, alignment: int) -> Tensor: ...

    def memory_plan(self) -> dict[str, int]:
        """Bytes held, by purpose."""

    def compile(self) -> None:
        """Compile and load whatever the operators need, so that later calls do not. Takes each rank its own time."""

    def warmup(self) -> None:
        """Run everything once, all ranks together."""

    def check_errors(self) -> None:
        """RuntimeError or ValueError with what kernels have reported, if anything."""

    def destroy(self) -> None:
        """Free everything held. The ranks have met before this is called."""
