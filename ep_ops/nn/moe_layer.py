"""A mixture-of-experts layer with experts sharded over the ranks of a communicator, and its dense equivalent.

    comm = ep_ops.Communicator(num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096)
    layer = ep_ops.nn.MoELayer(comm, intermediate_size=1024)
    out = layer(x)  # x [tokens of this rank, 2048], bfloat16

All ranks call the layer in every step, with different numbers of tokens if they like.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ep_ops.communicator import Communicator
from ep_ops.formats import ELEMENT, exact_dtype
from ep_ops.nn.expert_module import check_complete, fill_weight
from ep_ops.nn.experts import Experts, check_size, default_device, draw_expert
from ep_ops.nn.grouped import Gemms
from ep_ops.nn.losses import expert_counts
from ep_ops.nn.ranges import ranged
from ep_ops.nn.routing import Router
from ep_ops.records import GROUPED, check_types


class Routing(NamedTuple):
    """The routing that ``MoELayer`` returns with ``return_routing=True``."""

    topk_idx: Tensor
    """[..., K]: the chosen experts of this rank's tokens."""
    topk_weights: Tensor
    """[..., K]: their weights."""
    logits: Tensor | None
    """[..., E]: the router's scores before softmax or sigmoid; None if the router returns none."""
    counts: Tensor
    """int64 [E]: how often this rank's tokens chose each expert."""
    dropped: Tensor
    """int32 [El]: number of (token, k) that each local expert dropped in this call, from the tokens of all ranks."""


class MoELayer(nn.Module):
    """A mixture-of-experts layer: a top-k router, and SwiGLU experts that are sharded over the ranks of a communicator.

    The gradients of the experts are sums over the tokens of all ranks. Parameters that every rank holds (router, shared
    expert) need data parallelism, which averages their gradients (docs/training.md).

    Args:
        comm: determines the number of experts, top_k, hidden size H, dtype, and which experts this rank holds.
        intermediate_size, capacity, dynamic, format, combine_format, dtype, seed, gemms, rows, places, redispatch: as
            for :class:`ep_ops.nn.Experts`.
        router: a module that returns (topk_idx, topk_weights, logits) for x, as described by :class:`ep_ops.nn.Routed`.
            None: ``Router(E, H, top_k)``, a softmax router.
        shared_intermediate_size: width of a shared expert, which processes every token on the rank of the token. It
            runs while rows are dispatched (unless ``dynamic``). Its dtype is ``dtype``, or ``comm.dtype`` if the others
            are e4m3. 0: no shared expert.

    Raises:
        TypeError: ``comm`` is not a communicator.
        ValueError: a size, a format, ``gemms``, ``rows``, ``places``, ``redispatch`` or the split of the experts is not
            supported.
    """

    def __init__(
        self, comm: Communicator, intermediate_size: int, *, router: nn.Module | None = None,
        capacity: int | None = None, dynamic: bool = False, shared_intermediate_size: int = 0, format: str = "",
        combine_format: str = "", dtype: torch.dtype | None = None, seed: int = 0, gemms: str | Gemms = "auto",
        rows: str = GROUPED, places: int | None = None, redispatch: bool = False,
    ) -> None:  # fmt: skip
        check_types(Communicator, comm=comm)
        check_complete(comm, type(self).__name__)
        super().__init__()
        self.comm, self.num_experts = comm, comm.num_experts
        device = default_device(comm)
        if router is None:
            router = Router(comm.num_experts, comm.hidden_size, comm.top_k, seed=seed, device=device)
        self.router = router
        self.experts = Experts(
            comm, intermediate_size, capacity=capacity, dynamic=dynamic, format=format, combine_format=combine_format,
            dtype=dtype, seed=seed, gemms=gemms, rows=rows, places=places, redispatch=redispatch,
        )  # fmt: skip
        dtype = comm.dtype if dtype in (None, ELEMENT) else dtype
        self.shared = shared_expert(comm.hidden_size, shared_intermediate_size, dtype, device, seed)

    @ranged("ep_ops.nn.moe_layer")
    def forward(self, x: Tensor, max_tokens: int | None = None, return_routing: bool = False) -> Any:
        """Return the layer's output, with shape and dtype of x. Collective.

        Args:
            x: tokens [T, H] or [B, S, H] in ``comm.dtype``. T (B times S) is 0 to ``comm.max_tokens_per_rank`` and may
                differ between ranks.
            max_tokens: as for :meth:`Experts.forward`.
            return_routing: whether to return (output, :class:`Routing`) instead of the output.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`ep_ops.Communicator.dispatch`.
        """
        split = self.experts.splits(self.shared)
        self.experts.check_tokens(x, max_tokens, split=split)
        routed = self.experts.before_sending(functools.partial(self._routed, x), max_tokens, split=split)
        topk_idx, topk_weights, logits = routed
        out, dropped = self.experts(
            x, topk_idx, topk_weights, max_tokens=max_tokens, shared=self.shared, return_dropped=True
        )
        if not return_routing:
            return out
        counts = expert_counts(topk_idx, self.num_experts)
        return out, Routing(topk_idx, topk_weights, logits, counts, dropped)

    def steps(self, x: Tensor, flight: int = 0, max_tokens: int | None = None) -> Iterator[Tensor | None]:
        """Run ``forward`` in steps, for :func:`ep_ops.nn.interleave`. Collective.

        Args:
            x, max_tokens: as for :meth:`forward`.
            flight: 0 or 1, to distinguish two micro-batches that are in progress at the same time.

        Yields:
            None between the start and the wait of dispatch and of combine, then the output.

        Raises:
            RuntimeError: ``dynamic`` is True, or the flight is in use. Other errors as for :meth:`forward`.
        """
        self.experts.check_tokens(x, max_tokens, split=True, flight=flight)
        route = functools.partial(self._routed, x)
        topk_idx, topk_weights, _ = self.experts.before_sending(route, max_tokens, split=True, flight=flight)
        for done in self.experts.steps(
            x, topk_idx, topk_weights, flight=flight, max_tokens=max_tokens, shared=self.shared
        ):
            yield None if done is None else done.out

    def _routed(self, x: Tensor) -> Sequence[Any]:
        """Return the three parts of the router's result. TypeError for another result."""
        found = self.router(x)
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            given = f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, (tuple, list)) else "")
            raise TypeError(f"router returned {given}; allowed: (topk_idx, topk_weights, logits), see ep_ops.nn.Routed")
        return found


class DenseMoE(nn.Module):
    """A dense model with all experts on every rank and no communication, to compare ``MoELayer`` with.

    With the sizes and seed of a ``MoELayer`` it has the same initial weights and parameter names, and the same outputs
    up to rounding. Every expert runs on every token, which is slow.

    Args:
        comm: determines the number of experts, top_k, hidden size and dtype.
        intermediate_size, shared_intermediate_size, seed: as for :class:`MoELayer`.
    """

    def __init__(
        self, comm: Communicator, intermediate_size: int, *, shared_intermediate_size: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        if isinstance(comm, Communicator):  # any object with these sizes works
            check_complete(comm, "DenseMoE")
        self.router = Router(comm.num_experts, comm.hidden_size, comm.top_k, seed=seed)
        self.experts = DenseExperts(range(comm.num_experts), comm.hidden_size, intermediate_size, comm.dtype, seed)
        self.shared = shared_expert(comm.hidden_size, shared_intermediate_size, comm.dtype, None, seed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, with shape and dtype of x."""
        topk_idx, topk_weights, _ = self.router(x)
        out = self.experts(x, topk_idx, topk_weights)
        return out if self.shared is None else out + self.shared(x)


class DenseExperts(nn.Module):
    """Experts that are all applied to every token."""

    def __init__(self, experts: range, hidden_size: int, intermediate_size: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        shapes = torch.Size((hidden_size, 2 * intermediate_size)), torch.Size((intermediate_size, hidden_size))
        self.w_in, self.w_out = (
            nn.Parameter(torch.stack([draw_expert(shape, seed, e, which).to(dtype) for e in experts]))
            for which, shape in enumerate(shapes)
        )

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs, with shape and dtype of x."""
        out = torch.zeros_like(x, dtype=exact_dtype(x.dtype))
        for e in range(self.w_in.shape[0]):
            weight = (topk_weights * (topk_idx == e)).sum(dim=-1, keepdim=True)
            out = out + weight * (swiglu(x @ self.w_in[e]) @ self.w_out[e])
        return out.to(x.dtype)


class SwiGLU(nn.Module):
    """One expert for every token: x [T, H] -> [T, H], with w_in [H, 2F] and w_out [F, H]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device | None, seed: int
    ) -> None:
        super().__init__()
        self.seed = seed
        self.w_in = nn.Parameter(torch.empty(hidden_size, 2 * intermediate_size, dtype=dtype, device=device))
        self.w_out = nn.Parameter(torch.empty(intermediate_size, hidden_size, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights.

        Call it after ``to_empty``, also if FSDP2 has sharded the parameters. Does nothing on the meta device.
        """
        for which, name in enumerate(("w_in", "w_out")):
            shape = getattr(self, name).shape
            fill_weight(self, name, functools.partial(draw_expert, shape, self.seed, -1, which))

    def forward(self, x: Tensor) -> Tensor:
        """Return the expert's output, with shape and dtype of x. The weights are converted to it."""
        return swiglu(x @ self.w_in.to(x.dtype)) @ self.w_out.to(x.dtype)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu of the first half times the second half: [..., 2F] -> [..., F].

    Raises:
        TypeError: ``gate_and_up`` is not a tensor.
        ValueError: its last dimension is odd.
    """
    check_types(Tensor, gate_and_up=gate_and_up)
    if gate_and_up.dim() == 0 or gate_and_up.shape[-1] % 2:
        raise ValueError(f"gate_and_up has shape {tuple(gate_and_up.shape)}; allowed: [..., 2F]")
    gate, up = gate_and_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def shared_expert(
    hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device | None, seed: int
) -> SwiGLU | None:
    """Return the expert that all tokens use, or None for size 0."""
    check_size("shared_intermediate_size", intermediate_size, 0)
    return SwiGLU(hidden_size, intermediate_size, dtype, device, seed) if intermediate_size else None
